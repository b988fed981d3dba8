"""IFCA: one model a cluster, and each client trains the one that fits its examples best (Ghosh et al., 2020).

Differs: the paper restarts from other random models if a start turns out badly; here a run has one start, and says when
all clients chose the same model. There are four, as for the paper's rotated MNIST.
"""

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.field_checks import Count
from ..core.method import Method, Params
from ..core.mixins import Explains
from ..core.trees import ClusterSizes, ModelOf, PerClient, Shared, Summed
from .parts.random_starts import shuffle_models

PATIENCE = 5  # rounds after which it is said that all clients chose the same model
FEWEST = 0.2  # of the members that a cluster would have on average, by how many it is divided at least under noise


class Server(NamedTuple):
    """The server's state."""

    theta: Shared  # [C, d] one model a cluster
    members: ClusterSizes  # [C] how many clients trained each, in the last round in which it had any


class Sent(NamedTuple):
    """What a client receives."""

    theta: Shared  # [C, d] the models of all clusters


class Upload(NamedTuple):
    """What a client returns; the server gets the sum over clients."""

    change: Summed  # [C, d] how local training changed the model that it began from; zeros of the others
    member: Summed  # [C] 1 of that model, 0 of the others


class State(NamedTuple):
    """What a client keeps."""

    theta: ModelOf[PerClient]  # [d] after local training
    share: PerClient  # [C] 1 of the model that it was trained from, 0 of the others; zeros until then


@dataclass(frozen=True)
class IFCA(Method, Explains):
    r"""Client $i$ trains from $\theta_{c_i}$ with $c_i = \arg\min_c F_i(\theta_c)$, on all its training examples.

    Then $\theta_c$ is the mean of what the clients that chose it trained (Algorithm 1, model averaging); a model that
    nobody chose stays.
    """

    clusters: Count = 4  # K, the number of models, drawn at random
    origin = "learned"
    belongs = "share"
    weighs = "each client takes the cluster whose model fits its own examples best, by losses that it keeps to itself"

    def start(self, roster):
        if self.clusters > len(roster):
            warnings.warn(
                f"ifca: clusters={self.clusters} is more than there are clients, {len(roster)}, so some have no "
                "member; set fewer",
                stacklevel=2,
            )
        return Server(shuffle_models(roster, self.clusters), roster.theta.new_zeros(self.clusters))

    def send(self, roster, server, cohort):
        return Sent(server.theta)

    def aggregate(self, roster, server, cohort, uploads):
        count, noised = uploads.member, roster.training.noise is not None
        least = (FEWEST * count.mean()).clamp(min=FEWEST) if noised else count.new_ones(())
        members = torch.where(count > 0, count, server.members)
        if roster.round == PATIENCE - 1 and len(cohort) > 1 < self.clusters and (members > 0).sum() == 1:
            warnings.warn(
                f"ifca: round {roster.round + 1}: all clients chose one of the {self.clusters} models, which is FedAvg "
                "so far; start from other models (another seed), or use kin, which needs none",
                stacklevel=2,
            )
        return Server(server.theta + uploads.change / count.clamp(min=least)[:, None], members)

    def relation(self, roster, server, cohort):
        return None  # who is in which cluster is not the server's to know

    def diagnostics(self, roster, server, cohort, sent, uploads):
        return {f"members.{c}": count for c, count in enumerate(uploads.member)}

    def init_client(self, client):
        return State(client.model.theta, client.model.theta.new_zeros(self.clusters))

    def _best(self, client, theta):
        """[] int64 the model, of theta: [C, d], with the least loss on the training examples; of equal ones the first.

        With it the model itself, [d].
        """
        losses = torch.stack([client.loss(model, client.data) for model in theta])
        best = losses.nan_to_num(torch.inf, torch.inf).argmin()  # else a model without a loss would be the best
        return best, theta.index_select(0, best[None])[0]

    def train(self, client, state, received):
        cluster, begin = self._best(client, received.theta)
        theta = client.descend(begin)
        share = (torch.arange(len(received.theta), device=theta.device) == cluster).to(theta.dtype)
        return State(theta, share), Upload(share[:, None] * (theta - begin), share)

    def personalise(self, client, state, received):
        return {"cluster": Params(self._best(client, received.theta)[1]), "own": Params(state.theta)}
