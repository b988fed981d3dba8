"""Feedback: how a server learns which weights of a mixture would lower its receiver's loss.

Client i was sent sum_j R_ij theta_j, and its loss there has the slope G_ij = <gradient, theta_j> along R_ij. A channel
says what the server asks beside the mixture, what the client answers, and how the server estimates G from that.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.client import Client
from ...core.seeding import fold
from ...core.tables import take
from ...core.trees import Tree
from ...ops.similarity import inner
from ...ops.sketch import count_sketch


class Mixtures(NamedTuple):
    """What K clients were sent, and of what it was mixed."""

    table: Tensor  # [N, d] the clients' models
    mixed: Tensor  # [M] int64 whose were mixed
    speakers: Tensor  # [M] int64 what stands for them in random draws
    listeners: Tensor  # [K] int64 what stands for the receivers
    key: Tensor  # [] int64 of the random draws about this mix
    learned: Tensor  # [d] bool, False on buffers

    @property
    def theta(self) -> Tensor:
        """[M, d] the models that were mixed: a copy unless they are everyone's."""
        return take(self.table, self.mixed)


class Replies(NamedTuple):
    """What the K clients sent back."""

    answers: Tensor  # [K, ...]
    change: Tensor  # [K, d] what local training from the mixture changed; [K, 0] if nobody reads it
    rate: Tensor  # [K] how far that went against the gradient: learning rate times steps
    baseline: Tensor  # [K, 2] the last answer before this one, and 1 if there was one; [K, 0] if nobody reads it


class Channel(ABC):
    """By default the server asks nothing and the client answers nothing."""

    def ask(self, mix: Mixtures) -> Tree:
        """[K, ...] what is sent beside the mixtures."""
        return ()

    def answer(self, client: Client, theta: Tensor, asked: Tree) -> Tensor:
        """One client's answer about the mixture theta: [d] that it was sent."""
        return theta[:0]

    @abstractmethod
    def slope(self, mix: Mixtures, replies: Replies) -> Tensor:
        """[K, M] the estimate of G."""


@dataclass(frozen=True)
class Exact(Channel):
    """The client answers its gradient: [d]."""

    def answer(self, client: Client, theta: Tensor, asked: Tree) -> Tensor:
        return client.gradient(theta, client.held_out)

    def slope(self, mix: Mixtures, replies: Replies) -> Tensor:
        return inner(replies.answers, mix.theta)


@dataclass(frozen=True)
class Delta(Channel):
    """Nothing new is sent: local training went down the training loss, exactly so in one step on all examples."""

    def slope(self, mix: Mixtures, replies: Replies) -> Tensor:
        change = replies.change if mix.learned.all() else replies.change * mix.learned
        return -inner(change, mix.theta) / replies.rate[:, None]


@dataclass(frozen=True)
class Directional(Channel):
    """The client is sent all models that were mixed: [M, d], and answers its row of G: [M]."""

    def ask(self, mix: Mixtures) -> Tree:
        return mix.theta.expand(len(mix.listeners), -1, -1)

    def answer(self, client: Client, theta: Tensor, asked: Tree) -> Tensor:
        return asked @ client.gradient(theta, client.held_out)  # type: ignore[no-any-return]

    def slope(self, mix: Mixtures, replies: Replies) -> Tensor:
        return replies.answers


@dataclass(frozen=True)
class Sketch(Channel):
    """The client is sent a key: [] and answers a count sketch of its gradient: [size]."""

    size: int

    def ask(self, mix: Mixtures) -> Tree:
        return mix.key.expand(len(mix.listeners))

    def answer(self, client: Client, theta: Tensor, asked: Tree) -> Tensor:
        return count_sketch(client.gradient(theta, client.held_out), asked, self.size)

    def slope(self, mix: Mixtures, replies: Replies) -> Tensor:
        return replies.answers @ count_sketch(mix.theta, mix.key, self.size).T


@dataclass(frozen=True)
class TwoPoint(Channel):
    """The client is sent steps: [probes, d] and answers its loss ahead and behind: [probes, 2] (Spall, 1992).

    A step moves all weights of a row by `radius` times random signs.
    """

    probes: int
    radius: float
    balanced: bool

    def ask(self, mix: Mixtures) -> Tree:
        return _steps(mix, self._signs(mix), self.radius).movedim(0, 1)

    def answer(self, client: Client, theta: Tensor, asked: Tree) -> Tensor:
        losses = [client.loss(theta + way * step, client.held_out) for step in asked.unbind(0) for way in (1, -1)]
        return torch.stack(losses).view(self.probes, 2)

    def slope(self, mix: Mixtures, replies: Replies) -> Tensor:
        along = (replies.answers[..., 0] - replies.answers[..., 1]) / (2 * self.radius)  # [K, probes]
        rows = torch.einsum("kp,pkm->km", along, self._signs(mix).to(along.dtype)) / self.probes
        return rows * _correction(rows, self.balanced)

    def _signs(self, mix: Mixtures) -> Tensor:
        keys = fold(mix.key, torch.arange(self.probes, device=mix.key.device))
        return draw_signs(keys, mix.listeners, mix.speakers, self.balanced)


@dataclass(frozen=True)
class OnePoint(Channel):
    """The mixture itself is moved by such a step, and the client answers its loss there: []."""

    radius: float
    balanced: bool

    def perturb(self, mix: Mixtures) -> Tensor:
        """[K, d] what is added to the mixtures."""
        return _steps(mix, self._signs(mix), self.radius)

    def answer(self, client: Client, theta: Tensor, asked: Tree) -> Tensor:
        return client.loss(theta, client.held_out)

    def slope(self, mix: Mixtures, replies: Replies) -> Tensor:
        last, known = replies.baseline.unbind(1)
        along = known * (replies.answers - last) / self.radius  # a first answer says nothing
        rows = along[:, None] * self._signs(mix)
        return rows * _correction(rows, self.balanced)

    def _signs(self, mix: Mixtures) -> Tensor:
        return draw_signs(mix.key, mix.listeners, mix.speakers, self.balanced)


def draw_signs(key: Tensor, listeners: Tensor, speakers: Tensor, balanced: bool) -> Tensor:
    """[..., K, M] int64 random signs from key: [...], one a pair of listeners: [K] and speakers: [M].

    Balanced rows sum to zero: half their signs are 1 and half -1, with one 0 if their number is odd.
    """
    lots = fold(fold(key[..., None, None], listeners[:, None]), speakers)
    if not balanced:
        return 1 - 2 * (lots & 1)
    rank, half = lots.argsort(-1).argsort(-1), len(speakers) // 2
    return (rank < half).long() - (rank >= len(speakers) - half).long()


def _steps(mix: Mixtures, signs: Tensor, radius: float) -> Tensor:
    """[..., K, d] steps of the mixtures; running statistics stay, for they may not become negative."""
    theta = mix.theta
    steps = signs.to(theta.dtype) @ theta
    return steps.mul_(radius).mul_(mix.learned)


def _correction(rows: Tensor, balanced: bool) -> float:
    """What frees the estimate of bias: rows: [K, M].

    The mean of sign sign^T should be I, or I - 1/M for balanced signs, which cannot see what a row of G has in common.
    With an even number of them different signs have correlation -1 / (M - 1), so the mean is M / (M - 1) times that.
    """
    count = rows.shape[1]
    return (count - 1) / count if balanced and count and count % 2 == 0 else 1.0
