"""Topologies: nodes that know a few classes each, linked where they share one (the case study of FedCedar, 2024)."""

from dataclasses import dataclass
from typing import Literal

import torch

from ...core.field_checks import Settings
from ...errors import UsageError
from ..dataset import Dataset, Parts
from .deal import check_clients, hand_over, hidden_groups, rows_by_class

NODES: dict[int, tuple[tuple[int, ...], ...]] = {
    3: ((0, 1, 2), (2, 3, 4), (4, 5, 6)),  # a path
    4: ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 0)),  # a ring
    5: ((0, 2, 4, 6, 8), (0, 1), (2, 3), (4, 5), (6, 7)),  # a star around the first
}


@dataclass(frozen=True)
class Topologies(Settings):
    """Client i is at node floor(i nodes / N); a class is shared equally by all clients of the nodes that know it.

    The nodes are the hidden groups: a path of 3 ({0, 1, 2}, {2, 3, 4}, {4, 5, 6}), a ring of 4 (the path and
    {6, 7, 0}) or a star of 5 ({0, 2, 4, 6, 8} around {0, 1}, {2, 3}, {4, 5} and {6, 7}), with 20 clients each in the
    paper, whose own classes are in a figure only. Examples of classes that no node knows are left out.
    """

    nodes: Literal[3, 4, 5] = 3  # a path of 3, a ring of 4 or a star of 5

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        """Deal `dataset` to `clients`; every example of a known class is used once."""
        check_clients("topologies", dataset, clients)
        by_class = rows_by_class("topologies", dataset, draw)
        joints = NODES[self.nodes]
        least = 1 + max(max(labels) for labels in joints)
        if len(by_class) < least:
            raise UsageError(f"topologies: {self.nodes} nodes need at least {least} classes; got {len(by_class)}")
        groups = hidden_groups("topologies", self.nodes, clients)
        owned: list[list[torch.Tensor]] = [[] for _ in range(clients)]
        for label, rows in enumerate(by_class[:least]):
            holders = [i for i, group in enumerate(groups.tolist()) if label in joints[group]]
            for i, part in zip(holders, rows.tensor_split(len(holders)), strict=True):
                owned[i].append(part)
        return hand_over("topologies", dataset, [torch.cat(mine) for mine in owned], groups)
