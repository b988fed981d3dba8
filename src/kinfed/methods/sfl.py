"""SFL: models are propagated along a graph of the clients, known or learned (Chen et al., 2022, Algorithm 1)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..core.client import towards
from ..core.method import Method, Params, SharedParams
from ..core.settings import CountOrZero, NonNegative, Share
from ..core.tables import active, put
from ..core.trees import ModelOf, Pairwise, PerClient, Shared
from ..ops.mixing import mix, power
from .parts.graph_learning import Moved, Similarity
from .parts.graph_qp import QP
from .parts.known_graph import Known


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] V: each client's latest model
    seen: PerClient  # [N] bool, has taken part
    links: Pairwise  # [N, N] A + I: the graph, self-links included
    mixing: Pairwise  # [N, N] the weights that the last aggregation derived from it: U = mixing V
    sketch: PerClient  # [N, s] of V, if the structure compares sketches; else [N, 0]


class Sent(NamedTuple):
    """What a client receives."""

    mixed: ModelOf[PerClient]  # [d] u_i, the mixture of its neighbourhood's models
    shared: Shared  # [d] w, the mean of all u


@dataclass(frozen=True)
class SFL(Method):
    r"""$U = \rho P^m V + (1 - \rho) V$, $P = D^{-1}(A + I)$, $w = \frac1N \sum_i u_i$.

    Client i minimises $F_i(v) + \lambda (R(v, w) + R(v, u_i))$ with $R(a, b) = \frac12 \|a - b\|^2$ and $\lambda = 0$
    in the first round. With a `structure` that is learned this is SFL*. Algorithm 1: begin="own" and pull=0.3; released
    code: steps=3 and begin="shared".
    """

    steps: CountOrZero = 1  # m: propagation steps: how often models are averaged with their neighbours'
    rho: Share = 1.0  # weight of the propagated model in u; the rest is the client's own model
    pull: NonNegative = 0.0  # lambda: weight of the proximal terms towards w and towards u
    begin: Literal["own", "mixed", "shared"] = "mixed"  # where local training starts: v (own), u (mixed) or w (shared)
    structure: Known | Moved | Similarity | QP = Known()  # the graph: known, or learned from the models
    mixes = "theta"

    def origin_of(self, roster):
        return self.structure.origin_of(roster)

    def start(self, roster):
        theta = roster.copies()
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        sketch = self.structure.sketches(roster, theta[:1]).repeat(len(roster), 1)
        return Server(theta, nobody, self.structure.start(roster), torch.eye(len(roster)).to(theta), sketch)

    def send(self, roster, server, cohort):
        rows = torch.cat([server.mixing[cohort], self.read_out(server)[None]])
        mixed = mix(rows, server.theta, roster.layout)  # all in one pass
        return Sent(mixed[:-1], mixed[-1])

    def aggregate(self, roster, server, cohort, uploads):
        seen = put(server.seen, cohort, torch.ones_like(cohort, dtype=torch.bool))
        after = Server(
            put(server.theta, cohort, uploads.theta),
            seen,
            server.links,
            self.propagate(server.links, seen),
            put(server.sketch, cohort, self.structure.sketches(roster, uploads.theta)),
        )
        return after._replace(links=self.structure.learn(roster, after, seen & ~server.seen, self.pull))

    def propagate(self, links, seen):
        """[N, N] the weights of V in U: rho P^m + (1 - rho) I, without clients that have never taken part.

        A client without a link to one that has taken part keeps its model.
        """
        itself = torch.eye(len(links), dtype=links.dtype, device=links.device)
        links = links * seen
        links = torch.where(links.sum(1, keepdim=True) > 0, links, itself)
        return self.rho * power(links / links.sum(1, keepdim=True), self.steps) + (1 - self.rho) * itself

    def read_out(self, server):
        """[N] the weights of V in w: the mean of the u of all clients that have taken part; of all before round 1."""
        weights = active(server.seen).to(server.mixing.dtype)
        return weights / weights.sum() @ server.mixing

    def add_clients(self, roster, server, newcomers):
        """A newcomer is sent the mixture by its links; its model enters the others' mixtures once it has trained."""
        wide = super().add_clients(roster, server, newcomers)
        wide = wide._replace(links=self.structure.add_clients(roster, wide, newcomers))
        rows = self.propagate(wide.links, wide.seen)[newcomers]
        return wide._replace(mixing=put(wide.mixing, newcomers, rows))

    def relation(self, roster, server, cohort):
        return server.mixing

    def compared(self, roster, server):
        return self.structure.compared(roster, server)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        update = (uploads.theta - sent.mixed)[:, roster.layout.trainable_on(cohort.device)].norm(dim=1)
        return {"update": roster.note(cohort, update), "pull": torch.tensor(self.pull if roster.round > 0 else 0.0)}

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        pulled = self.pull > 0 and client.round > 0  # in the first round u and w carry no information
        penalty = towards(received.mixed, self.pull) + towards(received.shared, self.pull) if pulled else None
        begin = {"own": state.theta, "mixed": received.mixed, "shared": received.shared}[self.begin]
        theta = client.descend(begin, penalty=penalty)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"mixed": Params(received.mixed), "own": state, "shared": SharedParams(received.shared)}
