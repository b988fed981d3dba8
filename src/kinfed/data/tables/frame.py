"""Cells of a table, whose place in its file every error names."""

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import Fault, UsageError, nearest, some
from .forms import MISSING, Form, Unclear, Written, amounts, dates, short_years
from .owners import Owners
from .times import SAMPLE, compact_seconds, iso_seconds, seconds_of, steps_of, zone_of
from .words import Codes, Numbers, Words, merged, name_of, words_of

if TYPE_CHECKING:
    import polars

TRUTH = {"true": 1.0, "false": 0.0}
DAY = 86_400.0  # seconds
LARGEST = 1e30  # the largest number that float32 can hold and still scale
FEW = 20  # a target of whole numbers with at most this many different values counts as labels
EARNEST, FEWEST = 0.05, 10  # the share of words among numbers, and their number, from which cells are categories
GAPLESS = 5  # values from which labels are whole numbers without a gap
SHARED = 0.9  # warn if clients have rows at less than this share of all times
COMPACT = 1.9e7  # the least number that may be a date, as 19000101


class Frame:
    """A table whose cells are known by their place in what was read."""

    def __init__(
        self,
        name: str,
        table: "polars.DataFrame",
        place: Callable[[int], str],
        strange: Mapping[str, str] | None = None,
        rows: Codes | None = None,
        added: Sequence[str] = (),
    ) -> None:
        """`name` is for errors; `place` says where a row that was read is; rows: [n] are these, if some were left out.

        `strange` are the types of columns that hold no numbers, text or dates, `added` columns that no file has.
        """
        self.added = added
        self.name, self._table, self._place, self._strange, self._rows = name, table, place, strange or {}, rows
        self._parsed: dict[str, Numbers] = {}
        self._forms: dict[tuple[str, bool], Form | None] = {}
        self._written: Mapping[str, Written] = {}

    def __len__(self) -> int:
        return self._table.height

    @property
    def columns(self) -> list[str]:
        """Their names."""
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
        frame = Frame(self.name, self._table.filter(kept), self._place, self._strange, rows, self.added)
        return frame.as_written(self._written)

    def as_written(self, known: Mapping[str, Written]) -> "Frame":
        """The frame with text in these columns read as they are known to be written, whatever these cells suggest."""
        frame = Frame(self.name, self._table, self._place, self._strange, self._rows, self.added)
        frame._written = known
        return frame

    def written(self, name: str, dated: bool) -> Written | None:
        """How a column writes its dates, or its numbers; None of numbers that are not text."""
        if not self.is_text(name):
            return Written("typed", zoned=self.is_zoned(name)) if dated else None
        if name in self._written:
            return self._written[name]
        if not dated and self._are_truths(name):
            return Written("truth")
        form = self._form(name, dated)
        return form.written if form is not None else Written(zoned=self.is_zoned(name) if dated else None)

    def renamed(self, names: Mapping[str, str]) -> "Frame":
        """The frame with columns under other names, by their own; raises UsageError if one is missing or double."""
        self.need([*names])
        columns = [names.get(own, own) for own in self.columns]
        if twice := sorted({name for name in columns if columns.count(name) > 1}):
            told = f"{self.name}: two columns would be named '{twice[0]}'; give one of them another name"
            raise UsageError(told, Fault.COLUMNS)
        table = self._table.rename({own: name for own, name in names.items() if own in self._table.columns})
        strange = {names.get(own, own): kind for own, kind in self._strange.items()}
        return Frame(self.name, table, self._place, strange, self._rows, self.added)

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
                told = f"{self.name} has no column '{name}'; {nearest(name, self.columns)}"
                raise UsageError(told, Fault.COLUMNS)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"{self.name}: column '{twice[0]}' is named twice", Fault.COLUMNS)

    def words(self, name: str) -> Words:
        """A column as text, without blanks around it."""
        import polars

        column = self.column(name)
        if column.dtype != polars.String:
            return words_of(column)
        known = column.fill_null("")
        names = known.unique(maintain_order=True)
        codes = known.cast(polars.Enum(names)).to_physical().to_numpy().astype(np.int64)
        return merged([name_of(text.strip()) for text in names.to_list()], codes)

    def text(self, name: str) -> Words:
        """A column as text; raises UsageError where there is no value."""
        words = self.words(name)
        self._check_filled(name, words.empty, "fill it in")
        return words

    def _check_filled(self, name: str, empty: NDArray[np.bool_], fix: str) -> None:
        """Raise UsageError for the first of the cells [n] that are `empty`."""
        if empty.any():
            raise UsageError(f"{self.place(int(empty.argmax()), name)}: there is no value; {fix}", Fault.MISSING)

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
        plain = int((~np.isnan(self._cast(name))).sum())
        if plain == len(column):
            return "numbers"
        rest = self._rest(name)
        rest = rest.filter(~rest.is_in([*MISSING]))
        if not plain and not len(rest):
            return "empty"
        if not plain and self._are_truths(name):
            return "numbers"
        # Those with a decimal comma count too, so that `numbers` says what to do about them.
        numbers = int(rest.str.replace(",", ".", literal=True).cast(polars.Float64, strict=False).count())
        if plain + numbers >= len(rest) - numbers:
            return "text" if self._are_categories(name, rest, plain) else "numbers"
        if self._form(name, dated=True) is not None:
            return "dates"
        seen = rest.head(SAMPLE).str.to_uppercase().to_list()  # as T and Z are written in times
        if sum(np.isfinite(seconds_of(entry)) for entry in seen) > len(seen) / 2:
            return "dates"
        if cell := short_years(column):
            what = f"column '{name}' is taken for text; if '{cell}' is a date, write its year with four digits"
            warnings.warn(f"{self.name}: {what}", stacklevel=4)
        return "text"

    def _are_categories(self, name: str, words: "polars.Series", numbers: int) -> bool:
        """Whether numbers and words are categories, as 0, 1, 2 and 3+ are: few different cells, and words in earnest.

        A warning says so. `words` are the cells that are no numbers.
        """
        import polars

        words = words.filter(words.str.replace(",", ".", literal=True).cast(polars.Float64, strict=False).is_null())
        if len(words) < max(FEWEST, EARNEST * (len(words) + numbers)) or name in self._written:
            return False
        if self._form(name, dated=False) is not None or len(self.words(name).names) > FEW:
            return False
        what = f"column '{name}' has few different cells, some of them words such as '{words[0]}'"
        warnings.warn(f"{self.name}: {what}, so its cells are categories", stacklevel=4)
        return True

    def _are_truths(self, name: str) -> bool:
        """Whether a column of text holds true and false, and nothing else."""
        rest = self._rest(name)
        rest = rest.filter(~rest.is_in([*MISSING]))
        return bool(len(rest)) and bool(np.isnan(self._cast(name)).all()) and bool(rest.is_in([*TRUTH]).all())

    def _rest(self, name: str) -> "polars.Series":
        """The cells of a column of text that polars reads as no number, without blanks around them; none is empty."""
        rest = self.column(name).filter(np.isnan(self._cast(name))).drop_nulls().str.strip_chars().str.to_lowercase()
        return rest.filter(~rest.is_in(["", "nan"]))

    def _cast(self, name: str) -> Numbers:
        """[n] a column of text as numbers, NaN for anything else."""
        if name not in self._parsed:
            import polars

            values = self.column(name).cast(polars.Float64, strict=False).fill_null(math.nan)
            form = self._form(name, dated=False) if name in self._written or values.is_nan().any() else None
            self._parsed[name] = values.to_numpy() if form is None else form.values
        return self._parsed[name]

    def _form(self, name: str, dated: bool) -> Form | None:
        """A column of text as dates, or as amounts, that are written in a form of their own; None if it has none.

        A warning says what one cell was read as. Raises UsageError where the column does not decide what is meant.
        """
        if (name, dated) not in self._forms:
            known = self._written.get(name)
            known = None if known is not None and known.kind in ("truth", "typed") else known
            try:
                form = (dates if dated else amounts)(self.column(name), known)
            except Unclear as problem:
                raise UsageError(f"{self.place(problem.row, name)}: {problem}", Fault.WRITTEN) from None
            if form is not None and form.note:
                warnings.warn(f"{self.name}: column '{name}': {form.note}", stacklevel=5)
            self._forms[name, dated] = form
        return self._forms[name, dated]

    def numbers(self, name: str) -> Numbers:
        """[n] a column as numbers, NaN where there is none; raises UsageError for anything else."""
        import polars

        column = self.column(name)
        if column.dtype == polars.String:
            values = self._cast(name)
            if np.isnan(values).any():
                values = self._completed(name, values)
        elif column.dtype == polars.Datetime:
            values = np.full(len(column), np.inf)
        else:
            values = column.cast(polars.Float64).fill_null(math.nan).to_numpy()
        bad = np.flatnonzero(np.abs(values) > LARGEST)
        if len(bad):
            raise UsageError(self._no_number(name, bad, bool(np.isinf(values[bad[0]]))), Fault.NUMBER)
        return values

    def filled(self, name: str) -> Numbers:
        """[n] a column as numbers; raises UsageError where there is none."""
        values = self.numbers(name)
        self._check_filled(name, np.isnan(values), "fill it in")
        return values

    def _no_number(self, name: str, bad: Codes, infinite: bool) -> str:
        """What to say of cells that are no numbers, of which those of the rows `bad` are the first."""
        more = f" (and {len(bad) - 1:,} more)" if len(bad) > 1 else ""
        cell = self.cell(bad[0], name)
        text = f"{self.place(bad[0], name)}: '{cell}' is {'not a finite' if infinite else 'too large a'} number{more}"
        if infinite and name in self._written and self._written[name].kind == "truth":
            return f"{self.place(bad[0], name)}: '{cell}' is neither true nor false{more}, as all were in training"
        if infinite and name in self._written:
            text += f"; in training they were written such as {self._written[name].example}: write it so"
        elif infinite:
            fix = "write a decimal point for the comma" if _has_decimal_comma(cell) else "correct it"
            text += f"; {fix}, leave it empty if it is missing, or leave the column out with ignore"
        return text

    def _completed(self, name: str, values: Numbers) -> Numbers:
        """The numbers of text with those that only Python reads, truth values, and infinity for what is no number."""
        column, missing = self.column(name), np.isnan(values)
        rest = Frame(self.name, column.filter(missing).to_frame(), self._place).words(column.name)
        entries = [entry.lower() for entry in rest.names]
        known = {"": math.nan, "nan": math.nan, **dict.fromkeys(MISSING, math.nan)}
        each = np.array([known.get(entry, _number(entry)) for entry in entries])
        written = self._written.get(name)
        if (written is not None and written.kind == "truth") or (missing.all() and not np.isfinite(each).any()):
            each = np.array([TRUTH.get(entry, value) for entry, value in zip(entries, each, strict=True)])
        result = values.copy()
        result[missing] = each[rest.codes]
        return result

    def seconds(self, name: str) -> Numbers:
        """[n] a column of dates as seconds since 1970, NaN where there is none; raises UsageError for anything else."""
        values = self._seconds_of(name)
        bad = np.flatnonzero(np.isinf(values))
        if len(bad):
            raise UsageError(
                f"{self.place(bad[0], name)}: '{self.column(name)[int(bad[0])]}' is not a date such as 2012-03-01 "
                "00:05, as most of this column are; correct it, or leave it empty if it is missing",
                Fault.DATE,
            )
        return values

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
            known = ~np.isnat(values)
            self._check_clock(name, known, self.is_zoned(name))
            return np.where(known, values.astype(np.int64) / 1e6, math.nan)
        if column.dtype != polars.String:
            return np.where(self.words(name).empty, math.nan, math.inf)
        way = self._written.get(name, Written())
        if way.kind in ("plain", "typed") and not way.zoned and (seconds := iso_seconds(column)) is not None:
            return seconds
        if (form := self._form(name, dated=True)) is not None:
            self._check_clock(name, np.nan_to_num(form.values, posinf=0) % DAY > 0, zoned=False)
            return form.values
        words = self.words(name)
        self._check_zones(name, words)
        known = dict.fromkeys(("", "nan", "nat", *MISSING), math.nan)
        each = [known.get(text.lower(), math.inf) for text in words.names]
        each = [seconds_of(text) if one == math.inf else one for text, one in zip(words.names, each, strict=True)]
        return np.array(each, np.float64)[words.codes]

    def _check_clock(self, name: str, times: NDArray[np.bool_], zoned: bool) -> None:
        """Raise UsageError if there are `times` [n] with a time zone or without one, and training's were otherwise."""
        known = self._written.get(name, Written()).zoned
        if known is not None and known != zoned and times.any():
            row, which = int(times.argmax()), ("a", "no") if zoned else ("no", "a")
            raise UsageError(
                f"{self.place(row, name)}: '{self.column(name)[row]}' has {which[0]} time zone, but in training times "
                f"had {which[1]} time zone; write it as they were",
                Fault.CLOCKS,
            )

    def _check_zones(self, name: str, words: Words) -> None:
        """Raise UsageError if some times have a zone and others have none; warn of several zones."""
        zones = [zone_of(text) for text in words.names]
        places = np.array([0 if zone is None else 1 if zone else 2 for zone in zones], np.int64)[words.codes]
        without, within = np.flatnonzero(places == 2), np.flatnonzero(places == 1)
        self._check_clock(name, places == 2, zoned=False)
        self._check_clock(name, places == 1, zoned=True)
        if len(without) and len(within):
            cells = [words.names[words.codes[rows[0]]] for rows in (without, within)]
            raise UsageError(
                f"{self.place(without[0], name)}: '{cells[0]}' has no time zone, but '{cells[1]}' has one, so there "
                "are two clocks; write all with a zone, such as +01:00, or all without",
                Fault.CLOCKS,
            )
        if len(several := sorted({zone for zone in zones if zone})) > 1:
            listed = f"{', '.join(several[:4])}{', ...' if len(several) > 4 else ''}"
            warnings.warn(
                f"{self.name}: column '{name}' has times of {len(several)} time zones ({listed}); all are taken in UTC",
                stacklevel=5,
            )

    def labels(self, name: str) -> Words | None:
        """The labels in a column, "" where there is none; None if it holds numbers that are not labels.

        Raises UsageError if most of the column are such numbers, or all except words for a missing value.
        """
        if self._are_no_labels(name):
            return None
        words = self.words(name)
        words = merged(["" if label.lower() == "nan" else label for label in words.names], words.codes)  # no number
        value = {label: _number(label) for label in words.names if label}
        odd = {label for label, number in value.items() if np.isinf(number)}
        values = np.unique([number for number in value.values() if np.isfinite(number)])
        few = len(values) <= FEW and (values == values.round()).all()
        # Codes of classes leave no gaps, as scores such as 0, 2, 4 ... do.
        few = few and (len(values) < GAPLESS or np.ptp(values) == len(values) - 1)
        if self._forms.get((name, False)) is not None:  # a few amounts
            return words
        commas = {label for label in odd if _has_decimal_comma(label)}
        if commas and len(commas) + len(value) - len(odd) > len(value) / 2:
            at = int(np.array([label in commas for label in words.names])[words.codes].argmax())
            raise UsageError(
                f"{self.place(at, name)}: '{words.names[words.codes[at]]}' has a decimal comma; write a point for it, "
                "or set labels to true if these are classes",
                Fault.NUMBER,
            )
        if not len(values):
            return words
        if odd:
            strange = np.array([label in odd for label in words.names])[words.codes]
            missing = all(label.lower() in MISSING for label in odd)
            if missing and not few:
                return None
            if missing or (not few and strange.mean() < 0.5):
                at = int(strange.argmax())
                raise UsageError(
                    f"{self.place(at, name)}: '{words.names[words.codes[at]]}' is not a number, as most of this "
                    "column are; leave it empty if it is missing",
                    Fault.NUMBER,
                )
            return words
        return words if few else None

    def _are_no_labels(self, name: str) -> bool:
        """Whether all cells are numbers, and these too many or too broken for labels; known without a look at each."""
        import polars

        column = self.column(name)
        if column.dtype == polars.Datetime:
            return False
        values = self._cast(name) if column.dtype == polars.String else column.cast(polars.Float64).to_numpy()
        if column.dtype == polars.String and np.isnan(values).any() and len(self._rest(name)):
            return False
        known = values[~np.isnan(values)]
        if not len(known) or np.isinf(known).any():
            return False
        return bool((known != known.round()).any() or len(np.unique(known)) > FEW)

    def moments(self, name: str, held: Owners, series: bool) -> tuple[Numbers, Codes, bool]:
        """[n] times as numbers, [n] as steps from 0, and whether they are dates (then in seconds).

        If times are not a whole number of steps apart, such as months, each one counts as a step. Raises UsageError if
        a time cannot be read, or if rows are the readings of a series and a client has two at the same time.
        """
        moments, dated = self._moments(name)
        stamps, rank = np.unique(moments, return_inverse=True)
        if series:
            self._check_once(name, held, rank)
        steps, whole = steps_of(stamps)
        if not whole:
            assigned = held.who >= 0
            share = assigned.sum() / max(1, len(held.names) * len(np.unique(rank[assigned])))
            if series and share < SHARED:
                warnings.warn(
                    f"{self.name}: times in '{name}' are not a whole number of steps apart, so each of {len(stamps):,} "
                    f"different times is a step, and a client has rows at {100 * share:.0f} % of these; if clocks are "
                    "just inexact, round the times first",
                    stacklevel=4,
                )
        return moments, steps[rank], dated

    def _moments(self, name: str) -> tuple[Numbers, bool]:
        """[n] times as numbers, and whether they are dates; raises UsageError if one cannot be read."""
        import polars

        column = self.column(name)
        text = column.dtype == polars.String
        quick = column.dtype == polars.Datetime
        quick = quick or (text and (iso_seconds(column) is not None or self._form(name, dated=True) is not None))
        plain = self._cast(name) if text and not quick else None
        if quick:
            values = self._seconds_of(name)
            moments, dated = np.where(np.isnan(values), np.inf, values), True
        elif plain is not None and plain.min() >= 0 and plain.max() < COMPACT:
            moments, dated = plain, False
        else:
            moments, dated = self._moments_of_words(name, text)
        bad = np.flatnonzero(~np.isfinite(moments))
        if len(bad):
            wanted = "a date such as 2012-03-01 00:05, as most times are" if dated else "a number, as most times are"
            if len(bad) == len(column):
                wanted = "a number or a date such as 2012-03-01 00:05"
            cell = column[int(bad[0])]
            raise UsageError(
                f"{self.place(bad[0], name)}: '{'' if cell is None else cell}' is not {wanted}", Fault.DATE
            )
        return moments, dated

    def _moments_of_words(self, name: str, text: bool) -> tuple[Numbers, bool]:
        """[n] times as numbers, infinity for what is none, and whether they are dates; only text may be."""
        words = self.words(name)
        compact = compact_seconds(words.names)
        if compact is not None:
            return compact[words.codes], True
        each = np.array([_number(one) for one in words.names])
        numbers = np.isfinite(each[words.codes])
        if not text or numbers.mean() >= 0.5:
            return each[words.codes], False
        self._check_zones(name, words)
        seconds = np.array([seconds_of(one) for one in words.names])[words.codes]
        return np.where(numbers, np.inf, seconds), True

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
        fix = "; where clocks went back, write times with a zone, such as +01:00" * bool(
            re.search(r"\d:\d\d", str(time))
        )
        raise UsageError(
            f"{self.place(row, name)}: client '{client}' has another row at the time {time}, in {where}{fix}",
            Fault.TWICE,
        )


def series_of(name: str, cells: Sequence[Any]) -> "polars.Series":
    """A column of Python's own values, None where there is none; of type Object if they are of none that is read."""
    import polars

    kinds = {type(one) for one in cells if one is not None}
    if kinds == {int} and all(one is None or abs(one) < 1 << 63 for one in cells):
        return polars.Series(name, cells, polars.Int64)  # a float would give neighbouring large ones one name
    if kinds == {bool}:
        return polars.Series(name, cells, polars.Boolean)
    if all(issubclass(kind, Real) for kind in kinds):
        return polars.Series(name, [None if one is None else float(one) for one in cells], polars.Float64)
    if all(issubclass(kind, date) for kind in kinds):
        zoned = {isinstance(one, datetime) and one.tzinfo is not None for one in cells if one is not None}
        if len(zoned) > 1:  # two clocks
            return polars.Series(name, cells, polars.Object)
        moments = polars.Series("", np.array([np.datetime64(_naive(one) or "NaT", "us") for one in cells]))
        return (moments.dt.replace_time_zone("UTC") if True in zoned else moments).alias(name)
    if all(issubclass(kind, str | Real) for kind in kinds):
        return polars.Series(name, [None if one is None else str(one) for one in cells], polars.String)
    if all(issubclass(kind, timedelta) for kind in kinds):
        return polars.Series(name, cells, polars.Duration)
    return polars.Series(name, cells, polars.Object)


def _naive(moment: date | None) -> date | None:
    """A date, in UTC if it has a time zone."""
    if isinstance(moment, datetime) and moment.tzinfo is not None:
        return moment.astimezone(UTC).replace(tzinfo=None)
    return moment


def _has_decimal_comma(text: str) -> bool:
    """Whether text would be a number with a point in place of its comma."""
    return "," in text and math.isfinite(_number(text.replace(",", ".", 1)))


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
