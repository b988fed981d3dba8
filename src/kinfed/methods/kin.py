"""Kin: kinfed's own: each layer is mixed with those of clients whose models moved the same way from the first one.

FedAMP's idea without distances to tune, by the cosines that clustered federated learning compares: docs/methods/own.md.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ..core.client import Client
from ..core.field_checks import CountOrZero, In, NonNegative
from ..core.method import Roster
from ..core.mixins import Admits
from ..core.rows import active, put, take, weighted_mean
from ..core.trees import PerClient, Tree
from ..relations.movements import carry, clip, compare, credit_own, lengths_of, shorten
from ..relations.neighbourhoods import Drawn
from ..relations.relation import Relation, Weights
from .parts.graph_mixing import RelationMixing


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's model: the latest, and since then moved with those of its kin
    trained: PerClient  # [N] int64 how many times a client has trained


@dataclass(frozen=True)
class Kin(RelationMixing, Admits):
    r"""$u_i = \sum_j w_{ij} \theta_j$ with $w_{ij} \propto n_j e^{c_{ij} / \tau}$, layer by layer.

    $n_j$ counts training examples, and $c_{ij}$ is the cosine of $\theta_i - \theta_0$ and $\theta_j - \theta_0$, of
    how the models moved from the first one. Noise lowers these cosines, but not a client's with itself. So $c_{ii}$
    begins at the largest of the others, and comes near 1 with the examples that the client has trained on again. A
    longer movement than the middle one of a mixture counts as much less as it is longer. A client that does not take
    part moves with its kin that do. One that has never taken part is sent the mean by examples. A newcomer to a
    finished federation is compared by how its model, and how theirs, differ from that mean.
    """

    tau: Annotated[float, In("[1e-30, inf)")] = 0.1  # the temperature: the smaller, the more weight has who moved alike
    credit: NonNegative = 8.0  # examples, trained on again, after which half of a difference counts as a client's own
    clip: Annotated[float, In("(0, inf]")] = 1.0  # the longest that a movement counts, in middle ones; inf: no limit
    by_layer: bool = True  # whether each layer has weights of its own
    neighbours: CountOrZero = 0  # how many others are drawn for a client's mixture, by their weights; 0: all are mixed

    def start(self, roster: Roster) -> Tree:
        return Server(roster.copies(), torch.zeros_like(roster.sizes))

    def mark_seen(self, server: Tree) -> Tensor:
        return server.trained > 0

    def relate(self, roster: Roster, server: Tree, cohort: Tensor) -> Relation:
        moved, what = server.theta - roster.theta, "cosine of how far models moved"
        cosines, (rows, near, *_) = self.favour(roster, server, moved, cohort)
        lengths = lengths_of(roster.layout, moved, self.by_layer)  # [L, N]
        still = (lengths[:, cohort] == 0).all(0)
        guests = ((server.trained[cohort] == 0) & ~still).nonzero().squeeze(1)
        if len(guests):  # who joined a finished federation, and have trained from its mean
            moved = server.theta - weighted_mean(server.theta, self.mass(roster, server))
            cosines[:, guests], (rows[:, guests], lists, *_) = self.favour(roster, server, moved, cohort[guests])
            near = lists if near is None or lists is None else near.index_copy(0, guests, lists)
            what += "; of a newcomer, of how models differ from the members' mean"
        rows = clip(rows, lengths, near, self.clip)
        return Relation(Weights(rows if self.by_layer else rows[0], near), still, cosines, what)

    def favour(self, roster: Roster, server: Tree, moved: Tensor, cohort: Tensor) -> tuple[Tensor, Weights]:
        """[L, K, M] cosines of moved: [N, d] and weights by them, of everyone or of lists: [K, M]."""
        mass, heard, turns = self.mass(roster, server), active(self.mark_seen(server)), server.trained
        near, often = Drawn(self.neighbours, self.tau).find(roster, moved, mass, turns, cohort, roster.everyone)
        columns = roster.everyone if near is None else near
        again = ((turns[cohort] - 1).clamp(min=0) * roster.sizes[cohort]).to(moved.dtype)
        cosines = compare(roster.layout, take(moved, cohort), moved, near, self.by_layer)
        values = credit_own(cosines, cohort[:, None] == columns, heard[columns], again, self.credit)
        rows = self.weigh(server, values / self.tau + mass.log()[columns] + often, cohort, columns)
        return values, Weights(rows.nan_to_num().to(moved.dtype), near)  # NaN: of those that are sent the mean

    def weigh(self, server: Tree, logits: Tensor, cohort: Tensor, columns: Tensor) -> Tensor:
        """[L, K, M] weights of models for the cohort: [K], by logits: [L, K, M] of the clients of columns."""
        return logits.softmax(-1)

    def aggregate(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        present = torch.zeros_like(server.trained).index_fill(0, cohort, 1)
        after = server._replace(theta=put(server.theta, cohort, uploads.theta), trained=server.trained + present)
        absent = ((server.trained > 0) & (present == 0)).nonzero().squeeze(1)
        if not len(absent):
            return after
        change = uploads.theta - self.send(roster, server, cohort).theta
        return after._replace(theta=put(after.theta, absent, self.follow(roster, after, absent, cohort, change)))

    def follow(self, roster: Roster, server: Tree, absent: Tensor, cohort: Tensor, change: Tensor) -> Tensor:
        """[M, d] the models of those absent: [M], each moved with its kin by the cohort's change: [K, d].

        A client's own weight, against which those of the cohort count, is that of the share of clients in a round.
        """
        moved, layout, mass = server.theta - roster.theta, roster.layout, self.mass(roster, server)
        near, often = Drawn(self.neighbours, self.tau).find(roster, moved, mass, server.trained, absent, cohort)
        cosines = compare(layout, take(moved, absent), take(moved, cohort), near, self.by_layer)
        logits = (cosines.values - 1) / self.tau + mass.log()[cohort if near is None else cohort[near]] + often
        own_mass = (mass[absent] * len(cohort) / len(roster)).log().expand(*logits.shape[:2])[..., None]
        weights = torch.cat([own_mass, logits], -1).softmax(-1)[..., 1:]
        steps = lengths_of(layout, change, self.by_layer)  # [L, K]
        limit = self.clip * torch.minimum(cosines.length, steps.median(1, keepdim=True).values)
        weights = weights * shorten(steps[:, None] if near is None else steps[:, near], limit[..., None])
        return carry(server.theta, absent, weights, cohort, change, layout, near)

    def join(self, roster: Roster, server: Tree, newcomers: Tensor, uploads: Tree) -> Tree:
        """A newcomer has trained for a short time, from the mean: its model is compared, but weighs nothing."""
        return server._replace(theta=put(server.theta, newcomers, uploads.theta))

    def personalise(self, client: Client, state: Tree, received: Tree) -> dict[str, Tree]:
        return {"mixed": received, "own": state}  # of equals by validation, the one that more clients have made
