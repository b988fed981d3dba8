"""How much clients attend to each other's models, and how local training is drawn to the mixtures."""

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.client import Client, towards
from ...core.layout import Layout
from ...core.method import Roster
from ...core.optimiser import SGD, Optimiser
from ...core.settings import NonNegative, Positive, Settings, Share
from ...errors import UsageError
from .answers import Answers, flat


@dataclass(frozen=True)
class Cosine(Settings):
    r"""$w_{ij} \propto e^{\cos_{ij} / \tau}$ of how far models moved from the initial one; a client's own is largest.

    Local training starts between the client's own model and its mixture, so no learning rate makes it overshoot.
    """

    tau: Positive = 0.1  # the temperature: the smaller, the more is kept of the most similar alone
    share: Share = 0.8  # of the way from a client's own model to its mixture, where local training starts
    compare: Literal["moved"] | Answers = "moved"  # cosines of how far models moved from the first, or of their answers

    remedy: ClassVar[str] = "lower the learning rate"

    def check(self, optimiser: Optimiser) -> None:
        """Raise UsageError if training with this optimiser cannot work."""

    def compared(self, roster: Roster, theta: Tensor) -> tuple[Tensor, Layout]:
        """[K, m] what squared distances are taken of for models theta: [K, d], and the layout of these vectors."""
        return compared(self.compare, roster, theta)

    def weights(self, apart: Tensor, itself: Tensor, clients: int) -> Tensor:
        """[K, M] rows summing to one, from squared distances: [K, M], 0 at the client itself, where itself: [K, M]."""
        return (apart / (-2 * self.tau)).softmax(1)  # the squared distance of two directions is 2 (1 - cos)

    def train(self, client: Client, own: Tensor, mixed: Tensor) -> Tensor:
        """[d] the model after local training, from the client's own: [d] and its mixture: [d]."""
        return client.descend(torch.lerp(own, mixed, self.share))


@dataclass(frozen=True)
class Gaussian(Settings):
    r"""The paper's: $w_{ij} = \frac{\alpha}{\sigma} e^{-\|\theta_i - \theta_j\|^2 / \sigma}$, the rest its own model's.

    Each client minimises $F_i(\theta) + \frac{\lambda}{2\alpha} \|\theta - \sum_j w_{ij} \theta_j\|^2$. If the weights
    of others sum to more than one, a client's own weight is negative.
    """

    alpha: NonNegative = 1.0  # length of the step towards the others
    sigma: Positive = 20.0  # squared distance over which attention fades
    pull: NonNegative = 0.1  # lambda in the paper: how strongly local training is pulled to the mixture

    remedy: ClassVar[str] = (
        "lower the learning rate or pull / alpha, and keep every client's own weight positive: alpha up to "
        "sigma / (N - 1)"
    )

    def check(self, optimiser: Optimiser) -> None:
        if isinstance(optimiser, SGD) and self.alpha:
            step, most = optimiser.lr * self.pull / self.alpha, 2 * (1 + optimiser.momentum)
            if step >= most:  # on the pull alone, whatever the loss
                raise UsageError(
                    f"fedamp: lr * pull / alpha is {step:.3g}, but from {most:.3g} on each local step moves the model "
                    "farther from the mixture; lower method.attention.pull or the learning rate, or raise "
                    "method.attention.alpha"
                )

    def compared(self, roster: Roster, theta: Tensor) -> tuple[Tensor, Layout]:
        return theta, roster.layout

    def weights(self, apart: Tensor, itself: Tensor, clients: int) -> Tensor:
        rows = (self.alpha / self.sigma * torch.exp(-apart / self.sigma)).masked_fill(itself, 0)
        keeps = 1 - rows.sum(1)  # the client's own weight
        if (keeps < 0).any():
            warnings.warn(
                f"fedamp: a client resembles so many others that its own weight is {float(keeps.min()):.2g}; "
                f"alpha up to sigma / (N - 1) = {self.sigma / (clients - 1):.3g} keeps weights positive",
                stacklevel=2,
            )
        return torch.where(itself, keeps[:, None], rows)

    def train(self, client: Client, own: Tensor, mixed: Tensor) -> Tensor:
        return client.descend(own, penalty=towards(mixed, self.pull / self.alpha) if self.alpha else None)


def compared(by: str | Answers, roster: Roster, theta: Tensor) -> tuple[Tensor, Layout]:
    """[K, m] directions of length 1, of models theta: [K, d], of how they moved or of their answers; their layout."""
    if isinstance(by, Answers):
        answers = by.describe(roster, theta)
        return F.normalize(answers, eps=torch.finfo(theta.dtype).tiny), flat(answers.shape[1])
    origin = roster.theta if by == "moved" else torch.zeros_like(roster.theta)
    return directions(origin, theta, roster.layout), roster.layout


def called(by: str | Answers) -> str:
    """What `compared` takes cosines of, in words."""
    if isinstance(by, Answers):
        return "cosine of the models' answers to random inputs"
    return "cosine of how far models moved" if by == "moved" else "cosine of models"


def directions(origin: Tensor, theta: Tensor, layout: Layout) -> Tensor:
    """[K, d] the directions, of length 1, in which models theta: [K, d] moved from origin: [d].

    One that has not moved counts as having moved from 0, a way that hardly resembles that of any other.
    """
    still = (theta == origin).all(1, keepdim=True)
    moved = torch.where(still, theta, theta - origin)
    length = torch.stack([moved[:, layer.trainable].norm(dim=1) for layer in layout.layers]).norm(dim=0)
    return moved.div_(length.clamp(min=torch.finfo(moved.dtype).tiny)[:, None])
