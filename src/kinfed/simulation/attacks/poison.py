"""Poison: attackers send a model moved the other way (model poisoning of Panacea, Lin et al., 2025, Figure 4)."""

from dataclasses import dataclass

from torch import Tensor

from ...core.field_checks import NonNegative
from .attack import Attack


@dataclass(frozen=True)
class Poison(Attack):
    r"""The received model minus `factor` times the update: $\Delta_i$ becomes $-\mathit{factor}\,\Delta_i$."""

    factor: NonNegative = 0.5  # of what training changed, taken the other way

    def tamper(self, before: Tensor, after: Tensor, keys: Tensor) -> Tensor:
        return before - self.factor * (after - before)
