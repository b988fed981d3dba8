"""kinfed sweep as a person uses it."""

import argparse
import csv
import json
from pathlib import Path

import pytest

from kinfed.cli import main
from kinfed.cli.console import Literal
from kinfed.cli.findings import tell
from kinfed.runs.run_folder import RunFolder
from kinfed.search.study import Finding

SMALL = ["rounds=2", "federation.clients=4", "federation.partition.groups=2", "model=linear"]


def sweep(capsys, *arguments):
    """Exit code, standard output, standard error."""
    code = main(["sweep", *arguments, "how.executor=vmap"])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_sweep_ends_with_one_table_and_does_nothing_twice(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "a"
    grid = ["training.optimiser.lr=0.01,0.1", "seed=0..1", "--out", str(out)]
    code, told, err = sweep(capsys, "local", *SMALL, *grid, "--json")
    assert code == 0
    rows = json.loads(told)["rows"]
    assert [(row["method"], row["winner"]) for row in rows] == [("local", "*"), ("local", None)]
    assert {row["lr"] for row in rows} == {"0.01", "0.1"}
    assert "local: 2 settings x 2 seeds = 4 runs, 8 training rounds" in err
    assert "EQUAL" not in err
    assert max(map(len, err.splitlines()[:-1])) <= 80
    for row in rows:
        each = [
            RunFolder(out / "runs" / row["method"] / f"training.optimiser.lr={row['lr']}").of_seed(seed).read_summary()
            for seed in (0, 1)
        ]
        tests, validations = ([100 * one.scores[row["model"]][key] for one in each] for key in ("mean", "validation"))
        assert row["test accuracy (%)"] == pytest.approx(sum(tests) / 2)
        assert row["validation accuracy (%)"] == pytest.approx(sum(validations) / 2)
        assert row["over seeds"] == pytest.approx(abs(tests[0] - tests[1]) / 2**0.5)
    assert rows[0]["validation accuracy (%)"] >= rows[1]["validation accuracy (%)"]
    with (out / "table.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["lr"] for row in written] == [row["lr"] for row in rows]
    page = (out / "table.md").read_text().splitlines()
    assert page[0] == "2 settings, means over seeds 0, 1"
    assert page[2].startswith("| method | winner | lr | model | validation accuracy (%) |")
    assert page[4].startswith(f"| local | * | {rows[0]['lr']} |")
    assert len({line.count("|") for line in page[2:6]}) == 1

    # Another value: only what is missing is run.
    before = {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")}
    grid[0] = "training.optimiser.lr=0.01,0.1,0.2"
    assert sweep(capsys, "local", *SMALL, *grid, "--quiet") == (0, "", "")
    after = {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")}
    assert len(before) == 4
    assert len(after) == 6
    assert before.items() <= after.items()


def test_the_winners_of_several_methods_are_compared_pair_by_pair(tmp_path, capsys):
    grid = ["seed=0..1", "--method", "local,fedavg", "--out", str(tmp_path)]
    code, _, err = sweep(capsys, "local", *SMALL, "training.optimiser.lr=0.01,0.1", *grid)
    assert code == 0
    assert "Paired differences in points (above zero is better)" in err
    assert "| fedavg | local | " in (tmp_path / "winners.md").read_text()


@pytest.mark.parametrize(("terminal", "numbered"), [("80", 2), ("200", 0)])
def test_columns_that_do_not_fit_stand_below_with_every_number_whole(terminal, numbered, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", terminal)
    values = {"method": "fedavg-ft", "lr": "0.001", "batch": "16", "sharpness": "0.025", "hidden": "[64,32]"}
    scores = {"validation accuracy (%)": 12.34, "test accuracy (%)": 56.78, "over clients": 98.7, "over seeds": 10.5}
    found = Finding("a sweep over four settings", [values | {"model": "generated"} | scores] * 11, [], [])
    tell(found, Path("o"), argparse.Namespace(json=False, quiet=False), Literal())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(terminal)
    for value in [*values.values(), "12.34", "56.78", "98.70", "10.50"]:
        assert sum(value in line.split() for line in lines) == 11
    assert sum(line.split()[0] == "11" for line in lines) == numbered  # so that rows of two tables are found


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_failed_run_is_one_line_and_the_others_go_on(tmp_path, capsys, jobs):
    asked = ["local", *SMALL, "training.optimiser.lr=1e38,0.1,3e38", "--out", str(tmp_path), "--jobs", jobs]
    code, _, err = sweep(capsys, *asked)
    assert code == 1
    lines = [line for line in err.splitlines() if line.startswith("kinfed: ")]
    assert len(lines) == 2  # both fail for the same reason
    assert "failed: round 1: training diverged to NaN or infinity at clients 0, 1, 2, 3; lower the" in lines[0]
    assert lines[1] == f"kinfed: 2 of 3 runs failed; run the same command with --out {tmp_path} to try these again"
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["lr"], row["winner"], row["failed"]) for row in rows] == [
        ("0.1", "*", ""),
        ("1e38", "", "1 of 1"),
        ("3e38", "", "1 of 1"),
    ]


def test_where_every_run_fails_there_is_no_table(tmp_path, capsys):
    code, out, err = sweep(capsys, "local", *SMALL[:1], "federation.clients=1500,1600", "--out", str(tmp_path))
    assert (code, out) == (1, "")
    assert "kinfed: 2 of 2 runs failed" in err.splitlines()[-1]
    assert not list(tmp_path.glob("table*"))


def test_ctrl_c_says_how_to_go_on(tmp_path, capsys, second_run_interrupted):
    asked = ["local", *SMALL, "training.batch=8,16", "--out", str(tmp_path)]
    code, _, err = sweep(capsys, *asked)
    assert code == 130
    assert err.splitlines()[-1] == f"kinfed: interrupted; run the same command with --out {tmp_path} to resume"
    assert not (tmp_path / "table.csv").exists()
    before = (second_run_interrupted[0] / "summary.json").stat().st_mtime_ns
    assert sweep(capsys, *asked)[0] == 0
    assert (second_run_interrupted[0] / "summary.json").stat().st_mtime_ns == before
    assert (tmp_path / "table.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["local", "rounds"], "'rounds' is not a setting"),
        (["local", "rounds=1,2", "--jobs", "0"], "jobs counts parallel runs, so it must be at least 1; got 0"),
        (["local", "--method", "local,"], "--method: there is no ''"),
        (["local", "grid=paper"], "no grid is printed for local; there is one for fedprox, ditto"),
        (["nowhere.toml", "rounds=1,2"], "cannot read nowhere.toml"),
    ],
)
def test_wrong_requests_end_in_one_line_and_leave_nothing(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = sweep(capsys, *arguments, "--quiet")
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert said in err
    assert not list(tmp_path.iterdir())


def test_a_sweep_over_your_own_table_leaves_the_settings_of_digits(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    path.write_text("who,x,z,label\n" + "".join(f"{i % 3},{i % 7},{i % 5},{i % 2}\n" for i in range(120)))
    data = {"name": "csv", "path": path, "client": "who", "target": "label"}
    own = [f"federation.dataset.{key}={value}" for key, value in data.items()]
    out = tmp_path / "a"
    code, _, err = sweep(capsys, "local", *own, "rounds=1", "training.epochs=1,2", "--out", str(out), "--quiet")
    assert (code, err) == (0, "")
    run = RunFolder(out / "runs" / "local" / "training.epochs=1").of_seed(0)
    assert run.read_summary().data.clients == 3
    assert 'name = "natural"' in run.config.read_text()  # digits are dealt by rotations, to 20 clients
