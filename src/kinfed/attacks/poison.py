"""Poison: attackers send a model moved the other way (model poisoning of Panacea, Lin et al., 2025, Figure 4)."""

from dataclasses import dataclass

from torch import Tensor

from ..errors import UsageError
from .attack import Attack


@dataclass(frozen=True)
class Poison(Attack):
    r"""What was sent minus `factor` times what training changed: $\Delta_i$ becomes $-\mathit{factor}\,\Delta_i$."""

    factor: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.factor < float("inf"):
            raise UsageError(f"attack: factor must be zero or more; got {self.factor}")

    def tamper(self, before: Tensor, after: Tensor, keys: Tensor) -> Tensor:
        return before - self.factor * (after - before)
