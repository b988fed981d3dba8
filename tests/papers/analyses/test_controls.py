import pytest

from kinfed.errors import UsageError
from kinfed.runs.run_folder import RunFolder
from kinfed_papers.analyses.controls import controls


def test_every_graph_that_clients_can_have_is_tried(study, tmp_path, figures):
    asked = study("sfl", "method.structure=known", "method.pull=0", "rounds=6")
    found = controls(asked)
    graphs = [row["graph"] for row in found.rows]
    assert graphs == ["oracle", "label_overlap", "shuffled", "random", "identity", "complete"]  # no graph is given
    for row in found.rows:
        summary = RunFolder(tmp_path / "runs" / row["graph"]).read_summary()
        assert summary.data.federation["graph"]["name"] == row["graph"]
        score = summary.scores[summary.selection.chosen]
        assert row["test accuracy (%)"] == pytest.approx(100 * score["mean"])
    by_graph = {row["graph"]: row["test accuracy (%)"] for row in found.rows}
    assert by_graph["oracle"] > by_graph["shuffled"] + 5
    assert found.notes == []
    axes = figures[-1].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == graphs
    means = [line.get_xdata()[0] for line in axes.get_lines() if line.get_markersize() == 9]
    assert means == pytest.approx(list(by_graph.values()))


def test_a_graph_of_the_data_is_a_control_and_an_oracle_needs_groups(study):
    asked = study(
        "local",
        "federation.dataset=synthetic",
        "federation.partition=natural",
        "federation.clients=0",
        "model=linear",
        "rounds=1",
    )
    found = controls(asked)
    graphs = [row["graph"] for row in found.rows]
    assert "given" in graphs
    assert "oracle" not in graphs
    assert found.notes == ["every graph gives the same: local with these settings does not use a known graph"]


def test_an_unknown_graph_is_told_before_anything_runs(study, tmp_path):
    with pytest.raises(UsageError, match="did you mean 'oracle'"):
        controls(study("sfl"), graphs=["random", "oracl"])
    assert not (tmp_path / "runs").exists()
