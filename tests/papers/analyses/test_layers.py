import numpy as np
import pytest
import torch

from kinfed.errors import UsageError
from kinfed.runs.run_folder import RunFolder
from kinfed.verdict.graph_quality import group_weights
from kinfed_papers.analyses.layers import layers

GROUPS = torch.arange(8) // 4


def test_layers_stand_from_shallow_to_deep_and_their_mean_is_the_runs_summary(study, tmp_path):
    found = layers(study("fedaghn", "model.hidden=[8,8]", "rounds=6"), rounds=3)
    kept = RunFolder(tmp_path / "runs" / "fedaghn").read_relations()
    chosen = kept.rounds[kept.selected]
    assert [row["layer"] for row in found.rows[::4]] == ["fc1", "fc2", "head"]
    assert [row["round"] for row in found.rows[:4]] == ["1", "3", "6", f"selected: {chosen}"]
    selected = found.rows[3::4]
    summary = RunFolder(tmp_path / "runs" / "fedaghn").read_summary().relation
    assert np.mean([row["self"] for row in selected]) == pytest.approx(summary["itself"])
    assert np.mean([row["similar"] for row in selected]) == pytest.approx(summary["within"])
    assert np.mean([row["others"] for row in selected]) == pytest.approx(summary["between"])
    deep = found.rows[9]  # the head in round 3
    by_hand = group_weights(torch.from_numpy(kept.weights[2, 2]), GROUPS)
    assert (deep["self"], deep["similar"], deep["others"]) == pytest.approx(tuple(by_hand))
    assert [picture.name for picture in found.pictures] == ["layers.png", "layers-by-round.png"]


def test_pictures_show_both_halves_at_first_middle_and_last_round_and_a_line_a_layer(study, tmp_path, figures):
    layers(study("fedaghn", "model.hidden=[8,8]", "rounds=5", "seeds=2"))
    heatmaps, lines = figures[-2:]
    kept = [RunFolder(tmp_path / "runs" / "fedaghn" / f"seed-{seed}").read_relations().weights for seed in (0, 1)]
    panels = [axes for axes in heatmaps.axes if axes.get_images()]
    assert [axes.get_title() for axes in panels[:3]] == ["round 1", "round 3", "round 5"]
    assert [panels[0].get_ylabel(), panels[3].get_ylabel()] == ["shallow\nfc1", "deep\nhead"]
    for axes, (moment, layer) in zip(panels, [(0, 0), (2, 0), (4, 0), (0, 2), (2, 2), (4, 2)], strict=True):
        assert axes.get_images()[0].get_array().data == pytest.approx(kept[0][moment, layer])
    itself = np.stack(kept).diagonal(axis1=3, axis2=4).mean((0, 3))  # [T, L]
    for layer, line in enumerate(lines.axes[0].get_lines()):
        assert line.get_ydata() == pytest.approx(itself[:, layer])


def test_the_selected_round_of_each_seed_is_its_own(study, tmp_path):
    found = layers(study("fedaghn", "seeds=2", "rounds=6", "training.optimiser.lr=1.0", "method.home=1"))
    kept = [RunFolder(tmp_path / "runs" / "fedaghn" / f"seed-{seed}").read_relations() for seed in (0, 1)]
    assert kept[0].selected != kept[1].selected
    label = "selected: " + ", ".join(str(one.rounds[one.selected]) for one in kept)
    row = next(row for row in found.rows if row["round"] == label)
    by_hand = [group_weights(torch.from_numpy(one.weights[one.selected, 0]), GROUPS).itself for one in kept]
    assert row["self"] == pytest.approx(np.mean(by_hand))


@pytest.mark.parametrize(("method", "model", "layer"), [("fedamp", "mlp", "all"), ("fedaghn", "linear", "head")])
def test_of_one_graph_there_is_one_row_a_round(study, tmp_path, figures, method, model, layer):
    found = layers(study(method, f"model={model}", "rounds=3"), rounds=2)
    kept = RunFolder(tmp_path / "runs" / method).read_relations()
    whole = kept.weights.reshape(3, 8, 8)  # [T, N, N]
    assert [(row["layer"], row["round"]) for row in found.rows[:2]] == [(layer, "1"), (layer, "3")]
    for row, moment in zip(found.rows[:2], (0, 2), strict=True):
        by_hand = group_weights(torch.from_numpy(whole[moment]), GROUPS)
        assert (row["self"], row["similar"], row["others"]) == pytest.approx(tuple(by_hand))
    assert len([axes for axes in figures[-2].axes if axes.get_images()]) == 3  # first, middle and last round


def test_a_table_of_one_round_is_refused(study):
    with pytest.raises(UsageError, match=r"analysis\.rounds is how many rounds the table shows, at least 2; got 1"):
        layers(study("fedaghn"), rounds=1)
