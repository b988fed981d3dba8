"""FedAvg-FT: FedAvg, and each client trains the shared model on its own data before it is used."""

from dataclasses import dataclass

from ..core.method import Params, SharedParams
from ..errors import UsageError
from .bases import Averaging


@dataclass(frozen=True)
class FedAvgFT(Averaging):
    """Fine-tuning never feeds back into training: the shared model is FedAvg's."""

    epochs: int | None = None  # of fine-tuning; None: as many as in a round
    scope: str = "all"  # what is tuned: "all" or "head"

    def __post_init__(self):
        super().__post_init__()
        if self.scope not in ("all", "head"):
            raise UsageError(f"fedavg-ft: scope must be 'all' or 'head'; got '{self.scope}'")
        if self.epochs is not None and self.epochs < 0:
            raise UsageError(f"fedavg-ft: epochs must be zero or more; got {self.epochs}")

    def train(self, client, state, received):
        return (), Params(client.descend(received.theta))

    def personalise(self, client, state, received):
        only = client.undivided.model.layout.head if self.scope == "head" else None
        if self.epochs == 0:
            return {"tuned": received, "shared": received}
        shared = SharedParams(client.whole(received.theta))  # before its personal part, if it has one, is tuned
        tuned = client.descend(received.theta, only=only, epochs=self.epochs)
        return {"tuned": Params(client.whole(tuned)), "shared": shared}
