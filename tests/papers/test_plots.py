import numpy as np
import pytest

from kinfed.errors import UsageError
from kinfed_papers.plots import relations, scores

pytestmark = pytest.mark.pictures


def draw_all(folder):
    rng = np.random.default_rng(0)
    relation, layers, groups = rng.random((2, 6, 6)), ["base", "head"], np.array([0, 1, 0, 1, 0, 1])
    relations.relation_grid({("a", "b"): relation[0], ("c", "b"): relation[1]}, folder / "grid.png", {"b": groups})
    scores.score_grid(rng.random((2, 3)), ("x", "12"), ("y", "345"), "test accuracy", folder / "map.png", (1, 2))
    scores.score_by_setting(["1", "2"], rng.random((2, 3)), "x", "test accuracy", folder / "setting.png", 1)
    scores.score_by_name({"a": [0.1, 0.2], "b": [0.3, 0.4]}, "test accuracy", "what", folder / "name.png")
    relations.weights_by_round([1, 2, 3, 4], {"own": rng.random((4, 2))}, layers, folder / "weights.png")


def test_every_picture_is_a_png_and_the_same_each_time(tmp_path):
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        draw_all(tmp_path / name)
    files = sorted((tmp_path / "once").iterdir())
    assert [file.stem for file in files] == ["grid", "map", "name", "setting", "weights"]
    for file in files:
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


@pytest.mark.parametrize("count", [1, 5, 100])
def test_sizes_from_one_to_many_draw_without_warnings(tmp_path, recwarn, count):
    rng = np.random.default_rng(0)
    values, settings = [str(i) for i in range(count)], rng.random((count, 3))
    relations.relation_grid({("a", "b"): rng.random((count, count))}, tmp_path / "grid.png")
    scores.score_grid(settings, ("x", values), ("y", "abc"), "loss", tmp_path / "map.png", (0, 2))
    scores.score_by_setting(values, settings, "x", "loss", tmp_path / "setting.png", 0)
    scores.score_by_name(dict(zip(values, rng.random((count, 1)), strict=True)), "loss", "", tmp_path / "name.png")
    relations.weights_by_round([7], {"own": rng.random((1, count))}, values, tmp_path / "weights.png")
    assert len(list(tmp_path.iterdir())) == 5
    assert [str(w.message) for w in recwarn] == []


def test_a_relation_that_does_not_fit_its_groups_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"relation of a, b must be \[N, N\].*got \[6, 6\] and 2 groups"):
        relations.relation_grid({("a", "b"): np.ones((6, 6))}, tmp_path / "a.png", {"b": [0, 1]})
    assert not list(tmp_path.iterdir())


def test_scores_by_name_show_means_and_every_seed(tmp_path, figures):
    scores.score_by_name({"a": [0.1, 0.3], "b": [0.5, 0.6]}, "test accuracy", "graphs", tmp_path / "a.png")
    axes = figures[0].axes[0]
    _, seeds, mean = axes.get_lines()[:3]
    assert (seeds.get_xdata(), mean.get_xdata()) == (pytest.approx([10, 30]), pytest.approx([20]))
    assert [text.get_text() for text in axes.texts] == ["20.0 %", "55.0 %"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top
    assert axes.get_title(loc="left") == "graphs; small dots: seeds"


def test_scores_by_setting_show_the_range_of_seeds(tmp_path, figures):
    scores.score_by_setting(["2", "8"], [[1.0, 3.0], [4.0, 6.0]], "clusters", "mse", tmp_path / "a.png")
    axes = figures[0].axes[0]
    assert axes.get_lines()[0].get_ydata() == pytest.approx([2, 5])
    assert [bar[:, 1].tolist() for bar in axes.collections[0].get_segments()] == [[1, 3], [4, 6]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "8"]


def test_weights_by_round_have_a_panel_a_kind_and_a_line_a_layer(tmp_path, figures):
    own, other = np.arange(6).reshape(3, 2), -np.arange(6).reshape(3, 2)
    relations.weights_by_round([1, 5, 9], {"own": own, "other": other}, ["fc1", "head"], tmp_path / "a.png")
    left, right = figures[0].axes
    assert [line.get_ydata().tolist() for line in left.get_lines()] == [[0, 2, 4], [1, 3, 5]]
    assert [line.get_ydata().tolist() for line in right.get_lines()] == [[0, -2, -4], [-1, -3, -5]]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["fc1", "head"]
    with pytest.raises(UsageError, match=r"weights of own must be \[2, 2\] for 2 rounds and 2 layers; got \[3, 2\]"):
        relations.weights_by_round([1, 5], {"own": own}, ["fc1", "head"], tmp_path / "b.png")


def test_of_many_layers_some_are_named_the_deepest_among_them(tmp_path, figures):
    names = [f"layer {i}" for i in range(30)]
    relations.weights_by_round([1], {"own": np.zeros((1, 30))}, names, tmp_path / "a.png")
    named = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert named == [f"layer {i}" for i in range(2, 30, 3)]


def test_grid_sorts_each_column_by_its_groups_and_tells_the_range(tmp_path, figures):
    relation = np.array([[0.5, 0.1, 0.4], [0.2, 0.6, 0.2], [0.3, 0.0, 0.7]])
    panels = {(row, column): part for row, part in (("a", relation), ("b", relation.T)) for column in ("iid", "groups")}
    relations.relation_grid(panels, tmp_path / "a.png", {"groups": [0, 1, 0]})
    plain, sorted_, below, turned = figures[0].axes
    assert plain.get_images()[0].get_array().data.tolist() == relation.tolist()
    order = [0, 2, 1]
    assert sorted_.get_images()[0].get_array().data.tolist() == relation[order][:, order].tolist()
    assert turned.get_images()[0].get_array().data.tolist() == relation.T[order][:, order].tolist()
    assert [line.get_ydata()[0] for line in sorted_.get_lines()[::2]] == [1.5]
    assert plain.get_lines()[:] == []
    assert plain.get_xlabel() == "0 to 0.4\nown 0.6"
    assert [plain.get_title(), sorted_.get_title(), turned.get_title()] == ["iid", "groups", ""]
    assert [plain.get_ylabel(), turned.get_ylabel(), below.get_ylabel()] == ["a", "", "b"]


def test_map_has_the_first_setting_across_numbers_in_cells_and_a_frame(tmp_path, figures):
    values = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.66666]]  # [X, Y]
    scores.score_grid(values, ("x", ["1", "2"]), ("y", "abc"), "accuracy", tmp_path / "a.png", (1, 0))
    axes = figures[0].axes[0]
    cells = {tuple(text.get_position()): text.get_text() for text in axes.texts}
    assert cells == {(0, 0): "10.0", (0, 1): "20.0", (0, 2): "30.0", (1, 0): "40.0", (1, 1): "50.0", (1, 2): "66.7"}
    assert axes.patches[0].get_xy() == (0.5, -0.5)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    assert axes.get_ylim()[0] < axes.get_ylim()[1]  # the first at the bottom
