"""Estimates: what is timed is the real thing cut short, and the rest follows a line."""

import pytest
import torch

from kinfed.runs.config import experiment as config
from kinfed.search import estimate as module
from kinfed.search.estimate import Trial, estimate
from kinfed.simulation.execution import Execution

SMALL = ["federation.clients=6", "federation.partition.groups=2", "model=linear", "training.batch=8"]


def test_time_grows_along_the_line_through_the_last_two_trials():
    assert module._extrapolate(1000, [(10, 9.0), (100, 2.0), (200, 3.0)]) == pytest.approx(3 + 800 * 0.01)
    assert module._extrapolate(1000, [(100, 2.0), (200, 1.0)]) == 1.0  # noise: more examples never take less
    assert module._extrapolate(1000, [(100, 2.0)]) == pytest.approx(20)
    assert module._extrapolate(100, [(50, 1.0), (100, 7.0)]) == 7.0


def test_the_estimate_counts_rounds_and_evaluations(monkeypatch):
    sizes = []

    def take(experiment, federation, machine):
        sizes.append(int(federation.sizes.sum()))
        return Trial(sizes[-1], 3, 0.5 + sizes[-1] / 1000, sizes[-1] / 100)

    monkeypatch.setattr(module, "_try", take)
    experiment = config.resolve(config.read("local", [*SMALL, "rounds=25", "evaluate_every=10"]))
    federation = experiment.federation(None, 0)
    whole = int(federation.sizes.sum())
    found = estimate(experiment, federation, Execution(), budget=1e9)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 6 * 8
    assert sizes[-1] == whole
    assert found.measured == "all examples"
    assert found.seconds == pytest.approx(25 * (0.5 + whole / 1000) + 3 * whole / 100, rel=1e-6)  # rounds 10, 20 and 25
    sizes.clear()
    less = estimate(experiment, federation, Execution(), budget=0.0)
    assert sizes == [48]
    assert less.seconds == pytest.approx(25 * (0.548 / 48 * whole) + 3 * whole / 100)  # in proportion
    assert less.measured == f"{100 * 48 / whole:.2g} % of the examples"


@pytest.mark.parametrize(("times", "seconds"), [([7.0], 7.0), ([9.0, 8.0], 18.0), ([9.0, 2.0, 3.0], 51.0)])
def test_a_model_that_is_solved_before_a_trial_ends_takes_as_many_rounds(times, seconds, monkeypatch):
    monkeypatch.setattr(module, "seconds_by_round", lambda *what, **how: times)
    experiment = config.resolve(config.read("standard", [*SMALL, "rounds=25", "evaluate_every=25"]))
    cost = estimate(experiment, experiment.federation(None, 0), Execution(), budget=1e9)
    assert cost.seconds == seconds


def test_what_is_solved_in_one_round_has_a_cost():
    experiment = config.resolve(config.read("standard", [*SMALL, "rounds=25"]))
    assert estimate(experiment, experiment.federation(None, 0), Execution(), budget=0.0).seconds > 0


def test_clients_cut_short_keep_their_proportions_and_their_own_examples():
    federation = config.resolve(config.read("local", SMALL)).federation(None, 0)
    short = module._short(federation, 30)
    for i in range(len(federation)):
        train, *others = (short.rows[split][i] for split in ("train", "validation", "test"))
        assert torch.equal(train, federation.rows["train"][i][:30])
        whole = len(federation.rows["train"][i])
        for split, rows in zip(("validation", "test"), others, strict=True):
            assert len(rows) == -(-len(federation.rows[split][i]) * 30 // whole)
            assert torch.isin(rows, train).all()


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpus_peak_is_that_of_the_one_that_works(name, monkeypatch):
    device, asked = torch.device(name), []
    for what in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, what, lambda device, what=what: asked.append((what, device)) or 7)
    module._reset_peak(device)
    assert module._peak(device) == 7
    assert asked == [("reset_peak_memory_stats", device), ("max_memory_allocated", device)]
    assert module._peak(torch.device("cpu")) > 7
