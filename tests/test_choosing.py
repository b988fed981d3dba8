"""The choice of an executor: what is measured, how much of it, and what decides where nothing is."""

import time

import pytest
import torch
from torch import nn

from kinfed import SGD, Federation, RunError, Training, UsageError, choosing, fit
from kinfed.choosing import Candidate, choose
from kinfed.fleet import Simulation
from kinfed.methods import FedAvg
from kinfed.model import Model

TRAINING = Training(epochs=2, batch=8, optimiser=SGD(0.1))


def federation(clients=6, each=20):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(clients * each, 9, generator=draw)
    return Federation.from_arrays(x, (x.mean(1) > 0).long(), torch.arange(clients).repeat_interleave(each))


def dense():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Linear(9, 2)


class Fake:
    """Takes so many seconds for a step of one client, and counts these."""

    def __init__(self, name, seconds):
        self.name, self.seconds, self.steps, self.calls = name, seconds, 0, []

    def __call__(self, clients, model, training, round, ids, program, *trees):
        class Asked:
            def descend(_, theta, steps):
                self.steps += steps * len(ids)
                self.calls.append((ids.tolist(), steps))
                time.sleep(self.seconds * steps * len(ids))
                return theta

        return program(Asked(), *trees)


def chosen(*fakes, rounds, cohort=6, **against):
    fleet = Simulation(federation(), Model(dense()), FedAvg(), TRAINING, executor="loop")
    known = [Candidate(fake, **against.get(fake.name, {})) for fake in fakes]
    return choose("auto", known, fleet.clients, fleet.model, TRAINING, cohort, rounds)


@pytest.mark.parametrize("best", [0, 1, 2])
def test_a_long_job_is_run_by_what_was_fastest(best):
    fakes = [Fake(name, 0.0005 if i == best else 0.003) for i, name in enumerate("abc")]
    run, reason = chosen(*fakes, rounds=1000)
    assert run is fakes[best]
    assert reason.startswith("measured, ms for a step of 6 clients: a ")
    assert all(6 * (1 + 2 * 5) <= fake.steps <= 6 * (1 + 6 * 5) for fake in fakes)
    assert fakes[0].calls[0][0] == [0, 1, 2, 3, 4, 5]  # real clients


def test_measuring_takes_at_most_a_twentieth_of_the_work():
    # Each client has 14 training examples, so 4 local steps a round: 24 for the cohort.
    for rounds, steps in ((1, 0), (29, 0), (30, 3), (49, 4), (50, 5), (109, 9), (110, 11), (10**6, 31)):
        fakes = [Fake("a", 0), Fake("b", 0)]
        run, reason = chosen(*fakes, rounds=rounds)
        assert [fake.steps for fake in fakes] == [6 * steps] * 2
        assert sum(fake.steps for fake in fakes) <= 0.05 * 24 * rounds
        if not steps:
            assert run is fakes[0]
            assert reason == f"{24 * rounds} local steps are too few to measure; batching clients is the rule"


def test_measuring_stops_within_its_second():
    fakes = [Fake("a", 0.03), Fake("b", 0.02)]  # 0.3 s for one step of all under both
    started = time.perf_counter()
    run, _ = chosen(*fakes, rounds=10**6)
    assert run is fakes[1]
    assert [fake.steps for fake in fakes] == [6 * (1 + 3)] * 2
    assert time.perf_counter() - started < 3
    fakes = [Fake("a", 0.06), Fake("b", 0.1)]  # one step of all takes 0.96 s: the first look must do
    assert chosen(*fakes, rounds=10**6)[0] is fakes[0]
    assert [fake.steps for fake in fakes] == [6, 6]


def test_other_work_in_the_first_turns_does_not_decide():
    fakes = [Fake("a", 0.0005), Fake("b", 0.001)]
    real, calls = Fake.__call__, []

    def disturbed(*asked):
        calls.append(1)
        time.sleep(0.05 if len(calls) <= 4 else 0)
        return real(*asked)

    fakes[0].__class__ = type("Disturbed", (Fake,), {"__call__": disturbed})
    assert chosen(*fakes, rounds=10**6)[0] is fakes[0]
    assert len(calls) == 7


def test_what_cannot_win_or_cannot_run_is_not_measured():
    fakes = [Fake(name, 0) for name in "abc"]
    run, reason = chosen(*fakes, rounds=10**6, a={"problem": "it branches"}, b={"slow": "b is slow here"})
    assert run is fakes[2]
    assert reason == "b is slow here"
    run, reason = chosen(*fakes[::2], rounds=10**6, a={"problem": "it branches"})
    assert reason == "a cannot take this model: it branches"
    assert not any(fake.steps for fake in fakes)


def test_a_simulation_measures_real_steps_if_the_work_is_worth_it():
    fleet = Simulation(federation(), Model(dense()), FedAvg(), TRAINING, rounds=10**5, share=0.5)
    assert fleet.reason.startswith("measured, ms for a step of 3 clients: fused ")
    assert fleet.executor in ("fused", "loop", "vmap")
    assert fleet.how["executor"] == fleet.executor
    before = Simulation(federation(), Model(dense()), FedAvg(), TRAINING, executor=fleet.executor)
    assert torch.equal(fleet.model.theta, before.model.theta)


def test_requests_are_checked():
    for asked, message in (
        ({"executor": "ray"}, "executor must be one of auto, .*loop; got 'ray'"),
        ({"workers": 0}, "workers counts threads, so it must be at least 1; got 0"),
        ({"workers": 0.5}, "workers counts threads, so it must be at least 1; got 0.5"),
    ):
        with pytest.raises(UsageError, match=message):
            Simulation(federation(), Model(dense()), FedAvg(), TRAINING, **asked)


@pytest.mark.parametrize("asked", [{"executor": "loop", "workers": 2}, {"executor": "vmap", "chunk": 4}])
def test_a_resumed_run_keeps_the_executor_and_ends_with_the_same_bits(asked, tmp_path, monkeypatch):
    def run(rounds=6, **how):
        return fit(FedAvg(), federation(), dense(), rounds=rounds, training=TRAINING, **how)

    unbroken = run(**asked)
    real = Simulation.train

    def failing(self, round, cohort, sent):
        if round == 3:
            raise RunError("round 4: training diverged")
        return real(self, round, cohort, sent)

    monkeypatch.setattr(Simulation, "train", failing)
    with pytest.raises(RunError):
        run(folder=tmp_path, **asked)
    monkeypatch.undo()
    monkeypatch.setattr(choosing, "HANDFUL", None)  # nothing is measured or chosen again
    resumed = run(folder=tmp_path)
    assert resumed.executor == asked["executor"]
    assert resumed.reason == "as before the interruption"
    assert torch.equal(resumed.history.models["theta"], unbroken.history.models["theta"])
    other = {"loop": "vmap", "vmap": "loop"}[asked["executor"]]
    assert run(folder=tmp_path, executor=other).executor == other  # asked for is asked for


@pytest.mark.parametrize(("free", "expected"), [(6000, 30), (5000, 25), (100, 20), (10**6, 40)])
def test_a_chunk_takes_half_of_a_gpus_free_memory(free, expected, monkeypatch):
    used = iter([700, 700])  # before the step, and when it is over
    for name, answer in {
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: next(used),
        "max_memory_allocated": lambda: 800,  # a client takes 100
        "memory_reserved": lambda: 900,
        "mem_get_info": lambda: (free - 200, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    fleet = Simulation(federation(40, 10), Model(dense()), FedAvg(), TRAINING, executor="vmap")
    assert choosing.chunk_that_fits(fleet.clients, fleet.model, TRAINING) == expected
    assert fleet.how["chunk"] == 20  # on a CPU
