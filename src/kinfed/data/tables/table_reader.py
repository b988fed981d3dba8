"""Tables: your own data from CSV or Parquet, one row per example or reading, with a column that names its owner."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...core.field_checks import Count, CountOrZero
from ...core.tasks import Classification, Counts, Regression, Task, check_quantiles
from ...errors import UsageError
from ..dataset import Dataset, Prepare, rows_by_owner
from ..federation import Federation, divide
from ..graph_files import GraphFile, read as read_graph
from ..split import Split
from ..steps import Feature
from ..windows import Windows
from . import cell_warnings
from .cells import FormatSettings
from .encoder import Preparation
from .frame import Frame, natural
from .new_readings import Series
from .open_table import frame_of, open_table
from .owners import Owners
from .row_examples import EMPTY, KINDS, NAMES_ROWS, class_names, column_kind, keep_weighted, read_blocks, read_rows
from .schema import Description, raw_of
from .series_examples import calendar_of, cut_series
from .words import join_names

LEAST = 3  # rows of a client: one each for training, validation and test


@dataclass(frozen=True, kw_only=True)
class TableReader(FormatSettings):
    """What the columns of a table are, and how it becomes a data set.

    A row is an example: its inputs are the columns `features` (default: all others but those in `ignore`), described by
    training rows alone; but a column's kind, whether it is different in every row, and the set of classes come from all
    rows. Numbers are scaled to mean 0 and standard deviation 1 over the training rows of all clients together, over
    each client's own (`scale="client"`), or over these for columns that seem to be in units of each client's own
    (`"auto"`, see `in_own_units`); where one is missing, the median stands for it, and one more input says so. Text is
    one input for each of the `categories` most frequent categories, and one for all others. Dates are their year,
    season, day of the week and time of day. Text that is different in every row is left out.

    The target is a label if its column holds text or few whole numbers without gaps, unless `labels` says otherwise:
    else a number, trained by squared error in standard deviations from the mean of all clients and scored in its own
    unit, or with `counts` a whole number from 0, trained by Poisson's loss. Several target columns are numbers, each
    scaled, and scored in its own unit, in the same way. Rows without a target or a client are left out. With a column
    `time` the rows are split in time order. With a column `group`, such as a person with several visits, all rows of a
    group are in one part of the split, and the verdict counts them as one observation. With a column `weight` a row
    of weight 2 counts as two in training and in scores; inputs are scaled by rows all the same.

    With `past` (and `time`) a row is a reading instead: every client has a series of its target, and examples are its
    windows: `past` readings are the input, the next `horizon` readings the target, also scored separately at the steps
    ahead in `horizons`, from 1, or these `quantiles` of each of them. A reading without a row, or without a value, is
    missing. Columns of inputs are covariates: their cells in the past steps are inputs too, those of the columns
    `future` also in the steps that are to be forecast; those of `static` are the same in all rows of a client. Inputs
    by the `calendar` are the time of day (`clock`, as a share of it), `hour` and `season` as angles, `weekday` and
    `month`, and whether it is the first day of the `week` or the first month of the `year`. If times are dates, the
    default is what suits the steps: `clock`, `week` or `year`, or `weekday` or `month` where `past` is shorter.

    With `drop_missing` rows with any missing value are left out; clients with fewer than `least` rows, or known
    readings, are left out, and a warning names them. Links between clients are in a file, or in a `GraphFile`,
    which says how it is read.
    """

    client: str | Sequence[str]  # column that names the client a row belongs to, or several that do together
    target: str | Sequence[str]  # column, or list of columns, that the model predicts
    features: Sequence[str] = ()  # columns of inputs; none: all others
    ignore: Sequence[str] = ()  # columns that are no inputs
    labels: bool | None = None  # whether the target is a label; left out: if it is text or few whole numbers
    counts: bool = False  # whether the target counts something: whole numbers from 0
    scale: Literal["federation", "client", "auto"] = "federation"  # whose training rows give the scale of inputs
    categories: Count = 50  # of a column of text, the most that are told apart
    time: str = ""  # column of times
    group: str = ""  # column of whom or what a row is of: rows of one group are split and tested together
    weight: str = ""  # column of as how many rows each row counts, in training and in scores; 0: never a target
    past: CountOrZero = 0  # readings in; 0: every row is an example
    horizon: Count = 1  # readings out
    horizons: Sequence[int] = ()  # steps ahead that are scored too, from 1
    quantiles: Sequence[float] = ()  # to forecast in place of one number, such as [0.1, 0.5, 0.9]
    future: Sequence[str] = ()  # columns of inputs that are known ahead
    static: Sequence[str] = ()  # columns of inputs that are the same in all rows of a client
    calendar: Sequence[Feature] | None = None  # features of times; left out: those that suit the steps
    # file of links between clients, or a table of its path, weights, distances, directed, sigma and threshold
    edges: str | Path | GraphFile = ""
    drop_missing: bool = False  # whether rows that lack any value are left out
    least: CountOrZero = 0  # rows, or known readings, that a client must have

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise UsageError("a table needs a target: a column, or a list of columns; got none")
        if self.past and (not self.time or len(self.targets) != 1):
            raise UsageError("windows (past) need a time column and one target")
        _check_inputs(self)
        if self.labels and len(self.targets) > 1:
            raise UsageError(f"several targets are numbers, so labels cannot be true; got {', '.join(self.targets)}")
        if self.counts and (self.labels or self.past or len(self.targets) > 1):
            other = "past" if self.past else "several targets"
            other = "labels" if self.labels else other
            raise UsageError(f"counts are one number for each row, so they cannot go with {other}")
        plain = {"horizon": 1, "horizons": (), "quantiles": (), "future": (), "static": (), "calendar": None}
        given = [name for name, value in plain.items() if getattr(self, name) not in (value, [])]
        if not self.past and given:
            raise UsageError(f"{given[0]} is for windows of series; set past too, the readings that are the input")
        if self.quantiles:
            check_quantiles(self.quantiles)
        if late := [ahead for ahead in self.horizons if not 1 <= ahead <= self.horizon]:
            raise UsageError(f"horizons are steps ahead, from 1 to horizon, which is {self.horizon}; got {late[0]}")

    @property
    def client_column(self) -> str:
        """The column of clients; for several one that `Frame.with_joined` adds, whose name lists them."""
        return self.client if isinstance(self.client, str) else join_names(self.client)

    @property
    def targets(self) -> list[str]:
        return [self.target] if isinstance(self.target, str) else list(self.target)

    def read(self, path: str | Path, query: str = "") -> Dataset:
        """The data set in a file `.csv` (with a heading) or `.parquet`, in a folder of them, or in a database.

        Raises UsageError that names the file, line and column of what cannot be used. See
        `kinfed.data.tables.databases.fetch` for the query.
        """
        if not isinstance(path, str | Path):
            raise UsageError(f"path must name a file; got {path!r:.80}")
        return self.read_frame(open_table(path, query))

    def read_frame(self, frame: Frame) -> Dataset:
        """The data set in a table; raises UsageError as `read` does."""
        client = self.client_column
        frame = frame.with_joined(client)
        needed = [client, *(name for name in (self.time, self.group) if name)]
        frame.need([*needed, *([self.weight] if self.weight else []), *self.targets, *self.features])
        for names in (self.ignore, self.future, self.static, self.formats.text):
            frame.need([*names])
        frame = frame.read_as(self.formats).with_all(needed if self.drop_missing else [client])
        if self.weight and not self.past:
            frame = keep_weighted(frame, self.weight, client)
        owner = frame[client].words()
        names = sorted(owner.names, key=natural)
        held = Owners(names, owner.find_places(names), None)
        if self.edges:
            held = held._replace(graph=read_graph(self.edges, names))
        if self.past:
            return _read_series(self, frame, held)
        return _read_rows(self, frame, held)

    def inputs(self, frame: Frame) -> list[str]:
        """The columns of inputs; raises UsageError if none is left, unless readings are inputs."""
        taken = {
            *frame.sources_of(self.client_column),
            self.time,
            self.group,
            self.weight,
            *self.targets,
            *self.ignore,
            *frame.added,
        }
        named = dict.fromkeys([*self.features, *self.future, *self.static]) if self.features else ()
        inputs = [*named] or [column for column in frame.columns if column not in taken]
        if not inputs and not self.past:
            raise UsageError(f"{frame.name}: no column is left for the inputs; ignore fewer of them")
        return inputs


def _check_inputs(reader: TableReader) -> None:
    """Raise UsageError for a column that is said to be two things at once."""
    lists = {"ignore": reader.ignore, "features": reader.features, "future": reader.future, "static": reader.static}
    for first, second in (("features", "ignore"), ("future", "ignore"), ("static", "ignore"), ("future", "static")):
        if both := sorted({*lists[first]} & {*lists[second]}):
            raise UsageError(f"column '{both[0]}' is in {first} and in {second}; leave it out of one")
    clients = dict.fromkeys([reader.client] if isinstance(reader.client, str) else reader.client, "the client")
    for name in ("future", "static"):
        if taken := sorted({*lists[name]} & {*clients, reader.time, *reader.targets}):
            what = (clients | {reader.time: "time"}).get(taken[0], "the target")
            raise UsageError(f"column '{taken[0]}' is {what}, so it cannot be in {name}; leave it out there")

    roles = clients | {reader.time: "time", reader.group: "the group"}
    roles |= dict.fromkeys(reader.targets, "the target") | dict.fromkeys(reader.features, "an input")
    if reader.weight and reader.weight in roles:
        what = roles[reader.weight]
        raise UsageError(f"column '{reader.weight}' is {what}, so it cannot be the weight too; name another column")


def _read_kinds(reader: TableReader, frame: Frame) -> dict[str, str]:
    """The kind of each column of inputs; a warning names columns that cannot be any, which are left out."""
    kinds, without = {}, {}
    for name in reader.inputs(frame):
        kind = column_kind(frame, name)
        if kind == EMPTY:
            without[name] = f"'{name}' has no value in any row"
        elif kind == NAMES_ROWS:
            without[name] = f"'{name}' is different in every row, as identifiers are"
        elif (kind not in KINDS.values() and not reader.features) or (kind == "date" and reader.past):
            without[name] = f"'{name}' holds {'dates' if kind == 'date' else kind}"
        else:
            frame.check_types([name])
            kinds[name] = kind
    if without:
        warnings.warn(f"{frame.name}: {'; '.join(without.values())}; left out of the inputs", stacklevel=4)
    if not kinds and not reader.past:
        raise UsageError(f"{frame.name}: no column is left for the inputs; ignore fewer of them")
    if lost := [name for name in (*reader.future, *reader.static) if name not in kinds]:
        why = without.get(lost[0], f"'{lost[0]}' is no input")
        raise UsageError(f"{frame.name}: {why}, so it is no covariate; take it out of future and static")
    return kinds


def _read_rows(reader: TableReader, frame: Frame, held: Owners) -> Dataset:
    kinds, targets = _read_kinds(reader, frame), reader.targets
    classes = class_names(frame, targets, False if reader.counts else reader.labels)
    examples = read_rows(frame, kinds, targets, classes, reader.counts, reader.drop_missing)
    if classes and len(classes) == 1 and examples.usable.sum() > 1:
        only = f"'{targets[0]}' is '{classes[0]}' in all rows"
        raise UsageError(f"{frame.name}: {only}, so there is nothing to learn")
    held = held.keep(examples.usable, reader.least, "rows", frame.name)
    steps = frame.times(reader.time, held, series=False).steps if reader.time else None
    # Rows that are left out are dropped here, as a partition may deal the others anew.
    used = np.flatnonzero(examples.usable & (held.who >= 0))
    x = np.empty((len(used), len(kinds)))
    for i, column in enumerate(examples.raw.values()):
        x[:, i] = column.values[used]
    numbers = () if classes else targets
    task: Task = Counts() if reader.counts else Regression(names=tuple(targets))  # whose scale is not known yet
    return Dataset(
        # In float64 until it is scaled: float32 cannot distinguish numbers far from zero that are close together.
        torch.from_numpy(x),
        examples.y[torch.from_numpy(used)],
        task if classes is None else Classification(len(classes), selects="loss"),
        tuple(classes or ()),
        client=torch.from_numpy(held.who[used]),
        graph=held.graph,
        owners=tuple(held.names),
        time=None if steps is None else torch.from_numpy(steps[used]),
        blocks=read_blocks(frame, reader.group, used) if reader.group else None,
        weights=torch.from_numpy(frame[reader.weight].weights()[used]).float() if reader.weight else None,
        stratify=True,
        prepare=Preparation(
            table=frame.name,
            client=reader.client_column,
            targets=targets,
            kinds=kinds,
            texts={name: column.texts for name, column in examples.raw.items()},
            scale=reader.scale,
            categories=reader.categories,
            **frame.keep_reading(kinds | dict.fromkeys(numbers, "number"), [reader.client_column, *targets]),
        ),
    )


def _read_series(reader: TableReader, frame: Frame, held: Owners) -> Dataset:
    """Windows of one series per client, from rows in any order."""
    target, time = reader.targets[0], reader.time
    readings, kinds = frame[target].numbers(), _read_kinds(reader, frame)
    raw = {name: raw_of(frame, name, kind) for name, kind in kinds.items()}
    later = {name: column for name, column in raw.items() if name in reader.future}
    cell_warnings.warn(frame, {name: column for name, column in raw.items() if name not in later}, {}, labelled=False)
    cell_warnings.warn(frame, later, {target: readings}, labelled=False)
    held = held.keep(~np.isnan(readings), reader.least, f"known values of '{target}'", frame.name)
    times = frame.times(time, held, series=True)
    clock, place = times.of_rows(np.flatnonzero(held.who >= 0))
    series = Series(
        client=reader.client_column,
        time=time,
        target=target,
        past=reader.past,
        horizon=reader.horizon,
        step=clock.length if clock.paced else None,
        dated=times.dated,
        calendar=calendar_of(reader.calendar, times.dated, clock.length, reader.past, frame[time].place(0)),
        kinds=kinds,
        future=tuple(reader.future),
        static=tuple(reader.static),
        **frame.keep_reading(
            {time: "date" if times.dated else "number", target: "number", **kinds}, [reader.client_column]
        ),
    )
    windows = Windows(reader.past, reader.horizon, horizons=reader.horizons, quantiles=reader.quantiles)
    dataset = cut_series(
        frame, held, clock, place, series, windows, reader.scale, reader.categories, reader.group, reader.weight
    )
    assert dataset.prepare is not None
    return replace(dataset, prepare=partial(_prepare_series, dataset.prepare, series, frame.name))


def from_csv(
    path: str | Path,
    *,
    client: str | Sequence[str],
    target: str | Sequence[str],
    split: Split | None = None,
    seed: int = 0,
    **settings: Any,
) -> Federation:
    """A federation from your own file, whatever its kind.

    Args:
        path: a .csv or .tsv with a heading, a .parquet, or a folder of such files; one row per example or reading.
        client: the column that names each row's owner, or several that do together.
        target: the column to predict, or several, which are numbers.
        split: the shares for validation and test, by default 0.1 and 0.2. Without it, clients with fewer than three
            rows are left out, and a warning names them.
        seed: by which rows are split.
        settings: those of the data set `csv` (`kinfed list datasets csv`), such as `time`, `past` for windows of
            series, `decimal`, and `edges` for a known graph.

    Returns:
        The federation: `x: [n, inputs]`, scaled by training rows; its `columns` apply the same to new rows.

    Raises:
        UsageError: names file, line and column of what is wrong.
    """
    dataset = _reader(client, target, split, settings).read(path)
    return divide(dataset, rows_by_owner(dataset), Split() if split is None else split, seed)


def from_sql(
    address: str,
    query: str,
    *,
    client: str | Sequence[str],
    target: str | Sequence[str],
    split: Split | None = None,
    seed: int = 0,
    **settings: Any,
) -> Federation:
    """A federation from what a query finds in a database.

    Args:
        address: `postgresql://USER@HOST/DATABASE` or `sqlite:///FILE`. A password is in ~/.pgpass or PGPASSWORD, never
            in the address.
        query: SQL that begins with SELECT or WITH, or a file of it, FILE.sql; it runs in a transaction that can only
            read.
        client, target, split, seed, settings: see `from_csv`.

    Returns:
        The federation, as by `from_csv`; rows are sorted by their cells.

    Raises:
        UsageError: the query cannot be run, or names row and column of what is wrong.
    """
    dataset = _reader(client, target, split, settings).read(address, query)
    return divide(dataset, rows_by_owner(dataset), Split() if split is None else split, seed)


def from_frame(
    frame: Any,
    *,
    client: str | Sequence[str],
    target: str | Sequence[str],
    split: Split | None = None,
    seed: int = 0,
    **settings: Any,
) -> Federation:
    """A federation from a frame of polars or pandas, one row per example or reading.

    Args:
        frame: the rows.
        client, target, split, seed, settings: see `from_csv`.

    Returns:
        The federation, as by `from_csv`.

    Raises:
        UsageError: names the row, from 1, and the column of what is wrong.

    >>> import polars
    >>> rows = {"shop": ["A", "B"] * 30, "price": range(60), "sold": [i % 7 + 0.5 for i in range(60)]}
    >>> kinfed.from_frame(polars.DataFrame(rows), client="shop", target="sold").names
    ('A', 'B')
    """
    dataset = _reader(client, target, split, settings).read_frame(frame_of(frame))
    return divide(dataset, rows_by_owner(dataset), Split() if split is None else split, seed)


def _reader(
    client: str | Sequence[str], target: str | Sequence[str], split: Split | None, settings: dict[str, Any]
) -> TableReader:
    """What reads a table; unless a split is given, which may need fewer, clients need `LEAST` rows."""
    return TableReader(client=client, target=target, **({"least": LEAST} if split is None else {}) | settings)


def _prepare_series(prepare: Prepare, series: Series, table: str, dataset: Dataset, rows: Tensor) -> Dataset:
    """What `prepare` makes of the data set, which also says how to cut windows of new readings.

    Raises UsageError for readings that are not as those of an earlier run, whose scale the data set has.
    """
    new = not dataset.scale
    if not new:
        series.check_same(Series.of_scale(dataset.scale), table)
    dataset = prepare(dataset, rows)
    if new and "covariates" in dataset.scale:
        Description.from_dict(dataset.scale["covariates"]).warn_of_constants(table)
    return replace(dataset, scale={**dataset.scale, "series": series.to_dict()})
