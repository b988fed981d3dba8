"""How alike models are: inner products, distances and cosines of the rows of a table [N, d]."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import Layout
from .gemm import fast_gemm

BLOCK = 64  # rows of a symmetric product that are worked out together: half the work is left out, bar half a block
PANEL = 1 << 19  # numbers of a table that are centred together, so that the copy stays in the cache
LARGE = 1 << 26  # multiplications in a product that takes a millisecond: worth asking which library is faster


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
        for rows, columns, listed in panels(b[:, layer.trainable], near):
            inner[rows] += (listed @ mine[rows, columns, None])[..., 0]
            square[rows] += listed.square_().sum(-1)
    return found[0], found[1]


def distances_listed(a: Tensor, b: Tensor, near: Tensor, layout: Layout) -> Tensor:
    """[K, M] squared distances of a: [K, d] from the rows of b: [N, d] that near: [K, M] lists, trainable entries."""
    found = a.new_zeros(near.shape)
    for layer in layout.layers:
        mine = a[:, layer.trainable]
        for rows, columns, listed in panels(b[:, layer.trainable], near):
            found[rows] += listed.sub_(mine[rows, None, columns]).square_().sum(-1)
    return found


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
        with fast_product(memory, count, part.shape[1], count, asked=(count, width, count)):
            for piece in part.split(width, dim=1):
                panel = memory[: piece.numel()].view(piece.shape).copy_(piece)
                mean = even @ panel
                panel -= mean
                more = tuple(sums.double() for sums in (_inner(panel, panel), panel @ mean, mean @ mean))
                total = tuple(map(torch.add, total, more)) if total else more
    if not total:
        raise ValueError("there is no part to tell how many vectors there are")
    return Gram(*total)


def in_medians(square: Tensor, pairs: Tensor) -> Tensor:
    """[N, N] squared distances as multiples of their median over pairs: [N, N] bool."""
    apart = square[pairs]
    median = (apart.median() - (-apart).median()) / 2  # torch's is the lower of two in the middle
    return square / torch.where(median > 0, median, 1.0)  # 0: more than half are equal; NaN: there is no pair


def panels(table: Tensor, near: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
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


def _fast_inner(a: Tensor, b: Tensor) -> AbstractContextManager[None]:
    """Where inner products should be computed: few rows that lie far apart take oneDNN up to twice as long as MKL.

    The rule counts multiplications, and does not see that.
    """
    if min(len(a), len(b)) <= BLOCK:
        return nullcontext()
    return fast_product(a, len(a), a.shape[1], len(b))


def fast_product(
    like: Tensor, m: int, k: int, n: int, asked: tuple[int, int, int] | None = None
) -> AbstractContextManager[None]:
    """Where a product [M, K] @ [K, N] should be computed; asked: the one that stands for it, if there are many."""
    if like.dtype != torch.float32 or like.device.type != "cpu" or m * k * n < LARGE:
        return nullcontext()
    return fast_gemm(product=asked or (m, k, n))
