"""Among whom a client's mixture is made."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.field_checks import Count, Settings
from ..core.method import Roster
from ..core.seeding import key
from ..errors import UsageError
from ..ops.sketch import nearest, sketch_models


class Others(NamedTuple):
    """Whom each of K receivers may learn from: lists of M of the N clients, or a link to each."""

    near: Tensor | None = None  # [K, M] int64, the receiver first; None: all N clients, in their order
    linked: Tensor | None = None  # [K, N] bool; None: all of them


@dataclass(frozen=True)
class Everyone(Settings):
    """All clients that have taken part."""

    def find(self, roster: Roster, vectors: Tensor, cohort: Tensor) -> Others:
        """Whom the cohort: [K] may learn from, of those whose vectors: [N, d] are compared."""
        return Others()


@dataclass(frozen=True)
class Nearest(Settings):
    """The nearest few, by the distance of their vectors, without a table [N, N]: sketches propose, distances rank."""

    count: Count = 20  # how many others

    def find(self, roster: Roster, vectors: Tensor, cohort: Tensor) -> Others:
        if self.count >= len(roster) - 1:
            return Others()
        draw = key(roster.seed, "relations.sketch", device=vectors.device)
        sketch = sketch_models(vectors, draw, roster.layout.trainable_on(vectors.device))
        return Others(nearest(vectors, sketch, cohort, self.count, roster.layout)[0])


@dataclass(frozen=True)
class Linked(Settings):
    """The neighbours in the clients' known graph; raises UsageError where there is none."""

    def find(self, roster: Roster, vectors: Tensor, cohort: Tensor) -> Others:
        if roster.graph is None:
            raise UsageError(
                "among=linked needs a known graph of the clients, and there is none; set federation.graph, or "
                "among=everyone"
            )
        weights = roster.graph.weights
        links = (weights if weights.ndim == 2 else weights.sum(0)).to(vectors.device) != 0
        itself = torch.eye(len(roster), dtype=torch.bool, device=vectors.device)
        return Others(linked=(links | itself)[cohort])
