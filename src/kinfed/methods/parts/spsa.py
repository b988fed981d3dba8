"""Feedback from losses alone: simultaneous perturbation (Spall, 1992)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.client import Client
from ...core.seeding import fold
from ...core.trees import Tree
from ...errors import UsageError
from .feedback import Channel, Mixtures, Replies


@dataclass(frozen=True)
class Spsa(Channel):
    """The client is sent steps: [probes, d] and answers its loss ahead and behind: [probes, 2] (Spall, 1992).

    A step moves all weights of a row by `radius` times random signs that sum to zero, so that they still sum to one.
    """

    probes: int = 4  # how many steps
    radius: float = 0.01  # of a step, in weight

    def __post_init__(self) -> None:
        if self.probes < 1 or self.radius <= 0:
            raise UsageError(
                f"spsa: probes must be at least 1 and radius positive; got probes={self.probes}, radius={self.radius}"
            )

    def ask(self, mix: Mixtures) -> Tree:
        theta = mix.theta
        steps = self._signs(mix).to(theta.dtype) @ theta
        # Running statistics stay, for they may not become negative.
        return steps.mul_(self.radius).mul_(mix.learned).movedim(0, 1)

    def answer(self, client: Client, theta: Tensor, asked: Tree) -> Tensor:
        losses = [client.loss(theta + way * step, client.held_out) for step in asked.unbind(0) for way in (1, -1)]
        return torch.stack(losses).view(self.probes, 2)

    def slope(self, mix: Mixtures, replies: Replies) -> Tensor:
        along = (replies.answers[..., 0] - replies.answers[..., 1]) / (2 * self.radius)  # [K, probes]
        rows = torch.einsum("kp,pkm->km", along, self._signs(mix).to(along.dtype)) / self.probes
        return rows * unbias(rows.shape[1])

    def _signs(self, mix: Mixtures) -> Tensor:
        keys = fold(mix.key, torch.arange(self.probes, device=mix.key.device))
        return draw_signs(keys, mix.listeners, mix.speakers)


def draw_signs(key: Tensor, listeners: Tensor, speakers: Tensor) -> Tensor:
    """[..., K, M] int64 random signs from key: [...], one a pair of listeners: [K] and speakers: [M].

    Rows sum to zero: half their signs are 1 and half -1, with one 0 if their number is odd.
    """
    lots = fold(fold(key[..., None, None], listeners[:, None]), speakers)
    rank, half = lots.argsort(-1).argsort(-1), len(speakers) // 2
    return (rank < half).long() - (rank >= len(speakers) - half).long()


def unbias(count: int) -> float:
    """What an estimate from `count` such signs must be multiplied by, so that it has no bias.

    The mean of sign sign^T should be I - 1/M, for signs that sum to zero cannot see what a row of G has in common. With
    an even number of them different signs have correlation -1 / (M - 1), so the mean is M / (M - 1) times that.
    """
    return (count - 1) / count if count and count % 2 == 0 else 1.0
