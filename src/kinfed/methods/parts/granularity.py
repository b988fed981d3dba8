"""Granularity: which parts of a model share one relation, from each tensor by itself to the whole model."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.layout import Layer, Layout
from ...core.tables import take
from ...ops.similarity import cosine, inner_by_layer, inner_listed


@dataclass(frozen=True)
class Groups:
    """A model cut into P pieces, which are groups of their own, G = P, or all one group, G = 1."""

    layout: Layout  # its layers are the pieces
    names: tuple[str, ...]  # [G]

    @staticmethod
    def of(layout: Layout, granularity: str) -> "Groups":
        """Groups by `module`, by `tensor`, or the `model` as one."""
        if granularity == "tensor":
            layout = replace(layout, layers=_tensors(layout))
        return Groups(layout, ("",) if granularity == "model" else tuple(layer.name for layer in layout.layers))

    def __len__(self) -> int:
        return len(self.names)

    def sum(self, table: Tensor) -> Tensor:
        """[G, ...] sums over the pieces of each group of table: [P, ...]."""
        if len(self) == len(table):
            return table
        first = torch.zeros(len(table), dtype=torch.int64, device=table.device)
        return table.new_zeros(1, *table.shape[1:]).index_add(0, first, table)

    def inner(self, rows: Tensor, table: Tensor, near: Tensor | None) -> Tensor:
        """[G, K, M] inner products of rows: [K, d] with those of table: [N, d] that near: [K, M] lists; None: all."""
        if near is None:
            return self.sum(inner_by_layer(rows, table, self.layout))
        return self.sum(inner_listed(rows, table, near, self.layout)[0])

    def cosines(self, table: Tensor, cohort: Tensor, near: Tensor | None) -> Tensor:
        """[G, K, M] cosines of the cohort's rows of table: [N, d] with those listed; a list begins with its owner."""
        rows = take(table, cohort)
        if near is not None:
            inner, square = map(self.sum, inner_listed(rows, table, near, self.layout))
            length = square.sqrt()
            return cosine(inner[..., None, :], length[..., :1], length)[..., 0, :]
        inner = self.inner(rows, table, None)
        if rows is table:
            return cosine(inner)
        pieces = [table[:, piece.trainable].norm(dim=1).square() for piece in self.layout.layers]
        length = self.sum(torch.stack(pieces)).sqrt()
        return cosine(inner, length[:, cohort], length)

    def by_layer(self, relation: Tensor, layers: tuple[Layer, ...]) -> Tensor:
        """[L, ...] a relation of each layer from one of each piece: [P, ...]: the mean over its learned entries."""
        if len(layers) == len(relation):
            return relation
        pieces = self.layout.layers
        share = relation.new_zeros(len(layers), len(pieces))
        for i, layer in enumerate(layers):
            for j, piece in enumerate(pieces):
                if layer.at.start <= piece.trainable.start < layer.at.stop:
                    share[i, j] = piece.trainable.stop - piece.trainable.start
        return torch.einsum("lp,p...->l...", share / share.sum(1, keepdim=True), relation)


def _tensors(layout: Layout) -> tuple[Layer, ...]:
    """A layer for each tensor that is learned; other tensors travel with the one before."""
    learned = [entry for entry in layout.entries if entry.trainable]
    cuts = [0, *(entry.at.start for entry in learned[1:]), layout.size]
    return tuple(Layer(e.name, slice(*cuts[i : i + 2]), e.at) for i, e in enumerate(learned))
