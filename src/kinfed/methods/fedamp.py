"""FedAMP: each client is drawn towards the clients it resembles (Huang et al., 2021, Algorithm 1)."""

import warnings
from dataclasses import dataclass

import torch

from ..client import towards
from ..errors import UsageError
from ..graph import gram, mix, put, take
from ..method import GraphMethod, Params


@dataclass(frozen=True)
class FedAMP(GraphMethod):
    r"""$w_{ij} = \frac{\alpha}{\sigma} e^{-\|\theta_i - \theta_j\|^2 / \sigma}$, $w_{ii} = 1 - \sum_{j \ne i} w_{ij}$.

    Each client minimises $F_i(\theta) + \frac{\lambda}{2\alpha} \|\theta - \sum_j w_{ij} \theta_j\|^2$. Only the
    clients of a cohort are mixed with each other.
    """

    alpha: float = 0.1  # step towards the others
    sigma: float = 1.0  # squared distance over which attention fades
    pull: float = 1.0  # lambda in the paper
    begin: str = "own"  # local training starts from the client's "own" model or from the "mixed" one

    def __post_init__(self):
        if self.sigma <= 0 or self.alpha < 0 or self.pull < 0:
            raise UsageError(
                "fedamp: sigma must be positive, alpha and pull zero or more; "
                f"got sigma={self.sigma}, alpha={self.alpha}, pull={self.pull}"
            )
        if self.begin not in ("own", "mixed"):
            raise UsageError(f"fedamp: begin must be 'own' or 'mixed'; got '{self.begin}'")

    def start(self, roster):
        return Params(roster.copies())

    def graph(self, roster, server, cohort):
        rows = self._attend(roster, take(server.theta, cohort))
        return rows.new_zeros(len(cohort), len(roster)).index_copy(1, cohort, rows)

    def send(self, roster, server, cohort):
        theta = take(server.theta, cohort)
        return Params(mix(self._attend(roster, theta), theta, roster.layout))

    def aggregate(self, roster, server, cohort, uploads):
        return Params(put(server.theta, cohort, uploads.theta))

    def train(self, client, state, received):
        penalty = towards(received.theta, self.pull / self.alpha) if self.alpha else None
        begin = state.theta if self.begin == "own" else received.theta
        theta = client.descend(begin, penalty=penalty)
        return Params(theta), Params(theta)

    def _attend(self, roster, theta):
        """[K, K] whom each of a cohort is drawn towards; theta: [K, d]."""
        apart = gram(theta[:, layer.trainable] for layer in roster.layout.layers).distances.to(theta.dtype)
        near = self.alpha / self.sigma * torch.exp(-apart / self.sigma)
        keeps = 1 - near.fill_diagonal_(0).sum(1)  # a client keeps what it gives to no one
        if (keeps < 0).any():
            warnings.warn(
                f"fedamp: a client resembles so many others that its own weight is {float(keeps.min()):.2g}; "
                f"alpha up to sigma / (N - 1) = {self.sigma / (len(roster) - 1):.3g} keeps weights positive",
                stacklevel=2,
            )
        return near + torch.diag(keeps)
