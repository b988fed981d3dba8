"""Shards: examples sorted by label, cut into shards, a few for each client (McMahan et al., 2017)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.field_checks import Count, Settings
from ...errors import UsageError
from ..dataset import Dataset, Parts
from .deal import check_clients, hand_over, rows_by_class


@dataclass(frozen=True)
class Shards(Settings):
    """N k shards, whose sizes differ by one at most, `per_client` = k random ones each; two may hold the same class.

    A shard has more than one class if a cut does not fall at the end of a class. `within_class` cuts each of the C
    classes into N k / C shards by itself, as in FedAGHN's protocol, so that no client has more than k classes. With
    `overlap`, as in SFL's released code, a shard only names a class, that of its first example: the client draws as
    many examples from the whole class, so clients share examples, and some examples belong to nobody. An example is
    then in the same split (training, validation or test) for all of its clients.
    """

    per_client: Count = 2  # k: shards of each client
    within_class: bool = False  # whether each class is cut by itself, so that a shard has one class
    overlap: bool = False  # whether a shard only names a class, from which as many examples are drawn

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        """Deal `dataset` to `clients`; every example is used once, unless they may overlap."""
        check_clients("shards", dataset, clients, self.per_client)
        by_class, count = rows_by_class("shards", dataset, draw), clients * self.per_client
        pieces = by_class if self.within_class else [torch.cat(by_class)]
        if count % len(pieces):
            raise UsageError(
                f"shards: {clients} clients with {self.per_client} shards each cannot divide {len(by_class)} classes "
                f"evenly; with within_class, clients * per_client must be a multiple of {len(by_class)}"
            )
        shards = [shard for rows in pieces for shard in rows.tensor_split(count // len(pieces))]
        order = torch.randperm(len(shards), generator=draw).view(clients, self.per_client)
        hands = [[shards[s] for s in hand] for hand in order.tolist()]
        if not self.overlap:
            return hand_over("shards", dataset, [torch.cat(hand) for hand in hands])
        owned = [_draw_named(hand, dataset.y, by_class, draw) for hand in hands]
        lots = torch.empty(len(dataset.y), dtype=torch.float64)
        for rows in by_class:
            lots[rows] = torch.arange(len(rows), dtype=torch.float64) / len(rows)
        return hand_over("shards", dataset, owned, lots=lots)


def _draw_named(shards: list[Tensor], y: Tensor, by_class: list[Tensor], draw: torch.Generator) -> Tensor:
    """Rows of the classes that shards name by their first rows, as many as the shards have."""
    sizes = torch.zeros(len(by_class), dtype=torch.int64)
    for shard in filter(len, shards):
        sizes[y[shard[0]]] += len(shard)
    return torch.cat([_spread_out(rows, size, draw) for rows, size in zip(by_class, sizes.tolist(), strict=True)])


def _spread_out(rows: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """`count` different rows of rows: [n], at most all: a random one from each of `count` equal stretches.

    So every share of the rows' order contains its share of them, plus or minus one.
    """
    count = min(count, len(rows))
    edges = torch.arange(count + 1) * len(rows) // max(1, count)
    lots = torch.rand(count, generator=draw, dtype=torch.float64)
    return rows[edges[:-1] + (lots * edges.diff()).long()]
