"""IID: everyone gets a random part of the same size."""

from dataclasses import dataclass

import torch

from ..dataset import Dataset, Parts
from .deal import check_clients, hand_over


@dataclass(frozen=True)
class IID:
    """A random permutation cut into N parts; their sizes differ by one at most."""

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        check_clients("iid", dataset, clients)
        order = torch.randperm(len(dataset.x), generator=draw)
        return hand_over("iid", dataset, order.tensor_split(clients))
