"""kinfed run, list and choose on a table of one's own, with no config."""

import json
from pathlib import Path

import numpy as np
import polars
import pytest

from kinfed.cli import main
from kinfed.data.tables import open_table, table_reader
from kinfed.runs.config import experiment

COLUMNS = ["--client", "shop", "--target", "buys"]


@pytest.fixture
def shops(tmp_path, monkeypatch):
    """Four shops in two groups whose customers are opposite, in the working directory."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    rows = ["shop,price,age,note,buys"]
    for shop in range(4):
        for price, age in draw.normal(size=(30, 2)):
            rows.append(f"S{shop},{price:.3f},{age:.3f},n,{'yes' if price * (-1) ** shop > 0 else 'no'}")
    (tmp_path / "shops.csv").write_text("\n".join(rows))
    return tmp_path


def kinfed(capsys, *arguments):
    code = main([*arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_table_trains_with_no_config_and_its_config_repeats_it(shops, capsys):
    own = ["run", "shops.csv", *COLUMNS, "--ignore", "note", "--method", "fedavg", "rounds=2", "--out", "a"]
    code, _, err = kinfed(capsys, *own)
    assert code == 0
    assert "target    `buys`: 2 classes, " in err
    assert "left out: note" in " ".join(err.split())
    assert err.endswith("repeat it with: kinfed run a/config.toml --out DIR\n")
    assert kinfed(capsys, "run", "a/config.toml", "--out", "b")[0] == 0
    for name in ("models.safetensors", "history.csv", "config.toml"):
        assert (shops / "a" / name).read_bytes() == (shops / "b" / name).read_bytes()


def test_parquet_alike(shops, capsys):
    polars.read_csv("shops.csv").write_parquet("shops.parquet")
    for suffix in ("csv", "parquet"):
        own = [f"shops.{suffix}", *COLUMNS, "--ignore", "note", "--method", "local", "rounds=1", "--quiet"]
        assert kinfed(capsys, "run", *own, "--out", suffix)[0] == 0
    files = [(shops / suffix / "models.safetensors").read_bytes() for suffix in ("csv", "parquet")]
    assert files[0] == files[1]


@pytest.fixture
def work(monkeypatch):
    """How often a file is read, and a federation made of it."""
    counts = dict.fromkeys(("read", "rows", "divide"), 0)

    def counted(name, place, attribute):
        real = getattr(place, attribute)

        def call(*given, **named):
            counts[name] += 1
            return real(*given, **named)

        monkeypatch.setattr(place, attribute, call)

    counted("read", open_table, "_csv")
    counted("rows", table_reader, "_read_rows")
    counted("divide", experiment, "divide")
    return counts


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--method", "fedavg", "rounds=1"],
        pytest.param(["run", "--method", "fedavg", "rounds=1", "--beside", "local,fedavg"], marks=pytest.mark.beside),
        ["list"],
    ],
    ids=["run", "beside", "list"],
)
def test_a_table_is_read_and_divided_once(shops, capsys, work, command):
    out = ["--out", "a"] * (command[0] == "run")
    code, _, err = kinfed(capsys, command[0], "shops.csv", *COLUMNS, *command[1:], *out)
    assert code == 0, err
    assert work == {"read": 1, "rows": 1, "divide": 1}


def test_inspect_says_what_run_would_do(shops, capsys):
    code, out, _ = kinfed(capsys, "list", "shops.csv", *COLUMNS, "--ignore", "note", "rounds=1")
    assert code == 0
    assert "federation    4 clients" in out
    assert "kinfed run shops.csv --client shop --target buys --ignore note rounds=1" in out
    _, _, err = kinfed(
        capsys, "run", "shops.csv", *COLUMNS, "--ignore", "note", "--method", "local", "rounds=1", "--out", "a"
    )
    assert out[out.index("clients   4, named by") :] in err
    _, out, _ = kinfed(capsys, "list", "shops.csv", *COLUMNS, "--ignore", "note", "--json")
    told = json.loads(out)
    assert told["choices"]["clients"] == "4, named by `shop`: 30 rows each, 120 in all"
    assert told["warnings"] == []


def test_a_dry_run_of_a_table_trains_nothing(shops, capsys, monkeypatch):
    monkeypatch.setattr("kinfed.cli.estimate.SECONDS", 0.1)
    own = ["shops.csv", *COLUMNS, "--ignore", "note", "rounds=1", "--dry-run", "--json", "--quiet", "--out", "a"]
    code, out, _ = kinfed(capsys, "run", *own, "--method", "local")
    assert (code, list(json.loads(out)["runs"])) == (0, ["local"])
    for command, more in (("run", ()), ("choose", ("seeds=2",)), ("choose", ("--budget", "12"))):
        code, out, _ = kinfed(capsys, command, *own, *more)  # of choosing a method
        planned = json.loads(out)
        assert code == 0
        assert planned["seconds"] == pytest.approx(
            sum(run["seconds"] * run["runs"] for run in planned["runs"].values())
        )
    code, _, err = kinfed(capsys, "choose", *own, "--budget", "5m")
    assert (code, err) == (2, "kinfed: --budget 5m says itself how long it takes: give it in rounds, or leave it out\n")
    assert not Path("a").exists()


def test_a_dry_run_plans_as_many_rounds_as_the_race_takes_at_most(shops, capsys, monkeypatch):
    monkeypatch.setattr("kinfed.cli.estimate.SECONDS", 0.1)
    own = ["choose", "shops.csv", *COLUMNS, "--ignore", "note", "rounds=4", "--json", "--quiet", "--out", "a"]
    _, out, _ = kinfed(capsys, *own, "--dry-run")
    network, solved, boosted = json.loads(out)["runs"].values()
    _, out, _ = kinfed(capsys, *own)
    choice = json.loads(out)
    trained = {"network": 0, "partial-pooling": 0, "personal-boosting": 0}
    for row in choice["ranking"]:
        kind = row["candidate"].partition(",")[0]
        trained[kind if kind in trained else "network"] += row["rounds"]
    assert 0.7 * network["runs"] * 4 < trained["network"] <= network["runs"] * 4
    assert trained["partial-pooling"] <= solved["runs"] * 20  # a solver may end before
    assert 0 < trained["personal-boosting"] <= boosted["runs"] * 207  # trees leave early where lines do as well


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["shops.csv"], "name the column for --client (which client a row belongs to) and the one for --target"),
        (["shosp.csv", *COLUMNS], "; did you mean 'shops.csv'?"),
        (["shops.csv", *COLUMNS, "--method", "fedagn"], "method: there is no 'fedagn'; did you mean 'fedaghn'?"),
        (["shops.csv", *COLUMNS, "--method", "local", "method=fedavg"], "name two parts where only one is possible"),
        (["fedaghn", "--client", "shop"], "kinfed run FILE.csv --client COLUMN --target COLUMN --method fedaghn"),
        (["a.toml", "--method", "fedavg"], "--method is for a table of yours, and 'a.toml' is not one"),
    ],
)
def test_what_is_refused_is_one_line_and_leaves_nothing(shops, capsys, arguments, told):
    ignore = ["--ignore", "note"] * (len(arguments) > 3)
    code, _, err = kinfed(capsys, "run", *arguments, *ignore, "--out", "a")
    assert code == 2
    assert told in err
    assert err.count("\n") == 1
    assert not (shops / "a").exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("book.xlsx", "book.xlsx: tables are read from .csv, .tsv and .parquet; save it as .csv"),
        ("shops.db", "a database of SQLite is sqlite:///FILE, with --query"),
        ("shops.csv.gz", "unpack it"),
        (
            "pets",
            "pets is a folder without a .csv or .parquet in it; pictures and other sets are read by the data sets",
        ),
    ],
)
def test_files_and_folders_that_are_no_tables_are_told_as_such_by_all_commands(shops, capsys, name, told):
    (shops / name).touch() if "." in name else (shops / name / "cat").mkdir(parents=True)
    for command in (["run"], ["list"]):
        code, _, err = kinfed(capsys, *command, name, *COLUMNS)
        assert (code, err.count("\n")) == (2, 1)
        assert told in err


def test_a_table_as_it_is_trains_and_its_columns_are_shown_and_kept(shops, capsys):
    """Text, a hole and a date: one command, no edit of the file."""
    lines = (shops / "shops.csv").read_text().splitlines()
    rows = [line.replace(",n,", f",{'new' if i % 3 else 'old'},") for i, line in enumerate(lines[1:])]
    rows = [f"{row},2025-0{1 + i % 9}-11" for i, row in enumerate(rows)]
    rows[7] = rows[7].replace(rows[7].split(",")[1], "", 1)
    (shops / "raw.csv").write_text("\n".join([f"{lines[0]},day", *rows]))
    code, out, _ = kinfed(capsys, "list", "raw.csv", *COLUMNS)
    assert code == 0
    assert "note    category  2 categories (new, old)" in out
    assert "day     date      year (mean 2025.0), season, day of the week" in out
    _, out, _ = kinfed(capsys, "list", "raw.csv", *COLUMNS, "--json")
    shown = json.loads(out)["columns"]
    assert [column["kind"] for column in shown["inputs"]] == ["number", "number", "category", "date"]
    assert kinfed(capsys, "run", "raw.csv", *COLUMNS, "--method", "local", "rounds=1", "--out", "a", "--quiet")[0] == 0
    assert json.loads((shops / "a" / "summary.json").read_text())["data"]["columns"] == shown


def test_a_folder_of_files_is_a_table(shops, capsys):
    head, *lines = (shops / "shops.csv").read_text().splitlines()
    (shops / "all").mkdir()
    for shop in range(4):
        own = [line.partition(",")[2] for line in lines if line.startswith(f"S{shop},")]
        (shops / "all" / f"S{shop}.csv").write_text("\n".join([head.partition(",")[2], *own]))
    own = ["--client", "file", "--target", "buys", "--ignore", "note", "--method", "local", "rounds=1", "--quiet"]
    assert kinfed(capsys, "run", "all", *own, "--out", "a")[0] == 0
    one = ["--ignore", "note", "--method", "local", "rounds=1", "--quiet", "--out", "b"]
    assert kinfed(capsys, "run", "shops.csv", *COLUMNS, *one)[0] == 0
    assert (shops / "a" / "models.safetensors").read_bytes() == (shops / "b" / "models.safetensors").read_bytes()
