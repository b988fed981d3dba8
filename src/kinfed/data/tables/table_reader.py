"""Tables: your own data from CSV or Parquet, one row per example or reading, with a column that names its owner."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.settings import Count, CountOrZero
from ...core.tasks import Classification, Counts, Regression, Task, check_quantiles
from ...errors import Fault, UsageError
from ..dataset import Dataset, Prepare, rows_by_owner
from ..federation import Federation, divide
from ..graph_files import read as read_graph
from ..split import Split
from ..steps import CLOCK, calendar
from ..windows import Windows
from . import doubts
from .covariates import Covariates, Grid, cells_of
from .covariates import doubts as doubts_of
from .encoder import Preparation
from .formats import FormatSettings
from .frame import DAY, FEW, Frame, natural
from .new_readings import Series
from .open_table import frame_of, open_table
from .owners import Owners
from .schema import Description, Raw, raw_of
from .words import Codes, Numbers, Words

FEWEST = 10  # rows from which a column of text that is different in each names rows
LEAST = 3  # rows of a client: one each for training, validation and test
KINDS = {"numbers": "number", "text": "category", "dates": "date"}  # of cells, as the kinds of columns


@dataclass(frozen=True, kw_only=True)
class TableReader(FormatSettings):
    """What the columns of a table are, and how it becomes a data set.

    A row is an example: its inputs are the columns `features` (default: all others but those in `ignore`), described by
    training rows alone; but a column's kind, whether it is different in every row, and the set of classes come from all
    rows. Numbers are scaled to mean 0 and standard deviation 1 over the training rows of all clients
    together (`scale="federation"`), over each client's own (`"client"`), or over these for columns that seem to be in
    units of each client's own (`"auto"`, see `in_own_units`); where one is missing, the median stands for it, and one
    more input says so. Text is one input for each of the `categories` most frequent categories, and one for all others.
    Dates are their year, season, day of the week and time of day. Text that is different in every row is left out.

    The target is a label if its column holds text or few whole numbers without gaps, unless `labels` says otherwise:
    else a number, trained by squared error in standard deviations from the mean of all clients and scored in its own
    unit, or with `counts` a whole number from 0, trained by Poisson's loss. Several target columns are numbers, each
    scaled, and scored in its own unit, in the same way. Rows without a target or a client are left out. With a column
    `time` the rows are split in time order.

    With `past` (and `time`) a row is a reading instead: every client has a series of its target, and examples are its
    windows: `past` readings are the input, the next `horizon` readings the target, also scored separately at the steps
    ahead in `horizons`, from 1, or these `quantiles` of each of them. A reading without a row, or without a value, is
    missing. Columns of inputs are covariates: their cells in the past steps are inputs too, those of the columns
    `future` also in the steps that are to be forecast; those of `static` are the same in all rows of a client. Inputs
    by the `calendar` are the time of day (`clock`, as a share of it; the default if times are dates and steps are
    shorter than a day), `hour` and `season` as angles, `weekday` and `month`.

    With `drop_missing` rows with any missing value are left out; clients with fewer than `least` rows, or known
    readings, are left out, and a warning names them. See `kinfed.data.graph_files.read` for files of links.
    """

    client: str  # column that names the client a row belongs to
    target: str | Sequence[str]  # column, or list of columns, that the model predicts
    features: Sequence[str] = ()  # columns of inputs; none: all others
    ignore: Sequence[str] = ()  # columns that are no inputs
    labels: bool | None = None  # whether the target is a label; left out: if it is text or few whole numbers
    counts: bool = False  # whether the target counts something: whole numbers from 0
    scale: Literal["auto", "federation", "client"] = "auto"  # whose training rows give the scale of inputs
    categories: Count = 50  # of a column of text, the most that are told apart
    time: str = ""  # column of times
    past: CountOrZero = 0  # readings in; 0: every row is an example
    horizon: Count = 1  # readings out
    horizons: Sequence[int] = ()  # steps ahead that are scored too, from 1
    quantiles: Sequence[float] = ()  # to forecast in place of one number, such as [0.1, 0.5, 0.9]
    future: Sequence[str] = ()  # columns of inputs that are known ahead
    static: Sequence[str] = ()  # columns of inputs that are the same in all rows of a client
    calendar: Sequence[Literal["clock", "hour", "weekday", "month", "season"]] | None = None  # features of times
    edges: str | Path = ""  # file of links between clients
    weights: str = "weight"  # its column of weights
    distances: str = "distance"  # its column of distances, in place of weights
    directed: bool = False  # whether a link holds in one direction alone
    sigma: float | None = None  # of the kernel that turns distances into weights; left out: their deviation
    threshold: float = 0.1  # weights below it are no link
    drop_missing: bool = False  # whether rows that lack any value are left out
    least: CountOrZero = 0  # rows, or known readings, that a client must have

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise UsageError("a table needs a target: a column, or a list of columns; got none")
        if self.past and (not self.time or len(self.targets) != 1):
            raise UsageError("windows (past) need a time column and one target")
        self._check_inputs()
        if self.labels and len(self.targets) > 1:
            raise UsageError(f"several targets are numbers, so labels cannot be true; got {', '.join(self.targets)}")
        if self.counts and (self.labels or self.past or len(self.targets) > 1):
            other = "labels" if self.labels else "past" if self.past else "several targets"
            raise UsageError(f"counts are one number for each row, so they cannot go with {other}")
        plain = {"horizon": 1, "horizons": (), "quantiles": (), "future": (), "static": (), "calendar": None}
        given = [name for name, value in plain.items() if getattr(self, name) not in (value, [])]
        if not self.past and given:
            raise UsageError(f"{given[0]} is for windows of series; set past too, the readings that are the input")
        if self.quantiles:
            check_quantiles(self.quantiles)
        if late := [ahead for ahead in self.horizons if not 1 <= ahead <= self.horizon]:
            raise UsageError(f"horizons are steps ahead, from 1 to horizon, which is {self.horizon}; got {late[0]}")

    def _check_inputs(self) -> None:
        """Raise UsageError for a column that is said to be two things at once."""
        said = {"ignore": self.ignore, "features": self.features, "future": self.future, "static": self.static}
        for one, other in (("features", "ignore"), ("future", "ignore"), ("static", "ignore"), ("future", "static")):
            if both := sorted({*said[one]} & {*said[other]}):
                raise UsageError(f"column '{both[0]}' is in {one} and in {other}; leave it out of one")
        for name in ("future", "static"):
            if taken := sorted({*said[name]} & {self.client, self.time, *self.targets}):
                what = "the client" if taken[0] == self.client else "time" if taken[0] == self.time else "the target"
                raise UsageError(f"column '{taken[0]}' is {what}, so it cannot be in {name}; leave it out there")

    @property
    def targets(self) -> list[str]:
        """The target columns."""
        return [self.target] if isinstance(self.target, str) else list(self.target)

    def read(self, path: str | Path, query: str = "") -> Dataset:
        """The data set in a file `.csv` (with a heading) or `.parquet`, in a folder of them, or in a database.

        Raises UsageError that names the file, line and column of what cannot be used. See
        `kinfed.data.tables.databases.fetch` for the query.
        """
        if not isinstance(path, str | Path):
            raise UsageError(f"path must name a file; got {path!r:.80}")
        return self.of(open_table(path, query))

    def of(self, frame: Frame) -> Dataset:
        """The data set in a table; raises UsageError as `read` does."""
        needed = [self.client, *([self.time] if self.time else [])]
        frame.need([*needed, *self.targets, *self.features])
        for names in (self.ignore, self.future, self.static, self.formats.text):
            frame.need([*names])
        frame = frame.read_as(self.formats).with_all(needed if self.drop_missing else [self.client])
        owner = frame.words(self.client)
        names = sorted(owner.names, key=natural)
        place = {name: i for i, name in enumerate(names)}
        held = Owners(names, np.array([place[name] for name in owner.names])[owner.codes], None)
        if self.edges:
            links = partial(read_graph, weights=self.weights, distances=self.distances, directed=self.directed)
            held = held._replace(graph=links(self.edges, names, sigma=self.sigma, threshold=self.threshold))
        if self.past:
            return self._series(frame, held)
        return self._rows(frame, held)

    def inputs(self, frame: Frame) -> list[str]:
        """The columns of inputs; raises UsageError if none is left, unless readings are inputs."""
        taken = {self.client, self.time, *self.targets, *self.ignore, *frame.added}
        named = dict.fromkeys([*self.features, *self.future, *self.static]) if self.features else ()
        inputs = [*named] or [column for column in frame.columns if column not in taken]
        if not inputs and not self.past:
            raise UsageError(f"{frame.name}: no column is left for the inputs; ignore fewer of them")
        return inputs

    def _raw(self, frame: Frame) -> tuple[dict[str, str], dict[str, Raw]]:
        """The kind of each column of inputs, and what is in it; columns that cannot be any are left out, by name."""
        kinds, raw, without = {}, {}, []
        for name in self.inputs(frame):
            kind = frame.kind(name)
            if kind == "empty" or (kind not in KINDS and not self.features) or (kind == "dates" and self.past):
                without.append(f"'{name}' has no value in any row" if kind == "empty" else f"'{name}' holds {kind}")
                continue
            frame.column(name)  # raises for a type that is none of these
            kinds[name], raw[name] = KINDS[kind], raw_of(frame, name, KINDS[kind])
            if kind == "text" and len(frame) > FEWEST and len(raw[name].words) == (~np.isnan(raw[name].values)).sum():
                without.append(f"'{name}' is different in every row, as identifiers are")
                del kinds[name], raw[name]
        if without:
            warnings.warn(f"{frame.name}: {'; '.join(without)}; left out of the inputs", stacklevel=4)
        if not raw and not self.past:
            raise UsageError(f"{frame.name}: no column is left for the inputs; ignore fewer of them")
        if lost := [name for name in (*self.future, *self.static) if name not in kinds]:
            why = next((one for one in without if one.startswith(f"'{lost[0]}' ")), f"'{lost[0]}' is no input")
            raise UsageError(f"{frame.name}: {why}, so it is no covariate; take it out of future and static")
        return kinds, raw

    def _rows(self, frame: Frame, held: Owners) -> Dataset:
        """The data set in which every row is an example."""
        kinds, raw = self._raw(frame)
        y, task, classes, missing = _target(frame, self)
        columns = y.double().reshape(len(y), -1).T.numpy()  # [k, n]
        known = {name: np.where(missing[name], np.nan, each) for name, each in zip(missing, columns, strict=True)}
        doubts.warn(frame, raw, known, bool(classes))
        usable = ~np.any(list(missing.values()), axis=0)
        if self.drop_missing:
            usable &= ~np.any([np.isnan(one.values) for one in raw.values()], axis=0)
        if not usable.all():
            what = "lack a value" if self.drop_missing else f"have no {' or no '.join(self.targets)}"
            count, first = f"{int((~usable).sum()):,} of {len(usable):,}", frame.row(int(usable.argmin()))
            if not usable.any():
                raise UsageError(f"{frame.name}: all {len(usable):,} rows {what}")
            warnings.warn(f"{frame.name}: {count} rows {what} and were left out (the first: {first})", stacklevel=3)
        held = held.keep(usable, self.least, "rows", frame.name)
        steps = frame.moments(self.time, held, series=False)[1] if self.time else None
        # Rows that are left out are dropped here, as a partition may deal the others anew.
        used = np.flatnonzero(usable & (held.who >= 0))
        words = {name: one.words for name, one in raw.items()}
        x = np.empty((len(used), len(raw)))
        for i, one in enumerate(raw.values()):
            x[:, i] = one.values[used]
        return Dataset(
            # In float64 until it is scaled: float32 cannot distinguish numbers far from zero that are close together.
            torch.from_numpy(x),
            y[torch.from_numpy(used)],
            task,
            classes,
            client=torch.from_numpy(held.who[used]),
            graph=held.graph,
            owners=tuple(held.names),
            time=None if steps is None else torch.from_numpy(steps[used]),
            stratify=True,
            prepare=Preparation(
                frame.name,
                self.client,
                self.targets,
                kinds,
                words,
                self.scale,
                self.categories,
                frame.trained_formats(kinds | ({} if classes else dict.fromkeys(self.targets, "number"))),
                _others(frame, [self.client, *self.targets, *kinds]),
            ),
        )

    def _series(self, frame: Frame, held: Owners) -> Dataset:
        """Windows of one series per client, from rows in any order."""
        target, time = self.targets[0], self.time
        readings, (kinds, raw) = frame.numbers(target), self._raw(frame)
        later = {name: one for name, one in raw.items() if name in self.future}
        doubts.warn(frame, {name: one for name, one in raw.items() if name not in later}, {}, labelled=False)
        doubts.warn(frame, later, {target: readings}, labelled=False)
        held = held.keep(~np.isnan(readings), self.least, f"known values of '{target}'", frame.name)
        moments, steps, dated = frame.moments(time, held, series=True)
        rows = np.flatnonzero(held.who >= 0)
        known, first, place = np.unique(steps[rows], return_index=True, return_inverse=True)  # steps with any row
        grid = Grid(rows, held.who[rows], place, (len(held.names), len(known)))
        length = (moments.max() - moments.min()) / max(int(steps.max()), 1)
        paced = bool(np.allclose(moments, moments.min() + steps * length, rtol=0, atol=0.01 * length))
        series = Series(
            self.client,
            time,
            target,
            self.past,
            self.horizon,
            length if paced else None,
            dated,
            calendar_of(self.calendar, dated, length, frame.place(0, time)),
            kinds,
            tuple(self.future),
            tuple(self.static),
            formats=frame.trained_formats({time: "date" if dated else "number", target: "number", **kinds}),
            dropped=_others(frame, [self.client, time, target, *kinds]),
        )
        covariates = self._covariates(frame, held, grid, series, known, readings) if kinds else None
        times = calendar(moments[rows][first], series.calendar) if series.calendar else None
        cut = Windows(self.past, self.horizon, horizons=self.horizons, quantiles=self.quantiles)
        try:
            values = grid.lay_out(readings).T
            dataset = cut(values, known, held.names, calendar=times, covariates=covariates, graph=held.graph)
        except UsageError as problem:
            pace = f"a step is {length:g}{' seconds' if dated else ''}, the smallest distance between two times"
            raise UsageError(f"{frame.name}: {problem} ({pace} in '{time}')") from None
        assert dataset.prepare is not None
        return replace(dataset, prepare=partial(_scaled, dataset.prepare, series, frame.name))

    def _covariates(
        self, frame: Frame, held: Owners, grid: Grid, series: Series, known: Codes, readings: Numbers
    ) -> Covariates:
        """The columns beside the target; a warning names what is doubtful about them."""
        cells = cells_of(frame, series.kinds, self.static, grid, held.names)
        found = Covariates(
            self.client,
            held.names,
            series.kinds,
            cells,
            torch.from_numpy(known),
            self.future,
            self.scale,
            self.categories,
        )
        for doubt in doubts_of(frame, found, grid, grid.lay_out(readings), self.past):
            warnings.warn(doubt, stacklevel=5)
        return found


def from_csv(
    path: str | Path,
    *,
    client: str,
    target: str | Sequence[str],
    split: Split | None = None,
    seed: int = 0,
    **settings: Any,
) -> Federation:
    """A federation from your own file.

    Args:
        path: a .csv or .tsv with a heading, a .parquet, or a folder of such files; one row per example or reading.
        client: the column that names each row's owner.
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


from_parquet = from_csv


def from_sql(
    address: str,
    query: str,
    *,
    client: str,
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
    client: str,
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
    dataset = _reader(client, target, split, settings).of(frame_of(frame))
    return divide(dataset, rows_by_owner(dataset), Split() if split is None else split, seed)


def _reader(client: str, target: str | Sequence[str], split: Split | None, settings: dict[str, Any]) -> TableReader:
    """What reads a table; unless a split is given, which may need fewer, clients need `LEAST` rows."""
    return TableReader(client=client, target=target, **({"least": LEAST} if split is None else {}) | settings)


def _others(frame: Frame, used: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in frame.columns if name not in used)


def _target(frame: Frame, reader: TableReader) -> tuple[Tensor, Task, tuple[str, ...], dict[str, NDArray[np.bool_]]]:
    """y: [n] labels or [n, k] numbers, the task, the names of classes, and where a target is missing."""
    words: Words | None = None
    targets, labelled = reader.targets, False if reader.counts else reader.labels
    if labelled is not False and len(targets) == 1:
        words = frame.words(targets[0]) if labelled else frame.labels(targets[0])
    if words is not None:
        classes = sorted({*words.names} - {""}, key=natural)
        if len(classes) == 1 and (~words.empty).sum() > 1:
            raise UsageError(
                f"{frame.name}: '{targets[0]}' is '{classes[0]}' in all rows, so there is nothing to learn"
            )
        if len(classes) > max(FEW, len(frame) / 2):
            raise UsageError(
                f"{frame.name}: '{targets[0]}' has {len(classes):,} different labels in {len(frame):,} rows, so it "
                "names rows rather than classes; predict another column"
            )
        index = {"": 0} | {name: i for i, name in enumerate(classes)}
        y = torch.from_numpy(np.array([index[name] for name in words.names], np.int64)[words.codes])
        return y, Classification(len(classes)), tuple(classes), {targets[0]: words.empty}
    columns = {name: frame.numbers(name) for name in targets}
    y = torch.from_numpy(np.nan_to_num(np.stack(list(columns.values()), 1)))
    missing = {name: np.isnan(values) for name, values in columns.items()}
    if not reader.counts:
        return y, Regression(names=tuple(targets)), (), missing
    [(name, values)] = columns.items()
    check_counts(frame, name, values)
    return y, Counts(), (), missing


def check_counts(frame: Frame, name: str, values: Numbers) -> None:
    """Raise UsageError that names the first of a column's values: [n] that is no count; NaN is none at all."""
    wrong = ((values < 0) | (values != np.round(values))) & ~np.isnan(values)
    if wrong.any():
        at = int(wrong.argmax())
        raise UsageError(
            f"{frame.place(at, name)}: {values[at]:g} is not a count, a whole number from 0; correct it, or predict "
            "the column as a number: leave counts out",
            Fault.COUNT,
        )


def calendar_of(chosen: Sequence[str] | None, dated: bool, length: float, where: str) -> tuple[str, ...]:
    """The features of times whose steps have this length; raises UsageError for those of times that are no dates."""
    if chosen is None:
        return (CLOCK,) if dated and length < DAY else ()
    if chosen and not dated:
        raise UsageError(f"{where}: times are numbers, which have no calendar; leave calendar out")
    return tuple(chosen)


def _scaled(prepare: Prepare, series: Series, table: str, dataset: Dataset, rows: Tensor) -> Dataset:
    """What `prepare` makes of the data set, which also says how to cut windows of new readings."""
    new = not dataset.scale
    dataset = prepare(dataset, rows)
    if new and "covariates" in dataset.scale:
        Description.from_dict(dataset.scale["covariates"]).warn_of_constants(table)
    return replace(dataset, scale={**dataset.scale, "series": series.to_dict()})
