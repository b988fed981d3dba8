"""Tuning: how FedAGHN's p, a client's weight for itself, and q, its choosiness among the others, begin and move."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...core.settings import Settings
from ...ops.neighbours import Weights


class Attention(NamedTuple):
    """Whom a cohort listens to: M of the N clients each, in G groups of layers."""

    near: Tensor | None  # [K, M] int64 whom each looks at, itself first; None: everyone in order
    itself: Tensor  # [K, M] bool
    alike: Tensor  # [G, K, M] cosines of updates
    others: Tensor  # [G, K, M] the softmax; a row of zeros where there is nobody to listen to
    keeps: Tensor  # [G, K] the weight of the client's own model beside it
    whole: bool  # whether the model is one piece, rather than G

    @property
    def weights(self) -> Weights:
        """Equation 5: a client and the others brought to one scale, for each piece of the model."""
        rows = self.others + self.keeps[..., None] * self.itself
        rows = rows / rows.sum(-1, keepdim=True)
        return Weights(rows[0] if self.whole else rows, self.near)

    def slopes(self, slope: Tensor) -> tuple[Tensor, Tensor]:
        """[G, K] derivatives of the loss by p and by q, from those by the weights, slope: [G, K, M]."""
        alike, others = self.alike, self.others
        listened, total = (others * slope).sum(-1), others.sum(-1) + self.keeps
        own = (slope * self.itself).sum(-1)
        by_p = (others.sum(-1) * own - listened) / total.square()
        by_q = ((others * alike * slope).sum(-1) - (others * alike).sum(-1) * listened) / total
        return by_p, by_q


@dataclass(frozen=True)
class Descent(Settings):
    """Every client has a p and a q for each group of layers, and they go down the loss."""

    @property
    def hears_itself(self) -> bool:
        """Whether a client's own model is one more entry of the softmax."""
        return False

    def count(self, groups: int) -> int:
        """How many p and q a client has."""
        return groups

    def start(self, p: float, q: float) -> tuple[float, float]:
        """What p and q begin with."""
        return p, q

    def rates(self, lr: float) -> tuple[float, float]:
        """The learning rates of p and q, zero for what does not move."""
        return lr, lr

    def step(self, values: Iterable[Tensor], slopes: Iterable[Tensor], lr: float) -> tuple[Tensor, ...]:
        """p and q: [K, G] each after a step along their slopes: [G, K] each."""
        return tuple(v - rate * s.T for v, s, rate in zip(values, slopes, self.rates(lr), strict=True))
