"""Label groups: most of a class belongs to one hidden group of clients, the rest to everyone (Song et al., 2025)."""

from dataclasses import dataclass

import torch

from ...core.field_checks import Count, Settings, Share
from ...errors import UsageError
from ..dataset import Dataset, Parts
from .deal import check_clients, hand_over, hidden_groups, rows_by_class


@dataclass(frozen=True)
class LabelGroups(Settings):
    """Each hidden group of clients shares most of its own classes; the rest of every class goes to everyone.

    Client i is in group floor(i groups / N). The classes are dealt to the groups at random, and `share` of a class is
    split equally within its group. The other examples are dealt to all clients as in IID. This is the case study of
    FedAGHN: 20 clients, 5 groups, 80 %.
    """

    groups: Count = 5  # hidden groups of clients
    share: Share = 0.8  # of a class that stays within its group

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        check_clients("label_groups", dataset, clients)
        by_class = rows_by_class("label_groups", dataset, draw)
        if self.groups > len(by_class):
            raise UsageError(f"label_groups: {self.groups} groups need at least as many classes; got {len(by_class)}")
        groups = hidden_groups("label_groups", self.groups, clients)
        owned: list[list[torch.Tensor]] = [[] for _ in range(clients)]
        rest = []
        for group, labels in enumerate(torch.randperm(len(by_class), generator=draw).tensor_split(self.groups)):
            members = (groups == group).nonzero().squeeze(1).tolist()
            for label in labels.tolist():
                rows = by_class[label]
                count = round(self.share * len(rows))
                rest.append(rows[count:])
                for i, part in zip(members, rows[:count].tensor_split(len(members)), strict=True):
                    owned[i].append(part)
        common = torch.cat(rest)
        common = common[torch.randperm(len(common), generator=draw)]
        for client_rows, part in zip(owned, common.tensor_split(clients), strict=True):
            client_rows.append(part)
        return hand_over("label_groups", dataset, [torch.cat(client_rows) for client_rows in owned], groups)
