"""The campaign: a queue of runs that is stopped and goes on, and pages that it writes."""

import argparse
import csv
import errno
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kinfed.errors import RunError
from kinfed.runs import pool
from kinfed.runs.config import experiment
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.execution import Execution
from kinfed_papers import published_table
from kinfed_papers.environment import remember

EVIDENCE = Path(__file__).parents[2] / "evidence"
PAPER = """
source = "Nobody"
seeds = 2
spread = "seeds"
[experiment]
rounds = 4
model = { name = "mlp", hidden = [4] }
training = { epochs = 1, optimiser = { name = "sgd", lr = 0.1 } }
federation = { dataset = "digits", clients = 4, partition = "iid" }
[rows]
local = { printed = "Local", score = "own" }
fedavg = { printed = "FedAvg", score = "shared" }
unknown = { printed = "Unknown" }
"""
TABLE = """
title = "Made"
where = "Table 1"
printed = "1"
[columns.iid]
dataset = "Digits"
setting = "IID"
[columns.shards]
dataset = "Digits"
setting = "shards"
rounds = {rounds}
federation.partition = {{ name = "shards", per_client = 2 }}
[columns.mean]
dataset = "Digits"
setting = "mean"
mean_of = ["iid", "shards"]
"""
PRINTED = "table,dataset,setting,method,metric,mean,std,note\n" + "".join(
    f"1,Digits,{setting},{method},accuracy_pct,90,1,\n"
    for setting in ("IID", "shards", "mean")
    for method in ("Local", "FedAvg", "Unknown")
)
QUEUE = """
[[queue]]
part = "made.table1"
column = "iid shards mean"
method = "fedavg unknown local"
seeds = 2
"""


@pytest.fixture
def camp(tmp_path, monkeypatch):
    """The program, with a made table, a queue and an empty page, and its options."""

    def made(queue=QUEUE, rounds=4):
        home = tmp_path / "papers" / "made"
        home.mkdir(parents=True)
        for name, text in (
            ("paper.toml", PAPER),
            ("table1.toml", TABLE.format(rounds=rounds)),
            ("printed.csv", PRINTED),
        ):
            (home / name).write_text(text)
        (tmp_path / "queue.toml").write_text(queue)
        (tmp_path / "made-tables.md").write_text(
            "# Made\n\nOf people.\n\n<!-- made.table1 -->\n<!-- end of made.table1 -->\n\nMore.\n"
        )
        return campaign, ["--queue", tmp_path / "queue.toml", "--keep", tmp_path / "keep", "--results", tmp_path]

    monkeypatch.syspath_prepend(str(EVIDENCE))
    import campaign

    monkeypatch.setattr(published_table, "PAPERS", tmp_path / "papers")
    monkeypatch.setattr(os, "nice", lambda more: None)
    monkeypatch.delenv("KINFED_DATA", raising=False)
    published_table.load.cache_clear()
    yield made
    published_table.load.cache_clear()


def call(program, command, options):
    program.main([command, *map(str, options)])


def works(program, options):
    asked = argparse.Namespace(keep=options[3], results=options[5], data_dir=None, device="cpu")
    return program.expand(program.read_queue(options[1]), asked)[0]


def test_the_first_seed_of_every_cell_comes_first_and_what_cannot_be_run_is_named(camp, capsys):
    program, options = camp(
        QUEUE + QUEUE.replace("seeds = 2", "seeds = 3") + '[[queue]]\nprogram = "other.py --quick"\n'
    )
    cells = [(one.column, one.method, one.experiment.seed) for one in works(program, options)[:-1]]
    every = [("iid", "fedavg"), ("iid", "local"), ("shards", "fedavg"), ("shards", "local")]
    assert cells == [(*cell, seed) for seed in (0, 1, 2) for cell in every]
    call(program, "status", [*options, "--next", "1"])
    told = capsys.readouterr().out
    assert "made.table1: 0 of 12 runs done, the time of 12 is not known yet\n" in told
    assert "next: made.table1: fedavg on iid, seed 0: 0 of 4 rounds\n" in told
    assert "cannot be run: made.table1: made.table1: method 'unknown': not in kinfed\n" in told
    assert "program: other.py --quick\n" in told


@pytest.mark.parametrize(
    ("queue", "problem"),
    [
        ("queue = 3", "is not a queue"),
        ("[[queue]]\npart = 'a'", "entry 1: method must be of kind str; got None"),
        (QUEUE + "rounds = 3\n", "entry 1: unknown key 'rounds'; known: part, method, column, seeds, scale"),
        (QUEUE + "precision = 'fp8'\n", "entry 1: precision must be one of float32, tf32, bf16; got 'fp8'"),
        (QUEUE + QUEUE + "scale = 0.5\n", "entry 2: made.table1 has another scale or precision above"),
    ],
)
def test_a_wrong_queue_is_named_in_one_line(camp, queue, problem):
    program, options = camp(queue)
    with pytest.raises(SystemExit, match=re.escape(problem)) as stop:
        call(program, "status", options)
    assert "\n" not in str(stop.value)


def test_the_rest_takes_what_like_runs_have_taken(camp, finished, capsys):
    program, options = camp(rounds=8)
    runs = works(program, options)
    for place, seconds in ((0, 4 * 60.0), (4, 4 * 180.0), (2, 8 * 600.0)):  # FedAvg: both seeds on iid, one on shards
        finished(runs[place].folder.path, seconds=seconds, rounds=runs[place].rounds)
        experiment.write(runs[place].experiment.table, runs[place].folder.config)
    (runs[1].folder.path).mkdir(parents=True)
    (runs[1].folder.path / "failed.txt").write_text("it diverged\n")  # before its config
    call(program, "status", options)
    told = capsys.readouterr().out
    # Local on iid once more: 4 rounds of 2 minutes; on shards 8 of 10: FedAvg's second seed, and Local twice.
    assert "made.table1: 3 of 8 runs done, 1 failed, 4 h 8 min left\n" in told
    experiment.write(runs[1].experiment.table, runs[1].folder.config)
    experiment.write({**runs[3].experiment.table, "rounds": 5}, RunFolder(finished(runs[3].folder.path).path).config)
    call(program, "status", options)
    told = capsys.readouterr().out
    assert "made.table1: 3 of 8 runs done, 1 failed, 1 stale, 2 h 48 min left\n" in told
    assert "failed: made.table1: local on iid, seed 0: it diverged\n" in told
    assert "stale: made.table1: local on shards, seed 0: " in told
    assert "holds another experiment" in told
    runs[3].set_aside()
    runs[0].set_aside()
    assert [one.state for one in (runs[0], runs[3])] == ["done", "waiting"]
    assert RunFolder(runs[3].folder.path.with_name("seed-0.aside-0")).is_finished


def test_what_is_finished_is_published_once_and_nothing_is_taken_away(camp, finished, tmp_path, capsys):
    program, options = camp()
    call(program, "publish", options)
    assert "made.table1: nothing is finished yet" in capsys.readouterr().out
    runs = works(program, options)
    for place, (model, early, late) in enumerate(
        [("shared", 0.2, 0.5), ("own", 0.6, 0.7), ("shared", 0.1, 0.3), ("own", 0.8, 0.9), ("shared", 0.2, 0.6)]
    ):
        one = runs[place]
        by_client = {"seed": one.experiment.seed, "clients_scores": {model: [late, late + 0.1]}}
        finished(one.folder.path, scores={model: {"round": 4}}, rounds=4, **by_client)
        experiment.write(one.experiment.table, one.folder.config)
        lines = [
            f"{at},{client},{model},{split},accuracy,{score + client / 10}\n"
            for at, score in ((2, early), (4, late))
            for client in (0, 1)  # two clients, 10 points apart
            for split in ("validation", "test")
        ]
        one.folder.history.write_text("round,client,model,split,metric,value\n" + "".join(lines))
    runs[5].folder.make()
    experiment.write(runs[5].experiment.table, runs[5].folder.config)
    (runs[5].folder.path / "failed.txt").write_text("loss is NaN\n")
    call(program, "publish", options)
    page, kept = tmp_path / "made-tables.md", tmp_path / "tables" / "made.table1"
    files = {path: path.read_text() for path in (page, kept / "table.csv", kept / "history.csv")}
    before, _, rest = files[page].partition("<!-- made.table1 -->")
    assert before == "# Made\n\nOf people.\n\n"
    assert rest.endswith("<!-- end of made.table1 -->\n\nMore.\n")
    assert "kinfed papers run made.table1 --method local,fedavg" in rest
    assert "loss is NaN" in rest
    assert "[statistics](tables/made.table1/statistics.md)" in rest
    assert "Paired differences in points" in (kept / "statistics.md").read_text()
    assert "| Unknown |" not in rest
    with (kept / "table.csv").open() as file:
        ours = {(line["column"], line["method"]): (line["ours"], line["seeds"]) for line in csv.DictReader(file)}
    assert ours == {
        ("iid", "local"): ("75", "1"),
        ("iid", "fedavg"): ("60", "2"),
        ("shards", "local"): ("95", "1"),
        ("shards", "fedavg"): ("35", "1"),
        ("mean", "local"): ("85", "1"),
        ("mean", "fedavg"): ("45", "1"),
    }
    assert (kept / "history.csv").read_text().splitlines() == [
        "column,method,model,score,seeds,2,4",
        "iid,local,own,accuracy,0,0.65,0.75",
        "iid,fedavg,shared,accuracy,0 1,0.25,0.6",
        "shards,local,own,accuracy,0,0.85,0.95",
        "shards,fedavg,shared,accuracy,0,0.15,0.35",
    ]
    capsys.readouterr()
    call(program, "publish", options)
    assert {path: path.read_text() for path in files} == files
    assert f"6 numbers in {page.name}" in capsys.readouterr().out
    with (kept / "table.csv").open() as file:
        scaled = [line | {"seeds": "9", "flags": "scaled 0.5"} for line in csv.DictReader(file)]
    with (kept / "table.csv").open("w") as file:
        writer = csv.DictWriter(file, list(scaled[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(scaled)
    call(program, "publish", options)  # all rounds of one seed are worth more than half of them with nine
    assert {path: path.read_text() for path in files} == files
    shorter = tmp_path / "shorter.toml"
    shorter.write_text(QUEUE + "scale = 0.5\n")
    call(program, "publish", [*options, "--queue", shorter, "--keep", tmp_path / "other"])
    assert {path: path.read_text() for path in files} == files
    assert "left as it is: 6 of its 6 numbers have fewer rounds or seeds in" in capsys.readouterr().out
    page.write_text("# Made\n")
    with pytest.raises(SystemExit, match=r"made-tables.md has no place for it; write where it belongs <!-- made"):
        call(program, "publish", options)
    assert page.read_text() == "# Made\n"


def ended(one, finished, score):
    """Let a run have ended, with this score of every client."""
    model = "own" if one.method == "local" else "shared"
    by_client = {"seed": one.experiment.seed, "clients_scores": {model: [score, score]}}
    finished(one.folder.path, scores={model: {"round": 4}}, rounds=4, **by_client)
    experiment.write(one.experiment.table, one.folder.config)
    lines = [f"4,{client},{model},test,accuracy,{score}\n" for client in (0, 1)]
    one.folder.history.write_text("round,client,model,split,metric,value\n" + "".join(lines))


def test_committed_numbers_stay_where_a_machine_with_their_runs_is_lost(camp, finished, tmp_path, capsys):
    program, options = camp()
    runs = works(program, options)  # both seeds: FedAvg and Local on iid, FedAvg and Local on shards
    for place, score in ((0, 0.5), (1, 0.7), (2, 0.3), (4, 0.6)):
        ended(runs[place], finished, score)
    remember(tmp_path / "keep" / "made.table1")
    call(program, "publish", options)
    page, kept = tmp_path / "made-tables.md", tmp_path / "tables" / "made.table1"
    files = {path: path.read_text() for path in (page, *kept.glob("*"))}
    assert len(files) == 4
    assert (
        "Of 4 runs: fedavg on iid, seeds 0, 1; local on iid, seed 0; fedavg on shards, seed 0.\n"
        in files[kept / "statistics.md"]
    )
    assert "Made with kinfed" in files[page]
    shutil.rmtree(tmp_path / "keep")
    call(program, "publish", options)
    assert {path: path.read_text() for path in files} == files
    states = [one.state for one in works(program, options)]
    assert states == [*["published"] * 3, "waiting", "published", *["waiting"] * 3]
    capsys.readouterr()
    call(program, "status", options)
    assert "made.table1: 4 of 8 runs done, 4 of them published and no longer here" in capsys.readouterr().out

    ended(runs[3], finished, 0.9)
    ended(runs[6], finished, 0.4)
    capsys.readouterr()
    call(program, "publish", options)
    assert "6 numbers in made-tables.md, 3 of them without a run here" in capsys.readouterr().out
    with (kept / "table.csv").open() as file:
        ours = {(line["column"], line["method"]): (line["by_seed"], line["status"]) for line in csv.DictReader(file)}
    assert ours == {
        ("iid", "local"): ("0:70", "1 of 2 seeds"),
        ("iid", "fedavg"): ("0:50 1:60", ""),
        ("shards", "local"): ("0:90", "1 of 2 seeds"),
        ("shards", "fedavg"): ("0:30 1:40", ""),
        ("mean", "local"): ("0:80", "1 of 2 seeds"),  # of a committed number and a new one
        ("mean", "fedavg"): ("0:40 1:50", ""),
    }
    assert (kept / "statistics.md").read_text() == files[kept / "statistics.md"]  # of four runs, not of two
    assert "[statistics](tables/made.table1/statistics.md), of 4 of the 6 runs.\n" in page.read_text()
    assert (kept / "history.csv").read_text().splitlines()[1:] == [
        "iid,local,own,accuracy,0,0.7",
        "iid,fedavg,shared,accuracy,0 1,0.55",
        "shards,local,own,accuracy,0,0.9",
        "shards,fedavg,shared,accuracy,1,0.4",
    ]


def test_committed_numbers_of_other_settings_are_not_mixed_with_new_ones(camp, finished, tmp_path, capsys):
    program, options = camp()
    runs = works(program, options)
    ended(runs[0], finished, 0.5)
    call(program, "publish", options)
    page, table = tmp_path / "made-tables.md", tmp_path / "tables" / "made.table1" / "table.csv"
    shutil.rmtree(tmp_path / "keep")
    page.write_text(page.read_text().replace("4 rounds of 1 epoch", "4 rounds of 2 epochs"))
    files = {path: path.read_text() for path in (page, table)}
    call(program, "publish", options)
    assert "4 rounds of 2 epochs" in page.read_text()
    assert {path: path.read_text() for path in files} == files
    ended(runs[1], finished, 0.7)
    capsys.readouterr()
    call(program, "publish", options)
    assert {path: path.read_text() for path in files} == files
    told = capsys.readouterr().out
    assert "left as it is: 1 of its numbers have no run here, and were made by other settings: 4 clients, all" in told
    assert "4 rounds of 2 epochs" in told
    ended(runs[0], finished, 0.5)  # but once their runs are here again
    call(program, "publish", options)
    assert "4 rounds of 1 epoch" in page.read_text()


def test_a_killed_campaign_goes_on_where_it_was(camp, tmp_path, capsys):
    queue = QUEUE.replace("iid shards mean", "shards").replace("fedavg unknown local", "fedavg")
    program, options = camp(queue.replace("seeds = 2", "seeds = 1"), rounds=200)
    script = tmp_path / "start.py"
    script.write_text(
        f"import os\nimport sys\nfrom pathlib import Path\nsys.path.insert(0, {str(EVIDENCE)!r})\n"
        "from kinfed_papers import published_table\nos.nice = print\n"
        f"published_table.PAPERS = Path({str(tmp_path / 'papers')!r})\nimport campaign\n"
        f"if __name__ == '__main__':\n    campaign.main({['run', *map(str, options)]!r})\n"
    )
    (one,) = works(program, options)
    running = subprocess.Popen([sys.executable, script], stdout=subprocess.DEVNULL)
    while not one.folder.how.exists() or "executor" not in one.folder.read_how():  # then it trains
        assert running.poll() is None
        time.sleep(0.01)
    with pytest.raises(SystemExit, match="a campaign is already running in"):
        call(program, "run", options)
    time.sleep(0.1)
    running.send_signal(signal.SIGKILL)
    running.wait()
    with program.alone(one.folder.path):  # when the run's own process has saved and ended
        assert one.state == "begun"
        assert 0 < one.progress()[0] < 200
    call(program, "run", [*options, "--minutes", "1e-4"])
    assert "the time is over" in capsys.readouterr().out
    call(program, "run", options)
    assert "nothing is left\n" in capsys.readouterr().out
    assert one.state == "done"
    assert not one.folder.models.exists()
    call(program, "publish", options)
    assert "Made with kinfed" in (tmp_path / "made-tables.md").read_text()
    pool.once(one.experiment, tmp_path / "whole", Execution(workers=1))
    assert (tmp_path / "whole" / "history.csv").read_text() == one.folder.history.read_text()


def test_equal_runs_of_two_parts_are_run_once_though_neither_was_there_when_the_queue_was_read(camp, capsys):
    one = QUEUE.replace("iid shards mean", "iid").replace("seeds = 2", "seeds = 1")
    program, options = camp(one + one.replace("made.table1", "made.table1-again"))
    call(program, "run", options)
    assert capsys.readouterr().out.count("begun ") == 2
    second = options[3] / "made.table1-again" / "runs" / "iid"
    assert sorted(path.relative_to(second).as_posix() for path in second.glob("*/seed-0*")) == [
        "fedavg/seed-0.same",
        "local/seed-0.same",
    ]
    assert {one.state for one in works(program, options)} == {"done"}


def test_a_run_that_fails_is_not_tried_again_and_others_go_on(camp, capsys):
    program, options = camp(QUEUE.replace("iid shards mean", "iid").replace("seeds = 2", "seeds = 1"))
    fedavg, local = works(program, options)
    fedavg.folder.make()
    experiment.write(fedavg.experiment.table, fedavg.folder.config)
    fedavg.folder.how.write_text("no settings")
    for _ in range(2):
        with pytest.raises(SystemExit, match="something has failed"):
            call(program, "run", options)
        assert (fedavg.state, local.state) == ("failed", "done")
    assert "how.json cannot be read" in fedavg.failed
    assert "begun" not in capsys.readouterr().out.rpartition("done")[2]


def test_a_run_with_a_checkpoint_of_another_version_begins_again(camp):
    queue = QUEUE.replace("iid shards mean", "iid").replace("unknown local", "").replace("seeds = 2", "seeds = 1")
    program, options = camp(queue)
    (one,) = works(program, options)
    one.folder.make()
    experiment.write(one.experiment.table, one.folder.config)
    one.folder.checkpoint.write_text("of another version")
    call(program, "status", options)
    call(program, "run", options)
    assert (one.state, one.failed) == ("done", "")


def test_a_precision_that_the_device_lacks_is_named_once(camp, capsys):
    program, options = camp(QUEUE + "precision = 'tf32'\n")
    call(program, "run", options)
    told = capsys.readouterr().out
    assert told.count("precision 'tf32' is a GPU's, and this runs on cpu") == 1
    assert not list(options[3].rglob("failed.txt"))


def test_a_run_that_fails_before_it_has_a_folder_is_tried_once(camp, monkeypatch):
    program, options = camp(QUEUE.replace("iid shards mean", "iid").replace("seeds = 2", "seeds = 1"))
    begun = []

    def dies(jobs, execution, count, begin):
        begun.extend(jobs)
        yield from ((name, RunError("its process was killed")) for name in jobs)

    monkeypatch.setattr(program, "side_by_side", dies)
    with pytest.raises(SystemExit, match="something has failed"):
        call(program, "run", [*options, "--minutes", "0.02"])
    runs = works(program, options)
    assert begun == [one.name for one in runs]
    assert {(one.state, one.failed) for one in runs} == {("failed", "its process was killed")}


@pytest.mark.parametrize(
    ("option", "problem"), [(("--device", "cuda:99"), r"cuda:99.*is not here"), (("--jobs", "0"), "at least 1; got 0")]
)
def test_a_wrong_option_fails_before_the_queue_does(camp, option, problem):
    program, options = camp()
    with pytest.raises(SystemExit, match=problem):
        call(program, "run", [*options, *option])
    assert {one.state for one in works(program, options)} == {"waiting"}


def test_models_that_a_killed_campaign_has_left_are_deleted(camp, finished):
    program, options = camp(QUEUE.replace("iid shards mean", "iid").replace("unknown local", "").replace("= 2", "= 1"))
    (one,) = works(program, options)
    finished(one.folder.path)
    experiment.write(one.experiment.table, one.folder.config)
    one.folder.models.write_text("large")
    call(program, "run", options)
    assert not one.folder.models.exists()


def test_what_programs_have_measured_outlives_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EVIDENCE))
    page, federations, compared, deciding = map(
        importlib.import_module, ("kinfed_papers.result_pages", "federations", "comparison_set", "deciding")
    )
    answers, text, scores = tmp_path / "answers.json", tmp_path / "page.md", tmp_path / "deciding"
    answers.write_text("{}")
    text.write_text("# Written by people\n")
    scores.mkdir()
    (scores / "one.csv").write_text(",".join(deciding.FIELDS) + "\n")
    before = {path: path.read_text() for path in (answers, text, scores / "one.csv")}

    def full(path, words, *_, **__):
        with path.open("w") as file:
            file.write(words[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(deciding, "RESULTS", tmp_path)
    monkeypatch.setattr(federations, "KEPT", answers)
    for program in (federations, compared):
        monkeypatch.setattr(program, "measure", lambda *_: {"mean": 1.0})
    monkeypatch.setattr(federations, "cases", lambda *_: [("a case", *[None] * 5)])
    monkeypatch.setattr(compared, "train", lambda *_: None)
    for program, words in (
        (federations, ["measure", "--methods", "local"]),
        (compared, ["rotated-digits", "--answers", answers, "--methods", "local"]),
    ):
        monkeypatch.setattr(sys, "argv", [program.__name__, *map(str, words)])
        with pytest.raises(RunError, match=r"answers\.json: No space left"):
            program.main()
    with pytest.raises(RunError, match=r"page\.md: No space left"):
        page.put(text, "a part", "Some words.", "A title")
    with pytest.raises(ValueError, match="unheard"):
        deciding.collect("one", [{**dict.fromkeys(deciding.FIELDS, 1), "unheard": 1}])
    assert {path: path.read_text() for path in before} == before


def test_a_number_in_a_sentence_is_printed_by_a_command_or_follows_from_such(camp, tmp_path, capsys):
    program, options = camp()
    page = tmp_path / "made-tables.md"
    sound = page.read_text().replace(
        "Of people.",
        "FedAvg has 65.1 % (printed 90), 5.9<!-- = 65.1 - 59.2 --> more, after 4 rounds on 1 May 2026; FL-60,\n"
        "`x = 77`, readings of 14.86<!-- $ kinfed list datasets digits --> and 1,200.\n\n"
        "```console\n$ kinfed run x\n1200 s\n```",
    )
    (tmp_path / "tables" / "made.table1").mkdir(parents=True)
    (tmp_path / "tables" / "made.table1" / "table.csv").write_text("column,ours\niid,65.0831\nshards,59.2\n")
    page.write_text(sound)
    call(program, "check", options)
    for right, wrong, told in (
        ("FedAvg has 65.1", "FedAvg has 65.2", "line 3: 65.2 in: FedAvg has 65.2 %"),
        ("5.9<!--", "5.8<!--", "line 3: 5.8, said to be 65.1 - 59.2, in: FedAvg"),
        ("65.1 - 59.2", "65.2 - 59.3", "line 3: 5.9, said to be 65.2 - 59.3, in: FedAvg"),
        ("14.86<!-- $ kinfed list datasets digits -->", "14.86", "line 4: 14.86 in:"),
        ("and 1,200", "and 1,300", "line 4: 1,300 in:"),
        ("= 65.1 - 59.2", "= exit()", "line 3: 5.9, said to be exit(), in: FedAvg"),
    ):
        page.write_text(sound.replace(right, wrong))
        with pytest.raises(SystemExit) as stop:
            call(program, "check", options)
        first, count = str(stop.value).splitlines()
        assert f"made-tables.md, {told}" in first
        assert count == "1 numbers in sentences that no command has printed"
    page.write_text(sound)
    other = tmp_path / "speed.md"
    other.write_text(
        "It takes 37 s; 65.1 % is another page's.\n\nWritten by `python evidence/speed.py`. 37 s, of 99.\n"
    )
    with pytest.raises(SystemExit, match=r"speed\.md, line 1: 65\.1 in") as stop:
        call(program, "check", options)
    assert "99" not in str(stop.value)
