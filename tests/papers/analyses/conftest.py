import csv
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from kinfed.runs.config import experiment
from kinfed.search.study import Study
from kinfed.simulation.execution import Execution

SMALL = (  # whole parts, so that a test may name others
    "rounds=3",
    "federation.clients=8",
    "federation.partition={name = 'rotations', groups = 2}",
    "model={name = 'mlp', hidden = [8]}",
)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of a small experiment on rotated digits, with overrides; its runs draw no pictures of their own."""
    for picture in ("charts.classes_by_client", "charts.accuracy_by_round", "charts.accuracy_by_client"):
        monkeypatch.setattr(f"kinfed.plots.{picture}", Mock())
    monkeypatch.setattr("kinfed.plots.heatmaps.relation_heatmap", Mock())

    def make(method, *overrides):
        return Study(experiment.read(method, [*SMALL, *overrides]), Execution(), tmp_path)

    return make


@pytest.fixture
def invented(tmp_path, finished):
    """A stand-in for a study whose runs are done: by name test scores [S, T, N] and validation scores, a mean each.

    One without test scores has failed.
    """

    def make(tests, validation=None, metric="accuracy", higher_is_better=True):
        def run(name):
            values = np.asarray(tests[name], dtype=float)
            folder = tmp_path / "runs" / name
            valid = {"validation": validation[name]} if validation else {}
            facts = {"metric": metric, "higher_is_better": higher_is_better, "clients": values.shape[-1]}
            for seed, scores in enumerate(values):
                seed_folder = folder / f"seed-{seed}"
                finished(seed_folder, {"own": {"mean": scores[-1].mean(), "std": 0.5, **valid}}, seed=seed, **facts)
                with (seed_folder / "history.csv").open("w", newline="") as file:
                    table = csv.writer(file)
                    table.writerow(["round", "client", "model", "split", "metric", "value"])
                    for round, row in enumerate(scores, 1):
                        for model, split, shift in (("own", "validation", 9), ("own", "test", 0), ("other", "test", 7)):
                            table.writerows([5 * round, i, model, split, metric, v + shift] for i, v in enumerate(row))
            scores_of_own = {"mean": values[:, -1].mean(), "std": 0.5, **valid}
            return finished(folder, {"own": scores_of_own}, seeds=list(range(len(values))), **facts)

        def runs(requested, failed):
            failed += [f"{name} failed: it diverged" for name in requested if name not in tests]
            return {name: run(name) for name in requested if name in tests}

        return SimpleNamespace(runs=runs, out=tmp_path, method="m")

    return make
