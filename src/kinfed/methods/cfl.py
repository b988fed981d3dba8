"""CFL: clusters of clients, split in two when their updates disagree (Sattler et al., 2020)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.method import Compared, Method, Params
from ..core.settings import Count, CountOrZero
from ..core.tables import blank, put, take
from ..core.trees import PerClient, Shared
from ..ops.mixing import mix
from .parts.cluster_splits import Cosines, Lengths, cosines, likest


class Server(NamedTuple):
    """The server's state."""

    theta: Shared  # [C, d] one model a cluster
    label: PerClient  # [N] int64 each client's cluster
    change: PerClient  # [N, d] what is kept of each client's updates: their sum, or the latest
    seen: PerClient  # [N] bool, has taken part


@dataclass(frozen=True)
class CFL(Method):
    """A cluster splits in two where its members' updates disagree: `split` says when, and who goes where.

    The paper's rule is `Lengths()`, by thresholds on lengths of the latest updates; ours compares cosines of the
    updates summed over rounds. With partial participation a cluster is judged once all of its members have taken part.
    """

    split: Cosines | Lengths = Cosines()  # when a cluster splits, and where
    begin: CountOrZero = 1  # rounds before clusters may split
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
        change = put(server.change, cohort, self.split.remember(take(server.change, cohort), moved))
        seen = put(server.seen, cohort, torch.ones_like(cohort, dtype=torch.bool))
        label, parents = server.label.clone(), []
        for cluster in range(len(server.theta)):
            members = (server.label == cluster).nonzero().squeeze(1)
            parts = [members]
            if roster.round >= self.begin and len(members) > self.min_size and seen[members].all():
                parts = self._split(members, take(change, members), roster.layout)
            for part in parts:
                label[part] = len(parents)
                parents.append(cluster)
        # Every cluster moves by the mean update of its members in the cohort, and stays if there are none.
        member = torch.nn.functional.one_hot(label[cohort], len(parents)).T.to(moved.dtype)  # [C, K]
        theta = mix(member / member.sum(1, keepdim=True).clamp(min=1), moved, roster.layout)
        return Server(theta.add_(server.theta[parents]), label, change, seen)

    def _split(self, members, change, layout):
        """The members as one group or two; change: [K, d] is what is kept of their updates."""
        first = self.split.cut(change, layout)
        if first is None:
            return [members]
        first = first.to(members.device)
        return sorted((members[first], members[~first]), key=lambda part: int(part[0]))

    def add_clients(self, roster, server, newcomers):
        """A newcomer is put into the largest cluster, from which its updates may split it."""
        wide, known = super().add_clients(roster, server, newcomers), roster.others(newcomers)
        crowd = torch.bincount(server.label)[server.label]  # [N - M] how many are in each one's cluster
        by_name = roster.tags[known].argsort()  # so that of equal clusters the same is taken in any order of clients
        largest = server.label[by_name][crowd[by_name].argmax()]
        return wide._replace(label=put(wide.label, newcomers, largest.expand(len(newcomers))))

    def join(self, roster, server, newcomers, uploads):
        """A newcomer's first update says whose it is most like, on average over a cluster's members: there it stays."""
        moved = uploads.theta - self.send(roster, server, newcomers).theta
        label = likest(moved, server.change, roster.layout, server.label.masked_fill(~server.seen, -1))
        label = torch.where(server.seen[newcomers], server.label[newcomers], label)
        return server._replace(
            label=put(server.label, newcomers, label), seen=server.seen.index_fill(0, newcomers, True)
        )

    def relation(self, roster, server, cohort):
        same = (server.label[:, None] == server.label[None, :]).to(server.theta.dtype)
        return same / same.sum(1, keepdim=True)

    def compared(self, roster, server):
        return Compared("cosine of updates", cosines(server.change, roster.layout))

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        theta = client.descend(received.theta)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"cluster": received, "own": state}
