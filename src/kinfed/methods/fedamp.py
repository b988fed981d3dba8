"""FedAMP: each client's model is drawn towards those that it resembles (Huang et al., 2021, Algorithm 1).

Differs: alpha stays, where the paper lets it shrink over rounds. The paper has no values for all data: alpha, sigma and
lambda are those that FedAGHN's tables give for FedAMP.
"""

import math
from dataclasses import dataclass

from ..core.field_checks import NonNegative, Positive
from ..relations import Kernel
from .parts.message_passing import ALIKE, MessagePassing


@dataclass(frozen=True)
class FedAMP(MessagePassing):
    r"""$u_i = \sum_j w_{ij} \theta_j$ with $w_{ij} = \alpha A'(\|\theta_i - \theta_j\|^2)$, the rest its own model's.

    $A(x) = 1 - e^{-x / \sigma}$. Each client trains on from its own model, on
    $F_i(\theta) + \frac{\lambda}{2 \alpha} \|\theta - u_i\|^2$. Only the clients of a cohort are mixed with each other.
    If the weights of others sum to more than one, a client's own is negative; running statistics then use the nearest
    weights of a mean.
    """

    alpha: NonNegative = 100.0  # length of the step towards the others
    sigma: Positive = 1e4  # squared distance over which attention fades: best near those of related clients' models
    pull: NonNegative = 1.0  # lambda: how strongly local training is drawn to the mixture, as pull / alpha

    remedy = (
        "lower the learning rate or pull / alpha, and keep every client's own weight positive: alpha up to "
        "sigma / (N - 1)"
    )

    @property
    def weighing(self):
        return Kernel(self.alpha, self.sigma)

    @property
    def strength(self):
        return self.pull / self.alpha if self.alpha else 0.0

    def describe_flatness(self, squares):
        none = squares.min() > math.log(1e3) * self.sigma
        if not self.alpha or not (none or squares.max() - squares.min() < ALIKE * self.sigma):
            return ""
        return (
            f"{'no other has weight' if none else 'all others weigh alike'}, as models' squared distances, of median "
            f"{float(squares.median()):.2g}, are far from a sigma of {self.sigma:g}; set method.sigma near them and "
            "method.alpha up to sigma / (N - 1), or use kin, which needs no scale"
        )
