"""Cells of a table, whose place in its file every error names."""

import math
import re
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import Fault, UsageError, list_names, nearest, some
from .cells import MISSING, TRUTH, Formats, looks_like_date, looks_like_number
from .owners import Owners
from .times import SAMPLE, Clock, Times, compact_seconds, iso_seconds, seconds_of, steps_of, zone_of
from .words import Codes, Numbers, Words, merge_names, name_of, words_of_floats

if TYPE_CHECKING:
    import polars

DAY = 86_400.0  # seconds
LARGEST = 1e30  # the largest number that float32 can hold and still scale
FEW = 20  # a target of whole numbers with at most this many different values counts as labels
EARNEST, FEWEST = 0.05, 10  # the share of words among numbers, and their number, from which cells are categories
GAPLESS = 5  # values from which labels are whole numbers without a gap
LONG, EVEN, MOST_EVEN = 1.5, 0.2, 0.7  # times a usual step that is a gap; how even the others are, and how many of them
SHARED = 0.9  # warn if clients have rows at less than this share of all times
COMPACT = 1.9e7  # the least number that may be a date, as 19000101
ADVISED = 200  # cells of a column that an option must read to be advised
PLAIN = Formats()


@dataclass(frozen=True, eq=False)
class Frame:
    """A table whose cells are known by their place in what was read."""

    name: str  # for errors
    _table: "polars.DataFrame"
    _place: Callable[[int], str]  # where a row that was read is
    _strange: Mapping[str, str] = field(default_factory=dict)  # types of columns that hold no numbers, text or dates
    _rows: Codes | None = None  # [n] which rows these are, if some were left out
    added: Sequence[str] = ()  # columns that no file has
    formats: Formats = PLAIN  # how text is read
    _parsed: dict[str, Numbers] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return self._table.height

    @property
    def columns(self) -> list[str]:
        return [*self._table.columns, *self._strange]

    def column(self, name: str) -> "polars.Series":
        """[n] a column as it was read; raises UsageError for one of a type that is no number, text or date."""
        if name in self._strange:
            raise UsageError(
                f"{self.name}: column '{name}' holds {self._strange[name]}, not numbers, text or dates; "
                "convert it, or leave it out with ignore",
                Fault.KIND,
            )
        return self._table[name].alias("column")  # polars takes names such as ^a$ and * for patterns of names

    def is_text(self, name: str) -> bool:
        """Whether a column was read as text, as all of a CSV are."""
        import polars

        return self.column(name).dtype == polars.String

    def keep(self, kept: NDArray[np.bool_]) -> "Frame":
        """The frame with these rows; raises UsageError if there are none."""
        if not kept.any():
            raise UsageError(f"{self.name} has no rows", Fault.EMPTY)
        rows = np.flatnonzero(kept) if self._rows is None else self._rows[kept]
        return replace(self, _table=self._table.filter(kept), _rows=rows)

    def read_as(self, formats: Formats) -> "Frame":
        """The frame whose text is read by these formats."""
        return replace(self, formats=formats)

    def keep_reading(self, kinds: Mapping[str, str], others: Sequence[str] = ()) -> dict[str, Any]:
        """The formats by which new rows are read as these are, whose columns are of these kinds ("date", ...).

        And `dropped`, the columns that are neither of these nor of the `others` that are used.
        """
        truths = tuple(name for name, kind in kinds.items() if kind == "number" and self._are_truths(name))
        zoned = {name: self.is_zoned(name) for name, kind in kinds.items() if kind == "date"}
        dropped = tuple(name for name in self.columns if name not in {*kinds, *others})
        return {"formats": replace(self.formats, truths=truths, zoned=zoned), "dropped": dropped}

    def unit(self, name: str) -> str:
        """The unit in which a column of numbers is written, "" if it names none."""
        if not self.formats.units or not self.is_text(name):
            return ""
        units = self.formats.units_of(self.column(name)).drop_nulls().to_list()
        return str(units[0]) if units else ""

    def rename(self, names: Mapping[str, str]) -> "Frame":
        """The frame with columns under other names, by their own; raises UsageError if one is missing or double."""
        self.need([*names])
        columns = [names.get(name, name) for name in self.columns]
        if twice := sorted({name for name in columns if columns.count(name) > 1}):
            why = f"{self.name}: two columns would be named '{twice[0]}'; give one of them another name"
            raise UsageError(why, Fault.COLUMNS)
        table = self._table.rename({former: name for former, name in names.items() if former in self._table.columns})
        strange = {names.get(former, former): kind for former, kind in self._strange.items()}
        return replace(self, _table=table, _strange=strange, formats=self.formats.rename(names))

    def with_all(self, names: list[str]) -> "Frame":
        """The frame without rows that have no value in one of these columns; a warning counts them."""
        kept = ~np.any([self.words(name).empty for name in names], axis=0)
        if kept.all():
            return self
        message = f"{some(int((~kept).sum()), len(kept), 'row')} no {' or no '.join(names)}"
        if not kept.any():
            raise UsageError(f"{self.name}: {message}", Fault.MISSING)
        first = self.row(int(kept.argmin()))
        warnings.warn(f"{self.name}: {message}, left out (the first: {first})", stacklevel=4)
        return self.keep(kept)

    def write(self, path: Path) -> None:
        """Write the rows as Parquet; columns that hold no numbers, text or dates are empty there."""
        import polars

        empty = [polars.lit(None, polars.String).alias(name) for name in self._strange]
        self._table.with_columns(empty).write_parquet(path)

    def place(self, row: int, column: str) -> str:
        """Where a cell is, for an error."""
        return f"{self.row(row)}, column '{column}'"

    def cell(self, row: int, column: str) -> str:
        """What a cell holds, for an error."""
        return str(self.column(column)[int(row)]).strip()

    def row(self, row: int) -> str:
        """Where a row is, for an error."""
        return self._place(int(row if self._rows is None else self._rows[row]))

    def need(self, names: list[str]) -> None:
        """Raise UsageError unless there are columns of these names, all different."""
        for name in names:
            if name not in self.columns:
                why = f"{self.name} has no column '{name}'; {nearest(name, self.columns)}"
                raise UsageError(why, Fault.COLUMNS)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"{self.name}: column '{twice[0]}' is named twice", Fault.COLUMNS)

    def words(self, name: str) -> Words:
        """A column as text, without blanks around it."""
        import polars

        column = self.column(name)
        if column.dtype.is_float():
            return words_of_floats(column.to_numpy())
        if column.dtype == polars.Datetime:
            column = column.dt.to_string("%Y-%m-%dT%H:%M:%S%.6f")
        cells = column.cast(polars.String).fill_null("")
        names = cells.unique(maintain_order=True)
        codes = cells.cast(polars.Enum(names)).to_physical().to_numpy().astype(np.int64)
        return merge_names([name_of(text.strip()) for text in names.to_list()], codes)

    def text(self, name: str) -> Words:
        """A column as text; raises UsageError where there is no value."""
        texts = self.words(name)
        self._check_filled(name, texts.empty)
        return texts

    def _check_filled(self, name: str, empty: NDArray[np.bool_]) -> None:
        """Raise UsageError for the first of the cells [n] that are `empty`."""
        if empty.any():
            raise UsageError(f"{self.place(int(empty.argmax()), name)}: there is no value; fill it in", Fault.MISSING)

    def kind(self, name: str) -> str:
        """What most cells are: "numbers" (or truth values alone), "dates", "text", "empty", or another type."""
        if name in self._strange:
            return self._strange[name]
        import polars

        column = self.column(name)
        if column.dtype != polars.String:
            if column.null_count() == len(column):
                return "empty"
            return "dates" if column.dtype == polars.Datetime else "numbers"
        values, rest = self._cast(name), self._rest(name)
        plain = int(np.isfinite(values).sum())
        if name in self.formats.text and (plain or len(rest)):
            return "text"
        if not len(rest):
            return "numbers" if plain else "empty"
        if not plain and self._are_truths(name):
            return "numbers"
        # Those in another format count too, so that `numbers` says which.
        like = int(looks_like_number(rest).sum())
        if plain + like >= len(rest) - like:
            return "text" if self._are_categories(name, rest, plain) else "numbers"
        sample = rest.head(SAMPLE)
        dates = np.isfinite(self._moments_of_text(sample)) | looks_like_date(sample).to_numpy()
        return "dates" if dates.sum() > len(sample) / 2 else "text"

    def _are_categories(self, name: str, texts: "polars.Series", numbers: int) -> bool:
        """Whether numbers and words are categories, as 0, 1, 2 and 3+ are: few different cells, and words in earnest.

        A warning says so. `texts` are the cells that are no numbers.
        """
        texts = texts.filter(~looks_like_number(texts))
        if len(texts) < max(FEWEST, EARNEST * (len(texts) + numbers)) or len(self.words(name).names) > FEW:
            return False
        what = f"column '{name}' has few different cells, some of them words such as '{texts[0]}'"
        warnings.warn(f"{self.name}: {what}, so its cells are categories", stacklevel=4)
        return True

    def _are_truths(self, name: str) -> bool:
        """Whether a column of text holds true and false, and nothing else."""
        if not self.is_text(name) or np.isfinite(self._cast(name)).any():
            return False
        rest = self._rest(name).str.to_lowercase()
        return bool(len(rest)) and bool(rest.is_in([*TRUTH]).all())

    def _rest(self, name: str) -> "polars.Series":
        """The cells of a column of text that are no numbers and not missing, without blanks around them."""
        return self.column(name).filter(np.isinf(self._cast(name))).str.strip_chars()

    def _cast(self, name: str) -> Numbers:
        """[n] a column of text as numbers, NaN where there is none and infinity for anything else."""
        if name not in self._parsed:
            self._parsed[name] = self.formats.parse_numbers(self.column(name))
        return self._parsed[name]

    def numbers(self, name: str) -> Numbers:
        """[n] a column as numbers, NaN where there is none; raises UsageError for anything else."""
        import polars

        column = self.column(name)
        if column.dtype == polars.String:
            truths = self.formats.truths  # in training
            are_truths = self._are_truths(name) if truths is None else name in truths
            values = self._numbers_and_truths(name) if are_truths else self._cast(name)
            self._check_units(name, column)
        elif column.dtype == polars.Datetime:
            values = np.full(len(column), np.inf)
        else:
            values = column.cast(polars.Float64).fill_null(math.nan).to_numpy()
        bad = np.flatnonzero(np.abs(values) > LARGEST)
        if len(bad):
            raise UsageError(self._no_number(name, bad, bool(np.isinf(values[bad[0]]))), Fault.NUMBER)
        return values

    def numbers_of_all_rows(self, name: str) -> Numbers:
        """[n] a column as numbers; raises UsageError where there is none."""
        values = self.numbers(name)
        self._check_filled(name, np.isnan(values))
        return values

    def weights(self, name: str) -> Numbers:
        """[n] a column of weights, as how many rows each row counts; raises UsageError for anything else."""
        import polars

        column = self.column(name)
        if self.is_text(name):
            values = self._cast(name)
        elif column.dtype == polars.Datetime:
            values = np.full(len(column), np.inf)
        else:
            values = column.cast(polars.Float64).fill_null(math.nan).to_numpy()
        if (bad := np.flatnonzero(~((values >= 0) & (values <= LARGEST)))).size:
            what = "there is no weight" if np.isnan(values[bad[0]]) else f"'{self.cell(bad[0], name)}' is no weight"
            more = f" ({len(bad) - 1:,} more like this)" if len(bad) > 1 else ""
            text = f"{self.place(bad[0], name)}: {what}, a finite number from 0{more}"
            raise UsageError(f"{text}; correct it, or write 0 to leave the row out", Fault.WEIGHT)
        return values

    def _numbers_and_truths(self, name: str) -> Numbers:
        """[n] a column of text as numbers, true and false among them; infinity for anything else."""
        values = self._cast(name).copy()
        odd = np.isinf(values)
        values[odd] = [TRUTH.get(cell, np.inf) for cell in self._rest(name).str.to_lowercase().to_list()]
        return values

    def _check_units(self, name: str, column: "polars.Series") -> None:
        """Raise UsageError for a cell in another unit than those above it."""
        units = self.formats.units_of(column) if self.formats.units else column.head(0)
        if len(different := units.drop_nulls().unique(maintain_order=True)) > 1:
            former, unit = different.to_list()[:2]
            row = int((units == unit).fill_null(False).arg_max() or 0)
            what = f"{self.place(row, name)}: '{self.cell(row, name)}' is in {unit}, but others are in {former}"
            raise UsageError(f"{what}; convert them, or leave the column out with ignore", Fault.WRITTEN)

    def _no_number(self, name: str, bad: Codes, infinite: bool) -> str:
        """What to say of cells that are no numbers, of which those of the rows `bad` are the first."""
        more = f" (and {len(bad) - 1:,} more)" if len(bad) > 1 else ""
        cell = self.cell(bad[0], name)
        what = "not a finite" if "inf" in cell.lower() else "not a"
        what = what if infinite else "too large a"
        text = f"{self.place(bad[0], name)}: '{cell}' is {what} number{more}"
        if infinite and self.formats.truths is not None and name in self.formats.truths:
            return f"{self.place(bad[0], name)}: '{cell}' is neither true nor false{more}, as all were in training"
        if infinite and (advice := self._advice(name, cell, dated=False)):
            return f"{text}; {advice}"
        return f"{text}; {self._correction(name)}"

    def _correction(self, name: str) -> str:
        """What to do about a cell that no option reads."""
        names = f', or say text=["{name}"] if its cells are names' if self.formats.truths is None else ""
        return f"correct it, leave it empty if it is missing, or leave the column out with ignore{names}"

    def seconds(self, name: str) -> Numbers:
        """[n] a column of dates as seconds since 1970, NaN where there is none; raises UsageError for anything else."""
        values = self._seconds_of(name)
        bad = np.flatnonzero(np.isinf(values))
        if len(bad):
            wanted = "a date such as 2012-03-01 00:05"
            raise UsageError(self._no_date(name, int(bad[0]), wanted, self._correction(name)), Fault.DATE)
        return values

    def _no_date(self, name: str, row: int, wanted: str, correction: str) -> str:
        """What to say of a cell that is not what is wanted; `correction` is what to do if no option reads it."""
        cell = self.cell(row, name) if self.column(name)[row] is not None else ""
        fix = self._advice(name, cell, dated=True) or correction
        return f"{self.place(row, name)}: '{cell}' is not {wanted}; {fix}"

    def _advice(self, name: str, cell: str, dated: bool) -> str:
        """The options that would read a cell and those like it in its column, "" if none would."""
        if not self.is_text(name):
            return ""
        advise, like = self.formats.number_advice, looks_like_number
        if dated:
            advise, like = self.formats.date_advice, looks_like_date
        cells = self.column(name).drop_nulls().str.strip_chars().unique(maintain_order=True)
        cells = cells.filter(np.isinf(self._moments_of_text(cells))) if dated else cells
        advice = advise(cell, cells.filter(like(cells)).head(ADVISED).to_list())
        other = "" if advice else advise(cell)
        return f"{other}, but others of the column are written otherwise; write all in one way" if other else advice

    def is_zoned(self, name: str) -> bool:
        """Whether a column's times name a time zone, or are of a type that has one; then all do."""
        column = self.column(name)
        if not self.is_text(name):
            return getattr(column.dtype, "time_zone", None) is not None
        return iso_seconds(column) is None and any(zone_of(text) for text in self.words(name).names)

    def _seconds_of(self, name: str) -> Numbers:
        """[n] dates as seconds, infinity for what is none and NaN where there is nothing."""
        import polars

        column = self.column(name)
        if column.dtype == polars.Datetime:
            values = column.to_numpy().astype("datetime64[us]")
            filled = ~np.isnat(values)
            self._check_clock(name, filled, self.is_zoned(name))
            return np.where(filled, values.astype(np.int64) / 1e6, math.nan)
        if column.dtype != polars.String:
            return np.where(self.words(name).empty, math.nan, math.inf)
        if not self.formats.zoned.get(name) and (seconds := iso_seconds(column)) is not None:
            return seconds
        texts = self.words(name)
        self._check_zones(name, texts)
        return self._moments_of_text(polars.Series(texts.names, dtype=polars.String))[texts.codes]

    def _moments_of_text(self, text: "polars.Series") -> Numbers:
        """[n] cells as seconds, NaN where there is nothing and infinity for what is no date."""
        missing = {"", "nan", "nat", *MISSING}
        moments = self.formats.parse_dates(text).tolist()
        for i, cell in enumerate(text.to_list()):
            if cell.lower() in missing:
                moments[i] = math.nan
            elif math.isnan(moments[i]):
                moments[i] = math.inf if self.formats.hides_iso else seconds_of(cell)
        return np.array(moments, np.float64)

    def _check_clock(self, name: str, times: NDArray[np.bool_], zoned: bool) -> None:
        """Raise UsageError if there are `times` [n] with a time zone or without one, and training's were otherwise."""
        trained_zoned = self.formats.zoned.get(name)
        if trained_zoned is not None and trained_zoned != zoned and times.any():
            row, which = int(times.argmax()), ("a", "no") if zoned else ("no", "a")
            raise UsageError(
                f"{self.place(row, name)}: '{self.column(name)[row]}' has {which[0]} time zone, but in training times "
                f"had {which[1]} time zone; write it as they were",
                Fault.CLOCKS,
            )

    def _check_zones(self, name: str, texts: Words) -> None:
        """Raise UsageError if some times have a zone and others have none; warn of several zones."""
        zones = [zone_of(text) for text in texts.names]
        are_local = np.array([zone == "" for zone in zones], bool)[texts.codes]
        are_zoned = np.array([bool(zone) for zone in zones], bool)[texts.codes]
        without, within = np.flatnonzero(are_local), np.flatnonzero(are_zoned)
        self._check_clock(name, are_local, zoned=False)
        self._check_clock(name, are_zoned, zoned=True)
        if len(without) and len(within):
            cells = [texts.names[texts.codes[rows[0]]] for rows in (without, within)]
            raise UsageError(
                f"{self.place(without[0], name)}: '{cells[0]}' has no time zone, but '{cells[1]}' has one, so there "
                "are two clocks; write all with a zone, such as +01:00, or all without",
                Fault.CLOCKS,
            )
        if len(several := sorted({zone for zone in zones if zone})) > 1:
            what = f"column '{name}' has times of {len(several)} time zones ({list_names(several, 4)})"
            warnings.warn(f"{self.name}: {what}; all are taken in UTC", stacklevel=5)

    def labels(self, name: str) -> Words | None:
        """The labels in a column, "" where there is none; None if it holds numbers that are not labels.

        Raises UsageError if most of the column are such numbers, or all except words for a missing value.
        """
        import polars

        if self._are_no_labels(name):
            return None
        texts = self.words(name)
        texts = merge_names(
            ["" if label.lower() == "nan" else label for label in texts.names], texts.codes
        )  # no number
        if name in self.formats.text:
            return texts
        labels = polars.Series([label for label in texts.names if label], dtype=polars.String)
        numbers = self.formats.parse_numbers(labels)
        values = np.unique(numbers[np.isfinite(numbers)])
        odd = {*labels.filter(~np.isfinite(numbers)).to_list()}  # words, and those for a missing value
        like = odd and {*labels.filter(looks_like_number(labels)).to_list()} & odd
        if 2 * (len(values) + len(like)) > len(labels) and like:
            row = self._first(texts, like)
            what = self._no_number(name, np.array([row]), infinite=True)
            raise UsageError(f"{what}, or set labels to true if these are classes", Fault.NUMBER)
        if not len(values):
            return texts
        few = len(values) <= FEW and (values == values.round()).all()
        # Codes of classes leave no gaps, as scores such as 0, 2, 4 ... do.
        few = few and (len(values) < GAPLESS or np.ptp(values) == len(values) - 1)
        missing = all(label.lower() in MISSING for label in odd)
        if not odd or (missing and not few):
            return texts if few else None
        if missing or (not few and np.isin(texts.names, [*odd])[texts.codes].mean() < 0.5):
            at = self._first(texts, odd)
            raise UsageError(
                f"{self.place(at, name)}: '{texts.names[texts.codes[at]]}' is not a number, as most of this "
                "column are; leave it empty if it is missing",
                Fault.NUMBER,
            )
        return texts

    @staticmethod
    def _first(texts: Words, names: Container[str]) -> int:
        return int(np.array([name in names for name in texts.names])[texts.codes].argmax())

    def _are_no_labels(self, name: str) -> bool:
        """Whether all cells are numbers, and these too many or too broken for labels; known without a look at each."""
        import polars

        column = self.column(name)
        if column.dtype == polars.Datetime:
            return False
        values = self._cast(name) if column.dtype == polars.String else column.cast(polars.Float64).to_numpy()
        present = values[~np.isnan(values)]
        if not len(present) or np.isinf(present).any():
            return False
        return bool((present != present.round()).any() or len(np.unique(present)) > FEW)

    def times(self, name: str, held: Owners, series: bool) -> Times:
        """A column of times.

        If times are not a whole number of steps apart, such as months, each one counts as a step. Raises UsageError if
        a time cannot be read, or if rows are the readings of a series and a client has two at the same time.
        """
        moments, dated = self._moments(name)
        stamps, rank = np.unique(moments, return_inverse=True)
        if series:
            self._check_once(name, held, rank)
            self._check_pace(name, held, stamps, rank)
        return Times(moments, Clock.from_times(stamps), rank, dated)

    def _check_pace(self, name: str, held: Owners, stamps: Numbers, rank: Codes) -> None:
        """Warn of different times, whose ranks are given, that are no whole number of steps apart, and of gaps."""
        self._check_gaps(name, stamps)
        assigned = held.who >= 0
        share = assigned.sum() / max(1, len(held.names) * len(np.unique(rank[assigned])))
        if share < SHARED and not steps_of(stamps)[1]:
            warnings.warn(
                f"{self.name}: times in '{name}' are not a whole number of steps apart, so each of {len(stamps):,} "
                f"different times is a step, and a client has rows at {100 * share:.0f} % of these; if clocks are "
                "just inexact, round the times first",
                stacklevel=5,
            )

    def _check_gaps(self, name: str, stamps: Numbers) -> None:
        """Warn of times that nobody has among such as months, each of which is a step, so that windows bridge them."""
        pauses = np.diff(stamps)
        if len(pauses) < FEWEST or steps_of(stamps)[1]:
            return
        usual = np.median(pauses)
        long = pauses > LONG * usual
        if long.any() and (np.abs(pauses - usual) <= EVEN * usual).mean() >= MOST_EVEN:
            count = f"{int(long.sum()):,} of {len(pauses):,} steps are longer than the others"
            warnings.warn(
                f"{self.name}: nobody has a time in '{name}' in some places: {count} (a step is the next time that is "
                "there), so windows bridge these; add rows for the missing times, with the target left empty",
                stacklevel=5,
            )

    def _moments(self, name: str) -> tuple[Numbers, bool]:
        """[n] times as numbers, and whether they are dates; raises UsageError if one cannot be read."""
        import polars

        column = self.column(name)
        text = column.dtype == polars.String
        if column.dtype == polars.Datetime or (text and iso_seconds(column) is not None):
            values = self._seconds_of(name)
            moments, dated = np.where(np.isnan(values), np.inf, values), True
        elif text and (plain := self._cast(name)).min() >= 0 and plain.max() < COMPACT:
            moments, dated = plain, False
        else:
            moments, dated = self._moments_of_words(name, text)
        bad = np.flatnonzero(~np.isfinite(moments))
        if len(bad):
            wanted = "a date such as 2012-03-01 00:05" if dated else "a number, as most times are"
            if len(bad) == len(column):
                wanted = "a number or a date such as 2012-03-01 00:05"
            raise UsageError(self._no_date(name, int(bad[0]), wanted, "correct it"), Fault.DATE)
        return moments, dated

    def _moments_of_words(self, name: str, text: bool) -> tuple[Numbers, bool]:
        """[n] times as numbers, infinity for what is none, and whether they are dates; only text may be."""
        import polars

        texts = self.words(name)
        compact = compact_seconds(texts.names)
        if compact is not None:
            return compact[texts.codes], True
        values = self.formats.parse_numbers(polars.Series(texts.names, dtype=polars.String))
        numbers = np.isfinite(values[texts.codes])
        if not text or numbers.mean() >= 0.5:
            return values[texts.codes], False
        return np.where(numbers, np.inf, self._seconds_of(name)), True

    def _check_once(self, name: str, held: Owners, rank: Codes) -> None:
        """Raise UsageError if a client has two rows at one time, whose rank is given."""
        used = np.flatnonzero(held.who >= 0)
        keys, first, code = np.unique(
            held.who[used] * (int(rank.max()) + 1) + rank[used], return_index=True, return_inverse=True
        )
        if len(keys) == len(used):
            return
        again = int((first[code] != np.arange(len(used))).argmax())
        row, before = used[again], used[first[code[again]]]
        client, time = held.names[held.who[row]], self.column(name)[int(row)]
        where = self.row(before).rpartition(", ")[2]
        has_clock = re.search(r"\d:\d\d", str(time))
        fix = "; where clocks went back, write times with a zone, such as +01:00" if has_clock else ""
        raise UsageError(
            f"{self.place(row, name)}: client '{client}' has another row at the time {time}, in {where}{fix}",
            Fault.TWICE,
        )


def series_of(name: str, cells: Sequence[Any]) -> "polars.Series":
    """A column of Python's own values, None where there is none; of type Object if they are of none that is read."""
    import polars

    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds == {int} and all(cell is None or abs(cell) < 1 << 63 for cell in cells):
        return polars.Series(name, cells, polars.Int64)  # a float would give neighbouring large ones one name
    if kinds == {bool}:
        return polars.Series(name, cells, polars.Boolean)
    if all(issubclass(kind, Real) for kind in kinds):
        return polars.Series(name, [None if cell is None else float(cell) for cell in cells], polars.Float64)
    if all(issubclass(kind, date) for kind in kinds):
        zoned = {isinstance(cell, datetime) and cell.tzinfo is not None for cell in cells if cell is not None}
        if len(zoned) > 1:  # two clocks
            return polars.Series(name, cells, polars.Object)
        moments = polars.Series("", np.array([np.datetime64(_naive(cell) or "NaT", "us") for cell in cells]))
        return (moments.dt.replace_time_zone("UTC") if True in zoned else moments).alias(name)
    if all(issubclass(kind, str | Real) for kind in kinds):
        return polars.Series(name, [None if cell is None else str(cell) for cell in cells], polars.String)
    if all(issubclass(kind, timedelta) for kind in kinds):
        return polars.Series(name, cells, polars.Duration)
    return polars.Series(name, cells, polars.Object)


def _naive(moment: date | None) -> date | None:
    """A date, in UTC if it has a time zone."""
    if isinstance(moment, datetime) and moment.tzinfo is not None:
        return moment.astimezone(UTC).replace(tzinfo=None)
    return moment


def _number(text: Any) -> float:
    """The number that a cell holds; infinity for anything else."""
    try:
        value = np.inf if "_" in str(text) else float(text)  # Python takes 1_0 for 10
    except (TypeError, ValueError):
        return np.inf
    return value if np.isfinite(value) or str(text).lower() == "nan" else np.inf


def natural(name: str) -> tuple[float, list[tuple[float, str]]]:
    """Numbers in order of size, text after them; "client 2" comes before "client 10"."""
    parts = [(float(part), "") if part.isdecimal() else (math.inf, part) for part in re.split(r"(\d+)", name)]
    return _number(name), [*parts, (math.inf, name)]
