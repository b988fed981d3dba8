"""CFL: clusters of clients, split in two when their updates disagree (Sattler et al., 2020).

Differs: `eps1` and `eps2`, for which the paper gives no values, are those of its authors' notebook; members count
equally in their cluster's mean, as in that notebook, where the paper weights them by their examples; and `gamma`, which
the paper asks for without a value, is off.
"""

import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.field_checks import Count, CountOrZero, NonNegative
from ..core.layout import Layout
from ..core.method import Compared, Method, Params
from ..core.mixins import Admits, Explains
from ..core.rows import blank, put, take
from ..core.trees import PerClient, Shared
from ..ops.clustering import cluster_means, cluster_weights
from ..ops.mixing import weighted_mean
from ..ops.similarity import cosine, gram, inner_by_layer

PATIENCE = 10  # rounds after which it is said that nothing was split yet


class Server(NamedTuple):
    """The server's state."""

    theta: Shared  # [C, d] one model a cluster
    label: PerClient  # [N] int64 each client's cluster
    change: PerClient  # [N, d] each client's latest update
    seen: PerClient  # [N] bool, has taken part


@dataclass(frozen=True)
class CFL(Method, Explains, Admits):
    r"""A cluster splits where $\|\mathrm{mean}\,\Delta_i\| < \varepsilon_1$ and $\max \|\Delta_i\| > \varepsilon_2$.

    The cut minimises the largest cosine of two updates across it (Algorithm 1), which is single linkage. With partial
    participation a cluster is judged once all of its members have taken part, by the latest update of each.
    """

    eps1: NonNegative = 0.4  # a cluster may split if its mean update is shorter than this
    eps2: NonNegative = 1.6  # and one member's update is longer than this
    linkage: Literal["single", "complete"] = "single"  # how clients are merged before the cut; public codes: complete
    gamma: NonNegative = 0.0  # a split needs sqrt((1 - largest cosine across the cut) / 2) above this
    begin: CountOrZero = 0  # rounds before clusters may split
    min_size: Count = 1  # a cluster with this many members or fewer is not split
    origin = "learned"

    def start(self, roster):
        theta = roster.copies()
        label = torch.zeros(len(roster), dtype=torch.int64, device=theta.device)
        return Server(theta[:1], label, torch.zeros_like(theta), torch.zeros_like(label, dtype=torch.bool))

    def send(self, roster, server, cohort):
        return Params(take(server.theta, server.label[cohort]))

    def aggregate(self, roster, server, cohort, uploads):
        sent = self.send(roster, server, cohort).theta
        moved = torch.sub(uploads.theta, sent, out=blank(len(cohort), sent))
        change = put(server.change, cohort, moved)
        seen = server.seen.index_fill(0, cohort, True)
        label, parents = server.label.clone(), []
        for cluster in range(len(server.theta)):
            members = (server.label == cluster).nonzero().squeeze(1)
            parts = [members]
            if roster.round >= self.begin and len(members) > self.min_size and seen[members].all():
                parts = self.split(members, take(change, members), roster.layout)
            for part in parts:
                label[part] = len(parents)
                parents.append(cluster)
        self._warn(roster, len(server.theta), len(parents), change)
        # Every cluster moves by the mean update of its members in the cohort, and stays if there are none.
        theta = server.theta[parents]
        theta += cluster_means(label[cohort], moved, torch.zeros_like(theta), roster.layout)
        return Server(theta, label, change, seen)

    def split(self, members, change, layout):
        """The members: [K] as one group or two; change: [K, d] is the latest update of each."""
        mean, longest = lengths(change, layout)
        if mean >= self.eps1 or longest <= self.eps2:
            return [members]
        values = cosines(change, layout).cpu().numpy()
        if not np.isfinite(values).all():  # updates too long to be compared
            return [members]
        first = halves(values, self.linkage)
        if np.sqrt(max(0.0, 1 - values[np.ix_(first, ~first)].max()) / 2) <= self.gamma:
            return [members]
        first = torch.from_numpy(first).to(members.device)
        return sorted((members[first], members[~first]), key=lambda part: int(part[0]))

    def _warn(self, roster, before, now, change):
        """Says once in a run that thresholds do not fit its updates: that nothing was split, or everybody."""
        if 2 < len(roster) == now > before:
            what = "all clients are alone now, which is Local from here on"
        elif now == 1 and roster.round == self.begin + PATIENCE - 1 and len(roster) > self.min_size:
            what = f"{PATIENCE} rounds have split nothing, which is FedAvg so far"
        else:
            return
        mean, longest = lengths(change, roster.layout)
        warnings.warn(
            f"cfl: round {roster.round + 1}: {what}; a split needs a mean update shorter than eps1={self.eps1:g} (it "
            f"is {mean:.2g}) and one longer than eps2={self.eps2:g} (the longest is {longest:.2g}): set both to fit "
            "this data, or use kin, which has no thresholds",
            stacklevel=2,
        )

    def add_clients(self, roster, server, newcomers):
        """A newcomer is put into the largest cluster, from which its updates may split it."""
        wide, members = super().add_clients(roster, server, newcomers), roster.others(newcomers)
        crowd = torch.bincount(server.label)[server.label]  # [N - M] how many are in each one's cluster
        by_name = roster.tags[members].argsort()  # so that of equal clusters the same is taken in any order of clients
        largest = server.label[by_name][crowd[by_name].argmax()]
        return wide._replace(label=put(wide.label, newcomers, largest.expand(len(newcomers))))

    def join(self, roster, server, newcomers, uploads):
        """A newcomer's first update says whose it is most like, on average over a cluster's members: there it stays."""
        moved = uploads.theta - self.send(roster, server, newcomers).theta
        products = inner_by_layer(moved, server.change, roster.layout).sum(0)
        rows, columns = (t[:, roster.layout.trainable_on(t.device)].norm(dim=1) for t in (moved, server.change))
        values = cosine(products, rows, columns)  # [M, N]
        mean = [values[:, server.seen & (server.label == c)].mean(1) for c in range(len(server.theta))]
        label = torch.stack(mean).nan_to_num(-torch.inf).argmax(0)  # NaN is the mean of nobody
        label = torch.where(server.seen[newcomers], server.label[newcomers], label)
        return server._replace(
            label=put(server.label, newcomers, label), seen=server.seen.index_fill(0, newcomers, True)
        )

    def relation(self, roster, server, cohort):
        members = torch.zeros(len(server.theta)).to(server.label).index_add(0, server.label, server.seen.long())
        counted = server.seen | (members[server.label] == 0)  # in a cluster of which nobody has trained, all count
        return cluster_weights(server.label, counted, server.theta.dtype)

    def similarity(self, roster, server):
        return Compared("cosine of updates", cosines(server.change, roster.layout))

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        theta = client.descend(received.theta)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"cluster": received, "own": state}


def lengths(change: Tensor, layout: Layout) -> tuple[float, float]:
    """How long the mean of updates: [K, d] is, and the longest of them."""
    mean = weighted_mean(change, torch.ones(len(change), device=change.device))
    longest = torch.stack([change[:, layer.trainable].norm(dim=1) for layer in layout.layers]).norm(dim=0).max()
    return float(mean[layout.trainable_on(change.device)].norm()), float(longest)


def cosines(change: Tensor, layout: Layout) -> Tensor:
    """[K, K] of clients' updates: [K, d]; 0 with one that has none."""
    return cosine(gram(change[:, layer.trainable] for layer in layout.layers).inner)


def halves(values: np.ndarray, linkage: str) -> np.ndarray:
    """[K] bool one of the two groups that hierarchical clustering by cosines, values: [K, K], merges last."""
    from scipy.cluster import hierarchy  # here, as it would add to every start
    from scipy.spatial.distance import squareform

    tree = hierarchy.linkage(squareform(1 - values, checks=False), linkage)
    return hierarchy.cut_tree(tree, 2)[:, 0] == 0
