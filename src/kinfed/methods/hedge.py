"""Hedge: kinfed's own: kin, with weights that fall by factors with the loss that each model has brought its receiver.

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
from ..ops.similarity import inner, inner_by_layer
from .kin import Kin

LIMIT = 7.0  # of the logarithms of p and q, so that they can come back


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's model: the latest, and since then moved with those of its kin
    trained: PerClient  # [N] int64 how many times a client has trained
    against: Pairwise  # [N, N] S: sums of how much worse than another model the column's was for the row's client
    lessons: PerClient  # [N] T: how many terms a row of it has
    home: Shared  # [] log of p, the factor of a client's own weight
    sharpness: Shared  # [] log of q, the factor of the evidence


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    grad: PerClient  # [d] the gradient on its feedback examples at the mixture that it received


@dataclass(frozen=True)
class Hedge(Kin):
    r"""Kin's weights, times $e^{-q S_{ij} / \sqrt{T_i}}$ for the others, and times $p$ for a client's own model.

    A round adds to $S$ the derivatives of the training loss by the weights, less a row's mean, in units of the
    cohort's root mean square: only which models help more counts, whatever the loss, the rate and the model. A
    client's own model would always seem to help, as it has been trained on these examples. So $p$ and $q$, the same
    for all clients, are learned from the feedback examples, by factors of at most exp(lr) where clients agree. Without
    evidence, and with p = 1, weights are those of kin.
    """

    sharpness: Positive = 0.1  # q at the start: how strongly weights follow the evidence
    lr: NonNegative = 1.0  # the largest change of log p and log q in a round; 0: they stay
    feedback: Literal["validation", "held-out", "train", "test"] = "validation"  # examples for p and q; test leaks

    def start(self, roster):
        begun, count = super().start(roster), len(roster)
        home, sharpness = (begun.theta.new_full((), value).log() for value in (1.0, self.sharpness))
        against, lessons = begun.theta.new_zeros(count, count), begun.theta.new_zeros(count)
        return Server(*begun, against, lessons, home, sharpness)

    def train(self, client, state, received):
        grad = client.gradient(received.theta, client.held_out)
        theta = client.descend(received.theta)
        return Params(theta), Upload(theta, grad)

    def aggregate(self, roster, server, cohort, uploads):
        return (
            super().aggregate(roster, server, cohort, uploads)._replace(**self._lesson(roster, server, cohort, uploads))
        )

    def _deal(self, server, logits, cohort, columns):
        itself = cohort[:, None] == columns
        own = logits.softmax(-1).mul(itself).sum(-1, keepdim=True)
        others = self._sway(server, cohort, columns) + logits
        others = others.masked_fill(itself, -torch.inf).softmax(-1).nan_to_num()
        own = own * server.home.exp() / (1 - own + own * server.home.exp())
        return torch.where(itself, own, (1 - own) * others)

    def _scores(self, server, cohort, columns):
        """[K, M] for clients of the columns: [N] or [K, M] and each of the cohort: [K], what q multiplies."""
        against = server.against[cohort]
        against = against[:, columns] if columns.ndim == 1 else against.gather(1, columns)
        return -against / server.lessons[cohort, None].clamp(min=1).sqrt()

    def _sway(self, server, cohort, columns):
        return server.sharpness.exp() * self._scores(server, cohort, columns)

    def _lesson(self, roster, server, cohort, uploads):
        """What the last mixtures, of M models, have taught about the cohort: [K] that received them, by field."""
        sent = self.send(roster, server, cohort).theta
        mixed, layout = (server.trained > 0).nonzero().squeeze(1), roster.layout
        itself = (cohort[:, None] == mixed).to(sent)  # [K, M]
        apart = 1 - itself
        if not apart.any():
            return {}
        models = take(server.theta, mixed)
        harm = -inner((uploads.theta - sent) * layout.trainable_on(sent.device), models)
        apart = apart * vary(harm)[:, None]  # where models are equal, what is left is rounding errors
        harm = harm * apart
        harm = (harm - harm.sum(1, keepdim=True) / apart.sum(1, keepdim=True).clamp(min=1)) * apart
        harm = harm / (harm.square().sum() / apart.sum().clamp(min=1)).sqrt().clamp(min=1e-30)
        by_home, by_sharpness = self._slopes(
            roster, server, cohort, mixed, inner_by_layer(uploads.grad, models, layout)
        )
        return dict(
            against=put(server.against, cohort, server.against[cohort].index_add(1, mixed, harm)),
            lessons=put(server.lessons, cohort, server.lessons[cohort] + 1),
            home=(server.home - self.lr * agreed(by_home)).clamp(-LIMIT, LIMIT),
            sharpness=(server.sharpness - self.lr * agreed(by_sharpness)).clamp(-LIMIT, LIMIT),
        )

    def _slopes(self, roster, server, cohort, mixed, grad):
        """[K] slopes of feedback losses by log p, and by log q over q, from those by weights, grad: [L, K, M]."""
        weights, still = self._attend(roster, server, cohort)
        rows = weights.dense(len(roster))[..., mixed]  # [L, K, M], or [K, M] of whole models
        grad = grad if self.by_layer else grad.sum(0)
        itself = cohort[:, None] == mixed
        own = (rows * itself).sum(-1, keepdim=True)
        others = rows * ~itself / (1 - own).clamp(min=torch.finfo(rows.dtype).tiny)
        scores = self._scores(server, cohort, mixed)
        centred = scores - (others * scores).sum(-1, keepdim=True)
        by_home = own * (1 - own) * ((itself.to(rows) - others) * grad).sum(-1, keepdim=True)
        by_sharpness = (1 - own) * (others * centred * grad).sum(-1, keepdim=True)
        judged = vary(grad) & ~still
        return tuple((slope[..., 0] * judged).view(-1, len(cohort)).sum(0) for slope in (by_home, by_sharpness))

    def similarity(self, roster, server):
        against = self._scores(server, roster.everyone, roster.everyone).fill_diagonal_(torch.nan)
        return Compared("evidence that its model lowers the loss", against)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        return super().diagnostics(roster, server, cohort, sent, uploads) | {
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
