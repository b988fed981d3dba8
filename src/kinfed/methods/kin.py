"""Kin: kinfed's own: each layer is mixed with those of clients whose models moved the same way from the first one.

FedAMP's idea without distances to tune, by the cosines that clustered federated learning compares: docs/methods/own.md.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F

from ..core.field_checks import CountOrZero, In, NonNegative, Positive
from ..core.method import Compared, Params
from ..core.mixins import Admits
from ..core.rows import active, put, take
from ..core.seeding import fold, key
from ..core.trees import PerClient
from ..ops.mixing import mix, weighted_mean
from ..ops.movements import compare, lengths_of, middle, shorten
from ..ops.neighbours import Weights
from ..ops.sketch import draw_others, fold_models
from .bases import GraphMethod

TINY = 1e-30  # the least temperature: in float32, less would be infinite


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's model: the latest, and since then moved with those of its kin
    trained: PerClient  # [N] int64 how many times a client has trained


@dataclass(frozen=True)
class Kin(GraphMethod, Admits):
    r"""$u_i = \sum_j w_{ij} \theta_j$ with $w_{ij} \propto n_j e^{c_{ij} / \tau}$, layer by layer.

    $n_j$ counts training examples, and $c_{ij}$ is the cosine of $\theta_i - \theta_0$ and $\theta_j - \theta_0$, of
    how the models moved from the first one. Noise lowers these cosines, but not a client's with itself. So $c_{ii}$
    begins at the largest of the others, and comes near 1 with the examples that the client has trained on again. A
    longer movement than the middle one of a mixture counts as much less as it is longer. A client that does not take
    part moves with its kin that do. One that has never taken part is sent the mean by examples. A newcomer to a
    finished federation is compared by how its model, and how theirs, differ from that mean.
    """

    tau: Positive = 0.1  # the temperature: the smaller, the more weight has who moved the same way
    credit: NonNegative = 8.0  # examples, trained on again, after which half of a difference counts as a client's own
    clip: Annotated[float, In("(0, inf]")] = 1.0  # the longest that a movement counts, in middle ones; inf: no limit
    by_layer: bool = True  # whether each layer has weights of its own
    neighbours: CountOrZero = 0  # how many others are drawn for a client's mixture, by their weights; 0: all are mixed

    def start(self, roster):
        return Server(roster.copies(), torch.zeros_like(roster.sizes))

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
        there = torch.zeros_like(server.trained).index_fill(0, cohort, 1)
        after = server._replace(theta=put(server.theta, cohort, uploads.theta), trained=server.trained + there)
        absent = ((server.trained > 0) & (there == 0)).nonzero().squeeze(1)
        if not len(absent):
            return after
        change = uploads.theta - self.send(roster, server, cohort).theta
        return after._replace(theta=put(after.theta, absent, self._follow(roster, after, absent, cohort, change)))

    def join(self, roster, server, newcomers, uploads):
        """A newcomer has trained for a short time, from the mean: its model is compared, but weighs nothing."""
        return server._replace(theta=put(server.theta, newcomers, uploads.theta))

    def train(self, client, state, received):
        theta = client.descend(received.theta)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"mixed": received, "own": state}  # of equals by validation, the one that more clients have made

    def similarity(self, roster, server):
        alike, still = self._cosines(roster, server, self._movements(roster, server), roster.everyone, None)
        what, cosines = "cosine of how far models moved", alike.cosines
        guests = self._guests(server, roster.everyone, still)
        if len(guests):
            from_mean, _ = self._cosines(roster, server, self._differences(roster, server), guests, None)
            cosines[:, guests] = from_mean.cosines
            what += "; of a newcomer, of how models differ from the members' mean"
        return Compared(what, cosines.mean(0))

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
        return self, *server, roster.weights, roster.seed, cohort

    def _mix(self, roster, server, cohort):
        weights, still = self._attend(roster, server, cohort)
        mixed = weights.mix(server.theta, roster.layout)
        if still.any():
            mixed[still] = weighted_mean(server.theta, self._sizes(roster, server))
        return Params(mixed)

    def _sizes(self, roster, server):
        """[N] by how much those count who have taken part; all, as long as nobody has."""
        return (roster.weights * active(server.trained > 0)).to(server.theta.dtype)

    def _attend(self, roster, server, cohort):
        """The weights of the cohort's mixtures, and who is sent the mean instead: [K] bool."""
        made_of = self._weight_inputs(roster, server, cohort)
        return roster.memo.once("kin weights", made_of, lambda: self._weigh(roster, server, cohort))

    def _weigh(self, roster, server, cohort):
        moved = self._movements(roster, server)
        rows, lengths, near, still = self._favour(roster, server, moved, cohort)
        guests = self._guests(server, cohort, still)
        if len(guests):
            from_mean = self._favour(roster, server, self._differences(roster, server), cohort[guests])
            rows[:, guests] = from_mean[0]
            if near is not None:
                near = near.index_copy(0, guests, from_mean[2])
                lengths[:, guests] = self._cosines(roster, server, moved, cohort[guests], from_mean[2])[0].lengths
        rows = rows * shorten(lengths, self.clip * middle(rows, lengths))
        rows = rows / rows.sum(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        return Weights(rows if self.by_layer else rows[0], near), still

    def _movements(self, roster, server):
        """[N, d] how far models have moved from the first one."""
        return server.theta - roster.theta

    def _guests(self, server, cohort, still):
        """Places in the cohort of those who joined a finished federation and have trained: [M] int64."""
        return ((server.trained[cohort] == 0) & ~still).nonzero().squeeze(1)

    def _differences(self, roster, server):
        """[N, d] how models differ from the members' mean, by which such newcomers are compared."""
        return server.theta - weighted_mean(server.theta, self._sizes(roster, server))

    def _favour(self, roster, server, moved, cohort):
        """[L, K, M] weights by cosines of moved: [N, d], lengths, whose both are: [K, M], and who is still: [K]."""
        near, missed = self._lists(roster, server, moved, cohort, roster.everyone)
        alike, still = self._cosines(roster, server, moved, cohort, near)
        columns = roster.everyone if near is None else near  # [N], or [K, M]
        logits = (
            alike.cosines / max(self.tau, TINY) + self._sizes(roster, server).log()[columns] + missed
        )  # -inf: no weight
        rows = self._deal(server, logits, cohort, columns).nan_to_num()  # no number: of those that are sent the mean
        return rows.to(server.theta.dtype), alike.lengths, near, still

    def _deal(self, server, logits, cohort, columns):
        """[L, K, M] weights of models for the cohort: [K], by logits: [L, K, M] of the clients of columns."""
        return logits.softmax(-1)

    def _follow(self, roster, server, absent, cohort, change):
        """[M, d] the models of those absent: [M], each moved with its kin by the cohort's change: [K, d].

        A client's own weight, against which those of the cohort count, is that of the share of clients in a round.
        """
        moved, layout = self._movements(roster, server), roster.layout
        near, missed = self._lists(roster, server, moved, absent, cohort)
        alike = compare(layout, take(moved, absent), take(moved, cohort), near, self.by_layer)
        sizes = roster.weights.to(moved.dtype)
        logits = (
            (alike.cosines - 1) / max(self.tau, TINY) + sizes[cohort if near is None else cohort[near]].log() + missed
        )
        own = (sizes[absent] * len(cohort) / len(roster)).log().expand(*logits.shape[:2])[..., None]
        rows = torch.cat([own, logits], -1).softmax(-1)[..., 1:]
        step = lengths_of(layout, change, self.by_layer)  # [L, K]
        steps = step[:, None] if near is None else step[:, near]
        limit = self.clip * torch.minimum(alike.length, step.median(1, keepdim=True).values)
        rows = rows * shorten(steps, limit[..., None])
        rows = rows if self.by_layer else rows.expand(len(layout.layers), *rows.shape[1:])
        theta, buffers = take(server.theta, absent), ~layout.trainable_on(moved.device)
        if buffers.any():  # statistics become means, as a variance must not become negative
            change = torch.where(buffers, take(server.theta, cohort), change)
            kept = theta * buffers
            for layer, share in zip(layout.layers, rows.sum(-1), strict=True):
                kept[:, layer.at] *= share[:, None]
            theta = theta - kept
        return theta + mix(rows, change, layout, near)

    def _lists(self, roster, server, moved, receivers, senders):
        """[K, M] int64 whom of the senders: [N] receivers: [K] mix; and [K, M] logarithms of for how many each counts.

        A receiver among the senders is the first in its list. None and 0 if all are mixed.
        """
        if not 0 < self.neighbours < len(senders) - 1:
            return None, 0.0
        draw = key(roster.seed, "kin.sketch", device=moved.device)
        sketch = F.normalize(fold_models(moved, draw, roster.layout), eps=torch.finfo(moved.dtype).tiny)
        base, queries = self._sizes(roster, server).log()[senders], sketch[receivers] / max(self.tau, TINY)
        lots = fold(fold(key(roster.seed, "kin.lists", device=moved.device), roster.tags), server.trained)[receivers]
        tags, itself = roster.tags[senders], receivers if len(senders) == len(roster) else None
        others, missed = draw_others(queries, sketch[senders], base, self.neighbours, lots, tags, itself)
        if itself is None:
            return others, missed
        return torch.cat([receivers[:, None], others], 1), F.pad(missed, (1, 0))

    def _cosines(self, roster, server, moved, cohort, near):
        """How moved: [N, d] of the cohort compare with everyone's, and who of it has not moved: [K] bool.

        A client's cosine with itself is that of the nearest other, and comes near 1 with examples trained on again.
        """
        alike = compare(roster.layout, take(moved, cohort), moved, near, self.by_layer)
        columns = roster.everyone if near is None else near
        itself = cohort[:, None] == columns
        strangers = itself | ~active(server.trained > 0)[columns]
        nearest = alike.cosines.masked_fill(strangers, 0).amax(-1).clamp(min=0)  # [L, K]
        again = ((server.trained[cohort] - 1).clamp(min=0) * roster.sizes[cohort]).to(moved.dtype)
        sure = torch.where(again + self.credit > 0, again / (again + self.credit), 1.0)
        own = torch.where(alike.length > 0, nearest + (1 - nearest) * sure, 0.0)
        cosines = torch.where(itself, own[..., None], alike.cosines)
        return alike._replace(cosines=cosines), (alike.length == 0).all(0)
