"""FedAvg-FT: FedAvg, then each client fine-tunes the shared model on its own data.

Differs: of no single paper. Three readings are in use: the model after a round's ordinary local training (length=1, as
in FedAGHN), the head alone after the last round (scope=head epochs=10, as in FedRep), or some rounds of tuning on a
copy, as here.
"""

from dataclasses import dataclass
from typing import Literal

from ..core.field_checks import Count, CountOrZero
from ..core.method import AveragedParams, Params, SharedParams
from .bases import Averaging


@dataclass(frozen=True)
class FedAvgFT(Averaging):
    """Fine-tuning never feeds back into training: the shared model is FedAvg's."""

    length: Count = 10  # of fine-tuning, in rounds of local training
    epochs: CountOrZero | None = None  # of fine-tuning, in place of that length
    scope: Literal["all", "head"] = "all"  # what is tuned: "all" or "head"

    def pull(self, theta):
        """The penalty of local training from theta: [d], if there is one."""
        return None

    def train(self, client, state, received):
        return (), AveragedParams(client.descend(received.theta, penalty=self.pull(received.theta)))

    def personalise(self, client, state, received):
        only = client.for_whole_model.model.layout.head if self.scope == "head" else None
        if self.epochs == 0:
            return {"tuned": received, "shared": received}
        shared = SharedParams(client.whole(received.theta))  # before its personal part, if it has one, is tuned
        span = client.training.span(self.length) if self.epochs is None else {"epochs": self.epochs}
        tuned = client.descend(received.theta, penalty=self.pull(received.theta), only=only, **span)
        return {"tuned": Params(client.whole(tuned)), "shared": shared}
