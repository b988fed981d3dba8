"""The models that a run hands out and writes are those that were scored, or there are none."""

import pytest
import torch
from torch import nn

import kinfed
from kinfed import Execution, FedAvg, Federation, Local, RunError, UsageError
from kinfed.core.model import Model
from kinfed.core.trial import Trial
from kinfed.methods import FedRoD, KNNPer
from kinfed.runs import agreement, results
from kinfed.runs.models_file import write_models
from kinfed.runs.run_folder import RunFolder


def federation(clients=3):
    x = torch.randn(20 * clients, 4, generator=torch.Generator().manual_seed(0))
    return Federation.from_arrays(x, (x.sum(1) > 0).long(), torch.arange(clients).repeat_interleave(20))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 2))


def fit(method, executor="loop", clients=3, **how):
    return kinfed.fit(method, federation(clients), net(), rounds=2, execution=Execution(executor), **how)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("method", [Local(), FedAvg(), FedAvg(bn="local"), FedRoD(), KNNPer()], ids=repr)
def test_what_is_kept_answers_as_what_was_scored(method, executor, monkeypatch):
    asked = []
    real = agreement.differ
    monkeypatch.setattr(agreement, "differ", lambda one, two: asked.append((one, two)) or real(one, two))
    fit(method, executor)
    assert len(asked) == 3
    for kept, scored in asked:
        assert kept.shape == (2, 2)
        torch.testing.assert_close(kept, scored)


def test_a_module_that_would_be_another_one_is_not_kept(monkeypatch, tmp_path):
    export = Model.export

    def wrong(model, theta):
        return export(model, theta).append(nn.Tanh())

    monkeypatch.setattr(Trial, "check_predictions", lambda trial: [2])  # which would have found it before
    monkeypatch.setattr(Model, "export", wrong)
    with pytest.raises(RunError, match=r"the model of client '0' is not kept, as it would not be the one") as raised:
        kinfed.fit(Local(), federation(), net(), rounds=2, execution=Execution("loop"), folder=tmp_path / "r")
    assert "\n" not in str(raised.value)
    assert not RunFolder(tmp_path / "r").models.exists()
    assert not RunFolder(tmp_path / "r").is_finished


def test_the_clients_of_a_large_federation_are_asked_here_and_there(monkeypatch):
    asked = []
    real = kinfed.Run.model
    monkeypatch.setattr(agreement, "CLIENTS", 3)
    monkeypatch.setattr(
        kinfed.Run, "model", lambda run, position: asked.append(position) or real(run, position=position)
    )
    fit(Local(), clients=8)
    assert asked == [0, 3, 6]


def test_rounding_of_a_model_that_is_sensitive_to_it_is_no_disagreement():
    class Steep(nn.Module):
        def forward(self, x):
            return (x * 1e9).sin()

    x = torch.randn(2, 4)
    kept = Steep()(x)
    assert agreement._is_rounding(Steep(), x, kept, Steep()(x * (1 + 1e-7)))
    assert not agreement._is_rounding(Steep(), x, kept, kept + 100)
    module = net().eval()
    assert not agreement._is_rounding(module, x, module(x), module(x) + 1e-3)


def test_models_that_are_not_read_as_they_were_written_are_removed(monkeypatch, tmp_path):
    run = fit(FedAvg())

    def damaged(path, owned, *rest):
        write_models(path, {name: {key: t + 1 for key, t in tensors.items()} for name, tensors in owned.items()}, *rest)

    monkeypatch.setattr(results, "write_models", damaged)
    with pytest.raises(RunError, match="is not read from its file as it was written"):
        kinfed.save(run, tmp_path / "r")
    assert not RunFolder(tmp_path / "r").models.exists()
    assert not RunFolder(tmp_path / "r").is_finished
    monkeypatch.undo()
    kinfed.save(run, tmp_path / "s")
    assert torch.equal(kinfed.Run.open(tmp_path / "s", net()).theta("2"), run.theta("2"))


class DrawsFeatures(nn.Module):
    """Random features, whose directions no run holds, as they are a plain attribute."""

    def __init__(self):
        super().__init__()
        self.directions, self.head = torch.randn(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.cos(x @ self.directions))


def test_a_module_with_other_plain_tensors_than_in_training_is_not_opened(tmp_path):
    module = DrawsFeatures()
    run = kinfed.fit(FedAvg(), federation(), module, rounds=1)
    kinfed.save(run, tmp_path / "r")
    again = kinfed.load_model(tmp_path / "r", "0", module)
    x = torch.randn(5, 4)
    assert torch.equal(again(x), run.model("0")(x))
    with pytest.raises(UsageError, match="tensor 'directions' differs from that of training"):
        kinfed.load_model(tmp_path / "r", "0", DrawsFeatures())


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3)), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.LSTM(2, 3, batch_first=True), Last(), nn.Linear(3, 2)),
    ],
    ids=["weight norm", "spectral norm", "lstm"],
)
def test_what_a_layer_computes_from_its_parameters_may_differ(make, tmp_path):
    run = kinfed.fit(FedAvg(), federation(), make(), rounds=1)
    kinfed.save(run, tmp_path / "r")
    x = torch.randn(5, 4)
    torch.testing.assert_close(kinfed.load_model(tmp_path / "r", "0", make())(x), run.model("0")(x))


class Last(nn.Module):
    """The outputs of a recurrent layer at its last step."""

    def forward(self, outputs):
        return outputs[0][:, -1]
