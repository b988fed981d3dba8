import numpy as np
import pytest
from matplotlib import image

from kinfed.errors import RunError, UsageError
from kinfed.report import charts, heatmaps

NAMES = [f"client {i}" for i in range(6)]
GROUPS = np.array([0, 1, 0, 1, 0, 1])


def draw_all(folder):
    rng = np.random.default_rng(0)
    curves = {"own": rng.random((4, 6)), "mixed": rng.random((4, 6))}
    charts.accuracy_by_round([1, 2, 3, 4], curves, "test accuracy", folder / "round.png", {"own": 3, "mixed": 4})
    charts.accuracy_by_client({k: c[-1] for k, c in curves.items()}, NAMES, "test accuracy", folder / "client.png")
    layers = ["base", "head"]
    heatmaps.relation_heatmap(rng.random((2, 6, 6)), NAMES, "learned", folder / "relation.png", GROUPS, layers)
    charts.classes_by_client(rng.integers(0, 9, (6, 10)), list("0123456789"), NAMES, folder / "classes.png")


def test_every_chart_is_a_png_and_the_same_each_time(tmp_path):
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        draw_all(tmp_path / name)
    files = sorted((tmp_path / "once").iterdir())
    assert [file.name for file in files] == ["classes.png", "client.png", "relation.png", "round.png"]
    for file in files:
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
        assert image.imread(file).std() > 0.05


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (5, 10), (200, 200)])
def test_sizes_from_one_client_to_many_draw_without_warnings(tmp_path, recwarn, clients, classes):
    rng = np.random.default_rng(0)
    names = [f"the client with number {i}" for i in range(clients)]
    charts.accuracy_by_round([7], {"own": rng.random((1, clients))}, "loss", tmp_path / "round.png", {"own": 7})
    charts.accuracy_by_client({"own": rng.random(clients)}, names, "loss", tmp_path / "client.png")
    heatmaps.relation_heatmap(np.eye(clients), names, "given", tmp_path / "relation.png")
    relation = rng.random((3, clients, clients))
    heatmaps.relation_heatmap(relation, names, "learned", tmp_path / "layers.png", np.arange(clients) % 3)
    counts = rng.integers(0, 9, (clients, classes)) + 1
    charts.classes_by_client(counts, [str(c) for c in range(classes)], names, tmp_path / "classes.png")
    assert len(list(tmp_path.iterdir())) == 5
    assert [str(w.message) for w in recwarn] == []


def test_by_round_shows_means_in_percent_and_the_selected_round(tmp_path, figures):
    curves = {"low": [[0.0, 0.2], [0.2, 0.4]], "high": [[0.5, 0.7], [0.6, 1.0]]}
    charts.accuracy_by_round([10, 20], curves, "test accuracy", tmp_path / "a.png", {"high": 20})
    axes = figures[0].axes[0]
    low, high, dot = axes.get_lines()
    assert low.get_ydata() == pytest.approx([10, 30])
    assert high.get_ydata() == pytest.approx([60, 80])
    assert (list(dot.get_xdata()), list(dot.get_ydata())) == ([20], pytest.approx([80]))
    assert axes.get_ylabel() == "test accuracy (%)"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["high", "low"]


def test_an_error_is_not_shown_in_percent(tmp_path, figures):
    charts.accuracy_by_round([1, 2], {"own": [[1.0, 3.0], [2.0, 2.0]]}, "test mse", tmp_path / "a.png")
    axes = figures[0].axes[0]
    assert axes.get_lines()[0].get_ydata() == pytest.approx([2, 2])
    assert axes.get_ylabel() == "test mse"


def test_by_client_sorts_all_scores_by_the_first(tmp_path, figures):
    scores = {"own": [0.3, 0.1, 0.2], "mixed": [0.6, 0.5, 0.4]}
    charts.accuracy_by_client(scores, ["a", "b", "c"], "test accuracy", tmp_path / "a.png")
    axes = figures[0].axes[0]
    own, mixed = axes.get_lines()
    assert own.get_ydata() == pytest.approx([10, 20, 30])
    assert mixed.get_ydata() == pytest.approx([50, 40, 60])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["b", "c", "a"]
    assert axes.get_legend().get_texts()[1].get_text() == "mixed, mean 50.0 %"


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


def test_rounding_noise_is_not_drawn_as_structure(tmp_path, figures):
    noise = 1e-9 * np.random.default_rng(0).random((6, 6))
    heatmaps.relation_heatmap(1 / 6 + noise, NAMES, "given", tmp_path / "a.png")
    assert figures[0].axes[0].get_images()[0].get_clim() == pytest.approx((0, 1 / 3))


def test_layers_are_averaged_above_and_shown_one_by_one(tmp_path, figures):
    layers = np.stack([np.full((6, 6), 0.1), np.full((6, 6), 0.3)])
    layers[1, 0, 1] = 0.5
    heatmaps.relation_heatmap(layers, NAMES, "learned", tmp_path / "a.png", layers=["base", "head"])
    panels = [axes for axes in figures[0].axes if axes.get_images() and axes.get_visible()]
    values = {axes.get_title().split("\n")[0]: float(axes.get_images()[0].get_array()[0, 1]) for axes in panels}
    assert values == pytest.approx({"": 0.3, "base": 0.1, "head": 0.5})


def test_bubble_areas_are_proportional_to_counts(tmp_path, figures):
    counts = np.array([[100, 0, 400], [0, 200, 50]])
    charts.classes_by_client(counts, ["cat", "dog", "owl"], ["a", "b"], tmp_path / "a.png")
    bubbles = figures[0].axes[0].collections[0]
    found = {tuple(map(int, at)): area for at, area in zip(bubbles.get_offsets(), bubbles.get_sizes(), strict=True)}
    assert found.keys() == {(0, 0), (0, 2), (1, 1), (1, 2)}
    assert [found[at] / found[0, 0] for at in ((0, 2), (1, 1), (1, 2))] == pytest.approx([4, 2, 0.5])
    legend = figures[0].axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["10", "50", "200"]
    largest = legend.get_lines()[-1].get_markersize()
    assert largest**2 == pytest.approx(found[1, 1])


def test_what_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "a.png"
    with pytest.raises(UsageError, match=r"curve of own must be \[2, N\] for 2 rounds; got \[3, 4\]"):
        charts.accuracy_by_round([1, 2], {"own": np.ones((3, 4))}, "accuracy", path)
    with pytest.raises(UsageError, match=r"scores of own must be \[6\]"):
        charts.accuracy_by_client({"own": np.ones(5)}, NAMES, "accuracy", path)
    with pytest.raises(UsageError, match=r"relation of 6 clients must be \[6, 6\].*got \[1, 5, 5\]"):
        heatmaps.relation_heatmap(np.ones((5, 5)), NAMES, "given", path)
    with pytest.raises(UsageError, match="2 layers need 2 names; got 1"):
        heatmaps.relation_heatmap(np.ones((2, 6, 6)), NAMES, "given", path, layers=["head"])
    with pytest.raises(UsageError, match="6 clients need 6 group labels; got 2"):
        heatmaps.relation_heatmap(np.ones((6, 6)), NAMES, "given", path, [0, 1])
    with pytest.raises(UsageError, match=r"must be \[6, 2\] and not all zero; got \[2, 6\]"):
        charts.classes_by_client(np.ones((2, 6)), ["a", "b"], NAMES, path)
    assert not path.exists()


def test_a_folder_that_is_not_there_is_said_plainly(tmp_path):
    with pytest.raises(RunError, match="cannot write"):
        charts.accuracy_by_client({"own": np.ones(6)}, NAMES, "accuracy", tmp_path / "gone" / "a.png")
