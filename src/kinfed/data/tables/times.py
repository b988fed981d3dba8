"""Times in text as seconds, and as steps."""

import datetime
import math
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .cells import MISSING, Formats
from .words import Codes, Numbers

if TYPE_CHECKING:
    import polars

ISO = {10: "%Y-%m-%d", 16: "%Y-%m-%d %H:%M", 19: "%Y-%m-%d %H:%M:%S"}  # dates that are read at once, by length
SAMPLE = 10_000  # cells that tell whether a column of text holds dates
ZONED = re.compile(r"(.*\d:\d\d\S*?) ?(?:Z|([+-]\d\d)(?::?(\d\d))?)", re.IGNORECASE)
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
PERIOD = re.compile(  # 1998 Q1, 1998-W05 and 1998 Jan
    rf"(\d{{4}})(?:[ -]?Q([1-4])|-?W(\d\d)|[ -]({'|'.join(MONTHS)}))", re.IGNORECASE
)


class Clock(NamedTuple):
    """The steps at which any client has a row."""

    times: Numbers  # [T] ascending
    steps: Codes  # [T] from 0
    length: float  # of a step, in seconds if times are dates
    paced: bool  # whether times are a whole number of steps apart

    @classmethod
    def from_times(cls, times: Numbers) -> "Clock":
        """Of different times: [T], ascending."""
        steps = steps_of(times)[0]
        length = float((times[-1] - times[0]) / max(int(steps[-1]), 1))
        paced = np.allclose(times, times[0] + steps * length, rtol=0, atol=0.01 * length)
        return cls(times, steps, length, bool(paced))


class Times(NamedTuple):
    """A column of times."""

    moments: Numbers  # [n]
    clock: Clock
    place: Codes  # [n] of each row among the clock's steps
    dated: bool  # whether times are dates; then in seconds

    @property
    def steps(self) -> Codes:
        """[n] the step of each row."""
        return self.clock.steps[self.place]

    def of_rows(self, rows: Codes) -> tuple[Clock, Codes]:
        """The clock without steps at which none of these rows is, and the place of each row among the others."""
        used, place = np.unique(self.place[rows], return_inverse=True)
        return self.clock._replace(times=self.clock.times[used], steps=self.clock.steps[used]), place


def steps_of(stamps: Numbers) -> tuple[Codes, bool]:
    """[T] steps from 0 of different times: [T], ascending, and whether these are a whole number of steps apart.

    A step is the smallest distance between two times; where they are no whole number apart, each one is a step.
    """
    width = np.diff(stamps).min() if len(stamps) > 1 else 1.0
    steps = (stamps - stamps[0]) / width
    if np.abs(steps - steps.round()).max() > 0.01 or steps[-1] > 2**53:  # beyond it floats have gaps
        return np.arange(len(stamps)), False
    return steps.round().astype(np.int64), True


def zone_of(text: str) -> str | None:
    """The time zone of a time, "" if it has none; None for what has no time of day."""
    if zone := ZONED.fullmatch(text):
        return f"{zone[2]}:{zone[3] or '00'}" if zone[2] and int(zone[2] + (zone[3] or "00")) else "UTC"
    return "" if re.search(r"\d:\d\d", text) else None


def seconds_of(text: str) -> float:
    """A date as seconds, in UTC if it names a zone; infinity for anything else."""
    date, zone = text, ZONED.fullmatch(text)
    ahead = 0
    if zone:
        date, hours, minutes = zone[1], int(zone[2] or 0), int(zone[3] or 0)
        ahead = 3600 * hours + 60 * (-minutes if (zone[2] or "").startswith("-") else minutes)
    if not date[:4].isdecimal():  # NumPy knows now and today
        return np.inf
    try:
        moment = np.datetime64(_find_first_day(date), "us")
    except ValueError:
        return np.inf
    return np.inf if np.isnat(moment) else float(moment.astype(np.int64)) / 1e6 - ahead


def _find_first_day(date: str) -> str:
    """The first day of a quarter, a week or a month that is written as such; any other date as it is.

    Raises ValueError if the year has no such week.
    """
    period = PERIOD.fullmatch(date)
    if period is None:
        return date
    year, quarter, week, month = period.groups()
    if week:
        return f"{datetime.date.fromisocalendar(int(year), int(week), 1)}"
    return f"{year}-{3 * int(quarter) - 2 if quarter else MONTHS.index(month.lower()) + 1:02}"


def moments_of(text: "polars.Series", formats: Formats) -> Numbers:
    """[n] cells as seconds, NaN where there is nothing and infinity for what is no date."""
    missing = {"", "nan", "nat", *MISSING}
    moments = formats.parse_dates(text).tolist()
    for i, cell in enumerate(text.to_list()):
        if cell.lower() in missing:
            moments[i] = math.nan
        elif math.isnan(moments[i]):
            moments[i] = math.inf if formats.hides_iso else seconds_of(cell)
    return np.array(moments, np.float64)


def iso_seconds(column: "polars.Series") -> Numbers | None:
    """[n] a column of text as seconds, if it is long and all of it are dates of one of the usual forms."""
    import polars

    if column.dtype != polars.String or len(column) <= SAMPLE:
        return None
    letters = column.str.len_chars()
    form = ISO.get(letters[0] or 0)
    if form is None or letters.null_count() or letters.min() != letters.max():
        return None
    way = form.replace(" ", "T") if "T" in column[0] else form
    try:
        values = column.str.to_datetime(way, time_unit="us", strict=False)
    except polars.exceptions.PolarsError:
        return None
    return None if values.null_count() else values.to_numpy().astype("datetime64[us]").astype(np.int64) / 1e6


def compact_seconds(texts: list[str]) -> Numbers | None:
    """Seconds of each, if all are dates as 20120301, 201203010005 or 20120301000500; None otherwise."""
    if {len(text) for text in texts} not in ({8}, {12}, {14}) or not all(text.isdecimal() for text in texts):
        return None
    if not all(1900 <= int(text[:4]) < 2100 for text in texts):
        return None
    parted = (re.fullmatch(r"(.{4})(..)(..)(..)?(..)?(..)?", text) for text in texts)
    seconds = [seconds_of(f"{p[1]}-{p[2]}-{p[3]}T{p[4] or '00'}:{p[5] or '00'}:{p[6] or '00'}") for p in parted if p]
    return np.array(seconds) if np.isfinite(seconds).all() else None
