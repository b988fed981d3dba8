"""FedRep: a shared representation under personal heads (Collins et al., 2021, Algorithm 1)."""

from dataclasses import dataclass

from ..core.method import Params
from ..errors import UsageError
from .bases import Averaging


@dataclass(frozen=True)
class FedRep(Averaging):
    """A client first fits its head to the received base, then the base to its head; only bases are averaged."""

    head_epochs: int = 5
    base_epochs: int | None = None  # None: as many as in the training settings

    def __post_init__(self):
        if min(self.head_epochs, self.base_epochs or 0) < 0:
            raise UsageError(
                f"fedrep: head_epochs and base_epochs must be zero or more; got {self.head_epochs}, {self.base_epochs}"
            )

    def shared(self, layout):
        if not layout.head:
            raise UsageError(
                "fedrep: the model has no nn.Linear that could be its head; name the layer that is one: "
                "fit(..., head='NAME')"
            )
        if not any(entry.trainable for entry in layout.entries if entry.name in layout.base):
            raise UsageError(
                "fedrep: the model is nothing but its head, so there is no base to share; take a model of more layers, "
                "such as 'mlp', or name another head"
            )
        return layout.base

    def train(self, client, state, received):
        layout = client.model.layout
        theta = self.compose(client, state, received)
        if self.head_epochs:
            theta = client.descend(theta, only=layout.head, epochs=self.head_epochs)
        theta = client.descend(theta, only=layout.base, epochs=self.base_epochs)
        return self.part(client, theta)

    def personalise(self, client, state, received):
        return {"mixed": Params(self.compose(client, state, received)), "own": state}
