"""Tables with a row for each client: made, read and written by index; those too large for memory piece by piece."""

import math
import threading
from collections.abc import Iterator, Sequence
from sys import getrefcount

import numpy as np
import torch
from torch import Tensor

WORTH = 1 << 22  # bytes from which a table's memory is worth reusing
SPARE = 1 << 31  # bytes of freed tables that are kept for new ones, at most
PIECE = 1 << 26  # bytes of a table in a file that are read or written at once
_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
_MEMORIES: list[_Bytes] = []  # memory of tables, oldest first
_LOCK = threading.Lock()


def blank(count: int, like: Tensor) -> Tensor:
    """[count, ...] a new, uninitialised table of the type and width of like: [N, ...]."""
    shape = (count, *like.shape[1:])
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < WORTH:
        return like.new_empty(shape)
    # The alignment of a table must not vary, or products may round differently.
    memory = _memory(size + 64)
    begin = -memory.ctypes.data % 64  # NumPy's, as a tensor's is not available within torch.func.vjp
    return torch.from_numpy(memory[begin : begin + size]).view(like.dtype).view(shape)


def _memory(size: int) -> _Bytes:
    """[size] uninitialised bytes: those of a freed table, if there is one of this size.

    Linux clears new memory page by page, which takes longer than to mix a small table; NumPy requests large pages. Up
    to SPARE bytes are kept for the next round, which needs the same sizes again.
    """
    if size > SPARE // 2:
        return np.empty(size, np.uint8)
    with _LOCK:
        for memory in _MEMORIES:
            if memory.nbytes == size and getrefcount(memory) == _FREE:
                return memory
        memory = np.empty(size, np.uint8)
        _MEMORIES.append(memory)
        while sum(spare.nbytes for spare in _MEMORIES) > SPARE:
            _MEMORIES.pop(0)  # freed with the table that lies in it
        return memory


def _references(memories: list[_Bytes]) -> int:
    """References to memory that only this list holds, in a loop over it; their number differs between Pythons."""
    for memory in memories:
        return getrefcount(memory)
    return 0


_FREE = _references([np.empty(0, np.uint8)])


def active(seen: Tensor) -> Tensor:
    """[N] bool the clients that have taken part, by seen: [N] bool; all of them as long as none has."""
    return seen | ~seen.any()


def take(table: Tensor, cohort: Tensor) -> Tensor:
    """Rows of the cohort: [K] of table: [N, ...]; the table itself, not a copy, if the cohort is everyone in order.

    >>> import torch
    >>> kinfed.methods.take(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])).tolist()
    [[3.0], [1.0]]
    """
    if _is_everyone(cohort, len(table)):
        return table
    return torch.index_select(table, 0, cohort, out=blank(len(cohort), table))


def put(table: Tensor, cohort: Tensor, rows: Tensor) -> Tensor:
    """The table: [N, ...] with rows: [K, ...] in place of those of the cohort: [K]; the table itself never changes.

    If the cohort is everyone in order, this is `rows` itself.

    >>> import torch
    >>> kinfed.methods.put(torch.zeros(3, 1), torch.tensor([2, 0]), torch.tensor([[3.0], [1.0]])).tolist()
    [[1.0], [0.0], [3.0]]
    """
    rows = rows.to(table.dtype)
    if _is_everyone(cohort, len(table)):
        return rows
    if table.ndim == 1:  # small, or one client's model, which may be many under vmap
        return table.index_copy(0, cohort, rows)
    return blank(len(table), table).copy_(table).index_copy_(0, cohort, rows)


def _is_everyone(cohort: Tensor, count: int) -> bool:
    """Whether the cohort is 0, ..., count - 1."""
    return len(cohort) == count and torch.equal(cohort, torch.arange(count, device=cohort.device))


def index(places: Sequence[int], device: torch.device) -> slice | Tensor:
    """An index of places in a table: a slice, which copies nothing, if they are consecutive."""
    first, count = places[0], len(places)
    if list(places) == list(range(first, first + count)):
        return slice(first, first + count)
    return torch.tensor(places, device=device)


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


def weighted_mean(theta: Tensor, weights: Tensor) -> Tensor:
    """[d] mean of theta: [K, d] with weights: [K] of any positive sum.

    >>> import torch
    >>> kinfed.methods.weighted_mean(torch.tensor([[0.0, 2.0], [4.0, 2.0]]), torch.tensor([3, 1]))
    tensor([1., 2.])
    """
    weights = weights.to(theta.dtype)  # counts would be divided in float32
    return weights / weights.sum() @ theta
