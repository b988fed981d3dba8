import csv
import json
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from kinfed.experiments import config
from kinfed.experiments.launch import Machine
from kinfed.experiments.study import Study

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
        return Study(config.read(method, [*SMALL, *overrides]), Machine(), tmp_path)

    return make


@pytest.fixture
def invented(tmp_path):
    """A stand-in for a study whose runs are done: by name test scores [S, T, N] and validation scores, a mean each."""

    def make(tests, validation=None, metric="accuracy", higher_is_better=True):
        def finished(name):
            values = np.asarray(tests[name], dtype=float)
            folder = tmp_path / "runs" / name
            valid = {"validation": validation[name]} if validation else {}
            for seed, scores in enumerate(values):
                one = folder / f"seed-{seed}"
                one.mkdir(parents=True)
                _summary(one, scores[-1].mean(), metric, higher_is_better, **valid)
                with (one / "history.csv").open("w", newline="") as file:
                    table = csv.writer(file)
                    table.writerow(["round", "client", "model", "split", "metric", "value"])
                    for round, row in enumerate(scores, 1):
                        for model, split, shift in (("own", "validation", 9), ("own", "test", 0), ("other", "test", 7)):
                            table.writerows([5 * round, i, model, split, metric, v + shift] for i, v in enumerate(row))
            seeds = list(range(len(values)))
            _summary(folder, values[:, -1].mean(), metric, higher_is_better, seeds=seeds, **valid)
            return folder

        return SimpleNamespace(runs=lambda asked: {name: finished(name) for name in asked}, out=tmp_path, method="m")

    return make


def _summary(folder, mean, metric, higher_is_better, seeds=None, **more):
    summary = {
        "method": "m",
        "metric": metric,
        "higher_is_better": higher_is_better,
        "chosen": "own",
        "leaking": False,
        "scores": {"own": {"mean": mean, "std": 0.5, **more}},
    }
    (folder / "summary.json").write_text(json.dumps(summary | ({"seeds": seeds} if seeds else {})))
