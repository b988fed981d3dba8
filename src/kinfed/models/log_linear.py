"""Log-linear: numbers above zero as products of their inputs' powers, and of exponentials of other inputs."""

import math

import torch
from torch import Tensor, nn

from ..data.tables.columns import Number
from ..data.tables.schema import Description
from ..errors import UsageError

SKEWED = 0.3  # a column's deviation over its mean, from which a logarithm is worth an input
SMALL = 0.1  # of a column's median, up to which its logarithm is a line: columns may hold zeros
STEEP = 10.0  # the largest logarithm of the mean over a target
MOST = 50.0  # an answer's deviations from the mean at most: rows unlike those of the training would have it explode


class LogLinear(nn.Module):
    """The head reads the flat inputs x, and logarithms of those that are `skewed`."""

    def __init__(self, inputs: int, outputs: int, skewed: list[tuple[int, float, float]], ratio: float) -> None:
        """`skewed` has an input's place, and the factor and shift by which it becomes a multiple of `SMALL` medians.

        `ratio` is the mean of targets over their deviation.
        """
        super().__init__()
        self.flat, self.skewed = nn.Flatten(), skewed
        self.head = Exponential(inputs + len(skewed), outputs, ratio)

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] inputs to [B, outputs]."""
        x = self.flat(x)
        logs = [(x[:, at, None] * factor + shift).asinh() - math.asinh(1 / SMALL) for at, factor, shift in self.skewed]
        return self.head(torch.cat([x, *logs], 1))

    @property
    def sources(self) -> list[int]:
        """[f] the place of the input that each input of the head is made of."""
        return [*range(self.head.in_features - len(self.skewed)), *(at for at, _, _ in self.skewed)]


class Exponential(nn.Linear):
    """mean exp(Wx + b), in deviations from the mean of targets, which is `ratio` deviations."""

    def __init__(self, inputs: int, outputs: int, ratio: float) -> None:
        super().__init__(inputs, outputs)
        self.ratio, self.steepest = ratio, math.log1p(MOST / ratio)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs] to [B, outputs]."""
        return self.ratio * torch.expm1(super().forward(x).clamp(max=self.steepest))

    def link(self, outputs: Tensor) -> Tensor:
        """Wx + b for these outputs: the logarithm of numbers over their mean."""
        return torch.log((1 + outputs / self.ratio).clamp(min=math.exp(-STEEP)))


def log_linear(shape: tuple[int, ...], classes: int, *, columns: Description | None) -> nn.Module:
    """[B, *shape] -> [B, classes], for tables whose one target is above zero; `partial-pooling` solves its head.

    Raises UsageError for other data.
    """
    target = columns.targets[0] if columns is not None and len(columns.targets) == 1 else None
    if columns is None or target is None or target.classes or not target.mean > 0:
        raise UsageError("log-linear: it predicts one number above zero from a table's columns")
    skewed, at = [], 0
    for column in columns.inputs:
        if isinstance(column, Number) and column.median > 0 and SKEWED * column.mean < column.deviation < 1e9:
            unit = SMALL * column.median
            skewed.append((at, column.deviation / unit, column.mean / unit))
        at += len(column.parts)
    return LogLinear(math.prod(shape), classes, skewed, target.mean / target.deviation)
