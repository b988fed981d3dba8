"""A table, whose errors name the place of each row in its file."""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import Fault, UsageError, nearest, some
from .cells import Formats
from .column import Column
from .moments import is_zoned, read_times
from .owners import Owners
from .times import Times
from .words import Codes, join_names, split_names

if TYPE_CHECKING:
    import polars

DAY = 86_400.0  # seconds
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
    _columns: dict[str, Column] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return self._table.height

    @property
    def columns(self) -> list[str]:
        return [*self._table.columns, *self._strange]

    def __getitem__(self, name: str) -> Column:
        """A column as it was read; raises UsageError for one of a type that is no number, text or date."""
        self.check_types([name])
        if name not in self._columns:
            values = self._table[name].alias("column")  # polars takes names such as ^a$ and * for patterns of names
            self._columns[name] = Column(self.name, name, values, self.formats, self.row)
        return self._columns[name]

    def check_types(self, names: Iterable[str]) -> None:
        """Raise UsageError for a column of a type that is no number, text or date."""
        for name in names:
            if name in self._strange:
                raise UsageError(
                    f"{self.name}: column '{name}' holds {self._strange[name]}, not numbers, text or dates; "
                    "convert it, or leave it out with ignore",
                    Fault.KIND,
                )

    def kind(self, name: str) -> str:
        """What most cells of a column are: "numbers", "dates", "text", "empty", or another type."""
        return self._strange.get(name) or self[name].kind()

    def is_zoned(self, name: str) -> bool:
        """Whether a column's times name a time zone."""
        return is_zoned(self[name])

    def times(self, name: str, held: Owners, series: bool) -> Times:
        """A column of times, of the readings of series or not; raises UsageError as `read_times` does."""
        return read_times(self[name], held, series)

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
        truths = tuple(name for name, kind in kinds.items() if kind == "number" and self[name].are_truths())
        zoned = {name: self.is_zoned(name) for name, kind in kinds.items() if kind == "date"}
        dropped = tuple(name for name in self.columns if name not in {*kinds, *others})
        return {"formats": replace(self.formats, truths=truths, zoned=zoned), "dropped": dropped}

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
        kept = ~np.any([self[name].words().empty for name in names], axis=0)
        if kept.all():
            return self
        message = f"{some(int((~kept).sum()), len(kept), 'row')} no {' or no '.join(names)}"
        if not kept.any():
            raise UsageError(f"{self.name}: {message}", Fault.MISSING)
        first = self.row(int(kept.argmin()))
        warnings.warn(f"{self.name}: {message}, left out (the first: {first})", stacklevel=4)
        return self.keep(kept)

    def with_joined(self, name: str) -> "Frame":
        """The frame with a column for several that its name lists, such as `school,class`; without these, as it is.

        A cell is a line of CSV, such as `Ulm,3b`, so different cells never become the same; it is empty where one of
        them is. Raises UsageError if a column has this name too.
        """
        import polars

        parts = split_names(name)
        if name in self.added or len(parts) < 2 or not {*parts} <= {*self.columns}:
            return self
        if name in self.columns:
            why = f"{self.name}: '{name}' is a column, and also lists {len(parts)} others; give it another name"
            raise UsageError(why, Fault.COLUMNS)
        self.need(parts)
        joined = self[parts[0]].words()
        cells, codes = [[text] for text in joined.names], joined.codes
        for part in parts[1:]:
            texts = self[part].words()
            pairs, codes = np.unique(codes * len(texts.names) + texts.codes, return_inverse=True)
            cells = [[*cells[pair // len(texts.names)], texts.names[pair % len(texts.names)]] for pair in pairs]
        lines = [join_names(texts) if all(texts) else None for texts in cells]
        column = polars.Series(name, lines, polars.String).gather(codes)
        return replace(self, _table=self._table.hstack([column]), added=[*self.added, name])

    def with_text(self, name: str, text: str) -> "Frame":
        """The frame with a further column, whose cells are all this text."""
        import polars

        column = polars.Series(name, [text] * len(self), polars.String)
        return replace(self, _table=self._table.hstack([column]), added=[*self.added, name])

    def sources_of(self, name: str) -> list[str]:
        """The columns that a column is made of: those that `with_joined` has joined, or itself."""
        return split_names(name) if name in self.added else [name]

    def write(self, path: Path) -> None:
        """Write the rows as Parquet; columns that hold no numbers, text or dates are empty there."""
        import polars

        empty = [polars.lit(None, polars.String).alias(name) for name in self._strange]
        self._table.with_columns(empty).write_parquet(path)

    def row(self, row: int) -> str:
        """Where a row is, for an error."""
        return self._place(int(row if self._rows is None else self._rows[row]))

    def need(self, names: list[str]) -> None:
        """Raise UsageError unless there are columns of these names, all different."""
        for name in names:
            if name not in self.columns:
                lacking = next((part for part in split_names(name) if part not in self.columns), name)
                why = f"{self.name} has no column '{lacking}'; {nearest(lacking, self.columns)}"
                raise UsageError(why, Fault.COLUMNS)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"{self.name}: column '{twice[0]}' is named twice", Fault.COLUMNS)


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
