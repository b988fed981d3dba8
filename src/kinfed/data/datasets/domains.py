"""Domain graphs from the data directory: every domain is a client, and the domains' graph is given."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ...core.graph import Graph, check_graph
from ...core.tasks import Classification
from ...errors import UsageError
from ..dataset import Dataset
from .directory import labels, read


def domains(name: str) -> Callable[..., Dataset]:
    """The loader of DG-15 or DG-60 (Xu et al., 2022, "Graph-Relational Domain Adaptation"): x: [n, 2], two classes.

    NAME.npz holds x: float [n, 2], y: [n] integers, client: [n] integers 0..N-1 and adjacency: [N, N]. The loader
    raises UsageError or DataError naming the file when it is missing, damaged or otherwise.
    """

    def load(data_dir: Path | None = None) -> Dataset:
        path, arrays = read(data_dir, name, ("x", "y", "client", "adjacency"))
        x, adjacency = arrays["x"], arrays["adjacency"]
        if x.dtype.kind != "f" or x.ndim != 2 or x.shape[1] != 2 or not np.isfinite(x).all() or not len(x):
            raise UsageError(
                f"{path}: x must be finite floats [n, 2]; got {x.dtype} {list(x.shape)}; write the file again"
            )
        if adjacency.dtype.kind not in "fiub" or adjacency.ndim != 2:
            raise UsageError(f"{path}: adjacency must be numbers [N, N]; got {adjacency.dtype} {list(adjacency.shape)}")
        client = labels(path, "client", arrays["client"], len(x), len(adjacency))
        weights = torch.from_numpy(adjacency.astype(np.float32))
        try:
            check_graph(weights, len(adjacency))
        except UsageError as problem:
            raise UsageError(f"{path}: {problem}") from None
        return Dataset(
            torch.from_numpy(x.astype(np.float32)),
            torch.from_numpy(labels(path, "y", arrays["y"], len(x), 2)),
            Classification(2),
            client=torch.from_numpy(client),
            graph=Graph(weights, "given"),
        )

    return load
