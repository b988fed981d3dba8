"""Centralised references: the same readings as the federation's, and networks that use the graph."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from kinfed import Federation, RunError, Split, UsageError
from kinfed.cli import main
from kinfed.data.federation import divide
from kinfed.data.graph_files import adjacency
from kinfed.data.partitions import Natural
from kinfed.data.windows import Windows
from kinfed_papers.references import REFERENCES, GraphWaveNet
from kinfed_papers.references.centralised import JOINT, _Series, train

WAVENET = ("papers", "reference", "graph-wavenet")


def relay(length=260, count=4, holes=0.0, **how):
    """A ring in which every sensor says next what its predecessor says now: nobody can know it alone."""
    rng = np.random.default_rng(3)
    source = rng.standard_normal(length + count)
    # Sensor i reads source[t - i], and the first one reads noise.
    values = np.stack([source[count - i : count - i + length] for i in range(count)], 1)
    values[rng.random(values.shape) < holes] = np.nan
    ring = np.roll(np.eye(count), 1, axis=1)
    cut = Windows(**{"past": 12, "horizon": 1, "horizons": ()} | how)
    data = cut(values, np.arange(length), list("abcd")[:count], graph=adjacency(ring + ring.T))
    parts = Natural()(data, 0, torch.Generator())
    return divide(parts.dataset, parts.owned, Split(0.2, 0.1), 0)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_learns_what_only_neighbours_know(name):
    settings = {"epochs": 15} if name == "stgcn" else {"epochs": 6, "dropout": 0.0}
    federation = relay()
    found = train(REFERENCES[name](lr=0.003, batch=16, **settings), federation, seed=1)
    alone = math.sqrt(2 / math.pi)  # the error of always forecasting the mean of a standard normal: the best alone
    error = found.history.test(JOINT)
    assert error.shape == (4,)
    assert error[1:].mean() < 0.8 * alone
    noise = federation.y[federation.rows["test"][0]].abs().mean()  # the error of always forecasting 0, on these rows
    assert error[0] > 0.9 * noise  # nobody knows what the first one says next
    assert found.history.cost.done == settings["epochs"]


def test_training_and_tests_use_the_very_windows_of_the_clients():
    federation = relay(holes=0.4, past=2, horizon=2)  # some windows know nothing before their middle
    series = _Series(federation, torch.device("cpu"))
    for split, clients in federation.rows.items():
        x, y = series.read_windows(split, series.steps(split))
        for i, rows in enumerate(clients):
            used = ~y[:, i].isnan().all(1)
            rows = rows.sort().values
            assert torch.equal(y[used, i].nan_to_num(-9), federation.y[rows].nan_to_num(-9))
            assert torch.equal(x[used, i], federation.x[rows])


@dataclass(frozen=True)
class Repeat:
    """Forecasts the last reading, whatever it was trained on."""

    epochs: int = 2
    batch: int = 8
    lr: float = 0.0
    clip: float = 1.0
    error: str = "absolute"

    def network(self, weights, past, horizon, features):
        class Last(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(()))

            def forward(self, x):
                return self.scale * x[:, :, -1:, 0].expand(-1, -1, horizon)

        return Last()

    def optimiser(self, network):
        optimiser = torch.optim.SGD(network.parameters(), self.lr)
        return optimiser, torch.optim.lr_scheduler.ConstantLR(optimiser)


def test_scores_are_those_of_each_clients_test_readings():
    federation = relay(horizon=3, holes=0.2)
    found = train(Repeat(), federation)
    for i, rows in enumerate(federation.rows["test"]):
        last = federation.x[rows, -1, 0] * federation.task.deviation + federation.task.mean
        error = (federation.y[rows] - last[:, None]).abs()
        assert float(found.history.test(JOINT)[i]) == pytest.approx(float(error[~error.isnan()].mean()), rel=1e-5)


def test_the_same_seed_gives_the_same_network_and_yours_is_left_alone():
    torch.manual_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    networks = [train(GraphWaveNet(epochs=1), relay(200), seed=2).network.state_dict() for _ in range(2)]
    assert torch.equal(first, torch.rand(1))
    assert all(torch.equal(a, b) for a, b in zip(networks[0].values(), networks[1].values(), strict=True))


def test_what_a_reference_cannot_take_is_refused():
    plain = Federation.from_arrays(torch.zeros(40, 3), torch.zeros(40), torch.arange(40) % 2)
    with pytest.raises(UsageError, match="needs windows of series"):
        train(Repeat(), plain)
    federation = relay()
    object.__setattr__(federation, "graph", None)
    with pytest.raises(UsageError, match="needs a graph of the series"):
        train(Repeat(), federation)
    with pytest.raises(UsageError, match="stgcn: its convolutions need at least 9 past steps; got 4"):
        train(REFERENCES["stgcn"](), relay(past=4))
    with pytest.raises(RunError, match="epoch 1: training diverged"):
        train(Repeat(lr=math.inf), relay())


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        *((name, ("epochs", 0), "epochs must be at least 1; got 0") for name in REFERENCES),
        *((name, ("batch", -5), "batch must be at least 1; got -5") for name in REFERENCES),
        *((name, ("lr", -1.0), "lr must be positive; got -1.0") for name in REFERENCES),
        *((name, ("lr", math.nan), "lr must be positive; got nan") for name in REFERENCES),
        *((name, ("lr", math.inf), "lr must be finite; got inf") for name in REFERENCES),
        ("graph-wavenet", ("weight_decay", -0.1), "weight_decay must be zero or more; got -0.1"),
        ("graph-wavenet", ("dropout", 1.0), r"dropout must be in \[0, 1\); got 1.0"),
        ("graph-wavenet", ("clip", math.nan), "clip must be positive; got nan"),
    ],
)
def test_settings_that_nothing_can_be_trained_with_are_refused(name, setting, said):
    with pytest.raises(UsageError, match=rf"^{REFERENCES[name].__name__}.{said} \("):
        REFERENCES[name](**dict([setting]))


@pytest.fixture
def experiment(tmp_path):
    rng = np.random.default_rng(0)
    values = (50 + 10 * rng.standard_normal((400, 3))).astype(np.float32)
    np.savez(tmp_path / "metr_la.npz", values=values, adjacency=np.ones((3, 3)), start=np.array("2012-03-01"))
    path = tmp_path / "x.toml"
    path.write_text(
        'rounds = 1\nfederation = { dataset = "metr_la", partition = "natural" }\nmodel = "rnn"\nmethod = "fedavg"\n'
    )
    return ["--data-dir", str(tmp_path), str(path)]


def test_the_command_leaves_a_folder_that_compares_with_runs(experiment, tmp_path, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    out = str(tmp_path / "a")
    assert main([*WAVENET, *experiment, "reference.epochs=2", "--out", out, "--json", "--verbose"]) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert (summary["method"], summary["rounds"], summary["data"]["clients"]) == ("graph-wavenet", 2, 3)
    assert "centralised" in said.err
    assert (tmp_path / "a" / "mae-by-round.png").exists()
    assert not (tmp_path / "a" / "relations.npz").exists()
    again = [*WAVENET, *experiment[:2], out + "/config.toml", "--out", str(tmp_path / "again")]
    assert main([*again, "--quiet"]) == 0
    for name in ("config.toml", "history.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert main(["run", *experiment, "--out", str(tmp_path / "b"), "--quiet"]) == 0
    assert main(["compare", out, str(tmp_path / "b")]) == 0
    assert "graph-wavenet" in capsys.readouterr().out
    assert main([*WAVENET, *experiment, "--out", out]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main([*WAVENET, *experiment, "reference.epoch=2"]) == 2
    assert "unknown key 'reference.epoch'; did you mean 'epochs'?" in capsys.readouterr().err
    assert main([*WAVENET, *experiment, "federation.split.validation=0.01"]) == 2
    assert "the validation share covers 4 steps, but an example covers 24" in capsys.readouterr().err
    assert main([*WAVENET, *experiment, "seeds=2"]) == 2
    assert "a reference is trained once: write seeds=1" in capsys.readouterr().err
    assert main([*WAVENET, *experiment, "reference.lr=1e30", "--out", "diverged"]) == 1
    assert "training diverged" in capsys.readouterr().err
    assert not list(Path.cwd().iterdir())
    for unused in (["how.executor=loop"], ["how.workers=1"], ["how.precision=bf16"], ["how.checkpoint_seconds=5"]):
        with pytest.raises(SystemExit):
            main([*WAVENET, *experiment, *unused])
