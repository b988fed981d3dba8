"""FedSem: one model a cluster, and each client belongs to the one that its own comes nearest to (Xie et al., 2021)."""

from dataclasses import dataclass

import torch

from ..core.method import Params
from ..core.tables import take
from .parts.centres import Centres


@dataclass(frozen=True)
class FedSem(Centres):
    r"""$c_i = \arg\min_c \|\theta_i - m_c\|^2$ after local training from $m_{c_i}$; then $m_c$ is its members' mean.

    Clusters first come from the clients' updates. A client that has never taken part is sent the largest one's model.
    """

    weighs = "each client is in the cluster whose model its own comes nearest to, at a distance that is not kept"
    layers: tuple[str, ...] = ("*",)  # names or patterns of the tensors by which models are compared

    def send(self, roster, server, cohort):
        return Params(take(server.theta, self.labels(server)[cohort]))

    def assign(self, roster, server, uploads):
        layout, theta = roster.layout, server.theta
        at = layout.index(layout.match(self.layers) & layout.learned, theta.device)
        apart = [(uploads.theta[:, at] - centre).square().sum(1) for centre in theta[:, at]]
        return torch.stack(apart).argmin(0)

    def train(self, client, state, received):
        theta = client.descend(received.theta)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"cluster": received, "own": state}
