"""Granularity: which parts of a model share one relation, from every tensor by itself to the model as one."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.layout import Layer, Layout

GRANULARITIES = ("module", "tensor", "block", "model")


@dataclass(frozen=True)
class Groups:
    """A model cut into P pieces, each of which belongs to one of G groups."""

    layout: Layout  # its layers are the pieces
    member: Tensor  # [P] the group of each piece
    names: tuple[str, ...]  # [G]

    @staticmethod
    def of(layout: Layout, granularity: str) -> "Groups":
        """Groups by `module`, by `tensor`, by `block` (a direct child of the model), or the `model` as one."""
        if granularity == "tensor":
            layout = replace(layout, layers=_tensors(layout))
        names = [layer.name for layer in layout.layers]
        if granularity == "block":
            names = [name.partition(".")[0] for name in names]
        if granularity == "model":
            names = [""] * len(names)
        place = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return Groups(layout, torch.tensor([place[name] for name in names]), tuple(place))

    def __len__(self) -> int:
        return len(self.names)

    def sum(self, table: Tensor) -> Tensor:
        """[G, ...] sums over the pieces of each group of table: [P, ...]."""
        if len(self) == len(table):
            return table
        total = table.new_zeros(len(self), *table.shape[1:])
        return total.index_add(0, self.member.to(table.device), table)

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
    """A layer for each tensor that is learned; what is not travels with the tensor before it."""
    learned = [entry for entry in layout.entries if entry.trainable]
    cuts = [0, *(entry.at.start for entry in learned[1:]), layout.size]
    return tuple(Layer(e.name, slice(*cuts[i : i + 2]), e.at) for i, e in enumerate(learned))
