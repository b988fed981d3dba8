"""How a published table is written: the same numbers in every format, with what must be said of them."""

import csv
import io

import pytest
from rich.console import Console

from kinfed_papers.published_table import Column, Number, Protocol, Row
from kinfed_papers.reproduction import Line, Reproduction
from kinfed_papers.sheet import latex, markdown, sheet, table_csv, terminal

ROWS = {
    "local": Row("local", "Local_1", note="alone"),
    "new": Row("new", "New", changes={"method": "local"}),
    "newer": Row("newer", "New", changes={"method": "local"}),
}
COLUMN = Column("digits/iid", "Digits", "IID & more")
EXPERIMENT = {"rounds": 12, "model": "linear", "federation": {"dataset": "digits", "clients": 4, "partition": "iid"}}


def made(tmp_path, spread="seeds", scale=1.0):
    numbers = {("Digits", "IID & more", name, "MAE"): Number(50.0, 2.5, "") for name in ("Local_1", "New")}
    columns = {COLUMN.name: COLUMN}
    table = Protocol("made.table", "Title", "Source", 2, spread, ROWS, columns, ["A note."], EXPERIMENT, numbers)
    return Reproduction(table, tmp_path, None, scale=scale)


LINES = [
    Line(
        COLUMN,
        ROWS["local"],
        "MAE",
        Number(50, 2.5, "misprinted"),
        {0: 40.0, 1: 44.0},
        3.0,
        ("subset", "scaled 0.2"),
        "",
    ),
    Line(COLUMN, ROWS["local"], "RMSE", None, {0: 1.0}, None, (), "1 of 2 seeds"),
    Line(COLUMN, ROWS["new"], "MAE", Number(50, None, ""), {}, None, (), "failed: no luck"),
    Line(COLUMN, ROWS["newer"], "MAE", Number(50, None, ""), {}, None, (), "not run"),
]


def test_cells_notes_and_legend(tmp_path):
    shown = sheet(made(tmp_path, scale=0.2), LINES)
    assert shown.groups == [
        (
            "Digits, IID & more: MAE (digits/iid)",
            [
                ("Local_1", "50.00 ± 2.50", "42.00 ± 2.83", "1, 1 of 1", "subset, scaled 0.2, [1], [2]"),
                ("New (new)", "50.00", "", "", "failed, [3]"),
                ("New (newer)", "50.00", "", "", "not run"),
            ],
            "1 of 2 printed rows; not run: New; best in the paper: all level (50.00); best here: Local_1 (42.00).",
        ),
        (
            "Digits, IID & more: RMSE (digits/iid)",
            [("Local_1", "", "1.00", "", "1 of 2 seeds, [1]")],
            "not printed; best here: Local_1 (1.00).",
        ),
    ]
    assert shown.headings == ("method", "paper", "measured", "rank, in the paper", "remarks")
    assert sheet(made(tmp_path), LINES).groups[0].rows[0][3] == "-8.00"
    assert sheet(made(tmp_path), LINES).headings[3] == "difference"
    assert shown.legend[0] == "± is a standard deviation over seeds. Rank: among the rows that have both numbers."
    assert shown.legend[1].startswith("subset: ")
    assert shown.legend[2].startswith("scaled 0.2: rounds x 0.2, rounded up, at least 5; ")
    assert shown.legend[3:] == ["[1] alone.", "[2] misprinted.", "[3] no luck."]
    assert shown.protocol[-1] == "A note."
    assert shown.protocol[0].startswith("4 clients, all in a round; 5 rounds of 2 epochs, batch 8, sgd (")


def test_one_method_has_one_table_with_a_row_for_each_figure(tmp_path):
    shown = sheet(made(tmp_path), LINES[:2])
    assert shown.headings[0] == "figure"
    assert [(group.heading, [cells[:3] for cells in group.rows]) for group in shown.groups] == [
        (
            "Local_1",
            [
                ("Digits, IID & more: MAE (digits/iid)", "50.00 ± 2.50", "42.00 ± 2.83"),
                ("Digits, IID & more: RMSE (digits/iid)", "", "1.00"),
            ],
        )
    ]


def test_a_spread_over_clients_is_told(tmp_path):
    assert "over clients in the paper, over seeds here" in sheet(made(tmp_path, "clients"), LINES).legend[0]


def test_numbers_are_whole_in_csv():
    found = list(csv.DictReader(io.StringIO(table_csv(LINES))))
    asked = ("paper", "paper_std", "measured", "over_clients", "difference", "seeds")
    assert {key: found[0][key] for key in asked} == {
        "paper": "50",
        "paper_std": "2.5",
        "measured": "42",
        "over_clients": "3",
        "difference": "-8",
        "seeds": "2",
    }
    assert float(found[0]["over_seeds"]) == pytest.approx(8**0.5, rel=1e-4)
    assert found[0]["flags"] == "subset; scaled 0.2"
    assert (found[2]["measured"], found[2]["status"]) == ("", "failed: no luck")


def test_markdown_and_latex_are_well_formed(tmp_path):
    shown = sheet(made(tmp_path), LINES)
    page = markdown(shown, "kinfed papers run made.table")
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {6}
    assert "```console\n$ kinfed papers run made.table\n```" in page
    tex = latex(shown, "kinfed papers run made.table").splitlines()
    body = [line for line in tex if line.endswith(r"\\") and "multicolumn" not in line]
    assert {line.count("&") - line.count(r"\&") for line in body} == {4}
    assert r"Local\_1 & 50.00 $\pm$ 2.50 & 42.00 $\pm$ 2.83 & -8.00 & subset, scaled 0.2, [1], [2] \\" in tex
    assert r"\multicolumn{5}{l}{Digits, IID \& more: MAE (digits/iid)} \\" in tex


def test_the_terminal_shows_it_in_80_characters(tmp_path):
    console = Console(width=80, record=True, file=io.StringIO())
    long = Row("new", "A method with as many words to its name as an ablation has")
    for part in terminal(sheet(made(tmp_path), [*LINES, LINES[0]._replace(row=long)])):
        console.print(part)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert "Digits, IID & more: MAE (digits/iid)" in lines
    rows = [line for line in lines if "50.00 ± 2.50  42.00 ± 2.83       -8.00  subset, scaled" in line]
    assert [row.partition("  ")[0] for row in rows] == ["Local_1", "A method with as"]
    assert "…" not in "".join(lines)
