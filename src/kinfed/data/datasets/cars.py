"""CompCars from the data directory: photographs of four types of cars; every viewpoint and year is a client."""

from pathlib import Path

import numpy as np
import torch

from ...core.tasks import Classification
from ...errors import UsageError
from ..dataset import Dataset
from ..graph_files import adjacency
from .directory import labels, read


def compcars(data_dir: Path | None = None) -> Dataset:
    """Images [n, 3, 64, 64] of four types of cars, 30 clients of a viewpoint and a year each; from compcars.npz.

    The file holds x: uint8 [n, 3, 64, 64], y: [n], client: [n], owners: [N], class_names: [4] and adjacency: [N, N]
    (Yang et al., 2015; clients after Mancini et al., 2019). Raises UsageError or DataError naming the file when it is
    missing, damaged or otherwise.
    """
    path, arrays = read(data_dir, "compcars", ("x", "y", "client", "owners", "class_names", "adjacency"))
    pixels = arrays["x"]
    if pixels.dtype != "uint8" or pixels.ndim != 4 or pixels.shape[1] != 3 or not len(pixels):
        raise UsageError(f"{path}: x must be uint8 [n, 3, height, width]; got {pixels.dtype} {list(pixels.shape)}")
    names = tuple(map(str, arrays["class_names"]))
    try:
        graph = adjacency(arrays["adjacency"])
    except UsageError as problem:
        raise UsageError(f"{path}: {problem}") from None
    y = labels(path, "y", arrays["y"], len(pixels), len(names))
    client = labels(path, "client", arrays["client"], len(pixels), len(graph.weights))
    return Dataset(
        x=torch.from_numpy(pixels.astype(np.float32)).div_(127.5).sub_(1),
        y=torch.from_numpy(y),
        task=Classification(len(names)),
        classes=names,
        client=torch.from_numpy(client),
        graph=graph,
        owners=tuple(map(str, arrays["owners"])),
    )
