"""Study: the runs that an analysis or a table of a paper is made of, each in a folder of its own and done once."""

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.history import over_seeds, preferred, read_relations, selects_highest
from ..data.federation import Federation
from ..errors import UsageError
from ..metrics import graphs
from ..plots.drawing import Array, scaled, with_unit
from . import config, run_folder
from .config import Experiment, Table
from .launch import Machine
from .process_pool import Outcome, carry_out

Row = dict[str, str | int | float | None]  # None where there is nothing to say


@dataclass(frozen=True)
class Study:
    """An experiment's raw config, the machine, and the folder that runs, tables and pictures go to."""

    table: Table
    machine: Machine
    out: Path
    said: Callable[[str], None] = lambda name: None  # told the name of each run before it begins

    def experiment(self, overrides: Sequence[str] = ()) -> Experiment:
        """The experiment with overrides, checked; raises UsageError."""
        return config.resolve(config.override(deepcopy(self.table), list(overrides)))

    @property
    def method(self) -> str:
        """The name of the experiment's method."""
        return str(self.experiment().table["method"]["name"])

    def federations(self, overrides: Sequence[str] = ()) -> list[Federation]:
        """The clients of the experiment with overrides, of each of its seeds."""
        experiment = self.experiment(overrides)
        first, count = experiment.table["seed"], experiment.table["seeds"]
        return [experiment.federation(self.machine.data_dir, seed) for seed in range(first, first + count)]

    def run(self, name: str, overrides: Sequence[str] = ()) -> Path:
        """The folder of the experiment with overrides: run, taken up, or left as it is if finished.

        Raises UsageError if the folder holds another experiment than the one asked for.
        """
        return self.runs({name: overrides})[name]

    def runs(self, asked: Mapping[str, Sequence[str]], jobs: int = 1) -> dict[str, Path]:
        """The folders of several runs, by name; the first that fails ends the others and raises what went wrong."""
        if not asked:
            raise UsageError("there is nothing to run: a list in the analysis' settings is empty")
        with closing(self.attempts(asked, jobs)) as outcomes:
            for outcome in outcomes:
                if outcome.problem:
                    raise outcome.problem
        return {name: self.folder(name) for name in asked}

    def attempts(self, asked: Mapping[str, Sequence[str]], jobs: int = 1) -> Generator[Outcome]:
        """How each of several runs ended, as they end, `jobs` of them side by side; a failed one does not stop others.

        The config of every run is checked before the first begins. Raises UsageError if one is wrong, or if a run's
        folder holds another experiment than the one asked for.
        """
        experiments = {name: (self.experiment(overrides), self.folder(name)) for name, overrides in asked.items()}
        yield from carry_out(experiments, self.machine, jobs, self.said)

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


class Relations(NamedTuple):
    """The relations of a run with one seed."""

    rounds: Array  # [T] evaluated, from 1
    weights: Array  # [T, N, N], or [T, L, N, N] with one graph a layer
    layers: list[str]  # [L]
    origin: str
    selected: int  # where in the first axis the round is that validation selects


def repeats(folder: Path) -> list[Path]:
    """The folders of a finished run's seeds; the run's own if it has one seed."""
    return [folder / f"seed-{seed}" for seed in run_folder.read_summary(folder).get("seeds", [])] or [folder]


def score(*folders: Path) -> Score:
    """The score of a finished run, or of several that differ in their seeds only; attackers do not count."""
    each = [run_folder.read_summary(one) for folder in folders for one in repeats(folder)]
    first, scores = each[0], over_seeds([one["scores"] for one in each])
    highest = selects_highest(first)
    model = preferred(scores, highest)
    heard = [one.get("attack", one)["scores"][model] for one in each]  # honest clients', where others attack
    test = np.array([found["mean"] for found in heard])
    cautions = tuple(dict.fromkeys(one["caution"] for one in each if one["leaking"]))
    over_clients, validation = float(np.mean([found["std"] for found in heard])), scores[model].get("validation")
    metric = first["metric"]
    selection = validation, first.get("selected_by", metric), highest
    return Score(model, metric, first["higher_is_better"], test, over_clients, *selection, cautions)


def clusters(folder: Path) -> Tensor:
    """[T, N] int64 the clusters of a finished run with one seed, by evaluated round; -1 where a client was absent.

    As the method noted them, or else as its relation tells them; raises UsageError if there is neither.
    """
    noted: dict[int, dict[str, int]] = defaultdict(dict)
    if (folder / "diagnostics.csv").exists():
        with (folder / "diagnostics.csv").open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if line["note"] == "cluster":
                    noted[int(line["round"])][line["client"]] = int(float(line["value"]))
    if not noted:
        return torch.stack([graphs.clusters(torch.from_numpy(one)) for one in relations(folder).weights])
    names = run_folder.read_summary(folder)["names"]
    return torch.tensor([[label.get(name, -1) for name in names] for label in noted.values()])


def relations(folder: Path) -> Relations:
    """The relations that a finished run with one seed left; raises UsageError if its method mixes no models."""
    summary = run_folder.read_summary(folder)
    if summary["relation"] is None:
        raise UsageError(f"{summary['method']} mixes no models, so it has no weights between clients to look at")
    at = summary["scores"][summary["chosen"]]["round"]
    rounds, weights, layers, origin = read_relations(folder / "relations.npz", at)
    return Relations(rounds, weights, layers, origin, int(np.flatnonzero(rounds == at)[0]))


def scores_by_round(folder: Path, model: str, metric: str = "") -> tuple[Array, Array]:
    """The evaluated rounds [T] (from 1), and the test score of a model's clients, of each seed: [S, T, N].

    The score is the run's own metric unless another of its test scores is named; that of an attacker is NaN.
    """
    metric = metric or run_folder.read_summary(folder)["metric"]
    found = []
    for one in repeats(folder):
        summary, wanted = run_folder.read_summary(one), (model, "test", metric)
        try:
            with (one / "history.csv").open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if (row["model"], row["split"], row["metric"]) == wanted]
            rounds = np.unique([int(row["round"]) for row in rows])
            scores = np.array([float(row["value"]) for row in rows]).reshape(len(rounds), -1)  # [T, N]
        except (OSError, KeyError, ValueError):
            raise not_whole(one) from None
        if "attack" in summary:
            scores[:, np.isin(summary["names"], summary["attack"]["attackers"])] = np.nan
        found.append(scores)
    return rounds, np.stack(found)


def not_whole(folder: Path) -> UsageError:
    """What to say of a finished run whose scores are lost."""
    return UsageError(f"{folder}/history.csv is not whole; delete the folder {folder} and run again")


def setting(key: str, value: object) -> str:
    """An override that gives a setting a value: text, a number, true or false, or a list of these."""
    return f"{key}={json.dumps(value)}"
