"""A ridge of a client's own beside what all clients share: of numbers, how likely either is by the client's rows.

Coefficients and densities follow from sums of products: [f + 1, f + 1] of a client's inputs, with their 1, and its
targets, whose variance is about 1. The mean of answers by their densities is Bayesian model averaging (Hoeting et al.
1999, doi:10.1214/ss/1009212519, Equations 1 to 3). No row is held back for it, and nothing leaves the client.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NOISES = (-3, 2, 11)  # powers of 10 by which a client's noise may differ from the usual one, and how many
DIFFER = 2.0  # the deviation of their logarithms, before rows count
PENALTIES = (-2, 3, 16)  # powers of 10, and how many, of ridges
CONSTANT = 1e-9  # of a column's mean square, the variance below which it is the same in all rows of a client


class About(NamedTuple):
    """Centres about which a client's coefficients may be, before its rows count."""

    centres: Tensor  # [K, f]
    shares: Tensor  # [K] how likely they are about each
    spread: Tensor  # [f] their variances about it


def lean(products: Tensor, rows: Tensor, shared: Sequence[About], usual: Tensor, odds: float = 1.0) -> Tensor:
    """[f] the mean of a client's coefficients about centres that all share, and of ridges of its own, as its rows say.

    usual: [] is the noise that all share. The ridges are `odds` times as likely as the centres before. A client without
    rows has the mean of the centres.
    """
    factors = torch.logspace(*NOISES, dtype=usual.dtype, device=usual.device)
    before = (-(factors.log() / DIFFER).square() / 2).log_softmax(0)  # [M]
    candidates, likely = list[Tensor](), list[Tensor]()
    for noise, chance in zip(factors * usual, before, strict=True):
        for centres, shares, spread in shared:
            away, _, density = place_about(products, rows, centres, spread, noise)
            candidates.append(centres + away)
            likely.append(density + shares.log() + chance)
    alone, density = solve_ridges(products, rows, factors * usual)
    density = torch.where(rows > 0, density + before[:, None] + math.log(odds), -torch.inf)
    candidates.append(alone.repeat(len(factors), 1))
    return torch.cat([*likely, density.flatten()]).softmax(0) @ torch.cat(candidates)


def place_about(
    products: Tensor, rows: Tensor, centres: Tensor, spread: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """[K, f] how far a client's coefficients are from centres: [K, f], [f, f] their covariance, and [K] densities.

    Coefficients vary by spread: [f] about a centre, and targets by noise: []. A density is that of the client's
    targets, coefficients integrated out, as a logarithm, less a constant.
    """
    root, inputs, slope = spread.sqrt(), products[:-1, :-1], products[:-1, -1]
    inside = root[:, None] * inputs * root / noise + torch.eye(len(root)).to(root)
    covariance = root[:, None] * torch.linalg.inv(inside) * root
    rest = slope - centres @ inputs  # [K, f]
    away = rest @ covariance / noise
    squares = products[-1, -1] - 2 * centres @ slope + torch.einsum("kf,fg,kg->k", centres, inputs, centres)
    left = (squares - (away * rest).sum(1)) / noise
    return away, covariance, -(rows * noise.log() + torch.logdet(inside) + left) / 2


def solve_ridges(products: Tensor, rows: Tensor, noises: Tensor) -> tuple[Tensor, Tensor]:
    """[P, f] coefficients of ridges of a client's own, and [M, P] the logarithms of densities with noises: [M].

    P penalties are as likely. A ridge is about the client's own mean, in deviations of its own columns. The mean is of
    a Cauchy distribution, so that it may be far away.
    """
    count = rows.clamp(min=1)
    mean = products[-2] / count  # [f + 1] of the inputs, the 1 and the target
    around = products - count * mean[:, None] * mean
    inputs, slope = around[:-2, :-2], around[:-2, -1]
    varies = inputs.diagonal() > CONSTANT * products.diagonal()[:-2]
    root = varies / torch.where(varies, inputs.diagonal() / count, 1).sqrt()
    penalties = torch.logspace(*PENALTIES, dtype=inputs.dtype, device=inputs.device)
    inside = root[:, None] * inputs * root / penalties[:, None, None] + torch.eye(len(root)).to(root)
    right = (root * slope).expand(len(penalties), -1)[..., None]
    slopes = root * torch.linalg.solve(inside, right)[..., 0] / penalties[:, None]  # [P, f - 1]
    left = (around[-1, -1] - slopes @ slope).clamp(min=0)
    density = -((count - 1) * noises.log()[:, None] + torch.logdet(inside) + left / noises[:, None]) / 2
    centred = math.log(2 / math.pi) / 2 - count.log() / 2 - (1 + mean[-1].square()).log()
    coefficients = torch.cat([slopes, (mean[-1] - slopes @ mean[:-2])[:, None]], 1)
    return coefficients, density + centred - math.log(len(penalties))
