"""Uploads as numbers to be summed: what a site puts under its mask, and what the server reads from the sum."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kinfed.core import trees
from kinfed.core.private.privacy import Privacy
from kinfed.core.private.private_sums import clip, find_noise, find_origins
from kinfed.core.private.private_training import SecretLots
from kinfed.core.trees import Tree
from kinfed.errors import UsageError

from .fixed_point import FixedPoint

FEW, ROUNDING = 10, 1e-4  # training rows of a small site, and what of its mean may be lost
FARTHEST = 18  # deviations: no normal number of `SecretLots` lies farther from 0
Numbers = NDArray[np.float64]


def find_share(privacy: Privacy, rounds: int) -> float:
    """The deviation of the noise that one site adds: that of as many as must be in a sum makes up the whole."""
    if privacy.epsilon is None or privacy.unit != "client":
        return 0.0
    return find_noise(privacy, rounds) * privacy.clip / math.sqrt(privacy.members)


def find_largest(privacy: Privacy, rounds: int) -> float:
    """The largest size that a number under a mask can have; of clients that are protected it follows from the noise."""
    share = find_share(privacy, rounds)
    return privacy.clip + FARTHEST * share if share else max(privacy.largest, 1.0)


def flatten_upload(privacy: Privacy, rounds: int, sent: Tree, upload: Tree, weight: float) -> Numbers:
    """[m + 1] what a site puts under its mask: its upload, [...] each, and how it counts in means, as a share of all.

    Means are multiplied by that share, `weight` over the plan's `rows`, so that no server chooses who counts. If
    clients are protected, it is the clipped change of the upload that is added up, with this site's share of the noise.
    """
    share = find_share(privacy, rounds)
    tensors = {name: t.double() for name, t in trees.pack(upload).items()}
    origins = find_origins(sent, upload)
    if share:
        changes = {name: t - _as_double(origins.get(name, 0.0)) for name, t in tensors.items()}
        lots = SecretLots()
        noised = {
            name: t + share * lots.draw_normal(torch.zeros(()), t) for name, t in clip(changes, privacy.clip).items()
        }
        return _join([*noised.values()], 1.0)
    if not 0 <= weight <= privacy.rows:
        raise UsageError(
            f"its training rows count as {weight:,g}, more than privacy.rows of the plan, {privacy.rows:,}; all sites "
            "must agree to a plan with more"
        )
    if (most := max((float(t.abs().max()) for t in tensors.values() if t.numel()), default=0.0)) > privacy.largest:
        raise UsageError(
            f"its upload holds a number of size {most:.3g}, above privacy.largest of the plan, {privacy.largest:g}; "
            "all sites must agree to a plan with more"
        )
    part = weight / privacy.rows
    return _join([part * t if name in origins else t for name, t in tensors.items()], part)


def read_sum(privacy: Privacy, rounds: int, sent: Tree, like: Tree, total: Numbers) -> Tree:
    """The means and sums of so many uploads like `like`: [...] each, from the sum of all: [m + 1]."""
    weight = float(total[-1])
    if weight <= 0:
        raise UsageError("no site counts in the mean, as all have the weight 0")
    origins, noised = find_origins(sent, like), bool(find_share(privacy, rounds))
    given, begin = {}, 0
    for name, t in trees.pack(like).items():
        values = torch.from_numpy(total[begin : begin + t.numel()].copy()).view(t.shape)
        begin += t.numel()
        if name in origins:
            values = values / weight
            values = values + _as_double(origins[name]) if noised else values
        given[name] = values.to(t.dtype) if t.is_floating_point() else values.round().to(t.dtype)
    return trees.unpack(given, like)


def check_digits(privacy: Privacy, rounds: int) -> None:
    """Raise UsageError if fixed point leaves so few digits that rounding moves a mean by more than `ROUNDING`.

    Of a mean each site uploads its share, which is least if sites have few rows and the plan allows many. The noise of
    clients that are protected is far larger than their rounding.
    """
    form = FixedPoint(find_largest(privacy, rounds), privacy.members)
    if not find_share(privacy, rounds) and 2.0**-form.bits * privacy.rows / (2 * FEW) > ROUNDING:
        raise UsageError(
            f"privacy.largest={privacy.largest:g} and privacy.rows={privacy.rows:,} leave too few digits for a mean "
            f"over sites of {FEW} rows, which rounding would move by more than {ROUNDING:g}; lower one of them"
        )


def count_numbers(like: Tree) -> int:
    """How many numbers a site puts under its mask."""
    return sum(t.numel() for t in trees.pack(like).values()) + 1


def _as_double(origin: Tensor | float) -> Tensor | float:
    return origin.double() if isinstance(origin, Tensor) else origin


def _join(tensors: list[Tensor], share: float) -> Numbers:
    return np.concatenate([*(t.reshape(-1).numpy() for t in tensors), [share]])
