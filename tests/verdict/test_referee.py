"""The tutorials' verdicts before a referee, who has scikit-learn, NumPy and SciPy."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from referee import baselines, judge

import kinfed
from kinfed.cli import main
from kinfed.runs.run import make_baseline

ROOT = Path(__file__).parents[2]


def state(mine, federation, alone, shared=None):
    """What the referee says of a run on a federation, beside those of Local and FedAvg: a name and numbers by kind."""
    by = mine.summary.selection.by
    x = federation.x.flatten(1).double().numpy()
    rows = {split: [at.numpy() for at in found] for split, found in federation.rows.items()}
    known = baselines(x, federation.y.numpy(), rows, by)
    for name, run in (("Local", alone), ("FedAvg", shared)):
        if run is not None:
            judged = make_baseline(run, False)
            scores = ([values[client] for client in mine.names] for values in (judged.validation, judged.tested.means))
            known[name] = name == "FedAvg", *map(np.array, scores)
    return judge(np.array([mine.by_client.means[client] for client in mine.names]), known, by)


NUMBERS = re.compile(r"([+-][0-9.]+) points[^(]*\((?:95 % interval )?(\S+) to ([^)]+)\)")  # a gain and its interval


def check(sentence, judged):
    """A printed verdict has the referee's baselines and, rounded, the referee's numbers."""
    assert all(name in sentence for name, *_ in judged.values()), (sentence, judged)
    expected = [
        (f"{100 * mean:+.1f}", f"{100 * low:.1f}", f"{100 * high:.1f}") for _, mean, low, high in judged.values()
    ]
    assert NUMBERS.findall(sentence) == expected, (sentence, judged)


@pytest.mark.parametrize("asked", [[], ["--method", "partial-pooling", "model=linear", "--beside", "local,fedavg"]])
def test_of_the_shops(asked, tmp_path):
    """The commands of docs/start.md: the choice, and the linear model."""
    table = ["run", str(ROOT / "examples" / "shops.csv"), "--client", "shop", "--target", "buys"]
    assert main([*table, *asked, "--quiet", "--out", str(tmp_path / "run")]) == 0
    check_run(tmp_path / "run")


def test_of_rotated_digits(tmp_path):
    """The first command of README."""
    assert main(["run", "kin", "--quiet", "--beside", "local,fedavg", "--out", str(tmp_path / "run")]) == 0
    check_run(tmp_path / "run")


def check_run(folder):
    run = kinfed.Run.open(folder)
    beside = [kinfed.Run.open(folder / "beside" / name) for name in ("local", "fedavg")]
    federation = run.experiment.federation(None, run.summary.seeds[0])
    check(run.summary.verdict["sentence"], state(run, federation, *beside))


def test_of_arrays(tmp_path, monkeypatch):
    """The program of README."""
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(importlib.import_module("test_docs").python_block("README.md"), found)
    verdict = found["run"].verdict(found["alone"])
    judged = state(found["run"], found["federation"], found["alone"])
    del judged[True]
    check(verdict.sentence.partition(". ")[0], judged)
