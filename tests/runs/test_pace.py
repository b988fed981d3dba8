"""A run that will take hours says so while it is young, with the setting that helps most."""

import time
import warnings
from types import SimpleNamespace

import pytest
import torch

import kinfed
from kinfed.core.engine import Rounds
from kinfed.methods import FedAMP, FedAvg
from kinfed.runs import pace
from kinfed.runs.pace import Pace


@pytest.mark.parametrize(
    ("slow", "method", "said"),
    [
        ("train", FedAvg(), "most goes into local training: have fewer clients take part"),
        ("evaluate", FedAvg(), "most goes into scoring all clients: set evaluate_every=10"),
        ("serve", FedAMP(), "most goes into the server: set method.neighbours=20"),
        ("serve", FedAvg(), "most goes into the server: use fewer clients"),
    ],
)
def test_what_takes_longest_names_what_helps(slow, method, said, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def spend(name):
        now[0] += 100 if slow == name else 10

    fleet = SimpleNamespace(names=["a"], train=lambda *what: spend("train"), evaluate=lambda *what: spend("evaluate"))
    watched = Pace(fleet, method, Rounds(500), 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(100, 103):
            watched.train(t, torch.arange(1), ())
            watched.evaluate(t, torch.arange(1), ())
            spend("serve")
            watched.check(t + 1)
    (line,) = {str(one.message) for one in caught}
    assert line.startswith("101 of 500 rounds took 2 minutes, so the others will take about 13 hours; " + said)


def test_a_short_run_says_nothing_and_a_long_one_says_it_once(monkeypatch):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    data = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(60) % 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kinfed.fit(FedAvg(), data, torch.nn.Linear(4, 2), rounds=3)
    monkeypatch.setattr(pace, "FIRST", 0.0)
    monkeypatch.setattr(pace, "LONG", 0.0)
    with pytest.warns(UserWarning, match="1 of 3 rounds took 0 minutes") as caught:
        kinfed.fit(FedAvg(), data, torch.nn.Linear(4, 2), rounds=3)
    assert len(caught) == 1
