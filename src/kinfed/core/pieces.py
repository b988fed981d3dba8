"""Tables too large for memory, read a piece at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 1 << 26  # bytes that are read or written at once


class Part:
    """Rows ids: [M] of a table: [N, ...] in a file, read only when a slice of them is taken."""

    def __init__(self, table: Tensor, ids: Tensor) -> None:
        self._table, self._ids = table, ids.to(table.device)
        self.shape, self.dtype = torch.Size([len(ids), *table.shape[1:]]), table.dtype

    def __getitem__(self, at: slice) -> Tensor:
        return self._table[self._ids[at]]


def pieces(count: int, size: int) -> Iterator[slice]:
    """Slices of a table of `count` rows of `size` bytes each, at most a `PIECE` at a time."""
    each = max(1, PIECE // max(1, size))
    for start in range(0, count, each):
        yield slice(start, min(start + each, count))
