"""FedSem: one model a cluster, and each client belongs to the one that its own comes nearest to (Xie et al., 2021).

Differs: the paper does not say which centres it starts from, nor how many; here they are those of k-means of the first
round's models, five, as many as FedCedar has, whose tables compare with this method. Nor does it say where newcomers
belong; here they train from the centres' mean, and it is the centre in whose direction that moves them.
"""

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.field_checks import Count
from ..core.method import Method, Params
from ..core.mixins import Explains
from ..core.rows import put, take
from ..core.seeding import key
from ..core.trees import PerClient, Shared
from ..ops.clustering import cluster, cluster_means, cluster_weights, nearest
from ..ops.similarity import cosine, gram

NEWCOMER = -2


class Server(NamedTuple):
    """The server's state."""

    theta: Shared  # [C, d] one model a cluster: its centre
    label: PerClient  # [N] int64 each client's cluster when it last took part; -1: it never has; -2: a newcomer


@dataclass(frozen=True)
class FedSem(Method, Explains):
    r"""$c_i = \arg\min_c \|\theta_i - m_c\|^2$ after local training from $m_{c_i}$; then $m_c$ is its members' mean.

    A centre without members in a round stays. A client that has never taken part is sent the largest cluster's model. A
    newcomer is sent the centres' mean, and belongs to the centre in whose direction its first training moves that.
    """

    clusters: Count = 5  # K, the number of centres
    layers: tuple[str, ...] = ("*",)  # names or patterns of the tensors by which models are compared
    origin = "learned"
    weighs = "each client is in the cluster whose model its own comes nearest to, at a distance that is not kept"

    def start(self, roster):
        theta = roster.theta[None].clone()
        return Server(theta, torch.full((len(roster),), -1, dtype=torch.int64, device=theta.device))

    def labels(self, server):
        """[N] int64 the cluster of each client; the largest for one that has never taken part."""
        seen = server.label[server.label >= 0]
        return torch.where(server.label < 0, torch.bincount(seen, minlength=1).argmax(), server.label)

    def send(self, roster, server, cohort):
        models = torch.cat([server.theta, server.theta.mean(0, keepdim=True)])
        label = torch.where(server.label == NEWCOMER, len(server.theta), self.labels(server))
        return Params(take(models, label[cohort]))

    def aggregate(self, roster, server, cohort, uploads):
        layout, centres = roster.layout, server.theta
        at = layout.index(layout.match(self.layers) & layout.trainable_names, centres.device)
        if roster.round == 0:
            label, count = self._first(roster, cohort, uploads.theta[:, at] - centres[:, at])
            centres = centres.expand(count, -1)
        else:
            label = nearest(uploads.theta[:, at], centres[:, at])
            new = server.label[cohort] == NEWCOMER
            label[new] = towards(uploads.theta[new][:, at], centres[:, at])
        return Server(cluster_means(label, uploads.theta, centres, layout), put(server.label, cohort, label))

    def _first(self, roster, cohort, moved):
        """[K] int64 the first round's clients in clusters, by how far their models moved: [K, m]; and how many are."""
        if self.clusters > len(cohort):
            warnings.warn(
                f"fedsem: clusters={self.clusters} is more than the clients of the first round, {len(cohort)}, so "
                "there are no more clusters than that; set fewer, or a higher participation",
                stacklevel=2,
            )
        draw = key(roster.seed, "centres", device=roster.tags.device)
        clusters = cluster(gram(moved), self.clusters, draw, roster.tags[cohort])
        first = torch.stack([roster.tags[cohort][clusters.label == c].min() for c in range(len(clusters.weights))])
        return first.argsort().argsort()[clusters.label], len(first)  # numbered by their members' names

    def add_clients(self, roster, server, newcomers):
        wide = super().add_clients(roster, server, newcomers)
        return wide._replace(label=put(wide.label, newcomers, torch.full_like(newcomers, NEWCOMER)))

    def relation(self, roster, server, cohort):
        seen, label = server.label >= 0, self.labels(server)
        rows = cluster_weights(label, seen | ~seen.any(), server.theta.dtype)
        if seen.any():
            crowd = torch.bincount(label[seen])
            rows[server.label == NEWCOMER] = (seen / crowd[label] / (crowd > 0).sum()).to(rows.dtype)
        return rows

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        theta = client.descend(received.theta)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"cluster": received, "own": state}


def towards(theta, centres):
    """[K] int64 the centre, of centres: [C, m], to which each of theta: [K, m] moved from their mean, by the cosine."""
    mean = centres.mean(0)
    moved, ways = theta - mean, centres - mean
    return cosine(moved @ ways.T, moved.norm(dim=1), ways.norm(dim=1)).argmax(1)
