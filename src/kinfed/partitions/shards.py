"""Shards: examples sorted by label, cut into shards, a few for each client (McMahan et al., 2017)."""

from dataclasses import dataclass

import torch

from ..errors import UsageError
from ..federation import Dataset, Parts
from .deal import check_clients, hand_over, rows_by_class


@dataclass(frozen=True)
class Shards:
    """N k shards, whose sizes differ by one at most, `per_client` = k random ones each; two may hold the same class."""

    per_client: int = 2

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise UsageError(f"shards: per_client must be at least 1; got {self.per_client}")

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        """Deal `dataset` to `clients`; every example is used once."""
        check_clients("shards", dataset, clients, self.per_client)
        shards = torch.cat(rows_by_class("shards", dataset, draw)).tensor_split(clients * self.per_client)
        order = torch.randperm(len(shards), generator=draw).view(clients, self.per_client)
        return hand_over("shards", dataset, [torch.cat([shards[s] for s in mine]) for mine in order.tolist()])
