"""Server halves of methods that mix the clients' own models: along a graph, or by a relation of parts."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...core.graph import Origin
from ...core.method import Compared, Method, Params, Roster
from ...core.mixins import Explains, Lists
from ...core.rows import active
from ...core.trees import Tree
from ...ops.mixing import add_rows, mix
from ...relations.relation import Relation as Related, Weights

TABLE = 1 << 10  # clients up to which a table of all pairs is held, also where lists have made it


class GraphMethod(Method, Explains):
    """The server half of a method that mixes the clients' own models, `server.theta: [N, d]`, along a graph."""

    origin: ClassVar[Origin] = "learned"
    mixes: ClassVar[str] = "theta"

    @abstractmethod
    def graph(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        """[K, N], or [L, K, N] with one graph a layer: rows of the cohort, each summing to one."""

    def send(self, roster, server, cohort):
        return Params(mix(self.graph(roster, server, cohort), server.theta, roster.layout))

    def relation(self, roster, server, cohort):
        return self.graph(roster, server, roster.everyone)

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        theta = client.descend(received.theta)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"own": state, "mixed": received}


class RelationMixing(GraphMethod, Lists):
    """A graph method whose weights follow from a comparison: of all clients, or of listed ones, without tables [N, N].

    Until a client has taken part, it has no weight, and is sent the mean of those that have, by examples.
    """

    @property
    def neighbours(self) -> int:
        """How many others are listed for a client; 0: none are left out."""
        return 0

    @abstractmethod
    def relate(self, roster: Roster, server: Tree, cohort: Tensor) -> Related:
        """Whom the cohort: [K] learns from; it depends on nothing but the method, the server's state and the roster."""

    def keeps_lists(self, count):
        return self.neighbours > 0 and count > TABLE

    def mark_seen(self, server: Tree) -> Tensor:
        """[N] bool who has taken part."""
        return server.seen

    def mass(self, roster: Roster, server: Tree) -> Tensor:
        """[N] by how much clients count: their training examples, once they have taken part; all before anybody has."""
        return (roster.weights * active(self.mark_seen(server))).to(server.theta.dtype)

    def mean(self, roster: Roster, server: Tree, scale: Tensor | float = 1.0) -> Tensor:
        """[d] the mean of the models by examples, or of the models times scale: [N]."""
        made_of, mass = (self, *server, roster.weights, scale), self.mass(roster, server)
        return roster.memo.once("mean", made_of, lambda: add_rows(mass / mass.sum() * scale, server.theta))

    def weights(self, roster: Roster, server: Tree, cohort: Tensor) -> tuple[Weights, Tensor]:
        """The weights of the cohort's mixtures, and [K] bool who is sent the mean instead."""
        made_of = self.made_of(roster, server, cohort)
        return roster.memo.once("weights", made_of, lambda: self.relate(roster, server, cohort)[:2])

    def compose(self, roster: Roster, server: Tree, weights: Weights, unheard: Tensor) -> Tree:
        """What K clients are sent: mixtures by weights, and the mean where they are unheard: [K] bool."""
        return Params(self.mix(roster, server, weights, unheard))

    def mix(
        self, roster: Roster, server: Tree, weights: Weights, unheard: Tensor, scale: Tensor | float = 1.0
    ) -> Tensor:
        """[K, d] mixtures by weights of the models times scale: [N], and their mean where K are unheard: [K] bool."""
        theta, layout = server.theta, roster.layout
        return weights.mix_heard(theta, layout, unheard, lambda: self.mean(roster, server, scale), scale)

    def send(self, roster, server, cohort):
        made_of = self.made_of(roster, server, cohort)
        return roster.memo.once(
            "mixtures", made_of, lambda: self.compose(roster, server, *self.weights(roster, server, cohort))
        )

    def prospect(self, roster, server, ids):
        weights, unheard = self.weights(roster, server, roster.everyone)
        return self.compose(roster, server, weights.rows_of(ids), unheard[ids])

    def relation(self, roster, server, cohort):
        weights, unheard = self.weights(roster, server, roster.everyone)
        if weights.near is None or not self.keeps_lists(len(roster)):
            return self.graph(roster, server, roster.everyone)
        return weights.lists(unheard, self.mass(roster, server))

    def graph(self, roster, server, cohort):
        weights, unheard = self.weights(roster, server, cohort)
        rows = weights.dense(len(roster))
        if unheard.any():
            mass = self.mass(roster, server)
            rows = torch.where(unheard[:, None], mass / mass.sum(), rows)
        return rows

    def similarity(self, roster, server):
        weights, _, values, what = self.relate(roster, server, roster.everyone)
        values = values.mean(0)
        if weights.near is not None and self.keeps_lists(len(roster)):
            return Compared(what, values, weights.near)
        if weights.near is not None:
            values = values.new_full((len(roster),) * 2, torch.nan).scatter(1, weights.near, values)
        return Compared(what, values)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        weights, unheard = self.weights(roster, server, roster.everyone)
        itself = roster.everyone[:, None] == (roster.everyone if weights.near is None else weights.near)
        own_weight = (weights.rows * itself).sum(-1).view(-1, len(roster)).mean(0)
        mixed, mean = weights.entropy().exp().view(-1, len(roster)).mean(0), self.mass(roster, server)
        mean = mean / mean.sum()
        return super().diagnostics(roster, server, cohort, sent, uploads) | {
            "own weight": torch.where(unheard, mean, own_weight),
            "clients mixed": torch.where(unheard, torch.special.entr(mean).sum().exp(), mixed),  # of equal weights
        }

    def made_of(self, roster: Roster, server: Tree, cohort: Tensor) -> tuple[Any, ...]:
        """All that weights depend on."""
        return self, *server, roster.weights, roster.seed, cohort
