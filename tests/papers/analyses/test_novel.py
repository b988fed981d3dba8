from copy import deepcopy

import numpy as np
import pytest

from kinfed import UsageError, load_model
from kinfed.runs.run_folder import RunFolder
from kinfed_papers.analyses.late import held_back
from kinfed_papers.analyses.novel import novel
from kinfed_papers.plots.scores import score_by_source

SPIRAL = (
    'federation={dataset={name="synthetic", clients=10, per_class=10}, partition="natural", clients=0}',
    "rounds=2",
)


def accuracy(network, federation, client):
    """The share of a client's test examples that a network gets right."""
    rows = federation.rows["test"][client]
    return float((network(federation.x[rows]).argmax(1) == federation.y[rows]).double().mean())


def averaged(networks, weights):
    """A network with the weighted mean of every tensor."""
    mean = deepcopy(networks[0])
    parts = [network.state_dict() for network in networks]
    total = sum(weights)
    state = {name: sum(w * part[name] for w, part in zip(weights, parts, strict=True)) / total for name in parts[0]}
    mean.load_state_dict(state)
    return mean.eval()


@pytest.mark.parametrize("graph", ["given", "identity"])
def test_real_runs_source_by_source(study, tmp_path, graph):
    made = study("panacea", *SPIRAL, f'federation.graph="{graph}"', "method.reconstruction=0.1")
    found = novel(made, shares=[0.3], others=["fedavg"])
    rows = {row["source"]: row for row in found.rows}
    assert {source: row["model"] for source, row in rows.items()} == {
        "panacea": "generated",
        "panacea-gn": "generated",
        "panacea-mlp": "generated",
        "fedavg": "shared",
        "neighbours' mean": RunFolder(tmp_path / "runs" / "panacea-0.3").read_summary().selection.chosen,
        "own data alone": "own",
        "panacea, from the start": "generated",
    }
    (federation,) = made.federations()
    runs = tmp_path / "runs"
    absent = held_back(RunFolder(runs / "panacea-0.3"), 0.3)[0]
    assert absent.sum() == 3
    new, trained = np.flatnonzero(absent).tolist(), np.flatnonzero(~absent).tolist()
    shared = load_model(runs / "fedavg-0.3", trained[0])
    networks = [load_model(runs / "panacea-0.3", i) for i in trained]
    wanted = {"fedavg": [accuracy(shared, federation, i) for i in new], "neighbours' mean": []}
    for i in new:
        links = federation.graph.weights[i, trained].tolist()
        near = links if any(links) else [1.0] * len(trained)
        assert (near is links) == (graph == "given")
        wanted["neighbours' mean"].append(accuracy(averaged(networks, near), federation, i))
    generated = RunFolder(runs / "panacea-0.3").read_summary().clients.scores["generated"]
    wanted["panacea"] = [generated[i] for i in new]
    wanted["own data alone"] = [accuracy(load_model(runs / "local", position=i), federation, i) for i in new]
    for source, scores in wanted.items():
        assert rows[source]["never trained"] == pytest.approx(100 * np.mean(scores), abs=1e-4), source
        assert rows[source]["over clients"] == pytest.approx(100 * np.std(scores), abs=1e-4), source
        assert rows[source]["over seeds"] is None
    others = [accuracy(shared, federation, i) for i in trained]
    assert rows["fedavg"]["the others"] == pytest.approx(100 * np.mean(others), abs=1e-4)
    assert rows["neighbours' mean"]["the others"] is None
    for name, reconstruction, encoder in (("gn", 0.0, "gcn"), ("mlp", 0.0, "mlp")):
        text = (runs / f"panacea-{name}-0.3" / "config.toml").read_text()
        assert f"reconstruction = {reconstruction}\n" in text
        assert f'[method.encoder]\nname = "{encoder}"\n' in text


def test_without_a_graph_nobody_has_neighbours(study):
    found = novel(study("fedaghn", "seeds=2", "rounds=1"), shares=[0.25, 0.5], others=[])
    assert [(row["held back"], row["source"], row["model"]) for row in found.rows] == [
        (share, source, model)
        for share in ("25%", "50%")
        for source, model in (("fedaghn", "mixed"), ("own data alone", "own"), ("fedaghn, from the start", "mixed"))
    ]
    assert all(row["over seeds"] is not None for row in found.rows)


@pytest.mark.parametrize("shares", [[], [0.0], [1.0], [0.2, -0.1]])
def test_refuses(study, shares):
    with pytest.raises(UsageError, match=r"analysis.shares are shares of clients, in \(0, 1\)"):
        novel(study("fedavg"), shares=shares)


def test_the_picture_has_a_row_a_source_and_a_dot_a_seed(tmp_path, figures):
    panels = {
        share: {"a": np.array([0.5, 0.7]), "b": np.array([0.9, 0.9])}
        for share in ("20% of clients held back", "40% of clients held back")
    }
    score_by_source(panels, "test accuracy", tmp_path / "a.png")
    left, right = figures[-1].axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "b"]
    assert left.get_ylim()[0] > left.get_ylim()[1]  # the first on top
    band, seeds, mean = right.get_lines()[:3]
    assert (list(band.get_xdata()), list(seeds.get_xdata())) == (pytest.approx([50, 70]), pytest.approx([50, 70]))
    assert mean.get_xdata() == pytest.approx([60])
    assert [line.get_ydata()[0] for line in right.get_lines()] == [0, 0, 0, 1, 1, 1]
