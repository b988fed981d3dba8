"""Clients that several columns name together: whose rows are whose, and at which doors."""

import csv
import io
import json
import random

import numpy as np
import polars
import pytest
import torch

import kinfed
from kinfed import UsageError
from kinfed.cli.program import execute
from kinfed.data.tables.table_reader import TableReader
from kinfed.data.tables.words import join_names, split_names
from kinfed.runs.run import Run
from kinfed.serving import joining_clients, requests

CLASSES = [(school, form) for school in ("Ulm", "Aalen", "Bonn, West") for form in ("1", "2")]
LINES = ["Ulm,1", "Ulm,2", "Aalen,1", "Aalen,2", '"Bonn, West",1', '"Bonn, West",2']


def pupils(classes=CLASSES, rows=30):
    """A table of pupils of these (school, class), whose score has another slope in each class."""
    draw = np.random.default_rng(0)
    cells = []
    for place, (school, form) in enumerate(classes):
        for hours in draw.uniform(0, 5, rows):
            cells.append((school, form, round(hours, 2), round((place + 1) * hours + 0.1 * draw.normal(), 3)))
    return polars.DataFrame(cells, ["school", "class", "hours", "score"], orient="row")


def named(table):
    """The same table with one column in place of two, each cell the line of CSV that Python's own writer makes."""
    lines = []
    for cells in table.select("school", "class").rows():
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="").writerow(cells)
        lines.append(buffer.getvalue())
    return table.drop("school", "class").with_columns(polars.Series("pupils_of", lines))


def test_names_are_read_back_whatever_is_in_them():
    draw = random.Random(0)
    for _ in range(2000):
        names = ["".join(draw.choices("ab,\"\n\r '\t;", k=draw.randint(0, 4))) for _ in range(draw.randint(2, 3))]
        assert split_names(join_names(names)) == names
    assert split_names("school, class") == ["school", "class"]
    assert split_names('5" pipe') == ['5" pipe']
    assert split_names('"open') == ['"open']  # no line of CSV, so one name


def test_two_columns_name_the_clients_that_one_column_of_lines_does():
    table = pupils()
    joined = kinfed.from_frame(table, client=["school", "class"], target="score")
    lines = kinfed.from_frame(named(table), client="pupils_of", target="score")
    assert set(joined.names) == set(LINES)
    assert joined.names == lines.names
    assert joined.columns.names == ["hours"]  # what names the clients is no input
    torch.testing.assert_close(joined.x, lines.x, rtol=0, atol=0)
    assert joined.columns.dropped == ("school", "class")
    again = kinfed.from_frame(table, client="school,class", target="score")
    assert again.names == joined.names


def test_different_cells_never_become_one_client():
    table = pupils([("a,b", "c"), ("a", "b,c"), ('a"', "b"), ("a", '"b')], 5)
    federation = kinfed.from_frame(table, client=["school", "class"], target="score")
    assert set(federation.names) == {'"a,b",c', 'a,"b,c"', '"a""",b', 'a,"""b"'}


def test_numbers_in_cells_are_named_as_in_a_column_alone():
    table = pupils([("Ulm", "1"), ("Ulm", "2")], 5).with_columns(polars.col("class").cast(float))
    assert kinfed.from_frame(table, client=["class", "school"], target="score").names == ("1,Ulm", "2,Ulm")


def test_a_row_that_lacks_a_part_of_its_name_is_left_out():
    table = pupils()
    table = table.with_columns(polars.Series("class", [*table["class"][:3], None, *table["class"][4:]]))
    with pytest.warns(
        UserWarning, match=r"1 of 180 rows has no school,class, left out \(the first: the frame, row 4\)"
    ):
        federation = kinfed.from_frame(table, client=["school", "class"], target="score")
    assert len(federation.x) == 179


@pytest.mark.parametrize(
    ("client", "more", "said"),
    [
        (["school", "clas"], {}, "the frame has no column 'clas'; did you mean 'class'?"),
        ("school,clas", {}, "the frame has no column 'clas'; did you mean 'class'?"),
        (["school", "school"], {}, "the frame: column 'school' is named twice"),
        ([], {}, "the frame has no column ''"),
        (["school", "class"], {"school,class": 1}, "'school,class' is a column, and also lists 2 others"),
    ],
)
def test_columns_that_name_no_clients_are_refused(client, more, said):
    table = pupils().with_columns(polars.lit(value).alias(name) for name, value in more.items())
    with pytest.raises(UsageError) as problem:
        kinfed.from_frame(table, client=client, target="score")
    assert said in str(problem.value)


def test_a_column_that_names_clients_has_no_other_role():
    with pytest.raises(UsageError, match="column 'class' is the client, so it cannot be the weight too"):
        TableReader(client=["school", "class"], target="score", weight="class")


def test_a_column_with_a_comma_in_its_name_is_one_column():
    table = named(pupils()).rename({"pupils_of": "school,class"})
    federation = kinfed.from_frame(table, client="school,class", target="score")
    assert set(federation.names) == set(LINES)


def test_series_of_clients_that_two_columns_name():
    table = pupils(rows=40).with_columns(polars.Series("week", [*range(40)] * 6)).drop("hours")
    how = {"target": "score", "time": "week", "past": 3}
    joined = kinfed.from_frame(table, client=["school", "class"], **how)
    lines = kinfed.from_frame(named(table), client="pupils_of", **how)
    assert joined.names == lines.names
    torch.testing.assert_close(joined.x, lines.x, rtol=0, atol=0)


def test_one_command_predictions_and_newcomers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = pupils()
    table.write_csv("pupils.csv")
    how = ["--method", "partial-pooling", "--beside", "none", "--quiet"]
    execute(["run", "pupils.csv", "--client", "school,class", "--target", "score", *how, "--out", "joined"])
    named(table).write_csv("named.csv")
    execute(["run", "named.csv", "--client", "pupils_of", "--target", "score", *how, "--out", "named"])
    joined = Run.open("joined").predictor()
    answers = joined(table)
    assert answers.equals(Run.open("named").predictor()(named(table)))
    assert answers["client"].unique(maintain_order=True).to_list() == LINES
    assert Run.open("joined").predictor('"Bonn, West",2')(table[150:]).equals(answers[150:])  # the last class alone
    request = json.dumps({"rows": table[:2].to_dicts()}).encode()
    assert requests.answer(joined, request, requests.JSON)[0].equals(answers[:2])
    with pytest.raises(UsageError, match="the frame has no column 'class'; known: hours, school, score"):
        joined(table.drop("class"))
    config = (tmp_path / "joined" / "config.toml").read_text()
    assert 'client = "school,class"' in config
    (tmp_path / "listed.toml").write_text(config.replace('"school,class"', '["school", "class"]'))
    execute(["run", "listed.toml", "--beside", "none", "--quiet", "--out", "listed"])
    assert Run.open("listed").predictor()(table).equals(answers)

    newcomers = pupils([("Köln, Süd", "1"), ("Ulm", "3")])
    newcomers.write_csv("new.csv")
    joining = joining_clients.of_table(Run.open("joined"), tmp_path / "new.csv", None)
    assert [newcomer.name for newcomer in joining] == ['"Köln, Süd",1', "Ulm,3"]
    wanted = ["--client", join_names(['"Köln, Süd",1']), "--shots", "10", "--json", "--quiet"]
    execute(["onboard", "joined", "--data", "new.csv", *wanted])
    assert [outcome["client"] for outcome in json.loads(capsys.readouterr().out)] == ['"Köln, Süd",1']


def test_the_choices_show_how_a_client_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pupils().write_csv("pupils.csv")
    execute(["list", "pupils.csv", "--client", "school,class", "--target", "score"])
    assert '6, named by `school,class`, such as `"Bonn, West",1`: 30 rows each' in capsys.readouterr().out
