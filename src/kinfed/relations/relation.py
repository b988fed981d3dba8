"""Who learns from whom: weights of clients' models, and how they follow from a comparison."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.layout import Layout
from ..core.method import Roster
from ..core.rows import take
from ..errors import UsageError
from ..ops.mixing import mix_freely, spread_lists
from .comparisons import Comparison
from .neighbourhoods import Everyone, Linked, Nearest
from .weighings import Weighing

ROUNDING = 1e-3  # by how much a row of weights may miss a sum of one


class Weights(NamedTuple):
    """A row of weights for each of K receivers, over the models of M senders, or over those that a receiver lists.

    With one relation a layer there is such a table for each of L layers.
    """

    rows: Tensor  # [K, M] or [L, K, M]
    near: Tensor | None = None  # [K, M] int64 places among the senders, whose weights these are; None: all, in order
    senders: Tensor | None = None  # [M] int64 the clients that are mixed; None: all N

    def mix(self, theta: Tensor, layout: Layout) -> Tensor:
        """[K, d] mixtures of theta: [N, d]; with lists no table [K, N] is made."""
        return mix_freely(self.rows, theta if self.senders is None else take(theta, self.senders), layout, self.near)

    def dense(self, count: int) -> Tensor:
        """[K, N] or [L, K, N] the whole relation among N = `count` clients, 0 for those that are not mixed."""
        near = self.near if self.senders is None else self.senders
        if self.near is not None and self.senders is not None:
            near = self.senders[self.near]
        return self.rows if near is None else spread_lists(self.rows, near, count)


class Relation(NamedTuple):
    """Whom K receivers learn from, of N clients or of M listed ones each."""

    weights: Weights
    unheard: Tensor  # [K] bool who is sent the mean by examples in place of a mixture by weights
    similarity: Tensor  # [L, K, N] or [L, K, M] what weights are made of
    what: str = ""  # is compared, in words


def relate(
    compare: Comparison,
    weigh: Weighing,
    among: Everyone | Nearest | Linked,
    roster: Roster,
    vectors: Tensor,
    mass: Tensor,
    cohort: Tensor,
) -> Relation:
    """Whom the cohort: [K] learns from, by vectors: [N, d] that are compared, and by how much clients count: [N].

    A client that counts nothing has no weight, and equal ones for those that it may learn from. Raises UsageError
    unless `weigh` gives rows of weights for what it is given.
    """
    near, linked, kept = among.find(roster, vectors, cohort)
    similarity = compare.compare(take(vectors, cohort), vectors, near, roster.layout)
    if near is not None:
        best = F.pad(
            similarity[..., 1:].mean(0).topk(min(kept, near.shape[1] - 1)).indices + 1, (1, 0)
        )  # [K, 1 + M] places in a list
        near, similarity = near.gather(1, best), similarity.gather(2, best.expand(len(similarity), -1, -1))
    columns = roster.everyone.expand(len(cohort), -1) if near is None else near
    itself, unheard, mass = columns == cohort[:, None], mass[cohort] == 0, mass[columns]
    mass = mass if linked is None else mass * linked
    mass = torch.where(itself & (mass.sum(1, keepdim=True) == 0), 1.0, mass)  # nobody else: its own model
    rows = weigh.weigh(similarity, mass, itself)
    check_rows(rows, similarity, type(weigh).__name__)
    rows = torch.where(unheard[:, None], mass / mass.sum(1, keepdim=True), rows)
    weights = Weights(rows if len(rows) > 1 else rows[0], near)
    return Relation(weights, unheard & (near is not None), similarity)


def check_rows(rows: Tensor, similarity: Tensor, name: str) -> None:
    """Raise UsageError unless rows that a part has made of a similarity: [L, K, M] are weights of the same shape."""
    if rows.shape != similarity.shape:
        raise UsageError(f"method.weigh: {name} gives {list(rows.shape)} for similarities {list(similarity.shape)}")
    if not bool(((rows.sum(-1) - 1).abs() < ROUNDING).all()):  # also if one is no number
        raise UsageError(f"method.weigh: rows of {name} must sum to one; divide each by its sum")
