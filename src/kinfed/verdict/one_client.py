"""The verdict at one client: what learning from others was worth to it, by its own test examples."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dependence import INDEPENDENT, Blocks
from .verdict import BEST_ALONE, HELPS, HELPS_NOT, LEVEL, ONE, Evidence, evidence, plain

Array = NDArray[Any]


@dataclass(frozen=True)
class OwnVerdict:
    """What a method was worth to one client, in a sentence and in numbers."""

    sentence: str
    scores: dict[str, float]  # mean test scores: of the method, of "alone", and of "fedavg" if it was trained
    over: dict[str, Evidence]  # over "alone" and "fedavg"
    baseline: str  # the best baseline without others

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"over": {other: comparison._asdict() for other, comparison in self.over.items()}}


def judge_one(
    method: str,
    mine: Array,
    alone: tuple[str, Array],
    fedavg: Array | None = None,
    *,
    metric: str,
    higher_is_better: bool,
    unit: str = "",
    blocks: Blocks = INDEPENDENT,
) -> OwnVerdict:
    """Compare a client's model with the best baseline without others, and with FedAvg's if it is there.

    Scores are [n], one for each test example, or [1] where the metric is defined for all of them together only; then
    nothing is beyond noise. Whether a difference is, in either direction, says the test by which `verdict.judge` finds
    who gains and who loses, at 5 %, here of one client alone. `alone` is the baseline's name and its scores; `unit` is
    what the metric is counted in, "%" for a share; `blocks` say which examples belong together.
    """
    others = {"alone": alone[1]} | ({} if fedavg is None else {"fedavg": fedavg})
    sign = 1 if higher_is_better else -1
    means = {method: float(np.mean(mine))} | {name: float(np.mean(scores)) for name, scores in others.items()}
    over = {name: evidence([[mine]], [[scores]], [""], higher_is_better, blocks)[""] for name, scores in others.items()}
    beyond = {name: comparison.p <= 1 - LEVEL for name, comparison in over.items()}
    better = {name: sign * (means[method] - means[name]) for name in others}
    helps = f"{ONE[0].upper()}{ONE[1:]} helps" if method == "fedavg" else HELPS
    if fedavg is not None and better["fedavg"] <= 0 and _helps(fedavg, alone[1], higher_is_better, blocks):
        says = f"{ONE[0].upper()}{ONE[1:]} does {'better' if beyond['fedavg'] else 'as well'} here"
    elif not beyond["alone"]:
        says = f"Cannot tell whether {helps[0].lower()}{helps[1:]} here"
    elif better["alone"] > 0:
        says = f"{helps} here"
    else:
        says = f"{HELPS_NOT}: keep the baseline"
    named = {method: f"with {method}", "alone": f"with {BEST_ALONE}, {alone[0]}", "fedavg": f"with {ONE}"}
    listed = ", ".join(f"{write_score(value, unit)} {named[name]}" for name, value in means.items())
    says = f"{says}: {metric} {listed}."
    if len(mine) > 1:
        over_alone = over["alone"]
        says += (
            f" It is better on {over_alone.better} and worse on {over_alone.worse} of "
            f"{len(mine):,} test examples (p = {over_alone.p:.2g})."
        )
        if blocks.declared:
            says += " Test examples of one group count as one observation."
    return OwnVerdict(says, means, over, alone[0])


def _helps(shared: Array, alone: Array, higher_is_better: bool, blocks: Blocks) -> bool:
    """Whether one model for all is beyond the best baseline without others."""
    comparison = evidence([[shared]], [[alone]], [""], higher_is_better, blocks)[""]
    ahead = (1 if higher_is_better else -1) * float(np.mean(shared) - np.mean(alone)) > 0
    return ahead and comparison.p <= 1 - LEVEL


def write_score(value: float, unit: str) -> str:
    """A score in words, such as "91.5 %" if its unit is "%"."""
    return f"{100 * value:.1f} %" if unit == "%" else plain(value)
