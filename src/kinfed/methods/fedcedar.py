"""FedCedar: models are clustered anew each round, and the centres mixed along their own graph (Wang et al., 2024)."""

import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..core.method import Compared, Method, Params
from ..core.seeding import key
from ..core.settings import CountOrZero
from ..core.tables import put, take
from ..core.trees import PerClient, Shared
from ..ops.clustering import cluster
from ..ops.mixing import mix
from ..ops.similarity import cosine
from .parts.cluster_splits import likest
from .parts.cosine_weights import Relu, Softmax, spread_of
from .parts.described import Feature, described, named

COLLAPSED = 0.01  # of the centres' spread


class Server(NamedTuple):
    """The server's state: the centres of C clusters, rather than the clients' models."""

    theta: Shared  # [C, d] the mixed centres
    graph: Shared  # [C, C] the weight of each centre in each mixed one: R^P
    alike: Shared  # [C, C] the cosines of the centres, of which R was made
    label: PerClient  # [N] int64 the cluster whose mixed centre a client is sent; -1: the mean of all
    share: PerClient  # [N] the weight of a client's last upload in its centre; 0 outside the last cohort
    objective: Shared  # [] sum of distances to the centres: the paper's J
    spread: Shared  # [] the share of the centres' distance to their mean that mixing left
    warned: Shared  # [] bool, whether a warning about a collapse was given


@dataclass(frozen=True)
class FedCedar(Method):
    r"""k-means of the cohort's models; $\hat V = R^P V$, the rows of $R$ weights from $\cos(v_k, v_l)$ summing to one.

    A client of the last cohort is sent its cluster's $\hat v_k$, all others the mean of all (Section 3.5). The paper's
    recipe, `clusters=5`, `steps=2`, `feature="params"` and `similarity=Relu()`, mixes centres until they are nearly the
    same, so it is not the default. Ablations: AS-1 is `clusters=0`, AS-2 `steps=0`, AS-3 `distribution="mean"`.
    """

    clusters: CountOrZero = 0  # K, the number of clusters; 0: every client of the cohort is a node of its own
    steps: CountOrZero = 1  # P, how often the centres are mixed along their graph
    # of clients: how far models moved from the initial one, models, models minus their mean, or what models answer
    feature: Feature = "moved"
    similarity: Relu | Softmax = Softmax()  # how cosines of the centres become weights
    distribution: Literal["precise", "mean"] = "precise"  # "mean": all clients are sent the mean of the mixed centres
    origin = "learned"

    def start(self, roster):
        theta, nothing = roster.theta[None], roster.theta.new_zeros(())
        forgotten = torch.full((len(roster),), -1, device=theta.device)
        nobody = theta.new_zeros(len(roster))
        one = theta.new_ones(1, 1)
        return Server(theta, one, one, forgotten, nobody, nothing, nothing + 1, nothing > 0)

    def send(self, roster, server, cohort):
        return Params(self._deal(server, server.theta, cohort))

    def relation(self, roster, server, cohort):
        return self._deal(server, server.graph[:, server.label] * server.share, roster.everyone)

    def compared(self, roster, server):
        known = server.label >= 0  # in the last cohort
        alike = server.alike[server.label][:, server.label].masked_fill(~(known[:, None] & known), torch.nan)
        of = "" if self.clusters == 0 else ", of clusters"
        return Compared(named(self.feature) + of, alike)

    def _deal(self, server, nodes, cohort):
        """[K, ...] the row of nodes: [C, ...] for each client, or their mean."""
        label = server.label[cohort]
        label = label if self.distribution == "precise" else torch.full_like(label, -1)
        nodes = torch.cat([nodes, nodes.mean(0, keepdim=True)])
        return take(nodes, label % len(nodes))  # -1 is the last row

    def aggregate(self, roster, server, cohort, uploads):
        if roster.round == 0 and self.clusters > len(cohort):
            warnings.warn(
                f"fedcedar: a round has {len(cohort)} clients, fewer than clusters={self.clusters}; set fewer clusters",
                stacklevel=2,
            )
        vectors = described(self.feature, roster, uploads.theta)
        draw = key(roster.seed, "fedcedar", roster.round, device=roster.tags.device)
        clusters = cluster(vectors, self.clusters, draw, roster.tags[cohort])
        alike = cosine(clusters.weights @ vectors.inner @ clusters.weights.T, eps=0.0)  # [C, C]
        alike.fill_diagonal_(1)  # also for a centre of length zero
        graph = torch.linalg.matrix_power(self.similarity.weights(alike), self.steps)
        centres = mix(clusters.weights, uploads.theta, roster.layout) if self.clusters else uploads.theta
        theta = mix(graph, centres, roster.layout)
        before, left = spread_of(centres, roster.layout), spread_of(theta, roster.layout)
        spread = torch.where(before > 0, left / before, 1.0)
        collapsed = bool(spread < COLLAPSED) and self.feature != "moved" and self.distribution == "precise"
        if collapsed and not server.warned:
            warnings.warn(
                f"fedcedar: round {roster.round + 1}: mixing leaves {float(spread):.2g} of the distance between the "
                "centres, so all clients are sent nearly the same mean; use feature='moved' and similarity='softmax'",
                stacklevel=2,
            )
        label = put(torch.full_like(server.label, -1), cohort, clusters.label)
        share = put(torch.zeros_like(server.share), cohort, clusters.weights.sum(0).to(server.share.dtype))
        graph, alike, objective = (one.to(theta.dtype) for one in (graph, alike, clusters.distance.sum()))
        return Server(theta, graph, alike, label, share, objective, spread, server.warned | collapsed)

    def join(self, roster, server, newcomers, uploads):
        """A newcomer is sent the mixed centre towards which its first update led, from the mean of all."""
        mean, before = server.theta.mean(0), server.label[newcomers]
        label = likest(uploads.theta - mean, server.theta - mean, roster.layout)
        return server._replace(label=put(server.label, newcomers, torch.where(before < 0, label, before)))

    def diagnostics(self, roster, server, cohort, sent, uploads):
        return super().diagnostics(roster, server, cohort, sent, uploads) | {
            "clusters": torch.tensor(len(server.theta)),
            "cluster": roster.note(cohort, server.label[cohort].to(server.share.dtype)),
            "objective": server.objective,
            "spread": server.spread,
        }

    def train(self, client, state, received):
        return state, Params(client.descend(received.theta))

    def personalise(self, client, state, received):
        untuned = client.whole(received.theta)  # before tuning changes its personal part, if it has one
        return {"tuned": Params(client.whole(client.descend(received.theta))), "received": Params(untuned)}
