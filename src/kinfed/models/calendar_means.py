"""Calendar means: forecasts of series by what readings were on average at the same time of day, week or year."""

import math

import torch
from torch import Tensor, nn

from ..core.field_checks import Count
from ..errors import UsageError
from .estimator import Estimator

NEVER = 1e6  # in place of a time that no window has
MANY = 1 << 14  # windows whose times are told at once
SAME = 1e-5  # codes that differ by less are of the same time
RATIOS = (math.sqrt(2), math.sqrt(3), math.sqrt(5))  # irrational, so that no two steps of a window weigh alike


class CalendarMeans(Estimator):
    """The mean of all readings, and how much that after windows at the same time differs from it; `fit` finds both.

    Two windows are at the same time if what stands beside the readings, the calendar, is the same at all their steps.
    Three sums of it with different weights tell.
    """

    code: Tensor  # [K, 3] of the times that are known

    def __init__(self, outputs: int, times: int) -> None:
        super().__init__()
        self.register_buffer("code", torch.full((times, len(RATIOS)), NEVER))
        self.head = nn.Linear(times, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, past, F] windows, whose first feature is the reading, to [B, outputs]."""
        gaps = (encode_time(x)[:, None] - self.code).abs().amax(2)  # [B, K]
        return self.head((gaps < SAME).to(x.dtype))

    @torch.no_grad()
    def fit(self, x: Tensor, y: Tensor, w: Tensor) -> None:
        """Take the weighted means of the targets, of all and at each time."""
        codes, at = encode_time(x).unique(dim=0, return_inverse=True)
        if len(codes) > len(self.code):
            raise UsageError(
                f"calendar-means has places for {len(self.code)} times, and a client's windows are at {len(codes)}; "
                f"set model.times={len(codes)} or more"
            )
        mean = (w @ y) / w.sum().clamp(min=1e-30)
        size = torch.zeros_like(codes[:, 0]).index_add_(0, at, w).clamp(min=1e-30)
        away = torch.zeros(len(codes), y.shape[1]).to(y).index_add_(0, at, w[:, None] * (y - mean)) / size[:, None]
        self.code.fill_(NEVER)
        self.code[: len(codes)] = codes
        nn.init.zeros_(self.head.weight)
        self.head.weight[:, : len(codes)] = away.T
        self.head.bias.copy_(mean)


def encode_time(x: Tensor) -> Tensor:
    """[B, 3] numbers that are the same for windows x: [B, past, F] at the same time, and differ for others."""
    beside = x[..., 1:].flatten(1)
    step = torch.arange(1, beside.shape[1] + 1, dtype=torch.float64)
    # Positive, so that a shift of all steps does not cancel, and squares, because multiples would be too regular.
    weights = torch.stack([1 + (step.square() * ratio) % 1 for ratio in RATIOS], 1).to(x)
    return (beside[..., None] * weights).mean(1)


def count_times(x: Tensor, rows: Tensor) -> int:
    """How many times the windows in rows: [n] of x: [m, past, F] are at; 1 if nothing stands beside the readings."""
    if x.shape[2] == 1:
        return 1
    codes = [encode_time(x[part].double()).unique(dim=0) for part in rows.split(MANY)]
    return len(torch.cat(codes).unique(dim=0))


def calendar_means(shape: tuple[int, ...], classes: int, *, times: Count = 366) -> nn.Module:
    """[B, past, F] -> [B, classes], for windows of series with the calendar beside the readings: means by the time.

    `times` says how many times are told apart at most, such as 12 months. `standard` takes the means of each client.
    A model that is trained in steps answers alike at all times. Raises UsageError for examples that are no windows, or
    have nothing beside the readings.
    """
    if len(shape) != 2 or not math.prod(shape):
        raise UsageError(
            f"calendar-means: an example must be a window of readings [past, features]; got shape {list(shape)}"
        )
    if shape[1] < 2:
        raise UsageError(
            "calendar-means needs the calendar beside the readings; set calendar, such as clock or weekday"
        )
    return CalendarMeans(classes, times)
