"""LG-FedAvg: FedAvg of the heads on top of layers that stay with their clients (Liang et al., 2020, Algorithm 1).

Differs: the head alone is shared, and training starts afresh; the authors share as many upper layers as a table says
(personal names those that stay) and begin from a model that FedAvg has trained.
"""

from dataclasses import dataclass, field

from .fedper import FedPer


@dataclass(frozen=True)
class LGFedAvg(FedPer):
    """All of a model is trained at once; the lower layers, `personal`, stay, and the head's mean is taken."""

    personal: tuple[str, ...] = field(default=("base",), kw_only=True)  # tensors that never leave a client
    uniform: bool = True  # all clients have the same weight, however many examples they have
