"""pFedGraph: a collaboration graph by a quadratic programme in the models' similarity (Ye et al., 2023)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..core.method import Compared, Params
from ..core.settings import NonNegative, Positive
from ..core.tables import active, put
from ..core.trees import PerClient
from ..ops.similarity import cosine, gram
from ..ops.sparsify import project_simplex
from .bases import GraphMethod
from .parts.answers import Answers
from .parts.model_attention import called


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's latest model
    seen: PerClient  # [N] bool, has taken part


@dataclass(frozen=True)
class PFedGraph(GraphMethod):
    r"""Row $i$ of the graph is the mean's weights nearest to $p + \frac{1}{2\alpha} s_i$.

    $s_{ij}$ is the cosine of how far the models of $i$ and $j$ moved from the initial one, $p$ the shares of examples.
    A client trains from its mixture on $F_i(\theta) - \lambda \cos(\theta, \bar\theta_i)$.
    """

    alpha: Positive = 0.3  # how near the weights are to the shares of examples; large: FedAvg, small: Local
    pull: NonNegative = 0.01  # lambda: towards the direction of the mixture, from the second round on
    compare: Literal["moved"] | Answers = "moved"  # cosines of how far models moved from the first, or of their answers

    def start(self, roster):
        return Server(roster.copies(), torch.zeros(len(roster), dtype=torch.bool, device=roster.theta.device))

    def graph(self, roster, server, cohort):
        heard, alike = active(server.seen), self.compared(roster, server).values[cohort]
        sizes = (roster.sizes * heard).to(alike.dtype)
        rows = sizes / sizes.sum() + alike / (2 * self.alpha)
        return project_simplex(rows.masked_fill(~heard, -torch.inf)).to(roster.theta.dtype)

    def compared(self, roster, server):
        alike = cosine(gram(self._parts(roster, server.theta)).inner, eps=0.0)
        known = server.seen[:, None] & server.seen  # who has not moved resembles nobody
        return Compared(called(self.compare), alike * known)

    def _parts(self, roster, theta):
        """Parts: [N, m] of what cosines are taken of."""
        if isinstance(self.compare, Answers):
            return self.compare.describe(roster, theta)
        return (theta[:, e.at] - roster.theta[e.at] for e in roster.layout.entries if e.trainable)

    def aggregate(self, roster, server, cohort, uploads):
        seen = put(server.seen, cohort, torch.ones_like(cohort, dtype=torch.bool))
        return Server(put(server.theta, cohort, uploads.theta), seen)

    def train(self, client, state, received):
        learned = client.model.layout.trainable_on(received.theta.device)
        goal = learned * received.theta
        goal = goal / goal.norm()

        def penalty(theta):
            theta = learned * theta
            return -self.pull * (goal @ theta) / theta.norm()

        theta = client.descend(received.theta, penalty=penalty if self.pull and client.round else None)
        return Params(theta), Params(theta)
