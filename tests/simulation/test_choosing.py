"""The choice of an executor: by a rule that no clock has a say in."""

import time

import pytest
import torch
from torch import nn

from kinfed import SGD, Adam, Federation, Training, UsageError, fit
from kinfed.core.model import Model
from kinfed.methods import FedAvg
from kinfed.methods.solved import KNOWN
from kinfed.models.trees import trees
from kinfed.simulation import auto
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

TRAINING = Training(epochs=2, batch=8, optimiser=SGD(0.1))
MOMENTUM = Training(epochs=2, batch=8, optimiser=SGD(0.1, momentum=0.9))


def federation(clients=6, each=20, shape=(9,)):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(clients * each, *shape, generator=draw)
    return Federation.from_arrays(x, (x.flatten(1).mean(1) > 0).long(), torch.arange(clients).repeat_interleave(each))


def dense(width=2):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(9, width), nn.ReLU(), nn.Linear(width, 2))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(9, 2)

    def forward(self, x):
        return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def convolution(side):
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * (side - 2) ** 2, 2))


def chosen(module, training=TRAINING, data=None, share=1.0, **how):
    fleet = Simulation(data or federation(), Model(module), FedAvg(), training, execution=Execution(**how), share=share)
    assert fleet.how["executor"] == fleet.executor
    return fleet.executor, fleet.reason


@pytest.mark.parametrize("width", [2, 20_000])
def test_plain_sgd_on_dense_layers_is_fused_and_nothing_is_tried(width, monkeypatch):
    monkeypatch.setattr(auto, "_problem_with_vmap", None)
    assert chosen(dense(width)) == ("fused", "plain SGD on layers that have a fused form")
    assert chosen(dense(width), data=federation(1))[0] == "fused"


def test_small_dense_models_that_cannot_be_fused_are_batched():
    for training, how in ((MOMENTUM, {}), (Training(batch=8, optimiser=Adam()), {}), (TRAINING, {"precision": "bf16"})):
        name, reason = chosen(dense(), training, **how)
        assert name == "vmap"
        assert reason == "many small steps at once; only plain SGD in full precision has a fused form"
    assert chosen(nn.Sequential(nn.Linear(9, 4), nn.GELU(), nn.Linear(4, 2)))[0] == "vmap"
    assert chosen(convolution(6), data=federation(shape=(1, 6, 6)))[0] == "vmap"


def test_what_a_cpu_does_best_client_by_client_is_not_tried_in_batches(monkeypatch):
    monkeypatch.setattr(auto, "_problem_with_vmap", None)
    images = federation(shape=(1, 40, 40))  # a model of 5,798 numbers, each used for 1,600 pixels of 8 examples
    assert chosen(convolution(40), data=images) == ("loop", "convolutions on a CPU run faster client by client")
    few = ("loop", "with fewer than 5 clients in a round there is little to batch")
    assert chosen(dense(), MOMENTUM, federation(4)) == few
    assert chosen(dense(), MOMENTUM, federation(8), share=0.5) == few
    # 12 numbers for each unit and 2 more, 8 examples in a step, and 2^22 of these: 43,690 units.
    assert chosen(dense(43_691), MOMENTUM)[0] == "loop"
    monkeypatch.setattr(auto, "_problem_with_vmap", lambda *_, **__: "")
    assert chosen(dense(43_690), MOMENTUM)[0] == "vmap"


def test_what_vmap_cannot_take_or_only_client_by_client_runs_in_the_loop():
    name, reason = chosen(Branching())
    assert name == "loop"
    assert reason.startswith("vmap cannot take this model: ")
    name, reason = chosen(Last(), data=federation(shape=(4, 3)))
    assert name == "loop"
    assert "fallback" in reason
    assert chosen(Last(), data=federation(shape=(4, 3)), executor="vmap") == ("vmap", "as requested")


@pytest.mark.parametrize("method", ["fedavg", "partial-pooling", "personal-boosting"])
def test_of_a_method_without_gradients_none_are_tried(method, monkeypatch):
    module = trees((9,), 2, trees=3, depth=2) if method == "personal-boosting" else nn.Sequential(nn.GELU(), dense())
    monkeypatch.setattr("kinfed.core.trial.grad", None)
    fleet = Simulation(federation(), Model(module), KNOWN[method](), TRAINING)
    assert fleet.executor == ("loop" if method == "fedavg" else "vmap")


def test_no_clock_has_a_say(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", None)
    assert [chosen(dense(), training)[0] for training in (TRAINING, MOMENTUM)] == ["fused", "vmap"]


def test_requests_are_checked():
    for module, asked, message in (
        (dense(), {"executor": "ray"}, "Execution.executor must be one of 'auto', 'loop', 'vmap', 'fused'; got 'ray'"),
        (dense(), {"workers": 0}, "Execution.workers must be at least 1; got 0"),
        (dense(), {"workers": 0.5}, "Execution.workers must be a whole number or left out; got 0.5"),
        (Branching(), {"executor": "fused"}, r"cannot run under executor 'fused' \(Branching has no fused form\)"),
        (Branching(), {"executor": "vmap"}, r"cannot run under executor 'vmap' \(.*\); use executor 'loop'"),
    ):
        with pytest.raises(UsageError, match=message):
            Simulation(federation(), Model(module), FedAvg(), TRAINING, execution=Execution(**asked))


def stopped(failing, folder, **how):
    """A fit of six rounds that fails in the fourth."""
    with failing(4):
        fit(FedAvg(), federation(), dense(), rounds=6, training=TRAINING, folder=folder, execution=Execution(**how))


@pytest.mark.parametrize("asked", [{"executor": "loop", "workers": 2}, {"executor": "vmap", "chunk": 4}])
def test_a_resumed_run_keeps_the_executor_and_ends_with_the_same_bits(asked, tmp_path, monkeypatch, failing):
    unbroken = fit(FedAvg(), federation(), dense(), rounds=6, training=TRAINING, execution=Execution(**asked))
    stopped(failing, tmp_path, **asked)
    monkeypatch.setattr(auto, "_rule", None)  # nothing is chosen again
    resumed = fit(FedAvg(), federation(), dense(), rounds=6, training=TRAINING, folder=tmp_path)
    assert resumed.cost.executor == asked["executor"]
    assert resumed.cost.reason == "kept since the run began"
    assert torch.equal(resumed.history.models["theta"], unbroken.history.models["theta"])


def test_other_bits_are_told_and_another_precision_is_refused(tmp_path, failing, recwarn):
    def resumed(**how):
        return fit(
            FedAvg(), federation(), dense(), rounds=6, training=TRAINING, folder=tmp_path, execution=Execution(**how)
        )

    stopped(failing, tmp_path, executor="loop", workers=1)
    with pytest.raises(UsageError, match=r"began with precision float32, and cannot continue in bf16"):
        resumed(precision="bf16")
    resumed(executor="loop", workers=2, precision="float32", device="cpu")  # the same bits for any number of workers
    assert not [str(w.message) for w in recwarn if "began with" in str(w.message)]
    with pytest.warns(
        UserWarning, match="began with executor loop; with another setting the results are equal only to rounding"
    ):
        assert resumed(executor="fused").cost.executor == "fused"


@pytest.mark.parametrize(("whole", "expected"), [(6700, 30), (5700, 25), (100, 20), (10**6, 40)])
def test_a_chunk_takes_half_of_a_gpus_memory(whole, expected, monkeypatch):
    for name, answer in {
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 700,
        "max_memory_allocated": lambda device: 800,  # a client takes 100
        "get_device_properties": lambda device: type("Properties", (), {"total_memory": whole}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    fleet = Simulation(federation(40, 10), Model(dense()), FedAvg(), TRAINING, execution=Execution("vmap"))
    assert auto.chunk_that_fits(fleet.clients, fleet.model, TRAINING, None) == expected
    assert fleet.how["chunk"] == 20  # on a CPU
