"""The simulation: which executor is picked, what methods set aside, and what happens when training diverges."""

import gc
import weakref

import pytest
import torch
from torch import nn

from kinfed import SGD, Federation, RunError, Training, UsageError, fit
from kinfed.core.fleet import is_finite
from kinfed.core.model import Model
from kinfed.methods import CFL, FedAGHN, FedAMP, FedAvg, FedAvgFT, Local, PFedGraph
from kinfed.simulation.attacks import Poison
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation


def federation(clients=5, each=20):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(clients * each, 1, 8, 8, generator=draw)
    y = (x.mean((1, 2, 3)) > 0).long()
    return Federation.from_arrays(x, y, torch.arange(clients).repeat_interleave(each))


def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))


def simulation(module, clients=5, training=None, **how):
    return Simulation(federation(clients), Model(module), FedAvg(), training or Training(), execution=Execution(**how))


class Scaled(nn.Module):
    """Something to learn behind any layer."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.by * x


def test_any_chunk_gives_the_same_models():
    module = dense().double()
    data = federation()
    data = Federation(data.x.double(), data.y, data.rows, data.task)
    whole, *others = (
        fit(FedAvg(), data, module, rounds=2, execution=Execution("vmap", chunk=chunk)).history.models["theta"]
        for chunk in (5, 1, 2)
    )
    for other in others:
        torch.testing.assert_close(other, whole, rtol=1e-10, atol=1e-12)


def test_feedback_examples_are_set_aside_and_never_trained_on():
    data = federation(each=30)
    for feedback, expected in (("held-out", 2), ("train", 21), ("test", 6)):
        method = FedAGHN(feedback=feedback)
        fleet = Simulation(data, Model(dense()), method, Training())
        held = fleet.clients.rows["held_out"]
        assert [len(rows) for rows in held] == [expected] * 5
        for mine, train, test in zip(held, fleet.clients.rows["train"], data.rows["test"], strict=True):
            overlap = set(mine.tolist()) & set(train.tolist())
            assert len(overlap) == (21 if feedback == "train" else 0)
            assert (set(mine.tolist()) <= set(test.tolist())) == (feedback == "test")
        run = fit(method, data, dense(), rounds=1)
        assert bool(run.summary.selection.caution) == (feedback == "test")


def test_divergence_names_the_client_and_leaves_the_states_as_they_were():
    data = federation()
    x = data.x.clone()
    x[data.rows["train"][3]] *= 1e30
    data = Federation(x, data.y, data.rows, data.task, names=list("abcde"))
    fleet = Simulation(data, Model(dense()), Local(), Training(optimiser=SGD(lr=1e20)), execution=Execution("loop"))
    roster = fleet.roster()
    before = fleet.state.theta.clone()
    with pytest.raises(RunError, match=r"round 3: training diverged to NaN or infinity at client .*d.*learning rate"):
        fleet.train(2, roster.everyone, ())
    assert torch.equal(fleet.state.theta, before)


@pytest.mark.parametrize("method", [CFL(), FedAMP(pull=0.0), FedAGHN(), FedAvg(), PFedGraph()])
def test_models_whose_squares_cannot_be_added_up_have_diverged_before_the_server_compares_them(method):
    with pytest.raises(RunError, match=r"round 1: .* diverged to a model of length above 1e\+15 at clients 0, 1, 2, 3"):
        fit(method, federation(), dense(), rounds=3, training=Training(optimiser=SGD(lr=1e22)))


def test_what_an_attack_makes_of_a_model_is_looked_at_too():
    attack = Poison(share=0.4, factor=1e30)
    with pytest.raises(RunError, match=r"round 1: .* at client.* lower the attack's factor"):
        fit(FedAvg(), federation(), dense(), rounds=1, attack=attack)


class Unready(FedAvg):
    """A method whose server raises something in its second round."""

    def aggregate(self, roster, server, cohort, uploads):
        return super().aggregate(roster, server, cohort, uploads) if not roster.round else {}["graph"]


@pytest.mark.parametrize("method", [Unready(), Unready(personal=("*.bias",))])
def test_what_a_server_raises_names_method_and_round(method):
    with pytest.raises(RunError, match="round 2: the server's part of Unready failed: KeyError: 'graph'"):
        fit(method, federation(), dense(), rounds=3)


def test_a_model_that_is_tuned_to_a_client_and_diverges_is_not_scored():
    data = federation()
    x = data.x.clone()
    x[data.rows["train"][3]] *= 1e30  # of one that never trains, so that only its tuned model is no number
    data = Federation(x, data.y, data.rows, data.task, names=list("abcde"))
    fleet = Simulation(data, Model(dense()), FedAvgFT(), Training(optimiser=SGD(lr=1e20)), execution=Execution("loop"))
    server = fleet.method.start(fleet.roster())
    with pytest.raises(RunError, match=r"round 2: training diverged to NaN or infinity at client d; lower"):
        fleet.evaluate(1, torch.tensor([3]), fleet.method.send(fleet.roster(), server, torch.tensor([3])))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Linear(3, 1), r"the model gives \[1\] for an example, but there are 2 classes"),
        (nn.Unflatten(1, (3, 1)), r"the model gives \[3, 1\] for an example"),
        (nn.Linear(4, 2), r"the model cannot take an example, which is \[3\]: mat1 and mat2"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(module, said):
    data = Federation.from_arrays(torch.randn(40, 3), torch.arange(40) % 2, torch.arange(40) % 4)
    with pytest.raises(UsageError, match=said):
        fit(FedAvg(), data, nn.Sequential(module, Scaled()), rounds=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("fedavg", "data", "net"), "'fedavg' is not a Method such as"),
        ((FedAvg, "data", "net"), "the class FedAvg is not a Method such as"),
        ((FedAvg(), "net", "data"), "is not a Federation such as"),
        ((FedAvg(), "data", nn.Linear), "the class Linear is not a Module such as"),
    ],
)
def test_what_is_handed_to_fit_is_looked_at(given, said):
    parts = {"data": federation(), "net": dense()}
    with pytest.raises(UsageError, match=said):
        fit(*(parts.get(part, part) if isinstance(part, str) else part for part in given), rounds=1)


def test_targets_that_a_model_does_not_give_are_refused():
    data = Federation.from_arrays(torch.randn(40, 3), torch.randn(40, 2), torch.arange(40) % 4)
    with pytest.raises(UsageError, match=r"the model gives \[1\] for an example, but its target is \[2\]"):
        fit(FedAvg(), data, nn.Linear(3, 1), rounds=1)


def test_every_optimiser_and_regression_train():
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(200, 3, generator=draw)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 1
    data = Federation.from_arrays(x, y, torch.arange(200) % 5)
    run = fit(FedAvg(), data, nn.Linear(3, 1), rounds=15, training=Training(2, 8, SGD(0.05, momentum=0.5)))
    assert run.summary.metric.name == "mae"
    assert run.summary.scores["shared"]["mean"] < 0.01
    validation = run.history.curve("shared", "validation", "mae").mean(1)
    assert run.history.select("shared") == run.history.rounds[int(validation.argmin())]


def test_a_run_that_fails_keeps_its_last_good_round_and_goes_on_from_there(tmp_path, failing):
    data, module = federation(), dense()
    whole = fit(FedAvg(), data, module, rounds=5)
    with failing(4):
        fit(FedAvg(), data, module, rounds=5, folder=tmp_path)
    seen = []
    again = fit(
        FedAvg(),
        data,
        module,
        rounds=5,
        folder=tmp_path,
        execution=Execution(progress=lambda history, _: seen.append(history.cost.done)),
    )
    assert seen == [4, 5]
    assert torch.equal(again.history.models["theta"], whole.history.models["theta"])
    (tmp_path / "checkpoint.safetensors").write_bytes(b"broken")
    with pytest.raises(RunError, match="is not a checkpoint of this run"):
        fit(FedAvg(), data, module, rounds=5, folder=tmp_path)
    (tmp_path / "folder" / "checkpoint.safetensors").mkdir(parents=True)
    with pytest.raises(RunError, match=r"folder/checkpoint\.safetensors is not a checkpoint of this run"):
        fit(FedAvg(), data, module, rounds=5, folder=tmp_path / "folder")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -2.0], True),
        ([3e38, 3e38], True),  # their sum is infinite, they are not
        ([1.0, float("nan")], False),
        ([float("inf"), -float("inf")], False),
        ([float("inf"), 0.0], False),
        ([], True),
    ],
)
def test_finite_numbers_are_told_from_others(values, expected):
    assert is_finite(torch.tensor(values)) is expected
    assert is_finite(torch.tensor([1, 2]))


@pytest.mark.parametrize("method", [FedAvg(), Local()])
@pytest.mark.parametrize(("executor", "workers"), [("loop", 1), ("loop", 2), ("vmap", 1)])
def test_examples_are_given_back_when_nobody_needs_them(method, executor, workers):
    how = {"rounds": 1, "execution": Execution(executor, workers)}
    fit(method, federation(), dense(), **how)  # the first run imports, which leaves frames behind
    gc.disable()  # it would break rings of references, which must not be there
    try:
        mine = federation()
        pool = weakref.ref(mine.x)
        run = fit(method, mine, dense(), **how)
        del run, mine
        assert pool() is None
    finally:
        gc.enable()
