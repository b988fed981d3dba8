"""pFedGAT whose clients answer with something other than a gradient: nothing, a sketch of it, or losses alone.

Client i was sent sum_j R_ij theta_j, where its loss has the derivative G_ij = <gradient, theta_j> by R_ij. A channel
says what the server asks beside the mixture, what the client answers, and how the server estimates G from that.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kinfed.core.client import Client
from kinfed.core.field_checks import Count, Positive
from kinfed.core.method import Params, Roster
from kinfed.core.optimiser import SGD
from kinfed.core.rows import take
from kinfed.core.seeding import fold, key
from kinfed.core.trees import ModelOf, PerClient
from kinfed.errors import UsageError
from kinfed.methods.parts.cohort_mixing import begin
from kinfed.methods.pfedgat import PFedGAT, Server, Upload
from kinfed.ops.similarity import inner
from kinfed.ops.sketch import count_sketch


class Sent(NamedTuple):
    """What a client receives."""

    theta: ModelOf[PerClient]  # [d] its mixed model
    request: PerClient  # [...] what it is asked about that model


@dataclass(frozen=True)
class Delta(PFedGAT):
    """Nothing new is sent: local training descends on the training loss, exactly so in one step on all examples."""

    feedback: Literal["train"] = "train"  # the examples that local training uses

    def start(self, roster: Roster) -> Server:
        optimiser = roster.training.optimiser
        if optimiser != SGD(optimiser.lr):
            raise UsageError(
                "pfedgat: channel 'delta' infers gradients from updates, which needs plain SGD; set training.optimiser "
                "to sgd without momentum or weight decay, or use pfedgat itself"
            )
        return super().start(roster)

    def answer(self, client: Client, received: Params) -> Tensor:
        return received.theta[:0]

    def slopes(self, roster: Roster, server: Server, cohort: Tensor, mixed: Tensor, uploads: Upload) -> Tensor:
        change = (uploads.theta - begin(server, cohort)) * roster.layout.trainable_on(uploads.theta.device)
        steps = roster.training.count_steps(roster.sizes[cohort]).to(change.dtype)
        way = steps * roster.training.optimiser.lr  # how far local training moves along the negative gradient
        return -inner(change, take(server.uploads, mixed)) / way[:, None]


@dataclass(frozen=True)
class Sketch(PFedGAT):
    """The client is sent a key: [] and answers with a count sketch of its gradient: [size]."""

    size: Count = 256  # how many numbers an answer has

    def send(self, roster: Roster, server: Server, cohort: Tensor) -> Sent:
        return Sent(begin(server, cohort), _key(roster).expand(len(cohort)))

    def answer(self, client: Client, received: Sent) -> Tensor:
        return count_sketch(client.gradient(received.theta, client.held_out), received.request, self.size)

    def slopes(self, roster: Roster, server: Server, cohort: Tensor, mixed: Tensor, uploads: Upload) -> Tensor:
        return uploads.answer @ count_sketch(take(server.uploads, mixed), _key(roster), self.size).T


@dataclass(frozen=True)
class Spsa(PFedGAT):
    """The client is sent steps: [probes, d] and answers with its loss ahead and behind: [probes, 2] (Spall, 1992).

    A step moves all weights of a row by `radius` times random signs that sum to zero, so that they still sum to one.
    """

    probes: Count = 4  # how many steps
    radius: Positive = 0.01  # of a step, in weight

    def send(self, roster: Roster, server: Server, cohort: Tensor) -> Sent:
        mixed = server.present.nonzero().squeeze(1)
        theta = take(server.uploads, mixed)
        steps = self._signs(roster, cohort, mixed).to(theta.dtype) @ theta
        # Running statistics stay as they are, because variances must not become negative.
        steps = steps.mul_(self.radius).mul_(roster.layout.trainable_on(theta.device)).movedim(0, 1)
        return Sent(begin(server, cohort), steps)

    def answer(self, client: Client, received: Sent) -> Tensor:
        steps = [way * step for step in received.request.unbind(0) for way in (1, -1)]
        losses = [client.loss(received.theta + step, client.held_out) for step in steps]
        return torch.stack(losses).view(self.probes, 2)

    def slopes(self, roster: Roster, server: Server, cohort: Tensor, mixed: Tensor, uploads: Upload) -> Tensor:
        derivative = (uploads.answer[..., 0] - uploads.answer[..., 1]) / (2 * self.radius)  # [J, probes]
        signs = self._signs(roster, cohort, mixed).to(derivative.dtype)
        rows = torch.einsum("kp,pkm->km", derivative, signs) / self.probes
        return rows * unbias(rows.shape[1])

    def _signs(self, roster: Roster, cohort: Tensor, mixed: Tensor) -> Tensor:
        keys = fold(_key(roster), torch.arange(self.probes, device=roster.tags.device))
        return draw_signs(keys, roster.tags[cohort], roster.tags[mixed])


def _key(roster: Roster) -> Tensor:
    """[] of the random draws about the mixtures that are judged in this round."""
    return key(roster.seed, "pfedgat", roster.round, device=roster.tags.device)


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
