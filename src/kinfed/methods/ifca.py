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
from ..core.rows import put
from ..core.trees import ModelOf, PerClient, Shared
from ..ops.clustering import cluster_means, cluster_weights
from .parts.random_starts import shuffle_models

PATIENCE = 5  # rounds after which it is said that all clients chose the same model


class Server(NamedTuple):
    """The server's state."""

    theta: Shared  # [C, d] one model a cluster
    label: PerClient  # [N] int64 the model that each client chose when it last took part; -1: it never has


class Sent(NamedTuple):
    """What a client receives."""

    theta: Shared  # [C, d] the models of all clusters


class Upload(NamedTuple):
    """What a client returns."""

    theta: ModelOf[PerClient]  # [d] after local training
    cluster: PerClient  # [] int64 which model it was trained from


@dataclass(frozen=True)
class IFCA(Method, Explains):
    r"""Client $i$ trains from $\theta_{c_i}$ with $c_i = \arg\min_c F_i(\theta_c)$, on all its training examples.

    Then $\theta_c$ is the mean of what the clients that chose it trained (Algorithm 1, model averaging); a model that
    nobody chose stays.
    """

    clusters: Count = 4  # K, the number of models, drawn at random
    origin = "learned"
    weighs = "each client takes the cluster whose model fits its own examples best, by losses that it keeps to itself"

    def start(self, roster):
        if self.clusters > len(roster):
            warnings.warn(
                f"ifca: clusters={self.clusters} is more than there are clients, {len(roster)}, so some have no "
                "member; set fewer",
                stacklevel=2,
            )
        label = torch.full((len(roster),), -1, dtype=torch.int64, device=roster.theta.device)
        return Server(shuffle_models(roster, self.clusters), label)

    def send(self, roster, server, cohort):
        return Sent(server.theta)

    def aggregate(self, roster, server, cohort, uploads):
        label = put(server.label, cohort, uploads.cluster)
        chosen = label[label >= 0]
        if roster.round == PATIENCE - 1 and len(chosen) > 1 < self.clusters and (chosen == chosen[0]).all():
            warnings.warn(
                f"ifca: round {roster.round + 1}: all clients chose one of the {self.clusters} models, which is FedAvg "
                "so far; start from other models (another seed), or use kin, which needs none",
                stacklevel=2,
            )
        return Server(cluster_means(uploads.cluster, uploads.theta, server.theta, roster.layout), label)

    def relation(self, roster, server, cohort):
        seen = server.label >= 0
        label = torch.where(seen, server.label, server.label[seen].mode().values if seen.any() else 0)
        return cluster_weights(label, seen | ~seen.any(), server.theta.dtype)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        at = roster.layout.trainable_on(cohort.device)
        moved = (uploads.theta - sent.theta[uploads.cluster])[:, at].norm(dim=1)
        label = server.label.to(moved.dtype)
        return {"update": roster.note(cohort, moved), "cluster": torch.where(label < 0, torch.nan, label)}

    def init_client(self, client):
        return Params(client.model.theta)

    def _best(self, client, theta):
        """[] int64 the model, of theta: [C, d], with the least loss on the training examples; of equal ones the first.

        With it the model itself, [d].
        """
        losses = torch.stack([client.loss(model, client.data) for model in theta])
        best = losses.nan_to_num(torch.inf, torch.inf).argmin()  # else a model without a loss would be the best
        return best, theta.index_select(0, best[None])[0]

    def train(self, client, state, received):
        cluster, theta = self._best(client, received.theta)
        theta = client.descend(theta)
        return Params(theta), Upload(theta, cluster)

    def personalise(self, client, state, received):
        return {"cluster": Params(self._best(client, received.theta)[1]), "own": state}
