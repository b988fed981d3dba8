"""Noise: attackers send random numbers as large as what their training changed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.seeding import normal
from ..errors import UsageError
from .attack import Attack


@dataclass(frozen=True)
class Noise(Attack):
    r"""$\Delta_i$ becomes normal numbers with `factor` times its root mean square as standard deviation."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.factor < float("inf"):
            raise UsageError(f"attack: factor must be zero or more; got {self.factor}")

    def tamper(self, before: Tensor, after: Tensor, keys: Tensor) -> Tensor:
        size = (after - before).square().mean(1, keepdim=True).sqrt()
        noise = torch.stack([normal(key, row) for key, row in zip(keys, after, strict=True)])
        return before + self.factor * size * noise
