"""What a client says of the columns of its training rows: counts and sums that add up over clients, never a row.

The statistics of all rows together are those of the clients' rows merged, up to rounding, so that a table on one
machine and the tables of many sites are described alike.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .frame import DAY
from .words import Numbers

DISTINCT = 3  # different values that statistics of numbers list, so that those of flags are known to be two
DIGITS = 10  # binary digits of a number's fraction that count for medians: a thousandth, and whole numbers to 2,048


class NumberStatistics(NamedTuple):
    """Of a column of numbers."""

    present: int  # rows with a value
    missing: int  # rows without one
    mean: float
    deviation: float
    distinct: tuple[float, ...]  # its different values, of more than `DISTINCT` some
    near: dict[float, int]  # how often each value is there, all cut to `DIGITS`; empty if not wanted

    @classmethod
    def from_values(cls, values: Numbers, median: bool = True) -> "NumberStatistics":
        """Of values: [n], NaN where there is none."""
        present = values[~np.isnan(values)]
        near: dict[float, int] = {}
        if median:
            distinct, counts = np.unique(cut(present), return_counts=True)
            near = dict(zip(distinct.tolist(), counts.tolist(), strict=True))
        mean, deviation = (float(present.mean()), float(present.std())) if len(present) else (0.0, 0.0)
        return cls(len(present), len(values) - len(present), mean, deviation, some_distinct(present), near)

    @property
    def median(self) -> float:
        """The value in the middle, or the mean of the two, cut to `DIGITS`; 0 without a value."""
        if not self.near:
            return 0.0
        values = sorted(self.near)
        until = np.cumsum([self.near[value] for value in values])
        places = ((self.present - 1) // 2, self.present // 2)
        low, high = (values[int(np.searchsorted(until, place, side="right"))] for place in places)
        return (low + high) / 2


class WordStatistics(NamedTuple):
    """Of a column of text."""

    counts: dict[str, int]  # rows of each category
    missing: int
    others: int = 0  # rows of categories whose names are not told
    unnamed: int = 0  # those categories


class DateStatistics(NamedTuple):
    """Of a column of dates."""

    years: NumberStatistics
    clock: bool  # whether any has a time of day


Statistics = NumberStatistics | WordStatistics | DateStatistics


def merge_statistics(parts: Sequence[Any]) -> Any:
    """The statistics of several clients' rows of one column, together."""
    first = parts[0]
    if isinstance(first, WordStatistics):
        numbers = np.array([part[1:] for part in parts]).sum(0).tolist()
        return WordStatistics(_add_counts([part.counts for part in parts]), *numbers)
    if isinstance(first, DateStatistics):
        return DateStatistics(merge_statistics([part.years for part in parts]), any(part.clock for part in parts))
    count = sum(part.present for part in parts)
    mean = sum(part.present * part.mean for part in parts) / max(count, 1)
    squares = sum(part.present * (part.deviation**2 + (part.mean - mean) ** 2) for part in parts)
    distinct = tuple(sorted({value for part in parts for value in part.distinct})[:DISTINCT])
    near = _add_counts([part.near for part in parts])
    missing = sum(part.missing for part in parts)
    return NumberStatistics(count, missing, mean, float(np.sqrt(squares / max(count, 1))), distinct, near)


def take_share(statistics: Any, share: float) -> Any:
    """The statistics of a share of a client's rows, as if they were like all of them."""
    if share == 1:
        return statistics
    if isinstance(statistics, DateStatistics):
        return DateStatistics(take_share(statistics.years, share), statistics.clock)
    missing = round(statistics.missing * share)
    if isinstance(statistics, WordStatistics):
        counts = {word: few for word, count in statistics.counts.items() if (few := round(count * share))}
        return WordStatistics(counts, missing, round(statistics.others * share), statistics.unnamed)
    near = {value: few for value, count in statistics.near.items() if (few := round(count * share))}
    return statistics._replace(
        present=sum(near.values()) if near else round(statistics.present * share), missing=missing, near=near
    )


def _add_counts(parts: Sequence[Mapping[Any, int]]) -> dict[Any, int]:
    """The counts of several clients, together."""
    counts: Counter[Any] = Counter()
    for part in parts:
        counts.update(part)
    return dict(counts)


def cut(values: Numbers) -> Numbers:
    """[n] values without the last digits of their fraction."""
    kept = np.uint64(2**64 - 2 ** (52 - DIGITS))
    return (np.ascontiguousarray(values, np.float64).view(np.uint64) & kept).view(np.float64) + 0.0


def some_distinct(values: Numbers) -> tuple[float, ...]:
    """Different values, all if there are no more than two."""
    if not len(values):
        return ()
    low, high = values.min(), values.max()
    between = values[(values != low) & (values != high)][:1]
    return tuple(sorted({float(low), *between.tolist(), float(high)}))


def years(seconds: Numbers) -> NDArray[np.float64]:
    """[n] the year of dates in seconds since 1970, NaN where there is none."""
    present = ~np.isnan(seconds)
    result = np.full(len(seconds), np.nan)
    days = np.floor_divide(seconds[present], DAY).astype("datetime64[D]")
    result[present] = days.astype("datetime64[Y]").astype(np.int64) + 1970
    return result
