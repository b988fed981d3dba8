"""FedALA: a client starts from a learned mixture of its own model and the shared one (Zhang et al., 2023).

Differs: weights of a client that first mixes do not descend until its loss settles: every round has mix_epochs passes,
and they go on where they were.
"""

from dataclasses import dataclass
from typing import Annotated

from ..core.method import Params
from ..core.settings import CountOrZero, In, NonNegative
from .bases import Averaging
from .parts import mixed_weights
from .parts.mixed_weights import Mixing


@dataclass(frozen=True)
class FedALA(Averaging):
    r"""Local training starts from $\theta_i + W \odot (\theta - \theta_i)$ in the upper layers, from $\theta$ below.

    Each number of $W$ descends in $[0, 1]$ on the loss at that start; the trained models are averaged.
    """

    layers: tuple[str, ...] = ("head.*",)  # names or patterns of the tensors that are mixed; of others the shared ones
    rate: NonNegative = 1.0  # learning rate of W; 0: it stays 1, and the method is FedAvg
    share: Annotated[float, In("(0, 1]")] = 0.8  # of the training batches that a pass uses to learn W
    mix_epochs: CountOrZero = 1  # such passes in a round

    def _upper(self, client):
        """[m] where the tensors that are mixed lie in the part of the model that travels."""
        whole, layout = client.undivided.model.layout, client.model.layout
        return layout.index(whole.match(self.layers) & layout.learned, client.model.theta.device)

    def init_client(self, client):
        return mixed_weights.start(client, self._upper(client))

    def _mix(self, client, state, theta):
        """The weights, [m], and the model from which local training starts, [d]."""
        at = self._upper(client)
        weight = mixed_weights.learn(client, state, theta, at, self.rate, self.mix_epochs, self.share)
        return weight, mixed_weights.mixed(state, weight, theta, at)

    def train(self, client, state, received):
        weight, theta = self._mix(client, state, received.theta)
        theta = client.descend(theta)
        return Mixing(theta, weight, state.started | True), Params(theta)

    def personalise(self, client, state, received):
        return {"mixed": Params(self._mix(client, state, received.theta)[1]), "own": Params(state.theta)}
