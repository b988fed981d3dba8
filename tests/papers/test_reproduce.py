"""kinfed papers run as a person uses it, on a table made up for the test."""

import csv
import dataclasses
import json
import re
import shutil
import statistics

import pytest

from kinfed.cli import main
from kinfed.report.tables.compare import compare
from kinfed.runs.config import experiment
from kinfed.search.estimate import Cost
from kinfed_papers import published_table
from kinfed_papers.coverage import COMMITTED

PAPER = """
source = "Made up, 2025"
seeds = 2
spread = "seeds"
notes = ["Nothing of this was ever printed."]
elsewhere = { Z = "kinfed list methods" }

[experiment]
rounds = 12
evaluate_every = 4
model = "linear"
training = { epochs = 1, batch = 16, optimiser = { name = "sgd", lr = 0.1 } }
federation = { dataset = "digits", clients = 4, partition = "iid", graph = "complete" }

[rows]
local = { printed = "Local", score = "own" }
unheard-of = { printed = "FedRoD" }

[rows.made]
printed = "Made"
score = "mixed"
note = "as ever"
method = { name = "sfl", pull = 0.1 }

[rows.pfedgat]
printed = "pFedGAT"
score = "mixed"
"""
TABLE = """
title = "Digits of 4 clients"
where = "Table 9"
printed = "9"

[columns."digits/iid"]
dataset = "Digits"
setting = "IID"

[columns."digits/shards"]
dataset = "Digits"
setting = "shards"
note = "two shards a client"
federation.partition = { name = "shards", per_client = 2 }
federation.graph = "label_overlap"
methods.pfedgat.feedback = "test"

[columns."digits/average"]
dataset = "Digits"
setting = "average"
mean_of = ["digits/iid", "digits/shards"]

[columns."digits/broken"]
dataset = "Digits"
setting = "broken"
training.optimiser.lr = 1e38

[columns."svhn/iid"]
dataset = "SVHN"
setting = "IID"
federation.dataset = "svhn"
"""
NUMBERS = "table,dataset,setting,method,metric,mean,std,note\n" + "\n".join(
    f"9,{data},{setting},{method},accuracy_pct,{mean},{std},"
    for data, setting in (("Digits", "IID"), ("Digits", "shards"), ("Digits", "average"), ("SVHN", "IID"))
    for method, mean, std in (
        ("Local", 50.5, 0.25),
        ("FedRoD", 70, ""),
        ("Made", 80, ""),
        ("pFedGAT", 90, ""),
    )
)


@pytest.fixture(autouse=True)
def made(tmp_path, monkeypatch):
    """A folder of published tables with one table in it."""
    folder = tmp_path / "papers" / "made"
    folder.mkdir(parents=True)
    for name, text in (("paper.toml", PAPER), ("table9.toml", TABLE), ("printed.csv", NUMBERS)):
        (folder / name).write_text(text)
    monkeypatch.setattr(published_table, "PAPERS", tmp_path / "papers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KINFED_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    published_table.load.cache_clear()
    yield
    published_table.load.cache_clear()


def reproduce(capsys, *arguments, code=0):
    """Standard output, standard error, and the lines of table.csv, by column and method."""
    assert main(["papers", "run", "made.table9", *arguments]) == code
    out, err = capsys.readouterr()
    return out, err


def table(folder="reproductions/made.table9"):
    with open(f"{folder}/table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    trained = [line for line in lines if line["measured"] and line["column"] != "digits/average"]
    assert all(float(line.pop("seconds")) > 0 for line in trained)
    return {(line["column"], line["method"]): {**line, "seconds": ""} for line in lines}


def accuracies(tmp_path, column, method, model):
    """Test accuracy in percent of every seed, from the runs' own summaries."""
    folders = sorted((tmp_path / "reproductions/made.table9/runs" / column / method).iterdir())
    return [100 * json.loads((f / "summary.json").read_text())["scores"][model]["mean"] for f in folders]


def test_ctrl_c_leaves_a_table_of_what_is_finished_and_says_how_to_go_on(capsys, second_run_interrupted):
    asked = ["--method", "local", "--column", "digits/iid", "--jobs", "1"]
    _, err = reproduce(capsys, *asked, code=130)
    assert err.splitlines()[-1] == "kinfed: interrupted; run the same command again to resume"
    assert table()["digits/iid", "local"]["seeds"] == "1"
    before = (second_run_interrupted[0] / "summary.json").stat().st_mtime_ns
    reproduce(capsys, *asked)
    assert (second_run_interrupted[0] / "summary.json").stat().st_mtime_ns == before
    assert table()["digits/iid", "local"]["seeds"] == "2"


def test_ours_stands_beside_the_printed_and_what_is_finished_is_kept(tmp_path, capsys):
    asked = ["--method", "local", "--column", "digits/average", "--jobs", "1"]
    _, err = reproduce(capsys, *asked)
    first, *more = err.splitlines()  # a log is told at once what there is to do, and then of each run
    assert first == "made.table9: 4 of 4 runs to do, 1 at a time, in reproductions/made.table9"
    assert [line.partition(":")[0] for line in more[:8]] == ["begun", "done"] * 4
    found = table()
    each = {c: accuracies(tmp_path, f"digits/{c}", "local", "own") for c in ("iid", "shards")}
    for column, values in each.items():
        line = found[f"digits/{column}", "local"]
        assert float(line["measured"]) == pytest.approx(statistics.fmean(values), abs=1e-3)
        assert float(line["over_seeds"]) == pytest.approx(statistics.stdev(values), abs=1e-3)
        assert float(line["difference"]) == pytest.approx(statistics.fmean(values) - 50.5, abs=1e-3)
        assert (line["paper"], line["paper_std"], line["seeds"]) == ("50.5", "0.25", "2")
    both = [statistics.fmean(pair) for pair in zip(*each.values(), strict=True)]
    assert float(found["digits/average", "local"]["measured"]) == pytest.approx(statistics.fmean(both), abs=1e-3)
    assert float(found["digits/average", "local"]["over_seeds"]) == pytest.approx(statistics.stdev(both), abs=1e-3)
    assert set(found) == {("digits/iid", "local"), ("digits/shards", "local"), ("digits/average", "local")}

    # People see the same numbers, wherever they look.
    one = found["digits/iid", "local"]
    ours = f"{float(one['measured']):.2f} ± {float(one['over_seeds']):.2f}"
    page = (tmp_path / "reproductions/made.table9/table.md").read_text()
    tex = (tmp_path / "reproductions/made.table9/table.tex").read_text()
    assert ours in err
    assert f"(digits/iid) | 50.50 ± 0.25 | {ours} |" in page  # one method: a row for each figure
    assert f"(digits/iid) & 50.50 $\\pm$ 0.25 & {ours.replace('±', '$' + chr(92) + 'pm$')} &" in tex
    assert "$ kinfed papers run made.table9 --method local --column digits/iid,digits/shards,digits/average" in page
    assert "- 4 clients, all in a round; 12 rounds of 1 epoch, batch 16, sgd (lr 0.1)" in page
    assert "; evaluated every 4 rounds." in page
    assert "[1] two shards a client." in page
    assert "oracle graph" not in page  # Local uses none
    assert "scaled" not in page
    assert "Nothing of this was ever printed." in page

    # Asked again nothing runs; another method joins the table; a lost run is made again, to the same numbers.
    run = tmp_path / "reproductions/made.table9/runs/digits/iid/local/seed-1"
    before, written = (run / "history.csv").stat().st_mtime_ns, table()
    reproduce(capsys, *asked)
    assert (run / "history.csv").stat().st_mtime_ns == before
    assert table() == written
    (run / "summary.json").unlink()
    (run / "history.csv").unlink()
    _, err = reproduce(capsys, "--method", "pfedgat,made", "--column", "digits/shards", "--seeds", "1", "--jobs", "1")
    found = table()
    assert found["digits/shards", "pfedgat"]["flags"] == "leaking"
    assert found["digits/shards", "made"]["flags"] == "oracle graph"
    assert "oracle graph: the graph is made from labels" in err
    assert found["digits/shards", "pfedgat"]["status"] == ""
    assert found["digits/iid", "local"]["seeds"] == "1"
    page = (tmp_path / "reproductions/made.table9/table.md").read_text()
    # What it shows came bit by bit; its command makes all of it at once.
    assert "$ kinfed papers run made.table9 --method local,made,pfedgat --column digits/iid,digits/shards" in page
    reproduce(capsys, *asked)
    assert {key: line for key, line in table().items() if key[1] == "local"} == written


def test_side_by_side_and_scaled_down(tmp_path, capsys, monkeypatch):
    asked = ["--method", "local", "--column", "digits/iid", "--scale", "0.5"]
    reproduce(capsys, *asked, "--jobs", "1")
    alone = table("reproductions/made.table9-scaled-0.5")
    with monkeypatch.context() as terminal:
        terminal.setenv("COLUMNS", "80")
        terminal.setenv("FORCE_COLOR", "1")
        _, err = reproduce(capsys, *asked, "--jobs", "2", "--out", "beside")
    seen = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", err)
    assert re.search(r"━{10,} 0/2 runs \d:\d\d:\d\d left \S+ local on digits/iid, seed 0; lo\S+…", seen)
    assert table("beside") == alone
    assert all(line["flags"] == "scaled 0.5" for line in alone.values())
    run = experiment.read("beside/runs/digits/iid/local/seed-1/config.toml", [])
    assert (run["rounds"], run["evaluate_every"], run["seed"]) == (6, 1, 1)
    assert run["federation"]["split"]["share"] == 0.5
    page = (tmp_path / "beside" / "table.md").read_text()
    assert "scaled 0.5: rounds x 0.5" in page
    assert "--scale 0.5" in page
    assert "; evaluated every round." in page
    _, err = reproduce(capsys, "--method", "local", "--column", "digits/iid", "--out", "beside", code=2)
    assert "holds another experiment" in err

    # Another method at another scale would have the table lose the one that is there.
    _, err = reproduce(capsys, "--method", "made", *asked[2:4], "--scale", "0.6", "--out", "beside", code=2)
    assert err.startswith("kinfed: beside/runs/digits/iid/local/seed-")
    assert "holds another experiment than the requested one; choose another folder" in err
    assert table("beside") == alone
    assert not (tmp_path / "beside/runs/digits/iid/made").exists()


def test_a_folder_beside_the_runs_is_left_alone_and_a_broken_run_is_named(tmp_path, capsys):
    asked = ["--method", "local", "--column", "digits/iid", "--seeds", "1", "--jobs", "1"]
    reproduce(capsys, *asked)
    before, run = table(), tmp_path / "reproductions/made.table9/runs/digits/iid/local/seed-0"
    for name in ("seed-old", "seed-0.bak"):
        shutil.copytree(run, run.with_name(name))
    reproduce(capsys, *asked)
    assert table() == before
    whole = (run / "history.csv").read_text()
    for text in ("", "nonsense\n1\n", whole[: len(whole) // 2], None):
        (run / "history.csv").unlink() if text is None else (run / "history.csv").write_text(text)
        _, err = reproduce(capsys, *asked, code=1)
        place = run.relative_to(tmp_path)
        why = f"{place}/history.csv is incomplete; delete the folder {place} and run again"
        last = f"kinfed: local on digits/iid failed: seed 0 cannot be read: {why}; the table has what can be read\n"
        assert err.endswith(last)
    shutil.rmtree(run)
    reproduce(capsys, *asked)
    assert table() == before


def test_a_table_says_in_which_precision_it_was_made(tmp_path, capsys):
    reproduce(capsys, "--method", "local", "--column", "digits/iid", "how.precision=bf16")
    assert table()["digits/iid", "local"]["flags"] == "bf16"
    page = tmp_path / "reproductions/made.table9/table.md"
    assert "--column digits/iid how.precision=bf16\n" in page.read_text()
    assert "bf16: local training multiplied in bfloat16." in page.read_text()
    reproduce(capsys, "--method", "local", "--column", "digits/shards")
    assert table()["digits/shards", "local"]["flags"] == ""
    assert "how.precision" not in page.read_text()  # no one command makes both


def test_a_run_that_fails_is_one_line_and_the_others_go_on(capsys):
    asked = ["--method", "local", "--column", "digits/broken,digits/iid", "--seeds", "1", "--jobs", "1"]
    _, err = reproduce(capsys, *asked, "--out", "o[/x]", code=1)
    assert "the runs are in o[/x]\n" in err
    told = [line for line in err.splitlines() if line.startswith("kinfed: ")]
    assert told[0].startswith("kinfed: local on digits/broken, seed 0: round 1: ")
    assert told[1:] == ["kinfed: 1 of 2 runs failed; the table has the others"]
    found = table("o[/x]")
    assert found["digits/broken", "local"]["status"].startswith("failed: round 1: ")
    assert found["digits/iid", "local"]["measured"]


def test_what_cannot_be_run_is_a_line_unless_it_is_asked_for(capsys, tmp_path):
    asked = ["--seeds", "1", "--jobs", "1", "--json"]
    out, _ = reproduce(capsys, "--method", "local", *asked, "--quiet", code=1)  # digits/broken is among all columns
    found = table()
    assert found["svhn/iid", "local"]["status"] == "needs svhn: kinfed list datasets --fetch svhn"
    assert json.loads(out)["title"] == "made.table9: Digits of 4 clients"
    reproduce(capsys, "--column", "digits/iid", *asked)
    assert table()["digits/iid", "unheard-of"]["status"] == "not in kinfed"
    for arguments, said in (
        (["--method", "unheard-of"], "made.table9: method 'unheard-of': not in kinfed"),
        (["--column", "svhn/iid"], "made.table9: column 'svhn/iid': needs svhn: kinfed list datasets --fetch svhn"),
        (["--method", "locla"], "made.table9 has no method 'locla'; did you mean 'local'?"),
        (["--column", "digits/idd"], "made.table9 has no column 'digits/idd'; did you mean 'digits/iid'?"),
        (["--scale", "0"], "--scale must lie in (0, 1]; got 0.0"),
        (["--scale", "1.5"], "--scale must lie in (0, 1]; got 1.5"),
        (["--seeds", "0"], "--seeds counts runs, so it must be at least 1; got 0"),
        (["--method", "local", "--jobs", "0"], "jobs counts parallel runs, so it must be at least 1; got 0"),
        (
            ["how.workers=0"],
            "how.workers must be at least 1; got 0 (cores to use: loop trains a client on each; None: all)",
        ),
        (
            ["how.checkpoint_seconds=nan"],
            "how.checkpoint_seconds must be zero or more; got nan (the least time between checkpoints)",
        ),
    ):
        _, err = reproduce(capsys, *arguments, "--out", "nothing", code=2)
        assert err == f"kinfed: {said}\n"
        assert not (tmp_path / "nothing").exists()
    assert main(["papers", "run", "made.tabel9"]) == 2
    assert "there is no table 'made.tabel9'; did you mean 'made.table9'?" in capsys.readouterr().err


DRY = ("papers", "run", "made.table9", "--dry-run")


def test_an_estimate_comes_first(capsys):
    assert main([*DRY, "--column", "digits/iid", "--seeds", "3", "--jobs", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["runs"]) == {f"{m} on digits/iid" for m in ("local", "made", "pfedgat", "fedavg", "fedavg-ft")}
    assert found["seconds"] == pytest.approx(sum(3 * one["seconds"] for one in found["runs"].values()) / 2)
    assert all(one["runs"] == 3 and one["seconds"] > 0 and one["memory"] > 2**26 for one in found["runs"].values())
    assert main(["run", "fedavg", "--dry-run", "rounds=1000", "--beside", "none", "--json"]) == 0
    long = json.loads(capsys.readouterr().out)
    assert main(["run", "fedavg", "--dry-run", "rounds=10", "--beside", "none", "--json"]) == 0
    short = json.loads(capsys.readouterr().out)
    assert long["seconds"] > 10 * short["seconds"]


def test_an_estimates_numbers_are_whole_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("kinfed.cli.estimate.estimate", lambda *_: Cost(7200, 2**31, "9.1 % of the examples"))
    assert main([*DRY, "--column", "digits/shards", "--method", "pfedgat", "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 60
    assert "…" not in told
    assert "2.0 h     2  4.0 h  2.0 GiB" in told
    assert all(word in told for word in ("pfedgat", "digits/shards", "examples"))


def test_methods_that_are_not_printed_join_as_rows_of_ours(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom kinfed.methods.local import Local\n\n\n"
        "@dataclass(frozen=True)\nclass Stay(Local):\n    'Stays.'\n"
    )
    asked = ["--column", "digits/iid", "--seeds", "1", "--jobs", "1"]
    reproduce(capsys, "--method", "local,fedavg,mine.py:Stay,fedprox", *asked)
    found = table()
    flags = {name: found["digits/iid", name]["flags"] for name in ("local", "fedavg", "Stay", "fedprox")}
    assert flags == {"local": "", "fedavg": "control", "Stay": "unprinted", "fedprox": "unprinted"}
    assert found["digits/iid", "Stay"]["measured"] == found["digits/iid", "local"]["measured"]  # the same rule
    assert found["digits/iid", "fedprox"]["paper"] == ""
    page = (tmp_path / "reproductions/made.table9/table.md").read_text()
    assert "1 of 4 printed rows; not in kinfed: FedRoD; not run: Made, pFedGAT; best in the paper: pFedGAT (90" in page
    assert "control: not printed; what any method should be beside." in page
    assert re.search(r"Made with kinfed \S+, PyTorch \S+, Python \S+; .+, \d+ cores", page)
    assert "Training of all runs: " in page

    reproduce(capsys, "--method", "local", *asked)  # the methods that were added stay; a file must be named again
    assert {("digits/iid", "fedprox"), ("digits/iid", "fedavg")} <= set(table())


def test_controls_stand_where_they_can(capsys):
    rows = published_table.load("made.table9").rows
    assert [row.name for row in rows.values() if row.kind] == ["fedavg", "fedavg-ft", "shuffled"]
    asked = ["--seeds", "1", "--jobs", "1", "--method"]
    reproduce(capsys, *asked, "shuffled", "--column", "digits/shards")  # whose graph has its clients interchanged
    run = experiment.read("reproductions/made.table9/runs/digits/shards/shuffled/seed-0/config.toml", [])
    assert run["federation"]["graph"] == {"name": "shuffled", "of": "label_overlap"}
    assert table()["digits/shards", "shuffled"]["flags"] == "control"
    _, err = reproduce(capsys, *asked, "shuffled", "--column", "digits/iid", code=2)
    assert err == "kinfed: made.table9: 'shuffled' runs on none of these columns: no such graph\n"


def test_methods_that_share_no_column_are_refused(capsys, monkeypatch):
    table9 = published_table.load("made.table9")
    columns = {
        name: dataclasses.replace(column, lacks={"local" if name == "digits/iid" else "made": "not here"})
        for name, column in table9.columns.items()
    }
    asked = ["--method", "local,made", "--column", "digits/iid,digits/shards"]
    with monkeypatch.context() as other:
        other.setattr(published_table, "load", lambda _: dataclasses.replace(table9, columns=columns))
        _, err = reproduce(capsys, *asked, code=2)
    assert err == (
        "kinfed: made.table9: these methods share no column, so none can be compared: local runs on digits/shards; "
        "made runs on digits/iid\n"
    )


def test_another_network_is_named_everywhere(capsys, tmp_path):
    asked = ["--method", "local", "--column", "digits/iid", "--seeds", "1", "--jobs", "1", "--model"]
    reproduce(capsys, *asked, "mlp")
    assert table("reproductions/made.table9-mlp")["digits/iid", "local"]["flags"] == "own model"
    page = (tmp_path / "reproductions/made.table9-mlp/table.md").read_text()
    assert "--seeds 1 --model mlp\n" in page
    assert "model mlp; " in page
    _, err = reproduce(capsys, *asked, "mpl", code=2)
    assert err == "kinfed: --model: there is no 'mpl'; did you mean 'mlp'?\n"


def test_equal_runs_are_made_once(capsys, tmp_path):
    """Another table with the same experiment reads its runs, and so does another row of the same table."""
    asked = ["--method", "local", "--column", "digits/iid", "--jobs", "1"]
    reproduce(capsys, *asked, "--seeds", "1")
    first = table()["digits/iid", "local"]
    papers = tmp_path / "papers" / "made"
    twins = "[rows.alone]\nprinted = 'Alone'\nscore = 'own'\nmethod = 'local'\n"
    (papers / "table8.toml").write_text(TABLE.replace('"9"', '"8"') + twins)
    (papers / "printed.csv").write_text(NUMBERS + "\n" + NUMBERS.partition("\n")[2].replace("9,D", "8,D"))
    published_table.load.cache_clear()
    assert main(["papers", "run", "made.table8", *asked, "--seeds", "2", "--json", "--quiet"]) == 0
    other = "reproductions/made.table8"
    shared = table(other)["digits/iid", "local"]
    assert shared["flags"] == "the run of made.table9/digits/iid/local"
    assert shared["by_seed"].startswith(first["by_seed"])
    assert sorted(path.name for path in (tmp_path / other / "runs/digits/iid/local").iterdir()) == [
        "seed-0.same",
        "seed-1",
    ]
    assert main(["papers", "run", "made.table8", *asked[2:], "--method", "alone,local", "--seeds", "3", "--quiet"]) == 0
    assert table(other)["digits/iid", "alone"]["by_seed"] == table(other)["digits/iid", "local"]["by_seed"]
    made = [path.name for path in (tmp_path / other / "runs/digits/iid").glob("*/seed-?")]
    assert sorted(made) == ["seed-1", "seed-2"]  # the second seed of one row was there, and the third is run once

    # Runs in another precision are not equal; and a run whose twin is gone is made again.
    low = ["--seeds", "1", "how.precision=bf16", "--out", "reproductions/low"]
    assert main(["papers", "run", "made.table8", *asked, *low]) == 0
    assert table("reproductions/low")["digits/iid", "local"]["flags"] == "bf16"
    shutil.rmtree(tmp_path / "reproductions/made.table9")
    shutil.rmtree(tmp_path / other / "runs/digits/iid/alone")
    assert main(["papers", "run", "made.table8", *asked, "--seeds", "1", "--quiet"]) == 0
    assert table(other)["digits/iid", "local"]["by_seed"].startswith(first["by_seed"])
    assert (tmp_path / other / "runs/digits/iid/local/seed-0/summary.json").exists()


@pytest.mark.skipif(not COMMITTED.exists(), reason="measured tables are in a checkout, not in an installed kinfed")
def test_coverage_and_claims_are_listed(capsys):
    assert main(["papers", "list", "coverage"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"made.table9 +16 +0 +0 +0 +0 +0 +9\n +not run: 9; not in kinfed: 4; needs svhn: 3\n", shown)
    assert main(["papers", "list", "coverage", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["printed"] == 16
    assert main(["papers", "list", "claims"]) == 0
    assert main(["papers", "list", "claims", "made"]) == 2
    assert capsys.readouterr().err == "kinfed: kinfed papers list claims takes no name; got 'made'\n"


def test_the_table_comes_with_intervals_pairs_ranks_and_agreement_with_print(tmp_path, capsys):
    asked = ["--column", "digits/iid,digits/shards", "--jobs", "1"]
    reproduce(capsys, "--method", "local", *asked)
    out, err = reproduce(capsys, "--method", "fedavg,made", *asked, "--seeds", "1", "--json")
    told, home = json.loads(out)["statistics"], tmp_path / "reproductions/made.table9"
    assert set(told) == {"meansA", "pairsA", "meansB", "pairsB", "ranks"} | {n for n in told if "training" in n}
    assert "digits/shards" in told["meansB"]["title"]  # A and B are named
    # Means are those of the table; with two seeds the interval is over these, and cut where accuracies end.
    means, found = {one["method"]: one for one in told["meansB"]["rows"]}, table()
    for method, one in means.items():
        assert 100 * one["mean"] == pytest.approx(float(found["digits/shards", method]["measured"]), abs=1e-3)
    assert (means["local"]["over"], means["fedavg"]["over"]) == ("seeds", "clients")
    assert 0 <= means["local"]["low"] <= means["local"]["high"] <= 1
    # Clients that gain and lose beyond noise are those of a comparison of the same runs.
    alike = [home / "runs/digits/shards" / method / "seed-0" for method in ("fedavg", "local")]
    judged = next(row for row in compare(alike).sets[0] if row.method == "fedavg")
    assert (means["fedavg"]["gain"], means["fedavg"]["lose"], True) == judged.counts
    # A pair's difference is that of single clients with the seed that both have.
    pair = next(one for one in told["pairsB"]["rows"] if (one["method"], one["against"]) == ("fedavg", "local"))
    runs = [home / "runs/digits/shards" / method / "seed-0/summary.json" for method in ("fedavg", "local")]
    mine, local = (json.loads(run.read_text())["scores"] for run in runs)
    assert pair["mean"] == pytest.approx(mine["shared"]["mean"] - local["own"]["mean"], abs=1e-6)
    assert (pair["paired_seeds"], pair["clients"]) == ("0", 4)
    (few,) = [note for note in told["pairsA"]["notes"] if "paired over the common seeds alone (seed 0)" in note]
    assert few.endswith("against local")
    assert "fedavg" in few
    assert {one["method"] for one in told["ranks"]["rows"]} == {"local", "fedavg", "made"}
    assert (home / "statistics/ranks.png").stat().st_size > 1000
    assert "[statistics](statistics/statistics.md)" in (home / "table.md").read_text()
    assert "Kendall's tau to the paper's order" not in err  # only two methods are printed
    assert "Mean ranks (1 is best)" in err
