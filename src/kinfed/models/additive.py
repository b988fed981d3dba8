"""Additive: a curve of straight pieces for each number, added up (Hastie and Tibshirani, 1986), by one linear layer."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from ..data.tables.columns import Calendar, Number
from ..data.tables.schema import Description
from ..errors import UsageError
from ..ops.fused import FORMS, Plain, parts

KNOTS = (-1.2, -0.6, 0.0, 0.6, 1.2)  # where pieces meet, in deviations from an input's mean
CUT = 3.0  # deviations from the mean, beyond which a curve goes on as it has begun, with no more of its bends


class Additive(nn.Module):
    """The head reads the flat inputs, and relu(x - knot) of those that are `bent`, cut at `CUT`."""

    def __init__(self, inputs: int, outputs: int, bent: list[int]) -> None:
        super().__init__()
        self.flat, self.bent = nn.Flatten(), bent
        self.head = nn.Linear(inputs + len(KNOTS) * len(bent), outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_pieces(self.flat(x), self.bent))

    @property
    def sources(self) -> list[int]:
        """[f] the place of the input that each input of the head is made of."""
        pieces = len(KNOTS) * len(self.bent)
        return [*range(self.head.in_features - pieces), *self.bent * len(KNOTS)]


def _pieces(x: Tensor, bent: list[int]) -> Tensor:
    """[..., inputs + pieces] the inputs, x: [..., inputs], and the pieces of those that are bent."""
    numbers = x[..., bent].clamp(-CUT, CUT)
    return torch.cat([x, *((numbers - knot).relu() for knot in KNOTS)], -1)


FORMS[Additive] = lambda m, path: [*parts(m.flat), Plain(partial(_pieces, bent=m.bent)), *parts(m.head, f"{path}head.")]


def additive(shape: tuple[int, ...], classes: int, *, columns: Description | None = None) -> nn.Module:
    """[B, *shape] -> [B, classes]: linear in each input's curve, of which a table's numbers and years have one.

    Where there are no columns every input has one. `partial-pooling` solves its head. Raises UsageError for a shape
    without axes.
    """
    if not shape or min(shape) < 1:
        raise UsageError(f"additive: an example needs an axis or more, none of them empty; got shape {list(shape)}")
    inputs = math.prod(shape)
    return Additive(inputs, classes, bent_inputs(inputs, columns))


def bent_inputs(inputs: int, columns: Description | None) -> list[int]:
    """The places of inputs that are numbers on a scale, and no flags of categories."""
    if columns is None:
        return list(range(inputs))
    places, at = [], 0
    for column in columns.inputs:
        if isinstance(column, Number | Calendar):
            places.append(at)  # the first of their inputs: the number, or the year
        at += len(column.parts)
    return places
