import numpy as np
import pytest

from kinfed.errors import UsageError
from kinfed.runs.run_folder import RunFolder
from kinfed_papers.analyses.map import map


def test_validation_chooses_and_test_is_shown(invented, figures):
    tests = {"s=1": [[[0.9]]], "s=2": [[[0.7]]], "s=3": [[[0.8]]]}
    found = map(invented(tests, validation={"s=1": 0.5, "s=2": 0.6, "s=3": 0.6}), "s", [1, 2, 3])
    assert found.notes == ["best on validation data: s=2"]
    assert [row["test accuracy (%)"] for row in found.rows] == pytest.approx([90, 70, 80])
    assert [row["validation accuracy (%)"] for row in found.rows] == pytest.approx([50, 60, 60])
    line, dot = figures[-1].axes[0].get_lines()
    assert line.get_ydata() == pytest.approx([90, 70, 80])
    assert (list(dot.get_xdata()), list(dot.get_ydata())) == ([1], [70])


def test_the_least_error_is_chosen(invented):
    tests = {"s=1": [[[3.0]]], "s=2": [[[2.0]]]}
    asked = invented(tests, validation={"s=1": 1.0, "s=2": 2.0}, metric="mae", higher_is_better=False)
    assert map(asked, "s", [1, 2]).notes == ["best on validation data: s=1"]


def test_without_validation_data_nothing_is_chosen(invented):
    found = map(invented({"s=a-b": [[[0.9]]]}), "s", ["a/b"])
    assert found.notes == ["no validation data, so no value is chosen"]


def test_a_value_whose_run_failed_is_an_empty_row(invented, figures):
    asked = invented({"s=1": [[[0.9]]], "s=3": [[[0.8]]]}, validation={"s=1": 0.5, "s=3": 0.6})
    found = map(asked, "s", [1, 2, 3])
    assert found.notes == ["best on validation data: s=3", "s=2 failed: it diverged"]
    assert [row["test accuracy (%)"] for row in found.rows] == [pytest.approx(90), None, pytest.approx(80)]
    line, dot = figures[-1].axes[0].get_lines()
    assert np.isnan(line.get_ydata()).tolist() == [False, True, False]
    assert list(dot.get_xdata()) == [2]
    cells = {f"s={a},t={b}": [[[0.1 * a + b]]] for a in (1, 2) for b in (0.2, 0.4) if (a, b) != (1, 0.2)}
    found = map(
        invented(cells, validation={name: scores[0][0][0] for name, scores in cells.items()}),
        "s",
        [1, 2],
        "t",
        [0.2, 0.4],
    )
    assert [text.get_text() for text in figures[-1].axes[0].texts] == ["40.0", "50.0", "60.0"]
    assert found.rows[0]["validation accuracy (%)"] is None


def test_a_grid_has_the_first_setting_across_and_the_second_up(study, tmp_path, figures):
    found = map(study("fedcedar"), "method.clusters", [1, 2, 4], "training.optimiser.lr", [0.1, 0.2])
    assert [(row["method.clusters"], row["training.optimiser.lr"]) for row in found.rows] == [
        (1, 0.1),
        (1, 0.2),
        (2, 0.1),
        (2, 0.2),
        (4, 0.1),
        (4, 0.2),
    ]
    score = RunFolder(tmp_path / "runs" / "method.clusters=4,training.optimiser.lr=0.1").read_summary()
    assert found.rows[4]["test accuracy (%)"] == pytest.approx(100 * score.scores[score.selection.chosen]["mean"])
    axes = figures[-1].axes[0]
    drawn = axes.get_images()[0].get_array()  # [Y, X]
    assert drawn.shape == (2, 3)
    assert drawn.data.T.ravel() == pytest.approx([row["test accuracy (%)"] for row in found.rows])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("method.clusters", "training.optimiser.lr")
    best = int(np.argmax([row["validation accuracy (%)"] for row in found.rows]))
    (frame,) = axes.patches
    assert frame.get_xy() == (best // 2 - 0.5, best % 2 - 0.5)


def test_any_setting_can_be_mapped_even_the_method(study):
    found = map(study("local"), "method.name", ["local", "fedavg"])
    assert [row["model"] for row in found.rows] == ["own", "shared"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"xs": [1], "y": "rounds"}, "give both or neither"),
        ({"xs": [1], "ys": [2]}, "give both or neither"),
        ({"xs": [1, 1]}, "each with different values"),
        ({"xs": [1, 2], "y": "training.epochs", "ys": [1]}, "over different settings"),
        ({"xs": []}, "nothing to run"),
        ({"xs": [1, "many"]}, "training.epochs must be a whole number; got 'many'"),
    ],
)
def test_wrong_maps_are_refused_before_anything_runs(study, tmp_path, asked, said):
    with pytest.raises(UsageError, match=said):
        map(study("local"), "training.epochs", **asked)
    assert not (tmp_path / "runs").exists()
