"""Feedback: how a server learns which weights of a mixture would lower its receiver's loss.

Client i was sent sum_j R_ij theta_j, where its loss has the derivative G_ij = <gradient, theta_j> by R_ij. A channel
says what the server asks beside the mixture, what the client answers, and how the server estimates G from that.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ...core.client import Client
from ...core.method import Roster
from ...core.optimiser import SGD, Optimiser
from ...core.settings import Settings
from ...core.tables import take
from ...core.trees import Axis, ModelOf, PerClient, Tree
from ...errors import UsageError
from ...ops.mixing import weighted_mean
from ...ops.similarity import inner


class Mixtures(NamedTuple):
    """What K clients were sent, and the models that were mixed for them."""

    table: Tensor  # [N, d] the clients' models
    mixed: Tensor  # [M] int64 ids of the clients whose models were mixed
    speakers: Tensor  # [M] int64 their tags in random draws
    listeners: Tensor  # [K] int64 the receivers' tags in random draws
    key: Tensor  # [] int64 of the random draws about these mixtures
    learned: Tensor  # [d] bool, False on buffers
    rate: Tensor  # [K] how far local training moves along the negative gradient: learning rate times steps

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
    request: Annotated[Tree, Axis.PER_CLIENT]  # what the channel asks it


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    answer: PerClient  # [...] to the channel, about the model it received


class Replies(NamedTuple):
    """What the K clients sent back."""

    answers: Tensor  # [K, ...]
    change: Tensor  # [K, d] the change by local training from the mixture; [K, 0] if it is not used


class Channel(Settings, ABC):
    """How the server learns G. By default it asks nothing and the client answers nothing."""

    def check(self, feedback: str = "train", optimiser: Optimiser | None = None) -> None:
        """Raise UsageError if the gradient cannot be known on these examples, or from this local training."""

    def ask(self, mix: Mixtures) -> Tree:
        """[K, ...] what is sent beside the mixtures."""
        return ()

    def answer(self, client: Client, theta: Tensor, request: Tree) -> Tensor:
        """One client's answer about the mixture theta: [d] that it was sent."""
        return theta[:0]

    @abstractmethod
    def gradient(self, mix: Mixtures, replies: Replies) -> Tensor:
        """[K, M] the estimate of G."""


@dataclass(frozen=True)
class Exact(Channel):
    """The client answers with its gradient: [d]."""

    def answer(self, client: Client, theta: Tensor, request: Tree) -> Tensor:
        return client.gradient(theta, client.held_out)

    def gradient(self, mix: Mixtures, replies: Replies) -> Tensor:
        return inner(replies.answers, mix.theta)


@dataclass(frozen=True)
class Delta(Channel):
    """Nothing new is sent: local training descends on the training loss, exactly so in one step on all examples."""

    def check(self, feedback: str = "train", optimiser: Optimiser | None = None) -> None:
        if feedback != "train":
            raise UsageError(
                "pfedgat: channel 'delta' infers the gradient of the training loss from local training, so it needs "
                f"feedback='train'; got '{feedback}'"
            )
        if optimiser is not None and optimiser != SGD(optimiser.lr):
            raise UsageError(
                "pfedgat: channel 'delta' infers gradients from updates, which needs plain SGD; set training.optimiser "
                "to sgd without momentum or weight decay, or use channel 'exact'"
            )

    def gradient(self, mix: Mixtures, replies: Replies) -> Tensor:
        change = replies.change if mix.learned.all() else replies.change * mix.learned
        return -inner(change, mix.theta) / mix.rate[:, None]


def begin(server: Tree, cohort: Tensor) -> Tensor:
    """[K, d] the models that the cohort starts from: the mean of all for those who have never taken part."""
    theta, new = take(server.theta, cohort), ~server.seen[cohort]
    both = new.any() and server.seen.any()
    return torch.where(new[:, None], weighted_mean(server.theta, server.seen), theta) if both else theta
