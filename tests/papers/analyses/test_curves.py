import numpy as np
import pandas as pd
import pytest

from kinfed_papers.analyses.curves import curves

# Two seeds, four evaluated rounds, two clients; means over both: 0.25, 0.45, 0.5, 0.4.
RISING = [[[0.1, 0.3], [0.3, 0.5], [0.4, 0.6], [0.3, 0.5]], [[0.2, 0.4], [0.4, 0.6], [0.4, 0.6], [0.3, 0.5]]]


def test_best_last_and_rounds_by_hand(invented):
    found = curves(invented({"a": RISING}), ["a"], target=0.42)
    (row,) = found.rows
    assert row["best"] == pytest.approx(50)
    assert row["last"] == pytest.approx(40)
    assert row["near best in round"] == 10  # 0.45 is nine tenths of 0.5; every fifth round is evaluated
    assert row["at target in round"] == 10
    assert row["over seeds"] == pytest.approx(0)


def test_a_method_that_fails_is_named_and_the_others_are_shown(invented):
    found = curves(invented({"a": [[[0.5], [0.6]]]}), methods=["a", "b"])
    assert [row["method"] for row in found.rows] == ["a"]
    assert found.notes == ["b failed: it diverged"]


def test_a_target_that_is_never_reached_has_no_round(invented):
    found = curves(invented({"a": RISING}), ["a"], target=0.51)
    assert found.rows[0]["at target in round"] is None
    assert "at target in round" not in curves(invented({"b": RISING}), ["b"]).rows[0]


def test_errors_come_down(invented):
    # Means 5, 2.2, 2, 3: near is at most 2 / 0.9 = 2.22.
    falling = [[[5, 5], [2.2, 2.2], [2, 2], [3, 3]]]
    found = curves(invented({"a": falling}, metric="mae", higher_is_better=False), ["a"], target=2.0)
    (row,) = found.rows
    assert (row["best"], row["last"]) == (2, 3)
    assert (row["near best in round"], row["at target in round"]) == (10, 15)


def test_curves_of_real_runs_are_the_histories_means_over_clients(study, tmp_path, figures):
    found = curves(study("local", "seeds=2"), methods=["local", "fedaghn"])
    picture = figures[-1]
    for row, line in zip(found.rows, picture.axes[0].get_lines(), strict=True):
        each = []
        for seed in (0, 1):
            table = pd.read_csv(tmp_path / "runs" / row["method"] / f"seed-{seed}" / "history.csv")
            mine = table.query("model == @row['model'] and split == 'test' and metric == 'accuracy'")
            each.append(mine.groupby("round").value.mean().to_numpy())
        mean = 100 * np.mean(each, 0)
        assert line.get_ydata() == pytest.approx(mean)
        assert row["best"] == pytest.approx(mean.max())
        assert row["last"] == pytest.approx(mean[-1])
