"""Noise: attackers send random numbers as large as their updates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.field_checks import NonNegative
from ...core.seeding import normal
from .attack import Attack


@dataclass(frozen=True)
class Noise(Attack):
    r"""$\Delta_i$ becomes normal numbers with `factor` times its root mean square as standard deviation."""

    factor: NonNegative = 1.0  # times the root mean square of what training changed

    def tamper(self, before: Tensor, after: Tensor, keys: Tensor) -> Tensor:
        size = (after - before).square().mean(1, keepdim=True).sqrt()
        noise = torch.stack([normal(key, row) for key, row in zip(keys, after, strict=True)])
        return before + self.factor * size * noise
