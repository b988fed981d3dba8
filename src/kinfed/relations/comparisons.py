"""What is compared: similarities of clients by a vector of each, larger where they are more alike."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..core.field_checks import Settings
from ..core.layout import Layout
from ..ops.similarity import gram, inner_by_layer, inner_listed
from .movements import compare, lengths_of


class Comparison(Protocol):
    """A part of `kinfed.Mixture`: how alike the vectors of two clients are."""

    def compare(self, rows: Tensor, others: Tensor, near: Tensor | None, layout: Layout) -> Tensor:
        """[L, K, N] similarities of rows: [K, d] with others: [N, d], for each of L layers, or with L = 1.

        With near: [K, M] int64 only those of each row with the M others that it lists: [L, K, M].
        """


@dataclass(frozen=True)
class Cosine(Settings):
    """Cosines over trainable entries; a vector of zeros resembles nobody."""

    by_layer: bool = False  # whether each layer is compared by itself

    def compare(self, rows: Tensor, others: Tensor, near: Tensor | None, layout: Layout) -> Tensor:
        return compare(layout, rows, others, near, self.by_layer).values


@dataclass(frozen=True)
class Distance(Settings):
    """Minus the squared Euclidean distance over trainable entries."""

    def compare(self, rows: Tensor, others: Tensor, near: Tensor | None, layout: Layout) -> Tensor:
        if near is None and rows is others:
            squares = gram(others[:, layer.trainable] for layer in layout.layers).distances.to(rows.dtype)
            return -squares[None]
        middle = others.mean(0)  # so that nearby models far from the origin lose no digits
        rows, others = rows - middle, others - middle
        lengths = lengths_of(layout, rows, by_layer=False).square()[0, :, None]
        if near is None:
            inner = inner_by_layer(rows, others, layout)
            square = lengths_of(layout, others, by_layer=False).square()
        else:
            inner, square = inner_listed(rows, others, near, layout)
        return -(lengths + square.sum(0) - 2 * inner.sum(0)).clamp(min=0)[None]
