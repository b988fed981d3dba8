"""Kin: kinfed's own: each layer is mixed with those of clients whose models moved the same way from the first one.

FedAMP's idea without distances to tune, by the cosines that clustered federated learning compares: docs/methods/own.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..core.field_checks import CountOrZero, Positive, Share
from ..core.method import Compared, Params
from ..core.mixins import Admits
from ..core.rows import active, blank, put, take
from ..core.seeding import key
from ..core.trees import PerClient
from ..ops.mixing import weighted_mean
from ..ops.neighbours import Weights
from ..ops.similarity import inner_by_layer, inner_listed
from ..ops.sketch import candidates, fold_models
from .bases import GraphMethod


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's latest model
    moved: PerClient  # [N, d] m: how far its models were from the first one, the last and `memory` of those before
    seen: PerClient  # [N] bool, has taken part


@dataclass(frozen=True)
class Kin(GraphMethod, Admits):
    r"""$u_i = \sum_j w_{ij} \theta_j$ with $w_{ij} \propto n_j e^{\cos(m_i, m_j) / \tau}$, layer by layer.

    $n_j$ counts training examples. $m_i \leftarrow \beta m_i + \theta_i - \theta_0$ is how far client $i$'s models
    moved from the first one, $\theta_0$, with less of earlier rounds. Only models of clients that have taken part are
    mixed; one that has not, or that has not moved, is sent their mean by examples. Training starts from the mixture.
    A newcomer to a finished federation is compared by how its model, and how theirs, differ from that mean.
    """

    tau: Positive = 0.1  # the temperature: the smaller, the more weight has who moved the same way
    own: Share | None = None  # a client's weight for its own model; by default by the same rule as the others'
    share: Share = 1.0  # of the way from a client's own model to its mixture, where local training starts
    memory: Share = 0.5  # how much a movement counts a round later; 0: only the last one is compared
    by_layer: bool = True  # whether each layer has weights of its own
    neighbours: CountOrZero = 30  # how many others are mixed for a client, those that moved most alike; 0: all

    def start(self, roster):
        theta = roster.copies()
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        return Server(theta, torch.zeros_like(theta), nobody)

    def send(self, roster, server, cohort):
        return roster.memo.once(
            "kin mixed", self._weight_inputs(roster, server, cohort), lambda: self._mix(roster, server, cohort)
        )

    def graph(self, roster, server, cohort):
        weights, still = self._attend(roster, server, cohort)
        graph = weights.dense(len(roster))
        if still.any():
            sizes = self._sizes(roster, server)
            graph = graph.masked_fill(still[:, None], 0) + still[:, None] * (sizes / sizes.sum())
        return graph

    def aggregate(self, roster, server, cohort, uploads):
        before, moved = take(server.moved, cohort), blank(len(cohort), uploads.theta)
        for now, old, new in zip(uploads.theta, before, moved, strict=True):  # row by row, while it is in the cache
            torch.sub(now, roster.theta, out=new).add_(old, alpha=self.memory)
        return Server(
            theta=put(server.theta, cohort, uploads.theta),
            moved=put(server.moved, cohort, moved),
            seen=server.seen.index_fill(0, cohort, True),
        )

    def join(self, roster, server, newcomers, uploads):
        """A newcomer has trained for a short time, from the mean: its model is compared, but weighs nothing."""
        return super().join(roster, server, newcomers, uploads)._replace(seen=server.seen)

    def train(self, client, state, received):
        theta = client.descend(torch.lerp(state.theta, received.theta, self.share))
        return Params(theta), Params(theta)

    def similarity(self, roster, server):
        alike, still = self._cosines(roster, server.moved, roster.everyone, None)
        what = "cosine of how far models moved, smoothed"
        guests = self._guests(server, roster.everyone, still)
        if len(guests):
            alike[:, guests], _ = self._cosines(roster, self._differences(roster, server), guests, None)
            what += "; of a newcomer, of how models differ from the members' mean"
        return Compared(what, alike.mean(0))

    def diagnostics(self, roster, server, cohort, sent, uploads):
        weights, still = self._attend(roster, server, roster.everyone)
        rows = weights.rows.view(-1, *weights.rows.shape[-2:])  # [L, N, M], without a table [N, N]
        itself = roster.everyone[:, None] == (roster.everyone if weights.near is None else weights.near)
        mean = self._sizes(roster, server) / self._sizes(roster, server).sum()
        own = torch.where(still, mean, (rows * itself).sum(2).mean(0))
        mixed = torch.where(still, torch.special.entr(mean).sum().exp(), torch.special.entr(rows).sum(2).exp().mean(0))
        return super().diagnostics(roster, server, cohort, sent, uploads) | {
            "own weight": own,
            "clients mixed": mixed,  # as many as have this entropy at equal weights
        }

    def _weight_inputs(self, roster, server, cohort):
        """All that weights and mixtures are made of."""
        return self, server.theta, server.moved, server.seen, roster.sizes, roster.seed, cohort

    def _mix(self, roster, server, cohort):
        weights, still = self._attend(roster, server, cohort)
        mixed = weights.mix(server.theta, roster.layout)
        if still.any():
            mixed[still] = weighted_mean(server.theta, self._sizes(roster, server))
        return Params(mixed)

    def _sizes(self, roster, server):
        """[N] training examples of those who have taken part; of all, as long as nobody has."""
        return (roster.sizes * active(server.seen)).to(server.theta.dtype)

    def _attend(self, roster, server, cohort):
        """The weights of the cohort's mixtures, and who is sent the mean instead: [K] bool."""
        made_of = self._weight_inputs(roster, server, cohort)
        return roster.memo.once("kin weights", made_of, lambda: self._weigh(roster, server, cohort))

    def _weigh(self, roster, server, cohort):
        rows, near, still = self._favour(roster, server, server.moved, cohort)
        guests = self._guests(server, cohort, still)
        if len(guests):
            rows[:, guests], listed, _ = self._favour(roster, server, self._differences(roster, server), cohort[guests])
            near = near if near is None else near.index_copy(0, guests, listed)
        return Weights(rows if self.by_layer else rows[0], near), still

    def _guests(self, server, cohort, still):
        """Places in the cohort of those who joined a finished federation and have trained: [M] int64."""
        return (~server.seen[cohort] & ~still).nonzero().squeeze(1)

    def _differences(self, roster, server):
        """[N, d] how models differ from the members' mean, by which such newcomers are compared."""
        return server.theta - weighted_mean(server.theta, self._sizes(roster, server))

    def _favour(self, roster, server, moved, cohort):
        """[L, K, M] weights by cosines of moved: [N, d], whose they are: [K, M], and who has not moved: [K] bool."""
        near = self._nearest(roster, server, moved, cohort)
        columns = roster.everyone if near is None else near  # [N], or [K, M]
        alike, still = self._cosines(roster, moved, cohort, near)  # [L, K, M], [K]
        tau = max(self.tau, 1e-30)  # in float32, less would be infinite
        logits = alike / tau + self._sizes(roster, server).log()[columns]  # minus infinity: no weight
        if self.own is None:
            rows = logits.softmax(-1)
        else:
            itself = cohort[:, None] == columns
            others = logits.masked_fill(itself, -torch.inf).softmax(-1).nan_to_num()  # none, if there is no other
            rows = (1 - self.own) * others
            rows = torch.where(itself, 1 - rows.sum(-1, keepdim=True), rows)
        return rows.nan_to_num().to(server.theta.dtype), near, still  # no number: of those that are sent the mean

    def _nearest(self, roster, server, moved, cohort):
        """[K, M] int64 clients that are mixed, itself and then its nearest by sketches of movements; None for all."""
        if not 0 < self.neighbours < len(roster) - 1:
            return None
        draw = key(roster.seed, "kin.sketch", device=moved.device)
        sketch = F.normalize(fold_models(moved, draw, roster.layout), eps=torch.finfo(moved.dtype).tiny)
        others = candidates(sketch[cohort], sketch, cohort, self.neighbours, active(server.seen))
        return torch.cat([cohort[:, None], others], 1)

    def _cosines(self, roster, moved, cohort, near):
        """[L, K, M] cosines of movements, [1, K, M] of whole models; and who of the cohort has not moved: [K] bool."""
        rows, layout = take(moved, cohort), roster.layout
        if near is not None:
            inner, square = inner_listed(rows, moved, near, layout)  # [L, K, M]
            own = square[..., 0]  # a list begins with its owner
        elif rows is moved:
            inner = inner_by_layer(rows, moved, layout)
            own = square = inner.diagonal(dim1=1, dim2=2)
        else:
            inner = inner_by_layer(rows, moved, layout)
            square = torch.stack([moved[:, layer.trainable].norm(dim=1).square() for layer in layout.layers])  # [L, N]
            own = square[:, cohort]
        if not self.by_layer:
            inner, square, own = (part.sum(0, keepdim=True) for part in (inner, square, own))
        columns = square.sqrt() if near is not None else square.sqrt()[:, None]
        length = own.sqrt()[..., None] * columns
        alike = torch.where(length > 0, inner / length, 0.0).clamp(-1, 1)
        return alike, (own == 0).all(0)
