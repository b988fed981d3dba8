"""A finished run as a row: its test scores, of all clients and of each, with all of its seeds."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.round_selection import select_model
from ...core.summary import Metric, Summary, list_attackers, list_warnings, over_seeds
from ...data.split import Split
from ...errors import UsageError, several
from ...runs.run import Run, open_seeds
from ...runs.run_folder import RunFolder

Array = NDArray[np.float64]


SCORES = {  # of a summary that tables have, and their names in JSON
    "mean": "mean",
    "std": "over_clients",
    "worst5": "worst5",
    "best5": "best5",
    "balanced_accuracy": "balanced_accuracy",  # over the clients tested on several classes, where labels are uneven
    "auc": "auc",  # likewise
    "balanced_accuracy_clients": "several",  # how many clients these are
}


class Counts(NamedTuple):
    """How many clients gain over Local, and lose: means over seeds."""

    helped: float
    hurt: float
    paired: bool  # counted beyond noise, by paired test examples; or else any difference in the score that ranks


@dataclass(frozen=True)
class Row:
    """A run, or one run repeated with several seeds; then every number is a mean over these."""

    folder: RunFolder
    model: str  # the named model that validation prefers, which is scored here
    summary: Summary  # of its first seed: the method, data, metric and selection, in which its seeds are alike
    by_seed: Mapping[int, Run] = field(repr=False)
    scores: Mapping[str, float]  # of honest clients, those of SCORES that all seeds have
    over_seeds: float | None  # standard deviation of their means, of a repeated run
    selected: float | None  # mean of the selecting score on test examples; None if the run does not have it
    ranked_by: str  # the score by which its set is sorted: the one that selected if all have it, or the metric
    auroc: float | None  # of the relation against the true groups
    seconds: float
    leaking: bool
    warnings: tuple[str, ...]
    counts: Counts | None = None  # against Local; None: not compared
    verdict: dict[str, Any] | None = None  # over Local, and FedAvg, of the compared runs or else of those beside it

    @property
    def method(self) -> str:
        return self.summary.method

    @property
    def metric(self) -> Metric:
        """What scores are in."""
        return self.summary.metric

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, ascending."""
        return tuple(self.by_seed)

    @property
    def runs(self) -> list[Run]:
        """Those of its seeds."""
        return list(self.by_seed.values())

    @property
    def mean(self) -> float:
        """The test score at the selected round, over clients."""
        return self.scores["mean"]

    @property
    def origin(self) -> str | None:
        """Of the relation that the method reports: given, fixed, learned or oracle; None without one."""
        return (self.summary.relation or {}).get("origin")

    @property
    def attack(self) -> str:
        """The attack's name and share, in which compared runs may differ too; empty without one."""
        return _attack(self.summary)

    @property
    def name(self) -> str:
        """The method, with the known graph and the attack that runs may differ in."""
        graph = _name_graph(self.summary)
        graph = "" if graph == "given" else f" ({graph})"
        attack = f" [{self.attack}]" if self.attack else ""
        return f"{self.method}{graph}{attack}"

    def rank(self, seed: int | None = None) -> Any:
        """The score that ranks it among comparable runs, signed so that a larger one is better.

        With a seed it is that of each client, [N], NaN for attackers.
        """
        by_metric = self.ranked_by == self.metric.name
        values: Any = self.mean if by_metric or self.selected is None else self.selected
        if seed is not None:
            values = score_clients(self.by_seed[seed], self.model, selecting=not by_metric)
        return values if (self.metric if by_metric else self.summary.selection).higher_is_better else -values

    def describe(self) -> str:
        """What it shares with all comparable runs: data, clients and the score."""
        ranks = f"{'higher' if self.metric.higher_is_better else 'lower'} is better"
        if self.ranked_by != self.metric.name:
            ranks = f"ranked by {'AUC' if self.ranked_by == 'auc' else self.ranked_by.replace('_', ' ')}"
        unit = f" in {self.metric.unit}" if self.metric.unit else ""
        clients = several(self.summary.data.clients, "client")
        return f"{self.summary.data.dataset}, {clients}, {self.metric.name}{unit} ({ranks})"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all but the scores of clients."""
        summary, counts = self.summary, self.counts
        return {
            "folder": str(self.folder),
            "method": self.method,
            "model": self.model,
            "dataset": summary.data.dataset,
            "federation": setting_of(summary)[1],
            "graph": _name_graph(summary),
            "origin": self.origin,
            "attack": self.attack,
            "clients": summary.data.clients,
            "metric": self.metric.name,
            "higher_is_better": self.metric.higher_is_better,
            "unit": self.metric.unit,
            "selected_by": summary.selection.by,
            "selected": self.selected,
            "ranked_by": self.ranked_by,
            "seeds": self.seeds,
            **{name: self.scores.get(key) for key, name in SCORES.items()},
            "over_seeds": self.over_seeds,
            "helped": counts.helped if counts else None,
            "hurt": counts.hurt if counts else None,
            "paired": counts is not None and counts.paired,
            "auroc": self.auroc,
            "seconds": self.seconds,
            "leaking": self.leaking,
            "warnings": self.warnings,
            "verdict": self.verdict,
        }


def read(folder: Path, federation: Mapping[str, Any] | None = None) -> Row:
    """A run's row, with nothing counted against Local yet; `federation` replaces what its summaries say of the data."""
    run_folder = RunFolder(folder)
    runs = open_seeds(run_folder)
    if federation is not None:
        replace_federation(runs, federation)
    return make_row(run_folder, runs)


def replace_federation(runs: Sequence[Run], federation: Mapping[str, Any]) -> None:
    """Let the runs' summaries say this of how their data were dealt, however old they are."""
    for run in runs:
        run.summary = replace(run.summary, data=replace(run.summary.data, federation=dict(federation)))


def _check_seeds(folder: RunFolder, every: Sequence[Summary]) -> None:
    """Raise UsageError for summaries that are not of one run repeated with different seeds."""
    kinds = {(summary.method, setting_of(summary), _attack(summary), tuple(summary.scores)) for summary in every}
    if len(kinds) > 1 or len({summary.seeds[0] for summary in every}) < len(every):
        raise UsageError(f"the seed-* folders of {folder} are not one run repeated with different seeds")


def make_row(folder: RunFolder, runs: Sequence[Run], model: str = "") -> Row:
    """The row of a run with each seed; `model` is scored, or else the one that validation prefers."""
    runs = sorted(runs, key=lambda run: run.summary.seeds[0])
    every = [run.summary for run in runs]
    first = every[0]
    _check_seeds(folder, every)
    model = model or select_model(over_seeds([summary.scores for summary in every]), first.selection.higher_is_better)
    for run in runs:
        _check_scores(run, model)
    scores = [summary.honest_scores[model] for summary in every]
    means = {key: _mean([by_metric.get(key) for by_metric in scores]) for key in SCORES}
    selecting = [score_clients(run, model, True) for run in runs]
    warnings = list_warnings(every) if len(every) > 1 else first.warnings
    return Row(
        folder,
        model,
        first,
        {run.summary.seeds[0]: run for run in runs},
        {key: mean for key, mean in means.items() if mean is not None},
        over_seeds=float(np.std([by_metric["mean"] for by_metric in scores], ddof=1)) if len(scores) > 1 else None,
        selected=_mean([float(v[np.isfinite(v)].mean()) if np.isfinite(v).any() else None for v in selecting]),
        ranked_by=first.metric.name,
        auroc=_mean([(summary.relation or {}).get("auroc") for summary in every]),
        seconds=float(np.mean([summary.cost.seconds for summary in every])),
        leaking=any(summary.selection.caution for summary in every),
        warnings=tuple(warnings),
    )


def setting_of(summary: Summary) -> tuple[str, str, int, str]:
    """The settings that two comparable runs have in common; the second as JSON: how data were dealt and split.

    Runs that differ only in the graph are comparable: they show the value of the graph. Settings that came after a run
    have their defaults in it.
    """
    dealt = {key: value for key, value in summary.data.federation.items() if key != "graph"}
    dealt["split"] = asdict(Split()) | dealt.get("split", {})
    return summary.data.dataset, json.dumps(dealt, sort_keys=True), summary.data.clients, summary.metric.name


def _name_graph(summary: Summary) -> str:
    """The known relation's name, in which compared runs may differ."""
    return str(summary.data.federation.get("graph", {}).get("name", "given"))


def _attack(summary: Summary) -> str:
    attack = summary.attack
    return f"{attack['name']} {attack['share']:g}" if attack else ""


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of what all seeds have; None if one has none."""
    present = [value for value in values if value is not None and not math.isnan(value)]
    return float(np.mean(present)) if present and len(present) == len(values) else None


def score_clients(run: Run, model: str, selecting: bool = False) -> Array:
    """[N] the test score of each client of a run, or the score that selected; NaN for attackers, and without one."""
    summary, clients = run.summary, run.summary.clients
    scores: Any = clients.scores
    if selecting and summary.selection.by != summary.metric.name:
        scores = clients.selecting or {model: [math.nan] * len(clients.names)}
    honest = ~np.isin(clients.names, list_attackers(summary))  # the others are neither helped nor hurt
    return np.where(honest, np.array(scores.get(model, []), np.float64), np.nan)


def _check_scores(run: Run, model: str) -> None:
    """Raise UsageError unless every client of a run has a test score."""
    summary, place = run.summary, f"{run.folder}/summary.json must hold"
    clients, count = summary.clients, summary.data.clients
    if summary.sites is not None and summary.privacy is not None:
        raise UsageError(
            f"{run.folder} is of sites under privacy, where all scores stay, so there is nothing to compare"
        )
    scores = np.array(clients.scores.get(model, []), np.float64)
    if scores.shape != (count,) or not np.isfinite([*scores, summary.honest_scores[model]["mean"]]).all():
        raise UsageError(
            f"{place} a finite test score for each of its {count} clients; got {int(np.isfinite(scores).sum())}"
        )
    if clients.selecting is not None and len(clients.selecting.get(model, [])) != count:
        raise UsageError(f"{place} a number or NaN under by_client.selecting for each client")


def decimals(rows: Sequence[Row]) -> int:
    """Two for percents; otherwise enough to give the smallest mean three significant digits."""
    least = min(abs(row.mean) for row in rows)
    return 2 if rows[0].metric.is_share or least == 0 else min(6, max(0, 2 - math.floor(math.log10(least))))
