"""Feedback: how a server learns which weights of a mixture would lower its receiver's loss.

Client i was sent sum_j R_ij theta_j, and its loss there has the slope G_ij = <gradient, theta_j> along R_ij. A channel
says what the server asks beside the mixture, what the client answers, and how the server estimates G from that.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from torch import Tensor

from ...core.client import Client
from ...core.method import Roster
from ...core.optimiser import SGD, Optimiser
from ...core.settings import Settings
from ...core.tables import take
from ...core.trees import Axis, ModelOf, PerClient, Tree
from ...errors import UsageError
from ...ops.similarity import inner


class Mixtures(NamedTuple):
    """What K clients were sent, and of what it was mixed."""

    table: Tensor  # [N, d] the clients' models
    mixed: Tensor  # [M] int64 whose were mixed
    speakers: Tensor  # [M] int64 what stands for them in random draws
    listeners: Tensor  # [K] int64 what stands for the receivers
    key: Tensor  # [] int64 of the random draws about this mix
    learned: Tensor  # [d] bool, False on buffers
    rate: Tensor  # [K] how far local training goes against the gradient: learning rate times steps

    @staticmethod
    def of(roster: Roster, server: Tree, cohort: Tensor) -> "Mixtures":
        """What the cohort: [K] was sent at the end of the last round."""
        mixed = server.present.nonzero().squeeze(1)
        learned = roster.layout.trainable_on(server.theta.device)
        steps = roster.training.count_steps(roster.sizes[cohort]).to(server.theta.dtype)
        names = roster.tags[mixed], roster.tags[cohort]
        return Mixtures(server.uploads, mixed, *names, server.key, learned, steps * roster.training.optimiser.lr)

    @property
    def theta(self) -> Tensor:
        """[M, d] the models that were mixed: a copy unless they are everyone's."""
        return take(self.table, self.mixed)


class Sent(NamedTuple):
    """What a client receives."""

    theta: ModelOf[PerClient]  # [d] its mixed model
    asked: Annotated[Tree, Axis.PER_CLIENT]  # what its channel asks


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    answer: PerClient  # [...] of its channel, about the model it received


class Replies(NamedTuple):
    """What the K clients sent back."""

    answers: Tensor  # [K, ...]
    change: Tensor  # [K, d] what local training from the mixture changed; [K, 0] if nobody reads it


class Channel(Settings, ABC):
    """By default the server asks nothing and the client answers nothing."""

    def check(self, feedback: str = "train", optimiser: Optimiser | None = None) -> None:
        """Raise UsageError where it cannot know the gradient on these examples, or from this local training."""

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

    def check(self, feedback: str = "train", optimiser: Optimiser | None = None) -> None:
        if feedback != "train":
            raise UsageError(
                "pfedgat: channel 'delta' reads the training loss off local training, so it needs feedback='train'; "
                f"got '{feedback}'"
            )
        if optimiser is not None and optimiser != SGD(optimiser.lr):
            raise UsageError(
                "pfedgat: channel 'delta' reads gradients off what plain SGD changed: set training.optimiser to sgd "
                "without momentum or decay, or use channel 'exact'"
            )

    def slope(self, mix: Mixtures, replies: Replies) -> Tensor:
        change = replies.change if mix.learned.all() else replies.change * mix.learned
        return -inner(change, mix.theta) / mix.rate[:, None]
