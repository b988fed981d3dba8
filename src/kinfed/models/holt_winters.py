"""Holt-Winters: forecasts of series by a level, a damped trend and a season, smoothed over the readings of a window."""

import itertools
import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from ..core.field_checks import Count
from ..errors import UsageError
from .changes import Since
from .estimator import Estimator

LEVELS = (0.02, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
TRENDS = ((0.0, 0.0), (0.05, 0.9), (0.05, 1.0), (0.2, 0.9), (0.2, 1.0))  # and damping, of which 0 leaves no trend
SEASONS = (0.0, 0.1, 0.3, 0.5)


class HoltWinters(Estimator):
    """A forecast by exponential smoothing, a constant, and a share of the way from the last level to the window's mean.

    `constants` are those that smooth the level, the trend and the season, and that damp the trend.
    """

    def __init__(self, past: int, outputs: int, season: int) -> None:
        super().__init__()
        self.past, self.season = past, season
        self.constants = nn.Parameter(torch.tensor([0.2, 0.05, 0.1, 0.9]))
        self.head = Since(1, outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, past, F] windows, whose first feature is the reading, to [B, outputs]."""
        readings = x[..., 0]
        level, forecasts = smooth(readings, self.constants, self.season, self.head.out_features)
        away = readings.mean(1) - level
        return self.head(torch.cat([away[:, None], forecasts], 1))

    @torch.no_grad()
    def fit(self, x: Tensor, y: Tensor, w: Tensor) -> None:
        """Take the constants of a grid that have the least squared error, and add nothing to their forecasts."""
        readings = x[..., 0]
        square, product = readings.T @ (w[:, None] * readings), readings.T @ (w[:, None] * y)
        weights = _weigh_readings(self.past, self.season, y.shape[1]).to(x)
        errors = (weights * (square @ weights - 2 * product)).sum((1, 2))
        self.constants.copy_(_list_constants(self.season)[errors.argmin()])
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


def smooth(readings: Tensor, constants: Tensor, season: int, steps: int) -> tuple[Tensor, Tensor]:
    """[...] the last level of readings: [..., past], and [..., steps] forecasts, by Holt-Winters' additive method.

    constants: [..., 4], which may have more axes in front. The first season is the profile to begin with. The trend
    begins as the rise of the second season's mean over the first's, unless its damping of 0 leaves none. Equations
    after Hyndman and Athanasopoulos 2021, "Forecasting: Principles and Practice", 8.3.
    """
    level_rate, trend_rate, season_rate, damping = constants.unbind(-1)
    past = readings.shape[-1]
    middle, begin = (season - 1) / 2, readings[..., :season].mean(-1)
    rise = readings[..., season : 2 * season].mean(-1) - begin if past >= 2 * season else torch.zeros_like(begin)
    trend = (damping > 0) * rise / season
    level = begin + middle * trend
    profile = [readings[..., step] - begin - (step - middle) * trend for step in range(season)]
    for step in range(season, past):
        at = step % season
        expected = level + damping * trend
        error = readings[..., step] - expected - profile[at]
        level = expected + level_rate * error
        trend = damping * trend + level_rate * trend_rate * error
        profile[at] = profile[at] + season_rate * error
    reach, forecasts = torch.zeros_like(damping), []
    for step in range(past, past + steps):
        reach = damping * (1 + reach)  # the damping to the powers 1 to h
        forecasts.append(level + reach * trend + profile[step % season])
    return level, torch.stack(forecasts, -1)


@lru_cache(8)
def _weigh_readings(past: int, season: int, steps: int) -> Tensor:
    """[G, past, steps] the weights of readings in a forecast, with each of the constants that are tried.

    A forecast is a sum of readings times weights, and these are the forecasts for windows with a 1 among zeros.
    """
    units = torch.eye(past, dtype=torch.float64)
    return smooth(units, _list_constants(season).double()[:, None], season, steps)[1]


def _list_constants(season: int) -> Tensor:
    """[G, 4] the constants that are tried, those without a trend or a season first."""
    tried = [
        (level, trend, profile, damping)
        for (trend, damping), profile, level in itertools.product(
            TRENDS, SEASONS if season > 1 else SEASONS[:1], LEVELS
        )
        if profile <= 1 - level or not profile
    ]
    return torch.tensor(tried)


def holt_winters(shape: tuple[int, ...], classes: int, *, season: Count = 1) -> nn.Module:
    """[B, past, F] -> [B, classes], for windows of series: smoothing of a level, a damped trend and a season's profile.

    `standard` finds the constants of each client. The smoothing begins anew in each window. Raises UsageError for
    examples that are no windows, and for a season that is longer than the past.
    """
    if len(shape) != 2 or not math.prod(shape):
        raise UsageError(
            f"holt-winters: an example must be a window of readings [past, features]; got shape {list(shape)}"
        )
    if not isinstance(season, int) or not 1 <= season <= shape[0]:
        raise UsageError(f"holt-winters: a season has from 1 to {shape[0]} steps, those of the past; got {season!r}")
    return HoltWinters(shape[0], classes, season)
