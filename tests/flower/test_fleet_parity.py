"""Every method, unchanged, at six sites: the same models as in a simulation, one message a client and round."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kinfed.engine import run
from kinfed.federation import Federation, Graph
from kinfed.fleet import Simulation
from kinfed.flower import plan
from kinfed.flower.grid import Post
from kinfed.flower.server import serve
from kinfed.methods import METHODS
from kinfed.record import History
from kinfed.report import charts, heatmaps
from kinfed.tasks import Classification

ROUNDS = 4
LINKS = "from,to\na,b\nb,c\nc,d\na,e\nb,e\n"  # the last client has none
SETTINGS = {
    "cfl": {"begin": 2, "eps1": 10.0, "eps2": 0.0},
    "fedcedar": {"clusters": 2, "feature": "centred", "similarity": "softmax", "tau": 0.5},
    "fedamp": {"alpha": 0.1, "sigma": 1.0},
    "pfedgat": {"heads": 2, "width": 3, "lr": 1.0},
    "pfedhn": {"hidden": 7},
    "panacea": {"embedding": 4, "hidden": 7, "steps": 3, "lr": 0.5},
    "per-fedavg": {"alpha": 0.05, "beta": 0.1},
    "fedaghn": {"sharpness": 3.0, "lr": 0.1},
}


def table(name, graph="", share=0.5, **flower):
    return {
        "rounds": ROUNDS,
        "seed": 11,
        "participation": share,
        "model": {"name": "mlp", "hidden": [5]},
        "training": {"epochs": 2, "batch": 8, "optimiser": {"name": "sgd", "lr": 0.2}},
        "method": {"name": name, **SETTINGS.get(name, {})},
        "flower": {"clients": 6, "classes": 3, "graph": graph, **flower},
    }


def simulate(planned, examples, links=None):
    """The same experiment with all clients on one machine: the server's state and the history."""
    rows, pool, at = {"train": [], "validation": [], "test": []}, {"x": [], "y": []}, 0
    for arrays in examples.values():
        for split, parts in rows.items():
            count = len(arrays[f"x_{split}"])
            parts.append(torch.arange(at, at + count))
            at += count
            for k, values in pool.items():
                values.append(torch.from_numpy(arrays[f"{k}_{split}"]))
    federation = Federation(torch.cat(pool["x"]), torch.cat(pool["y"]), rows, Classification(3), list(examples))
    learning = planned.learning
    model = planned.model(tuple(federation.x.shape[1:]), 3)
    fleet = Simulation(federation, model, learning.method, learning.training, seed=11, executor="loop")
    history = History(tuple(examples), federation.task)
    roster = fleet.roster(links)
    run(learning.method, roster, fleet, history, rounds=ROUNDS, participation=learning.participation)
    return history, model.layout


def links():
    weights = torch.zeros(6, 6)
    for i, j in ((0, 1), (1, 2), (2, 3), (0, 4), (1, 4)):
        weights[i, j] = weights[j, i] = 1
    return Graph(weights, "given")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for module, names in ((charts, ("accuracy_by_round", "accuracy_by_client")), (heatmaps, ("relation_heatmap",))):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_, **__: None)


@pytest.mark.parametrize("name", METHODS)
def test_sites_end_with_the_models_of_a_simulation(name, grid, examples, tmp_path):
    (tmp_path / "links.csv").write_text(LINKS)
    planned = plan.resolve(table(name, str(tmp_path / "links.csv")))
    expected, layout = simulate(planned, examples, links())
    summary = serve(planned, Post(grid), tmp_path / "out", log=lambda text: None, poll=0)
    for i, client in enumerate(examples):
        (folder,) = (tmp_path / "sites" / client / client).iterdir()
        mine = load_file(folder / "model.safetensors")
        for leaf, values in expected.models.items():
            wanted = layout.tensors(values[i]) if leaf == "theta" else {leaf: values[i]}
            for key, value in wanted.items():
                torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-5)
    assert summary["chosen"] == expected.chosen
    assert {k: v["round"] for k, v in summary["scores"].items()} == {
        k: v["round"] for k, v in expected.summary().items()
    }
    # One message a client and round, and at the end two more: the last scores, and which model is best.
    kinds = [kind for _, kind, _ in grid.log]
    assert kinds.count("hello") == kinds.count("join") == 6
    assert kinds.count("round") == 3 + 6 * (ROUNDS - 1) + 6 + 6  # in round 1, those who are drawn only
    with np.load(tmp_path / "out" / "relations.npz") as file:
        assert len(file["relation"]) == len(expected.relations)
        for got, wanted in zip(file["relation"], expected.relations, strict=True):
            torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-5, atol=1e-5)
    for key, scores in summary["clients_scores"].items():
        assert scores == pytest.approx(expected.test(key).tolist(), abs=1e-5)
