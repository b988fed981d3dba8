"""Ditto: a personal model beside FedAvg's shared one, and pulled towards it (Li et al., 2021, Algorithm 1).

Differs: the shared model is the mean by numbers of examples; the released code takes the plain one. The personal
model's lambda is the same for all clients: the paper also chooses it for each by validation.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..core.client import towards
from ..core.field_checks import Count, NonNegative
from ..core.method import AveragedParams, Params
from ..core.mixins import Advises
from .bases import Averaging
from .parts.pulls import check_pull


@dataclass(frozen=True)
class Ditto(Averaging, Advises):
    r"""Client $i$ trains the received $w$ as in FedAvg, and its $v_i$ on $F_i(v) + \frac{\lambda}{2} \|v - w\|^2$.

    The shared model does not depend on $v_i$, which is what the client uses.
    """

    pull: NonNegative = 1.0  # lambda: of the personal model to the shared one; 0 is Local
    epochs: Count | None = None  # of the personal model's training; None: as many as of the shared one's

    grid: ClassVar = {"pull": (0.1, 1.0, 2.0)}
    remedy = "lower the learning rate or method.pull"

    def start(self, roster):
        check_pull("ditto", roster.training.optimiser, self.pull)
        return super().start(roster)

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        penalty = towards(received.theta, self.pull) if self.pull else None
        personal = client.descend(state.theta, penalty=penalty, epochs=self.epochs)
        return Params(personal), AveragedParams(client.descend(received.theta, again=True))

    def personalise(self, client, state, received):
        return {"own": state, "shared": received}
