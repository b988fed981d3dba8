"""FedAvg: train the shared model everywhere, then average (McMahan et al., 2017, Algorithm 1)."""

from dataclasses import dataclass

from ..method import Averaging, Params


@dataclass(frozen=True)
class FedAvg(Averaging):
    r"""$\theta \leftarrow \sum_i \frac{n_i}{n} \theta_i$, with $\theta_i$ trained from $\theta$."""

    def train(self, client, state, received):
        return state, Params(client.descend(received.theta))

    def personalise(self, client, state, received):
        return {"shared": received}
