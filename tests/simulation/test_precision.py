"""Precision: bfloat16 where it is asked for and nowhere else, and a GPU's settings put back."""

import pytest
import torch
from torch import nn

from kinfed import SGD, Federation, RunError, Training, UsageError, fit
from kinfed.core.model import Model
from kinfed.methods import FedAvg
from kinfed.simulation.execution import Execution
from kinfed.simulation.precision import _settings, check, tf32
from kinfed.simulation.simulation import Simulation

TRAINING = Training(epochs=2, batch=8, optimiser=SGD(0.1))


def federation():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, 8, 8, generator=draw)
    return Federation.from_arrays(x, (x.mean((1, 2, 3)) > 0).long(), torch.arange(120) % 6)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 2)
        return nn.Sequential(*layers)


def update(precision, executor):
    fleet = Simulation(
        federation(), Model(network()), FedAvg(), TRAINING, execution=Execution(executor, precision=precision)
    )
    roster = fleet.roster()
    sent = FedAvg().send(roster, FedAvg().start(roster), roster.everyone)
    trained = fleet.train(0, roster.everyone, sent)[1].theta
    return trained - fleet.model.theta, fleet.evaluate(0, roster.everyone, sent).scores["shared", "test", "loss"]


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_bf16_rounds_the_products_of_training_and_nothing_else(executor):
    exact, loss = update("float32", executor)
    rounded, same = update("bf16", executor)
    assert rounded.dtype == torch.float32
    off = float((rounded - exact).norm() / exact.norm())
    assert 1e-4 < off < 5e-2
    assert torch.equal(loss, same)  # evaluation is in float32
    again, _ = update("bf16", executor)
    assert torch.equal(again, rounded)


def test_a_model_is_rounded_only_where_that_was_asked_for():
    model = Model(network())
    fleets = [
        Simulation(federation(), model, FedAvg(), TRAINING, execution=Execution(precision=p))
        for p in ("bf16", "float32")
    ]
    assert [fleet.model.bf16 for fleet in fleets] == [True, False]
    assert not model.bf16
    dense = Model(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)))
    with pytest.raises(UsageError, match=r"cannot run under executor 'fused' \(only plain SGD in full precision has"):
        Simulation(federation(), dense, FedAvg(), TRAINING, execution=Execution("fused", precision="bf16"))


def test_a_resumed_run_keeps_its_precision(tmp_path, failing):
    def run(folder=None, **how):
        how = Execution(**how)
        return fit(FedAvg(), federation(), network(), rounds=4, training=TRAINING, folder=folder, execution=how)

    unbroken = run(precision="bf16")
    assert unbroken.summary.cost.precision == "bf16"
    with failing(3):
        run(folder=tmp_path, precision="bf16")
    resumed = run(folder=tmp_path)
    assert resumed.cost.precision == "bf16"
    assert torch.equal(resumed.history.models["theta"], unbroken.history.models["theta"])


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_allowed_or_not_and_then_as_it_was(allowed):
    before = [getattr(place, name) for place, name, _ in _settings()]

    def stop():
        assert all(getattr(place, name) == values[allowed] for place, name, values in _settings())
        raise RunError("stop")

    with pytest.raises(RunError, match="stop"), tf32(allowed):
        stop()
    assert [getattr(place, name) for place, name, _ in _settings()] == before


def test_what_is_not_there_is_refused():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(UsageError, match=r"precision must be one of 'float32', 'tf32', 'bf16' or left out; got 'fp8'"):
        Execution(precision="fp8")
    with pytest.raises(UsageError, match=r"precision 'tf32' is a GPU's, and this runs on cpu; use 'bf16'"):
        check("tf32", cpu, torch.float32)
    with pytest.raises(UsageError, match=r"precision 'bf16' is for float32 data; got torch\.float64"):
        check("bf16", cpu, torch.float64)
    check("tf32", cuda, torch.float32)
    check("float32", cpu, torch.float64)
