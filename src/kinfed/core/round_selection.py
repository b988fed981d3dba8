"""Which round, and which of a method's models, validation selects."""

import math
from collections.abc import Mapping, Sequence


def select_round(rounds: Sequence[int], means: Sequence[float], higher_is_better: bool) -> int:
    """The round whose mean validation score is best, the first of equals; the last if no round has a score.

    `means` has a mean over clients for each of the evaluated rounds, NaN where nobody has a score.
    """
    best = _best(means, higher_is_better)
    return rounds[-1] if math.isnan(means[best]) else rounds[best]


def select_model(scores: Mapping[str, Mapping[str, float]], higher_is_better: bool) -> str:
    """The named model with the best `validation`, the first of equals; without validation data the headline."""
    names = list(scores)
    if not all("validation" in score for score in scores.values()):
        return names[0]
    return names[_best([score["validation"] for score in scores.values()], higher_is_better)]


def _best(values: Sequence[float], higher_is_better: bool) -> int:
    """Where the best value is; NaN is the worst."""
    sign = 1 if higher_is_better else -1
    return max(range(len(values)), key=lambda i: (not math.isnan(values[i]), sign * values[i]))
