"""A site's series: its times, what it tells of its covariates, and its windows as among all sites' series."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.seeding import generator, tags
from ...core.tasks import Forecasting, Task
from ...data.dataset import Dataset
from ...data.federation import Federation
from ...data.split import SPLITS, Split
from ...data.steps import calendar
from ...data.tables import disclosure
from ...data.tables.column_statistics import NumberStatistics
from ...data.tables.covariates import Covariates, Grid, cells_of, doubts
from ...data.tables.frame import Frame
from ...data.tables.new_readings import Series
from ...data.tables.open_table import open_table
from ...data.tables.owners import Owners
from ...data.tables.schema import Description
from ...data.tables.times import steps_of
from ...data.tables.words import Numbers
from ...data.windows import Scaling, Windows
from ...errors import Fault, UsageError
from ..server import plan
from ..wire.messages import Words
from .drawn_rows import Disclosure
from .site_reading import Reading
from .site_table import description_of, kind_of, told_of, units_of

STRETCHES = 10_000  # of equal steps, that times may have


class Clock(NamedTuple):
    """The steps of all sites' readings."""

    times: Numbers  # [T] ascending
    steps: Any  # [T] int64 from 0
    length: float  # of a step, in seconds if times are dates
    paced: bool  # whether times are a whole number of steps apart

    @classmethod
    def of(cls, times: Numbers) -> "Clock":
        """Of the different times at which any site has a row."""
        steps, whole = steps_of(times)
        return cls(times, steps, float((times[-1] - times[0]) / max(int(steps[-1]), 1)), whole)

    @classmethod
    def agreed(cls, agreed: Words) -> "Clock":
        """Of the times that the sites agreed on."""
        return cls.of(np.array(disclosure.expanded(agreed["times"])))


@dataclass(frozen=True)
class SiteSeries:
    """The series of the site `name`; its methods raise UsageError, with what is in the file, for what is wrong."""

    path: Path
    name: str
    reading: Reading
    limits: Disclosure | None = None

    @cached_property
    def frame(self) -> Frame:
        """The table, its columns named as the sites agreed."""
        frame = open_table(self.path).renamed(self.reading.columns).read_as(self.reading.formats)
        frame.need([self.reading.target, self.reading.time])
        for names in (self.reading.ignore, self.reading.future, self.reading.static, self.reading.formats.text):
            frame.need([*names])
        return frame

    @cached_property
    def _kinds(self) -> dict[str, str]:
        """The kinds of the columns that are covariates."""
        reading, frame = self.reading, self.frame
        taken = {reading.target, reading.time, *reading.ignore, *frame.added}
        kinds = {name: kind_of(frame, name) for name in frame.columns if name not in taken}
        covariates = {name: kind for name, kind in kinds.items() if kind != "date"}
        if dates := sorted(kinds.keys() - covariates.keys()):
            warnings.warn(f"{frame.name}: '{dates[0]}' holds dates; left out of the inputs", stacklevel=2)
        if lost := [name for name in (*reading.future, *reading.static) if name not in covariates]:
            raise UsageError(f"{frame.name}: '{lost[0]}' can be no covariate; take it out of --future and --static")
        return covariates

    @cached_property
    def _times(self) -> tuple[Numbers, bool]:
        """[n] the times of the rows, and whether they are dates."""
        held = Owners([self.name], np.zeros(len(self.frame), np.int64), None)
        with warnings.catch_warnings():  # the steps of this series alone are not those of all
            warnings.simplefilter("ignore")
            moments, _, dated = self.frame.moments(self.reading.time, held, series=True)
        return moments, dated

    def hello(self) -> Words:
        """When there are readings, how windows are cut, and which columns there are; never a reading."""
        reading, (moments, dated), kinds = self.reading, self._times, self._kinds
        if not (~np.isnan(self.frame.numbers(reading.target))).any():
            raise UsageError(f"{self.frame.name}: '{reading.target}' has no value in any row", Fault.TARGET)
        return {
            "shape": [reading.past, 1],
            "outputs": reading.horizon,
            "task": {"name": "Forecasting"},
            "columns": [reading.target, *kinds],
            "series": {
                "kinds": kinds,
                "future": sorted(reading.future),
                "static": sorted(reading.static),
                "dated": dated,
                "units": units_of(self.frame, [reading.target, *kinds]),
                "zoned": self.frame.is_zoned(reading.time),
                "times": disclosure.stretches(np.unique(moments).tolist(), STRETCHES),
            },
        }

    def describe(self, agreed: Words, split: Split, seed: int) -> Words:
        """At which steps windows begin, or, once the cuts between splits are known, statistics of training steps."""
        dataset = self._windows(agreed)
        rows = _own(dataset)
        if "cuts" not in agreed and not split.own_times:
            assert dataset.time is not None
            begins = dataset.time[rows].unique().tolist()
            return {"begins": disclosure.stretches(begins, disclosure.LONGEST)}
        parts = self._parts(dataset, agreed, split, seed)
        scaling: Any = dataset.prepare
        readings = disclosure.coarse(NumberStatistics.of(scaling.seen(parts["train"]).numpy(), median=False))
        told = disclosure.to_json(readings._replace(distinct=(), missing=0))
        covariates = scaling.covariates
        known = {} if covariates is None else covariates.statistics(scaling.covered(parts["train"]).numpy())[self.name]
        most = self.reading.categories
        statistics = {name: told_of(self.frame, name, one, most) for name, one in known.items()}
        return {"answers": [told], "statistics": statistics, "rows": len(parts["train"])}

    def federate(self, words: Words, task: Task, split: Split, seed: int) -> Federation:
        """A federation of this client alone, its windows as among those of all sites."""
        if not isinstance(task, Forecasting):
            raise UsageError("the server's task must be a forecast, as this site has a series")
        dataset = self._windows(words["agreed"])
        parts = self._parts(dataset, words["agreed"], split, seed)
        assert isinstance(dataset.prepare, Scaling)
        scaled = dataset.prepare.by(dataset, task.mean, task.deviation, covariates_of(words))
        rows = {name: [parts[name]] for name in SPLITS}
        return Federation(scaled.x, scaled.y, rows, task, (self.name,), scale=scaled.scale, in_order=True)

    def kept(self, words: Words) -> Words:
        """What new rows need: the columns and the pace of this file, and the scale of all sites' readings."""
        reading, task = self.reading, plan.read_task(words["task"])
        assert isinstance(task, Forecasting)
        agreed, clock = words["agreed"], Clock.agreed(words["agreed"])
        dated, inputs = bool(agreed["dated"]), dict(agreed["inputs"])
        kinds = {reading.time: "date" if dated else "number", reading.target: "number", **inputs}
        series = Series(
            "",
            reading.time,
            reading.target,
            reading.past,
            reading.horizon,
            clock.length if clock.paced else None,
            dated,
            tuple(agreed["calendar"]),
            inputs,
            tuple(agreed["future"]),
            tuple(agreed["static"]),
            covariates=covariates_of(words),
            formats=self.frame.trained_formats(kinds),
            dropped=tuple(name for name in self.frame.columns if name not in kinds),
        ).renamed({ours: theirs for theirs, ours in reading.columns.items()}, self.name)
        covariates = {} if series.covariates is None else {"covariates": series.covariates.to_dict()}
        return {"series": series.to_dict(), "reading": {"mean": task.mean, "deviation": task.deviation}, **covariates}

    def _windows(self, agreed: Words) -> Dataset:
        """All windows of the series among the steps of all sites."""
        frame, clock, (moments, _) = self.frame, Clock.agreed(agreed), self._times
        times = clock.times
        place = np.searchsorted(times, moments - disclosure.NEAR)
        if (place == len(times)).any() or (np.abs(times[place] - moments) > 2 * disclosure.NEAR).any():
            told = f"{frame.name} has changed since this site joined: it has times that it had not"
            raise UsageError(f"{told}; put it back as it was, or start another run", Fault.REPLACED)
        grid = Grid(np.arange(len(frame)), np.zeros(len(frame), np.int64), place, (1, len(times)))
        readings = grid.lay_out(frame.numbers(self.reading.target))
        covariates = self._covariates(agreed, clock, grid, readings) if agreed["inputs"] else None
        features = calendar(times, agreed["calendar"]) if agreed["calendar"] else None
        cut = Windows(self.reading.past, self.reading.horizon, horizons=tuple(agreed["horizons"]))
        return cut(readings.T, clock.steps, [self.name], calendar=features, covariates=covariates)

    def _covariates(self, agreed: Words, clock: Clock, grid: Grid, readings: Numbers) -> Covariates:
        """The cells of the columns that the sites agreed on."""
        kinds = dict(agreed["inputs"])
        self.frame.need([*kinds])
        if withheld := kinds.keys() - self._kinds.keys():
            told = f"{self.frame.name}: the server asks for column '{min(withheld)}', which stays here (--ignore)"
            raise UsageError(told, Fault.WITHHELD)
        cells = cells_of(self.frame, kinds, agreed["static"], grid, [self.name])
        steps = torch.from_numpy(clock.steps)
        covariates = Covariates("", [self.name], kinds, cells, steps, tuple(agreed["future"]))
        for doubt in doubts(self.frame, covariates, grid, readings, self.reading.past):
            warnings.warn(doubt, stacklevel=2)
        return covariates

    def _parts(self, dataset: Dataset, agreed: Words, split: Split, seed: int) -> dict[str, Tensor]:
        assert dataset.time is not None
        rows, draw = _own(dataset), generator(seed, "split", int(tags([self.name])))
        if split.own_times:
            parts = split.by_own_time(dataset.time, dataset.span, rows, draw)
        else:
            first, second = agreed["cuts"]
            parts = split.cut(dataset.time, dataset.span, rows, first, second, draw)
        if not parts:
            raise UsageError(f"{self.frame.name} has no window for each of training, validation and test", Fault.FEW)
        if self.limits:
            clock, begins = Clock.agreed(agreed), dataset.time.numpy()
            drawn = {
                name: clock.times[np.searchsorted(clock.steps, begins[part.numpy()])] for name, part in parts.items()
            }
            self.limits.check_draw(self.path, split, seed, drawn)
        return parts


def covariates_of(words: Mapping[str, Any]) -> Description | None:
    """The description of covariates in a message of the server's; raises UsageError if it is none."""
    return description_of({"description": words["covariates"]}) if "covariates" in words else None


def _own(dataset: Dataset) -> Tensor:
    """The rows at which windows begin."""
    assert dataset.client is not None
    return (dataset.client == 0).nonzero().flatten()
