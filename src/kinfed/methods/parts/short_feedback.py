"""Channels whose answers are short: a sketch of the gradient, or losses alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.client import Client
from ...core.seeding import fold
from ...core.settings import Count, Positive
from ...core.trees import Tree
from ...ops.sketch import count_sketch
from .feedback import Channel, Mixtures, Replies


@dataclass(frozen=True)
class Sketch(Channel):
    """The client is sent a key: [] and answers with a count sketch of its gradient: [size]."""

    size: Count = 256  # how many numbers an answer has

    def ask(self, mix: Mixtures) -> Tree:
        return mix.key.expand(len(mix.listeners))

    def answer(self, client: Client, theta: Tensor, request: Tree) -> Tensor:
        return count_sketch(client.gradient(theta, client.held_out), request, self.size)

    def gradient(self, mix: Mixtures, replies: Replies) -> Tensor:
        return replies.answers @ count_sketch(mix.theta, mix.key, self.size).T


@dataclass(frozen=True)
class Spsa(Channel):
    """The client is sent steps: [probes, d] and answers with its loss ahead and behind: [probes, 2] (Spall, 1992).

    A step moves all weights of a row by `radius` times random signs that sum to zero, so that they still sum to one.
    """

    probes: Count = 4  # how many steps
    radius: Positive = 0.01  # of a step, in weight

    def ask(self, mix: Mixtures) -> Tree:
        theta = mix.theta
        steps = self._signs(mix).to(theta.dtype) @ theta
        # Running statistics stay as they are, because variances must not become negative.
        return steps.mul_(self.radius).mul_(mix.learned).movedim(0, 1)

    def answer(self, client: Client, theta: Tensor, request: Tree) -> Tensor:
        losses = [client.loss(theta + way * step, client.held_out) for step in request.unbind(0) for way in (1, -1)]
        return torch.stack(losses).view(self.probes, 2)

    def gradient(self, mix: Mixtures, replies: Replies) -> Tensor:
        derivative = (replies.answers[..., 0] - replies.answers[..., 1]) / (2 * self.radius)  # [K, probes]
        rows = torch.einsum("kp,pkm->km", derivative, self._signs(mix).to(derivative.dtype)) / self.probes
        return rows * unbias(rows.shape[1])

    def _signs(self, mix: Mixtures) -> Tensor:
        keys = fold(mix.key, torch.arange(self.probes, device=mix.key.device))
        return draw_signs(keys, mix.listeners, mix.speakers)


def draw_signs(key: Tensor, listeners: Tensor, speakers: Tensor) -> Tensor:
    """[..., K, M] int64 random signs from key: [...], one for each pair of listeners: [K] and speakers: [M].

    Rows sum to zero: half their signs are 1 and half -1, with one 0 if their number is odd.
    """
    draws = fold(fold(key[..., None, None], listeners[:, None]), speakers)
    rank, half = draws.argsort(-1).argsort(-1), len(speakers) // 2
    return (rank < half).long() - (rank >= len(speakers) - half).long()


def unbias(count: int) -> float:
    """The factor that removes the bias of an estimate from `count` such signs.

    The mean of sign sign^T should be I - 1/M, because signs that sum to zero cannot see a constant in a row of G. With
    an even number of signs, different ones have correlation -1 / (M - 1), so the mean is M / (M - 1) times too long.
    """
    return (count - 1) / count if count and count % 2 == 0 else 1.0
