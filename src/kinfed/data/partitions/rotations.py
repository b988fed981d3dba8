"""Rotations: hidden groups of clients see images turned by different angles (Ghosh et al., 2020)."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from ...core.field_checks import Settings
from ...errors import UsageError
from ..dataset import Dataset, Parts
from .deal import check_clients, hidden_groups
from .iid import IID


@dataclass(frozen=True)
class Rotations(Settings):
    """IID, but each hidden group of clients sees its images rotated by a different angle.

    Client i is in group g = floor(i groups / N). The group's images are rotated by g 360 / groups degrees,
    counter-clockwise. Only quarter turns keep every pixel, so there are 1, 2 or 4 groups.
    """

    groups: Literal[1, 2, 4] = 4  # hidden groups of clients: only quarter turns keep every pixel

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        """Deal `dataset` to `clients`, its images [n, channels, height, width] turned; every example is used once."""
        check_clients("rotations", dataset, clients)
        shape = list(dataset.x.shape)
        if len(shape) != 4:
            raise UsageError(
                f"rotations: only images [n, channels, height, width] can be turned; this data set's x is {shape}"
            )
        if self.groups == 4 and shape[2] != shape[3]:
            raise UsageError(
                f"rotations: a quarter turn needs square images; these are {shape[2]} by {shape[3]}; use groups = 2"
            )
        groups = hidden_groups("rotations", self.groups, clients)
        parts = IID()(dataset, clients, draw)
        x = dataset.x.clone()
        for rows, group in zip(parts.owned, groups.tolist(), strict=True):
            x[rows] = dataset.x[rows].rot90(group * 4 // self.groups, (2, 3))
        return parts._replace(dataset=replace(parts.dataset, x=x), groups=groups)
