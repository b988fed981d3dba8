"""A finished run as a row: its test scores, of all clients and of each, with all of its seeds."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.history import over_seeds, preferred
from ...core.summary import Summary
from ...data.split import Split
from ...errors import UsageError, several
from ...runs.run_folder import RunFolder

Array = NDArray[np.float64]


class Clients(NamedTuple):
    """The test scores of the clients of one run with one seed, at the selected round; NaN for attackers."""

    names: tuple[str, ...]
    by_model: dict[str, Array]  # [N] in the run's metric, of each named model
    selecting: Array  # [N] the score that selected, of the model that is compared; NaN where a client has none
    folder: RunFolder  # of the run


@dataclass(frozen=True)
class Row:
    """A run, or one run repeated with several seeds; then every number is a mean over these."""

    folder: str
    method: str
    model: str  # the named model that validation prefers, which is scored here
    dataset: str
    federation: str  # how it was divided among clients and split, as JSON
    graph: str  # the known relation's name, in which compared runs may differ
    origin: str | None  # of the relation that the method reports: given, fixed, learned or oracle; None without one
    attack: str  # its name and share, in which they may differ too; then scores are of honest clients; "" without
    clients: int
    metric: str
    higher_is_better: bool
    unit: str  # of the metric, "%" for a share
    selected_by: str  # the validation score that selected its rounds and model
    selected: float | None  # mean of that score on test examples; None if the run does not have it
    # the score by which its set is sorted and clients are counted: `selected_by` if all have it, or the metric
    ranked_by: str
    selects_high: bool  # whether `selected_by` is better if it is higher
    seeds: tuple[int, ...]
    mean: float  # over clients, of the test score at the selected round
    over_clients: float  # standard deviation
    worst5: float
    best5: float
    over_seeds: float | None  # standard deviation of `mean`, of a repeated run
    helped: float | None  # clients that gain over Local, by paired test examples; or else by `ranked_by`, any gain
    hurt: float | None  # and those that lose
    balanced_accuracy: float | None  # mean over the clients tested on several classes, where labels are uneven
    auc: float | None  # likewise
    several: float | None  # how many clients these are
    auroc: float | None  # of the relation against the true groups
    seconds: float
    leaking: bool
    warnings: tuple[str, ...]  # of its summary
    by_seed: dict[int, Clients] = field(default_factory=dict, repr=False)
    paired: bool = False  # whether clients are counted by paired test examples
    verdict: dict[str, Any] | None = None  # over Local, and FedAvg, of the compared runs or else of those beside it

    @property
    def setting(self) -> tuple[str, str, int, str]:
        """The settings that two comparable runs have in common."""
        return self.dataset, self.federation, self.clients, self.metric

    @property
    def name(self) -> str:
        """The method, with the known graph and the attack that runs may differ in."""
        return self.method + f" ({self.graph})" * (self.graph != "given") + f" [{self.attack}]" * bool(self.attack)

    @property
    def is_share(self) -> bool:
        """Whether its metric is a share, and so shown in percent."""
        return self.unit == "%"

    @property
    def sign(self) -> int:
        """The sign that makes a larger ranking score better."""
        return 1 if (self.higher_is_better if self.ranked_by == self.metric else self.selects_high) else -1

    @property
    def ranking(self) -> float:
        """The score that ranks it among comparable runs."""
        return self.mean if self.ranked_by == self.metric or self.selected is None else self.selected

    def ranking_of(self, seed: int) -> Array:
        """[N] that score of each client; NaN for attackers."""
        one = self.by_seed[seed]
        return one.by_model[self.model] if self.ranked_by == self.metric else one.selecting

    def described(self) -> str:
        """What it shares with all comparable runs: data, clients and the score."""
        better = "higher" if self.higher_is_better else "lower"
        ranks = f"{better} is better"
        if self.ranked_by != self.metric:
            ranks = f"ranked by {'AUC' if self.ranked_by == 'auc' else self.ranked_by.replace('_', ' ')}"
        unit = f" in {self.unit}" * bool(self.unit)
        return f"{self.dataset}, {several(self.clients, 'client')}, {self.metric}{unit} ({ranks})"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all but the scores of clients."""
        return {key: value for key, value in asdict(replace(self, by_seed={})).items() if key != "by_seed"}


def read(folder: Path, federation: Mapping[str, Any] | None = None) -> Row:
    """A run's row, with nothing counted against Local yet; `federation` replaces what its summaries say of the data."""
    whole = RunFolder(folder)
    summaries = {one.path: one.read_summary() for one in whole.seeds() or [whole]}
    if federation is not None:
        summaries = {
            path: replace(one, data=replace(one.data, federation=dict(federation))) for path, one in summaries.items()
        }
    return over(folder, summaries)


def over(folder: Path, summaries: Mapping[Path, Summary], model: str = "") -> Row:
    """The row of a run by the summaries of its seeds; `model` is scored, or else the one that validation prefers."""
    scores = [summary.scores for summary in summaries.values()]
    if len({tuple(one) for one in scores}) > 1:
        raise UsageError(f"the seed-* folders of {folder} are not one run repeated with different seeds")
    model = model or preferred(over_seeds(scores), next(iter(summaries.values())).selection.higher_is_better)
    rows = [_row(path, summary, model) for path, summary in summaries.items()]
    by_seed = {seed: clients for row in rows for seed, clients in row.by_seed.items()}
    first, alike = rows[0], ("method", "model", "setting", "attack")
    if len(by_seed) < len(summaries) or any(getattr(row, key) != getattr(first, key) for row in rows for key in alike):
        raise UsageError(f"the seed-* folders of {folder} are not one run repeated with different seeds")

    def average(key: str) -> float:
        return float(np.mean([getattr(row, key) for row in rows]))

    def shared(key: str) -> float | None:
        """The mean of what all rows have."""
        return None if any(getattr(row, key) is None for row in rows) else average(key)

    return replace(
        first,
        folder=str(folder),
        seeds=tuple(sorted(by_seed)),
        by_seed=by_seed,
        over_seeds=float(np.std([row.mean for row in rows], ddof=1)) if len(rows) > 1 else None,
        auroc=shared("auroc"),
        balanced_accuracy=shared("balanced_accuracy"),
        auc=shared("auc"),
        several=shared("several"),
        warnings=tuple(f"seed {row.seeds[0]}: {warning}" for row in rows for warning in row.warnings)
        if len(rows) > 1
        else first.warnings,
        leaking=any(row.leaking for row in rows),
        mean=average("mean"),
        selected=shared("selected"),
        over_clients=average("over_clients"),
        worst5=average("worst5"),
        best5=average("best5"),
        seconds=average("seconds"),
    )


def _dealt(summary: Summary) -> dict[str, Any]:
    """How examples were dealt and split; settings that came after a run have their defaults in it.

    Runs that differ only in the graph are comparable: they show the value of the graph.
    """
    dealt = {key: value for key, value in summary.data.federation.items() if key != "graph"}
    return dealt | {"split": asdict(Split()) | dealt.get("split", {})}


def _row(folder: Path, summary: Summary, model: str) -> Row:
    """The row of one run with one seed."""
    attack, score, relation = summary.attack, summary.honest_scores[model], summary.relation or {}
    clients = _clients(folder, summary, model)
    known = clients.selecting[np.isfinite(clients.selecting)]
    auroc = relation.get("auroc")
    return Row(
        folder=str(folder),
        method=summary.method,
        model=model,
        dataset=summary.data.dataset,
        federation=json.dumps(_dealt(summary), sort_keys=True),
        graph=str(summary.data.federation.get("graph", {}).get("name", "given")),
        origin=relation.get("origin"),
        attack=f"{attack['name']} {attack['share']:g}" if attack else "",
        clients=summary.data.clients,
        metric=summary.metric.name,
        higher_is_better=summary.metric.higher_is_better,
        unit=summary.metric.unit,
        selected_by=summary.selection.by,
        selected=float(known.mean()) if len(known) else None,
        ranked_by=summary.metric.name,
        selects_high=summary.selection.higher_is_better,
        seeds=(summary.seed,),
        mean=score["mean"],
        over_clients=score["std"],
        worst5=score["worst5"],
        best5=score["best5"],
        over_seeds=None,
        helped=None,
        hurt=None,
        balanced_accuracy=score.get("balanced_accuracy"),
        auc=score.get("auc"),
        several=score.get("balanced_accuracy_clients"),
        auroc=None if auroc is None or math.isnan(auroc) else auroc,
        seconds=summary.cost.seconds,
        leaking=summary.leaking,
        warnings=tuple(summary.warnings),
        by_seed={summary.seed: clients},
    )


def _clients(folder: Path, summary: Summary, model: str) -> Clients:
    """The scores of the clients of one run with one seed."""
    known, count = summary.clients, summary.data.clients
    scores = np.array(known.scores.get(model, []), np.float64)
    selecting = scores
    if summary.selection.by != summary.metric.name:
        selecting = np.array((known.selecting or {model: [math.nan] * count}).get(model, []), np.float64)
    if scores.shape != (count,) or not np.isfinite([*scores, summary.honest_scores[model]["mean"]]).all():
        raise UsageError(
            f"{folder}/summary.json must hold a finite test score for each of its {count} clients; "
            f"got {int(np.isfinite(scores).sum())}"
        )
    if selecting.shape != scores.shape:
        raise UsageError(f"{folder}/summary.json must hold a number or NaN under by_client.selecting for each client")
    names = tuple(known.names)
    attacks = np.isin(names, summary.attackers)  # they are neither helped nor hurt

    def honest(values: Any) -> Array:
        return np.where(attacks, np.nan, np.array(values, np.float64))

    return Clients(
        names, {name: honest(each) for name, each in known.scores.items()}, honest(selecting), RunFolder(folder)
    )


def decimals(rows: Sequence[Row]) -> int:
    """Two for percents; otherwise enough to give the smallest mean three significant digits."""
    least = min(abs(row.mean) for row in rows)
    return 2 if rows[0].is_share or least == 0 else min(6, max(0, 2 - math.floor(math.log10(least))))
