"""Study: the runs that an analysis or a table of a paper is made of, each in a folder of its own and done once."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..core.history import over_seeds, preferred
from ..data.federation import Federation
from ..errors import UsageError
from ..plots.drawing import Array, scaled, with_unit
from ..simulation.execution import Execution
from . import config
from .config import Experiment, Table
from .process_pool import Outcome, carry_out
from .run_folder import RunFolder

Row = dict[str, str | int | float | None]  # None where there is nothing to say


@dataclass(frozen=True)
class Study:
    """An experiment's raw config, where and how it runs, and the folder that runs, tables and pictures go to."""

    table: Table
    execution: Execution
    out: Path
    said: Callable[[str], None] = lambda name: None  # told the name of each run before it begins
    data_dir: Path | None = None

    def experiment(self, overrides: Sequence[str] = ()) -> Experiment:
        """The experiment with overrides, checked; raises UsageError."""
        return config.resolve(config.override(deepcopy(self.table), list(overrides)))

    @property
    def method(self) -> str:
        """The name of the experiment's method."""
        return self.experiment().method_name

    def federations(self, overrides: Sequence[str] = ()) -> list[Federation]:
        """The clients of the experiment with overrides, of each of its seeds."""
        experiment = self.experiment(overrides)
        return [experiment.federation(self.data_dir, seed) for seed in experiment.every_seed]

    def run(self, name: str, overrides: Sequence[str] = ()) -> RunFolder:
        """The folder of the experiment with overrides: run, taken up, or left as it is if finished.

        Raises UsageError if the folder holds another experiment than the one asked for.
        """
        return self.runs({name: overrides})[name]

    def runs(self, asked: Mapping[str, Sequence[str]], jobs: int = 1) -> dict[str, RunFolder]:
        """The folders of several runs, by name; the first that fails ends the others and raises what went wrong."""
        if not asked:
            raise UsageError("there is nothing to run: a list in the analysis' settings is empty")
        with closing(self.attempts(asked, jobs)) as outcomes:
            for outcome in outcomes:
                if outcome.problem:
                    raise outcome.problem
        return {name: RunFolder(self.folder(name)) for name in asked}

    def attempts(self, asked: Mapping[str, Sequence[str]], jobs: int = 1) -> Generator[Outcome]:
        """How each of several runs ended, as they end, `jobs` of them side by side; a failed one does not stop others.

        The config of every run is checked before the first begins. Raises UsageError if one is wrong, or if a run's
        folder holds another experiment than the one asked for.
        """
        experiments = {name: (self.experiment(overrides), self.folder(name)) for name, overrides in asked.items()}
        yield from carry_out(experiments, self.execution, jobs, self.said, self.data_dir)

    def folder(self, name: str) -> Path:
        """The folder of a run: out/runs/NAME."""
        return self.out / "runs" / name


@dataclass
class Finding:
    """What an analysis found: a table, one dict a row, all with the same keys; and its pictures."""

    title: str
    rows: list[Row]
    pictures: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a reader must know, one line each


class Score(NamedTuple):
    """How well a run with one seed or several did: its model that validation prefers, at the selected round."""

    model: str
    metric: str
    higher_is_better: bool
    test: Array  # [S] means over clients
    over_clients: float  # standard deviation, a mean over seeds
    validation: float | None  # a mean over clients and seeds, if there is validation data
    selected_by: str  # what score that is
    selects_highest: bool  # whether more of it is better
    cautions: tuple[str, ...]  # why the score flatters, if it does

    def row(self) -> Row:
        """As columns of a table."""
        test, validation = scaled(self.test, self.metric), self.validation
        return {
            "model": self.model,
            f"validation {with_unit(self.selected_by)}": (
                None if validation is None else float(scaled(validation, self.selected_by))
            ),
            f"test {with_unit(self.metric)}": float(test.mean()),
            "over clients": float(scaled(self.over_clients, self.metric)),
            "over seeds": float(test.std(ddof=1)) if len(test) > 1 else None,
        }


def score(*folders: RunFolder) -> Score:
    """The score of a finished run, or of several that differ in their seeds only; attackers do not count."""
    each = [one.read_summary() for folder in folders for one in folder.repeats()]
    first, scores = each[0], over_seeds([one.scores for one in each])
    model = preferred(scores, first.selects_highest)
    heard = [one.honest_scores[model] for one in each]
    return Score(
        model,
        first.metric,
        first.higher_is_better,
        test=np.array([found["mean"] for found in heard]),
        over_clients=float(np.mean([found["std"] for found in heard])),
        validation=scores[model].get("validation"),
        selected_by=first.selects,
        selects_highest=first.selects_highest,
        cautions=tuple(dict.fromkeys(one.caution for one in each if one.leaking)),
    )


def scores_by_round(folder: RunFolder, model: str, metric: str = "") -> tuple[Array, Array]:
    """The evaluated rounds [T] (from 1), and the test score of a model's clients, of each seed: [S, T, N].

    The score is the run's own metric unless another of its test scores is named; that of an attacker is NaN.
    """
    metric = metric or folder.read_summary().metric
    found = [one.read_scores(model, metric) for one in folder.repeats()]
    return found[-1][0], np.stack([scores for _, scores in found])


def setting(key: str, value: object) -> str:
    """An override that gives a setting a value: text, a number, true or false, or a list of these."""
    return f"{key}={json.dumps(value)}"
