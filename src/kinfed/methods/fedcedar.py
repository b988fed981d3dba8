"""FedCedar: models are clustered anew each round, and the centres mixed along their own graph (Wang et al., 2024)."""

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.func import vmap

from ..core.method import Method, Params
from ..core.seeding import fold, key, uniform
from ..core.tables import put, take
from ..core.trees import PerClient, Shared
from ..errors import RunError, UsageError
from ..ops.clustering import Clusters, count_distinct, distances, follow, kmeans
from ..ops.mixing import mix, mix_freely
from ..ops.similarity import cosine, gram
from ..ops.sparsify import prune

FEATURES = ("params", "centred", "delta", "head")
SIMILARITIES = ("relu", "shift", "softmax", "abs", "raw")
COLLAPSED = 0.01  # of the centres' spread


class Server(NamedTuple):
    """What the server remembers: of C clusters, the centres rather than the clients' models."""

    theta: Shared  # [C, d] the mixed centres
    graph: Shared  # [C, C] how much of each centre is in each mixed one: R^P
    label: PerClient  # [N] int64 whose mixed centre a client is sent; -1: the mean of all
    share: PerClient  # [N] how much of its centre a client's last upload is; 0 outside the last cohort
    centre: Shared  # [C, m] float64 the centres' features before mixing; [0, 0] unless the next round starts there
    objective: Shared  # [] sum of distances to the centres: the paper's J
    spread: Shared  # [] what mixing left of the distance of the centres to their mean, as a share
    warned: Shared  # [] bool, of mixing that leaves next to nothing


@dataclass(frozen=True)
class FedCedar(Method):
    r"""k-means of the cohort's models; $\hat V = R^P V$ with $R_{kl} \propto \mathrm{relu} \cos(v_k, v_l)$.

    Who was in the last cohort is sent its cluster's $\hat v_k$, everybody else the plain mean of all (Section 3.5). The
    paper's recipe, `steps=2`, `feature="params"` and `similarity="relu"`, mixes centres until they are nearly one, so
    it is not the default. Its ablations are settings: AS-1 is `clusters=0`, AS-2 `steps=0`, AS-3 `distribution="mean"`.
    """

    clusters: int = 5  # K; 0: every client of the cohort is a node of its own
    steps: int = 1  # P, how often the centres are mixed
    feature: str = "centred"  # what is clustered and compared: the "params", "centred" on the cohort's mean,
    #                          the "delta" to what was sent, or the "head"
    similarity: str = "softmax"  # how cosines become weights: "relu" clips at zero; "shift", "softmax", "abs" or "raw"
    tau: float = 0.1  # temperature of the softmax
    neighbours: int = 0  # others that a centre is mixed with, those most like it; 0: all
    floor: float = 0.0  # share that a centre keeps of itself at each step before the graph has its say
    centre: str = "mean"  # or "geometric_median", which minimises the paper's J
    init: str = "fresh"  # "warm": from the last round's centres, whose numbers the clusters keep
    memory: str = "previous_round"  # "last_seen": a client's cluster is remembered while it is absent
    distribution: str = "precise"  # "mean": everybody is sent the mean of the mixed centres
    restarts: int = 10  # of k-means
    origin = "learned"

    def __post_init__(self):
        if min(self.clusters, self.steps, self.neighbours) < 0 or self.restarts < 1:
            raise UsageError(
                "fedcedar: clusters, steps and neighbours must be zero or more, restarts at least 1; "
                f"got clusters={self.clusters}, steps={self.steps}, neighbours={self.neighbours}, "
                f"restarts={self.restarts}"
            )
        if self.tau <= 0 or not 0 <= self.floor <= 1:
            raise UsageError(
                f"fedcedar: tau must be positive and floor lie in [0, 1]; got tau={self.tau}, floor={self.floor}"
            )
        for name, known in (
            ("feature", FEATURES),
            ("similarity", SIMILARITIES),
            ("centre", ("mean", "geometric_median")),
            ("init", ("fresh", "warm")),
            ("memory", ("previous_round", "last_seen")),
            ("distribution", ("precise", "mean")),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"fedcedar: {name} must be one of {', '.join(known)}; got '{getattr(self, name)}'")
        if self.init == "warm" and not self.clusters:
            raise UsageError("fedcedar: init='warm' starts from the last clusters, and clusters=0 has none")
        if self.memory == "last_seen" and self.init != "warm":
            raise UsageError(
                "fedcedar: memory='last_seen' needs init='warm': fresh clusters are numbered anew in every round"
            )

    @property
    def remedy(self):
        if self.similarity != "raw":
            return super().remedy
        return "lower the learning rate, or use similarity='relu': raw cosines may have weights far from a mean's"

    def start(self, roster):
        if self.feature == "head" and not roster.layout.head:
            raise UsageError("fedcedar: feature='head', but the model has no linear layer that could be its head")
        theta, nothing = roster.theta[None], roster.theta.new_zeros(())
        nobody = theta.new_zeros(len(roster))
        forgotten = torch.full((len(roster),), -1, device=theta.device)
        none = torch.zeros(0, 0, dtype=torch.float64, device=theta.device)
        return Server(theta, theta.new_ones(1, 1), forgotten, nobody, none, nothing, nothing + 1, nothing > 0)

    def send(self, roster, server, cohort):
        return Params(self._deal(server, server.theta, cohort))

    def relation(self, roster, server, cohort):
        return self._deal(server, server.graph[:, server.label] * server.share, roster.everyone)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        said = {
            "clusters": torch.tensor(len(server.theta)),
            "cluster": roster.note(cohort, server.label[cohort].to(server.share.dtype)),
            "objective": server.objective,
            "spread": server.spread,
        }
        return super().diagnostics(roster, server, cohort, sent, uploads) | said

    def _deal(self, server, nodes, cohort):
        """[K, ...] the row of nodes: [C, ...] that is meant for each client, or their mean."""
        label = server.label[cohort]
        label = label if self.distribution == "precise" else torch.full_like(label, -1)
        nodes = torch.cat([nodes, nodes.mean(0, keepdim=True)])
        return take(nodes, label % len(nodes))  # -1 is the last row

    def aggregate(self, roster, server, cohort, uploads):
        if roster.round == 0 and self.clusters > len(cohort):
            warnings.warn(
                f"fedcedar: a round has {len(cohort)} clients, so there cannot be clusters={self.clusters}: "
                "every client is a cluster of its own; take fewer clusters or let more clients take part",
                stacklevel=2,
            )
        clusters, kept, inner = self._cluster(roster, server, cohort, uploads)
        alike = cosine(clusters.weights @ inner @ clusters.weights.T, eps=0.0)  # [C, C]
        graph = torch.linalg.matrix_power(self.connect(alike), self.steps)
        centres = mix(clusters.weights, uploads.theta, roster.layout) if self.clusters else uploads.theta
        theta = (mix_freely if self.similarity == "raw" else mix)(graph, centres, roster.layout)
        before = _spread(centres, roster.layout)
        spread = torch.where(before > 0, _spread(theta, roster.layout) / before, 1.0)
        collapsed = bool(spread < COLLAPSED) and self.distribution == "precise"
        if collapsed and not server.warned:
            warnings.warn(
                f"fedcedar: round {roster.round + 1}: mixing leaves {float(spread):.2g} of the distance between the "
                "centres, so that everybody is sent nearly the same mean; use feature='centred', "
                "similarity='softmax' with a small tau, steps=1 or a floor",
                stacklevel=2,
            )
        share = clusters.weights.sum(0).to(server.share.dtype)  # a client is in one cluster only
        return Server(
            theta=theta,
            graph=graph.to(theta.dtype),
            label=put(kept, cohort, clusters.label),
            share=put(torch.zeros_like(server.share), cohort, share),
            centre=self._centres(roster, server, cohort, uploads, clusters) if self.init == "warm" else server.centre,
            objective=clusters.distance.sum().to(theta.dtype),
            spread=spread,
            warned=server.warned | collapsed,
        )

    def connect(self, alike):
        """[C, C] the graph of the centres, rows summing to one, from their cosines: [C, C]."""
        itself = torch.eye(len(alike), dtype=alike.dtype, device=alike.device)
        alike = torch.where(itself > 0, itself, alike)  # also for a centre of length zero
        weights = {
            "relu": lambda: alike.clamp(min=0),
            "shift": lambda: (1 + alike) / 2,
            "softmax": lambda: (alike / self.tau).softmax(1),
            "abs": lambda: alike.abs(),
            "raw": lambda: alike,
        }[self.similarity]()
        weights = prune(weights, self.neighbours, alike)
        weights = weights / weights.sum(1, keepdim=True)
        if not torch.isfinite(weights).all():
            raise RunError(
                "fedcedar: the cosines of one centre sum to zero, so similarity='raw' cannot divide by them; use 'relu'"
            )
        return self.floor * itself + (1 - self.floor) * weights

    def _cluster(self, roster, server, cohort, uploads):
        """Clusters of the cohort, [N] labels of those whose number still means the same, and [K, K] inner products."""
        forgotten, count = torch.full_like(server.label, -1), len(cohort)
        warm = self.init == "warm" and len(server.centre) > 0
        features = self._features(roster, server, cohort, uploads, centred=warm)
        vectors = gram(_above(features, server.centre) if warm else features, torch.float64)
        inner = vectors.centred if self.feature == "centred" and not warm else vectors.inner[:count, :count]
        if not self.clusters:
            alone = torch.eye(count, dtype=torch.float64, device=cohort.device)
            return Clusters(alone.argmax(1), alone, torch.zeros_like(alone[0])), forgotten, inner
        apart, square = distances(vectors)[:count].split([count, len(vectors.lean) - count], dim=1)
        found = min(self.clusters, count_distinct(apart))
        if warm and found == len(server.centre):
            known = server.label if self.memory == "last_seen" else forgotten
            return follow(apart, square.T, medians=self._medians), known, inner
        start = key(roster.seed, "fedcedar", roster.round, device=roster.tags.device)
        like = apart.new_empty(self.restarts * found)
        lots = vmap(lambda mine: uniform(mine, like))(fold(start, roster.tags[cohort])) + 2**-24  # never 0
        lots = lots.T.view(self.restarts, found, -1)
        return kmeans(apart, found, lots, medians=self._medians), forgotten, inner

    @property
    def _medians(self):
        return self.centre == "geometric_median"

    def _features(self, roster, server, cohort, uploads, centred=True):
        """What is clustered and compared, [K, m] a layer; with or without the mean that "centred" takes off."""
        layout = roster.layout
        if self.feature == "head":
            head = frozenset(e.name for e in layout.entries if e.trainable and e.name in layout.head)
            yield uploads.theta[:, layout.index(head, uploads.theta.device)]
            return
        sent = self.send(roster, server, cohort).theta if self.feature == "delta" else None
        for layer in layout.layers:
            part = uploads.theta[:, layer.trainable]
            if self.feature == "delta":
                part = part.double() - sent[:, layer.trainable]
            if self.feature == "centred" and centred:
                part = part.double() - part.mean(0, dtype=torch.float64)
            yield part

    def _centres(self, roster, server, cohort, uploads, clusters):
        """[C, m] float64 features of the centres."""
        features = self._features(roster, server, cohort, uploads)
        return torch.cat([clusters.weights @ part.double() for part in features], 1)

    def train(self, client, state, received):
        return state, Params(client.descend(received.theta))

    def personalise(self, client, state, received):
        return {"tuned": Params(client.descend(received.theta)), "received": received}


def _above(parts, rows):
    """The parts of a table, [K, m] each, above those of rows: [C, d']."""
    at = 0
    for part in parts:
        yield torch.cat([part.double(), rows[:, at : at + part.shape[1]]])
        at += part.shape[1]


def _spread(nodes, layout):
    """[] root of the summed squared distances of nodes: [C, d] to their mean, over trainable entries."""
    return gram(nodes[:, layer.trainable] for layer in layout.layers).centred.trace().sqrt().to(nodes.dtype)
