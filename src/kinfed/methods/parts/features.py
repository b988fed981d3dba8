"""Features: what a network sees of a client. The server has the tables `uploads` and `change`, both [N, d]."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...core.layout import Layout
from ...core.method import Roster
from ...core.seeding import key
from ...core.settings import Count, Settings
from ...core.tables import take
from ...core.trees import Tree
from ...errors import UsageError
from ...ops.sketch import count_sketch


@dataclass(frozen=True)
class Full(Settings):
    """The client's whole model, as it was last uploaded."""

    table: ClassVar[str] = "uploads"

    def names(self, layout: Layout) -> frozenset[str]:
        """The tensors that describe a client."""
        return layout.learned

    def count(self, roster: Roster) -> int:
        """How many numbers describe a client."""
        return len(roster.layout.index(self.names(roster.layout)))

    def of(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        """[K, m] the features of the cohort: [K]."""
        rows = take(getattr(server, self.table), cohort)
        at = roster.layout.index(self.names(roster.layout), rows.device)
        return rows if len(at) == rows.shape[1] else rows[:, at]


@dataclass(frozen=True)
class Update(Full):
    """The client's last update: what local training changed."""

    table: ClassVar[str] = "change"


@dataclass(frozen=True)
class Head(Full):
    """The last linear layer of the client's model."""

    def names(self, layout: Layout) -> frozenset[str]:
        if not layout.head:
            raise UsageError("features='head' needs a model with a linear layer as head; use features='full'")
        return layout.head


@dataclass(frozen=True)
class Sketch(Full):
    """A count sketch of the client's model, the same in every round, for models too large for the network."""

    size: Count = 4096  # how many numbers the sketch has

    def count(self, roster: Roster) -> int:
        return self.size

    def of(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        rows = super().of(roster, server, cohort)
        return count_sketch(rows, key(roster.seed, "pfedgat.features", device=rows.device), self.size)
