"""The verdict at one client: what learning from others was worth to it, by its own test examples."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .verdict import ALONE, HELPS, HELPS_NOT, LEVEL, ONE, Evidence, evidence, plain

Array = NDArray[Any]


@dataclass(frozen=True)
class OwnVerdict:
    """What a method was worth to one client, in a sentence and in numbers."""

    sentence: str
    scores: dict[str, float]  # mean test scores: of the method, of "local", and of "fedavg" if it was trained
    over: dict[str, Evidence]  # over "local" and "fedavg"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"over": {other: found._asdict() for other, found in self.over.items()}}


def judge_one(
    method: str, mine: Array, others: Mapping[str, Array], *, metric: str, higher_is_better: bool, unit: str = ""
) -> OwnVerdict:
    """Compare a client's model with that of "local", and of "fedavg" if it is there, on the same test examples.

    Scores are [n], one for each test example, or [1] where the metric is defined for all of them together only; then
    nothing is beyond noise. Whether a difference is, in either direction, says the test by which `verdict.judge` finds
    who gains and who loses, at 5 %, here of one client alone. `unit` is what the metric is counted in, "%" for a share.
    """
    sign = 1 if higher_is_better else -1
    means = {method: float(np.mean(mine))} | {name: float(np.mean(scores)) for name, scores in others.items()}
    over = {name: evidence([[mine]], [[scores]], [""], higher_is_better)[""] for name, scores in others.items()}
    beyond = {name: found.p <= 1 - LEVEL for name, found in over.items()}
    better = {name: sign * (means[method] - means[name]) for name in others}
    found, helps = over["local"], f"{ONE} helps" if method == "fedavg" else HELPS
    if "fedavg" in others and better["fedavg"] <= 0 and _helps(others["fedavg"], others["local"], higher_is_better):
        says = f"{ONE} does {'better' if beyond['fedavg'] else 'as well'} here"
    elif not beyond["local"]:
        says = f"cannot tell whether {helps} here"
    elif better["local"] > 0:
        says = f"{helps} here"
    else:
        says = f"{HELPS_NOT}: keep the model learnt alone"
    named = {method: f"with {method}", "local": f"when {ALONE}", "fedavg": f"with {ONE}"}
    listed = ", ".join(f"{write_score(value, unit)} {named[name]}" for name, value in means.items())
    says = f"{says}: {metric} {listed}"
    if len(mine) > 1:
        says += (
            f"; better than alone on {found.better} and worse on {found.worse} of "
            f"{len(mine):,} test examples (p = {found.p:.2g})"
        )
    return OwnVerdict(says, means, over)


def _helps(shared: Array, alone: Array, higher_is_better: bool) -> bool:
    """Whether one model for all is beyond learning alone."""
    found = evidence([[shared]], [[alone]], [""], higher_is_better)[""]
    ahead = (1 if higher_is_better else -1) * float(np.mean(shared) - np.mean(alone)) > 0
    return ahead and found.p <= 1 - LEVEL


def write_score(value: float, unit: str) -> str:
    """A score in words, such as "91.5 %" if its unit is "%"."""
    return f"{100 * value:.1f} %" if unit == "%" else plain(value)
