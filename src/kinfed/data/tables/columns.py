"""Columns of a table as inputs of a model: what each kind of column becomes, by what training rows say of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import list_names, several
from .column_statistics import DateStatistics, NumberStatistics, WordStatistics, years
from .frame import DAY, natural
from .words import Codes, Numbers, name_of

RARE = 5  # training rows that a category needs to be told from others
ROUNDING = 1e-12  # a column whose deviation is below this share of its mean is constant
WEEK = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NEVER = 1e300  # the deviation of a column that is constant in training: no value moves its input from 0
Features = NDArray[np.float64]  # [n, parts]


@dataclass(frozen=True)
class Number:
    """A column of numbers: scaled, the median where there is none, and one more input for what was missing."""

    name: str
    mean: float
    deviation: float
    median: float
    missing: int  # training rows without a value

    kind: ClassVar[str] = "number"

    @classmethod
    def from_statistics(cls, name: str, statistics: NumberStatistics) -> "Number":
        return cls(name, statistics.mean, _spread(statistics), statistics.median, statistics.missing)

    @property
    def parts(self) -> list[str]:
        return [self.name, f"{self.name} is missing"] if self.missing else [self.name]

    def features(self, values: Numbers) -> Features:
        """[n, parts] inputs of values: [n]."""
        return self.scale_by(values, self.mean, self.deviation, self.median)

    def scale_by(
        self, values: Numbers, mean: Numbers | float, deviation: Numbers | float, median: Numbers | float
    ) -> Features:
        """[n, parts] inputs of values: [n], on a scale of each row's own."""
        holes = np.isnan(values)
        filled = np.where(holes, median, values) if holes.any() else values
        scaled = (filled - mean) / deviation
        return np.stack([scaled, holes.astype(np.float64)][: len(self.parts)], 1)

    def __str__(self) -> str:
        text = f"mean {self.mean:.4g}, deviation {self.deviation:.4g}"
        if self.deviation == NEVER:
            text = f"{self.mean:.6g} in all training rows, so other values change nothing"
        return f"{text}; {self.median:.4g} where missing ({several(self.missing, 'row')})" if self.missing else text


@dataclass(frozen=True)
class Category:
    """A column of text: an input for each category that is frequent, and one for all others if there are any."""

    name: str
    categories: tuple[str, ...]
    different: int  # categories of training rows
    other: int  # training rows of other categories
    missing: int  # training rows without a value

    kind: ClassVar[str] = "category"

    @classmethod
    def from_statistics(cls, name: str, statistics: WordStatistics, most: int) -> "Category":
        """As statistics of all training rows say: the `most` frequent of those in `RARE` rows or more."""
        order = sorted(statistics.counts, key=lambda word: (-statistics.counts[word], natural(word)))
        kept = [word for word in order[:most] if statistics.counts[word] >= RARE]
        other = sum(statistics.counts.values()) - sum(statistics.counts[word] for word in kept) + statistics.others
        different = len(statistics.counts) + statistics.unnamed
        return cls(name, tuple(sorted(kept, key=natural)), different, other, statistics.missing)

    @property
    def parts(self) -> list[str]:
        parts = [f"{self.name}={category}" for category in self.categories]
        if self.other:
            parts.append(f"{self.name} is other")
        if self.missing:
            parts.append(f"{self.name} is missing")
        return parts

    def ones(self, values: Numbers, texts: Sequence[str] = ()) -> Codes:
        """[n] which input is 1, the others being 0, or -1 for none; a new category is an other one, or none.

        values: [n] are places in `texts`.
        """
        index = {name_of(category): i for i, category in enumerate(self.categories)}
        other = len(index) if self.other else -1  # of no input
        missing = len(index) + bool(self.other) if self.missing else -1
        places = np.array([*(index.get(word, other) for word in texts), missing])
        return np.asarray(places[np.where(np.isnan(values), -1, values).astype(np.int64)], np.int64)

    def __str__(self) -> str:
        names = list_names(self.categories)
        text = f"{len(self.categories):,} categories ({names})"
        if self.other:
            others = self.different - len(self.categories)
            text = f"{len(self.categories):,} of {self.different:,} categories ({names}); {others:,} others as one"
        return f"{text}; missing in {several(self.missing, 'row')}" if self.missing else text


@dataclass(frozen=True)
class Calendar:
    """A column of dates: the year, the season as an angle, the day of the week, and the time of day as an angle."""

    name: str
    mean: float  # of years
    deviation: float
    clock: bool  # whether dates have a time of day
    missing: int  # training rows without a value

    kind: ClassVar[str] = "date"

    @classmethod
    def from_statistics(cls, name: str, statistics: DateStatistics) -> "Calendar":
        return cls(name, statistics.years.mean, _spread(statistics.years), statistics.clock, statistics.years.missing)

    @property
    def parts(self) -> list[str]:
        parts = ["year", "season (sine)", "season (cosine)", *WEEK]
        if self.clock:
            parts += ["hour (sine)", "hour (cosine)"]
        if self.missing:
            parts.append("is missing")
        return [f"{self.name} {part}" for part in parts]

    def features(self, values: Numbers) -> Features:
        """[n, parts] inputs of dates: [n] in seconds; all 0 but the last where there is none."""
        present = ~np.isnan(values)
        seconds = np.where(present, values, 0.0)
        columns = [(years(seconds) - self.mean) / self.deviation, *season(seconds), *weekday(seconds)]
        columns += hour(seconds) if self.clock else []
        parts = [np.where(present, column, 0.0) for column in columns]
        if self.missing:
            parts.append(~present)
        return np.stack(parts, 1).astype(np.float64)

    def __str__(self) -> str:
        text = f"year (mean {self.mean:.1f}), season, day of the week{' and time of day' if self.clock else ''}"
        return f"{text}; missing in {several(self.missing, 'row')}" if self.missing else text


def _spread(statistics: NumberStatistics) -> float:
    """The deviation by which a column is scaled."""
    return NEVER if statistics.deviation <= ROUNDING * abs(statistics.mean) else statistics.deviation


def hour(seconds: Numbers) -> list[Numbers]:
    """Sine and cosine of the time of day of dates in seconds since 1970: [n]."""
    angle = 2 * np.pi * (seconds - DAY * np.floor_divide(seconds, DAY)) / DAY
    return [np.sin(angle), np.cos(angle)]


def weekday(seconds: Numbers) -> list[Numbers]:
    """Whether dates: [n] are a Monday, ..., a Sunday: 0 or 1."""
    days = np.floor_divide(seconds, DAY)
    return [np.asarray((days + 3) % 7 == i, np.float64) for i in range(7)]  # 1 January 1970 was a Thursday


def month(seconds: Numbers) -> list[Numbers]:
    """Whether dates: [n] are in January, ..., in December: 0 or 1."""
    number = np.floor_divide(seconds, DAY).astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12
    return [np.asarray(number == i, np.float64) for i in range(12)]


def season(seconds: Numbers) -> list[Numbers]:
    """Sine and cosine of the day of the year of dates: [n]."""
    days = np.floor_divide(seconds, DAY)
    begin = days.astype("datetime64[D]").astype("datetime64[Y]").astype("datetime64[D]").astype(np.int64)
    angle = 2 * np.pi * (days - begin) / 365.25
    return [np.sin(angle), np.cos(angle)]


@dataclass(frozen=True)
class Unused:
    """A column of which nothing is an input, and why."""

    name: str
    why: str

    kind: ClassVar[str] = "unused"

    @property
    def parts(self) -> list[str]:
        return []

    def __str__(self) -> str:
        return f"left out: {self.why}"


Column = Number | Category | Calendar | Unused
KINDS: dict[str, type[Column]] = {kind.kind: kind for kind in (Number, Category, Calendar, Unused)}


def part_scales(column: Column) -> list[tuple[float, float]]:
    """Mean and deviation by which each of a column's inputs was scaled: a number, or the year of a date, is."""
    scaled = [(column.mean, column.deviation)] if isinstance(column, Number | Calendar) else []
    return scaled + [(0.0, 1.0)] * (len(column.parts) - len(scaled))
