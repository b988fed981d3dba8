"""kinfed papers analyse as a person uses it."""

import csv
import json

import pytest

from kinfed.cli import main
from kinfed.cli.findings import _cells

SMALL = ["rounds=2", "federation.clients=6", "federation.partition.groups=2"]


def analyse(capsys, *arguments):
    """Exit code, standard output, standard error."""
    code = main(["papers", "analyse", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_table_and_pictures_are_written_shown_and_told_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["curves", "local", *SMALL, "analysis.methods=['local','fedavg-ft']", "--out", str(tmp_path)]
    code, out, err = analyse(capsys, *asked, "--json")
    assert code == 0
    found = json.loads(out)
    assert [row["method"] for row in found["rows"]] == ["local", "fedavg-ft"]
    assert found["pictures"] == [str(tmp_path / "curves.png")]
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [list(row) for row in rows] == [list(row) for row in found["rows"]]
    for written, told in zip(rows, found["rows"], strict=True):
        assert float(written["test accuracy (%)"]) == pytest.approx(told["test accuracy (%)"])
        assert (written["over seeds"], told["over seeds"]) == ("", None)
        assert f"{told['test accuracy (%)']:.2f}" in err  # columns line up: as many decimals in every row
    assert "seeds" not in err  # an empty column is not shown
    assert "fedavg-ft" in err
    assert "…" not in err
    assert max(map(len, err.splitlines()[:-1])) <= 80

    # What is finished is not done again; another experiment does not go into the same folder.
    before = (tmp_path / "runs" / "local" / "history.csv").stat().st_mtime_ns
    assert analyse(capsys, *asked, "--quiet") == (0, "", "")
    assert (tmp_path / "runs" / "local" / "history.csv").stat().st_mtime_ns == before
    code, _, err = analyse(capsys, *asked[:2], "rounds=3", *asked[3:])
    assert code == 2
    assert "holds another experiment" in err


def test_a_warning_that_comes_every_round_is_told_once(tmp_path, capsys):
    overrides = ("method.alpha=5000", "analysis.methods=['fedamp']")
    code, _, err = analyse(capsys, "curves", "fedamp", *SMALL, *overrides, "--out", str(tmp_path))
    assert code == 0
    assert err.count("kinfed: warning: kernel: a client resembles so many others") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["map", "local"], "analysis needs a value for x, xs"),
        (["map", "local", "analysis.x=rounds", "analysis.xs=3"], "analysis.xs must be a list; got 3"),
        (["curves", "local", "analysis.method=['local']"], "unknown key 'analysis.method'; did you mean 'methods'?"),
        (["curves", "local", "analysis.methods=[]"], "there is nothing to run: a list in the analysis's settings is"),
        (["curves", "local", "analysis.methods=['locl']"], "did you mean 'local'?"),
        (["weights", "local", "analysis.partitions=['iid','path']"], "federation.partition: there is no 'path'"),
        (["layers", "fedaghn", "analysis.rounds=1"], "how many rounds the table shows, at least 2; got 1"),
        (["controls", "nowhere.toml"], "cannot read nowhere.toml"),
    ],
)
def test_wrong_requests_end_in_one_line_and_leave_nothing(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = analyse(capsys, *arguments)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert said in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_number_that_rounds_to_zero_has_no_sign():
    assert _cells([-1e-9, 0.5]) == ["0.0000", "0.5000"]
