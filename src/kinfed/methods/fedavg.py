"""FedAvg: train the shared model everywhere, then average (McMahan et al., 2017, Algorithm 1)."""

from dataclasses import dataclass

from ..errors import UsageError
from ..method import Averaging, Params


@dataclass(frozen=True)
class FedAvg(Averaging):
    r"""$\theta \leftarrow \sum_i \frac{n_i}{n} \theta_i$, with $\theta_i$ trained from $\theta$.

    `uniform` and `noise=0.001` are what the released code of SFL compares itself with.
    """

    uniform: bool = False  # every client counts the same, whatever it has
    noise: float = 0.0  # standard deviation of what is added to each learned number of the mean

    def __post_init__(self):
        if not 0 <= self.noise < float("inf"):
            raise UsageError(f"fedavg: noise is a standard deviation, so it must be zero or more; got {self.noise}")

    def train(self, client, state, received):
        return state, Params(client.descend(received.theta))

    def personalise(self, client, state, received):
        return {"shared": received}
