"""Whose model answers each new row."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..data.tables.frame import Frame
from ..data.tables.owners import Owners
from ..data.tables.words import Codes, Words, known_name, name_of
from ..errors import UsageError, list_names, nearest

NAMED = 8  # clients that a warning names
Unknown = Literal["error", "skip", "mean"]  # what becomes of rows of clients that a run does not know


@dataclass(frozen=True)
class RowOwners:
    """The clients of a run, of whom one may answer all rows, and what becomes of rows of clients that are unknown."""

    names: Sequence[str]
    client: str | None
    unknown: Unknown | None

    @cached_property
    def _places(self) -> dict[str, int]:
        names = {name: i for i, name in enumerate(self.names)}
        return {name_of(name): i for name, i in names.items()} | names

    @property
    def _place(self) -> int:
        """That of the client who answers all rows."""
        try:
            return self._places[known_name(str(self.client), self._places)]
        except KeyError:
            raise UsageError(f"there is no client '{self.client}'; {nearest(str(self.client), self.names)}") from None

    def select_rows(self, frame: Frame, column: str, others: str) -> NDArray[np.bool_]:
        """[n] which rows are answered: all, unless `unknown` skips those of other clients, which a warning counts.

        `others` is what becomes of other clients' rows where one answers all.
        """
        every = np.ones(len(frame), bool)
        if not column or column not in frame.columns:
            return every
        named = frame[column].words()
        if self.client is not None:
            place = self._place
            rows = np.array([name != "" and self._places.get(name) != place for name in named.names])[named.codes]
            if rows.any():
                count = f"{_tell_rows(rows)} are of other clients: {_tell(named, rows)}"
                warnings.warn(f"{frame.name}: {count}; they are {others}", stacklevel=4)
            return every
        rows = np.array([name not in self._places for name in named.names])[named.codes]
        if self.unknown not in (None, "skip") or not rows.any() or rows.all():
            return every
        warnings.warn(
            f"{frame.name}: skipped {_tell_rows(rows)}, of no client of the run: {_tell(named, rows)}; "
            f"the first: {frame.row(int(rows.argmax()))}",
            stacklevel=4,
        )
        return ~rows

    def find(self, frame: Frame, column: str, alone: bool = False) -> Owners:
        """Whose model answers each row; -1: none, as rows of others where `client` answers for its own `alone`."""
        if column not in frame.columns or (self.client is not None and not alone):
            if self.client is None:
                frame.need([column])  # raises
            return Owners([*self.names], np.full(len(frame), self._place), None)
        if self.client is not None:
            named, place = frame[column].text(), self._place
            where = [place if self._places.get(name) == place else -1 for name in named.names]
            if max(where) < 0:
                raise UsageError(f"{frame.name} has no row of client '{self.client}' in column '{column}'")
            return Owners([*self.names], np.array(where)[named.codes], None)
        named = frame[column].words()
        owners = self._list_owners(named)
        if self.unknown != "mean" and len(owners.names) > len(self.names):
            at = int((owners.who >= len(self.names)).argmax())
            raise UsageError(f"{frame[column].place(at)}: {self._tell_unknown(named.names[named.codes[at]])}")
        return owners

    def find_named(self, names: Sequence[str]) -> tuple[Owners, Codes]:
        """Whose model answers each of the examples that are kept, and which of [n] these are."""
        index = {name: i for i, name in enumerate(dict.fromkeys(names))}
        named = Words([*index], np.array([index[name] for name in names]))
        owners = self._list_owners(named)
        rows = owners.who >= len(self.names)
        if not rows.any() or self.unknown == "mean":
            return owners, np.arange(len(names))
        if self.unknown != "skip" or rows.all():
            raise UsageError(self._tell_unknown(names[int(rows.argmax())]))
        warnings.warn(f"skipped {_tell_rows(rows)}, of no client of the run: {_tell(named, rows)}", stacklevel=3)
        kept = np.flatnonzero(~rows)
        return Owners([*self.names], owners.who[kept], None), kept

    def _list_owners(self, named: Words) -> Owners:
        """Whose model answers each row, where names of no client have places behind the clients' own."""
        strange = [name for name in named.names if name not in self._places]
        places = self._places | {name: len(self.names) + i for i, name in enumerate(strange)}
        where = np.array([places[name] for name in named.names], np.int64)
        return Owners([*self.names, *strange], where[named.codes], None)

    def _tell_unknown(self, name: str) -> str:
        """What to say of a row that names a client that the run does not know, or none."""
        what = f"there is no client '{name}'; {nearest(name, self.names)}" if name else "there is no value; fill it in"
        other = "mean" if self.unknown == "skip" else "skip or mean"
        return f"{what} (or set unknown to {other})"


def check_unknown(policy: str | None) -> None:
    """Raise UsageError unless it says what becomes of rows of unknown clients."""
    if policy is not None and policy not in get_args(Unknown):
        raise UsageError(f"unknown must be {', '.join(get_args(Unknown))}; got {policy!r:.80}")


def _tell_rows(rows: NDArray[np.bool_]) -> str:
    """How many of all rows these are."""
    return f"{int(rows.sum()):,} of {len(rows):,} rows"


def _tell(named: Words, rows: NDArray[np.bool_]) -> str:
    """The clients that these rows name, and how often."""
    counts = Words(named.names, named.codes[rows]).counts
    without = int((named.empty & rows).sum())
    parts = [f"{name} ({count})" for name, count in counts.items()]
    if without:
        parts.insert(0, f"{without:,} without one")
    return list_names(parts, NAMED)
