"""New readings of series as windows, as a model was trained on them."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import UsageError, several
from ..steps import calendar, calendar_names, carried_forward
from ..windows import cut, side_by_side
from .cells import Formats, with_tuples
from .covariates import Covariates, Grid, cells_of, leads_of, names_of, scales_of
from .frame import Frame
from .owners import Owners
from .schema import Description, raw_of
from .words import Codes


class Ahead(NamedTuple):
    """The windows that end with rows of a table, in the order of its rows."""

    x: Tensor  # [m, past, F] a view of the readings, of which `at` says where each window is
    at: Tensor  # [n] int64
    who: Codes  # [n] the place of its owner
    rows: Codes  # [n] the row in which each ends


@dataclass(frozen=True)
class Series:
    """Readings of series in a table, as a run was trained on them. Plain numbers and text."""

    client: str  # column that says whose a reading is
    time: str  # column of times
    target: str  # column of readings
    past: int  # readings in a window
    horizon: int  # readings that are forecast
    step: float | None  # from one to the next, in seconds if times are dates; None: each different time is a step
    dated: bool  # whether times are dates
    calendar: tuple[str, ...]  # features of times that are inputs, too
    kinds: Mapping[str, str] = field(default_factory=dict)  # number or category, of columns that are covariates
    future: tuple[str, ...] = ()  # those of them that are known ahead
    static: tuple[str, ...] = ()  # those that are the same in all rows of a client
    mean: float = 0.0  # of readings
    deviation: float = 1.0
    covariates: Description | None = None  # what training rows say of them
    formats: Formats = field(default_factory=Formats)  # by which text is read
    dropped: tuple[str, ...] = ()  # columns of the table that are none of these

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], reading: Mapping[str, float], covariates: Mapping[str, Any] | None = None
    ) -> "Series":
        """The series that `to_dict` made, with mean and deviation of its readings, and its covariates' description."""
        given = with_tuples(values) | {"formats": Formats(**with_tuples(values["formats"]))} | dict(reading)
        return cls(**given, covariates=None if covariates is None else Description.from_dict(covariates))

    @classmethod
    def of_scale(cls, scale: Mapping[str, Any]) -> "Series":
        """The series of a federation, or of a run's summary, by its `scale`."""
        return cls.from_dict(scale["series"], scale["inputs"]["reading"], scale.get("covariates"))

    def to_dict(self) -> dict[str, Any]:
        """The columns and the pace as JSON has them; the scale of readings and covariates is elsewhere."""
        elsewhere = ("mean", "deviation", "covariates")
        return {name: value for name, value in asdict(replace(self, covariates=None)).items() if name not in elsewhere}

    @property
    def columns(self) -> list[str]:
        """Those of a table that new rows need beside the client's."""
        return [self.time, self.target, *self.kinds]

    @property
    def leads(self) -> list[int]:
        """How many steps later than the past ones future covariates are read."""
        return leads_of(self.past, self.horizon)

    @property
    def inputs(self) -> list[str]:
        """[F] the names of a step's inputs."""
        beside = [] if self.covariates is None else names_of(self.covariates, self.future, self.leads)
        return [self.target, *calendar_names(self.calendar), *beside]

    def scales(self, client: str) -> list[tuple[float, float]]:
        """[F] mean and deviation by which each of a step's inputs of a client is scaled."""
        beside = [] if self.covariates is None else scales_of(self.covariates, self.future, self.leads, client)
        return [(self.mean, self.deviation), *[(0.0, 1.0)] * len(calendar_names(self.calendar)), *beside]

    def rename(self, names: Mapping[str, str], client: str) -> "Series":
        """The same of a table of one client, whose columns have other names."""
        return replace(
            self,
            time=names.get(self.time, self.time),
            target=names.get(self.target, self.target),
            kinds={names.get(name, name): kind for name, kind in self.kinds.items()},
            future=tuple(names.get(name, name) for name in self.future),
            static=tuple(names.get(name, name) for name in self.static),
            covariates=None if self.covariates is None else self.covariates.rename(names, client),
            formats=self.formats.rename(names),
            dropped=tuple(names.get(name, name) for name in self.dropped),
        )

    def check_same(self, trained: "Series", table: str) -> None:
        """Raise UsageError if times, inputs or the pace of these readings are not as in training."""
        facts = {"dated": "whether times are dates", "step": "the length of a step", "calendar": "the calendar"}
        for name, what in {**facts, "kinds": "inputs", "future": "future", "static": "static"}.items():
            here, before = getattr(self, name), getattr(trained, name)
            if here != before and (name != "step" or before is not None):
                here = "uneven" if here is None else here
                raise UsageError(f"{table}: {what} was {before} in training, and is {here} here")

    def windows(self, frame: Frame, owners: Owners) -> Ahead:
        """A window for each row whose past is there: `past` steps without a gap, with a known reading in them.

        The reading of the row itself is the last in its window. With covariates that are known ahead a row also needs
        the `horizon` steps after it, and rows after a client's last reading are there for these alone. A
        warning counts rows without a window; raises UsageError if that is all of them, or if times are not as in
        training.
        """
        frame = frame.read_as(self.formats)
        readings = frame[self.target].numbers()
        times = frame.times(self.time, owners, series=True)
        if times.dated != self.dated:
            here, trained = ("dates", "numbers") if times.dated else ("numbers", "dates")
            raise UsageError(f"{frame[self.time].place(0)}: times are {here}, but the run was trained on {trained}")
        steps = times.steps if self.step is None else _count_steps(self, frame, times.moments, self.step)
        held = np.flatnonzero(owners.who >= 0)
        all_steps, first, place = np.unique(steps[held], return_index=True, return_inverse=True)
        grid = Grid(held, owners.who[held], place, (len(owners.names), len(all_steps)))
        values, at = grid.lay_out(readings), torch.from_numpy(all_steps)
        beside, channels = None, None
        if self.covariates is not None:
            self.covariates.warn_of_new(frame, {name: raw_of(frame, name, kind) for name, kind in self.kinds.items()})
            cells = cells_of(frame, self.kinds, self.static, grid, owners.names)
            beside = Covariates(
                client=self.client, owners=owners.names, kinds=self.kinds, cells=cells, steps=at, ahead=self.future
            )
            channels = beside.channels(self.covariates, self.leads)
        begin, usable = _find_usable(self, frame, grid, values, all_steps, beside)
        scaled = ((carried_forward(torch.from_numpy(values), at) - self.mean) / self.deviation).nan_to_num(0)
        features = calendar(times.moments[held][first], self.calendar)
        inputs = side_by_side(scaled.to(torch.get_default_dtype()), features, channels)
        x = cut(inputs, self.past, len(owners.names) * len(all_steps) - self.past + 1)
        where = (grid.who * len(all_steps) + begin)[usable]
        return Ahead(x, torch.from_numpy(where), grid.who[usable], held[usable])


def _count_steps(series: Series, frame: Frame, moments: NDArray[Any], length: float) -> Codes:
    """[n] steps of this length, as in training."""
    steps = (moments - moments.min()) / length
    off = np.abs(steps - steps.round()) > 0.01
    if off.any():
        unit = " seconds" if series.dated else ""
        raise UsageError(
            f"{frame[series.time].place(int(off.argmax()))}: this time is not a whole number of steps of "
            f"{length:g}{unit} after the first, as times in training were; leave such rows out"
        )
    return np.asarray(steps.round().astype(np.int64))


def _find_usable(
    series: Series, frame: Frame, grid: Grid, values: NDArray[Any], all_steps: Codes, beside: Covariates | None
) -> tuple[Codes, NDArray[np.bool_]]:
    """[n] where windows begin, and which of them can be used; a warning or UsageError says of the others why."""
    total = _count(~np.isnan(values))
    begin = grid.place - series.past + 1
    usable = begin >= 0
    begin = np.maximum(begin, 0)
    usable &= all_steps[grid.place] - all_steps[begin] == series.past - 1
    usable &= total[grid.who, grid.place + 1] > total[grid.who, begin]
    _warn_of_short(series, frame, usable)
    if beside is None:
        return begin, usable
    if series.future:
        last = np.where(~np.isnan(values), np.arange(len(all_steps)), -1).max(1)  # [N] the last reading
        wanted = usable & (grid.place <= last[grid.who])
        usable = wanted & _are_complete(series, grid, all_steps, beside)
        if (short := wanted & ~usable).any():
            what = f"{_explain_short(series, frame, grid, short, all_steps, beside)} ("
            if not usable.any():
                raise UsageError(f"{what}no row got a forecast)")
            warnings.warn(f"{what}{several(int(short.sum()), 'row')} got no forecast)", stacklevel=4)
    for name, (cells, _) in beside.cells.items():
        counts = _count(~np.isnan(cells))
        stale = usable & (counts[grid.who, grid.place + 1] == counts[grid.who, begin])
        if stale.any():
            warnings.warn(_describe_stale(series, frame, grid, name, cells, stale), stacklevel=4)
    return begin, usable


def _are_complete(series: Series, grid: Grid, all_steps: Codes, beside: Covariates) -> NDArray[np.bool_]:
    """[n] whether all that is known ahead is there, for every step to forecast."""
    end = np.minimum(grid.place + series.horizon, len(all_steps) - 1)
    complete = all_steps[end] - all_steps[grid.place] == series.horizon
    for name in series.future:
        counts = _count(~np.isnan(beside.cells[name].values))
        complete &= counts[grid.who, end + 1] - counts[grid.who, grid.place + 1] == series.horizon
    return np.asarray(complete)


def _explain_short(
    series: Series, frame: Frame, grid: Grid, short: NDArray[np.bool_], all_steps: Codes, beside: Covariates
) -> str:
    """What the first row without a forecast lacks of what is known ahead."""
    i = int(short.argmax())
    who, place = grid.who[i], grid.place[i]
    same_client = grid.who == who
    rows = dict(zip(all_steps[grid.place[same_client]].tolist(), grid.rows[same_client].tolist(), strict=True))
    for later in range(1, series.horizon + 1):
        row = rows.get(int(all_steps[place]) + later)
        if row is None:
            return (
                f"{frame[series.future[0]].place(grid.rows[i])}: there is no row {several(later, 'step')} after "
                f"this one, but '{series.future[0]}' must be known in the {several(series.horizon, 'step')} to "
                f"forecast; add a row for each, with '{series.target}' left empty"
            )
        for name in series.future:
            if np.isnan(beside.cells[name].values[who, np.searchsorted(all_steps, all_steps[place] + later)]):
                return (
                    f"{frame[name].place(row)}: there is no value in a step to forecast, where '{name}' must be "
                    "known; fill it in"
                )
    raise AssertionError("nothing is lacking")


def _describe_stale(
    series: Series, frame: Frame, grid: Grid, name: str, cells: NDArray[Any], stale: NDArray[np.bool_]
) -> str:
    """What to say of a covariate that ends before forecasts begin."""
    i = int(stale.argmax())
    before = np.flatnonzero(~np.isnan(cells[grid.who[i], : grid.place[i] + 1]))
    count = int(stale.sum())
    what = f"{several(count, 'forecast')} {'has' if count == 1 else 'have'} no value in the {series.past} steps before"
    if len(before):
        at = int(grid.rows[(grid.who == grid.who[i]) & (grid.place == before[-1])][0])
        return f"{frame[name].place(at)}: this old value stands for later ones, as {what}; fill these in"
    return f"{frame[name].place(grid.rows[i])}: {what} it, so it is taken to be as at most rows; fill it in"


def _warn_of_short(series: Series, frame: Frame, usable: NDArray[np.bool_]) -> None:
    short = int((~usable).sum())
    why = f"fewer than {series.past} steps without a gap, or without any reading, up to them"
    if short == len(usable):
        raise UsageError(f"{frame.name}: all {several(short, 'row')} have {why}; give more of each series")
    if short:
        warnings.warn(f"{frame.name}: {several(short, 'row')} with {why} got no forecast", stacklevel=5)


def _count(filled: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[N, T + 1] how many are known: [N, T] before each step."""
    return np.pad(filled.cumsum(1), ((0, 0), (1, 0)))
