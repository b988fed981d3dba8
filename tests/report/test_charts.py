import warnings

import numpy as np
import pytest
from matplotlib import image
from matplotlib.font_manager import findfont

from kinfed.errors import RunError, UsageError
from kinfed.plots import charts, heatmaps, lettering

pytestmark = pytest.mark.pictures

NAMES = [f"client {i}" for i in range(6)]


def draw_all(folder):
    rng = np.random.default_rng(0)
    curves = {"own": rng.random((4, 6)), "mixed": rng.random((4, 6))}
    charts.accuracy_by_round([1, 2, 3, 4], curves, "test accuracy", folder / "round.png", {"own": 3, "mixed": 4})
    charts.accuracy_by_client({k: c[-1] for k, c in curves.items()}, NAMES, "test accuracy", folder / "client.png")
    relation, layers, groups = rng.random((2, 6, 6)), ["base", "head"], np.array([0, 1, 0, 1, 0, 1])
    heatmaps.relation_heatmap(relation, NAMES, "learned", folder / "relation.png", groups, layers)
    charts.classes_by_client(rng.integers(0, 9, (6, 10)), list("0123456789"), NAMES, folder / "classes.png")


def test_every_chart_is_a_png_and_the_same_each_time(tmp_path):
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        draw_all(tmp_path / name)
    files = sorted((tmp_path / "once").iterdir())
    assert [file.stem for file in files] == ["classes", "client", "relation", "round"]
    for file in files:
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
        assert image.imread(file).std() > 0.05


def test_a_picture_does_not_grow_with_very_many_clients(tmp_path):
    counts = np.ones((5000, 3), int)
    names = [str(i) for i in range(5000)]
    charts.classes_by_client(counts, list("abc"), names, tmp_path / "many.png")
    charts.classes_by_client(counts[:400], list("abc"), names[:400], tmp_path / "few.png")
    many, few = (image.imread(tmp_path / f"{name}.png").shape for name in ("many", "few"))
    assert many[1] == pytest.approx(few[1], rel=0.05)


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
    charts.targets_by_client(rng.random((clients, 7)), names, tmp_path / "targets.png")
    assert len(list(tmp_path.iterdir())) == 6
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


def test_over_seeds_the_band_spans_all_of_them(tmp_path, figures):
    seeds = [[0.1, 0.2, 0.6], [0.2, 0.3, 0.7]]  # [T, S]
    charts.accuracy_by_round([1, 2], {"a": seeds}, "accuracy", tmp_path / "a.png", over="seeds", target=0.45)
    axes = figures[0].axes[0]
    line, target = axes.get_lines()
    assert line.get_ydata() == pytest.approx([30, 40])
    (band,) = axes.collections
    assert {(x, round(y)) for x, y in band.get_paths()[0].vertices} == {(1, 10), (1, 60), (2, 20), (2, 70)}
    assert list(target.get_ydata()) == [45, 45]
    assert "3 seeds" in axes.get_title(loc="left")


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


@pytest.mark.parametrize(("clients", "classes"), [(20, 10), (4, 3), (100, 10)])
def test_bubbles_of_equal_counts_do_not_touch(clients, classes, tmp_path, figures):
    names = [str(i) for i in range(clients)]
    charts.classes_by_client(
        np.full((clients, classes), 7), [str(c) for c in range(classes)], names, tmp_path / "a.png"
    )
    axes = figures[0].axes[0]
    diameter = np.sqrt(axes.collections[0].get_sizes().max()) / 72  # inches, as the cell
    box = axes.get_position()
    wide, high = figures[0].get_size_inches() * (box.width, box.height)
    assert diameter < min(wide / (clients + 0.4), high / (classes + 0.4))


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
    with pytest.raises(UsageError, match=r"must be \[6, 2\] and not all zero; got \[2, 6\]"):
        charts.classes_by_client(np.ones((2, 6)), ["a", "b"], NAMES, path)
    assert not path.exists()


def test_a_folder_that_is_not_there_is_said_plainly(tmp_path):
    with pytest.raises(RunError, match="cannot write"):
        charts.accuracy_by_client({"own": np.ones(6)}, NAMES, "accuracy", tmp_path / "gone" / "a.png")


def test_however_large_a_count_no_bubble_leaves_its_cell(tmp_path, figures):
    counts = np.ones((40, 10), int) * 4
    counts[3, 4] = 5000
    charts.classes_by_client(counts, [str(c) for c in range(10)], [str(i) for i in range(40)], tmp_path / "a.png")
    axes = figures[0].axes[0]
    box, bubbles = axes.get_position(), axes.collections[0]
    wide = figures[0].get_size_inches()[0] * box.width / 40.4  # of a cell
    assert bubbles.get_sizes().max() ** 0.5 <= 72 * wide
    assert [text.get_text() for text in axes.get_legend().get_texts()][-1] == "over 4"


def test_scores_say_what_their_models_are_and_local_stands_beside_them(tmp_path, figures):
    scores = {"own": [0.5, 0.7], "mixed": [0.9, 0.6]}
    words = {"own": "after local training"}
    charts.accuracy_by_client(scores, ["a", "b"], "accuracy", tmp_path / "a.png", {"Local": [0.25, 0.75]}, words)
    axes = figures[0].axes[0]
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == ["own, mean 60.0 %\nafter local training", "mixed, mean 75.0 %", "Local, mean 50.0 %"]
    [local] = [line for line in axes.get_lines() if line.get_marker() == "_"]
    assert local.get_ydata().tolist() == [25.0, 75.0]
    charts.accuracy_by_round([1, 2], {"own": np.ones((2, 3))}, "loss", tmp_path / "b.png", kinds=words)
    charts.accuracy_by_round(
        [1, 2], {"own": np.ones((2, 3)), "x": np.ones((2, 3))}, "b", tmp_path / "b.png", kinds=words
    )
    assert figures[2].axes[0].get_legend().get_texts()[0].get_text() == "own\nafter local training"


ODD = ["北京", "🍕 shop", "$a_{$", "cost $5 or $6", "Łódź\nnew", "plain", "x^2 \\frac{", "100 %"]


def test_names_of_any_letters_are_legible_in_pictures_with_one_warning(tmp_path, figures):
    draw = np.random.default_rng(0)
    for picture in (
        lambda: charts.accuracy_by_client({"own": np.arange(8.0)}, ODD, "test accuracy", tmp_path / "client.png"),
        lambda: charts.classes_by_client(np.ones((8, 3), int), ["猫", "$", "犬 $_{$"], ODD, tmp_path / "classes.png"),
        lambda: heatmaps.relation_heatmap(
            draw.random((8, 8)), ODD, "learned", tmp_path / "relation.png", np.zeros(8, int)
        ),
        lambda: heatmaps.recall_heatmap(
            draw.random((8, 1)), [0.5], ["$x_{$ 🍕"], ODD, "recall of $x_{$ 猫", tmp_path / "recall.png"
        ),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            picture()
        assert len({str(one.message) for one in said}) == 1
        assert "such as #3" in str(said[0].message)
        axes = figures[-1].axes[0]
        shown = [label.get_text().replace("\\$", "$") for label in axes.get_xticklabels() if label.get_text() != "all"]
        assert shown == ["#1", "#2 shop", "$a_{$", "cost $5 or $6", "Łódź new", "plain", "x^2 \\frac{", "100 %"]


def test_a_letter_that_another_font_has_is_drawn_by_it(tmp_path, figures, recwarn):
    own, other = (lettering._letters(findfont(name)) for name in ("DejaVu Sans", "STIXGeneral"))
    letter = chr(min(set(other) - set(own) - set(range(0x300, 0x370)) - set(range(0x20D0, 0x2100))))
    names = [f"{letter} {i}" for i in range(3)]
    charts.accuracy_by_client({"own": np.arange(3.0)}, names, "test accuracy", tmp_path / "client.png")
    assert not recwarn
    label = figures[-1].axes[0].get_xticklabels()[0]
    assert label.get_text() == names[0]
    assert len(label.get_fontfamily()) > 1
