"""Outside: what a choice is worth beside standard models that need no federation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.tasks import TASKS, unit_of
from ..data.federation import Federation
from ..verdict.one_client import write_score
from ..verdict.verdict import LEVEL, difference, evidence
from .outsiders import Outsider, outsiders
from .test_scores import Tested, of_examples

PLAIN = (
    "the client's own mean",
    "the client's own majority",
    "the last value",
    "the last season",
    "the mean at this time of day",
)  # what needs no model at all


class Outside(NamedTuple):
    """The standard models' test scores, and what to say of those that do better than the answer."""

    rows: list[dict[str, Any]]  # best first: `name`, `pools`, `needs`, `mean` over clients of the task's metric
    first: str  # a sentence that comes before the verdict: an answer is behind what needs no model
    last: str  # and one that comes after it

    def around(self, sentence: str) -> str:
        """A verdict's sentence that also says which of them do better."""
        return "; ".join(filter(None, [self.first, sentence, self.last]))


def compare(federation: Federation, answer: Tested, pool: bool = True) -> Outside | None:
    """Train them and compare them with an answer; None where none suits, or single examples have no scores.

    Without `pool` those that need all rows in one place are left out.
    """
    task = federation.task
    if type(task) not in TASKS.values() or answer.examples is None:
        return None
    names = [name for name in federation.names if name in answer.examples]
    mine = [answer.examples[name] for name in names]
    found = [(one, _scores(federation, one, names)) for one in outsiders(federation, pool)]
    sign = 1 if task.higher_is_better else -1
    found.sort(key=lambda one: -sign * _mean(one[1]))
    if not found:
        return None
    rows = [{"name": one.name, "pools": one.pools, "needs": one.needs, "mean": _mean(scores)} for one, scores in found]
    ahead = [(one, scores) for one, scores in found if sign * (_mean(scores) - _mean(mine)) > 0]
    plain = [pair for pair in ahead if pair[0].name in PLAIN]
    level = max((sign * _mean(scores) for _, scores in plain), default=-math.inf)
    models = [pair for pair in ahead if pair[0].name not in PLAIN and sign * _mean(pair[1]) > level]
    said = models[:1] + [pair for pair in models[1:] if models[0][0].pools and not pair[0].pools][:1]
    unit = unit_of(task)

    def tell(pair: tuple[Outsider, Sequence[NDArray[Any]]]) -> str:
        one, scores = pair
        clearly = _is_behind(mine, scores, names, task.higher_is_better)
        both = f"{task.metric} {write_score(_mean(scores), unit)} against {write_score(_mean(mine), unit)}"
        what = "better" if clearly else "at least as well"
        return f"{one.name} does {what} ({both}){', ' if one.pools else ': '}{one.needs}"

    return Outside(rows, "; ".join(map(tell, plain[:1])), "; ".join(map(tell, said)))


def _is_behind(mine: Sequence[Any], scores: Sequence[Any], names: Sequence[str], higher_is_better: bool) -> bool:
    """Whether scores are better beyond noise: by clients or, of one client, by its test examples."""
    if len(names) > 1:
        return difference(mine, scores, names, higher_is_better).high < 0
    return evidence([mine], [scores], names, higher_is_better)[names[0]].p <= 1 - LEVEL


def _scores(federation: Federation, one: Outsider, names: Sequence[str]) -> list[NDArray[Any]]:
    """[n] the score of each test example, by client."""
    at = list(federation.rows["test"])
    outputs = torch.from_numpy(one.answers["test"]).to(federation.x.dtype)
    y = federation.y[torch.cat(at)]
    scores = of_examples(federation.task, outputs.reshape(len(y), -1), y).split([len(rows) for rows in at])
    by_name: Mapping[str, NDArray[Any]] = {
        name: each.numpy() for name, each in zip(federation.names, scores, strict=True)
    }
    return [by_name[name] for name in names]


def _mean(scores: Sequence[NDArray[Any]]) -> float:
    """Over clients, of the means of their examples that have a score."""
    return float(np.nanmean([np.nanmean(one) for one in scores if np.isfinite(one).any()]))
