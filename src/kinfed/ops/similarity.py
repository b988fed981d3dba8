"""How alike models are: inner products, distances and cosines of the rows of a table [N, d]."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import Layout
from .gemm import fast_gemm

BLOCK = 64  # rows of a symmetric product that are computed together: saves half the work, except half a block
PANEL = 1 << 19  # numbers of a table that are centred together, so that the copy stays in the cache
LARGE = 1 << 26  # multiplications in a product that takes a millisecond: worth checking which library is faster


def inner(a: Tensor, b: Tensor) -> Tensor:
    """[K, N] inner products of the rows of a: [K, m] and b: [N, m]; half the work if these are the same tensor."""
    with _fast_inner(a, b):
        return _inner(a, b)


def inner_by_layer(a: Tensor, b: Tensor, layout: Layout) -> Tensor:
    """[L, K, N] inner products of a: [K, d] and b: [N, d], layer by layer, over trainable entries."""
    with _fast_inner(a, b):
        parts = [(a[:, layer.trainable], b[:, layer.trainable]) for layer in layout.layers]
        return torch.stack([_inner(x, x if a is b else y) for x, y in parts])


def inner_listed(
    a: Tensor, b: Tensor, near: Tensor, layout: Layout, origin: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[L, K, M] inner products of a: [K, d] with the rows of b: [N, d] that near: [K, M] lists, layer by layer.

    The second result, [L, K, M], is of each such row with itself. Both are over trainable entries. With an origin: [d]
    it is taken from the rows of b, of which no other table is made.
    """
    listed, place = near.unique(return_inverse=True)
    sorted_place, order = place.sort(1)
    begins = torch.arange(near.shape[0] + 1, device=near.device) * near.shape[1]
    inner, square = a.new_zeros(2, len(layout.layers), *near.shape)
    if not len(near):
        return inner, square
    for layer, products, squares in zip(layout.layers, inner, square, strict=True):
        tensors, sums, lengths = a[:, layer.trainable], a.new_zeros(near.numel()), a.new_zeros(len(listed))
        begin = None if origin is None else origin[layer.trainable]
        for columns, rows in columns_of(b[:, layer.trainable], listed):
            rows = rows if begin is None else rows - begin[columns]
            mine = rows if a is b and begin is None and len(listed) == len(b) else tensors[:, columns].contiguous()
            sums = _sample_products(begins, sorted_place, sums, mine, rows)
            lengths += torch.linalg.vecdot(rows, rows)
        products.scatter_(1, order, sums.view(near.shape))
        squares.copy_(lengths[place])
    return inner, square


def _sample_products(begins: Tensor, place: Tensor, before: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """[K * M] `before` and the inner products of a: [K, w] with the rows of b: [m, w] at place: [K, M], sorted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls its sparse tensors a beta
        at = torch.sparse_csr_tensor(begins, place.flatten(), before, (len(a), len(b)), check_invariants=False)
        products: Tensor = torch.sparse.sampled_addmm(at, a, b.T).values()
    return products


def columns_of(table: Tensor, listed: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows listed: [m] of table: [N, w], as many columns at a time as fit in the cache: their slice, and [m, v]."""
    width = max(PANEL // 2 // max(1, len(listed)), 64)
    for left in range(0, table.shape[1], width):
        columns = slice(left, left + width)
        yield columns, table[:, columns].index_select(0, listed)


def cosine(inner: Tensor, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
    """[..., K, N] cosines from inner products of vectors whose lengths are rows: [..., K] and columns: [..., N].

    Without lengths the vectors are the same on both sides and their lengths come from the diagonal. The cosine with a
    zero vector is 0.
    """
    if rows is None or columns is None:
        rows = columns = inner.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    scale = rows[..., :, None] * columns[..., None, :]
    return torch.where(scale > 0, inner / scale, torch.zeros_like(inner)).clamp(-1, 1)


class Gram(NamedTuple):
    """Float64 inner products of N vectors, without loss of digits for nearby vectors far from the origin."""

    centred: Tensor  # [N, N] of the vectors minus their mean
    lean: Tensor  # [N] of the centred vectors with the mean
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

    `dtype` is that of the products that are summed (default: the vectors' own).
    """
    total: tuple[Tensor, ...] = ()
    for part in [parts] if isinstance(parts, Tensor) else parts:
        count, dtype = len(part), dtype or part.dtype
        width = min(part.shape[1], max(PANEL // count, 4096))
        even = part.new_full((count,), 1 / count, dtype=dtype)
        memory = part.new_empty(count * width, dtype=dtype)
        with fast_product(memory, count, part.shape[1], count, representative=(count, width, count)):
            for piece in part.split(width, dim=1):
                panel = memory[: piece.numel()].view(piece.shape).copy_(piece)
                mean = even @ panel
                panel -= mean
                more = tuple(sums.double() for sums in (_inner(panel, panel), panel @ mean, mean @ mean))
                total = tuple(map(torch.add, total, more)) if total else more
    if not total:
        raise ValueError("gram needs at least one part")
    return Gram(*total)


def in_medians(square: Tensor, pairs: Tensor) -> Tensor:
    """[N, N] squared distances as multiples of their median over pairs: [N, N] bool."""
    distances = square[pairs]
    median = (distances.median() - (-distances).median()) / 2  # torch's median is the lower of the two in the middle
    return square / torch.where(median > 0, median, 1.0)  # 0: more than half are equal; NaN: there is no pair


def _inner(a: Tensor, b: Tensor) -> Tensor:
    if a is not b or len(a) <= BLOCK:
        return a @ b.T
    result = a.new_empty(len(a), len(a))
    block = max(BLOCK, len(a) // 8)  # few rows of many are a slow product
    for at in range(0, len(a), block):
        part = a[at : at + block] @ a[at:].T
        result[at:, at : at + block] = part.T
        result[at : at + block, at:] = part
    return result


def _fast_inner(a: Tensor, b: Tensor) -> AbstractContextManager[None]:
    """The library for inner products: with few rows, far apart in memory, oneDNN takes up to twice as long as MKL.

    The rule in `fast_gemm` counts multiplications, and does not see that.
    """
    if min(len(a), len(b)) <= BLOCK:
        return nullcontext()
    return fast_product(a, len(a), a.shape[1], len(b))


def fast_product(
    like: Tensor, m: int, k: int, n: int, representative: tuple[int, int, int] | None = None
) -> AbstractContextManager[None]:
    """The library for a product [M, K] @ [K, N]; of many products, `representative` has the typical shape."""
    if like.dtype != torch.float32 or like.device.type != "cpu" or m * k * n < LARGE:
        return nullcontext()
    return fast_gemm(product=representative or (m, k, n))
