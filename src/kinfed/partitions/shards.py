"""Shards: examples sorted by label, cut into shards, a few for each client (McMahan et al., 2017)."""

from dataclasses import dataclass

import torch

from ..errors import UsageError
from ..federation import Dataset, Parts
from .deal import check_clients, hand_over, rows_by_class


@dataclass(frozen=True)
class Shards:
    """N k shards, whose sizes differ by one at most, `per_client` = k random ones each; two may hold the same class.

    A shard has more than one class where a cut and the end of a class do not meet. `within_class` cuts each of the C
    classes into N k / C shards by itself, as FedAGHN's protocol has it, so that nobody knows more than k classes.
    """

    per_client: int = 2
    within_class: bool = False

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise UsageError(f"shards: per_client must be at least 1; got {self.per_client}")

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        """Deal `dataset` to `clients`; every example is used once."""
        check_clients("shards", dataset, clients, self.per_client)
        by_class, count = rows_by_class("shards", dataset, draw), clients * self.per_client
        if not self.within_class:
            by_class = [torch.cat(by_class)]
        elif count % len(by_class):
            raise UsageError(
                f"shards: {clients} clients with {self.per_client} shards each cannot have {len(by_class)} classes cut "
                f"alike; with within_class, clients * per_client must be a multiple of {len(by_class)}"
            )
        shards = [shard for rows in by_class for shard in rows.tensor_split(count // len(by_class))]
        order = torch.randperm(len(shards), generator=draw).view(clients, self.per_client)
        return hand_over("shards", dataset, [torch.cat([shards[s] for s in mine]) for mine in order.tolist()])
