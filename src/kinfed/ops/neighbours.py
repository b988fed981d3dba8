"""Weights for models, of all clients or of a few listed neighbours each: one type, so that methods need no branch."""

from typing import NamedTuple

from torch import Tensor

from ..core.layout import Layout
from .mixing import mix, mix_freely, spread_lists


class Weights(NamedTuple):
    """A row of weights for each of K receivers, over all N clients or over the M neighbours that the receiver lists.

    With one relation a layer there is such a table for each of L layers.
    """

    rows: Tensor  # [K, M] or [L, K, M]
    near: Tensor | None = None  # [K, M] int64 the clients whose weights these are; None: all N, in order

    def mix(self, theta: Tensor, layout: Layout) -> Tensor:
        """[K, d] mixtures of theta: [N, d]; with lists no table [K, N] is made."""
        return mix(self.rows, theta, layout, self.near)

    def mix_freely(self, theta: Tensor, layout: Layout) -> Tensor:
        """[K, d] the same, for one relation, [K, M], whose weights may be negative and need not sum to one."""
        return mix_freely(self.rows, theta, layout, self.near)

    def dense(self, count: int) -> Tensor:
        """[K, N] or [L, K, N] the whole relation among N = `count` clients, 0 for those that are not listed."""
        return self.rows if self.near is None else spread_lists(self.rows, self.near, count)
