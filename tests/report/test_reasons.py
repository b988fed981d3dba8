"""kinfed explain: why one client learns from another, in numbers that are known."""

import json
import math

import numpy as np
import pytest
import torch

from kinfed.cli import main
from kinfed.errors import UsageError
from kinfed.report.explain.counterfactual import Counterfactual, isolate_client, remove_client
from kinfed.report.explain.reasons import explain
from kinfed.runs.config import experiment
from kinfed.runs.launch import launch
from kinfed.runs.run import FinalServer, Run
from kinfed.simulation.execution import Execution

NET = ["model=mlp", "model.hidden=[4]", "training.epochs=1", "federation.clients=4", "rounds=2"]
QUICK = {
    "kin": [],
    "hedge": [],
    "mixture": [],
    "fedaghn": [],
    "fedamp": [],
    "pfedgraph": ["method.personal=['head.*']"],
    "pfedla": ["method.embedding=3", "method.hidden=5"],
    "sfl": ["federation.graph=complete"],
    "pfedgat": [],
}


def trained(path, method="fedaghn", *overrides):
    launch(experiment.resolve(experiment.read(method, [*NET, *overrides])), path, Execution("loop", 1))
    saved = Run.open(path)
    return saved, FinalServer(saved, saved.task)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The folder of a quick real run."""
    path = tmp_path_factory.mktemp("reasons") / "run"
    trained(path)
    return path


def test_a_row_without_an_edge_by_hand():
    row = torch.tensor([0.5, 0.3, 0.2])
    assert torch.allclose(remove_client(row, 1), torch.tensor([5 / 7, 0, 2 / 7]))
    layers = torch.tensor([[0.5, 0.3, 0.2], [0.25, 0.5, 0.25]])
    assert torch.allclose(remove_client(layers, 1), torch.tensor([[5 / 7, 0, 2 / 7], [0.5, 0, 0.5]]))
    assert isolate_client(layers, 2).tolist() == [[0, 0, 1], [0, 0, 1]]
    assert remove_client(torch.tensor([0.0, 1.0, 0.0]), 1) is None


@pytest.mark.parametrize("method", QUICK)
def test_the_full_row_scores_what_the_run_wrote_down(method, tmp_path):
    saved, run = trained(tmp_path / "run", method, *QUICK[method])
    client = Counterfactual(run, 2)
    assert client.row.sum(-1).allclose(torch.ones(()), atol=1e-5)
    last = _last(saved, "mixed")
    assert client.score(client.row) == pytest.approx(last[2], abs=1e-6)
    assert client.score(isolate_client(client.row, 2)) == pytest.approx(_last(saved, "own")[2], abs=1e-6)


def test_scores_without_an_edge_by_another_way(digits):
    """The mixture made here by hand, layer by layer, on the client's test rows."""
    saved = Run.open(digits)
    run = FinalServer(saved, saved.task)
    found = explain(digits, 1, 3)
    row = Counterfactual(run, 1).row
    theta = torch.zeros(saved.layout.size)
    for layer, weights in zip(run.model.layout.layers, row, strict=True):
        rest = weights.clone()
        rest[3] = 0
        theta[layer.at] = (rest / rest.sum()) @ run.server.theta[:, layer.at]
    federation = saved.experiment.federation(None, saved.summary.seeds[0])
    at = federation.rows["test"][1]
    answers = run.model(theta, federation.x[at]).argmax(1)
    assert found.sources[0].without == pytest.approx(float((answers == federation.y[at]).float().mean()))
    assert found.sources[0].last == pytest.approx(float(row[:, 3].mean()))


def test_weights_by_layer_and_round_and_what_was_compared(digits):
    found = explain(digits, 1, top=2)
    file = np.load(digits / "relations.npz")
    at = file["round"].tolist().index(found.round)
    rows = file["relation"][:, :, 1]  # [T, L, N]
    mean = rows.mean(1)
    order = [j for j in np.argsort(-mean[at]).tolist() if j != 1]
    names = file["clients"].tolist()
    assert [one.client for one in found.sources] == [names[j] for j in order[:2]]
    assert found.itself.weight == pytest.approx(mean[at, 1])
    assert found.sources[0].layers == pytest.approx(tuple(rows[at, :, order[0]].tolist()))
    assert found.sources[0].rounds == pytest.approx(tuple(mean[:, order[0]].tolist()))
    assert (found.layers, found.rounds) == (tuple(file["layers"].tolist()), (1, 2))
    run = FinalServer(saved := Run.open(digits), saved.task)
    told = run.method.similarity(run.roster, run.server)
    assert found.compared == f"{told.what}, after round 2"
    assert found.sources[0].compared == pytest.approx(float(told.values[1, order[0]]))
    counts = np.array(json.loads((digits / "clients.json").read_text())["counts"], float)
    shares = counts / counts.sum(1, keepdims=True)
    assert found.sources[0].labels == pytest.approx(np.minimum(shares[1], shares[order[0]]).sum())


def test_a_method_that_compares_nothing_shows_how_models_moved(tmp_path):
    saved, run = trained(tmp_path / "run", "pfedla", *QUICK["pfedla"])
    found = explain(tmp_path / "run", 0, 1)
    first = run.model.theta
    a, b = saved.theta(position=0) - first, saved.theta(position=1) - first
    assert found.compared.startswith("cosine of how far the saved models moved")
    assert found.sources[0].compared == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=1e-5)
    assert "a hypernetwork learns the weights" in " ".join(found.notes)
    (tmp_path / "run" / "state.safetensors").unlink()
    found = explain(tmp_path / "run", 0, 1)
    assert found.compared == "distance of the saved models"
    assert found.sources[0].compared == pytest.approx(float((a - b).norm()), rel=1e-4)
    assert math.isnan(found.score)
    assert "is not measured: " in " ".join(found.notes)


def test_what_cannot_be_mixed_again_is_said(tmp_path):
    trained(tmp_path / "run", "fedfomo")
    found = explain(tmp_path / "run", 0)
    assert math.isnan(found.score)
    assert "fedfomo keeps no clients' models that its server mixes by these weights" in " ".join(found.notes)


def test_a_mixture_that_is_not_what_was_sent_is_refused(digits, monkeypatch):
    run = FinalServer(saved := Run.open(digits), saved.task)
    monkeypatch.setattr(type(run.method), "relation", lambda *_: torch.eye(4))
    with pytest.raises(UsageError, match="are not what fedaghn sends to this client"):
        Counterfactual(run, 0)


def test_other_data_are_refused(digits):
    run = FinalServer(saved := Run.open(digits), saved.task)
    run.state.how["data"] = "of others"
    with pytest.raises(UsageError, match="the data differ from those that"):
        (client := Counterfactual(run, 0)).score(client.row)


def test_on_the_command_line(digits, capsys):
    assert main(["explain", str(digits), "1", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["client"] for one in told["sources"]] == ["3"]
    assert 0 <= told["sources"][0]["without"] <= 1
    assert main(["explain", str(digits), "1", "--top", "2"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "the clients that '1' learns from",
        "weights by layer",
        "weights by round",
        "compared: cosine of updates",
    ):
        assert words in shown
    assert sum(line.startswith("without ") for line in shown.splitlines()) == 2


def test_what_cannot_be_explained_is_one_line(digits, run_of, tmp_path, capsys):
    names = ["ann", "bob", "cid"]
    run_of(tmp_path / "none", [[0.5, 0.6, 0.7]], names=names, method="pfedhn")
    run_of(tmp_path / "sites", [[0.5, 0.6, 0.7]], [np.eye(3)], names=names, experiment="e")
    for words, why in (
        ([digits, "11"], "there is no client '11'; did you mean '1'"),
        ([digits, "1", "x"], "there is no client 'x'"),
        ([digits, "1", "1"], "client '1' is the one that is explained"),
        ([tmp_path / "no", "1"], "there is no folder "),
        ([tmp_path / "none", "ann"], "none: pfedhn mixes no models"),
        ([tmp_path / "sites", "ann"], "is a run of real sites, where models and data stayed"),
    ):
        assert main(["explain", *map(str, words)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1, err
        assert why in err


def _last(saved, model):
    """[N] test scores of the last round, as history.csv has them."""
    rounds, found = saved.folder.read_scores(model, saved.summary.metric.name)
    assert rounds[-1] == saved.summary.rounds
    return found[-1]
