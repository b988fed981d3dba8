"""Mixture: a graph method composed of three parts: what is compared, how weights follow, and among whom."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..core.client import towards
from ..core.field_checks import NonNegative
from ..core.method import Compared, Params
from ..core.mixins import Advises
from ..core.rows import active, put, take
from ..core.trees import PerClient
from ..errors import UsageError
from ..ops.mixing import weighted_mean
from ..ops.neighbours import Weights
from ..relations.comparisons import Comparison, Cosine, Distance
from ..relations.neighbourhoods import Everyone, Linked, Nearest
from ..relations.weighings import Kernel, Simplex, Softmax, Weighing
from .bases import GraphMethod
from .parts.pulls import check_pull

ROUNDING = 1e-3  # by how much a row of weights may miss a sum of one


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's latest model
    update: PerClient  # [N, d] how its last training moved it; () unless that is compared
    seen: PerClient  # [N] bool, has taken part


@dataclass(frozen=True)
class Mixture(GraphMethod, Advises):
    r"""$u_i = \sum_j w_{ij} \theta_j$, where $w_i$ follows from how $v_i$ compares with the $v_j$ of others.

    $v_i$ is how far the model of client $i$ has moved from the first one, the model itself, or its last update. A
    client that has not taken part yet has no weight, and is sent the mean of those that have.
    """

    compare: Cosine | Distance | Comparison = Cosine()  # how alike two clients are
    weigh: Softmax | Kernel | Simplex | Weighing = Softmax()  # how weights follow
    among: Everyone | Nearest | Linked = Everyone()  # whom a client may learn from
    vectors: Literal["movements", "models", "updates"] = "movements"  # what is compared
    start_from: Literal["mixture", "own"] = "mixture"  # the model that local training starts from
    pull: NonNegative = 0.0  # how strongly local training is drawn to the mixture

    remedy = "lower the learning rate or method.pull"

    @property
    def by_layer(self):
        """Whether each layer has weights of its own."""
        return getattr(self.compare, "by_layer", False)

    @property
    def neighbours(self):
        """How many others are listed for a client; 0: none are left out."""
        return self.among.count if isinstance(self.among, Nearest) else 0

    def start(self, roster):
        check_pull("mixture", roster.training.optimiser, self.pull, "the mixture", "pull")
        theta = roster.copies()
        update = torch.zeros_like(theta) if self.vectors == "updates" else ()
        return Server(theta, update, torch.zeros(len(roster), dtype=torch.bool, device=theta.device))

    def graph(self, roster, server, cohort):
        weights = self._weigh(roster, server, cohort)
        graph, new = weights.dense(len(roster)), ~server.seen[cohort, None]
        mass = self._mass(roster, server)
        return graph if weights.near is None else torch.where(new, mass / mass.sum(), graph)

    def send(self, roster, server, cohort):
        weights, new = self._weigh(roster, server, cohort), ~server.seen[cohort]
        mixed = weights.mix(server.theta, roster.layout)
        if weights.near is not None and new.any():
            mixed[new] = weighted_mean(server.theta, self._mass(roster, server))
        return Params(mixed)

    def train(self, client, state, received):
        begin = received.theta if self.start_from == "mixture" else state.theta
        theta = client.descend(begin, penalty=towards(received.theta, self.pull) if self.pull else None)
        return Params(theta), Params(theta)

    def aggregate(self, roster, server, cohort, uploads):
        update = server.update
        if self.vectors == "updates":
            begin = self.send(roster, server, cohort).theta if self.start_from == "mixture" else server.theta[cohort]
            update = put(update, cohort, uploads.theta - begin)
        seen = put(server.seen, cohort, torch.ones_like(cohort, dtype=torch.bool))
        return Server(put(server.theta, cohort, uploads.theta), update, seen)

    def similarity(self, roster, server):
        vectors = self._vectors(roster, server)
        values = self.compare.compare(vectors, vectors, None, roster.layout).mean(0)
        return Compared(f"{type(self.compare).__name__.lower()} of {self.vectors}", values)

    def _vectors(self, roster, server):
        """[N, d] what is compared."""
        if self.vectors == "updates":
            return server.update
        return server.theta - roster.theta if self.vectors == "movements" else server.theta

    def _mass(self, roster, server):
        """[N] by how much clients count: their training examples, once they have taken part."""
        return (roster.weights * active(server.seen)).to(server.theta.dtype)

    def _weigh(self, roster, server, cohort):
        """The weights of the cohort's mixtures."""

        def make():
            vectors, mass = self._vectors(roster, server), self._mass(roster, server)
            others = self.among.find(roster, vectors, cohort)
            columns = roster.everyone.expand(len(cohort), -1) if others.near is None else others.near
            mass = mass[columns] if others.linked is None else mass[columns] * others.linked
            itself = columns == cohort[:, None]
            mass = torch.where(itself & (mass.sum(1, keepdim=True) == 0), 1.0, mass)  # nobody else: its own model
            similarity = self.compare.compare(take(vectors, cohort), vectors, others.near, roster.layout)
            rows = self.weigh.weigh(similarity, mass, itself)
            self._check(rows, similarity)
            new = ~server.seen[cohort, None]
            rows = torch.where(new, mass / mass.sum(1, keepdim=True), rows)
            return Weights(rows if len(rows) > 1 else rows[0], others.near)

        return roster.memo.once("mixture weights", (self, *server, roster.weights, roster.seed, cohort), make)

    def _check(self, rows, similarity):
        """Raise UsageError unless a part's rows are weights of what it was given."""
        name = type(self.weigh).__name__
        if rows.shape != similarity.shape:
            raise UsageError(f"method.weigh: {name} gives {list(rows.shape)} for similarities {list(similarity.shape)}")
        if not bool(((rows.sum(-1) - 1).abs() < ROUNDING).all()):  # also if one is no number
            raise UsageError(f"method.weigh: rows of {name} must sum to one; divide each by its sum")
