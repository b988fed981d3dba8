"""FedAH: personal heads that take from the shared one, number by number, what lowers their loss (Zhou et al., 2024).

Differs: nothing; epochs are those of the released code.
"""

from dataclasses import dataclass

from ..core.field_checks import CountOrZero, NonNegative
from ..core.method import AveragedParams
from .parts.classes import check_head
from .parts.mixed_weights import LearnedMixture, Mixing


@dataclass(frozen=True)
class FedAH(LearnedMixture):
    r"""On receipt a client's head becomes $h_i + W \odot (h - h_i)$ with $W$ learned in $[0, 1]$, the base that of all.

    Then it trains the head, and after it the base, as in FedRep; both are averaged.
    """

    rate: NonNegative = 1.0  # learning rate of W; 0: it stays 1, and heads are those of all
    mix_epochs: CountOrZero = 1  # passes over the training examples that learn W, in a round
    head_epochs: CountOrZero = 1  # of the head, in a round
    base_epochs: CountOrZero | None = None  # of the base; None: as many as in the training settings

    def where(self, client):
        """[m] where the part of the head that travels lies in the model."""
        model, layout = client.for_whole_model.model, client.model.layout
        check_head(model.module, model.head_name, "fedah")
        return layout.index(layout.head & layout.trainable_names, client.model.theta.device)

    def train(self, client, state, received):
        layout = client.for_whole_model.model.layout
        weight, theta = self.mix(client, state, received.theta)
        if self.head_epochs != 0:
            theta = client.descend(theta, only=layout.head, epochs=self.head_epochs)
        if self.base_epochs != 0:
            theta = client.descend(theta, only=layout.base, epochs=self.base_epochs)
        return Mixing(theta, weight, state.started | True), AveragedParams(theta)
