"""A site's series: the times of its readings, and windows of it as among all sites' series."""

import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...core.seeding import generator, tags
from ...core.tasks import Forecasting, Task
from ...data.dataset import Dataset
from ...data.federation import Federation
from ...data.split import SPLITS, Split
from ...data.tables import disclosure
from ...data.tables.column_statistics import NumberStatistics
from ...data.tables.frame import DAY, Frame
from ...data.tables.new_readings import Series
from ...data.tables.open_table import open_table
from ...data.tables.owners import Owners
from ...data.tables.times import steps_of
from ...data.tables.words import Numbers
from ...data.windows import Scaling, Windows
from ...errors import Fault, UsageError
from ..server import plan
from ..wire.messages import Words
from .drawn_rows import Disclosure
from .site_reading import Reading

STRETCHES = 10_000  # of equal steps, that times may have


class Clock(NamedTuple):
    """The steps of all sites' readings."""

    times: Numbers  # [T] ascending
    steps: Any  # [T] int64 from 0
    daily: Numbers | None  # [T] the time of day, an input, if times are dates and steps are shorter than a day

    @classmethod
    def of(cls, times: Numbers, dated: bool) -> "Clock":
        """Of the different times at which any site has a row."""
        steps, _ = steps_of(times)
        length = (times[-1] - times[0]) / max(int(steps[-1]), 1)
        daily = (times[0] + steps * length) % DAY / DAY if dated and length < DAY else None
        return cls(times, steps, daily)


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
        return frame

    @cached_property
    def _times(self) -> tuple[Numbers, bool]:
        """[n] the times of the rows, and whether they are dates."""
        held = Owners([self.name], np.zeros(len(self.frame), np.int64), None)
        with warnings.catch_warnings():  # the steps of this series alone are not those of all
            warnings.simplefilter("ignore")
            moments, _, dated = self.frame.moments(self.reading.time, held, series=True)
        return moments, dated

    def hello(self) -> Words:
        """When there are readings, and how windows are cut; never a reading."""
        reading, (moments, dated) = self.reading, self._times
        if not (~np.isnan(self.frame.numbers(reading.target))).any():
            raise UsageError(f"{self.frame.name}: '{reading.target}' has no value in any row", Fault.TARGET)
        unit = self.frame.unit(reading.target)
        return {
            "shape": [reading.past, 1],
            "outputs": reading.horizon,
            "task": {"name": "Forecasting"},
            "columns": [reading.target],
            "series": {
                "dated": dated,
                "units": {reading.target: unit} if unit else {},
                "zoned": self.frame.is_zoned(reading.time),
                "times": disclosure.stretches(np.unique(moments).tolist(), STRETCHES),
            },
        }

    def describe(self, agreed: Words, split: Split, seed: int) -> Words:
        """At which steps windows begin, or, once the cuts between splits are known, the scale of training readings."""
        dataset = self._windows(agreed)
        rows = _own(dataset)
        if "cuts" not in agreed and not split.own_times:
            assert dataset.time is not None
            begins = dataset.time[rows].unique().tolist()
            return {"begins": disclosure.stretches(begins, disclosure.LONGEST)}
        parts = self._parts(dataset, agreed, split, seed)
        scaling: Any = dataset.prepare
        readings = disclosure.coarse(NumberStatistics.of(scaling.seen(parts["train"]).numpy(), median=False))
        return {"answers": [disclosure.to_json(readings._replace(distinct=(), missing=0))], "rows": len(parts["train"])}

    def federate(self, words: Words, task: Task, split: Split, seed: int) -> Federation:
        """A federation of this client alone, its windows as among those of all sites."""
        if not isinstance(task, Forecasting):
            raise UsageError("the server's task must be a forecast, as this site has a series")
        dataset = self._windows(words["agreed"])
        parts = self._parts(dataset, words["agreed"], split, seed)
        assert isinstance(dataset.prepare, Scaling)
        scaled = dataset.prepare.by(dataset, task.mean, task.deviation)
        rows = {name: [parts[name]] for name in SPLITS}
        return Federation(scaled.x, scaled.y, rows, task, (self.name,), scale=scaled.scale, in_order=True)

    def kept(self, words: Words) -> Words:
        """What new rows need: the columns and the pace of this file, and the scale of all sites' readings."""
        reading, task = self.reading, plan.read_task(words["task"])
        assert isinstance(task, Forecasting)
        times = np.array(disclosure.expanded(words["agreed"]["times"]))
        steps, whole = steps_of(times)
        own = {ours: theirs for theirs, ours in reading.columns.items()}
        dated = bool(words["agreed"]["dated"])
        kinds = {reading.time: "date" if dated else "number", reading.target: "number"}
        series = Series(
            "",
            own.get(reading.time, reading.time),
            own.get(reading.target, reading.target),
            reading.past,
            float((times[-1] - times[0]) / max(int(steps[-1]), 1)) if whole else None,
            dated,
            Clock.of(times, dated).daily is not None,
            formats=self.frame.trained_formats(kinds).renamed(own),
            dropped=tuple(own.get(name, name) for name in self.frame.columns if name not in kinds),
        )
        return {"series": series.to_dict(), "reading": {"mean": task.mean, "deviation": task.deviation}}

    def _windows(self, agreed: Words) -> Dataset:
        """All windows of the series among the steps of all sites."""
        times = np.array(disclosure.expanded(agreed["times"]))
        clock = Clock.of(times, bool(agreed["dated"]))
        moments, _ = self._times
        place = np.searchsorted(times, moments - disclosure.NEAR)
        if (place == len(times)).any() or (np.abs(times[place] - moments) > 2 * disclosure.NEAR).any():
            told = f"{self.frame.name} has changed since this site joined: it has times that it had not"
            raise UsageError(f"{told}; put it back as it was, or start another run", Fault.REPLACED)
        values = np.full((len(times), 1), np.nan)
        values[place, 0] = self.frame.numbers(self.reading.target)
        cut = Windows(self.reading.past, self.reading.horizon, horizons=tuple(agreed["horizons"]))
        return cut(values, clock.steps, [self.name], clock=clock.daily)

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
            times = np.array(disclosure.expanded(agreed["times"]))
            steps, begins = Clock.of(times, bool(agreed["dated"])).steps, dataset.time.numpy()
            drawn = {name: times[np.searchsorted(steps, begins[part.numpy()])] for name, part in parts.items()}
            self.limits.check_draw(self.path, split, seed, drawn)
        return parts


def _own(dataset: Dataset) -> Tensor:
    """The rows at which windows begin."""
    assert dataset.client is not None
    return (dataset.client == 0).nonzero().flatten()
