"""Kin: kinfed's own: each layer is mixed with those of clients whose models moved the same way from the first one.

FedAMP's idea without distances to tune, by the cosines that clustered federated learning compares: docs/methods/own.md.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ..core.field_checks import CountOrZero, In, NonNegative
from ..core.method import Roster
from ..core.mixins import Admits
from ..core.rows import active, put, subtract, take, zeros
from ..core.trees import PerClient, Tree
from ..relations.movements import (
    Cosines,
    carry,
    clip,
    compare,
    compare_movements,
    credit_own,
    lengths_of,
    shorten,
)
from ..relations.neighbourhoods import Drawn, Sketches, renew_by_cosine, sketch_rows, start_sketches
from ..relations.relation import Relation, Weights
from .parts.graph_mixing import RelationMixing

BLOCK = 1 << 10  # clients whose models are moved at once, where there may be very many
FEW = 8  # clients of a cohort for each neighbour, up to which all of them are mixed: a product takes less time


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's model: the latest, and since then moved with those of its kin
    trained: PerClient  # [N] int64 how many times a client has trained
    sketch: Sketches | tuple[()]  # of how far each model moved, by which lists are drawn; () without lists


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

    sparse = True

    def start(self, roster):
        if not self.neighbours:
            return Server(roster.copies(), torch.zeros_like(roster.sizes), ())
        # A client that has never trained takes no memory, as nobody reads its row.
        return Server(zeros(len(roster), roster.theta), torch.zeros_like(roster.sizes), start_sketches(roster))

    def mark_seen(self, server):
        return server.trained > 0

    def mean(self, roster, server, scale=1.0):
        if self.neighbours and not server.trained.any():  # nobody has a row
            return roster.theta * scale
        return super().mean(roster, server, scale)

    def relate(self, roster, server, cohort):
        if not 0 < self.neighbours < len(roster) - 1:
            return self.relate_moved(roster, server, cohort)
        moved = server.sketch.rows[cohort].any(1)  # whoever has not is sent the mean, and no list is drawn for it
        return self.relate_moved(roster, server, cohort[moved]).spread(cohort, moved, len(roster))

    def relate_moved(self, roster: Roster, server: Tree, cohort: Tensor) -> Relation:
        """The same, and in lists nobody of the cohort is still at the first model."""
        (cosines, (rows, near, *_)), what = self.favour(roster, server, cohort), "cosine of how far models moved"
        still = (cosines.length == 0).all(0)
        guests = ((server.trained[cohort] == 0) & ~still).nonzero().squeeze(1)
        values, lengths = cosines.values, cosines.others
        if len(guests):  # who joined a finished federation, and have trained from its mean
            origin = self.mean(roster, server)
            theirs, (rows[:, guests], lists, *_) = self.favour(roster, server, cohort[guests], origin)
            values[:, guests] = theirs.values
            if near is not None and lists is not None:
                near, lengths = near.index_copy(0, guests, lists), lengths.index_copy(1, guests, theirs.others)
            what += "; of a newcomer, of how models differ from the members' mean"
        rows = clip(rows, lengths, self.clip)
        return Relation(Weights(rows if self.by_layer else rows[0], near), still, values, what)

    def favour(
        self, roster: Roster, server: Tree, cohort: Tensor, origin: Tensor | None = None
    ) -> tuple[Cosines, Weights]:
        """Cosines of how models moved from an origin: [d], by default the first, and [L, K, M] weights by them."""
        theta, sketch, origin = server.theta, server.sketch, roster.theta if origin is None else origin
        mass, heard, turns = self.mass(roster, server), active(self.mark_seen(server)), server.trained
        near: Tensor | None = None
        often: Tensor | float = 0.0
        if self.neighbours:
            if origin is not roster.theta:
                sketch = Sketches(sketch.rows - sketch_rows(roster, (origin - roster.theta)[None]), None)
            near, often = Drawn(self.neighbours, self.tau).find(roster, sketch, mass, turns, cohort, roster.everyone)
            if near is None and isinstance(sketch, Sketches):  # who has never trained has no row
                theta = torch.where(server.sketch.rows.any(1, keepdim=True), theta, roster.theta)
        columns = roster.everyone if near is None else near
        again = ((turns[cohort] - 1).clamp(min=0) * roster.sizes[cohort]).to(theta.dtype)
        cosines = compare_movements(roster.layout, theta, origin, cohort, near, self.by_layer)
        values = credit_own(cosines, cohort[:, None] == columns, heard[columns], again, self.credit)
        rows = self.weigh(server, values / self.tau + mass.log()[columns] + often, cohort, columns)
        return cosines._replace(values=values), Weights(rows.nan_to_num().to(theta.dtype), near)  # NaN: for the mean

    def weigh(self, server: Tree, logits: Tensor, cohort: Tensor, columns: Tensor) -> Tensor:
        """[L, K, M] weights of models for the cohort: [K], by logits: [L, K, M] of the clients of columns."""
        return logits.softmax(-1)

    def aggregate(self, roster, server, cohort, uploads):
        present = torch.zeros_like(server.trained).index_fill(0, cohort, 1)
        absent = ((server.trained > 0) & (present == 0)).nonzero().squeeze(1)
        change = subtract(uploads.theta, self.send(roster, server, cohort).theta) if len(absent) else uploads.theta
        after = self.put(roster, server._replace(trained=server.trained + present), cohort, uploads.theta)
        for ids in absent.split(BLOCK if self.neighbours else max(1, len(absent))):
            after = self.put(roster, after, ids, self.follow(roster, after, ids, cohort, change), False)
        return after

    def put(self, roster: Roster, server: Tree, ids: Tensor, theta: Tensor, trained: bool = True) -> Tree:
        """The server with new models theta: [K, d] of ids: [K], which have `trained`, or followed others."""
        sketch = renew_by_cosine(roster, server.sketch, ids, theta - roster.theta, trained) if self.neighbours else ()
        return server._replace(theta=put(server.theta, ids, theta), sketch=sketch)

    def follow(self, roster: Roster, server: Tree, absent: Tensor, cohort: Tensor, change: Tensor) -> Tensor:
        """[M, d] the models of those absent: [M], each moved with its kin by the cohort's change: [K, d].

        A client's own weight, against which those of the cohort count, is that of the share of clients in a round.
        """
        layout, mass = roster.layout, self.mass(roster, server)
        near: Tensor | None = None
        often: Tensor | float = 0.0
        if 0 < self.neighbours < len(cohort) / FEW:
            drawn = Drawn(self.neighbours, self.tau)
            near, often = drawn.find(roster, server.sketch, mass, server.trained, absent, cohort)
        models, theirs = take(server.theta, absent), subtract(take(server.theta, cohort), roster.theta)
        cosines = compare(layout, subtract(models, roster.theta), theirs, near, self.by_layer)
        logits = (cosines.values - 1) / self.tau + mass.log()[cohort if near is None else cohort[near]] + often
        own_mass = (mass[absent] * len(cohort) / len(roster)).log().expand(*logits.shape[:2])[..., None]
        weights = torch.cat([own_mass, logits], -1).softmax(-1)[..., 1:]
        steps = lengths_of(layout, change, self.by_layer)  # [L, K]
        limit = self.clip * torch.minimum(cosines.length, steps.median(1, keepdim=True).values)
        weights = weights * shorten(steps[:, None] if near is None else steps[:, near], limit[..., None])
        return carry(models, weights, take(server.theta, cohort), change, layout, near)

    def join(self, roster, server, newcomers, uploads):
        """A newcomer has trained for a short time, from the mean: its model is compared, but weighs nothing."""
        return self.put(roster, server, newcomers, uploads.theta)

    def personalise(self, client, state, received):
        return {"mixed": received, "own": state}  # of equals by validation, the one that more clients have made
