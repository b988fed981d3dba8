"""Centres: shared parts of methods that give each cluster of clients one model, which its members train."""

import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.client import Client
from ...core.graph import Origin
from ...core.method import Compared, Method, Params, Roster
from ...core.seeding import key
from ...core.settings import Count
from ...core.tables import put, take
from ...core.trees import PerClient, Shared, Tree
from ...ops.clustering import cluster
from ...ops.mixing import mix
from ...ops.similarity import gram
from .cluster_splits import Cosines, cosines, likest


class Server(NamedTuple):
    """The server's state."""

    theta: Shared  # [C, d] one model a cluster
    label: PerClient  # [N] int64 each client's cluster when it last took part; -1: it never has
    change: PerClient  # [N, d] the sum of each client's updates, as long as they may divide a cluster


@dataclass(frozen=True)
class Centres(Method):
    """The server half: one model at first, then one for each cluster, the mean of what its members trained.

    Which cluster a client of the cohort is in says `assign`. A cluster without members in a round keeps its model. With
    `clusters` they come from k-means of the clients' updates, once so many clients have taken part. Without, a cluster
    is cut in two as often as its members' updates, summed over rounds, disagree: see `Cosines`.
    """

    clusters: Count | None = None  # how many, all made at once; None: as many as updates show from round to round
    uniform: bool = False  # all clients have the same weight in their cluster, however many examples they have
    origin: ClassVar[Origin] = "learned"

    @abstractmethod
    def assign(self, roster: Roster, server: Tree, uploads: Tree) -> Tensor:
        """[K] int64 the clusters of a cohort that sent uploads: [K, ...]."""

    def start(self, roster: Roster) -> Tree:
        if self.clusters and self.clusters > len(roster):
            warnings.warn(
                f"{type(self).__name__}: clusters={self.clusters} is more than there are clients, {len(roster)}, so "
                "some have no member; set fewer, or leave it out: then as many are made as updates show",
                stacklevel=2,
            )
        theta = roster.copies()
        label = torch.full((len(roster),), -1, dtype=torch.int64, device=theta.device)
        return Server(theta[:1], label, torch.zeros_like(theta))

    def join(self, roster: Roster, server: Tree, newcomers: Tensor, uploads: Tree) -> Tree:
        """A newcomer's first update says whose it is most like, on average over a cluster's members: there it stays."""
        before = server.label[newcomers]
        moved = uploads.theta - take(server.theta, self.labels(server)[newcomers])
        label = likest(moved, server.change, roster.layout, server.label)
        return server._replace(label=put(server.label, newcomers, torch.where(before < 0, label, before)))

    def divides(self, server: Tree) -> bool:
        """Whether updates may still divide clients into more clusters."""
        return self.clusters is None or len(server.theta) == 1 < self.clusters

    def aggregate(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        theta, trained = server.theta, uploads.theta
        now = self.assign(roster, server, uploads)
        label, change = put(server.label, cohort, now), server.change
        if self.divides(server):
            change = put(change, cohort, take(change, cohort) + trained - theta[now])
            parts = self.divided(roster, label, change)
            theta = theta[torch.stack([label[part[0]] for part in parts])]
            label = label.clone()
            for c, part in enumerate(parts):
                label[part] = c
        weights = torch.ones_like(cohort) if self.uniform else roster.sizes[cohort]
        member = F.one_hot(label[cohort], len(theta)).T.to(trained.dtype) * weights  # [C, K]
        total = member.sum(1, keepdim=True)
        mean = mix(member / total.clamp(min=1), trained, roster.layout)
        return Server(torch.where(total > 0, mean, theta), label, change)

    def divided(self, roster: Roster, label: Tensor, change: Tensor) -> list[Tensor]:
        """The clusters of clients that have taken part, as ids, once those of label: [N] are divided by change: [N, d].

        Each is in the order of its members' names, and so are they: by the first of each.
        """
        by_name = roster.tags.argsort()
        parts = [by_name[label[by_name] == c] for c in label[label >= 0].unique()]
        if self.clusters is None:
            parts = [part for whole in parts for part in agreeing(whole, change, roster)]
        elif len(parts[0]) >= self.clusters:  # there is one
            tags, moved = roster.tags[parts[0]], take(change, parts[0])
            vectors = gram(moved[:, layer.trainable] for layer in roster.layout.layers)
            found = cluster(vectors, self.clusters, key(roster.seed, "centres", device=tags.device), tags).label
            parts = [parts[0][found == c] for c in found.unique()]
        return sorted(parts, key=lambda part: int(roster.tags[part[0]]))

    def labels(self, server: Tree) -> Tensor:
        """[N] int64 the cluster of each client; the largest for one that has never taken part."""
        seen = server.label[server.label >= 0]
        return torch.where(server.label < 0, torch.bincount(seen, minlength=1).argmax(), server.label)

    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor | None:
        label = self.labels(server)
        counts = (server.label >= 0) | (server.label < 0).all()  # who has no part in any model has no weight
        weights = torch.ones_like(label) if self.uniform else roster.sizes
        rows: Tensor = (label[:, None] == label) * counts * weights.to(server.theta.dtype)
        return rows / rows.sum(1, keepdim=True)

    def compared(self, roster: Roster, server: Tree) -> Compared | None:
        return Compared("cosine of updates", cosines(server.change, roster.layout)) if self.divides(server) else None

    def init_client(self, client: Client) -> Tree:
        return Params(client.model.theta)


def agreeing(ids: Tensor, change: Tensor, roster: Roster) -> list[Tensor]:
    """Clients ids: [M] in groups whose summed updates, change: [N, d], agree: cut in two as long as CFL would."""
    first = Cosines().cut(take(change, ids), roster.layout) if len(ids) > 1 else None
    if first is None:
        return [ids]
    first = first.to(ids.device)
    return [*agreeing(ids[first], change, roster), *agreeing(ids[~first], change, roster)]
