"""FedPer: FedAvg whose clients keep their heads (Arivazhagan et al., 2019, Algorithms 1 and 2).

Differs: nothing; the personal part is the head, the least that the paper keeps: personal names more.
"""

from dataclasses import dataclass, field

from .fedavg import FedAvg


@dataclass(frozen=True)
class FedPer(FedAvg):
    """All of a model is trained at once; `personal` stays with its client, and the rest is averaged."""

    personal: tuple[str, ...] = field(default=("head.*",), kw_only=True)  # tensors that never leave a client

    def personalise(self, client, state, received):
        return {"mixed": received}
