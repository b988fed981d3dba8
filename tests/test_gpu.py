"""On a GPU every method finds, under every executor, what it finds on a CPU; to rounding, for kernels add in any order.

By hand where there is one: `pytest -m gpu`. `test_device.py` runs these on a pretend device.
"""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kinds import KINDS
from processes import run_kinfed
from torch import nn

from kinfed import SGD, Adam, Federation, Participation, RunError, Training, fit
from kinfed.core.model import Model
from kinfed.core.tasks import Classification
from kinfed.methods import METHODS
from kinfed.models import MODELS
from kinfed.runs.test_scores import reweighted_accuracy
from kinfed.simulation.attacks import ATTACKS
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

if PRETEND := "KINFED_PRETEND" in os.environ:
    import pretend

    DEVICE, CHUNK = pretend.DEVICE, 4  # clients: only CUDA tells its memory
else:
    DEVICE, CHUNK = torch.device("cuda"), None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (PRETEND or torch.cuda.is_available()), reason="there is no GPU here"),
]
cuda_only = pytest.mark.skipif(PRETEND, reason="only a real GPU has this")

CPU = torch.device("cpu")
SIZES = (6, 9, 8, 13, 5, 11)  # examples: unequal, so that batches are filled up and clients end early
TRAINING = Training(epochs=1, batch=4, optimiser=SGD(0.1))
LATE = Participation(0.5, late=0.3, joins=1)
SETTINGS = {"cfl": {"begin": 0, "eps1": 10.0, "eps2": 0.0, "min_size": 2}, "panacea": {"embedding": 4, "steps": 3}}
EXECUTORS = ("loop", "vmap", "fused")
FEW = ("vmap", *(pytest.param(name, marks=pytest.mark.slow) for name in ("loop", "fused")))
EACH = [pytest.param(name, marks=pytest.mark.slow) if PRETEND and name not in KINDS else name for name in METHODS]


def federation(series=False):
    draw = torch.Generator().manual_seed(0)
    count = len(SIZES)
    x = torch.randn(sum(SIZES), *((5, 2) if series else (6,)), generator=draw, dtype=torch.float64)
    y = x.cumsum(1)[:, -3:, 0] if series else x[:, :3].argmax(1)
    links = (torch.rand(count, count, generator=draw) < 0.5).float()
    owner = torch.arange(count).repeat_interleave(torch.tensor(SIZES))
    graph = ((links + links.T) > 0).float().fill_diagonal_(0)
    return Federation.from_arrays(x, y, owner, graph=graph, seed=1)  # every client has a test example of class 0 or 2


def network(norm=False):
    torch.manual_seed(3)
    middle = [nn.BatchNorm1d(5), nn.Dropout(0.3)] if norm else []
    return nn.Sequential(nn.Linear(6, 5), *middle, nn.Tanh(), nn.Linear(5, 3)).double()


def recurrent(name):
    torch.manual_seed(3)
    return MODELS[name]((5, 2), 3, hidden=4).double()


def train(device, method="fedavg", data=None, module=None, **how):
    of_fit = {name: how.pop(name) for name in ("rounds", "training", "participation", "folder", "seed") if name in how}
    execution = Execution(**{"device": str(device), "chunk": CHUNK, **how})
    made = METHODS[method](**SETTINGS.get(method, {}))
    asked = {"rounds": 2, "training": TRAINING, "execution": execution, **of_fit}
    return fit(made, data or federation(), module or network(), **asked)


def agree(one, other, **tolerance):
    """Two runs, or their histories, end with the same models and scores, to rounding."""
    one, other = (getattr(run, "history", run) for run in (one, other))
    tolerance = tolerance or {"rtol": 1e-8, "atol": 1e-9}
    assert one.models.keys() == other.models.keys()
    for key, value in one.models.items():
        torch.testing.assert_close(value.cpu(), other.models[key].cpu(), **tolerance)
    for before, after in zip(one.scores, other.scores, strict=True):
        assert before.keys() == after.keys()
        for key, value in before.items():
            torch.testing.assert_close(value.cpu(), after[key].cpu(), equal_nan=True, **tolerance)


@pytest.mark.parametrize("executor", FEW)
@pytest.mark.parametrize("method", EACH)
def test_every_method_finds_what_it_finds_on_a_cpu(method, executor):
    norm = executor != "fused" and method != "pfedbayes"  # which takes no running statistics
    how = {"method": method, "executor": executor, "participation": LATE, "module": network(norm)}
    agree(train(CPU, **how), train(DEVICE, **how))


@pytest.mark.parametrize("executor", FEW)
@pytest.mark.parametrize("name", ["rnn", "gru"])
def test_recurrent_models_train_as_on_a_cpu(name, executor):
    how = {"data": federation(series=True), "module": recurrent(name), "executor": executor}
    agree(train(CPU, **how), train(DEVICE, **how))


def test_feedback_through_recurrent_models():  # gradients in evaluation mode, which cuDNN does not have
    how = {"method": "fedaghn", "data": federation(series=True), "module": recurrent("rnn"), "executor": "loop"}
    agree(train(CPU, **how), train(DEVICE, **how))


def test_cudnn_is_left_out_of_recurrent_layers_alone(monkeypatch):
    seen, real = [], torch._VF.gru

    def gru(x, *more):
        if x.device.type != "cpu":
            seen.append(torch.backends.cudnn.enabled)
        return real(x, *more)

    monkeypatch.setattr(torch._VF, "gru", gru, raising=False)
    before = torch.backends.cudnn.enabled
    train(DEVICE, data=federation(series=True), module=recurrent("gru"), executor="loop", rounds=1)
    assert seen
    assert not any(seen)
    assert torch.backends.cudnn.enabled is before


def test_a_module_and_examples_that_are_there_already_are_taken():
    there = federation().to(DEVICE)
    found = train(DEVICE, data=there, module=network().to(DEVICE))
    agree(train(CPU), found)
    agree(train(CPU), train(CPU, data=there, module=network().to(DEVICE)))
    assert found.theta(position=0).device == CPU
    assert {t.device for t in found.model(position=0).parameters()} == {CPU}
    on_cpu = train(CPU)
    accuracies = [reweighted_accuracy(run.federation, map(run.model, run.names)) for run in (found, on_cpu)]
    torch.testing.assert_close(*accuracies)


def test_arrays_that_are_there_already_are_taken():
    data = federation()
    owner = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES)).to(DEVICE)
    there = Federation.from_arrays(
        data.x.to(DEVICE), data.y.to(DEVICE), owner, graph=data.graph.weights.to(DEVICE), seed=1
    )
    agree(train(CPU, "sfl"), train(DEVICE, "sfl", there))


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", [Adam(0.01), SGD(0.1, momentum=0.9)], ids=["adam", "momentum"])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_other_optimisers(optimiser, executor):
    how = {"training": Training(epochs=1, batch=4, optimiser=optimiser), "executor": executor}
    agree(train(CPU, **how), train(DEVICE, **how))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(name):
    attack = ATTACKS[name](share=0.3)
    agree(train(CPU, attack=attack), train(DEVICE, attack=attack))


@pytest.mark.parametrize("large", [False, True], ids=["in memory", "in files"])
@pytest.mark.parametrize("method", ["scaffold", pytest.param("fedaghn", marks=pytest.mark.slow)])
def test_a_run_goes_on_where_it_stopped(method, large, tmp_path, monkeypatch):
    if large:
        monkeypatch.setattr("kinfed.simulation.state_store.LARGE", 0)
        monkeypatch.setattr("kinfed.simulation.evaluation.KEPT", 0)
    real = Simulation.train

    def failing(self, round, cohort, sent):
        if round == 1:
            raise RunError("round 2: no more")
        return real(self, round, cohort, sent)

    how = {"method": method, "executor": "vmap", "participation": 0.5}
    with monkeypatch.context() as patched:
        patched.setattr(Simulation, "train", failing)
        with pytest.raises(RunError, match="no more"):
            train(DEVICE, folder=tmp_path, **how)
    agree(train(CPU, **how), train(DEVICE, folder=tmp_path, **how))


def test_one_worker_drives_the_device():
    assert train(DEVICE, executor="loop", workers=5, rounds=1).cost.workers == 1


@pytest.mark.parametrize("method", ["scaffold", pytest.param("fedaghn", marks=pytest.mark.slow)])
def test_processes_that_share_the_clients(method, tmp_path):
    """Here one process shares them with nobody, in the same way."""
    alone = train(CPU, method)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        shared = train(DEVICE, method)
    finally:
        dist.destroy_process_group()
    assert "clients are divided among 1 processes" in shared.cost.reason
    agree(alone, shared)


SHARED = """
import sys
from kinfed.simulation import distributed
from test_gpu import DEVICE, agree, torch, train

if __name__ == "__main__":
    alone = torch.load(sys.argv[1], weights_only=False)
    with distributed.group():
        shared = train(DEVICE, "scaffold")
        if distributed.leads():
            agree(alone, shared)
"""


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path, monkeypatch):
    torch.save(train(CPU, "scaffold").history, tmp_path / "alone.pt")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    run_kinfed(tmp_path, 2, tmp_path / "alone.pt", script=SHARED)


@contextmanager
def counted():
    """What would be launches and waits while this lasts, as a list filled at its end."""
    found = []
    pretend.LAUNCHES.clear(), pretend.WAITS.clear()
    yield found
    found += [sum(pretend.LAUNCHES.values()), sum(pretend.WAITS.values())]


@pytest.mark.skipif(not PRETEND, reason="a pretend device counts")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_launches_and_waits_of_a_round_are_bounded(executor):
    count, cohort, each = 100, 30, 20  # clients; 16 examples of each to train on, for five steps
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(count * each, 784, generator=draw), torch.arange(count * each) % 10
    rows = [torch.arange(i * each, (i + 1) * each) for i in range(count)]
    splits = {"train": [r[4:] for r in rows], "validation": [r[:0] for r in rows], "test": [r[:4] for r in rows]}
    model = Model(MODELS["mlp"]((784,), 10, hidden=(200, 200)))
    method, training = METHODS["fedavg"](), Training(5, 16, SGD(0.01))
    data = Federation(x, y, splits, Classification(10))
    fleet = Simulation(data, model, method, training, execution=Execution(executor, chunk=count, device=str(DEVICE)))
    roster = fleet.roster()
    who = torch.arange(cohort).to(DEVICE)
    sent = method.send(roster, method.start(roster), who)
    fleet.train(0, who, sent)
    with counted() as train:
        fleet.train(1, who, sent)
    with counted() as evaluate:
        fleet.evaluate(1, who, sent)
    assert train[0] <= {"loop": 27 * cohort * 5, "vmap": 400, "fused": 400}[executor]
    assert train[1] <= (3 * cohort + 10 if executor == "loop" else 20)
    assert evaluate[1] <= 20


@cuda_only
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_convolutions(executor):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, 16, 16, generator=draw, dtype=torch.float64)
    data = Federation.from_arrays(x, (x.mean((1, 2, 3)) > 0).long(), torch.arange(60) % 4)
    torch.manual_seed(0)
    how = {"data": data, "module": MODELS["cnn-bn"]((3, 16, 16), 2).double(), "executor": executor}
    agree(train(CPU, **how), train(DEVICE, **how))


@cuda_only
@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_products_are_rounded_where_that_is_asked_for(precision, executor):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(240, 256, generator=draw)
    data = Federation.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(240) % 6)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2))
    how = {"data": data, "module": module, "training": Training(2, 16, SGD(0.1)), "executor": executor}
    start = torch.cat([t.detach().flatten() for t in module.parameters()])
    plain, exact, rounded = train(CPU, **how), train(DEVICE, **how), train(DEVICE, precision=precision, **how)
    plain, exact, rounded = (run.theta(position=0) - start for run in (plain, exact, rounded))
    assert (exact - plain).norm() < 1e-4 * plain.norm()  # float32 is float32, without TF32
    assert 1e-4 * plain.norm() < (rounded - exact).norm() < 5e-2 * plain.norm()


@cuda_only
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU here")
@pytest.mark.parametrize("executor", ["auto", *EXECUTORS])
def test_the_second_of_two(executor):
    other, before = torch.device("cuda", 1), torch.cuda.current_device()
    torch.cuda.reset_peak_memory_stats(0)
    held = torch.cuda.max_memory_allocated(0)
    agree(train(CPU, executor=executor), train(other, executor=executor))
    assert torch.cuda.max_memory_allocated(0) == held
    assert torch.cuda.current_device() == before


@cuda_only
def test_auto_takes_the_fused_form_and_a_chunk_that_fits():
    found = train(DEVICE)
    assert found.cost.executor == "fused"
    assert found.cost.chunk >= len(SIZES)
    agree(train(CPU), found)
