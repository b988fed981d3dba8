"""FedRep: a shared representation under personal heads (Collins et al., 2021, Algorithm 1).

Differs: nothing; epochs are those of the released code.
"""

from dataclasses import dataclass, field

from ..core.field_checks import CountOrZero
from ..core.method import AveragedParams
from ..errors import UsageError
from .bases import Averaging


@dataclass(frozen=True)
class FedRep(Averaging):
    """A client first fits its personal part, here its head, to the received base, then the base to that part."""

    personal: tuple[str, ...] = field(default=("head.*",), kw_only=True)  # tensors that never leave a client
    head_epochs: CountOrZero = 10  # of the personal part, in a round
    base_epochs: CountOrZero = 1  # of the shared part

    def __post_init__(self):
        super().__post_init__()
        if not self.personal:
            raise UsageError(
                "fedrep: personal names no tensor; name some, or use method 'fedavg', which trains all at once"
            )

    def train(self, client, state, received):
        theta = received.theta
        if self.head_epochs:
            theta = client.descend(theta, only=client.personal, epochs=self.head_epochs)
        return (), AveragedParams(client.descend(theta, only=client.model.layout.names, epochs=self.base_epochs))

    def personalise(self, client, state, received):
        return {"mixed": received}
