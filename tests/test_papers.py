"""Published experiments resolve, by name, to what the papers print."""

import json

import pytest
import torch

from kinfed import UsageError, config
from kinfed.cli import main
from kinfed.engine import sample
from kinfed.method import Roster
from kinfed.seeding import tags

# As printed: rounds, clients in a round, batch, epochs or steps, client rate (None: not printed), the method's.
PRINTED = {
    "sfl/cifar10-shards": (20, 100, 128, None, None, {"steps": 1, "rho": 1.0, "begin": "own", "structure": "given"}),
    "sfl/cifar10-released": (20, 100, 128, 20, None, {"steps": 3, "begin": "shared", "reg": "off", "rho": 1.0}),
    "sfl/metr-la": (20, 207, 128, None, None, {"structure": "given"}),
    "pfedgat/cifar10-dirichlet": (
        50, 10, 64, 5, 0.01, {"heads": 8, "slope": 0.2, "lr": 0.01, "graph": "attention", "feedback": "test"}
    ),
    "fedaghn/cifar10-dirichlet": (
        200, 20, 64, 5, 0.01, {"home": 0.03, "sharpness": 0.5, "lr": 0.005, "sign": "paper", "feedback": "train"}
    ),
    "fedaghn/cifar10-groups": (200, 20, 64, 5, 0.01, {"home": 0.03, "lr": 0.005, "sign": "paper"}),
    "fedcedar/cifar10-shards": (100, 30, 16, 5, 0.01, {"clusters": 5, "steps": 2, "feature": "params"}),
    "fedcedar/mnist-topologies": (200, 18, 16, 5, 0.01, {"clusters": 3, "steps": 2}),
    "panacea/fl60": (800, 5, 64, 50, None, {"embedding": 100, "hidden": 100, "encoder_layers": 3, "steps": 10}),
    "panacea/tpt48": (800, 5, 64, 50, None, {"decoder_layers": 3, "aggregation": "row", "steps": 10}),
    "panacea/metr-la": (800, 5, 64, 50, None, {"sign": "descent", "mode": "target", "steps": 10}),
}  # fmt: skip
OWNERS = {"sfl/metr-la": 207, "panacea/fl60": 60, "panacea/tpt48": 48, "panacea/metr-la": 207}
SHAPES = {"cifar10": (3, 32, 32), "mnist": (1, 28, 28), "metr_la": (12, 2), "synthetic": (2,), "tpt48": (6, 1)}


@pytest.mark.parametrize("name", PRINTED)
def test_settings_are_those_that_are_printed(name):
    found = config.resolve(config.read(f"papers/{name}", []))
    rounds, cohort, batch, work, rate, settings = PRINTED[name]
    count = found.table["federation"]["clients"] or OWNERS[name]
    assert found.table["rounds"] == rounds
    assert round(found.participation.share * count) == cohort
    assert found.training.batch == batch
    assert work in (None, found.training.steps or found.training.epochs)
    assert rate in (None, found.training.optimiser.lr)
    assert {key: getattr(found.method, key) for key in settings} == settings
    data = found.table["federation"]["dataset"]["name"]
    module = found.model(SHAPES[data], 12 if data == "metr_la" else 10)
    assert module(torch.zeros(2, *SHAPES[data])).shape[0] == 2
    path = config.papers()[f"papers/{name}"]
    assert config.read(str(path), []) == config.read(f"papers/{name}.toml", []) == config.read(f"papers/{name}", [])


def test_every_published_experiment_is_checked_and_every_graph_method_has_one():
    assert {name.removeprefix("papers/") for name in config.papers()} >= set(PRINTED)
    assert {name.split("/")[0] for name in PRINTED} == {"sfl", "pfedgat", "fedaghn", "fedcedar", "panacea"}
    for name in config.papers():
        config.resolve(config.read(name, []))


def test_a_file_of_your_own_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "papers" / "sfl").mkdir(parents=True)
    (tmp_path / "papers" / "sfl" / "metr-la.toml").write_text("rounds = 3")
    assert config.read("papers/sfl/metr-la.toml", []) == {"rounds": 3}


def test_names_are_listed_and_a_wrong_one_is_put_right(capsys):
    assert main(["list", "papers", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert entries["papers/fedaghn/cifar10-groups"]["what"].startswith("FedAGHN's case study on CIFAR-10")
    with pytest.raises(UsageError, match="there is no 'papers/sfl/metr'; did you mean 'papers/sfl/metr-la'"):
        config.read("papers/sfl/metr", [])


def test_five_clients_are_drawn_in_every_round_of_panacea():
    for name, count in (("panacea/fl60", 60), ("panacea/tpt48", 48), ("panacea/metr-la", 207)):
        share = config.resolve(config.read(f"papers/{name}", [])).participation.share
        ones = torch.ones(count, dtype=torch.int64)
        names = tags([str(i) for i in range(count)])
        roster = Roster(torch.zeros(1), None, ones, None, 0, names)
        assert len(sample(roster, share)) == 5
