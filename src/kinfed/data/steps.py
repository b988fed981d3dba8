"""Steps of series: what stands for a missing reading, and what the calendar says of the times."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .tables.columns import WEEK, hour, month, season, weekday
from .tables.frame import DAY
from .tables.words import Numbers

Feature = Literal["clock", "hour", "weekday", "week", "month", "year", "season"]
CLOCK = "clock"
MONTH = (28 * DAY, 31 * DAY)  # between these a step is a month
MONTHS = tuple(f"month {i + 1}" for i in range(12))
# What each feature of the calendar is called, input by input, and what it is at times in seconds since 1970. The first
# day of the week says all that the weekday does where the past steps reach over a week, and is one input of a step.
CALENDAR: dict[str, tuple[tuple[str, ...], Callable[[Numbers], list[Numbers]]]] = {
    CLOCK: (("time of day",), lambda at: [at % DAY / DAY]),
    "hour": (("hour (sine)", "hour (cosine)"), hour),
    "weekday": (WEEK, weekday),
    "week": (WEEK[:1], lambda at: weekday(at)[:1]),
    "month": (MONTHS, month),
    "year": (MONTHS[:1], lambda at: month(at)[:1]),
    "season": (("season (sine)", "season (cosine)"), season),
}


def usual_calendar(length: float, past: int) -> tuple[str, ...]:
    """The features that suit `past` steps of this length in seconds: those that tell the place in a day, week or year.

    They are the time of day, the weekday or the month, for steps shorter than a day, of a day, and of a month.
    """
    if length < DAY:
        return (CLOCK,)
    if abs(length - DAY) < 0.01 * DAY:
        return ("week" if past >= 7 else "weekday",)
    return ("year" if past >= 12 else "month",) if MONTH[0] < length < MONTH[1] else ()


def calendar(seconds: Numbers, features: Sequence[str]) -> NDArray[np.float64]:
    """[T, C] the features of times: [T] in seconds since 1970; a time of day lies in [0, 1), a weekday is 0 or 1."""
    columns = [column for feature in features for column in CALENDAR[feature][1](seconds)]
    return np.stack(columns, 1).astype(np.float64) if columns else np.empty((len(seconds), 0))


def calendar_names(features: Sequence[str]) -> list[str]:
    """[C] what `calendar` returns, by name."""
    return [name for feature in features for name in CALENDAR[feature][0]]


def carried_forward(readings: Tensor, steps: Tensor) -> Tensor:
    """readings: [N, T], each NaN replaced by the last reading since a gap in steps: [T]; NaN where there is none."""
    place = torch.arange(readings.shape[1])
    gap = torch.nn.functional.pad(steps.diff() != 1, (1, 0))
    since = torch.where(gap, place, 0).cummax(0).values  # [T] where the current stretch without a gap begins
    last = torch.where(readings.isnan(), since, place).cummax(1).values
    return readings.gather(1, last)
