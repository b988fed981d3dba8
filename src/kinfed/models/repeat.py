"""Repeat: forecasts of series as their last value or season once more, and by how much readings then differ from it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core.field_checks import Count
from ..errors import UsageError
from .changes import Since
from .estimator import Estimator

WINDOWS = 20_000  # on which seasons are compared


class Repeat(Estimator):
    """The last `season` readings again and again, a constant, and a share of the way back to the window's mean."""

    def __init__(self, past: int, outputs: int, season: int) -> None:
        super().__init__()
        self.season, self.places = season, places_of_season(past, season, outputs)
        self.head = Since(1, outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, past, F] windows, whose first feature is the reading, to [B, outputs]."""
        readings = x[..., 0]
        away = readings.mean(1, keepdim=True) - readings[:, -self.season :].mean(1, keepdim=True)
        return self.head(torch.cat([away, readings[:, self.places]], 1))

    def fit(self, x: Tensor, y: Tensor, w: Tensor) -> None:
        """Add nothing to the readings that are repeated, whatever the rows say."""
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


def places_of_season(past: int, season: int, steps: int) -> list[int]:
    """[steps] the places, in a window of `past` readings, of what a forecast that repeats the last season takes."""
    return [past - season + step % season for step in range(steps)]


def find_season(readings: Tensor, y: Tensor, seasons: Sequence[int]) -> int:
    """The season after which the next readings, y: [n, H], are most like those of windows, readings: [n, past]."""
    stride = -(-len(readings) // WINDOWS)
    readings, y = readings[::stride], y[::stride]
    places = [places_of_season(readings.shape[1], season, y.shape[1]) for season in seasons]
    errors = torch.stack([(readings[:, at] - y).abs().nanmean() for at in places])
    return seasons[int(errors.argmin())]


def repeat(shape: tuple[int, ...], classes: int, *, season: Count = 1) -> nn.Module:
    """[B, past, F] -> [B, classes], for windows of series: the last value, or season, by which forecasts are judged.

    The head adds what series gain on average after so many steps, and a share of the distance from the season to the
    window's mean. `partial-pooling` solves it; with zeros it is the naive forecast. Raises UsageError for examples that
    are no windows, and for a season that is longer than the past.
    """
    if len(shape) != 2 or not math.prod(shape):
        raise UsageError(f"repeat: an example must be a window of readings [past, features]; got shape {list(shape)}")
    if not isinstance(season, int) or not 1 <= season <= shape[0]:
        raise UsageError(f"repeat: a season has from 1 to {shape[0]} steps, those of the past; got {season!r}")
    return Repeat(shape[0], classes, season)
