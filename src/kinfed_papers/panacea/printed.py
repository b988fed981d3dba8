"""Panacea's Algorithm 1 as printed, whose sign and server steps are not those of its loss."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kinfed.core.field_checks import Count
from kinfed.core.optimiser import SGD, Adam, Optimiser
from kinfed.methods.panacea import Panacea


@dataclass(frozen=True)
class Printed(Panacea):
    """Lines 12 and 13 subtract what Equation 4 would add, and push all K_s steps along the change of the first one."""

    steps: Count = 10  # K_s: steps of the server in a round
    optimiser: SGD | Adam | Optimiser = SGD(0.1)  # of the server's network
    sign: Literal["printed", "descent"] = "printed"  # of the first term: as printed, which is ascent
    mode: Literal["frozen", "target"] = "frozen"  # the change is that of the models that were sent, or is measured anew

    def away(self, sent: Tensor, theta: Tensor, trained: Tensor) -> Tensor:
        away = (sent if self.mode == "frozen" else theta) - trained
        return -away if self.sign == "printed" else away
