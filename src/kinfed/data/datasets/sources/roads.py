"""Originals of traffic sets: speeds as CSV with DCRNN's road distances, flows as npz with ASTGCN's roads."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import RunError
from ...graph_files import distance

Arrays = dict[str, NDArray[Any]]
Files = dict[str, Path]


def speeds(files: Files) -> Arrays:
    """Readings with one column a detector, 0 where one is missing, and distances between detectors in metres."""
    readings, distances = files.values()
    with readings.open(newline="") as file:
        names = next(csv.reader(file))[1:]
        content = file.read()
    stamps = np.array([line.partition(",")[0] for line in content.splitlines()], dtype="datetime64[m]")
    values = np.loadtxt(
        io.StringIO(content), delimiter=",", usecols=range(1, len(names) + 1), dtype=np.float32, ndmin=2
    )
    index = {name: i for i, name in enumerate(names)}
    metres_between = np.full((len(names), len(names)), np.inf, np.float32)
    for a, b, metres in _rows(distances):
        if a in index and b in index:
            metres_between[index[a], index[b]] = float(metres)
    if not np.isfinite(metres_between).any():
        raise RunError(f"{distances} has no distance between the detectors of {readings.name}; is it the right file?")
    # DCRNN's scale is the spread of all distances that are listed, those of 0 to itself included.
    scale = float(metres_between[np.isfinite(metres_between)].std())
    return {
        "values": values,
        "sensor_ids": np.array(names),
        "adjacency": distance(torch.from_numpy(metres_between), sigma=scale).weights.numpy(),
        "start": np.array(str(stamps[0])),
        "minutes_from_start": (stamps - stamps[0]).astype(np.int64),
        "missing": np.float32(0),
    }


def flows(files: Files, start: str) -> Arrays:
    """`data: [T, N, 3]` (flow, occupancy, speed) every 5 minutes, and which detectors a road joins."""
    readings, roads = files.values()
    with np.load(readings, allow_pickle=False) as content:
        if "data" not in content.files:
            raise RunError(f"{readings} must hold the array data; it holds {', '.join(content.files) or 'nothing'}")
        values = content["data"].astype(np.float32)
    links = np.zeros((values.shape[1], values.shape[1]), np.float32)
    for a, b, *_ in _rows(roads):
        links[int(a), int(b)] = 1
    return {
        "values": values,
        "adjacency": links,
        "start": np.array(start),
        "feature_names": np.array(["flow", "occupancy", "speed"]),
    }


def _rows(path: Path) -> Iterable[list[str]]:
    """The rows of a list of roads, without its heading if it has one."""
    with path.open(newline="") as file:
        yield from (row for row in csv.reader(file) if row and row[0] != "from")
