"""FedProx: FedAvg with a proximal term towards the shared model (Li et al., 2020, Algorithm 2).

Differs: clients of a round are drawn alike and weighted by their numbers of examples, as in the released code; the
paper's Algorithm 2 draws them by these numbers and weights them alike.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..core.client import towards
from ..core.field_checks import NonNegative
from ..core.method import AveragedParams
from ..core.mixins import Advises
from .bases import Averaging
from .parts.pulls import check_pull


@dataclass(frozen=True)
class FedProx(Averaging, Advises):
    r"""Each client minimises $F_i(\theta) + \frac{\mu}{2} \|\theta - \theta^t\|^2$ from $\theta^t$."""

    mu: NonNegative = 0.01  # pull towards the received model
    uniform: bool = False  # all clients have the same weight, however many examples they have
    noise: NonNegative = 0.0  # standard deviation of noise that is added to each learned number of the mean
    grid: ClassVar = {"mu": (0.001, 0.01, 0.1, 1.0)}

    def start(self, roster):
        check_pull("fedprox", roster.training.optimiser, self.mu, setting="method.mu")
        return super().start(roster)

    def train(self, client, state, received):
        penalty = towards(received.theta, self.mu) if self.mu else None
        return (), AveragedParams(client.descend(received.theta, penalty=penalty))

    def personalise(self, client, state, received):
        return {"shared": received}
