"""Which round, and which of a method's models, validation selects."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .metrics import mean_over_clients
from .tasks import Task, is_higher_better


class Selection(NamedTuple):
    """By which validation score a round and a kind of model are selected, unless these are given."""

    by: str = ""  # the score; "": the task's metric
    keep: str = ""  # the kind of model that is kept; "": the one that validation prefers
    last: bool = False  # whether the last round is the answer, as of a solver
    unseen: bool = False  # whether scores select nothing, as under privacy, where they have no price


class Selector:
    """By which score, and over which clients, the rounds of a run are selected."""

    def __init__(self, task: Task) -> None:
        self.task, self.selection = task, Selection()
        self.honest: Tensor | slice = slice(None)  # [N] bool: False on attackers, who are ignored; a slice of all
        self._means: dict[tuple[int, str], tuple[Tensor, float]] = {}  # by a tensor's id: with it, the id stays its

    @property
    def score(self) -> str:
        """The name of the validation score that selects rounds and models."""
        return self.selection.by or getattr(self.task, "selects", "") or self.task.metric

    @property
    def higher_is_better(self) -> bool:
        """Whether that score is better if it is higher."""
        return is_higher_better(self.task, self.score)

    def mask(self, values: Tensor) -> Tensor:
        """[..., N] values, with NaN for attackers."""
        return values if isinstance(self.honest, slice) else values.masked_fill(~self.honest, torch.nan)

    def mean(self, values: Tensor | None, score: str) -> float:
        """The mean over clients of a score: [N], NaN without it; it is worked out once, as every round asks."""
        if values is None:
            return math.nan
        if (id(values), score) not in self._means:
            self._means[id(values), score] = values, mean_over_clients(self.mask(values), score)
        return self._means[id(values), score][1]


def select_round(
    rounds: Sequence[int], means: Sequence[float], higher_is_better: bool, losses: Sequence[float] = ()
) -> int:
    """The round whose mean validation score is best; the last if no round has a score.

    `means` has a mean over clients for each of the evaluated rounds, NaN where nobody has a score. Of equals, as
    accuracies of few examples often are, it is the round with the lowest of `losses`, and of those the first.
    """
    best = _best(means, higher_is_better, losses)
    return rounds[-1] if math.isnan(means[best]) else rounds[best]


def select_model(scores: Mapping[str, Mapping[str, float]], higher_is_better: bool) -> str:
    """The named model with the best `validation`, the first of equals; without validation data the headline."""
    names = list(scores)
    if not all("validation" in score for score in scores.values()):
        return names[0]
    return names[_best([score["validation"] for score in scores.values()], higher_is_better)]


def _best(values: Sequence[float], higher_is_better: bool, losses: Sequence[float] = ()) -> int:
    """Where the best value is, of equals the one with the lowest loss; NaN is the worst."""
    sign = 1 if higher_is_better else -1

    def rank(i: int) -> tuple[bool, float, float]:
        loss = losses[i] if losses else 0.0
        return not math.isnan(values[i]), sign * values[i], -math.inf if math.isnan(loss) else -loss

    return max(range(len(values)), key=rank)
