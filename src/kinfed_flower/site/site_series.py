"""A site's series: its times, what it tells of its covariates, and its windows as among all sites' series."""

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from kinfed.core.seeding import generator, tags
from kinfed.core.tasks import Forecasting, Task
from kinfed.data.dataset import Dataset
from kinfed.data.federation import Federation
from kinfed.data.split import SPLITS, Split
from kinfed.data.tables import disclosure
from kinfed.data.tables.column_statistics import NumberStatistics
from kinfed.data.tables.new_readings import Series
from kinfed.data.tables.schema import Description
from kinfed.data.tables.series_examples import cut_series
from kinfed.data.tables.times import Clock, Times
from kinfed.data.windows import Scaling, Windows
from kinfed.errors import Fault, UsageError, several

from .. import plan
from ..wire.messages import Fields
from .agreed_columns import read_description, read_inputs, read_windows
from .drawn_rows import Withheld
from .site_reading import OwnTable
from .site_table import disclose_column

STRETCHES = 10_000  # of equal steps, that times may have


@dataclass(frozen=True)
class SiteSeries(OwnTable):
    """A table whose rows are readings; its methods raise UsageError, with what is in the file, for what is wrong."""

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The kinds of the columns that are covariates."""
        kinds, reading = super().kinds, self.reading
        covariates = {name: kind for name, kind in kinds.items() if kind != "date"}
        if dates := sorted(kinds.keys() - covariates.keys()):
            warnings.warn(f"{self.frame.name}: '{dates[0]}' holds dates; left out of the inputs", stacklevel=2)
        if lost := [name for name in (*reading.future, *reading.static) if name not in covariates]:
            raise UsageError(f"{self.frame.name}: '{lost[0]}' can be no covariate; take it out of future and static")
        return covariates

    @cached_property
    def _times(self) -> Times:
        """The times of the rows."""
        with warnings.catch_warnings():  # the steps of this series alone are not those of all
            warnings.simplefilter("ignore")
            return self.frame.times(self.reading.time, self.owners, series=True)

    def hello(self) -> Fields:
        """When there are readings, how windows are cut, and which columns there are; never a reading."""
        reading, times, kinds = self.reading, self._times, self.kinds
        if not (~np.isnan(self.frame[reading.target].numbers())).any():
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
                "dated": times.dated,
                "units": self.units([reading.target, *kinds]),
                "zoned": self.frame.is_zoned(reading.time),
                "times": disclosure.stretches(times.clock.times.tolist(), STRETCHES),
            },
        }

    def describe(self, agreed: Fields, split: Split, seed: int) -> Fields:
        """At which steps forecasts begin, or, once the cuts between splits are known, statistics of training steps."""
        dataset = self._windows(agreed)
        rows = _own(dataset)
        if "cuts" not in agreed and not split.own_times:
            assert dataset.time is not None
            begins = dataset.time[rows].unique().tolist()
            return {"begins": disclosure.stretches(begins, disclosure.LONGEST)}
        parts = self._parts(dataset, agreed, split, seed)
        scaling: Any = dataset.prepare
        readings = disclosure.coarse(
            NumberStatistics.from_values(scaling.collect_readings(parts["train"]).numpy(), median=False)
        )
        target = disclosure.to_json(readings._replace(distinct=(), missing=0))
        covariates = scaling.covariates
        statistics = (
            {} if covariates is None else covariates.statistics(scaling.mark_steps(parts["train"]).numpy())[self.name]
        )
        most = self.reading.categories
        sent = {name: disclose_column(self.kinds[name], name, column, most) for name, column in statistics.items()}
        return {"answers": [target], "statistics": sent, "rows": len(parts["train"])}

    def federate(self, fields: Fields, task: Task, split: Split, seed: int, cut: float = math.inf) -> Federation:
        """A federation of this client alone, its windows as among those of all sites."""
        assert isinstance(task, Forecasting)
        dataset = self._windows(fields["agreed"])
        parts = self._parts(dataset, fields["agreed"], split, seed)
        assert isinstance(dataset.prepare, Scaling)
        scaled = dataset.prepare.scale_by(dataset, task.mean, task.deviation, covariates_of(fields))
        rows = {name: [parts[name]] for name in SPLITS}
        return Federation(
            *(scaled.x, scaled.y, rows, task, (self.name,)),
            scale=scaled.scale,
            in_order=True,
            blocks=dataset.blocks,
            weights=dataset.weights,
        )

    def describe_reading(self, fields: Fields, federation: Federation) -> Fields:
        """What new rows need: the columns and the pace of this file, and the scale of all sites' readings."""
        reading, task, frame = self.reading, plan.read_task(fields["task"]), self.frame
        assert isinstance(task, Forecasting)
        series = self._series(fields["agreed"], plan.clock_of(fields["agreed"]))
        kinds = {reading.time: "date" if series.dated else "number", reading.target: "number", **series.kinds}
        series = replace(series, covariates=covariates_of(fields), **frame.keep_reading(kinds))
        series = series.rename(reading.own_names, self.name)
        covariates = {} if series.covariates is None else {"covariates": series.covariates.to_dict()}
        return {"series": series.to_dict(), "reading": {"mean": task.mean, "deviation": task.deviation}, **covariates}

    def _series(self, agreed: Fields, clock: Clock) -> Series:
        """The columns and the pace that the sites agreed on."""
        reading = self.reading
        return Series(
            client="",
            time=reading.time,
            target=reading.target,
            past=reading.past,
            horizon=reading.horizon,
            step=clock.length if clock.paced else None,
            dated=bool(agreed["dated"]),
            calendar=read_windows(agreed)[1],
            kinds=read_inputs(agreed),
            future=tuple(agreed["future"]),
            static=tuple(agreed["static"]),
        )

    def _windows(self, agreed: Fields) -> Dataset:
        """All windows of the series among the steps of all sites."""
        self._check_forecast(agreed)
        clock, moments = plan.clock_of(agreed), self._times.moments
        times = clock.times
        place = np.searchsorted(times, moments - disclosure.NEAR)
        if (place == len(times)).any() or (np.abs(times[place] - moments) > 2 * disclosure.NEAR).any():
            problem = f"{self.frame.name} has changed since this site joined: it has times that it had not"
            raise UsageError(f"{problem}; put it back as it was, or start another run", Fault.REPLACED)
        series = self._series(agreed, clock)
        self.check_asked(series.kinds)
        windows = Windows(series.past, series.horizon, horizons=read_windows(agreed)[0])
        reading = self.reading
        return cut_series(
            self.frame, self.owners, clock, place, series, windows, group=reading.group, weight=reading.weight
        )

    def _check_forecast(self, agreed: Fields) -> None:
        """Raise Withheld unless the server asks for the forecast that this site's operator has declared."""
        reading = self.reading
        declared = {
            "targets": [reading.target],
            "past": reading.past,
            "horizon": reading.horizon,
            "future": sorted(reading.future),
            "static": sorted(reading.static),
            "dated": self._times.dated,
        }
        for name, value in declared.items():
            if json.dumps(agreed[name]) != json.dumps(value):  # by which 1 is not True
                raise Withheld(
                    f"it forecasts '{reading.target}', {several(reading.horizon, 'step')} from {reading.past} "
                    f"(--target, --time, past, horizon, future, static), and the server asks for other {name}"
                )

    def _parts(self, dataset: Dataset, agreed: Fields, split: Split, seed: int) -> dict[str, Tensor]:
        assert dataset.time is not None
        rows, draw = _own(dataset), generator(seed, "split", int(tags([self.name])))
        if split.own_times:
            parts = split.by_own_time(dataset.time, dataset.span, rows, draw)
        else:
            if (cuts := read_windows(agreed)[2]) is None:
                raise TypeError("a split in time needs the steps at which validation and test begin")
            parts = split.cut(dataset.time, dataset.span, rows, *cuts, draw)
        if not parts:
            raise UsageError(f"{self.frame.name} has no window for each of training, validation and test", Fault.FEW)
        if self.limits:
            clock, begins = plan.clock_of(agreed), dataset.time.numpy()
            drawn = {
                name: clock.times[np.searchsorted(clock.steps, begins[part.numpy()])] for name, part in parts.items()
            }
            self.limits.check_draw(self.path, split, seed, drawn)
        return parts


def covariates_of(fields: Mapping[str, Any]) -> Description | None:
    """The description of covariates in a message of the server's; raises UsageError if it is none."""
    return read_description(fields, "covariates") if "covariates" in fields else None


def _own(dataset: Dataset) -> Tensor:
    """The rows at which windows begin."""
    assert dataset.client is not None
    return (dataset.client == 0).nonzero().flatten()
