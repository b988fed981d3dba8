"""Hedge: a graph whose weights fall by factors with the loss that each model has brought to its receiver so far."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.method import Compared, Roster
from ...core.optimiser import OptState
from ...core.settings import Positive
from ...core.tables import put
from ...core.trees import Pairwise, PerClient, Shared, Tree
from ...ops.similarity import inner
from .agreement import agreed, vary
from .learned_graph import LearnedGraph, Lesson

LIMIT = 7.0  # of the logarithms of p and q, so that they can come back


class Evidence(NamedTuple):
    """What the graph has learned; it knows nothing of clients it has not seen."""

    against: Pairwise  # [N, N] sums of how much worse than another model the column's was for the row's client
    lessons: PerClient  # [N] how many terms a row of it has
    home: Shared  # [] log of the weight of a client's own model, beside one of all others
    sharpness: Shared  # [] log of the factor of the evidence


@dataclass(frozen=True)
class Hedge(LearnedGraph):
    r"""$R_{ij} \propto \exp(-q\, S_{ij} / \sqrt{T_i})$ over the others, and $p$ of the client's own model beside them.

    A round adds to $S$ the derivatives of the training loss by the weights, less a row's mean, in units of the
    cohort's root mean square: only which models help more counts, whatever the loss, the rate and the model. A client's
    own model would always seem to help, as it has been trained on these examples. So $p$ and $q$, the same for all
    clients, are learned from the feedback, by factors of at most exp(lr) where clients agree.
    """

    home: Positive = 0.3  # p at the start
    sharpness: Positive = 1.0  # q at the start

    @property
    def learns_from_updates(self) -> bool:
        return True

    def draw(self, roster: Roster) -> Evidence:
        theta, count = roster.theta, len(roster)
        home, sharpness = (theta.new_full((), value).log() for value in (self.home, self.sharpness))
        return Evidence(theta.new_zeros(count, count), theta.new_zeros(count), home, sharpness)

    def _scores(self, network: Evidence, cohort: Tensor) -> Tensor:
        """[K, K] for each pair of the cohort: [K], what q multiplies."""
        return -network.against[cohort][:, cohort] / network.lessons[cohort, None].clamp(min=1).sqrt()

    def weights(self, network: Evidence, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        itself = torch.eye(len(cohort), dtype=network.against.dtype, device=cohort.device)
        if len(cohort) == 1:
            return itself
        scores = network.sharpness.exp() * self._scores(network, cohort)
        others = scores.masked_fill(itself.bool(), -torch.inf).softmax(1)
        p = network.home.exp()
        return (others + p * itself) / (1 + p)

    def compared(self, network: Evidence, roster: Roster, server: Tree) -> Compared:
        against = self._scores(network, roster.everyone).fill_diagonal_(torch.nan)
        return Compared("evidence that its model lowers the loss", against)

    def learn(self, roster: Roster, server: Tree, lesson: Lesson, lr: float) -> tuple[Evidence, OptState]:
        network, rows, mixed = server.network, lesson.rows, lesson.mix.mixed
        if len(mixed) == 1:
            return network, server.opt_state
        judges, grad, scores = mixed[rows], lesson.gradient, self._scores(network, mixed)[rows]
        itself = torch.zeros_like(grad).scatter_(1, rows[:, None], 1)
        apart = 1 - itself
        others = self.weights(network, roster, server, mixed)[rows] * apart
        others = others / others.sum(1, keepdim=True)  # [J, M]
        mean, centred = (others * grad).sum(1), scores - (others * scores).sum(1, keepdim=True)
        by_home, by_sharpness = (itself * grad).sum(1) - mean, (others * centred * grad).sum(1)  # or positive multiples
        judged = vary(grad)
        by_home, by_sharpness = by_home * judged, by_sharpness * judged
        harm = -inner(lesson.change * lesson.mix.learned, lesson.mix.theta)
        apart = apart * vary(harm)[:, None]  # where models are equal, what is left is rounding errors
        harm = harm * apart
        harm = (harm - harm.sum(1, keepdim=True) / (len(mixed) - 1)) * apart
        harm = harm / (harm.square().sum() / apart.sum().clamp(min=1)).sqrt().clamp(min=1e-30)
        learned = Evidence(
            against=put(network.against, judges, network.against[judges].index_add(1, mixed, harm)),
            lessons=put(network.lessons, judges, network.lessons[judges] + 1),
            home=(network.home - lr * agreed(by_home)).clamp(-LIMIT, LIMIT),
            sharpness=(network.sharpness - lr * agreed(by_sharpness)).clamp(-LIMIT, LIMIT),
        )
        return learned, server.opt_state
