from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kinfed import UsageError
from kinfed.runs.run_folder import RunFolder
from kinfed.verdict.graph_quality import clusters
from kinfed_papers.analyses.topologies import topologies
from kinfed_papers.plots.rand import rand_by_round


def mixture(label):
    """The relation of clients that receive their cluster's mean; -1 is absent and receives the mean of all."""
    label = np.array(label)
    rows = (label[:, None] == label) & (label >= 0) | (label[:, None] < 0) & (label >= 0)
    return rows / rows.sum(1, keepdims=True)


@pytest.fixture
def clustered(tmp_path, finished):
    """A stand-in for a study whose runs gave these clusters: for each seed a list of labels, every fifth round."""

    def make(seeds):
        asked = {}

        def runs(wanted, failed):
            asked.update(wanted)
            for name in wanted:
                folder = tmp_path / name
                for seed, labels in enumerate(seeds):
                    one = folder / f"seed-{seed}"
                    one.mkdir(parents=True)
                    weights = np.stack([mixture(label) for label in labels]).astype(np.float32)
                    at = 5 * np.arange(1, len(labels) + 1)
                    names = [str(i) for i in range(len(labels[0]))]
                    about = {"origin": "learned", "layers": np.array([]), "clients": names}
                    np.savez(one / "relations.npz", round=at, relation=weights, **about)
                    finished(one, {"own": {"round": 5}}, relation={}, names=names)
                finished(folder, seeds=list(range(len(seeds))))
            return {name: RunFolder(tmp_path / name) for name in wanted}

        return SimpleNamespace(runs=runs, out=tmp_path, method="fedcedar", asked=asked)

    return make


def test_indices_by_hand(clustered):
    # Three nodes of two clients. Agreeing pairs of 15: all; those of (0,0,1,1,2,2) and (0,0,1,2,2,2) are 12.
    right, wrong = [0, 0, 1, 1, 2, 2], [0, 0, 1, 2, 2, 2]
    study = clustered([[wrong, right, right, right], [wrong, wrong, right, right]])
    found = topologies(study, nodes=(3,), per_node=2)
    assert [row["round"] for row in found.rows] == ["5", "10", "15", "20", "16 to 20"]
    assert [row["Rand index"] for row in found.rows] == pytest.approx([0.8, 0.9, 1, 1, 1])
    assert found.rows[1]["over seeds"] == pytest.approx(0.1 * 2**0.5)
    assert found.rows[0]["adjusted"] == pytest.approx((2 - 12 / 15) / (3.5 - 12 / 15))  # 3 and 4 pairs, 2 in both
    assert found.notes == ["3 nodes: the least Rand index is 0.80, in round 5; 2 of 4 rounds have 1"]


def test_absent_clients_are_left_out(clustered):
    # Of those who are there, all pairs agree but the two of node 2, who were taken for two clusters.
    found = topologies(clustered([[[0, -1, 1, -1, 2, 3]]]), nodes=(3,), per_node=2)
    assert found.rows[0]["Rand index"] == pytest.approx(5 / 6)
    assert found.rows[0]["over seeds"] is None


def test_what_is_run(clustered):
    study = clustered([[[0, 0, 0, 0, 1, 1, 2, 2]]])
    topologies(study, nodes=(4,), per_node=2, share=0.5, every=7)
    assert study.asked["4-nodes"] == [
        'federation.partition.name="topologies"',
        "federation.partition.nodes=4",
        "federation.clients=8",
        "participation={share=0.5, by_group=7}",
        "method.clusters=4",
    ]


def test_fedcedar_finds_the_nodes_of_both_topologies(study, tmp_path, figures):
    found = topologies(study("fedcedar", "rounds=4", "model.hidden=[32]"), per_node=4, every=2, share=0.5)
    shown = [(row["nodes"], row["round"]) for row in found.rows]
    assert shown == [(nodes, rounds) for nodes in (4, 5) for rounds in ("2", "4", "4 to 4")]
    for row in found.rows:
        # Two clients of every node: a clustering at random would have an adjusted index around 0.
        assert row["adjusted"] > 0.5
    saved = np.load(tmp_path / "runs" / "5-nodes" / "relations.npz")["relation"]
    for round in (1, 3):  # in every second round each node has sent its share
        present = clusters(torch.from_numpy(saved[round])) >= 0
        assert present.view(5, 4).sum(1).tolist() == [2] * 5
    (axes,) = figures[-1].axes
    dashed, solid = axes.get_lines()[:2]
    assert list(solid.get_xdata()) == [1, 2, 3, 4]
    assert solid.get_markevery() == [1, 3]
    assert (np.asarray(dashed.get_ydata()) <= np.asarray(solid.get_ydata()) + 1e-9).all()
    assert axes.get_ylim()[0] <= 0


def test_clusters_that_mixing_hides_are_told_by_the_method(study, tmp_path):
    # Clipped cosines of raw models are all nearly one: in single precision all clusters' mixtures become equal.
    settings = ["rounds=3", "model.hidden=[32]", "method.steps=40"]
    found = topologies(study("fedcedar", *settings), nodes=(4,), per_node=4, every=1, share=0.5)
    saved = np.load(tmp_path / "runs" / "4-nodes" / "relations.npz")["relation"]
    assert len(set(clusters(torch.from_numpy(saved[2])).tolist()) - {-1}) < 4
    assert min(row["adjusted"] for row in found.rows) > 0.3


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("fedcedar", {"nodes": (6,)}, "analysis.nodes must be some of 3, 4, 5"),
        ("fedcedar", {"nodes": ()}, "analysis.nodes must be some of"),
        ("fedcedar", {"per_node": 0}, "must be at least 1; got 0 and 5"),
        ("fedcedar", {"every": 0}, "must be at least 1; got 20 and 0"),
        (
            "fedcedar",
            {"share": 1.5},
            r"^participation.share must be in \(0, 1\]; got 1.5 \(share of the clients that take part in a round\)",
        ),
        ("pfedhn", {"nodes": (4,), "per_node": 4}, "pfedhn mixes no models"),
    ],
)
def test_refuses(study, method, settings, message):
    with pytest.raises(UsageError, match=message):
        topologies(study(method, "rounds=1"), **settings)


def test_a_picture_needs_indices_of_every_round(tmp_path):
    with pytest.raises(UsageError, match=r"the indices of a must be \[S, 2, 2\]; got \[1, 3, 2\]"):
        rand_by_round([5, 10], {"a": np.zeros((1, 3, 2))}, 5, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
