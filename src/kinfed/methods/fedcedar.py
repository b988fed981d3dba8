"""FedCedar: models are clustered anew each round, and the centres mixed along their own graph (Wang et al., 2024).

Differs: negative cosines, for which the paper's normalisation may give weights far outside [0, 1], count as zero.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.field_checks import Count, CountOrZero
from ..core.layout import Layout
from ..core.method import Compared, Method, Params, Roster
from ..core.mixins import Admits, Advises, Explains
from ..core.rows import put, take
from ..core.seeding import key
from ..core.trees import PerClient, Shared
from ..ops.clustering import Clusters, cluster, nearest
from ..ops.mixing import mix
from ..ops.similarity import cosine, gram

COLLAPSED = 0.01  # of the centres' spread


class Server(NamedTuple):
    """The server's state: the centres of C clusters, rather than the clients' models."""

    theta: Shared  # [C, d] the mixed centres
    graph: Shared  # [C, C] the weight of each centre in each mixed one: R^P
    cosines: Shared  # [C, C] the cosines of the centres, of which R was made
    label: PerClient  # [N] int64 the cluster whose mixed centre a client is sent; -1: the mean of all
    share: PerClient  # [N] the weight of a client's last upload in its centre; 0 outside the last cohort
    objective: Shared  # [] sum of distances to the centres: the paper's J
    spread: Shared  # [] the share of the centres' distance to their mean that mixing left
    warned: Shared  # [] bool, whether a warning about a collapse was given


@dataclass(frozen=True)
class FedCedar(Method, Explains, Advises, Admits):
    r"""k-means of the cohort's models; $\hat V = R^P V$ with $R_{kl} \propto \max(0, \cos(v_k, v_l))$ in rows of sum 1.

    A client of the last cohort is sent its cluster's $\hat v_k$, all others the mean of all (Section 3.5). Centres are
    means, so k-means minimises squared distances, not the printed sum of distances (Equation 1).
    """

    clusters: Count = 5  # K, the number of clusters
    steps: CountOrZero = 2  # P, how often the centres are mixed along their graph (Equation 2); 0: AS-2
    origin = "learned"
    grid: ClassVar = {"clusters": (3, 4, 5, 6, 7), "steps": (1, 2, 3, 4, 5)}  # Figure 4

    def start(self, roster):
        theta, nothing = roster.theta[None], roster.theta.new_zeros(())
        forgotten = torch.full((len(roster),), -1, device=theta.device)
        nobody = theta.new_zeros(len(roster))
        certain = theta.new_ones(1, 1)
        return Server(theta, certain, certain, forgotten, nobody, nothing, nothing + 1, nothing > 0)

    def send(self, roster, server, cohort):
        return Params(self.deal(server, server.theta, cohort))

    def relation(self, roster, server, cohort):
        return self.deal(server, server.graph[:, server.label] * server.share, roster.everyone)

    def similarity(self, roster, server):
        heard = server.label >= 0  # in the last cohort
        values = server.cosines[server.label][:, server.label].masked_fill(~(heard[:, None] & heard), torch.nan)
        return Compared("cosine of the centres of clusters of models", values)

    def deal(self, server: Server, nodes: Tensor, cohort: Tensor) -> Tensor:
        """[K, ...] the row of nodes: [C, ...] for each client, or their mean."""
        nodes = torch.cat([nodes, nodes.mean(0, keepdim=True)])
        return take(nodes, server.label[cohort] % len(nodes))  # -1 is the last row

    def cluster(self, roster: Roster, cohort: Tensor, theta: Tensor) -> tuple[Clusters, Tensor]:
        """The cohort's models theta: [K, d] in clusters, and the cosines [C, C] of their centres."""
        vectors = gram((theta[:, layer.trainable] for layer in roster.layout.layers), torch.float64)
        draw = key(roster.seed, "fedcedar", roster.round, device=roster.tags.device)
        clusters = cluster(vectors, self.clusters, draw, roster.tags[cohort])
        return clusters, cosine(clusters.weights @ vectors.inner @ clusters.weights.T)

    def aggregate(self, roster, server, cohort, uploads):
        if roster.round == 0 and self.clusters > len(cohort):
            warnings.warn(
                f"fedcedar: clusters={self.clusters} is more than the clients of a round, {len(cohort)}, so there are "
                "no more clusters than that; set fewer, or a higher participation",
                stacklevel=2,
            )
        clusters, cosines = self.cluster(roster, cohort, uploads.theta)
        cosines.fill_diagonal_(1)  # also for a centre of length zero
        rows = cosines.clamp(min=0)
        graph = torch.linalg.matrix_power(rows / rows.sum(1, keepdim=True), self.steps)
        centres = mix(clusters.weights, uploads.theta, roster.layout)
        theta = mix(graph, centres, roster.layout)
        before, left = spread_of(centres, roster.layout), spread_of(theta, roster.layout)
        spread = torch.where(before > 0, left / before, 1.0)
        collapsed = bool(spread < COLLAPSED)
        if collapsed and not server.warned:
            warnings.warn(
                f"fedcedar: round {roster.round + 1}: mixing leaves {float(spread):.2g} of the distance between the "
                "centres, so all clients are sent nearly the same mean; set fewer steps, or use kin, which compares "
                "how far models moved",
                stacklevel=2,
            )
        label = put(torch.full_like(server.label, -1), cohort, clusters.label)
        share = put(torch.zeros_like(server.share), cohort, clusters.weights.sum(0).to(server.share.dtype))
        graph, cosines, objective = (table.to(theta.dtype) for table in (graph, cosines, clusters.distance.sum()))
        return Server(theta, graph, cosines, label, share, objective, spread, server.warned | collapsed)

    def join(self, roster, server, newcomers, uploads):
        """A newcomer is sent the mixed centre to which its first model comes nearest, trained from the mean of all."""
        at, before = roster.layout.trainable_on(newcomers.device), server.label[newcomers]
        label = nearest(uploads.theta[:, at], server.theta[:, at])
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


def spread_of(nodes: Tensor, layout: Layout) -> Tensor:
    """[] root of the summed squared distances of nodes: [C, d] to their mean, over trainable entries."""
    parts = [nodes[:, layer.trainable] - nodes[:, layer.trainable].mean(0) for layer in layout.layers]
    return torch.stack([part.norm() for part in parts]).norm()
