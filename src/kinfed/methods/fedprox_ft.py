"""FedProx-FT: FedProx, then each client fine-tunes the shared model on its own data.

Differs: of no single paper; the readings of FedAvg-FT apply, and tuning has FedProx's penalty.
"""

from dataclasses import dataclass

from ..core.client import towards
from ..core.field_checks import NonNegative
from .fedavg_ft import FedAvgFT
from .parts.pulls import check_pull


@dataclass(frozen=True)
class FedProxFT(FedAvgFT):
    r"""Fine-tuning minimises $F_i(\theta) + \frac{\mu}{2} \|\theta - \theta^t\|^2$, too, and never feeds back."""

    mu: NonNegative = 0.01  # pull towards the received model

    def start(self, roster):
        check_pull("fedprox-ft", roster.training.optimiser, self.mu, setting="method.mu")
        return super().start(roster)

    def pull(self, theta):
        return towards(theta, self.mu) if self.mu else None
