"""Changes: forecasts of series as changes since the last reading, linear in the changes before it (NLinear)."""

import math

import torch
from torch import Tensor, nn

from ..errors import UsageError


class Changes(nn.Module):
    """Readings less the last one go into the head with what stands beside them, and the last one is added again."""

    def __init__(self, past: int, features: int, outputs: int) -> None:
        super().__init__()
        self.head = Since(past * features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, past, F] windows, whose first feature is the reading, to [B, outputs]."""
        last = x[:, -1, :1]  # [B, 1]
        outputs: Tensor = self.head(torch.cat([x[..., 0] - last, x[..., 1:].flatten(1), last], 1))
        return outputs


class Since(nn.Linear):
    """Wx + b + a start, of which there are `starts`, the last inputs: one for each output, or one for all."""

    def __init__(self, inputs: int, outputs: int, starts: int = 1) -> None:
        super().__init__(inputs, outputs)
        self.starts = starts

    def forward(self, z: Tensor) -> Tensor:
        """[B, inputs + starts] to [B, outputs]."""
        return super().forward(z[..., : -self.starts]) + z[..., -self.starts :]


def changes(shape: tuple[int, ...], classes: int) -> nn.Module:
    """[B, past, F] -> [B, classes], for windows of series (Zeng et al. 2023, doi:10.1609/aaai.v37i9.26317, NLinear).

    A series may have moved away from where it was in training, because nothing depends on its level. `partial-pooling`
    solves its head. Raises UsageError for examples that are no windows.
    """
    if len(shape) != 2 or not math.prod(shape):
        raise UsageError(f"changes: an example must be a window of readings [past, features]; got shape {list(shape)}")
    return Changes(*shape, classes)
