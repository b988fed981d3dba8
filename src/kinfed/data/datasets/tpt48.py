"""TPT-48: monthly mean temperatures of the 48 contiguous states of the USA; every state is a client."""

from pathlib import Path
from typing import Literal

import numpy as np

from ...errors import UsageError
from ..dataset import Dataset
from ..graph_files import adjacency
from ..windows import Windows
from .directory import read


def tpt48(
    data_dir: Path | None = None,
    *,
    past: int = 6,  # months in
    horizon: int = 6,  # months out
    error: Literal["absolute", "squared"] = "squared",  # that training minimises
) -> Dataset:
    """Monthly mean temperatures (degrees F) of 48 states, 2008 to 2019, joined by their borders; from tpt48.npz.

    The file holds values: float [months, 48], sensor_ids: [48] names and adjacency: [48, 48], 1 where two states share
    a border. Windows are x: [n, past, 1] and y: [n, horizon] (Xu et al., 2022, after NOAA's nClimDiv). Raises
    UsageError or DataError naming the file when it is missing, damaged or otherwise.
    """
    path, arrays = read(data_dir, "tpt48", ("values", "sensor_ids", "adjacency"))
    cut = Windows(past, horizon, 1, error, horizons=(1, 3, 6))
    try:
        steps = np.arange(len(arrays["values"]))
        return cut(arrays["values"], steps, list(map(str, arrays["sensor_ids"])), graph=adjacency(arrays["adjacency"]))
    except (ValueError, TypeError) as problem:
        raise UsageError(f"{path}: {problem}") from None
