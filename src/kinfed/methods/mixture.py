"""Mixture: a graph method composed of three parts: what is compared, how weights follow, and among whom."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.client import towards
from ..core.field_checks import NonNegative
from ..core.method import Params, Roster
from ..core.mixins import Advises
from ..core.rows import put, subtract, take
from ..core.trees import PerClient, Tree
from ..relations.comparisons import Comparison, Cosine, Distance
from ..relations.neighbourhoods import Everyone, Linked, Nearest, Sketches, renew, start_sketches
from ..relations.relation import relate
from ..relations.weighings import Kernel, Simplex, Softmax, Weighing
from .parts.graph_mixing import RelationMixing
from .parts.pulls import check_pull


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's latest model
    update: PerClient | tuple[()]  # [N, d] how its last training moved it; () unless that is compared
    seen: PerClient  # [N] bool, has taken part
    sketch: Sketches | tuple[()]  # of what is compared, to find the nearest; () if nobody is left out


@dataclass(frozen=True)
class Mixture(RelationMixing, Advises):
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
    def by_layer(self) -> bool:
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
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        return Server(theta, update, nobody, start_sketches(roster) if self.neighbours else ())

    def relate(self, roster, server, cohort):
        def vectors(ids: Tensor) -> Tensor:
            update = take(server.update, ids) if self.vectors == "updates" else server.update
            return self.take_vectors(roster, take(server.theta, ids), update)

        mass = self.mass(roster, server)
        relation = relate(self.compare, self.weigh, self.among, roster, vectors, mass, cohort, server.sketch)
        return relation._replace(what=f"{type(self.compare).__name__.lower()} of {self.vectors}")

    def take_vectors(self, roster: Roster, theta: Tensor, update: Tree) -> Tensor:
        """[K, d] what is compared, of models theta: [K, d] and the last update of each: [K, d]."""
        if self.vectors == "updates":
            return update
        return subtract(theta, roster.theta) if self.vectors == "movements" else theta

    def train(self, client, state, received):
        begin = received.theta if self.start_from == "mixture" else state.theta
        theta = client.descend(begin, penalty=towards(received.theta, self.pull) if self.pull else None)
        return Params(theta), Params(theta)

    def aggregate(self, roster, server, cohort, uploads):
        update = change = server.update
        if self.vectors == "updates":
            mixed = self.start_from == "mixture"
            begin = self.send(roster, server, cohort).theta if mixed else take(server.theta, cohort)
            change = subtract(uploads.theta, begin)
            update = put(update, cohort, change)
        seen = server.seen.index_fill(0, cohort, True)
        sketch = ()
        if self.neighbours:
            sketch = renew(roster, server.sketch, cohort, self.take_vectors(roster, uploads.theta, change))
        return Server(put(server.theta, cohort, uploads.theta), update, seen, sketch)
