"""New readings of series as windows, as a model was trained on them."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import UsageError, several
from ..windows import carried_forward
from .formats import Formats
from .frame import DAY, Frame
from .owners import Owners
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
    step: float | None  # from one to the next, in seconds if times are dates; None: each different time is a step
    dated: bool  # whether times are dates
    clock: bool  # whether the time of day is an input, too
    mean: float = 0.0  # of readings
    deviation: float = 1.0
    formats: Formats = field(default_factory=Formats)  # by which text is read
    dropped: tuple[str, ...] = ()  # columns of the table that are none of these

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], reading: Mapping[str, float]) -> "Series":
        """The series that `to_dict` made, with the mean and deviation of its readings."""
        formats = Formats.from_dict(values.get("formats", {}))  # none in older folders
        dropped = tuple(values.get("dropped", ()))
        former = {name: value for name, value in values.items() if name != "written"}
        return cls(**{**former, **reading, "formats": formats, "dropped": dropped})

    def to_dict(self) -> dict[str, Any]:
        """The columns and the pace as JSON has them; the scale of readings is elsewhere."""
        return {name: value for name, value in asdict(self).items() if name not in ("mean", "deviation")}

    def windows(self, frame: Frame, owners: Owners) -> Ahead:
        """A window for each row whose past is there: `past` steps without a gap, with a known reading in them.

        The reading of the row itself is the last in its window. A warning counts rows without enough past; raises
        UsageError if that is all of them, or if times are not as in training.
        """
        frame = frame.read_as(self.formats)
        readings = frame.numbers(self.target)
        moments, ranks, dated = frame.moments(self.time, owners, series=True)
        if dated != self.dated:
            kinds = ("numbers", "dates")
            raise UsageError(
                f"{frame.place(0, self.time)}: times are {kinds[dated]}, but the run was trained on {kinds[self.dated]}"
            )
        steps = self._steps(frame, moments, ranks)
        held = np.flatnonzero(owners.who >= 0)
        known, first, place = np.unique(steps[held], return_index=True, return_inverse=True)
        values = np.full((len(owners.names), len(known)), np.nan)
        values[owners.who[held], place] = readings[held]
        series, at = torch.from_numpy(values).to(torch.get_default_dtype()), torch.from_numpy(known)
        total = torch.nn.functional.pad((~series.isnan()).cumsum(1), (1, 0))  # [N, T + 1]
        begin, who = place - self.past + 1, owners.who[held]
        usable = begin >= 0
        begin = np.maximum(begin, 0)
        usable &= known[place] - known[begin] == self.past - 1
        usable &= (total[who, place + 1] > total[who, begin]).numpy()
        self._tell(frame, usable)
        clock = torch.from_numpy(moments[held][first] % DAY / DAY) if self.clock else None
        parts = [((carried_forward(series, at) - self.mean) / self.deviation).nan_to_num(0)]
        parts += [clock.to(series).expand_as(series)] if clock is not None else []
        whole, width = torch.stack(parts, -1), len(parts)  # [N, T, F]
        x = whole.as_strided((len(owners.names) * len(known) - self.past + 1, self.past, width), (width, width, 1))
        where = (who * len(known) + begin)[usable]
        return Ahead(x, torch.from_numpy(where), who[usable], held[usable])

    def _steps(self, frame: Frame, moments: NDArray[Any], ranks: Codes) -> Codes:
        """[n] steps at the pace of training."""
        if self.step is None:
            return ranks
        steps = (moments - moments.min()) / self.step
        off = np.abs(steps - steps.round()) > 0.01
        if off.any():
            unit = " seconds" if self.dated else ""
            raise UsageError(
                f"{frame.place(int(off.argmax()), self.time)}: this time is not a whole number of steps of "
                f"{self.step:g}{unit} after the first, as times in training were; leave such rows out"
            )
        return np.asarray(steps.round().astype(np.int64))

    def _tell(self, frame: Frame, usable: NDArray[np.bool_]) -> None:
        short = int((~usable).sum())
        why = f"fewer than {self.past} steps without a gap, or without any reading, up to them"
        if short == len(usable):
            raise UsageError(f"{frame.name}: all {several(short, 'row')} have {why}; give more of each series")
        if short:
            warnings.warn(f"{frame.name}: {several(short, 'row')} with {why} got no forecast", stacklevel=4)
