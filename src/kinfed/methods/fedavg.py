"""FedAvg: train the shared model everywhere, then average (McMahan et al., 2017, Algorithm 1).

Differs: nothing.
"""

from dataclasses import dataclass

from ..core.field_checks import NonNegative
from ..core.method import AveragedParams
from .bases import Averaging


@dataclass(frozen=True)
class FedAvg(Averaging):
    r"""$\theta \leftarrow \sum_i \frac{n_i}{n} \theta_i$, with $\theta_i$ trained from $\theta$.

    `uniform` and `noise=0.001` are what the released code of SFL compares itself with.
    """

    uniform: bool = False  # all clients have the same weight, however many examples they have
    noise: NonNegative = 0.0  # standard deviation of noise that is added to each learned number of the mean

    def train(self, client, state, received):
        return (), AveragedParams(client.descend(received.theta))

    def personalise(self, client, state, received):
        return {"shared": received}
