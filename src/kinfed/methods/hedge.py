"""Hedge: kinfed's own: kin, with weights that fall by factors with the loss that each model has brought its receiver.

Multiplicative weights (Freund & Schapire, 1997), with a client's models as the experts and its training as the judge.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.field_checks import NonNegative, Positive
from ..core.method import Compared, Params, Roster
from ..core.rows import put, take
from ..core.trees import ModelOf, Pairwise, PerClient, Shared, Tree
from ..ops.similarity import inner, inner_by_layer
from ..relations import Sketches
from .kin import Kin

LIMIT = 7.0  # of the logarithms of p and q, so that they can come back


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's model: the latest, and since then moved with those of its kin
    trained: PerClient  # [N] int64 how many times a client has trained
    sketch: Sketches | tuple[()]  # of how far each model moved; () without lists
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
        (theta, trained, sketch), count = super().start(roster), len(roster)
        home, sharpness = (theta.new_full((), value).log() for value in (1.0, self.sharpness))
        against, lessons = theta.new_zeros(count, count), theta.new_zeros(count)
        return Server(theta, trained, sketch, against, lessons, home, sharpness)

    def weigh(self, server, logits, cohort, columns):
        itself = cohort[:, None] == columns
        home = logits.softmax(-1).mul(itself).sum(-1, keepdim=True)
        home = home * server.home.exp() / (1 - home + home * server.home.exp())
        logits = server.sharpness.exp() * scores(server, cohort, columns) + logits
        others = logits.masked_fill(itself, -torch.inf).softmax(-1).nan_to_num()
        return torch.where(itself, home, (1 - home) * others)

    def train(self, client, state, received):
        grad = client.gradient(received.theta, client.held_out)
        theta = client.descend(received.theta)
        return Params(theta), Upload(theta, grad)

    def aggregate(self, roster, server, cohort, uploads):
        """What the last mixtures, of M models, have taught about the cohort: [K] that received them."""
        mixed = (server.trained > 0).nonzero().squeeze(1)
        if not (cohort[:, None] != mixed).any():
            return super().aggregate(roster, server, cohort, uploads)
        models = take(server.theta, mixed)
        change = (uploads.theta - self.send(roster, server, cohort).theta) * roster.layout.trainable_on(mixed.device)
        harm = scale_harm(-inner(change, models), cohort[:, None] != mixed)
        slopes = self.slopes(roster, server, cohort, mixed, inner_by_layer(uploads.grad, models, roster.layout))
        moved = (
            log - self.lr * agreement(slope) for log, slope in zip((server.home, server.sharpness), slopes, strict=True)
        )
        home, sharpness = (log.clamp(-LIMIT, LIMIT) for log in moved)
        return (
            super()
            .aggregate(roster, server, cohort, uploads)
            ._replace(
                against=put(server.against, cohort, server.against[cohort].index_add(1, mixed, harm)),
                lessons=put(server.lessons, cohort, server.lessons[cohort] + 1),
                home=home,
                sharpness=sharpness,
            )
        )

    def slopes(self, roster: Roster, server: Tree, cohort: Tensor, mixed: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """[K] slopes of feedback losses by log p, and by log q over q, from those by weights, grad: [L, K, M]."""
        weights, unheard = self.weights(roster, server, cohort)
        rows = weights.dense(len(roster))[..., mixed]  # [L, K, M], or [K, M] of whole models
        grad, itself = grad if self.by_layer else grad.sum(0), cohort[:, None] == mixed
        home = (rows * itself).sum(-1, keepdim=True)
        others = rows * ~itself / (1 - home).clamp(min=torch.finfo(rows.dtype).tiny)
        score = scores(server, cohort, mixed)
        centred = score - (others * score).sum(-1, keepdim=True)
        by_home = home * (1 - home) * ((itself.to(rows) - others) * grad).sum(-1, keepdim=True)
        by_sharpness = (1 - home) * (others * centred * grad).sum(-1, keepdim=True)
        judged = vary(grad) & ~unheard
        return tuple((slope[..., 0] * judged).view(-1, len(cohort)).sum(0) for slope in (by_home, by_sharpness))

    def similarity(self, roster, server):
        values = scores(server, roster.everyone, roster.everyone).fill_diagonal_(torch.nan)
        return Compared("evidence that its model lowers the loss", values)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        return super().diagnostics(roster, server, cohort, sent, uploads) | {
            "p": server.home.exp(),
            "q": server.sharpness.exp(),
        }


def scores(server: Server, cohort: Tensor, columns: Tensor) -> Tensor:
    r"""[K, M] $-S_{ij} / \sqrt{T_i}$ of each of the cohort: [K] for clients of the columns: [M] or [K, M]."""
    against = server.against[cohort]
    against = against[:, columns] if columns.ndim == 1 else against.gather(1, columns)
    return -against / server.lessons[cohort, None].clamp(min=1).sqrt()


def scale_harm(harm: Tensor, others: Tensor) -> Tensor:
    """[K, M] harm less its row's mean, in units of its root mean square, over others: [K, M] bool; 0 elsewhere."""
    others = others.to(harm) * vary(harm)[:, None]  # where models are equal, what is left is rounding errors
    harm = harm * others
    harm = (harm - harm.sum(1, keepdim=True) / others.sum(1, keepdim=True).clamp(min=1)) * others
    return harm / (harm.square().sum() / others.sum().clamp(min=1)).sqrt().clamp(min=1e-30)


def agreement(slopes: Tensor) -> Tensor:
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
