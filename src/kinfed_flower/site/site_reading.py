"""How a site's operator wants its file read: which columns, under which names, and what may be told of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kinfed.core.field_checks import CountOrZero
from kinfed.data.tables.cells import FORMATS, FormatSettings
from kinfed.data.tables.frame import Frame
from kinfed.data.tables.open_table import open_table
from kinfed.data.tables.owners import Owners
from kinfed.data.tables.row_examples import column_kind, keep_weighted
from kinfed.errors import Fault, UsageError

from ..wire.messages import Fields
from .drawn_rows import Disclosure, Withheld

SETTINGS = ("past", "horizon", "future", "static", "categories", *FORMATS)  # that are said as key=value
NAMES = 1000  # categories of a column whose names leave a site, unless its operator says otherwise


@dataclass(frozen=True)
class Reading(FormatSettings):
    """The settings of `kinfed flower node` that say how its file is read.

    With `time` the rows are split in time order. With `group`, such as a person with several visits, all rows of a
    group are in one part of the split, and the verdict counts them as one observation. With `past`, too, they are
    readings of one series, of which examples are windows: `past` readings are the input, the next `horizon` the target.
    Then all other columns are covariates, known until the last reading, or, of those in `future`, also in the steps
    that are to be forecast.
    """

    target: str = "y"  # the column to predict, by the name that the sites agreed on
    columns: Mapping[str, str] = field(default_factory=dict)  # names that the sites agreed on, by those in the file
    ignore: Sequence[str] = ()  # columns that are no inputs
    categories: CountOrZero = NAMES  # of a column of text, how many names may leave the site: the most frequent ones
    time: str = ""  # the column of times
    group: str = ""  # the column of whom or what a row is of
    weight: str = ""  # the column of as how many rows each row counts, by the name that the sites agreed on
    past: CountOrZero = 0  # readings in
    horizon: CountOrZero = 0  # readings out
    future: Sequence[str] = ()  # columns of a series that are known ahead
    static: Sequence[str] = ()  # columns of a series that are the same in all rows
    client: str = ""  # the column that names the clients of a gateway
    few_rows: bool = False  # whether gradients of few rows may leave the site, see `Disclosure`

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.past) != bool(self.horizon) or (self.past and not self.time):
            raise UsageError(
                "a series needs --time COLUMN, past=READINGS and horizon=READINGS; give all three, or --time alone for "
                "rows that are examples and split in time order, or none"
            )
        roles = {self.target: "the target", self.time: "time", self.group: "the group"} | dict.fromkeys(
            self.ignore, "in --ignore"
        )
        if self.weight and (what := roles.get(self.weight)):
            raise UsageError(f"column '{self.weight}' is {what}, so it cannot be the weight too; name another column")
        if (self.future or self.static) and not self.past:
            raise UsageError("future and static are of a series; give --time, past and horizon, too")
        if both := sorted({*self.future, *self.static} & {*self.ignore}) or sorted({*self.future} & {*self.static}):
            raise UsageError(f"column '{both[0]}' is in two of future, static and --ignore; leave it in one")

    @property
    def own_names(self) -> dict[str, str]:
        """The names of columns in the file, by those that the sites agreed on."""
        return {agreed: name for name, agreed in self.columns.items()}

    def targets(self, frame: Frame) -> list[str]:
        """The columns to predict: several, with commas between, if no column has the whole name."""
        return [self.target] if self.target in frame.columns else [name.strip() for name in self.target.split(",")]


@dataclass(frozen=True)
class OwnTable:
    """The table of the site `name`, whose columns have the names that the sites agreed on."""

    path: Path
    name: str
    reading: Reading
    limits: Disclosure | None = None

    @cached_property
    def frame(self) -> Frame:
        """Its cells; raises UsageError for a column that the reading names and the file lacks."""
        reading, frame = self.reading, open_table(self.path).rename(self.reading.columns)
        used = [name for name in (reading.time, reading.group, reading.weight) if name]
        for names in (reading.targets(frame), used, reading.formats.text, reading.ignore, reading.future):
            frame.need([*names])
        frame.need([*reading.static])
        frame = frame.read_as(reading.formats)
        return keep_weighted(frame, reading.weight) if reading.weight and not reading.past else frame

    @cached_property
    def targets(self) -> list[str]:
        """The columns to predict."""
        return self.reading.targets(self.frame)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The kind of each column that may be an input; raises UsageError for a type that can be none."""
        reading = self.reading
        taken = {*self.targets, reading.time, reading.group, reading.weight, *reading.ignore, *self.frame.added}
        names = [name for name in self.frame.columns if name not in taken]
        self.frame.check_types(names)
        return {name: column_kind(self.frame, name) for name in names}

    @property
    def owners(self) -> Owners:
        """Whose the rows are."""
        return Owners([self.name], np.zeros(len(self.frame), np.int64), None)

    def units(self, names: Iterable[str]) -> Fields:
        """The unit in which each of these columns is written, a sign of money or %, of those that have one."""
        units = {name: self.frame[name].unit for name in names}
        return {name: unit for name, unit in units.items() if unit and self.frame.kind(name) == "numbers"}

    def check_asked(self, inputs: Iterable[str]) -> None:
        """Raise UsageError for inputs that the server asks for, but that are not there, or stay here."""
        columns = [*inputs]
        self.frame.need(columns)
        if withheld := {*columns} - {*self.kinds}:
            problem = f"{self.frame.name}: the server asks for column '{min(withheld)}', which stays here"
            raise UsageError(f"{problem} (--ignore, --time, --group, --weight)", Fault.WITHHELD)

    def check_targets(self, targets: Any, classes: Sequence[str] | None) -> None:
        """Raise Withheld unless the server asks for this site's own targets, with all classes that it has.

        How many rows have a label would show in the number of rows, if the server chose the classes.
        """
        if targets != self.targets:
            raise Withheld(f"it predicts {', '.join(self.targets)} (--target), and the server asks for other targets")
        texts = None if classes is None else self.frame[self.targets[0]].words()
        if texts is not None and classes is not None and ((texts.find_places(classes) < 0) & ~texts.empty).any():
            raise Withheld("the server leaves out classes that this site has; each site tells its classes beforehand")


def settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings of a `Reading` in "past=12", "decimal=," and the like; raises UsageError for anything else."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if name not in SETTINGS or not equals:
            raise UsageError(f"a table is read by {', '.join(SETTINGS)} and a value, such as past=12; got '{pair}'")
        if name in ("past", "horizon", "categories"):
            if not value.isdecimal():
                raise UsageError(f"{name} is a whole number, from 0; got '{pair}'")
            settings[name] = int(value)
        elif name in ("decimal", "thousands"):
            settings[name] = value
        else:
            settings[name] = (
                *settings.get(name, ()),
                *(columns_in(value) if name in ("future", "static") else [value]),
            )
    return settings


def columns_in(listed: str) -> tuple[str, ...]:
    """The names of columns with commas between."""
    return tuple(name.strip() for name in listed.split(",") if name.strip())


def names_of(pairs: Sequence[str]) -> dict[str, str]:
    """{their name: the agreed one} of "THEIRS=OURS"; raises UsageError for anything else."""
    result: dict[str, str] = {}
    for pair in pairs:
        name, equals, agreed = pair.rpartition("=")
        if not (equals and name and agreed) or name in result:
            raise UsageError(f"--column is THEIRS=OURS, each column once, such as --column Alter=age; got '{pair}'")
        result[name] = agreed
    return result
