"""FedALA: a client starts from a learned mixture of its own model and the shared one (Zhang et al., 2023).

Differs: weights of a client that first mixes do not descend until its loss settles: every round has mix_epochs passes,
and they go on where they were.
"""

from dataclasses import dataclass
from typing import Annotated

from ..core.field_checks import CountOrZero, In, NonNegative
from ..core.method import AveragedParams
from .parts.mixed_weights import LearnedMixture, Mixing


@dataclass(frozen=True)
class FedALA(LearnedMixture):
    r"""Local training starts from $\theta_i + W \odot (\theta - \theta_i)$ in the upper layers, from $\theta$ below.

    Each number of $W$ descends in $[0, 1]$ on the loss at that start; the trained models are averaged.
    """

    layers: tuple[str, ...] = ("head.*",)  # names or patterns of the tensors that are mixed; of others the shared ones
    rate: NonNegative = 1.0  # learning rate of W; 0: it stays 1, and the method is FedAvg
    share: Annotated[float, In("(0, 1]")] = 0.8  # of the training batches that a pass uses to learn W
    mix_epochs: CountOrZero = 1  # such passes in a round

    def where(self, client):
        whole_layout, layout = client.for_whole_model.model.layout, client.model.layout
        return layout.index(whole_layout.match(self.layers) & layout.trainable_names, client.model.theta.device)

    def train(self, client, state, received):
        weight, theta = self.mix(client, state, received.theta)
        theta = client.descend(theta)
        return Mixing(theta, weight, state.started | True), AveragedParams(theta)
