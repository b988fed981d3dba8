"""A graph of the clients that is known from the start."""

import warnings
from dataclasses import dataclass

from torch import Tensor

from ...core.graph import Origin
from ...core.method import Compared, Roster
from ...core.settings import Settings
from ...core.trees import Tree
from .graph_learning import Moved


@dataclass(frozen=True)
class Known(Settings):
    """The graph is known and stays; where none is known it is learned, as by `Moved()`. `server` is SFL's state."""

    def origin_of(self, roster: Roster) -> Origin:
        return roster.graph.origin if roster.graph is not None else "learned"

    def start(self, roster: Roster) -> Tensor:
        """[N, N] the first links, one of every client to itself among them."""
        return Moved().start(roster)

    def sketches(self, roster: Roster, theta: Tensor) -> Tensor:
        """[K, s] what is kept of models: [K, d] to compare them by."""
        return theta.new_zeros(len(theta), 0)

    def learn(self, roster: Roster, server: Tree, newcomer: Tensor, pull: float) -> Tensor:
        """[N, N] the links of the next round; newcomer: [N] bool took part for the first time."""
        if roster.graph is not None:
            return server.links  # type: ignore[no-any-return]
        if roster.round == 0:
            warnings.warn(
                "sfl: this data set has no graph of the clients, so one is learned, as by method.structure=moved; to "
                "use a known one set federation.graph",
                stacklevel=2,
            )
        return Moved().learn(roster, server, newcomer, pull)

    def compared(self, roster: Roster, server: Tree) -> Compared:
        """What links are made of."""
        if roster.graph is None:
            return Moved().compared(roster, server)
        return Compared("weight of the known link", server.links)

    def add_clients(self, roster: Roster, server: Tree, newcomers: Tensor) -> Tensor:
        """[N, N] the links once newcomers: [M] have joined."""
        learned = roster.graph is None
        return Moved().add_clients(roster, server, newcomers) if learned else self.start(roster)
