"""Agreement: how far clients agree on which way a number that they share should move."""

import torch
from torch import Tensor


def agreed(slopes: Tensor) -> Tensor:
    """[...] in [-1, 1]: the mean of slopes: [..., K] of K clients over their root mean square, without what is chance.

    K slopes that agree on nothing have a squared ratio of 1 / K on average, so a ratio of r counts as
    r max(0, 1 - 1 / (K r^2)), which is the rule of James and Stein. One client's slope counts as nothing.
    """
    largest = slopes.abs().amax(-1, keepdim=True)
    slopes = slopes / largest.where(largest > 0, 1)  # so that squares do not underflow
    mean, square = slopes.mean(-1), slopes.square().mean(-1)
    ratio = mean / square.sqrt().clamp(min=1e-12)
    chance = square / (slopes.shape[-1] * mean.square()).clamp(min=1e-12)
    return ratio * (1 - chance).clamp(min=0)


def vary(rows: Tensor) -> Tensor:
    """[...] bool: whether the numbers of rows: [..., M] differ by more than rounding errors."""
    spread = rows.amax(-1) - rows.amin(-1)
    return spread > 32 * torch.finfo(rows.dtype).eps * rows.abs().amax(-1)
