"""Windows: examples cut from series of readings, with past readings as input and the next ones as target.

A federation's pool has one row per example. The series are stored end to end as one long vector, and every window is a
slice of it: so the pool is a view of the readings, not a copy, and a row is the position at which its window begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.field_checks import Count, Settings
from ..core.graph import Graph
from ..core.tasks import Forecasting, Quantiles
from ..errors import Fault, UsageError, list_names
from .dataset import Dataset
from .steps import carried_forward
from .tables.covariates import Covariates, leads_of
from .tables.schema import Description


@dataclass(frozen=True)
class Windows(Settings):
    """How series are cut: `past` readings in, the next `horizon` out, a window at every `stride`-th step."""

    past: Count = 12  # readings in the input
    horizon: Count = 12  # readings in the target
    stride: Count = 1  # steps from one window to the next
    error: Literal["absolute", "squared"] = "absolute"  # the loss of forecasts in training
    horizons: Sequence[Count] = (3, 6, 12)  # steps ahead that are also scored by themselves
    quantiles: Sequence[float] = ()  # to forecast in place of one number for each reading, such as [0.1, 0.5, 0.9]

    @property
    def task(self) -> Forecasting:
        """What is learnt of readings, whose scale is not known yet."""
        settings: dict[str, Any] = {"error": self.error, "horizons": tuple(self.horizons)}
        return Quantiles(**settings, quantiles=tuple(self.quantiles)) if self.quantiles else Forecasting(**settings)

    @property
    def span(self) -> int:
        """Steps that one window covers."""
        return self.past + self.horizon

    def __call__(
        self,
        values: NDArray[Any],
        steps: NDArray[np.int64],
        names: Sequence[str],
        *,
        calendar: NDArray[Any] | None = None,
        covariates: Covariates | None = None,
        graph: Graph | None = None,
        weights: NDArray[Any] | None = None,
    ) -> Dataset:
        """The data set of all windows of values: [T, N], NaN where a reading is missing; one column is one client.

        `steps: [T]` say when each row was read, in whole steps: a window never reaches across a gap. A `calendar: [T,
        C]`, such as the time of day in [0, 1), and `covariates` are inputs beside the readings. An example is x: [past,
        F] and y: [horizon]; a window without a known reading in either part is left out. Inputs are scaled to mean 0
        and standard deviation 1 over the readings of all training windows; a missing one is replaced by the last known
        one since the last gap, or else by the mean. By `weights: [T, N]` a window counts as the readings that it
        forecasts count on average. One of weight 0 is never forecast, although it is an input of later windows. Raises
        UsageError on series that cannot be cut in this way.
        """
        self._check(values, steps, names)
        count, length = values.shape[1], len(values)  # N, T
        readings = torch.from_numpy(np.ascontiguousarray(values.T)).to(torch.get_default_dtype())  # [N, T]
        observed = ~readings.isnan()
        at = torch.from_numpy(np.ascontiguousarray(steps))
        counted = None if weights is None else torch.from_numpy(np.ascontiguousarray(weights.T)).nan_to_num(0)  # [N, T]
        wanted = observed if counted is None else observed & (counted > 0)
        targets = readings if counted is None else readings.where(wanted, torch.nan)
        usable = self._usable(observed, wanted, at, names)
        owner = torch.full((count, length), -1)
        owner[:, : usable.shape[1]] = torch.where(usable, torch.arange(count)[:, None], -1)
        size = count * length - self.span + 1
        y = targets.view(-1).as_strided((size, self.horizon), (1, 1), self.past)
        scaling = Scaling(self, carried_forward(readings, at), readings.view(-1), observed, calendar, covariates)
        return Dataset(
            scaling.inputs(scaling.filled),
            y,
            self.task,
            client=owner.view(-1)[:size],
            graph=graph,
            owners=tuple(names),
            time=at.repeat(count)[:size],
            span=self.span,
            prepare=scaling,
            weights=None if counted is None else self._mean_weights(counted, y),
        )

    def _mean_weights(self, weights: Tensor, y: Tensor) -> Tensor:
        """[n] the mean weight of the readings y: [n, horizon] that each window forecasts; 1 where it forecasts none."""
        spread = weights.view(-1).as_strided(y.shape, (1, 1), self.past)
        return spread.where(~y.isnan(), torch.nan).nanmean(1).nan_to_num(1).float()

    def _usable(self, observed: Tensor, wanted: Tensor, steps: Tensor, names: Sequence[str]) -> Tensor:
        """[N, starts] where windows begin: without gaps, a stride apart.

        The past has an observed: [N, T] reading, and the rest a wanted: [N, T] one.
        """
        count, length = observed.shape
        total, ahead = (torch.nn.functional.pad(part.cumsum(1), (1, 0)) for part in (observed, wanted))  # before a step
        begin = torch.arange(max(length - self.span + 1, 0))
        usable = (steps[begin + self.span - 1] - steps[begin] == self.span - 1) & (begin % self.stride == 0)  # [starts]
        middle = begin + self.past
        usable = usable & (total[:, middle] > total[:, begin]) & (ahead[:, begin + self.span] > ahead[:, middle])
        without = [name for name, some in zip(names, usable.any(1).tolist(), strict=True) if not some]
        if without:
            raise UsageError(
                f"{len(without)} of {count} series have no window of {self.past} + {self.horizon} steps with known "
                f"readings: {list_names(without)}; remove these from the data",
                Fault.FEW,
            )
        return usable

    def _check(self, values: NDArray[Any], steps: NDArray[np.int64], names: Sequence[str]) -> None:
        if values.ndim != 2 or values.dtype.kind != "f" or not values.size or values.shape[1] != len(names):
            raise UsageError(
                f"series must be floats [T, N], a column for each of {len(names)} clients; "
                f"got {values.dtype} {list(values.shape)}"
            )
        endless = np.argwhere(np.isinf(values))
        if len(endless):
            step, column = endless[0]
            raise UsageError(f"series '{names[column]}' holds infinity, first in row {step}; a missing reading is NaN")
        if steps.shape != (len(values),) or (np.diff(steps) <= 0).any():
            late = int(np.flatnonzero(np.diff(steps) <= 0)[0]) + 1 if steps.shape == (len(values),) else 0
            raise UsageError(f"the steps of a series must increase from row to row; row {late} does not")
        if len(values) < self.span:
            raise UsageError(
                f"a window covers {self.past} + {self.horizon} steps, but the series have {len(values)}; "
                "make past or horizon smaller",
                Fault.FEW,
            )


@dataclass(frozen=True)
class Scaling:
    """Makes inputs of windows when their training rows are known: scaled by what is in these."""

    windows: Windows
    filled: Tensor  # [N, T] readings, with the last known one where one is missing
    flat: Tensor  # [N * T] readings
    observed: Tensor  # [N, T] where there is one
    calendar: NDArray[Any] | None = None  # [T, C]
    covariates: Covariates | None = None

    def __call__(self, dataset: Dataset, rows: Tensor) -> Dataset:
        """The data set scaled by what training rows: [n] say; raises UsageError if their readings are all the same.

        A data set that has a scale already, as where a run goes on, keeps it.
        """
        if dataset.scale:
            kept = dataset.scale["targets"]["reading"]
            columns = dataset.scale.get("covariates")
            former = None if columns is None else Description.from_dict(columns)
            return self.scale_by(
                dataset, float(kept["mean"]), float(kept["deviation"]), self._describe_columns(rows, former)
            )
        seen = self.collect_readings(rows)
        return self.scale_by(dataset, float(seen.mean()), float(seen.std(correction=0)), self._describe_columns(rows))

    def _describe_columns(self, rows: Tensor, former: Description | None = None) -> Description | None:
        if self.covariates is None:
            return None
        seen = self.mark_steps(rows).numpy()
        return self.covariates.describe(seen) if former is None else self.covariates.complete(former, seen)

    def mark_steps(self, rows: Tensor) -> Tensor:
        """[N, T] which steps are in the windows of these rows."""
        begins = torch.zeros(len(self.flat) + 1, dtype=torch.int64)
        span = self.windows.span
        begins.index_add_(0, rows, torch.ones_like(rows)).index_add_(0, rows + span, -torch.ones_like(rows))
        return (begins[:-1].cumsum(0) > 0).view(self.observed.shape)

    def collect_readings(self, rows: Tensor) -> Tensor:
        """float64 the known readings in the windows of these rows, each once."""
        return self.flat[(self.mark_steps(rows) & self.observed).view(-1)].double()

    def scale_by(
        self, dataset: Dataset, mean: float, deviation: float, described: Description | None = None
    ) -> Dataset:
        """The data set scaled by this mean and deviation, and its covariates as `described`.

        Raises UsageError if the deviation is 0.
        """
        if not deviation > 0:
            raise UsageError(f"all training readings are {mean:g}, so there is no scale; check the target")
        task = dataset.task
        if isinstance(task, Forecasting):  # another one is the user's own, for readings as they are
            task = replace(task, mean=mean, deviation=deviation)
        reading_scale = {"reading": {"mean": mean, "deviation": deviation}}
        scale: dict[str, Any] = {"inputs": reading_scale, "targets": reading_scale}  # the calendar is as it is
        beside = None
        if self.covariates is not None and described is not None:
            scale["covariates"] = described.to_dict()
            beside = self.covariates.channels(described, leads_of(self.windows.past, self.windows.horizon))
        return replace(dataset, x=self.inputs((self.filled - mean) / deviation, beside), task=task, scale=scale)

    def inputs(self, readings: Tensor, beside: Tensor | None = None) -> Tensor:
        """[n, past, F] windows of scaled readings: [N, T], and of what is beside them: [N, T, C], if anything."""
        size = len(self.flat) - self.windows.span + 1
        return cut(side_by_side(readings.nan_to_num(0), self.calendar, beside), self.windows.past, size)


def side_by_side(readings: Tensor, calendar: NDArray[Any] | None, beside: Tensor | None) -> Tensor:
    """[N, T, F] readings: [N, T], a calendar: [T, C] and covariates: [N, T, C] as the inputs of each step."""
    parts = [readings[..., None]]
    if calendar is not None:
        parts.append(torch.from_numpy(np.ascontiguousarray(calendar)).to(readings).expand(len(readings), -1, -1))
    return torch.cat(parts if beside is None else [*parts, beside.to(readings)], -1)


def cut(inputs: Tensor, past: int, size: int) -> Tensor:
    """[size, past, F] the windows of inputs: [N, T, F], as a view."""
    width = inputs.shape[-1]
    return inputs.as_strided((size, past, width), (width, width, 1))
