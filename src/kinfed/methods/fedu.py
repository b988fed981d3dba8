"""FedU: models of linked clients are pulled together along the graph (Dinh et al., 2022, Algorithm 1).

Differs: the paper has no eta for all data, and 0.01 is that of most of its released commands. Their code multiplies it
by half the rate and by epochs, where the paper's formula, used here, has steps, so that it pulls harder here. A round
has as many local steps as the training settings say, for each client; one that joins late starts from the mean of all.
Without a known graph all pairs of clients are linked by weight 1.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..core.field_checks import NonNegative
from ..core.method import Compared, Params
from ..core.mixins import Advises
from ..core.optimiser import SGD
from ..core.trees import PerClient
from ..errors import UsageError
from .parts.cohort_mixing import CohortMixing


class Server(NamedTuple):
    """The server's state."""

    uploads: PerClient  # [N, d] w_{k,R}: the models as last trained
    theta: PerClient  # [N, d] w_k: as last pulled together, from which clients start
    present: PerClient  # [N] bool, in the cohort that was pulled together last
    seen: PerClient  # [N] bool, has taken part


@dataclass(frozen=True)
class FedU(CohortMixing, Advises):
    r"""$w_k \leftarrow w_{k,R} - \mu R \eta \sum_{l \in N_k} a_{kl} (w_{k,R} - w_{l,R})$ after $R$ local steps.

    That is a step on $\frac{\eta}{2} \sum_k \sum_l a_{kl} \|w_k - w_l\|^2$, beside the clients' losses: the Laplacian
    of the known graph. $\mu$ is the rate of local training, and $l$ are the neighbours that took part in the round.
    """

    pull: NonNegative = 0.01  # eta: of linked models towards each other; 0 is Local

    grid: ClassVar = {"pull": (0.001, 0.01, 0.1)}
    remedy = "lower the learning rate, method.pull or the graph's weights"
    origin = "given"

    def origin_of(self, roster):
        return "fixed" if roster.graph is None else roster.graph.origin

    def start(self, roster):
        if not isinstance(roster.training.optimiser, SGD):
            raise UsageError("fedu needs SGD: models are pulled together by its rate; set training.optimiser to sgd")
        theta = roster.copies()
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        return Server(theta, theta, nobody, nobody)

    def train(self, client, state, received):
        theta = client.descend(received.theta)
        return Params(theta), Params(theta)

    def learn(self, roster, server, cohort, uploads):
        return server

    def graph(self, roster, server, cohort):
        rate = self.pull * roster.training.optimiser.lr * roster.training.count_steps(roster.sizes[cohort])  # [K]
        rows = rate.to(roster.theta)[:, None] * links(roster)[cohort][:, cohort]
        keeps = 1 - rows.sum(1)
        if (keeps < 0).any():
            warnings.warn(
                f"fedu: a step of the pull is {float(1 - keeps.min()):.3g} times the way to a client's neighbours, so "
                "its own weight is negative; divide method.pull by that or more, or lower the learning rate",
                stacklevel=2,
            )
        return rows + torch.diag(keeps)

    def similarity(self, roster, server):
        return Compared("weight of the known link", links(roster).fill_diagonal_(torch.nan))


def links(roster):
    """[N, N] a: the weights of the known graph, or 1 for all pairs without one; 0 of a client to itself."""
    weights = torch.ones(len(roster), len(roster)) if roster.graph is None else roster.graph.weights
    return weights.to(roster.theta).clone().fill_diagonal_(0)
