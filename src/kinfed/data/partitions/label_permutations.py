"""Label permutations: hidden groups of clients name the same classes differently (Sattler et al., 2020)."""

from dataclasses import dataclass, replace

import torch

from ...core.tasks import Classification
from ...errors import UsageError
from ..dataset import Dataset, Parts
from .deal import check_clients, hidden_groups
from .iid import IID


@dataclass(frozen=True)
class LabelPermutations:
    """IID, but each hidden group of clients renames the classes in its own way.

    Client i is in group g = floor(i groups / N). The classes are put on a circle in random order, and group g moves
    each label by g places. So group 0 keeps the labels, and any two groups disagree about every one of them: there
    are at most C groups.
    """

    groups: int = 4  # hidden groups, at most as many as classes

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        """Deal `dataset` to `clients`, with its labels renamed; every example is used once."""
        check_clients("label_permutations", dataset, clients)
        if not isinstance(dataset.task, Classification):
            raise UsageError(
                "label_permutations: this data set has targets that are not classes, so none can be renamed"
            )
        dataset.task.check(dataset.y)
        classes = dataset.task.classes
        if self.groups > classes:
            raise UsageError(
                f"label_permutations: {classes} classes can be renamed for at most {classes} groups; got {self.groups}"
            )
        groups = hidden_groups("label_permutations", self.groups, clients)
        parts = IID()(dataset, clients, draw)
        circle = torch.randperm(classes, generator=draw)  # [C] the label at each place
        place = circle.argsort()  # [C] the place of each label
        y = dataset.y.clone()
        for rows, group in zip(parts.owned, groups.tolist(), strict=True):
            y[rows] = circle[(place[dataset.y[rows]] + group) % classes]
        # A renamed class no longer has a single name.
        return parts._replace(dataset=replace(parts.dataset, y=y, classes=()), groups=groups)
