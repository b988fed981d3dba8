"""Traffic sensors from the data directory: every sensor is a client and forecasts its next readings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ...errors import UsageError
from ..dataset import Dataset
from ..graph_files import adjacency
from ..steps import CLOCK, calendar
from ..windows import Windows
from .directory import read
from .files import TRAFFIC

MINUTES = 5  # between two readings, in all of these


def traffic(name: str) -> Callable[..., Dataset]:
    """The loader of one of TRAFFIC: windows x: [n, past, 2] of (reading, time of day), y: [n, horizon].

    NAME.npz holds values: float [T, N] or [T, N, F] (the first feature is used), adjacency: [N, N], start (the time of
    step 0) and perhaps sensor_ids: [N], lat_lon: [N, 2] in degrees, and time_index: [T] or minutes_from_start: [T]
    where steps are left out. The graph is the published one: a Gaussian kernel of road distances (Li et al., 2018),
    or 1 for a road that joins two detectors. The loader raises UsageError or DataError naming the file when it is
    missing, damaged or otherwise.
    """
    form = TRAFFIC[name]

    def load(
        data_dir: Path | None = None,
        *,
        past: int = 12,  # readings in
        horizon: int = 12,  # readings out
        stride: int = 1,  # steps from one window to the next
        time_of_day: bool = True,  # whether it is an input beside the reading
        error: Literal["absolute", "squared"] = "absolute",  # that training minimises
    ) -> Dataset:
        optional = ("sensor_ids", "time_index", "minutes_from_start", "lat_lon")
        path, arrays = read(data_dir, name, ("values", "adjacency", "start"), optional)
        values = arrays["values"]
        if values.dtype.kind != "f" or values.ndim not in (2, 3) or not values.size:
            raise UsageError(f"{path}: values must be floats [T, N] or [T, N, F]; got {values.dtype} {values.shape}")
        start = arrays["start"]
        if start.shape or not _is_date(str(start)):
            raise UsageError(
                f"{path}: start must be the one date of step 0, such as '2012-03-01T00:00'; got {start.tolist()}"
            )
        values = values if values.ndim == 2 else values[..., 0]
        if form.missing is not None:
            values = np.where(values == form.missing, np.nan, values)
        steps = np.arange(len(values))
        if "time_index" in arrays:
            steps = arrays["time_index"].astype(np.int64)
        elif "minutes_from_start" in arrays:
            steps = arrays["minutes_from_start"].astype(np.int64) // MINUTES
        names = [str(i) for i in arrays.get("sensor_ids", np.arange(values.shape[1]))]
        cut = Windows(past, horizon, stride, error)
        try:
            begin = np.datetime64(str(start)).astype("datetime64[s]").astype(np.float64)
            day = calendar(begin + 60.0 * MINUTES * steps, [CLOCK]) if time_of_day else None
            dataset = cut(values, steps, names, calendar=day, graph=adjacency(arrays["adjacency"]))
        except ValueError as problem:  # of numpy, or ours
            raise UsageError(f"{path}: {problem}") from None
        places = arrays.get("lat_lon")
        if places is not None and (places.shape != (len(names), 2) or not np.isfinite(places).all()):
            raise UsageError(f"{path}: lat_lon must be [{len(names)}, 2] numbers; got {list(places.shape)}")
        return dataset if places is None else replace(dataset, places=torch.from_numpy(places))

    load.__doc__ = form.summary(name)
    return load


def _is_date(text: str) -> bool:
    try:
        return not np.isnat(np.datetime64(text))
    except ValueError:
        return False
