"""Pages on folders that hold more than runs: published tables, choices, sweeps, newcomers, real sites."""

import csv
import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from kinfed.cli import main
from kinfed.errors import UsageError
from kinfed.report.page.gather import gather
from kinfed.report.page.html_page import page
from kinfed.report.page.overview import front_of, tables_beside
from kinfed.report.tables.text_table import Grid, markdown, of_markdown
from kinfed.runs.run_folder import RunFolder

HEAD = ["column", "dataset", "setting", "method", "printed", "metric", "paper", "paper_std", "measured", "over_seeds"]
HEAD += ["over_clients", "difference", "seeds", "flags", "status", "by_seed", "seconds"]
COLUMNS = ("cifar10/pathological", "cifar10/dirichlet")
WEIGHTS = np.array([[0.7, 0.3], [0.2, 0.8]])


def line(column, method, printed, paper, by_seed):
    ours = sum(by_seed.values()) / len(by_seed) if by_seed else ""
    seeds = " ".join(f"{seed}:{value}" for seed, value in by_seed.items())
    setting = column.partition("/")[2]
    known = [column, "CIFAR-10", setting, method, printed, "accuracy_pct", paper, "", ours, "", "", "", len(by_seed)]
    return [*known, "scaled 0.1", "", seeds, ""]


@pytest.fixture
def table(tmp_path, run_of):
    """A reproduction of two columns, where two rows are one method, and one run is that of another column."""
    out = tmp_path / "table"
    lines = []
    for at, column in enumerate(COLUMNS):
        for method, kind, score in (("fedaghn", "fedaghn", 0.7), ("twin", "fedaghn", 0.6), ("local", "local", 0.5)):
            folder = out / "runs" / column / method
            if at and method == "local":
                folder.mkdir(parents=True)
                (folder / "seed-0.same").write_text("../../pathological/local/seed-0\n")
            else:
                weights = None if kind == "local" else [WEIGHTS]
                run_of(folder / "seed-0", [[score, score - 0.1]], weights, method=kind, dataset="cifar10")
            paper = {"fedaghn": 90.5, "local": 80.25}.get(method, "")
            lines.append(line(column, method, method.title(), paper, {0: 100 * score - 5}))
    lines.append(line(COLUMNS[0], "pfedhn", "pFedHN", 85.0, {}))
    with (out / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEAD, *lines])
    (out / "table.md").write_text("# fedaghn.table1: Accuracy of 20 clients, pathological and Dir(0.1)\n\nmore\n")
    return out


def test_of_a_published_table_the_table_comes_first_and_each_column_has_its_runs(table):
    front = front_of(table)
    assert front.headline.startswith("fedaghn.table1: Accuracy of 20 clients")
    assert front.lead == "6 numbers measured here, beside 4 of the 5 in the paper; 6 with 1 seed."
    [rows] = front.tables[0].blocks
    assert rows[0] == ["Fedaghn", "65.00 ★\nprinted 90.50", "65.00 ★\nprinted 90.50"]
    assert rows[1] == ["Twin", "55.00", "55.00"]
    assert rows[3] == ["pFedHN", "\u2013\nprinted 85.00", ""]
    assert front.cautions == [("Scaled", "Fewer rounds and examples than in the paper.")]
    for part in front.parts:
        gathered = gather(part.folders, part.labels, part.judged, part.same_data)
        assert gathered.labels == ("Fedaghn", "Twin", "Local")
        assert gathered.labels[gathered.main] == "Fedaghn"
        assert gathered.rows[2].mean == pytest.approx(0.45)  # also where its run is another column's
    text = page([table])
    assert text.count("<template id=") == 2
    assert "has no page of its own" not in text


def test_runs_of_a_column_may_be_of_versions_that_said_less_of_the_data(table):
    path = table / "runs" / COLUMNS[0] / "twin" / "seed-0" / "summary.json"
    summary = json.loads(path.read_text())
    summary["data"]["federation"]["split"] = {"fold": 1}
    path.write_text(json.dumps(summary))
    assert "has no page of its own" not in page([table])
    with pytest.raises(UsageError, match=r"differ in federation\.split\.fold"):
        gather([path.parent, path.parents[2] / "fedaghn"])


def test_a_column_that_cannot_be_read_is_named_and_the_others_are_shown(table):
    (table / "runs" / COLUMNS[0] / "fedaghn" / "seed-0" / "history.csv").write_text("round\n")
    text = page([table])
    assert text.count("<template id=") == 1
    assert re.search(r"pathological\) has no page of its own: .*history\.csv is incomplete", text)


def test_a_table_without_a_finished_run_is_refused(table, capsys):
    with (table / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEAD, line(COLUMNS[0], "pfedhn", "pFedHN", 85.0, {})])
    assert main(["report", str(table)]) == 2
    assert "no run is finished yet" in capsys.readouterr().err


def test_what_is_written_as_markdown_is_read_again():
    one = Grid("a", "A: Means", ("method", "mean\nrank"), [[["a|b", "1.0"], ["c", "2.0"]]], ("first", "second"))
    other = Grid("b", "Pairs", ("method", "against", "p"), [[["a", "b", "0.1"]]], text_columns=2)
    found = of_markdown(markdown(one) + "\n" + markdown(other))
    assert [(f.title, list(f.headings), f.blocks, f.notes, f.text_columns) for f in found] == [
        ("A: Means", ["method", "mean rank"], [[["a|b", "1.0"], ["c", "2.0"]]], ("first", "second"), 1),
        ("Pairs", ["method", "against", "p"], [[["a", "b", "0.1"]]], (), 2),
    ]


def test_newcomers_are_compared_with_learning_alone_by_their_examples(tmp_path, run_of):
    joined = run_of(tmp_path / "joined", [[0.5, 0.6]], [WEIGHTS])
    origin = {"run": str(joined), "rounds": 1, "joined": ["n0", "n1"], "scores": False}
    out = run_of(tmp_path / "new", [[0.5, 0.6]], names=["n0", "n1"], origin=origin)
    rows = [["client", "examples", "model", "score", "whose"]]
    for name, all_of_it in (("n0", 62), ("n1", 63)):
        rows += [[name, 10, "fedaghn", 0.6, ""], [name, 10, "local", 0.2, ""], [name, 10, "best existing", 0.8, "c1"]]
        rows += [[name, all_of_it, "fedaghn", 0.7, ""], [name, all_of_it, "local", 0.9, ""]]
    with (out / "onboarding.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    front = front_of(out)
    assert front.headline == "Joining helped some newcomers"
    assert front.lead == (
        "By fedaghn, on average: 60.0 % with 10 examples, 20.0 % alone; 70.0 % with all examples, 90.0 % alone. "
        "Better still: best existing with 10 (80.0 %), local with all (90.0 %)."
    )
    assert front.tables[0].headings == ("model", "10", "all")
    assert front.tables[0].blocks == [
        [["fedaghn", "60.0", "70.0"], ["local", "20.0", "90.0"], ["best existing", "80.0", "\u2013"]]
    ]
    assert [part.folders for part in front.parts] == [[joined]]


def test_a_choice_shows_all_that_it_tried(tmp_path, run_of):
    ranking = [{"candidate": "fedaghn,lr=0.2", "rounds": 4, "validation": 0.7, "chosen": True, "gain": 0.1}]
    ranking[0] |= {"low": -0.05, "high": 0.25}
    ranking.append({"candidate": "cfl", "rounds": 0, "problem": "did not enter"})
    folder = run_of(tmp_path / "choice", [[0.5, 0.6]], [WEIGHTS])
    found = {"ranking": ranking, "training_rounds": 36, "verdict": {"candidates": 2}, "keep_own_model": ["c0"]}
    RunFolder(folder).choice.write_text(json.dumps(found))
    [tried] = tables_beside(folder)
    assert tried.blocks == [
        [
            ["fedaghn,lr=0.2 (chosen)", "4", "70.0", "10.0", "-5.0 to 25.0", ""],
            ["cfl", "0", "", "", "", "did not enter"],
        ]
    ]
    assert tried.notes[1] == "1 client keeps the model of Local"
    assert "What was tried" in page([folder])


def test_a_sweep_shows_every_setting_and_repeats_into_folders_that_differ(tmp_path, run_of):
    for method in ("fedaghn", "fedamp"):
        run_of(tmp_path / "runs" / method / "lr=0.1", [[0.5, 0.4]], method=method)
    (tmp_path / "table.csv").write_text("method,winner,lr\nfedaghn,*,0.1\n")
    (tmp_path / "table.md").write_text("2 settings\n\n| method | lr |\n| --- | ---: |\n| fedaghn | 0.1 |\n\n- a note\n")
    text = page([tmp_path])
    assert "2 settings" in text
    assert "a note" in text
    outs = re.findall(r"--out (\S+)</code>", re.sub("</?span>", "", text))
    assert sorted(outs) == ["fedaghn-lr=0.1-again", "fedamp-lr=0.1-again"]


def test_a_run_of_real_sites_says_how_each_did(tmp_path, run_of):
    folder = run_of(tmp_path / "sites", [[0.5, 0.6]], [WEIGHTS], names=["ulm", "bonn"], executor="flower")
    sites = {"ulm": {"rounds": 5, "missed": 0, "down": 2000, "up": 1500, "left_out": ""}}
    sites["bonn"] = {"rounds": 3, "missed": 2, "down": 900, "up": 800, "left_out": "too <b>late</b>"}
    (folder / "status.json").write_text(json.dumps({"sites": sites}))
    text = page([folder])
    assert "The sites" in text
    assert "too &lt;b&gt;late&lt;/b&gt;" in text
    assert "2 kB" in text


def test_a_sites_folder_says_what_it_takes_part_in(tmp_path, capsys):
    folder = tmp_path / "kinfed-site" / "ulm" / "abc"
    folder.mkdir(parents=True)
    words = {"table": {"method": {"name": "fedaghn"}, "rounds": 5}, "shape": [1, 8, 8], "outputs": 10}
    words["task"] = {"name": "Classification"}
    save_file({"theta": np.zeros(3)}, folder / "join.safetensors", {"words": json.dumps(words)})
    text = page([folder])
    assert "No model has been selected here yet" in text
    assert "1 x 8 x 8" in text
    (folder / "model.json").write_text('{"round": 4, "model": "own"}')
    save_file({"theta": np.zeros(3)}, folder / "model.safetensors")
    assert "A model of this site&#39;s own is ready" in page([folder])
    (folder / "join.safetensors").write_bytes(b"nothing")
    assert main(["report", str(folder)]) == 2
    assert "is not what a site wrote" in capsys.readouterr().err
