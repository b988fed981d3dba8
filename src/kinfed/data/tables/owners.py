"""Owners of a table's rows."""

import warnings
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.graph import Graph
from ...errors import UsageError, list_names, some


class Owners(NamedTuple):
    """Which client owns each row, and how clients are related."""

    names: list[str]
    who: NDArray[np.int64]  # [n] the owner's place in names; -1: none
    graph: Graph | None

    def keep(self, usable: NDArray[np.bool_], least: int, what: str, table: str) -> "Owners":
        """Without owners that have too few usable rows, with a warning; raises UsageError if `least` is not set."""
        counts = np.bincount(self.who[usable], minlength=len(self.names))
        kept = counts >= max(least, 1)
        if kept.all():
            return self
        short = [f"{name} ({n})" for name, n, stays in zip(self.names, counts, kept, strict=True) if not stays]
        message = f"{some(len(short), len(counts), 'client')} fewer than {max(least, 1)} {what}"
        few = list_names(short)
        if not least:
            raise UsageError(f"{table}: {message}: {few}; leave such clients out with least")
        if not kept.any():
            raise UsageError(f"{table}: {message}: {few}")
        warnings.warn(f"{table}: {message} and {'was' if len(short) == 1 else 'were'} left out: {few}", stacklevel=4)
        place = np.append(np.where(kept, kept.cumsum() - 1, -1), -1)
        among = torch.from_numpy(kept)
        graph = self.graph and Graph(self.graph.weights[among][:, among], self.graph.origin)
        return Owners([n for n, stays in zip(self.names, kept, strict=True) if stays], place[self.who], graph)
