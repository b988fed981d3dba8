"""Pathological: every client knows a few classes only, the same ones as some of its peers (Ye et al., 2023)."""

from dataclasses import dataclass

import torch

from ...errors import UsageError
from ..dataset import Dataset, Parts
from .deal import check_clients, hand_over, rows_by_class


@dataclass(frozen=True)
class Pathological:
    """Client i holds the k classes k i, ..., k i + k - 1 (modulo C); each class is shared equally by its holders.

    If k divides C, clients i and i + C / k hold the same classes, as in pFedGraph's experiments.
    """

    classes_per_client: int = 2  # k

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        check_clients("pathological", dataset, clients)
        by_class = rows_by_class("pathological", dataset, draw)
        count, k = len(by_class), self.classes_per_client
        if not 1 <= k <= count:
            raise UsageError(f"pathological: classes_per_client must lie in 1..{count} for {count} classes; got {k}")
        if clients * k < count:
            raise UsageError(
                f"pathological: {clients} clients with {k} classes each leave {count - clients * k} of {count} classes "
                f"to nobody; use at least {-(-count // k)} clients or {-(-count // clients)} classes per client"
            )
        owned: list[list[torch.Tensor]] = [[] for _ in range(clients)]
        for label, rows in enumerate(by_class):
            holders = [i for i in range(clients) if (label - k * i) % count < k]
            for i, part in zip(holders, rows.tensor_split(len(holders)), strict=True):
                owned[i].append(part)
        return hand_over("pathological", dataset, [torch.cat(mine) for mine in owned])
