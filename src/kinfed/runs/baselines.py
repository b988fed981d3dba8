"""Baselines: the best that each client could do without others, and the best that pooling does.

Every verdict is against these two. The best baseline without others is one of Local and the standard models for each
client; the best pooled baseline is one of FedAvg and the standard models of all rows. Each is chosen once for the
federation. Validation rows rule out those that are clearly worse than the best of them, by Student's interval of the
differences over clients. Of those that are left the best on test rows is taken. So a choice that validation rows cannot
make never favours the method, and whoever fits another of these models finds no smaller gain.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ..core import checkpoint
from ..core.summary import Metric
from ..core.tasks import TASKS
from ..data.federation import Federation
from ..errors import several
from ..files import readable
from ..verdict.dependence import INDEPENDENT
from ..verdict.verdict import FEDAVG, LOCAL, ScoredBaseline, Scores, Verdict, interval_over_clients, judge
from .config.named_baselines import NamedBaseline
from .run_folder import RunFolder
from .standard_models import Form, StandardModel, standard_models
from .test_scores import align, blocks_of, of_examples
from .tested_examples import Tested

NAMES = {"local": LOCAL, "fedavg": FEDAVG}  # of the methods that are baselines
NONE_STANDARD = "no standard models were fitted, so Local is the only baseline without others"
LEAKING = "leaking: these scores are not a fair estimate"
BY_TEST = "without validation rows the baselines are the best on test rows, which favours them"


@dataclass(frozen=True)
class Baseline:
    """What a method is compared with, with one seed."""

    name: str
    pools: bool  # whether it learns from all clients
    needs_rows: bool  # whether it needs all rows in one place
    validation: dict[str, float]  # by client the score that selects; empty without validation rows
    tested: Tested
    form: Form | None = None  # what a standard model of one client is as a run

    @property
    def mean(self) -> float:
        """The mean test score over clients."""
        return float(np.nanmean(list(self.tested.means.values())))


class Best(NamedTuple):
    """A baseline that was chosen for a federation, with its test scores by seed."""

    name: str
    tested: list[Tested]
    needs_rows: bool
    rivals: int  # among how many test rows have chosen it


class Floor(NamedTuple):
    """The two baselines that a method is judged against; None where there is none of a kind."""

    alone: Best | None
    pooled: Best | None
    by_test: bool = False  # whether they were chosen on test rows, for want of validation rows


def standard_baselines(
    federation: Federation, select_by: str = "", pool: bool = True, named: Sequence[NamedBaseline] = ()
) -> tuple[list[Baseline], list[str]]:
    """The standard models of a federation as baselines, and what was left out and why.

    `select_by` is the score that selects rounds, by default the task's metric. Without `pool` there are those alone
    that each client can have by itself. `named` are estimators of the user. There are none
    for a task or a metric of one's own.
    """
    task = federation.task
    if type(task) not in TASKS.values():
        return [], [f"baseline left out: {baseline.name}, as the task is one of your own" for baseline in named]
    models, problems = standard_models(federation, pool, named)
    by = select_by or task.metric
    return [_baseline(federation, baseline, by) for baseline in models], problems


def floor(by_seed: Sequence[Iterable[Baseline]], higher_is_better: bool, select_highest: bool | None = None) -> Floor:
    """The best baseline without others and the best pooled one, of the same baselines with each seed.

    `higher_is_better` is of the metric, `select_highest` of the score by which rounds and baselines are selected, if
    that is another. A baseline that lacks a seed is none.
    """
    runs = [{baseline.name: baseline for baseline in baselines} for baselines in by_seed]
    shared = share_names(runs)
    highest = higher_is_better if select_highest is None else select_highest
    best, by_test = dict[bool, Best](), False
    for pools in (False, True):
        named = {name: [run[name] for run in runs] for name in shared if runs[0][name].pools == pools}
        if not named:
            continue
        left = _left_by_validation(named, highest)
        by_test |= not left
        tests = {name: float(np.mean([baseline.mean for baseline in named[name]])) for name in left or named}
        name = max(tests, key=lambda name: _rank(tests[name], higher_is_better))
        needs_rows = named[name][0].needs_rows
        best[pools] = Best(name, [baseline.tested for baseline in named[name]], needs_rows, len(tests))
    return Floor(best.get(False), best.get(True), by_test)


def share_names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names that all of several runs have, in the order of the first."""
    common = set(runs[0]).intersection(*runs[1:]) if runs else set[str]()
    return [name for name in runs[0] if name in common] if runs else []


def _left_by_validation(named: Mapping[str, Sequence[Baseline]], highest: bool) -> list[str]:
    """The baselines that validation does not rule out, the best first; none without validation scores.

    With one or two clients, whose differences have no interval, it is the best alone.
    """
    if len(named) == 1:
        return list(named)
    clients = list(dict.fromkeys(name for runs in named.values() for baseline in runs for name in baseline.validation))
    scores = {
        name: np.array([[baseline.validation.get(client, math.nan) for client in clients] for baseline in runs]).mean(0)
        for name, runs in named.items()
    }
    scored = ~np.isnan(list(scores.values())).any(0) if clients else np.zeros(0, bool)  # [N] by all of them
    if not scored.any():
        return []
    means = {name: float(values[scored].mean()) for name, values in scores.items()}
    leader = max(means, key=lambda name: _rank(means[name], highest))
    left = [leader]
    for name in named:
        gain = (scores[leader] - scores[name])[scored] * (1 if highest else -1)
        mean, low, _ = interval_over_clients(gain)
        if name != leader and (mean == 0 or low <= 0):
            left.append(name)
    return left


def verdict(
    method: str,
    metric: Metric,
    mine: Sequence[Tested],
    against: Floor,
    *,
    candidates: int = 1,
    saved: str = "",
    notes: Sequence[str] = (),
) -> Verdict | None:
    """Judge a method by its runs, one for each seed, and the baselines with the same seeds; None without a baseline.

    If a run has not written the scores of examples, those of clients are compared; then no client gains or loses.
    `saved` says which models are saved, `notes` are further remarks.
    """
    if against.alone is None:
        return None
    best_baselines = [best for best in (against.alone, against.pooled) if best is not None]
    runs = [mine, *(best.tested for best in best_baselines)]
    by_example = all(tested.examples is not None for seeds in runs for tested in seeds)
    remarks = [*notes]
    if against.by_test:
        remarks.append(BY_TEST)
    if any(tested.leaking for tested in mine):
        remarks.append(LEAKING)
    if attackers := max(tested.attackers for tested in mine):
        left = f"{several(attackers, 'client')} attack{'s and is' if attackers == 1 else ' and are'} left out"
        remarks.append(f"{left}; standard models were fitted without the attack")
    names, (scores, *others) = align(runs, by_example)
    return judge(
        method,
        scores,
        *map(_score_baseline, best_baselines, others),
        names=names,
        metric=metric,
        candidates=candidates,
        blocks=blocks_of(mine, names) if by_example else INDEPENDENT,
        saved=saved,
        notes=remarks,
    )


def _score_baseline(best: Best, scores: Scores) -> ScoredBaseline:
    return ScoredBaseline(best.name, scores, best.needs_rows, best.rivals)


def rows(by_seed: Iterable[Sequence[Baseline]], higher_is_better: bool) -> list[dict[str, Any]]:
    """A line for each baseline that all seeds have, best first: its `name`, `pools`, `needs` and `mean` test score.

    The mean is over clients, and then over seeds. A baseline without a score is left out.
    """
    runs = [{baseline.name: baseline for baseline in baselines} for baselines in by_seed]
    lines = []
    for name in share_names(runs):
        baseline, mean = runs[0][name], float(np.mean([run[name].mean for run in runs]))
        if math.isfinite(mean):
            lines.append({"name": name, "pools": baseline.pools, "needs": needs(baseline), "mean": mean})
    return sorted(lines, key=lambda line: -_rank(line["mean"], higher_is_better))


def needs(baseline: Baseline) -> str:
    """What a baseline takes, in words."""
    if baseline.needs_rows:
        return "all rows in one place"
    return "updates of all clients" if baseline.pools else "no other client"


def write(folder: RunFolder, baselines: Sequence[Baseline]) -> None:
    """Write the standard models' scores into the folder of a run with one seed."""
    entries, arrays = [], dict[str, Tensor]()
    for i, baseline in enumerate(baselines):
        entries.append(
            {
                "name": baseline.name,
                "pools": baseline.pools,
                "needs_rows": baseline.needs_rows,
                "validation": _without_nan(baseline.validation),
                "means": _without_nan(baseline.tested.means),
            }
        )
        for j, scores in enumerate((baseline.tested.examples or {}).values()):
            arrays[f"{i}.{j}"] = torch.as_tensor(np.ascontiguousarray(scores))
    checkpoint.write(arrays, folder.baselines, {"baselines": json.dumps(entries)})


def read(folder: RunFolder) -> list[Baseline]:
    """The standard models' scores in the folder of a run with one seed; none if they were not written."""
    if not folder.baselines.exists():
        return []
    with readable(folder.baselines, "delete it to do without"), safe_open(folder.baselines, "np") as file:
        entries = json.loads(file.metadata()["baselines"])
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return [
        Baseline(
            baseline["name"],
            baseline["pools"],
            baseline["needs_rows"],
            _with_nan(baseline["validation"]),
            Tested(
                _with_nan(baseline["means"]),
                {client: arrays[f"{i}.{j}"] for j, client in enumerate(baseline["means"])},
            ),
        )
        for i, baseline in enumerate(entries)
    ]


def _without_nan(scores: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in scores.items()}


def _with_nan(scores: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in scores.items()}


def _rank(score: float, higher_is_better: bool) -> float:
    """A key by which the best score is the largest; what differs by rounding is equal, and NaN is behind all."""
    if math.isnan(score):
        return -math.inf
    rounded = float(f"{score:.6g}")
    return rounded if higher_is_better else -rounded


def _baseline(federation: Federation, model: StandardModel, by: str) -> Baseline:
    task, names = federation.task, federation.names
    examples = {}
    importance = federation.importance("test")
    for i, (outputs, y) in enumerate(zip(*_by_client(federation, model, "test"), strict=True)):
        weights = None if importance is None else importance[i : i + 1]
        examples[names[i]] = of_examples(task, outputs, y, weights).numpy()
    validation = {}
    if "validation" in model.answers:
        importance = federation.importance("validation") or [torch.ones(len(r)) for r in federation.rows["validation"]]
        outputs_of = zip(names, *_by_client(federation, model, "validation"), importance, strict=True)
        validation = {name: float(task.score(outputs, y, w)[by]) for name, outputs, y, w in outputs_of if len(y)}
    means = {}
    for name, scores in examples.items():
        means[name] = float(np.nanmean(scores)) if np.isfinite(scores).any() else math.nan
    return Baseline(
        name=model.name,
        pools=model.pools,
        needs_rows=model.pools,
        validation=validation,
        tested=Tested(means, examples),
        form=model.form,
    )


def _by_client(federation: Federation, model: StandardModel, split: str) -> tuple[list[Tensor], list[Tensor]]:
    """A model's outputs and the truth for the rows of a split: [n, k] and [n, ...] by client."""
    at = list(federation.rows[split])
    sizes = [len(baseline) for baseline in at]
    y = federation.y[torch.cat(at)]
    kind = federation.x.dtype if federation.x.is_floating_point() else torch.float32
    outputs = torch.from_numpy(model.answers[split]).to(kind).reshape(len(y), -1)
    return list(outputs.split(sizes)), list(y.split(sizes))
