import numpy as np
import pytest
from PIL import Image

from kinfed.errors import UsageError
from kinfed.plots import heatmaps

pytestmark = pytest.mark.pictures

NAMES = [f"client {i}" for i in range(6)]
GROUPS = np.array([0, 1, 0, 1, 0, 1])


def test_heatmap_colours_span_the_others_and_clients_stand_by_group(tmp_path, figures):
    relation = np.full((6, 6), 0.01)
    relation[np.ix_([0, 2, 4], [0, 2, 4])] = 0.05
    np.fill_diagonal(relation, 0.9)
    relation[1, 3] = 0.03
    heatmaps.relation_heatmap(relation, NAMES, "learned", tmp_path / "a.png", GROUPS)
    axes = figures[0].axes[0]
    (drawn,) = axes.get_images()
    assert drawn.get_clim() == (0.01, 0.05)
    shown = drawn.get_array()
    assert shown.mask.tolist() == np.eye(6, dtype=bool).tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == [NAMES[i] for i in (0, 2, 4, 1, 3, 5)]
    assert shown[3, 4] == 0.03  # clients 1 and 3, first and second of the second group
    assert "(learned)" in axes.get_title(loc="left")
    assert "own weight, in grey: 0.9" in figures[0].axes[1].get_ylabel()


def test_without_groups_clients_that_learn_from_each_other_stand_together(tmp_path, figures):
    relation = np.where(np.arange(6)[:, None] % 2 == np.arange(6) % 2, 0.3, 0.01)
    heatmaps.relation_heatmap(relation, NAMES, "learned", tmp_path / "a.png")
    axes = figures[0].axes[0]
    shown = [int(label.get_text().split()[1]) % 2 for label in axes.get_yticklabels()]
    assert shown in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])
    assert (axes.get_images()[0].get_array()[:3, :3].compressed() == 0.3).all()
    assert axes.get_xlabel() == "giving client, sorted by links"


def test_rounding_noise_is_not_drawn_as_structure(tmp_path, figures):
    noise = 1e-9 * np.random.default_rng(0).random((6, 6))
    heatmaps.relation_heatmap(1 / 6 + noise, NAMES, "given", tmp_path / "a.png")
    assert figures[0].axes[0].get_images()[0].get_clim() == pytest.approx((0, 1 / 3))


def test_weights_that_round_to_nothing_are_drawn_as_nothing(tmp_path, figures):
    relation = np.eye(6)
    relation[4, 3] = 2e-19
    heatmaps.relation_heatmap(relation, NAMES, "learned", tmp_path / "a.png")
    assert figures[0].axes[0].get_images()[0].get_clim() == (0, 1)


def test_layers_are_averaged_above_and_shown_one_by_one(tmp_path, figures):
    layers = np.stack([np.full((6, 6), 0.1), np.full((6, 6), 0.3)])
    layers[1, 0, 1] = 0.5
    heatmaps.relation_heatmap(layers, NAMES, "learned", tmp_path / "a.png", np.zeros(6), ["base", "head"])
    panels = [axes for axes in figures[0].axes if axes.get_images() and axes.get_visible()]
    values = {axes.get_title().split("\n")[0]: float(axes.get_images()[0].get_array()[0, 1]) for axes in panels}
    assert values == pytest.approx({"": 0.3, "base": 0.1, "head": 0.5})


def test_what_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "a.png"
    with pytest.raises(UsageError, match=r"relation of 6 clients must be \[6, 6\].*got \[1, 5, 5\]"):
        heatmaps.relation_heatmap(np.ones((5, 5)), NAMES, "given", path)
    with pytest.raises(UsageError, match="2 layers need 2 names; got 1"):
        heatmaps.relation_heatmap(np.ones((2, 6, 6)), NAMES, "given", path, layers=["head"])
    with pytest.raises(UsageError, match="6 clients need 6 group labels; got 2"):
        heatmaps.relation_heatmap(np.ones((6, 6)), NAMES, "given", path, [0, 1])
    assert not path.exists()


def test_recall_is_told_in_percent_for_all_together_and_each_client(figures, tmp_path):
    recall = [[0.9, 0.25], [1.0, np.nan], [0.5, 0.0]]
    heatmaps.recall_heatmap(recall, [0.8, 0.2], ["no", "yes"], ["a", "b", "c"], "test recall", tmp_path / "r.png")
    axes = figures[-1].axes[0]
    assert [t.get_text() for t in axes.texts] == [
        "90",
        "100",
        "50",
        "25",
        "0",
        "80",
        "20",
    ]  # nothing where there is none
    assert [t.get_text() for t in axes.get_xticklabels()] == ["all", "a", "b", "c"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["no", "yes"]
    assert axes.get_title(loc="left") == "test recall; grey: no examples"
    with pytest.raises(UsageError, match=r"recall of 2 clients and 2 classes must be \[2, 2\] and \[2\]; got \[3, 2\]"):
        heatmaps.recall_heatmap(recall, [0.8, 0.2], ["no", "yes"], ["a", "b"], "test recall", tmp_path / "r.png")


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (14, 2), (1000, 4)])
def test_recall_of_few_and_of_many_fits_its_page(clients, classes, figures, tmp_path):
    path = tmp_path / "r.png"
    names = ["a hospital with a long name"] * clients
    heatmaps.recall_heatmap(
        np.ones((clients, classes)), np.ones(classes), list("ab" * (classes // 2)), names, "x", path
    )
    with Image.open(path) as picture:
        assert max(picture.size) < 2000
    box = figures[-1].axes[0].get_window_extent()
    assert min(box.width, box.height) > 90  # points of 150 an inch: what names and bars leave to the colours
