"""pFedGraph: a collaboration graph by a quadratic programme in the models' similarity (Ye et al., 2023).

Differs: nothing. (A client that has not taken part yet has no weight; the authors' program pushes models away from the
others, and sets cosines above 0.9 to 1.)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.field_checks import NonNegative, Positive
from ..core.method import Compared, Params
from ..core.rows import active, put
from ..core.trees import ModelOf, PerClient
from ..ops.mixing import mix
from ..ops.similarity import cosine, gram
from ..ops.sparsify import project_simplex
from .bases import GraphMethod


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's latest model
    seen: PerClient  # [N] bool, has taken part


class Sent(NamedTuple):
    """What a client receives."""

    theta: ModelOf[PerClient]  # [d] its mixture
    others: PerClient  # [d] the same mixture of the models' directions, which have length 1


@dataclass(frozen=True)
class PFedGraph(GraphMethod):
    r"""Row $i$ of the graph is the mean's weights nearest to $p + \frac{1}{2\alpha} s_i$.

    $s_{ij}$ is the cosine of how far the models of $i$ and $j$ moved from the initial one, $p$ the shares of examples.
    A client trains from its mixture on $F_i(\theta) - \lambda \sum_j w_{ij} \cos(\theta, \theta_j)$.
    """

    alpha: Positive = 0.8  # how near the weights are to the shares of examples; large: FedAvg, small: Local
    pull: NonNegative = 0.01  # lambda: towards the direction of the mixed models, from the second round on

    def start(self, roster):
        return Server(roster.copies(), torch.zeros(len(roster), dtype=torch.bool, device=roster.theta.device))

    def graph(self, roster, server, cohort):
        def make():
            heard, alike = active(server.seen), self.similarity(roster, server).values[cohort]
            sizes = (roster.weights * heard).to(alike.dtype)
            rows = sizes / sizes.sum() + alike / (2 * self.alpha)
            return project_simplex(rows.masked_fill(~heard, -torch.inf)).to(roster.theta.dtype)

        return roster.memo.once("graph", (self, server.theta, server.seen, cohort), make)

    def similarity(self, roster, server):
        moved = (server.theta[:, e.at] - roster.theta[e.at] for e in roster.layout.entries if e.trainable)
        alike = cosine(gram(moved).inner, eps=0.0)
        known = server.seen[:, None] & server.seen  # who has not moved resembles nobody
        return Compared("cosine of how far models moved", alike * known)

    def send(self, roster, server, cohort):
        rows = self.graph(roster, server, cohort)
        parts = [server.theta[:, layer.trainable].norm(dim=1) for layer in roster.layout.layers]
        length = torch.stack(parts).norm(dim=0).clamp(min=torch.finfo(rows.dtype).tiny)
        return Sent(*(mix(weights, server.theta, roster.layout) for weights in (rows, rows / length)))

    def aggregate(self, roster, server, cohort, uploads):
        seen = put(server.seen, cohort, torch.ones_like(cohort, dtype=torch.bool))
        return Server(put(server.theta, cohort, uploads.theta), seen)

    def train(self, client, state, received):
        learned = client.model.layout.trainable_on(received.theta.device)
        goal = learned * received.others

        def penalty(theta):
            return -self.pull * (goal @ theta) / (learned * theta).norm()

        theta = client.descend(received.theta, penalty=penalty if self.pull and client.round else None)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"own": state, "mixed": Params(received.theta)}
