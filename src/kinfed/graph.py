"""Arithmetic on client models [N, d] and relations [N, N] or [L, N, N]: what graph methods are made of.

Tables [N, d] are large and memory is slow, new memory above all: nothing is copied that need not be, and what must be
new comes in large pages.
"""

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from sys import getrefcount
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .gemm import fast_gemm
from .layout import Layout

BLOCK = 64  # rows of a symmetric product that are worked out together: half the work is left out, bar half a block
PANEL = 1 << 19  # numbers of a table that are centred together, so that the copy stays in the cache
WORTH = 1 << 22  # bytes of a table whose memory is worth using again
SPARE = 1 << 31  # bytes of tables that are gone which are kept for new ones, at most
LARGE = 1 << 26  # multiplications in a product that takes a millisecond: worth asking which library is faster

_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
_MEMORIES: list[_Bytes] = []  # memory of tables, oldest first
_LOCK = threading.Lock()


def blank(count: int, like: Tensor) -> Tensor:
    """[count, ...] a new table of the type and width of like: [N, ...], with anything in it."""
    shape = (count, *like.shape[1:])
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < WORTH:
        return like.new_empty(shape)
    # Where a table begins must not vary, or products may round differently.
    memory = _memory(size + 64)
    begin = -memory.ctypes.data % 64  # NumPy's, as within torch.func.vjp a tensor does not tell
    return torch.from_numpy(memory[begin : begin + size]).view(like.dtype).view(shape)


def _memory(size: int) -> _Bytes:
    """[size] bytes with anything in them: those of a table that is gone, if there are.

    Linux clears what it gives out, page by page, which takes longer than to mix a small table; NumPy asks it for large
    pages. Up to SPARE bytes are kept for the next round, which needs the same again.
    """
    if size > SPARE // 2:
        return np.empty(size, np.uint8)
    with _LOCK:
        for memory in _MEMORIES:
            if memory.nbytes == size and getrefcount(memory) == _FREE:
                return memory
        memory = np.empty(size, np.uint8)
        _MEMORIES.append(memory)
        while sum(kept.nbytes for kept in _MEMORIES) > SPARE:
            _MEMORIES.pop(0)  # freed with the table that lies in it
        return memory


def _references(memories: list[_Bytes]) -> int:
    """Those to memory that only this list holds, in a loop over it: how many they are differs between Pythons."""
    for memory in memories:
        return getrefcount(memory)
    return 0


_FREE = _references([np.empty(0, np.uint8)])


def take(table: Tensor, cohort: Tensor) -> Tensor:
    """Rows of the cohort: [K] of table: [N, ...]; the table itself, not a copy, if that is everyone in order."""
    if _is_everyone(cohort, len(table)):
        return table
    return torch.index_select(table, 0, cohort, out=blank(len(cohort), table))


def put(table: Tensor, cohort: Tensor, rows: Tensor) -> Tensor:
    """The table: [N, ...] with rows: [K, ...] in place of those of the cohort: [K]; never a change of the table itself.

    If the cohort is everyone in order, this is `rows` itself.
    """
    rows = rows.to(table.dtype)
    if _is_everyone(cohort, len(table)):
        return rows
    if table.ndim == 1:  # small, or one client's model, which may be many under vmap
        return table.index_copy(0, cohort, rows)
    return blank(len(table), table).copy_(table).index_copy_(0, cohort, rows)


def weighted_mean(theta: Tensor, weights: Tensor) -> Tensor:
    """[d] mean of theta: [K, d] with weights: [K] of any positive sum."""
    weights = weights.to(theta.dtype)  # counts would be divided in float32
    return weights / weights.sum() @ theta


def mix(weights: Tensor, theta: Tensor, layout: Layout, near: Tensor | None = None) -> Tensor:
    """[K, d] mixtures of theta: [N, d] by weights: [K, N], or [L, K, N] with one relation a layer.

    With lists near: [K, M] of clients the weights are theirs, [K, M] or [L, K, M]; no table [K, N] is made. See
    `mix_freely` for weights that are not those of a mean.
    """
    weights = weights.to(theta.dtype)
    pieces = [(slice(None), weights)] if weights.ndim == 2 else zip((x.at for x in layout.layers), weights, strict=True)
    if near is not None:
        mixed = blank(len(near), theta)
        for at, part in pieces:
            into = mixed[:, at]
            for rows, columns, listed in _panels(theta[:, at], near):
                into[rows, columns] = (part[rows, None] @ listed)[:, 0]
        return mixed
    if weights.requires_grad or theta.requires_grad:
        return torch.cat([part @ theta[:, at] for at, part in pieces], 1)
    mixed = blank(weights.shape[-2], theta)
    with _fast(theta, *mixed.shape[:1], *theta.shape):
        for at, part in pieces:
            torch.mm(part, theta[:, at], out=mixed[:, at])  # straight to its place
    return mixed


def mix_freely(weights: Tensor, theta: Tensor, layout: Layout, near: Tensor | None = None) -> Tensor:
    """[K, d] the same for weights: [K, N], or [K, M] of lists, that may be negative and need not sum to one.

    Running statistics are mixed by the nearest weights of a mean, for a variance must not become negative.
    """
    mixed, learned = mix(weights, theta, layout, near), layout.trainable_on(theta.device)
    if not learned.all():
        mixed[:, ~learned] = mix(project_simplex(weights), theta[:, ~learned], layout, near)
    return mixed


def inner(a: Tensor, b: Tensor) -> Tensor:
    """[K, N] inner products of the rows of a: [K, m] and b: [N, m]; half the work if these are the same tensor."""
    with _fast_inner(a, b):
        return _inner(a, b)


def inner_by_layer(a: Tensor, b: Tensor, layout: Layout) -> Tensor:
    """[L, K, N] inner products of a: [K, d] and b: [N, d], layer by layer, over trainable entries."""
    with _fast_inner(a, b):
        parts = [(a[:, layer.trainable], b[:, layer.trainable]) for layer in layout.layers]
        return torch.stack([_inner(x, x if a is b else y) for x, y in parts])


def inner_listed(a: Tensor, b: Tensor, near: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """[L, K, M] inner products of a: [K, d] with the rows of b: [N, d] that near: [K, M] lists, layer by layer.

    And, [L, K, M], of each such row with itself. Over trainable entries.
    """
    found = a.new_zeros(2, len(layout.layers), *near.shape)
    for layer, inner, square in zip(layout.layers, *found, strict=True):
        mine = a[:, layer.trainable]
        for rows, columns, listed in _panels(b[:, layer.trainable], near):
            inner[rows] += (listed @ mine[rows, columns, None])[..., 0]
            square[rows] += listed.square_().sum(-1)
    return found[0], found[1]


def distances_listed(a: Tensor, b: Tensor, near: Tensor, layout: Layout) -> Tensor:
    """[K, M] squared distances of a: [K, d] from the rows of b: [N, d] that near: [K, M] lists, trainable entries."""
    found = a.new_zeros(near.shape)
    for layer in layout.layers:
        mine = a[:, layer.trainable]
        for rows, columns, listed in _panels(b[:, layer.trainable], near):
            found[rows] += listed.sub_(mine[rows, None, columns]).square_().sum(-1)
    return found


def spread_lists(weights: Tensor, near: Tensor, count: int) -> Tensor:
    """[..., K, N] the relation whose rows hold weights: [..., K, M] at near: [K, M] and are 0 elsewhere."""
    none = weights.new_zeros(*weights.shape[:-1], count)
    return none.scatter(-1, near.expand_as(weights), weights)


def cosine(inner: Tensor, rows: Tensor | None = None, columns: Tensor | None = None, eps: float = 1e-12) -> Tensor:
    """[..., K, N] cosines from inner products of vectors whose lengths are rows: [..., K] and columns: [..., N].

    Without lengths the vectors are the same on both sides and the lengths lie on the diagonal. 0 beside a zero vector.
    """
    if rows is None or columns is None:
        rows = columns = inner.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    scale = rows[..., :, None] * columns[..., None, :]
    return torch.where(scale > eps, inner / scale.clamp(min=eps), torch.zeros_like(inner)).clamp(-1, 1)


class Gram(NamedTuple):
    """Float64 inner products of N vectors; those of nearby vectors far from the origin keep their digits."""

    centred: Tensor  # [N, N] of the vectors less their mean
    lean: Tensor  # [N] of those with the mean
    square: Tensor  # [] of the mean with itself

    @property
    def inner(self) -> Tensor:
        """[N, N] of the vectors themselves."""
        return self.centred + self.lean[:, None] + self.lean + self.square

    @property
    def distances(self) -> Tensor:
        """[N, N] squared Euclidean distances; exactly symmetric, and 0 on the diagonal."""
        square = self.centred.diagonal()
        above = (square[:, None] + square - 2 * self.centred).clamp(min=0).triu(1)
        return above + above.T


def gram(parts: Tensor | Iterable[Tensor], dtype: torch.dtype | None = None) -> Gram:
    """The float64 Gram matrix of N vectors, given whole, [N, m], or part by part, [N, m] each.

    `dtype` is that of the products whose sum it is (default: the vectors' own).
    """
    total: tuple[Tensor, ...] = ()
    for part in [parts] if isinstance(parts, Tensor) else parts:
        count, dtype = len(part), dtype or part.dtype
        width = min(part.shape[1], max(PANEL // count, 4096))
        even, memory = part.new_full((count,), 1 / count, dtype=dtype), part.new_empty(count * width, dtype=dtype)
        with _fast(memory, count, part.shape[1], count, asked=(count, width, count)):
            for piece in part.split(width, dim=1):
                panel = memory[: piece.numel()].view(piece.shape).copy_(piece)
                mean = even @ panel
                panel -= mean
                more = tuple(sums.double() for sums in (_inner(panel, panel), panel @ mean, mean @ mean))
                total = tuple(map(torch.add, total, more)) if total else more
    if not total:
        raise ValueError("there is no part to tell how many vectors there are")
    return Gram(*total)


def project_simplex(rows: Tensor) -> Tensor:
    """Euclidean projection of each row of [..., N] onto the probability simplex (Held et al., 1974)."""
    rows = rows - rows.amax(-1, keepdim=True)  # the projection is the same, and beside large numbers 1 is not lost
    ordered = rows.sort(dim=-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    rank = torch.arange(1, rows.shape[-1] + 1, device=rows.device, dtype=rows.dtype)
    active = (ordered - excess / rank > 0).sum(-1, keepdim=True)
    return (rows - excess.gather(-1, active - 1) / active).clamp(min=0)


def largest(rows: Tensor, count: int) -> Tensor:
    """[K, N] bool: the `count` largest of each row: [N]; of equals the first."""
    count = min(count, rows.shape[1])
    least = rows.topk(count, dim=1).values[:, -1:]
    more, equal = rows > least, rows == least
    return more | (equal & (equal.cumsum(1) <= count - more.sum(1, keepdim=True)))


def prune(rows: Tensor, count: int, like: Tensor | None = None) -> Tensor:
    """Rows: [N, N] with each client's own entry, its `count` largest others and zeros; all of them if count is 0.

    Largest by like: [N, N] if that is given.
    """
    if not count:
        return rows
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    kept = largest((rows if like is None else like).masked_fill(itself, torch.inf), count + 1)
    return torch.where(kept, rows, 0.0)


def _panels(table: Tensor, near: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows of table: [N, m] by lists near: [K, M], as much at a time as stays in the cache.

    Yields which of the K lists, which of the m columns, and [k, M, w]; these numbers may be overwritten.
    """
    count, size = near.shape[1], table.shape[1]
    if not count:  # a client alone has nobody to list
        return
    width = min(size, max(2 * PANEL // count, 256))
    lists = max(1, 2 * PANEL // (count * width))
    for left in range(0, size, width):
        part = table[:, left : left + width]
        memory = table.new_empty(lists * count, part.shape[1])
        for top in range(0, len(near), lists):
            some = near[top : top + lists].reshape(-1)
            listed = torch.index_select(part, 0, some, out=memory[: len(some)])
            yield slice(top, top + lists), slice(left, left + width), listed.view(-1, count, part.shape[1])


def _inner(a: Tensor, b: Tensor) -> Tensor:
    if a is not b or len(a) <= BLOCK:
        return a @ b.T
    found = a.new_empty(len(a), len(a))
    for at in range(0, len(a), BLOCK):
        part = a[at : at + BLOCK] @ a[at:].T
        found[at:, at : at + BLOCK] = part.T
        found[at : at + BLOCK, at:] = part
    return found


def _is_everyone(cohort: Tensor, count: int) -> bool:
    """Whether the cohort is 0, ..., count - 1."""
    return len(cohort) == count and torch.equal(cohort, torch.arange(count, device=cohort.device))


def _fast_inner(a: Tensor, b: Tensor) -> AbstractContextManager[None]:
    """Where inner products should be computed: few rows that lie far apart take oneDNN up to twice as long as MKL.

    The rule counts multiplications, and does not see that.
    """
    if min(len(a), len(b)) <= BLOCK:
        return nullcontext()
    return _fast(a, len(a), a.shape[1], len(b))


def _fast(
    like: Tensor, m: int, k: int, n: int, asked: tuple[int, int, int] | None = None
) -> AbstractContextManager[None]:
    """Where a product [M, K] @ [K, N] should be computed; asked: the one that stands for it, if there are many."""
    if like.dtype != torch.float32 or like.device.type != "cpu" or m * k * n < LARGE:
        return nullcontext()
    return fast_gemm(product=asked or (m, k, n))
