"""Which round, and which of a method's models, validation selects."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Selection(NamedTuple):
    """By which validation score a round and a kind of model are selected, unless these are given."""

    by: str = ""  # the score; "": the task's metric
    keep: str = ""  # the kind of model that is kept; "": the one that validation prefers
    last: bool = False  # whether the last round is the answer, as of a solver
    unseen: bool = False  # whether scores select nothing, as under privacy, where they have no price


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
