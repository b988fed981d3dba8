"""Rows of a table as readings of series: the steps at which they were read, and the windows cut from them."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ...errors import UsageError
from ..dataset import Dataset
from ..steps import calendar, usual_calendar
from ..windows import Windows
from .covariates import Covariates, Grid, cells_of, describe_faults
from .frame import Frame
from .new_readings import Series
from .owners import Owners
from .row_examples import read_blocks, read_weights
from .schema import Scale
from .times import Clock
from .words import Codes


def calendar_of(chosen: Sequence[str] | None, dated: bool, length: float, past: int, where: str) -> tuple[str, ...]:
    """The features of times whose steps have this length; raises UsageError for those of times that are no dates."""
    if chosen is None:
        return usual_calendar(length, past) if dated else ()
    if chosen and not dated:
        raise UsageError(f"{where}: times are numbers, which have no calendar; leave calendar out")
    return tuple(chosen)


def cut_series(
    frame: Frame,
    held: Owners,
    clock: Clock,
    place: Codes,
    series: Series,
    windows: Windows,
    scale: Scale = "federation",
    categories: int = 50,
    group: str = "",
    weight: str = "",
) -> Dataset:
    """Windows of one series per client, from rows in any order.

    place: [m] says where the clients' rows are among the clock's steps, without rows that belong to none. A warning
    warns of faults of covariates. A window is of the time of its first target. See `Covariates` for `scale` and
    `categories`. With the column `group` a window is of the group of the first reading that is forecast, and with the
    column `weight` it counts as many rows as the readings that are forecast count on average.
    """
    rows = np.flatnonzero(held.who >= 0)
    grid = Grid(rows, held.who[rows], place, (len(held.names), len(clock.steps)))
    readings, covariates = grid.lay_out(frame[series.target].numbers()), None
    if series.kinds:
        cells = cells_of(frame, series.kinds, series.static, grid, held.names)
        steps = torch.from_numpy(clock.steps)
        covariates = Covariates(
            client=series.client,
            owners=held.names,
            kinds=series.kinds,
            cells=cells,
            steps=steps,
            ahead=series.future,
            scale=scale,
            categories=categories,
        )
        for line in describe_faults(frame, covariates, grid, readings, series.past):
            warnings.warn(line, stacklevel=5)
    weights = grid.lay_out(read_weights(frame, weight, series.client)).T if weight else None
    times = calendar(clock.times, series.calendar) if series.calendar else None
    try:
        dataset = windows(
            readings.T,
            clock.steps,
            held.names,
            calendar=times,
            covariates=covariates,
            graph=held.graph,
            weights=weights,
        )
    except UsageError as problem:
        unit = " seconds" if series.dated else ""
        pace = f"a step is {clock.length:g}{unit}, the smallest distance between two times in '{series.time}'"
        pace = pace if clock.paced else f"each time in '{series.time}' is a step, as they are not evenly spaced"
        raise UsageError(f"{frame.name}: {problem} ({pace})", problem.fault) from None
    assert dataset.time is not None
    # A forecast is of the part in which its targets lie: readings before are known by then, whatever part they are of.
    dataset = replace(dataset, time=dataset.time + series.past, span=windows.horizon, past=series.past)
    if not group:
        return dataset
    blocks = read_blocks(frame, group, rows).numpy()
    shape = (len(held.names), len(clock.steps))
    laid = (len(frame) + 1 + np.arange(math.prod(shape))).reshape(shape)  # a reading without a row is by itself
    laid[held.who[rows], place] = blocks
    first = torch.from_numpy(laid.reshape(-1)[series.past :][: len(dataset.y)].copy())
    return replace(dataset, blocks=first)
