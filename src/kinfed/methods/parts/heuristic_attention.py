"""Attention by cosines, with a fixed weight for oneself."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...core.client import Client, towards
from ...core.layout import Layout
from ...core.method import Roster
from ...core.optimiser import Optimiser
from ...core.settings import NonNegative, Settings, Share
from .answers import Answers
from .model_attention import compared
from .pulls import check_pull


@dataclass(frozen=True)
class Heuristic(Settings):
    r"""$w_{ij} \propto e^{\sigma \cos_{ij}}$ for the others, together what the client's own fixed weight leaves.

    The paper's: `compare="models"`, no `share` and a `pull`.
    """

    sharpness: NonNegative = 10.0  # sigma: how strongly weights favour those who are alike; 0: all others alike
    home: Share = 0.7  # a client's weight for its own model
    # cosines of how far models moved from the first, of models, or of their answers
    compare: Literal["moved", "models"] | Answers = "moved"
    share: Share = 0.5  # of the way from a client's own model to its mixture, where local training starts
    pull: NonNegative = 0.0  # lambda / alpha in the paper: of the proximal term to the mixture

    remedy: ClassVar[str] = "lower the learning rate or method.attention.pull"

    def check(self, optimiser: Optimiser) -> None:
        check_pull("heurfedamp", optimiser, self.pull, "the mixture", "method.attention.pull")

    def compared(self, roster: Roster, theta: Tensor) -> tuple[Tensor, Layout]:
        return compared(self.compare, roster, theta)

    def weights(self, apart: Tensor, itself: Tensor, clients: int) -> Tensor:
        if apart.shape[1] == 1:  # nobody else is there
            return torch.ones_like(apart)
        others = (self.sharpness / -2 * apart).masked_fill(itself, -torch.inf).softmax(1)
        return torch.where(itself, self.home, (1 - self.home) * others)

    def train(self, client: Client, own: Tensor, mixed: Tensor) -> Tensor:
        penalty = towards(mixed, self.pull) if self.pull else None
        return client.descend(torch.lerp(own, mixed, self.share), penalty=penalty)
