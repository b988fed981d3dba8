"""Hedge: kinfed's own: weights that fall by factors with the loss that each model has brought to its receiver so far.

Multiplicative weights (Freund & Schapire, 1997), with a client's models as the experts and its training as the judge.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.field_checks import NonNegative, Positive
from ..core.method import Compared, Params
from ..core.rows import put, take
from ..core.trees import ModelOf, Pairwise, PerClient, Shared
from ..ops.similarity import inner
from .parts.cohort_mixing import CohortMixing, begin

LIMIT = 7.0  # of the logarithms of p and q, so that they can come back


class Server(NamedTuple):
    """The server's state."""

    uploads: PerClient  # [N, d] the models as last trained
    theta: PerClient  # [N, d] the models as last mixed, from which clients start
    present: PerClient  # [N] bool, in the cohort that was mixed last
    seen: PerClient  # [N] bool, has taken part
    against: Pairwise  # [N, N] S: sums of how much worse than another model the column's was for the row's client
    lessons: PerClient  # [N] T: how many terms a row of it has
    home: Shared  # [] log of p, the weight of a client's own model, beside one of all others
    sharpness: Shared  # [] log of q, the factor of the evidence


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    grad: PerClient  # [d] the gradient on its feedback examples at the mixture that it received


@dataclass(frozen=True)
class Hedge(CohortMixing):
    r"""$\theta_i \leftarrow \sum_j R_{ij} \theta_j$, $R_{ij} \propto e^{-q S_{ij} / \sqrt{T_i}}$ over the others.

    A client's own model has $p$ beside one of all others. A round adds to $S$ the derivatives of the training loss by
    the weights, less a row's mean, in units of the cohort's root mean square: only which models help more counts,
    whatever the loss, the rate and the model. A client's own model would always seem to help, as it has been trained
    on these examples. So $p$ and $q$, the same for all clients, are learned from the feedback examples, by factors of
    at most exp(lr) where clients agree. The cohort's models are mixed; other clients keep theirs, and one that has
    never taken part starts from the mean.
    """

    home: Positive = 0.3  # p at the start: a client's weight for its own model, beside one of all others
    sharpness: Positive = 1.0  # q at the start: how strongly weights follow the evidence
    lr: NonNegative = 2.0  # the largest change of log p and log q in a round; 0: they stay
    feedback: Literal["validation", "held-out", "train", "test"] = "validation"  # examples for p and q; test leaks

    def start(self, roster):
        theta, count = roster.copies(), len(roster)
        nobody = torch.zeros(count, dtype=torch.bool, device=theta.device)
        home, sharpness = (theta.new_full((), value).log() for value in (self.home, self.sharpness))
        against, lessons = theta.new_zeros(count, count), theta.new_zeros(count)
        return Server(theta, theta, nobody, nobody, against, lessons, home, sharpness)

    def train(self, client, state, received):
        grad = client.gradient(received.theta, client.held_out)
        theta = client.descend(received.theta)
        return Params(theta), Upload(theta, grad)

    def graph(self, roster, server, cohort):
        return self.weights(server, cohort)

    def weights(self, server, cohort):
        """[K, K] the weights of the mixture for each of the cohort: [K]; rows sum to one."""
        itself = torch.eye(len(cohort), dtype=server.against.dtype, device=cohort.device)
        if len(cohort) == 1:
            return itself
        scores = server.sharpness.exp() * self._scores(server, cohort)
        others = scores.masked_fill(itself.bool(), -torch.inf).softmax(1)
        p = server.home.exp()
        return (others + p * itself) / (1 + p)

    def _scores(self, server, cohort):
        """[K, K] for each pair of the cohort: [K], what q multiplies."""
        return -server.against[cohort][:, cohort] / server.lessons[cohort, None].clamp(min=1).sqrt()

    def learn(self, roster, server, cohort, uploads):
        """What the last mixtures, of M models, have taught about J clients that received one."""
        mixed, judging = server.present.nonzero().squeeze(1), server.present[cohort].nonzero().squeeze(1)
        if not len(judging) or len(mixed) == 1:
            return server
        judges, models = cohort[judging], take(server.uploads, mixed)
        rows = torch.searchsorted(mixed, judges)  # [J] which of the M models is the judge's own
        itself = torch.zeros(len(rows), len(mixed)).to(models).scatter_(1, rows[:, None], 1)  # [J, M]
        apart = 1 - itself
        change = take(uploads.theta - begin(server, cohort), judging)  # [J, d] by local training
        harm = -inner(change * roster.layout.trainable_on(models.device), models)
        apart = apart * vary(harm)[:, None]  # where models are equal, what is left is rounding errors
        harm = harm * apart
        harm = (harm - harm.sum(1, keepdim=True) / (len(mixed) - 1)) * apart
        harm = harm / (harm.square().sum() / apart.sum().clamp(min=1)).sqrt().clamp(min=1e-30)
        by_home, by_sharpness = self._slopes(server, mixed, rows, itself, inner(take(uploads.grad, judging), models))
        return server._replace(
            against=put(server.against, judges, server.against[judges].index_add(1, mixed, harm)),
            lessons=put(server.lessons, judges, server.lessons[judges] + 1),
            home=(server.home - self.lr * agreed(by_home)).clamp(-LIMIT, LIMIT),
            sharpness=(server.sharpness - self.lr * agreed(by_sharpness)).clamp(-LIMIT, LIMIT),
        )

    def _slopes(self, server, mixed, rows, itself, grad):
        """[J] slopes, or positive multiples, of feedback losses by log p and log q, from those by weights: [J, M]."""
        scores, apart = self._scores(server, mixed)[rows], 1 - itself
        others = self.weights(server, mixed)[rows] * apart
        others = others / others.sum(1, keepdim=True)  # [J, M]
        mean, centred = (others * grad).sum(1), scores - (others * scores).sum(1, keepdim=True)
        by_home, by_sharpness = (itself * grad).sum(1) - mean, (others * centred * grad).sum(1)
        judged = vary(grad)
        return by_home * judged, by_sharpness * judged

    def similarity(self, roster, server):
        against = self._scores(server, roster.everyone).fill_diagonal_(torch.nan)
        return Compared("evidence that its model lowers the loss", against)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        entropy = torch.special.entr(self.weights(server, cohort)).sum(1)
        return super().diagnostics(roster, server, cohort, sent, uploads) | {
            "entropy": roster.note(cohort, entropy),
            "p": server.home.exp(),
            "q": server.sharpness.exp(),
        }


def agreed(slopes: Tensor) -> Tensor:
    """[...] in [-1, 1]: the mean of slopes: [..., K] of K clients over their root mean square, without what is chance.

    K slopes that agree on nothing have a squared ratio of 1 / K on average, so a ratio of r counts as
    r max(0, 1 - 1 / (K r^2)), which is the rule of James and Stein. One client's slope counts as nothing.
    """
    largest = slopes.abs().amax(-1, keepdim=True)
    slopes = slopes / largest.where(largest > 0, 1)  # so that squares do not underflow
    mean, square = slopes.mean(-1), slopes.square().mean(-1)
    ratio = mean / square.sqrt().clamp(min=1e-12)
    chance = square / (slopes.shape[-1] * mean.square()).clamp(min=1e-12)
    return ratio * (1 - chance).clamp(min=0)


def vary(rows: Tensor) -> Tensor:
    """[...] bool: whether the numbers of rows: [..., M] differ by more than rounding errors."""
    spread = rows.amax(-1) - rows.amin(-1)
    return spread > 32 * torch.finfo(rows.dtype).eps * rows.abs().amax(-1)
