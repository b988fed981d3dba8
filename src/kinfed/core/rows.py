"""Tables with a row for each client: made, read and written by index; those too large for memory piece by piece."""

import math
import mmap
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from sys import getrefcount
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

WORTH = 1 << 22  # bytes from which a table's memory is worth reusing
SPARE = 1 << 31  # bytes of freed tables that are kept for new ones, at most
PIECE = 1 << 26  # bytes of a table in a file that are read or written at once
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
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


def zeros(count: int, like: Tensor) -> Tensor:
    """[count, ...] zeros of the type and width of like: [...]; on a CPU rows take no memory until they are written.

    The kernel gives memory page by page, and nothing is read or written here. Large pages would hold many rows each.
    """
    size = count * like.nbytes
    if like.device.type != "cpu" or size < WORTH or not hasattr(mmap, "MAP_ANONYMOUS"):
        return like.new_zeros(count, *like.shape)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(like.dtype).view(count, *like.shape)


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
    """The table: [N, ...] with rows: [K, ...] in place of those of the cohort: [K]; the table itself does not change.

    If the cohort is everyone in order, this is `rows` itself. A table that was given away is written in place, see
    `Written`: then whoever holds it must not read it again.

    >>> import torch
    >>> kinfed.methods.put(torch.zeros(3, 1), torch.tensor([2, 0]), torch.tensor([[3.0], [1.0]])).tolist()
    [[1.0], [0.0], [3.0]]
    """
    rows = rows.to(table.dtype)
    if _is_everyone(cohort, len(table)):
        return rows
    written = _WRITTEN.get()
    if written is not None and written.holds(table):
        return written.put(table, cohort, rows)
    if table.ndim == 1:  # small, or one client's model, which may be many under vmap
        return table.index_copy(0, cohort, rows)
    return blank(len(table), table).copy_(table).index_copy_(0, cohort, rows)


def subtract(theta: Tensor, other: Tensor) -> Tensor:
    """[N, d] theta: [N, d] less other: [N, d] or [d], in memory that is used again, as new memory is slow."""
    return torch.sub(theta, other, out=blank(len(theta), theta))


class Written:
    """The tables of a server's state that `put` writes in place while `allow` lasts, and their rows of before.

    A round of 100 of 10,000 clients so touches 100 rows. The engine gives the state's tables away with `aggregate`,
    which must read what it needs of a table before it puts rows into it.
    """

    def __init__(self, tables: Iterable[Tensor], kept: Iterable[Tensor] = ()) -> None:
        """Of the tables those are given away that are large, once in memory, and in none of those that are kept."""
        tables = list(tables)
        times = Counter(map(_memory_of, (*tables, *kept)))
        plain = (t for t in tables if type(t) is Tensor)
        fit = (t for t in plain if t.ndim > 1 and t.nbytes >= WORTH and t.is_contiguous())
        self._memories = {_memory_of(t) for t in fit if times[_memory_of(t)] == 1}
        self._rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # a table, whose rows, as before, as they are

    def holds(self, table: Tensor) -> bool:
        """Whether `put` may write into a table."""
        if not self._memories or is_functorch_wrapped_tensor(table) or table.requires_grad:
            return False
        return _memory_of(table) in self._memories

    def put(self, table: Tensor, cohort: Tensor, rows: Tensor) -> Tensor:
        """The table with new rows, in the same memory; another tensor, by which memos tell that it has changed."""
        before = torch.index_select(table, 0, cohort, out=blank(len(cohort), table))
        self._rows.append((table, cohort, before, rows))
        return table.view(table.shape).index_copy_(0, cohort, rows)

    @contextmanager
    def allow(self) -> Iterator[None]:
        """A block in which `put` writes in place."""
        token = _WRITTEN.set(self)
        try:
            yield
        finally:
            _WRITTEN.reset(token)

    def changes(self, state: Iterable[Tensor]) -> Iterator[Tensor]:
        """What is new in a state: the rows that were put in place, and all of the other tensors."""
        yield from (rows for *_, rows in self._rows)
        memories = {_memory_of(table) for table, *_ in self._rows}
        yield from (t for t in state if not t.numel() or _memory_of(t) not in memories)

    def settle(self) -> None:
        """The round is over: what it has written stays."""
        self._rows.clear()

    def undo(self) -> None:
        """Put back what was there before."""
        while self._rows:
            table, cohort, before, _ = self._rows.pop()
            table.index_copy_(0, cohort, before)


_WRITTEN: ContextVar[Written | None] = ContextVar("written", default=None)


def _memory_of(table: Tensor) -> int:
    """Where a table lies; one of a subclass, which may lie nowhere, is by itself."""
    return table.untyped_storage().data_ptr() if type(table) is Tensor else id(table)


def copy_shared(message: Iterable[Tensor], state: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of a message, copied where they lie in the memory of a state that may be written in place."""
    memories = {_memory_of(t) for t in state if t.ndim > 1 and t.nbytes >= WORTH}
    return [t.clone() if _memory_of(t) in memories else t for t in message]


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
    """Rows ids: [N] of a table: [M, ...], read only when some of them are taken; several may be one row."""

    def __init__(self, table: Tensor, ids: Tensor) -> None:
        self.table, self.ids = table, ids.to(table.device)
        self.shape, self.dtype, self.device = torch.Size([len(ids), *table.shape[1:]]), table.dtype, table.device

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: Any) -> Tensor:
        rows: Tensor = self.table[self.ids[at]]
        return rows

    def separate(self) -> tuple["Part", Tensor]:
        """The rows that differ in place, [m, ...], and [N] int64 which of them each is."""
        rows, places = self.ids.unique(return_inverse=True)
        return Part(self.table, rows), places


Table = Tensor | Part  # [N, ...]


def pieces(count: int, size: int) -> Iterator[slice]:
    """Slices of a table of `count` rows of `size` bytes each, at most a `PIECE` at a time."""
    rows = max(1, PIECE // max(1, size))
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))


def weighted_mean(theta: Tensor, weights: Tensor) -> Tensor:
    """[d] mean of theta: [K, d] with weights: [K] of any positive sum.

    >>> import torch
    >>> kinfed.methods.weighted_mean(torch.tensor([[0.0, 2.0], [4.0, 2.0]]), torch.tensor([3, 1]))
    tensor([1., 2.])
    """
    weights = weights.to(theta.dtype)  # counts would be divided in float32
    return weights / weights.sum() @ theta
