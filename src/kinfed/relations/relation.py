"""Who learns from whom: weights of clients' models, and how they follow from a comparison.

Begin with `relate`, which makes a `Relation` of the three parts. The classes before it are what it gives.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.graph import NeighbourLists
from ..core.layout import Layout
from ..core.method import Roster
from ..core.metrics import positive
from ..core.rows import take
from ..core.seeding import fold, key
from ..core.trees import Tree
from ..ops.mixing import add_rows, mend_statistics, mix, mix_freely, spread_lists
from .comparisons import Comparison
from .neighbourhoods import Everyone, Linked, Nearest, Sketches, sketch_rows
from .own_parts import compare_vectors, weigh_similarities
from .weighings import Weighing

SAMPLE = 64  # clients by which those are compared that are not on a list


class Rest(NamedTuple):
    """Those that a receiver does not list: what they have in common counts by their mean, and a sample beyond it."""

    weight: Tensor  # [K] or [L, K] of their mean
    mass: Tensor  # [M] by how much each sender counts in the mean of those that are not listed
    sample: Tensor  # [P] int64 places of senders who stand for them
    rows: Tensor  # [K, P] or [L, K, P] the weights of these, which add up to that of all that are not listed
    shares: Tensor  # [K, P] by how much each counts in the mean of the sample

    @property
    def beyond(self) -> Tensor:
        """[K, P] or [L, K, P] what the sampled count beyond the mean; negative of those who count less."""
        return self.rows - self.weight[..., None] * self.shares


class Weights(NamedTuple):
    """A row of weights for each of K receivers, over the models of M senders, or over those that a receiver lists.

    With one relation a layer there is such a table for each of L layers.
    """

    rows: Tensor  # [K, M] or [L, K, M]
    near: Tensor | None = None  # [K, M] int64 places among the senders, whose weights these are; None: all, in order
    senders: Tensor | None = None  # [M] int64 the clients that are mixed; None: all N
    rest: Rest | None = None  # what those count that are not listed; None: nothing

    def mix(self, theta: Tensor, layout: Layout, scale: Tensor | float = 1.0) -> Tensor:
        """[K, d] mixtures of theta: [N, d], or of these models times scale: [N]; with lists no table [K, N] is made."""
        factor = theta.new_ones(len(theta)) * scale
        if self.senders is not None:
            theta, factor = take(theta, self.senders), factor[self.senders]
        listed = factor if self.near is None else factor[self.near]  # [M] or [K, M]
        if self.rest is None:
            return mix_freely(self.rows * listed, theta, layout, self.near)
        rows, share = self._spread()
        mixed = mix(rows * listed, theta, layout, self.near)
        total = add_rows(self.rest.mass * factor, theta)
        shares = share.expand(len(layout.layers), -1)  # [L, K]
        for layer, part in zip(layout.layers, shares, strict=True):
            mixed[:, layer.at].addr_(part.to(theta.dtype), total[layer.at])
        sampled, statistics = take(theta, self.rest.sample), ~layout.trainable_on(theta.device)
        of_sample = factor[self.rest.sample]
        mixed += mix(self.rest.beyond * of_sample, sampled, layout)
        if statistics.any():  # a variance must not become negative
            means = mix(self.rows * listed, theta, layout, self.near)
            means += mix(self.rest.rows * of_sample, sampled, layout)
            mixed[:, statistics] = means[:, statistics]
        return mend_statistics(mixed, self.rows * listed, theta, layout, self.near)

    def mix_heard(
        self, theta: Tensor, layout: Layout, unheard: Tensor, mean: Callable[[], Tensor], scale: Tensor | float = 1.0
    ) -> Tensor:
        """[K, d] the same, and a mean: [d] where receivers are unheard: [K] bool."""
        if unheard.all():
            return mean().expand(len(unheard), -1)
        if self.near is None or not unheard.any():
            mixed = self.mix(theta, layout, scale)
            if unheard.any():
                mixed[unheard] = mean()
            return mixed
        heard = (~unheard).nonzero().squeeze(1)
        mixed = self.rows_of(heard).mix(theta, layout, scale)
        return mean().expand(len(unheard), -1).clone().index_copy_(0, heard, mixed)

    def dense(self, count: int) -> Tensor:
        """[K, N] or [L, K, N] the whole relation among N = `count` clients, 0 for those that are not mixed."""
        near = self.near if self.senders is None else self.senders
        if self.near is not None and self.senders is not None:
            near = self.senders[self.near]
        if near is None:
            return self.rows
        if self.rest is None:
            return spread_lists(self.rows, near, count)
        rows, share = self._spread()
        everyone = torch.zeros(count).to(self.rest.mass)
        everyone = self.rest.mass if self.senders is None else everyone.index_copy(0, self.senders, self.rest.mass)
        table = spread_lists(rows, near, count) + share[..., None] * everyone
        sample = self.rest.sample if self.senders is None else self.senders[self.rest.sample]
        return table.index_add(-1, sample, self.rest.beyond)

    def rows_of(self, at: Tensor) -> "Weights":
        """The same for the receivers at: [k] of the K."""
        near = None if self.near is None else self.near[at]
        rest = self.rest
        if rest is not None:
            rest = rest._replace(weight=rest.weight[..., at], rows=rest.rows[..., at, :], shares=rest.shares[at])
        return self._replace(rows=self.rows[..., at, :], near=near, rest=rest)

    def lists(self, unheard: Tensor, mass: Tensor) -> NeighbourLists:
        """The weights of lists among all N clients; those unheard: [N] bool are sent the mean by mass: [N]."""
        assert self.near is not None
        near = self.near if self.senders is None else self.senders[self.near]
        mean = mass / mass.sum()
        of_mean = mean[near]
        weights = torch.where(unheard[:, None], of_mean, self.rows)
        none = torch.zeros_like(self.rows[..., 0])
        rest = none if self.rest is None else self.rest.rows.sum(-1)  # of whom a list keeps no weight of each
        rest = torch.where(unheard, 1 - of_mean.sum(1), rest)
        return NeighbourLists(weights, near.int(), rest, mean)

    def entropy(self) -> Tensor:
        """[K] or [L, K] of a receiver's weights over all senders."""
        entropy: Tensor = torch.special.entr(self.rows.clamp(min=0)).sum(-1)
        if self.rest is None:
            return entropy
        assert self.near is not None
        (_, share), mass, sample = self._spread(), self.rest.mass, self.rest.sample
        free = ~(self.near[:, :, None] == sample).any(1)  # [K, P]
        logs: Tensor = -torch.special.entr(mass)  # m log m
        left = torch.stack([mass, logs], 1)  # [M, 2], of which those remain that are neither listed nor sampled
        left = left.sum(0) - left[self.near].sum(1) - free.to(mass) @ left[sample]  # [K, 2]
        spread = share * (share.clamp(min=1e-30).log() * left[:, 0] + left[:, 1])
        of_sample = (self.rest.beyond + share[..., None] * mass[sample]).clamp(min=0) * free
        entropy += torch.special.entr(of_sample).sum(-1) - spread
        return entropy

    def _spread(self) -> tuple[Tensor, Tensor]:
        """Rows less what the mean of all senders has of those listed, and [K] or [L, K] the share of a unit of mass."""
        assert self.rest is not None
        assert self.near is not None
        listed = self.rest.mass[self.near]
        left = self.rest.mass.sum() - listed.sum(1)
        share = torch.where(left > 0, self.rest.weight / left, 0.0)
        return self.rows - share[..., None] * listed, share


class Relation(NamedTuple):
    """Whom K receivers learn from, of N clients or of M listed ones each."""

    weights: Weights
    unheard: Tensor  # [K] bool who is sent the mean by examples in place of a mixture by weights
    similarity: Tensor  # [L, K, N] or [L, K, M] what weights are made of
    what: str = ""  # is compared, in words

    def spread(self, cohort: Tensor, at: Tensor, count: int) -> "Relation":
        """The relation of a cohort: [K] of N = `count` clients, of whom those at: [K] bool have the lists of this one.

        The others are unheard: they list some clients without weight.
        """
        (rows, near, senders, rest), unheard, similarity, what = self
        assert near is not None
        if at.all():
            return self
        some = (cohort[:, None] + torch.arange(near.shape[1], device=cohort.device)) % count
        places = at.nonzero().squeeze(1)

        def widen(table: Tensor) -> Tensor:
            none = table.new_zeros(*table.shape[:-2], len(cohort), table.shape[-1])
            return none.index_copy(-2, places, table)

        if rest is not None:
            weight = widen(rest.weight[..., None])[..., 0]
            rest = rest._replace(weight=weight, rows=widen(rest.rows), shares=widen(rest.shares))
        weights = Weights(widen(rows), some.index_copy(0, places, near), senders, rest)
        return Relation(weights, torch.ones_like(at).masked_scatter(at, unheard), widen(similarity), what)


def relate(
    compare: Comparison,
    weigh: Weighing,
    among: Everyone | Nearest | Linked,
    roster: Roster,
    vectors: Callable[[Tensor], Tensor],
    mass: Tensor,
    cohort: Tensor,
    sketch: Tree = (),
) -> Relation:
    """Whom the cohort: [K] learns from, by how much clients count: [N], and by vectors(ids): [m, d] of ids: [m].

    The vectors are compared. `Sketches` are of them; without these they are sketched here, if lists are made. A client
    that counts nothing has no weight, and equal ones for those that it may learn from; in lists some without weight.
    Raises UsageError unless a part of a user's own gives similarities, or rows of weights, that fit (`own_parts.py`).
    """
    heard = mass[cohort] > 0
    if isinstance(among, Nearest) and among.count < len(roster) - 1 and not heard.all():  # no lists for the others
        part = relate(compare, weigh, among, roster, vectors, mass, cohort[heard], sketch)
        return part.spread(cohort, heard, len(roster))
    if isinstance(among, Nearest) and not isinstance(sketch, Sketches):
        sketch = Sketches(sketch_rows(roster, vectors(roster.everyone)), None)
    near, linked, kept = among.find(roster, sketch, cohort, mass > 0)
    if near is None:
        everyone = vectors(roster.everyone)
        similarity = compare_vectors(compare, take(everyone, cohort), everyone, None, roster.layout)
    else:  # of no more than these the vectors are made
        listed, place = near.unique(return_inverse=True)
        similarity = compare_vectors(compare, vectors(cohort), vectors(listed), place, roster.layout)
        best = similarity[..., 1:].mean(0).topk(min(kept, near.shape[1] - 1)).indices + 1
        best = F.pad(best, (1, 0))  # [K, 1 + M] places in a list
        near, similarity = near.gather(1, best), similarity.gather(2, best.expand(len(similarity), -1, -1))
    columns = roster.everyone.expand(len(cohort), -1) if near is None else near
    itself, unheard, masses = columns == cohort[:, None], mass[cohort] == 0, mass[columns]
    masses = masses if linked is None else masses * linked
    masses = torch.where(itself & (masses.sum(1, keepdim=True) == 0), 1.0, masses)  # nobody else: its own model
    counts, listed = torch.ones_like(masses), masses.shape[1]
    if near is not None:
        sample, *sampled = sample_rest(compare, roster, vectors, mass, cohort, near)
        similarity, masses, counts = (
            torch.cat(pair, -1) for pair in zip((similarity, masses, counts), sampled, strict=True)
        )
        itself = F.pad(itself, (0, masses.shape[1] - listed))
    rows = weigh_similarities(weigh, similarity, masses, itself, counts, unheard)
    rows = torch.where(unheard[:, None], masses / masses.sum(1, keepdim=True), rows)
    rows = rows if len(rows) > 1 else rows[0]
    if near is None:
        return Relation(Weights(rows), torch.zeros_like(unheard), similarity)
    shares = masses[:, listed:] / positive(masses[:, listed:].sum(1, keepdim=True))
    rows, of_sample = rows[..., :listed], rows[..., listed:]
    common = torch.minimum(of_sample, of_sample.sum(-1, keepdim=True) * shares).sum(-1)
    weights = Weights(rows, near, rest=Rest(common, mass, sample, of_sample, shares))
    return Relation(weights, unheard, similarity[..., :listed])


def sample_rest(
    compare: Comparison,
    roster: Roster,
    vectors: Callable[[Tensor], Tensor],
    mass: Tensor,
    cohort: Tensor,
    near: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[P] clients that stand for those that lists near: [K, M] lack, and [L, K, P] similarities of the cohort: [K].

    The third and fourth results, [K, P], are the mass and the number of clients that each of them stands for, 0 of one
    that is listed. The same P are drawn for all, anew each round.
    """
    heard = mass > 0
    draw = fold(key(roster.seed, "relations.sample", roster.round, device=mass.device), roster.tags)
    sample = draw.masked_fill(~heard, torch.iinfo(draw.dtype).max).argsort()[:SAMPLE]
    free = heard[sample] & ~(near[:, :, None] == sample).any(1)  # [K, P]
    left, number = (table.sum() - table[near].sum(1, keepdim=True) for table in (mass, heard.to(mass)))
    masses, counts = mass[sample] * free, free.to(mass)
    masses = masses * (left / masses.sum(1, keepdim=True)).nan_to_num(0.0, 0.0)
    counts = counts * (number / counts.sum(1, keepdim=True)).nan_to_num(0.0, 0.0)
    similarity = compare_vectors(compare, vectors(cohort), vectors(sample), None, roster.layout)
    return sample, similarity, masses, counts
