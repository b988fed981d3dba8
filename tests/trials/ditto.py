"""Ditto: a personal model beside FedAvg's shared one, and pulled towards it (Li et al., 2021, Algorithm 1)."""

from dataclasses import dataclass

from kinfed import Params
from kinfed.methods import Averaging, NonNegative, towards


@dataclass(frozen=True)
class Ditto(Averaging):
    r"""Client $i$ trains the received $w$ as in FedAvg, and $v_i$ on $F_i(v) + \frac\lambda2 \|v - w\|^2$.

    The shared model never hears of $v_i$, which is what the client uses.
    """

    lam: NonNegative = 1.0  # lambda: 0 is Local, and a large one FedAvg

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        own = client.descend(state.theta, penalty=towards(received.theta, self.lam))
        return Params(own), Params(client.descend(received.theta))

    def personalise(self, client, state, received):
        return {"own": state, "shared": received}
