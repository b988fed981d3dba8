"""Changes: forecasts of series as changes since the last reading, by the changes before it (NLinear and an MLP)."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..ops.fused import FORMS, FromLast, Linear, Unfused, parts


class Changes(nn.Module):
    """Readings less the last one, and what stands beside them, go through the layers, and the last one is added again.

    `widths` are those of the hidden layers, each with ReLU; none are between the window and the head.
    """

    def __init__(self, past: int, features: int, outputs: int, widths: Sequence[int] = ()) -> None:
        super().__init__()
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (before, after) in enumerate(pairwise([past * features, *widths]), start=1):
            layers[f"fc{i}"], layers[f"relu{i}"] = nn.Linear(before, after), nn.ReLU()
        self.hidden = nn.Sequential(layers)
        self.head = Since([past * features, *widths][-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, past, F] windows, whose first feature is the reading, to [B, outputs]."""
        last = x[:, -1, :1]  # [B, 1]
        z = self.hidden(torch.cat([x[..., 0] - last, x[..., 1:].flatten(1)], 1))
        return self.head(torch.cat([z, last], 1))


class Since(nn.Linear):
    """Wx + b + a start, of which there are `starts`, the last inputs: one for each output, or one for all."""

    def __init__(self, inputs: int, outputs: int, starts: int = 1) -> None:
        super().__init__(inputs, outputs)
        self.starts = starts

    def forward(self, z: Tensor) -> Tensor:
        """[B, inputs + starts] to [B, outputs]."""
        return super().forward(z[..., : -self.starts]) + z[..., -self.starts :]


def _fuse(m: Changes, path: str) -> list[Any]:
    if type(m.head) is not Since:
        raise Unfused(f"{type(m.head).__name__} in place of a head has no fused form")
    return [FromLast([*parts(m.hidden, f"{path}hidden."), Linear(m.head, f"{path}head.")])]


FORMS[Changes] = _fuse


def changes(shape: tuple[int, ...], classes: int) -> nn.Module:
    """[B, past, F] -> [B, classes], for windows of series (Zeng et al. 2023, doi:10.1609/aaai.v37i9.26317, NLinear).

    A series may have moved away from where it was in training, because nothing depends on its level. `partial-pooling`
    solves its head. Raises UsageError for examples that are no windows.
    """
    return Changes(*_check_windows("changes", shape), classes)


def changes_mlp(shape: tuple[int, ...], classes: int, *, hidden: Sequence[int] = (64,)) -> nn.Module:
    """The same with fully connected layers of the `hidden` widths, each followed by ReLU, before the head.

    [B, past, F] -> [B, classes]. An MLP of readings answers wildly where a series has left the levels of its training,
    and this one does not. Raises UsageError for examples that are no windows, or a width below 1.
    """
    if any(width < 1 for width in hidden):
        raise UsageError(f"changes-mlp: hidden widths must be at least 1; got {list(hidden)}")
    return Changes(*_check_windows("changes-mlp", shape), classes, hidden)


def _check_windows(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """How many readings and features a window has; raises UsageError for examples that are no windows."""
    if len(shape) != 2 or not math.prod(shape):
        raise UsageError(f"{name}: an example must be a window of readings [past, features]; got shape {list(shape)}")
    return shape[0], shape[1]
