"""What is compared: similarities of clients by a vector of each, larger where they are more alike."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..core.field_checks import Settings
from ..core.layout import Layout
from ..ops.similarity import distances_listed, gram, inner
from .movements import compare


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
        if near is not None:
            return -distances_listed(rows, others, near, layout)[None]
        if rows is others:
            squares = gram(others[:, layer.trainable] for layer in layout.layers).distances.to(rows.dtype)
            return -squares[None]
        squares = rows.new_zeros(len(rows), len(others))
        for layer in layout.layers:  # less a common vector, so that nearby models far from the origin lose no digits
            middle = others[:, layer.trainable].mean(0)
            a, b = rows[:, layer.trainable] - middle, others[:, layer.trainable] - middle
            squares += a.square().sum(1)[:, None] + b.square().sum(1) - 2 * inner(a, b)
        return -squares.clamp(min=0)[None]
