"""Evaluation: one pass for a shared model, groups of clients for others, and which models are kept."""

import dataclasses

import pytest
import torch
from torch import nn

from kinfed import SGD, Federation, Training, UsageError, fit
from kinfed.core.method import Params, SharedParams
from kinfed.core.mixins import Predicts
from kinfed.core.model import Model
from kinfed.core.tasks import Classification, Regression
from kinfed.methods import FedAMP, FedAvg, FedAvgFT, Local
from kinfed.runs.config import experiment
from kinfed.simulation import evaluation
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

SIZES = (4, 30, 7, 19, 11, 3, 25, 8)
TRAINING = Training(epochs=1, batch=8, optimiser=SGD(0.1))


def federation(validated=True):
    """Clients with 4 training examples each, and as many validation and test examples as SIZES says, in all."""
    draw = torch.Generator().manual_seed(0)
    count = sum(SIZES) + 4 * len(SIZES)
    x = torch.randn(count, 5, generator=draw, dtype=torch.float64)
    y = (x @ torch.randn(5, 3, generator=draw, dtype=torch.float64)).argmax(1)
    y[:3] = torch.arange(3)
    order, at = torch.randperm(count, generator=draw), 0
    rows = {"train": [], "validation": [], "test": []}
    for size in SIZES:
        mine = order[at : at + size + 4]
        at += size + 4
        cut = 4 + size // 3 if validated else 4
        for split, part in zip(rows, (mine[:4], mine[4:cut], mine[cut:]), strict=True):
            rows[split].append(part)
    return Federation(x, y, rows, Classification(3, by_class=True))


def module():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


class Two(FedAvg):
    """A shared model and a personal one, the personal one first."""

    def init_client(self, client):
        return Params(client.model.theta + 0.1 * client.noise(client.model.theta))

    def personalise(self, client, state, received):
        return {"own": state, "shared": received, "between": Params((state.theta + received.theta) / 2)}


def simulation(method, validated=True, **how):
    fleet = Simulation(federation(validated), Model(module()), method, TRAINING, execution=Execution(**how))
    roster = fleet.roster()
    return fleet, method.send(roster, method.start(roster), roster.everyone)


def expected(fleet, theta, split):
    """All scores of one model per client: plain modules, one client after the other."""
    data, found = federation(), {}
    for rows, mine in zip(fleet.clients.rows[split], theta, strict=True):
        outputs = fleet.model.export(mine)(data.x[rows]).detach()
        for metric, value in data.task.score(outputs, data.y[rows], torch.ones(len(rows)).double()).items():
            found.setdefault(metric, []).append(float(value))
    return found


@pytest.mark.parametrize("how", [{"executor": "loop", "workers": 2}, {"executor": "vmap", "chunk": 3}])
@pytest.mark.parametrize("group", [3, 256])
@pytest.mark.parametrize("validated", [True, False])
def test_every_named_model_is_scored_on_its_clients_own_examples(how, group, validated, monkeypatch):
    monkeypatch.setattr(evaluation, "GROUP", group)
    fleet, sent = simulation(Two(), validated, **how)
    scores, models, _ = fleet.evaluate(0, torch.arange(8), sent)
    assert list(models) == ["own", "shared", "between"]
    assert next(iter(scores))[0] == "own"  # the headline is the first
    assert {split for _, split, _ in scores} == ({"validation", "test"} if validated else {"test"})
    assert torch.equal(models["own"].theta, fleet.state.theta)
    torch.testing.assert_close(models["between"].theta, (fleet.state.theta + sent.theta) / 2)
    assert models["shared"].theta is sent.theta
    wanted = {
        (name, split, metric): values
        for name, model in models.items()
        for split in (("validation", "test") if validated else ("test",))
        for metric, values in expected(fleet, model.theta.expand(8, -1), split).items()
    }
    assert scores.keys() == wanted.keys()
    for key, values in scores.items():
        assert values.tolist() == pytest.approx(wanted[key], abs=1e-9, nan_ok=True), key
    some = torch.tensor([6, 0, 3])
    part = fleet.evaluate(0, some, sent)
    for key, values in part.scores.items():
        assert values.tolist() == pytest.approx(scores[key][some].tolist(), abs=1e-9, nan_ok=True)


def test_a_shared_model_goes_once_over_all_examples_and_is_not_copied(monkeypatch):
    fleet, sent = simulation(FedAvg(), executor="loop")
    passes = []
    real = Model.predict
    monkeypatch.setattr(Model, "predict", lambda self, t, x: passes.append(len(x)) or real(self, t, x))
    found = fleet.evaluate(0, torch.arange(8), sent)
    assert passes == [sum(SIZES)]
    assert found.models["shared"].theta is sent.theta
    asked = []
    personalise = FedAvg.personalise
    monkeypatch.setattr(FedAvg, "personalise", lambda *of: asked.append(1) or personalise(*of))
    fleet.evaluate(0, torch.arange(8), sent)
    assert len(asked) == 1  # what the first client has, all have
    passes.clear()
    fleet.evaluate(0, torch.arange(8), Params(sent.theta.expand(8, -1)))  # the same rows, but nobody says so
    assert sorted(passes) == sorted(SIZES)


def test_what_is_declared_as_shared_and_is_not_is_refused():
    class Astray(FedAvg):
        def personalise(self, client, state, received):
            return {"shared": SharedParams(received.theta + client.noise(received.theta))}

    fleet, sent = simulation(Astray(), executor="vmap", chunk=3)
    with pytest.raises(UsageError, match=r"the model 'shared' is declared as shared but differs between clients"):
        fleet.evaluate(0, torch.arange(8), sent)


@pytest.mark.parametrize(
    "full", [torch.cuda.OutOfMemoryError("CUDA out of memory"), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")]
)
def test_a_device_that_cannot_hold_all_examples_gets_fewer_at_a_time(full, monkeypatch):
    fleet, sent = simulation(FedAvg())
    whole = fleet.evaluate(0, torch.arange(len(SIZES)), sent).scores
    real, room = Model.predict, 20

    def small(self, tensors, x):
        if len(x) > room:
            raise full
        return real(self, tensors, x)

    monkeypatch.setattr(Model, "predict", small)
    parts = fleet.evaluate(0, torch.arange(len(SIZES)), sent).scores
    assert parts.keys() == whole.keys()
    for name, values in whole.items():
        torch.testing.assert_close(parts[name], values, equal_nan=True)
    room = 0
    with pytest.raises(type(full)):
        fleet.evaluate(0, torch.arange(len(SIZES)), sent)


def test_a_method_with_its_own_prediction_is_asked_for_it():
    class Reversed(FedAvg, Predicts):
        def predict(self, client, personal, x):
            return -client.model(personal.theta, x)

        export = None  # nothing is saved here

    for how in ({"executor": "loop"}, {"executor": "vmap", "chunk": 3}):
        fleet, sent = simulation(Reversed(), **how)
        found = fleet.evaluate(0, torch.arange(8), sent).scores["shared", "test", "accuracy"]
        data, net = federation(), fleet.model.export(fleet.model.theta)
        least = [(net(data.x[rows]).argmin(1) == data.y[rows]).double().mean() for rows in data.rows["test"]]
        assert found.tolist() == pytest.approx([float(value) for value in least])


@pytest.mark.parametrize("method", [FedAvg(), FedAvgFT(), Local(), FedAMP()])
@pytest.mark.parametrize("how", [{"executor": "loop"}, {"executor": "vmap", "chunk": 3}])
def test_models_too_large_to_keep_are_made_again_when_they_are_chosen(method, how, monkeypatch):
    def run():
        return fit(
            method, federation(), module(), rounds=4, training=TRAINING, participation=0.5, execution=Execution(**how)
        )

    whole = run()
    monkeypatch.setattr(evaluation, "KEPT", 0)
    monkeypatch.setattr(evaluation, "GROUP", 3)
    made = []
    real = evaluation.Evaluator._again
    monkeypatch.setattr(evaluation.Evaluator, "_again", lambda *of: made.append(of[1]) or real(*of))
    again = run()
    assert again.history.chosen == whole.history.chosen
    torch.testing.assert_close(again.history.models["theta"], whole.history.models["theta"], rtol=1e-9, atol=1e-10)
    chosen = sum(whole.history.select(whole.history.chosen) >= r for r in whole.history.rounds)
    assert len(made) <= chosen  # only those that were best so far
    assert bool(made) == (not isinstance(method, FedAvg))


@pytest.mark.parametrize("score", ["by_class", "reweighted"])
def test_a_config_asks_for_scores_of_classes(score):
    asked = experiment.resolve(experiment.read("fedavg", [f"federation.{score}=true"]))
    assert experiment.resolve(experiment.read("fedavg", [])).table["federation"] == {
        key: value for key, value in asked.table["federation"].items() if key != score
    }
    for table in (asked.table, experiment.resolve(asked.table).table):
        task = experiment.resolve(table).federation(None, 0).task
        assert {name for name in ("by_class", "reweighted") if getattr(task, name)} == {score}
    data = dataclasses.replace(asked.dataset(None), task=Regression())
    with pytest.raises(UsageError, match=f"federation.{score}=true is a score of classes, but this data has none"):
        dataclasses.replace(asked, dataset=lambda _: data).federation(None, 0)
    with pytest.raises(UsageError, match=rf"federation\.{score} must be true or false; got 1"):
        experiment.resolve(experiment.read("fedavg", [f"federation.{score}=1"]))
