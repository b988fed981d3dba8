"""One's own table: the config that fits it, what it says of its choices, and what it refuses."""

import re

import numpy as np
import pytest

from kinfed import Execution, UsageError, fit
from kinfed.cli import main
from kinfed.core.summary import parse_summary
from kinfed.files import to_json
from kinfed.runs.config import experiment as config, from_table

SETTINGS = ["method=local", "rounds=1"]


def write(folder, rows, head="who,a,b,y", name="t.csv"):
    path = folder / name
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def rows(sizes, target, seed=0):
    """Rows of clients of these sizes; `target` makes the last cell from the row's number."""
    draw = np.random.default_rng(seed)
    return [f"{who},{draw.normal():.3f},{draw.normal():.3f},{target(i)}" for who, n in sizes.items() for i in range(n)]


def chosen(path, *overrides):
    experiment = config.resolve(from_table.config(path, "who", "y", [*SETTINGS, *overrides]))
    return from_table.choices(experiment, experiment.federation(None, 0))


@pytest.mark.parametrize(
    ("overrides", "model", "rounds"),
    [
        (["method=kin"], "mlp", 20),
        (["method=partial-pooling"], "linear", 20),
        (['method.name="private-kin"'], "linear", 20),
        (["method=personal-boosting"], "trees", 207),
        (["method=personal-boosting", "model.depth=2", "rounds=9"], "trees", 9),
        (["method=partial-pooling", "model=additive"], "additive", 20),
    ],
)
def test_a_method_has_the_model_that_suits_it_unless_one_is_named(tmp_path, overrides, model, rounds):
    path = write(tmp_path, rows({"B": 20, "A": 40}, yes_or_no))
    experiment = config.resolve(from_table.config(path, "who", "y", overrides))
    assert (experiment.table["model"]["name"], experiment.rounds.count) == (model, rounds)


def yes_or_no(i):
    return "yes" if i % 4 == 0 else "no"


def test_a_table_is_divided_by_owner_and_every_choice_is_said(tmp_path):
    said, doubts = chosen(write(tmp_path, rows({"B": 20, "A": 40}, yes_or_no)))
    assert said == {
        "clients": "2, named by `who`: 20 to 40 rows each, 60 in all",
        "target": "`y`: 2 classes, no (75 %) and yes (25 %)",
        "inputs": "2 columns (a, b), scaled to mean 0 and deviation 1 over all clients' training rows",
        "split": "42 for training, 6 for validation, 12 for the test: each client's rows at random, "
        "stratified by class",
        "model": "mlp: 2 in, 64 hidden, 2 out, 322 parameters",
        "training": "1 round of 2 epochs at each client, SGD at rate 0.1, batches of 8",
    }
    assert doubts == []


def test_sentences_follow_the_settings(tmp_path):
    path = write(tmp_path, rows({"A": 20, "B": 20}, lambda i: i % 5))
    said, _ = chosen(path)
    assert said["target"].endswith(
        "and 4 (20 %); to predict it as a number: federation.dataset.labels=false, or as a count: .counts=true"
    )
    said, _ = chosen(path, "federation.dataset.labels=false", "model.hidden=[3,2]", 'federation.dataset.ignore=["b"]')
    assert re.fullmatch(
        r"`y`: regression of a number of mean 2\S* and deviation 1.3\S*, scored by MAE in its own unit; it may be .*",
        said["target"],
    )
    assert said["model"] == "mlp: 1 in, 3, 2 hidden, 1 out, 17 parameters"
    assert said["inputs"].endswith("over all clients' training rows; left out: b")
    said, _ = chosen(path, "federation.dataset.scale=client", "federation.split.stratify=false")
    assert said["inputs"].endswith("(a, b), scaled to mean 0 and deviation 1 over each client's training rows")
    assert said["split"].endswith("each client's rows at random")


def test_windows_are_said_to_be_windows(tmp_path):
    series = [f"{who},{i},{np.sin(i + len(who)):.3f}" for who in ("A", "BB") for i in range(60)]
    path = write(tmp_path, series, head="who,when,y")
    said, _ = chosen(path, "federation.dataset.time=when", "federation.dataset.past=4")
    assert said["inputs"] == "the last 4 readings of `y`, to predict the next 1"
    assert said["clients"] == "2, named by `who`: 56 windows each, 112 in all"
    assert said["split"].endswith("each client's windows in order of `when`")


@pytest.mark.parametrize(
    ("sizes", "target", "told"),
    [
        ({"A": 20, "B": 9}, yes_or_no, "1 of 2 clients has fewer than 10 rows, too few to tell what they gain: B (9)"),
        ({"A": 50, "B": 20, "C": 20}, yes_or_no, "client 'A' has 56 % of all rows; a mean by size is mostly its"),
        ({"A": 20, "B": 20}, lambda i: "ill" if i == 0 or i > 17 else "well", "85 % of rows are 'well', so accuracy "),
        (
            {"A": 31, "B": 30},
            lambda i: "z" if i == 30 else yes_or_no(i),
            "few of the 2 clients have these classes: z",
        ),
    ],
)
def test_what_to_doubt_about_clients_and_classes(tmp_path, sizes, target, told):
    _, doubts = chosen(write(tmp_path, rows(sizes, target)))
    assert len(doubts) == 1
    assert doubts[0].startswith(told)


def test_what_to_doubt_about_columns(tmp_path):
    table = [f"{who},1,{700 + 100 * j + i},{yes_or_no(i)}" for j, who in enumerate("AB") for i in range(20)]
    with pytest.warns(UserWarning, match=r"'a' \(1\) is the same in all training rows"):
        _, doubts = chosen(write(tmp_path, table))
    assert [doubt.partition(";")[0] for doubt in doubts] == ["different in every row, as identifiers are: b"]
    numbered = [f"{who},{i % 7}.5,{40_000 * j + i},{yes_or_no(i)}" for j, who in enumerate("AB") for i in range(20)]
    _, doubts = chosen(write(tmp_path, numbered))  # and says nothing of B's unit
    assert [doubt.partition(";")[0] for doubt in doubts] == ["different in every row, as identifiers are: b"]
    table = [f"{who},{i % 7}.5,1.{i},{700 + 20 * j + i}" for j, who in enumerate("AB") for i in range(20)]
    _, doubts = chosen(write(tmp_path, table))
    assert doubts == ["`y` is different in every row, as identifiers are: is it what to predict?"]
    _, doubts = chosen(write(tmp_path, rows({"A": 20, "B": 20}, yes_or_no)), "federation.split.validation=0")
    assert doubts[0].startswith("there are no validation examples")


def test_clients_with_a_row_or_two_are_left_out_and_named(tmp_path):
    path = write(tmp_path, rows({"A": 20, "B": 20, "C": 1, "D": 2}, yes_or_no))
    with pytest.warns(UserWarning, match=r"2 of 4 clients have fewer than 3 rows and were left out: C \(1\), D \(2\)"):
        said, _ = chosen(path)
    assert said["clients"].startswith("2, ")


ENOUGH = {"A": 20, "B": 20}


@pytest.mark.parametrize(
    ("client", "target", "sizes", "of", "told"),
    [
        ("whom", "y", ENOUGH, yes_or_no, "t.csv has no column 'whom'; did you mean 'who'?"),
        ("who", "x", ENOUGH, yes_or_no, "t.csv has no column 'x'; known: a, b, who, y"),
        ("", "y", {"A": 9, "B": 9, "C": 9}, yes_or_no, "t.csv has who, a, b, y; --client who would fit"),
        ("", "", {"A": 9, "B": 9, "C": 9}, lambda i: "xyz"[i % 3], "(what to predict); t.csv has who, a, b, y"),
        ("who", "", ENOUGH, yes_or_no, "name the column for --target (what to predict); t.csv has who, a, b, y"),
        ("who", "y", {"A": 20}, yes_or_no, "'who' is 'A' in all rows, so there is one client"),
        ("who", "y", {"A": 20, "B": 1}, yes_or_no, "'who' has 2 different values, of which 1 has 3 rows or more"),
        ("who", "y", ENOUGH, lambda i: 1, "'y' is '1' in all rows, so there is nothing to learn"),
        ("who", "y", ENOUGH, lambda i: 1.5, "'y' is the same in all training rows, so there is nothing to learn"),
        ("who", "y", {"A": 26}, lambda i: 1, "nobody to learn from"),
    ],
)
def test_what_cannot_be_used_is_one_line_that_helps(tmp_path, monkeypatch, client, target, sizes, of, told):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, rows(sizes, of))
    with pytest.raises(UsageError, match=re.escape(told)):
        config.resolve(from_table.config("t.csv", client, target, SETTINGS)).federation(None, 0)


def test_a_table_with_a_column_for_each_client_is_refused_with_what_helps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, [f"2024-01-{day:02},{day},{day}.5" for day in range(1, 29)], head="day,north,south")
    with pytest.raises(UsageError, match=r"t\.csv has day, north, south; where each client is a column, docs/data\.md"):
        from_table.config("t.csv", "", "", SETTINGS)


def test_text_dates_and_holes_are_inputs_and_said(tmp_path):
    draw = np.random.default_rng(0)
    table = [
        f"{who},{i % 7 or ''},2024-01-{i % 28 + 1:02},{['pear', 'plum'][i % 2]},p{i}{who},{draw.integers(2)}"
        for who in "AB"
        for i in range(40)
    ]
    path = write(tmp_path, table, head="who,a,day,fruit,note,y")
    with pytest.warns(UserWarning, match=r"t\.csv: 'note' is different in every row, as identifiers are; left out of"):
        said, doubts = chosen(path)
    assert said["inputs"] == (
        "1 number (a), scaled to mean 0 and deviation 1 over all clients' training rows; "
        "1 of text, an input for each category (fruit); 1 of dates, by the calendar (day)"
    )
    assert said["model"].startswith("mlp: 14 in")  # a, whether it is missing, ten of the calendar, two of fruit
    assert doubts == []
    said, _ = chosen(path, 'federation.dataset.ignore=["day", "fruit", "note"]')
    assert said["inputs"].endswith("left out: day, fruit, note")
    said, _ = chosen(path, 'federation.dataset.ignore=["fruit", "note"]', "federation.dataset.time=day")
    assert "in order of `day`" in said["split"]


def test_what_to_doubt_about_text(tmp_path):
    table = [f"{who},{i % 7},c{i % 300},only {i // 2},{i % 2}" for who in "AB" for i in range(600)]
    path = write(tmp_path, table, head="who,a,many,rare,y")
    _, doubts = chosen(path, "federation.dataset.categories=3")
    assert re.match(r"`many`: 0|`many`: left out: none of its \d+ categories is in enough training rows", doubts[0])
    assert re.match(r"`rare`: left out: none of its \d+ categories is in enough training rows; --ignore", doubts[1])


@pytest.mark.parametrize("times", [1000, 0.001])
@pytest.mark.parametrize("column", ["x", "y"])
def test_a_client_that_may_have_another_unit_is_named(tmp_path, column, times):
    draw = np.random.default_rng(0)
    table = []
    for who in "ABC":
        for one in 5 + draw.random(20):
            x, y = (
                value * times if who == "B" and name == column else value
                for name, value in (("x", one), ("y", 2 * one))
            )
            table.append(f"{who},{x:.6g},{y:.6g}")
    _, doubts = chosen(write(tmp_path, table, head="who,x,y"))
    assert len(doubts) == 1
    told = rf"`{column}` may be in another unit than at most clients: B \(([\d,.]+) times\); write all in one"
    assert float(re.fullmatch(told, doubts[0])[1].replace(",", "")) == pytest.approx(times, rel=0.1)


def test_zeros_of_most_clients_are_not_taken_for_another_unit(tmp_path):
    """Scaled and read back, a zero is some 1e-8."""
    table = [f"{who},{int(i % 3 < (who in 'BD'))},{i % 7},{i % 2}" for who in "ABCDE" for i in range(41)]
    _, doubts = chosen(write(tmp_path, table, head="who,flag,x,y"))
    assert not [one for one in doubts if "unit" in one]


def test_a_large_client_of_many_is_not_taken_for_another_unit(tmp_path):
    """Sizes go from 1 to 32,768 by factors of two: the largest is 171 times the median, and twice the next."""
    table = [f"{who},{2**who + i % 2},{i % 7},{i % 2}" for who in range(16) for i in range(40)]
    _, doubts = chosen(write(tmp_path, table, head="who,size,x,y"))
    assert not [line for line in doubts if "unit" in line]


def test_a_clients_mean_near_zero_is_not_taken_for_another_unit(tmp_path):
    """Centred means of schools have both signs, so one of them may be as near to zero as it likes."""
    centred = {"A": 1.3, "B": -0.9, "C": 0.002, "D": 0.7, "E": -1.1}
    table = [f"{who},{mean},{i % 7},{i % 2}" for who, mean in centred.items() for i in range(40)]
    _, doubts = chosen(write(tmp_path, table, head="who,centred,x,y"))
    assert not [line for line in doubts if "unit" in line]


def test_a_column_that_is_empty_at_a_client_is_named(tmp_path):
    fruits = ("apple", "pear")
    table = [
        f"{who},{'' if who == 'B' or i == 3 else i % 7},{'' if who == 'C' else fruits[i % 2]},{i % 2}"
        for who in "ABC"
        for i in range(40)
    ]
    _, doubts = chosen(write(tmp_path, table, head="who,x,fruit,y"))
    assert [one for one in doubts if "no value" in one] == [
        "`x` has no value in any row of B: it is filled in as missing cells are",
        "`fruit` has no value in any row of C: it is filled in as missing cells are",
    ]


def test_a_series_that_may_be_in_another_unit_is_named(tmp_path):
    table = [f"{who},{i},{(20 + i % 7) * (1000 if who == 'B' else 1)}" for who in "ABC" for i in range(60)]
    path = write(tmp_path, table, head="who,t,y")
    settings = [f"federation.dataset.{one}" for one in ("time=t", "past=3", "labels=false")]
    _, doubts = chosen(path, *settings)
    assert [one for one in doubts if "unit" in one] == [
        "`y` may be in another unit than at most clients: B (1,000 times); write all in one"
    ]


def test_clients_that_train_on_one_class_are_named(tmp_path):
    path = write(tmp_path, rows({"A": 40}, yes_or_no) + rows({"B": 20, "C": 20}, lambda i: "no"))
    _, doubts = chosen(path)
    told = (
        "2 of 3 clients have training rows of one class alone, so their own models can predict no other: B (no), C (no)"
    )
    assert told in doubts


def test_a_target_that_names_rows_is_refused(tmp_path):
    path = write(tmp_path, rows({"A": 15, "B": 15}, lambda i: f"p{i}{np.random.default_rng().integers(1 << 40)}"))
    with pytest.raises(
        UsageError, match="'y' has 30 different labels in 30 rows, so it names rows rather than classes"
    ):
        chosen(path)


def test_another_file_than_the_named_one_is_refused(tmp_path):
    path = write(tmp_path, rows(ENOUGH, yes_or_no))
    with pytest.raises(UsageError, match=r"the data are .*t\.csv; leave federation.dataset.name and"):
        chosen(path, "federation.dataset.path=other.csv")


def readings(folder):
    """Four series of 120 hourly readings."""
    lines = [
        f"{who},2025-01-{1 + i // 24:02} {i % 24:02}:00,{round(10 + 3 * np.sin(i / 4 + j), 2)}"
        for j, who in enumerate("abcd")
        for i in range(120)
    ]
    path = folder / "readings.csv"
    path.write_text("\n".join(["who,when,level", *lines]) + "\n")
    return path


SERIES = ["time=when", "past=6", "horizon=2", "quantiles=[0.1,0.5,0.9]"]


@pytest.mark.parametrize(
    ("target", "settings", "metric", "others", "said"),
    [
        ("y", [], "mae", {"rmse", "mse", "r2"}, "`y`: regression of a number of mean"),
        ("y", ["counts=true"], "deviance", {"mae", "rmse"}, "`y`: counts of mean"),
        ("y,z", [], "nmae", {"r2", "mae@y", "rmse@y", "r2@y", "mae@z", "rmse@z", "r2@z"}, "`y`, `z`: regression of 2"),
        (
            "level",
            SERIES,
            "pinball",
            {"coverage", "width", "mae", "rmse", "mape", "nmse"},
            "their quantiles 0.1, 0.5, 0.",
        ),
    ],
)
def test_every_kind_of_number_trains_alike_with_every_executor(tmp_path, target, settings, metric, others, said):
    draw = np.random.default_rng(0)
    lines = [f"{who},{x:.2f},{draw.poisson(30 + 9 * x)},{5 * x:.1f}" for who in "abcd" for x in draw.normal(size=25)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["who,x,y,z", *lines]) + "\n")
    path = readings(tmp_path) if target == "level" else path
    settings = [f"federation.dataset.{one}" for one in settings] + [
        "rounds=3",
        "method=fedaghn",
        "training.optimiser.lr=0.01",
    ]
    experiment = config.resolve(from_table.config(path, "who", target, settings))
    federation = experiment.federation(None, 0)
    told = from_table.choices(experiment, federation).sentences["target"]
    assert said in told
    runs = []
    for executor in ("loop", "vmap", "fused"):
        module = experiment.module(federation, 0)
        how = {"training": experiment.training, "execution": Execution(executor)}
        runs.append(fit(experiment.method, federation, module, rounds=experiment.rounds, **how))
    summaries = [run.summary for run in runs]
    assert summaries[0].metric.name == metric
    for summary in summaries:
        assert others <= summary.scores[summary.selection.chosen].keys()
        for model, scores in summary.scores.items():
            assert scores == pytest.approx(summaries[0].scores[model], rel=1e-3, abs=1e-4)
    kind = {"deviance": "counts", "pinball": "quantiles"}.get(metric, "regression")
    assert parse_summary(to_json(summaries[0].to_dict()), "here").data.task["name"] == kind


def test_what_may_be_a_count_is_told_so(tmp_path):
    points, prices = [0, 2, 4, 6, 8] * 5, range(100_000, 2_600_000, 99_999)  # in steps; far apart
    counts = {range(25): True, range(1000, 1025): False, range(-3, 22): False, tuple(points): False, prices: False}
    many = (1, 2, 3, 41, 5, 60, 7, 3, 2, 1, 29, 35)  # the variance is 24 times the mean
    counts |= {(*many, *[0] * 4): True, (*many, *many): False, (*[0] * 4, *(50 * n + 1 for n in many)): False}
    for values, may in counts.items():
        lines = [f"{who},{i % 3},1,{value}" for who in "ab" for i, value in enumerate(values)]
        path = write(tmp_path, lines)
        assert ("it may be a count: federation.dataset.counts=true" in chosen(path)[0]["target"]) == may


def test_counts_and_quantiles_that_cannot_be_are_refused_in_one_line(tmp_path):
    path = write(
        tmp_path, [f"{who},{i % 3},1,{value}" for who in "ab" for i, value in enumerate((3, 1.5, 2, 4, 6, -2))]
    )
    with pytest.raises(UsageError, match=r"t\.csv, line 3, column 'y': 1\.5 is not a count, a whole number from 0"):
        chosen(path, "federation.dataset.counts=true")
    for settings, why in (
        (["counts=true", "labels=true"], "counts are one number for each row, so they cannot go with labels"),
        (["quantiles=[0.5]"], "quantiles is for windows of series; set past too"),
        (["time=a", "past=2", "quantiles=[0.9,0.1]"], "in increasing order, such as .*; got .0.9, 0.1."),
        (["time=a", "past=2", "quantiles=[0,0.1]"], "above 0 and below 1"),
    ):
        with pytest.raises(UsageError, match=why):
            chosen(path, *(f"federation.dataset.{one}" for one in settings))


def test_r2_is_not_defined_where_a_clients_test_targets_are_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"{who},{i % 7}.25,1,{5.5 if who == 'a' else i % 5 + 0.5}" for who in "abc" for i in range(30)]
    assert (
        main(["run", str(write(tmp_path, lines)), "--client", "who", "--target", "y", "rounds=2", "--method", "local"])
        == 0
    )
    said = " ".join("".join(capsys.readouterr()).split())
    assert "the others are tested on one row or equal targets, so it is not defined" in said
    assert not re.search(r"\binf\b", said)
