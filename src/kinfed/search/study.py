"""Study: the runs behind an analysis or a paper's table, each in a folder of its own and run only once."""

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.round_selection import select_model
from ..core.summary import over_seeds
from ..data.federation import Federation
from ..errors import UsageError, log_failure
from ..plots.drawing import Array, scale_metric, with_unit
from ..runs.config import experiment as config
from ..runs.config.experiment import Experiment, Table
from ..runs.launch import Job, Outcome, run_all
from ..runs.results import intervals_over
from ..runs.run_folder import RunFolder
from ..simulation.execution import Execution

BOUNDS = ("95 % from", "to")  # columns of an interval
Row = dict[str, str | int | float | None]  # None for an empty cell


@dataclass(frozen=True)
class Study:
    """An experiment's raw config, how it runs, and the folder for runs, tables and pictures."""

    table: Table
    execution: Execution
    out: Path
    on_begin: Callable[[str], None] = lambda name: None  # called with the name of each run before it begins
    data_dir: Path | None = None

    def experiment(self, overrides: Sequence[str] = ()) -> Experiment:
        """The experiment with overrides, checked; raises UsageError."""
        return config.resolve(config.override(deepcopy(self.table), list(overrides)))

    @property
    def method(self) -> str:
        return self.experiment().method_name

    def federations(self, overrides: Sequence[str] = ()) -> list[Federation]:
        """The federation of the experiment with overrides, for each of its seeds."""
        experiment = self.experiment(overrides)
        return [experiment.federation(self.data_dir, seed) for seed in experiment.every_seed]

    def run(self, name: str, overrides: Sequence[str] = ()) -> RunFolder:
        """The folder of the experiment with overrides, after running or resuming it unless it is finished.

        Raises UsageError if the folder holds another experiment.
        """
        return self.runs({name: overrides})[name]

    def runs(
        self, requested: Mapping[str, Sequence[str]], jobs: int = 1, failed: list[str] | None = None
    ) -> dict[str, RunFolder]:
        """The folders of several runs, by name; what one raises is raised once the others have been tried too.

        With a list for what `failed`, runs are left out that did, and a line each says why, unless all of them failed.
        """
        if not requested:
            raise UsageError("there is nothing to run: a list in the analysis's settings is empty; give it a value")
        with closing(self.attempts(requested, jobs)) as outcomes:
            problems = {outcome.name: outcome.problem for outcome in outcomes if outcome.problem is not None}
        if problems and (failed is None or len(problems) == len(requested)):
            raise next(iter(problems.values()))
        if failed is not None:
            failed += [f"{name} failed: {log_failure(problem)}" for name, problem in problems.items()]
        return {name: RunFolder(self.folder(name)) for name in requested if name not in problems}

    def attempts(self, requested: Mapping[str, Sequence[str]], jobs: int) -> Generator[Outcome]:
        """The outcome of each of several runs as it ends, `jobs` in parallel; a failed one does not stop the others.

        The config of every run is checked before the first begins. Raises UsageError if one is wrong, or if a run's
        folder holds another experiment.
        """
        every = [Job(name, self.experiment(overrides), self.folder(name)) for name, overrides in requested.items()]
        execution = replace(self.execution, keep_state=False)  # of many runs it would fill a disk
        yield from run_all(every, execution, self.data_dir, jobs, self.on_begin)

    def folder(self, name: str) -> Path:
        """The folder of a run: out/runs/NAME."""
        return self.out / "runs" / name


@dataclass
class Finding:
    """The result of an analysis: a table, one dict per row, all with the same keys; and its pictures."""

    title: str
    rows: list[Row]
    pictures: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # remarks for the reader, one line each


class Score(NamedTuple):
    """The scores of a run with one or several seeds: of the model that validation prefers, at the selected round."""

    model: str
    metric: str
    higher_is_better: bool
    test: Array  # [S] means over clients
    over_clients: float  # standard deviation, a mean over seeds
    validation: float | None  # a mean over clients and seeds, if there is validation data
    selected_by: str  # the validation score's name
    selects_highest: bool  # whether a higher validation score is better
    cautions: tuple[str, ...]  # why the score is too optimistic, if it is
    interval: dict[str, Any]  # of the mean test score, see Summary.intervals; empty if it was not written

    @property
    def rank(self) -> float:
        """The validation score, higher being better; minus infinity without one."""
        if self.validation is None:
            return -math.inf
        return self.validation if self.selects_highest else -self.validation

    def row(self) -> Row:
        test, validation = scale_metric(self.test, self.metric), self.validation
        return {
            "model": self.model,
            f"validation {with_unit(self.selected_by)}": (
                None if validation is None else float(scale_metric(validation, self.selected_by))
            ),
            f"test {with_unit(self.metric)}": float(test.mean()),
            "over clients": float(scale_metric(self.over_clients, self.metric)),
            "over seeds": float(test.std(ddof=1)) if len(test) > 1 else None,
        }

    def bounds(self) -> Row:
        ends = (self.interval.get(key) for key in ("low", "high"))
        return dict(
            zip(BOUNDS, (None if v is None else float(scale_metric(v, self.metric)) for v in ends), strict=True)
        )


def score(*folders: RunFolder) -> Score:
    """The score of a finished run, or of several that differ only in their seeds; attackers do not count."""
    summaries = [run.read_summary() for folder in folders for run in folder.repeats()]
    first, scores = summaries[0], over_seeds([summary.scores for summary in summaries])
    model = select_model(scores, first.selection.higher_is_better)
    honest = [summary.honest_scores[model] for summary in summaries]
    over_them = (intervals_over(summaries) if len(summaries) > 1 else first.intervals) or {}
    return Score(
        model,
        first.metric.name,
        first.metric.higher_is_better,
        test=np.array([stats["mean"] for stats in honest]),
        over_clients=float(np.mean([stats["std"] for stats in honest])),
        validation=scores[model].get("validation"),
        selected_by=first.selection.by,
        selects_highest=first.selection.higher_is_better,
        cautions=tuple(dict.fromkeys(filter(None, (summary.selection.caution for summary in summaries)))),
        interval=over_them.get(model, {}),
    )


def scores_by_round(folder: RunFolder, model: str) -> tuple[Array, Array]:
    """The evaluated rounds [T] (from 1) of all seeds, and a model's test score by seed, round and client: [S, T, N].

    An attacker's is NaN.
    """
    metric = folder.read_summary().metric.name
    seeds = [run.read_scores(model, metric) for run in folder.repeats()]
    rounds = min((rounds for rounds, _ in seeds), key=len)
    return rounds, np.stack([scores[: len(rounds)] for _, scores in seeds])


def setting(key: str, value: object) -> str:
    """An override that gives a setting a value: text, a number, true or false, or a list of these."""
    return f"{key}={json.dumps(value)}"
