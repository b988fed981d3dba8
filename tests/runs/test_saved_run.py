"""A finished run's folder, opened."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from kinds import KINDS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import kinfed
from kinfed import UsageError
from kinfed.cli import main
from kinfed.core import trees
from kinfed.core.graph import Graph
from kinfed.core.layers import Norm
from kinfed.methods import METHODS
from kinfed.runs import final_state
from kinfed.runs.baselines import NONE_STANDARD


@pytest.fixture(scope="module")
def shops(tmp_path_factory):
    """A table of six shops in two groups with opposite customers, and a run of kNN-Per on it."""
    folder = tmp_path_factory.mktemp("saved")
    draw = np.random.default_rng(0)
    lines = ["shop,age,kind,buys"]
    for i in range(240):
        age, kind = draw.normal(40, 10), draw.choice(["new", "old"])
        lines.append(f"shop {i % 6},{age:.1f},{kind},{'yes' if (age > 40) == (i % 2 == 0) else 'no'}")
    (folder / "shops.csv").write_text("\n".join(lines) + "\n")
    asked = ["run", str(folder / "shops.csv"), "--client", "shop", "--target", "buys", "rounds=2", "model.hidden=[6]"]
    assert main([*asked, "--method", "knn-per", "--quiet", "--out", str(folder / "run")]) == 0
    return folder


def test_an_opened_run_knows_its_clients_task_classes_columns_and_models(shops):
    run = kinfed.Run.open(shops / "run")
    assert run.names == [f"shop {i}" for i in range(6)]
    assert run.task == kinfed.Classification(2, by_class=True, selects="loss")  # a rare class somewhere
    assert run.classes == ["no", "yes"]
    assert [column.name for column in run.description.inputs] == ["age", "kind"]
    assert run.theta("shop 3").shape == (run.layout.size,)
    assert set(run.personal("shop 3")._fields) == {"theta", "features", "classes", "weight"}
    written = load_file(shops / "run" / "models.safetensors")
    assert torch.equal(run.personal("shop 3").features, written["shop 3/features"])
    x = torch.randn(5, 3)
    mixed = run.model("shop 3")(x)
    assert torch.equal(mixed, kinfed.load_model(shops / "run", "shop 3")(x))
    assert mixed.exp().sum(1).tolist() == pytest.approx([1.0] * 5, abs=1e-5)  # logarithms of its own probabilities
    with pytest.raises(UsageError, match=r"there is no client 'shop3'; did you mean 'shop 3'\?"):
        run.model("shop3")


def test_a_run_says_the_same_before_it_is_written_and_after_it_is_opened(tmp_path):
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(120, 4, generator=draw)
    federation = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(120) % 4)
    how = {"rounds": 2, "execution": kinfed.Execution("loop", workers=1)}
    made = {
        name: kinfed.fit(METHODS[name](), federation, nn.Linear(4, 2), **how) for name in ("kin", "local", "fedavg")
    }
    verdict = made["kin"].verdict(made["local"], made["fedavg"])
    for name, run in made.items():
        kinfed.save(run, tmp_path / name)
    read = {name: kinfed.Run.open(tmp_path / name, nn.Linear(4, 2)) for name in made}
    for name, run in made.items():
        opened = read[name]
        assert torch.equal(opened.relation, run.relation)
        assert (opened.task, opened.classes, opened.description) == (run.task, run.classes, run.description)
        assert run.experiment is None
        assert opened.score() == run.score() == pytest.approx(np.mean([run.score(client) for client in run.names]))
        assert opened.score("3") == run.score("3") == run.history.test(run.history.chosen)[3]
        assert opened.predict("2", x.numpy()).equals(run.predict("2", x.numpy()))
        answers = run.model("2")(x).argmax(1)
        assert opened.predict("2", x.numpy())["class"].cast(int).to_list() == answers.tolist()
    assert read["kin"].verdict(read["local"], read["fedavg"]).to_dict() == verdict.to_dict()
    (tmp_path / "kin/baselines.safetensors").unlink()
    assert read["kin"].verdict(read["local"]).notes[-1] == NONE_STANDARD
    fewer = kinfed.Federation.from_arrays(x[:80], (x[:80, 0] > 0).long(), torch.arange(80) % 4)
    other = kinfed.fit(METHODS["local"](), fewer, nn.Linear(4, 2), **how)
    for run in (made["kin"], read["kin"]):
        with pytest.raises(UsageError, match=r"was not tested on the examples of"):
            run.verdict(other)


def test_files_of_runs_with_the_same_clients_and_shapes_are_told_apart(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    federation = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(60) % 3)
    files = {}
    for name, seed, lr in (("a", 0, 0.1), ("again", 0, 0.1), ("seed", 1, 0.1), ("rate", 0, 0.2)):
        training = kinfed.Training(optimiser=kinfed.SGD(lr))
        net = torch.nn.Linear(4, 2)
        torch.nn.init.zeros_(net.weight), torch.nn.init.zeros_(net.bias)
        run = kinfed.fit(kinfed.Local(), federation, net, rounds=1, seed=seed, training=training)
        kinfed.save(run, tmp_path / name)
        files[name] = (tmp_path / name / "models.safetensors").read_bytes()
    assert files["a"] == files["again"]
    for name in ("again", "seed", "rate"):
        (tmp_path / "a" / "models.safetensors").write_bytes(files[name])
        if name == "again":
            kinfed.Run.open(tmp_path / "a", torch.nn.Linear(4, 2))
            continue
        with pytest.raises(
            UsageError, match=r"models\.safetensors is of another run than summary\.json; copy the whole"
        ):
            kinfed.Run.open(tmp_path / "a", torch.nn.Linear(4, 2))


def test_files_of_two_runs_are_told_apart(shops, tmp_path):
    copy = kinfed.Run.open(shops / "run").folder.path
    for name in ("config.toml", "summary.json", "models.safetensors"):
        (tmp_path / name).write_bytes((copy / name).read_bytes())
    models = load_file(tmp_path / "models.safetensors")
    with safe_open(tmp_path / "models.safetensors", "pt") as file:
        about = file.metadata()
    fewer = {k: v for k, v in models.items() if not k.startswith("shop 4/")}
    save_file(fewer, tmp_path / "models.safetensors", about)
    with pytest.raises(UsageError, match=r"not belong together: models\.safetensors has no model of client 'shop 4'"):
        kinfed.Run.open(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"data": summary["data"] | {"shape": [9]}}))
    (tmp_path / "models.safetensors").write_bytes((copy / "models.safetensors").read_bytes())
    with pytest.raises(UsageError, match=r"the models do not fit this module .*not floating-point \[6, 9\]"):
        kinfed.Run.open(tmp_path).model(position=0)


class Counted(nn.Module):
    """A recurrent layer, a count of steps, a frozen tensor and a norm."""

    def __init__(self, norm):
        super().__init__()
        self.read, self.norm, self.head = nn.GRU(1, 3, batch_first=True), norm, nn.Linear(3, 2)
        self.norm.weight.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training and isinstance(self.norm, nn.BatchNorm1d | Norm):
            self.steps += 1
        return self.head(self.norm(self.read(x[..., None])[0][:, -1]) * (1 + self.steps / 10))


@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_was_pickled_predicts_as_before(name):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(90, 4, generator=draw)
    links = Graph(torch.ones(3, 3) - torch.eye(3), "given")
    federation = replace(kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(90) % 3), graph=links)
    norm = nn.LayerNorm(3) if name == "pfedbayes" else nn.BatchNorm1d(3)
    how = {"rounds": 1, "training": kinfed.Training(epochs=1), "execution": kinfed.Execution("loop", workers=1)}
    run = kinfed.fit(METHODS[name](), federation, Counted(norm), **how)
    again = pickle.loads(pickle.dumps(run))
    for i in range(3):
        assert torch.equal(again.model(position=i)(x), run.model(position=i)(x))
    assert ("steps" in again.architecture.layout.names) == (name != "pfedbayes")
    assert again.predictor("1")(x.numpy()).equals(run.predictor("1")(x.numpy()))
    assert again.summary == run.summary
    assert torch.equal(again.architecture(again.theta(position=0), x), run.architecture(run.theta(position=0), x))
    twin = again.architecture.twin().frozen
    assert all(tensor is twin[key] for key, tensor in again.architecture.frozen.items())


def test_equal_arrays_are_written_once_and_each_is_looked_at_once(monkeypatch):
    """However many rounds were scored."""
    arrays = {f"score.{i}": torch.tensor([i % 7 / 7, torch.nan]) for i in range(300)}
    arrays |= {"server.theta": torch.arange(6.0), "state.theta": torch.arange(6.0), "alone": torch.arange(5.0)}
    arrays |= {"other": torch.arange(6), "one": torch.tensor(1.0), "two": torch.tensor(1.0)}
    looked, raw = [], trees.raw
    monkeypatch.setattr(final_state.trees, "raw", lambda t: looked.append(t) or raw(t))
    once, twins = final_state._drop_repeats(arrays)
    assert len(looked) == 302
    assert twins == {f"score.{i}": f"score.{i % 7}" for i in range(7, 300)} | {"state.theta": "server.theta"}
    assert once.keys() == arrays.keys() - twins.keys()


@pytest.mark.parametrize("same", ["{", "[]", '{"0": 3}', '{"9": ["1"]}', '{"0": ["1"]}', '{"0": ["9", "9"]}'])
def test_a_file_that_says_in_two_ways_whose_a_model_is_cannot_be_read(same, tmp_path):
    x, client = torch.randn(60, 3), torch.arange(60) % 3
    data = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), client)
    kinfed.save(kinfed.fit(kinfed.Local(), data, nn.Linear(3, 2), rounds=1), tmp_path / "run")
    path = tmp_path / "run" / "models.safetensors"
    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file(load_file(path), path, about | {"same": same})
    with pytest.raises(UsageError, match=r"models\.safetensors cannot be read"):
        kinfed.Run.open(tmp_path / "run", nn.Linear(3, 2))
