"""Dates and times in a column of a table, and what is odd about them."""

import math
import re
import warnings

import numpy as np
from numpy.typing import NDArray

from ...errors import Fault, UsageError, list_names
from .column import FEWEST, Column
from .owners import Owners
from .times import Clock, Times, compact_seconds, iso_seconds, moments_of, steps_of, zone_of
from .words import Codes, Numbers, Words

LONG, EVEN, MOST_EVEN = 1.5, 0.2, 0.7  # times a usual step that is a gap; how even the others are, and how many of them
SHARED = 0.9  # warn if clients have rows at less than this share of all times
COMPACT = 1.9e7  # the least number that may be a date, as 19000101


def read_seconds(column: Column) -> Numbers:
    """[n] a column of dates as seconds since 1970, NaN where there is none; raises UsageError for anything else."""
    values = _parse_seconds(column)
    bad = np.flatnonzero(np.isinf(values))
    if len(bad):
        wanted = "a date such as 2012-03-01 00:05"
        raise UsageError(_describe_no_date(column, int(bad[0]), wanted, column.correction), Fault.DATE)
    return values


def _describe_no_date(column: Column, row: int, wanted: str, correction: str) -> str:
    """What to say of a cell that is not what is wanted; `correction` is what to do if no option reads it."""
    cell = column.cell(row) if column.values[row] is not None else ""
    fix = column.advise(cell, dated=True) or correction
    return f"{column.place(row)}: '{cell}' is not {wanted}; {fix}"


def is_zoned(column: Column) -> bool:
    """Whether a column's times name a time zone, or are of a type that has one; then all do."""
    if not column.is_text:
        return getattr(column.values.dtype, "time_zone", None) is not None
    return iso_seconds(column.values) is None and any(map(zone_of, column.words().names))


def _parse_seconds(column: Column) -> Numbers:
    """[n] dates as seconds, infinity for what is none and NaN where there is nothing."""
    import polars

    if column.values.dtype == polars.Datetime:
        values = column.values.to_numpy().astype("datetime64[us]")
        filled = ~np.isnat(values)
        _check_clock(column, filled, is_zoned(column))
        return np.where(filled, values.astype(np.int64) / 1e6, math.nan)
    if not column.is_text:
        return np.where(column.words().empty, math.nan, math.inf)
    if not column.formats.zoned.get(column.name) and (seconds := iso_seconds(column.values)) is not None:
        return seconds
    texts = column.words()
    _check_zones(column, texts)
    return moments_of(polars.Series(texts.names, dtype=polars.String), column.formats)[texts.codes]


def _check_clock(column: Column, times: NDArray[np.bool_], zoned: bool) -> None:
    """Raise UsageError if there are `times` [n] with a time zone or without one, and training's were otherwise."""
    trained_zoned = column.formats.zoned.get(column.name)
    if trained_zoned is not None and trained_zoned != zoned and times.any():
        row, which = int(times.argmax()), ("a", "no") if zoned else ("no", "a")
        raise UsageError(
            f"{column.place(row)}: '{column.values[row]}' has {which[0]} time zone, but in training times "
            f"had {which[1]} time zone; write it as they were",
            Fault.CLOCKS,
        )


def _check_zones(column: Column, texts: Words) -> None:
    """Raise UsageError if some times have a zone and others have none; warn of several zones."""
    zones = [zone_of(text) for text in texts.names]
    are_local = np.array([zone == "" for zone in zones], bool)[texts.codes]
    are_zoned = np.array([bool(zone) for zone in zones], bool)[texts.codes]
    without, within = np.flatnonzero(are_local), np.flatnonzero(are_zoned)
    _check_clock(column, are_local, zoned=False)
    _check_clock(column, are_zoned, zoned=True)
    if len(without) and len(within):
        cells = [texts.names[texts.codes[rows[0]]] for rows in (without, within)]
        raise UsageError(
            f"{column.place(without[0])}: '{cells[0]}' has no time zone, but '{cells[1]}' has one, so there "
            "are two clocks; write all with a zone, such as +01:00, or all without",
            Fault.CLOCKS,
        )
    if len(several := sorted({zone for zone in zones if zone})) > 1:
        what = f"column '{column.name}' has times of {len(several)} time zones ({list_names(several, 4)})"
        warnings.warn(f"{column.table}: {what}; all are taken in UTC", stacklevel=5)


def read_times(column: Column, held: Owners, series: bool) -> Times:
    """A column of times.

    If times are not a whole number of steps apart, such as months, each one counts as a step. Raises UsageError if
    a time cannot be read, or if rows are the readings of a series and a client has two at the same time.
    """
    moments, dated = _parse_moments(column)
    stamps, rank = np.unique(moments, return_inverse=True)
    if series:
        _check_once(column, held, rank)
        _check_pace(column, held, stamps, rank)
    return Times(moments, Clock.from_times(stamps), rank, dated)


def _check_pace(column: Column, held: Owners, stamps: Numbers, rank: Codes) -> None:
    """Warn of different times, whose ranks are given, that are no whole number of steps apart, and of gaps."""
    _check_gaps(column, stamps)
    assigned = held.who >= 0
    share = assigned.sum() / max(1, len(held.names) * len(np.unique(rank[assigned])))
    if share < SHARED and not steps_of(stamps)[1]:
        warnings.warn(
            f"{column.table}: times in '{column.name}' are not a whole number of steps apart, so each of "
            f"{len(stamps):,} different times is a step, and a client has rows at {100 * share:.0f} % of these; if "
            "clocks are just inexact, round the times first",
            stacklevel=5,
        )


def _check_gaps(column: Column, stamps: Numbers) -> None:
    """Warn of times that nobody has among such as months, each of which is a step, so that windows bridge them."""
    pauses = np.diff(stamps)
    if len(pauses) < FEWEST or steps_of(stamps)[1]:
        return
    usual = np.median(pauses)
    long = pauses > LONG * usual
    if long.any() and (np.abs(pauses - usual) <= EVEN * usual).mean() >= MOST_EVEN:
        count = f"{int(long.sum()):,} of {len(pauses):,} steps are longer than the others"
        warnings.warn(
            f"{column.table}: nobody has a time in '{column.name}' in some places: {count} (a step is the next time "
            "that is there), so windows bridge these; add rows for the missing times, with the target left empty",
            stacklevel=5,
        )


def _parse_moments(column: Column) -> tuple[Numbers, bool]:
    """[n] times as numbers, and whether they are dates; raises UsageError if one cannot be read."""
    import polars

    if column.values.dtype == polars.Datetime or iso_seconds(column.values) is not None:
        values = _parse_seconds(column)
        moments, dated = np.where(np.isnan(values), np.inf, values), True
    elif column.is_text and (plain := column.as_numbers).min() >= 0 and plain.max() < COMPACT:
        moments, dated = plain, False
    else:
        moments, dated = _parse_words(column)
    bad = np.flatnonzero(~np.isfinite(moments))
    if len(bad):
        wanted = "a date such as 2012-03-01 00:05" if dated else "a number, as most times are"
        if len(bad) == len(column.values):
            wanted = "a number or a date such as 2012-03-01 00:05"
        raise UsageError(_describe_no_date(column, int(bad[0]), wanted, "correct it"), Fault.DATE)
    return moments, dated


def _parse_words(column: Column) -> tuple[Numbers, bool]:
    """[n] times as numbers, infinity for what is none, and whether they are dates; only text may be."""
    import polars

    texts = column.words()
    compact = compact_seconds(texts.names)
    if compact is not None:
        return compact[texts.codes], True
    values = column.formats.parse_numbers(polars.Series(texts.names, dtype=polars.String))
    numbers = np.isfinite(values[texts.codes])
    if not column.is_text or numbers.mean() >= 0.5:
        return values[texts.codes], False
    return np.where(numbers, np.inf, _parse_seconds(column)), True


def _check_once(column: Column, held: Owners, rank: Codes) -> None:
    """Raise UsageError if a client has two rows at one time, whose rank is given."""
    used = np.flatnonzero(held.who >= 0)
    keys, first, code = np.unique(
        held.who[used] * (int(rank.max()) + 1) + rank[used], return_index=True, return_inverse=True
    )
    if len(keys) == len(used):
        return
    again = int((first[code] != np.arange(len(used))).argmax())
    row, before = used[again], used[first[code[again]]]
    client, time = held.names[held.who[row]], column.values[int(row)]
    where = column.row(before).rpartition(", ")[2]
    has_clock = re.search(r"\d:\d\d", str(time))
    fix = "; a series has one reading at a time, so keep one, or join the columns that name a series into one column"
    fix = "; where clocks went back, write times with a zone, such as +01:00" if has_clock else fix
    raise UsageError(
        f"{column.place(row)}: client '{client}' has another row at the time {time}, in {where}{fix}",
        Fault.TWICE,
    )
