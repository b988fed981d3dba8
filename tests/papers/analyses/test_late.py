from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from kinfed import UsageError
from kinfed.core.engine import Participation, Rounds, latecomers
from kinfed.core.seeding import tags
from kinfed.runs.run_folder import RunFolder
from kinfed_papers.analyses.late import held_back, hold_back, late
from kinfed_papers.plots.joining import LINES, early_and_late

NAMES = [str(i) for i in range(5)]
LATE = [latecomers(seed, tags(NAMES), 0.4).tolist() for seed in (0, 1)]  # two of five


@pytest.fixture
def dated(invented):
    """As `invented`, with 20 rounds of which every fifth is evaluated, and clients that have names."""

    def make(*arguments, **how):
        study = invented(*arguments, **how)

        def runs(asked, failed):
            folders = study.runs(asked, failed)
            for folder in folders.values():
                for seed in (0, 1):
                    one = folder.of_seed(seed)
                    summary = one.read_summary()
                    data, clients = replace(summary.data, clients=5), replace(summary.clients, names=NAMES)
                    one.write_summary(replace(summary, data=data, by_client=clients))
            return folders

        experiment = SimpleNamespace(rounds=Rounds(20), participation=Participation())
        return SimpleNamespace(runs=runs, out=study.out, experiment=lambda: experiment)

    return make


def curve(early, absent):
    """[S, T, N] from the means by round of early and late clients, which differ a little within their kind."""
    found = np.zeros((2, len(early), 5))
    for seed in (0, 1):
        mine = np.isin(np.arange(5), LATE[seed])
        found[seed][:, mine] = np.array(absent)[:, None] + np.array([-0.05, 0.05])
        found[seed][:, ~mine] = np.array(early)[:, None] + np.array([-0.1, 0.02, 0.08])
    return found


def test_before_and_after_by_hand(dated, figures):
    tests = {
        "a": curve([0.2, 0.5, 0.6, 0.6], [0.1, 0.3, 0.5, 0.7]),
        "a-from-the-start": curve([0.2, 0.5, 0.6, 0.6], [0.3, 0.5, 0.7, 0.8]),
    }
    found = late(dated(tests), ["a"], share=0.4)
    (row,) = found.rows
    assert {key: value for key, value in row.items() if isinstance(value, float)} == pytest.approx(
        {
            "early, round 10": 50,
            "late, round 10": 30,
            "late, round 15": 50,
            "late, round 20": 70,
            "over seeds": 0,
            "early, round 20": 60,
            "late, from the start": 80,
        }
    )
    assert (row["rounds to the others"], row["rounds to from the start"]) == (10, None)
    (axes,) = figures[-1].axes
    assert axes.get_lines()[0].get_xdata()[0] == 10.5
    lines = {line.get_label(): line for line in axes.get_lines() if line.get_label() in LINES}
    first, second, third = (lines[label] for label in LINES)
    assert first.get_ydata() == pytest.approx([20, 50, 60, 60])
    assert (list(second.get_xdata()), list(second.get_ydata())) == ([15, 20], pytest.approx([50, 70]))
    assert third.get_ydata() == pytest.approx([30, 50, 70, 80])


def test_an_error_comes_down_and_some_never_catch_up(dated):
    tests = {
        "a": curve([4, 3, 2, 2], [9, 9, 2, 1]),
        "b": curve([4, 3, 2, 2], [9, 9, 8, 7]),
        "a-from-the-start": curve([4, 3, 2, 2], [1, 1, 1, 1]),
        "b-from-the-start": curve([4, 3, 2, 2], [1, 1, 1, 1]),
    }
    found = late(dated(tests, metric="mae", higher_is_better=False), ["a", "b"], share=0.4, joins=9)
    assert [row["rounds to the others"] for row in found.rows] == [6, None]
    assert [row["rounds to from the start"] for row in found.rows] == [11, None]
    assert [row["early, round 5"] for row in found.rows] == pytest.approx([4, 4])
    assert [row["late, round 10"] for row in found.rows] == pytest.approx([9, 9])


@pytest.mark.parametrize(("joins", "message"), [(0, "between 0 and the 20 rounds; got 0"), (20, "got 20")])
def test_they_must_join_during_the_run(dated, joins, message):
    with pytest.raises(UsageError, match=message):
        late(dated({}), ["a"], joins=joins)


def test_a_round_before_they_join_must_be_evaluated(dated):
    tests = dict.fromkeys(("a", "a-from-the-start"), curve([0.1], [0.1]))
    with pytest.raises(UsageError, match="no round is evaluated before the late clients join after round 4"):
        late(dated(tests), ["a"], share=0.4, joins=4)


def test_holding_back_keeps_the_rest_of_participation(study):
    made = study("fedavg", "participation={share=0.5, by_group=2}", "federation.partition.groups=2")
    experiment = made.experiment([hold_back(made, 0.25, 2)])
    assert experiment.participation == Participation(0.5, 2, 0.25, 2)
    made = study("fedavg", "participation=0.5")
    assert made.experiment([hold_back(made, 0.25, 1)]).participation == Participation(0.5, 0, 0.25, 1)


@pytest.mark.pictures
def test_a_real_run_tells_what_its_history_holds(study, tmp_path):
    made = study("fedaghn", "seeds=2", "rounds=4")
    found = late(made, ["fedaghn"], share=0.25, joins=2)
    assert [row["method"] for row in found.rows] == ["fedaghn"]
    for row in found.rows:
        folder = tmp_path / "runs" / row["method"]
        absent = held_back(RunFolder(folder), 0.25)
        assert absent.sum(1).tolist() == [2, 2]
        wanted = {"early": [], "late": []}
        for seed in (0, 1):
            table = pd.read_csv(folder / f"seed-{seed}" / "history.csv")
            mine = table.query("model == @row['model'] and split == 'test' and metric == 'accuracy'")
            by_client = mine.pivot_table(index="round", columns="client", values="value")
            here = latecomers(seed, tags([str(i) for i in range(8)]), 0.25).tolist()
            wanted["late"].append(100 * by_client[here].mean(axis=1))
            wanted["early"].append(100 * by_client.drop(columns=here).mean(axis=1))
        for who, rounds in (("early", (2, 4)), ("late", (2, 3, 4))):
            for at in rounds:
                mean = np.mean([one[at] for one in wanted[who]])
                assert row[f"{who}, round {at}"] == pytest.approx(mean, abs=1e-4)
    assert (tmp_path / "late.png").stat().st_size > 10_000


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_any_number_of_panels(tmp_path, figures, recwarn, count):
    lines = dict.fromkeys(LINES, np.full((1, 3), 0.5))
    early_and_late([1, 2, 3], {f"method {i}": lines for i in range(count)}, 1, "test accuracy", tmp_path / "a.png")
    assert sum(axes.get_visible() for axes in figures[-1].axes) == count
    assert [str(w.message) for w in recwarn] == []


def test_a_line_needs_a_score_every_round(tmp_path):
    lines = dict.fromkeys(LINES, np.zeros((1, 2)))
    with pytest.raises(UsageError, match=r"a, .*: a line must be \[S, 3\]; got \[1, 2\]"):
        early_and_late([1, 2, 3], {"a": lines}, 1, "loss", tmp_path / "a.png")
