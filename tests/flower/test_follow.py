"""Runs that are followed, resumed and stopped, by a stand-in for their process."""

import json
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("cryptography", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed import RunError
from kinfed.interrupts import Terminated, catch_signals
from kinfed_flower.programs import ending, follow, subprocesses

PROCESS = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[2])
say = (out / "journal.log").open("a")
time.sleep(0.2)
for line in {lines}:
    print(line, file=say, flush=True)
known = json.loads((out / ".run").read_text()) if (out / ".run").exists() else {{}}
time.sleep({seconds})
if {ended!r}:
    (out / ".run").write_text(json.dumps(known | {ended!r}))
if {ended!r}.get("ended") == "finished":
    (out / "summary.json").write_text({summary!r})
"""


@pytest.fixture
def process(tmp_path, monkeypatch, finished):
    """Has the next processes of runs be scripts that say such lines and end so; returns those that were started."""
    made, ways = [], []
    summary = finished(tmp_path / "done").summary.read_text()
    hung_up = signal.getsignal(signal.SIGHUP)

    def start(module, *arguments, home, log):
        lines, ended, seconds = ways.pop(0)
        text = PROCESS.format(lines=lines, ended=ended, seconds=seconds, summary=summary)
        command = [sys.executable, "-c", text, *arguments, f"kinfed_flower.programs.{module}"]
        made.append(subprocess.Popen(command, start_new_session=True))
        return made[-1]

    def next_is(*lines, seconds=0.5, **ended):
        ways.append((lines, ended, seconds))

    monkeypatch.setattr(follow, "start", start)
    (tmp_path / "out").mkdir()
    yield made, next_is
    signal.signal(signal.SIGHUP, hung_up)
    for one in made:
        one.kill()
        one.wait()


def test_a_run_is_started_and_followed_to_its_end(tmp_path, process):
    made, next_is = process
    next_is("round 1 of 1", ended="finished")
    lines = []
    assert follow.run(tmp_path, tmp_path / "out", lines.append, ["mlflow"]).rounds == 1
    assert lines == ["round 1 of 1"]
    assert "mlflow" in made[0].args
    assert json.loads((tmp_path / "run.json").read_text()) == {"out": str(tmp_path / "out")}


def test_a_run_in_progress_is_followed_and_not_started_twice(tmp_path, process):
    made, next_is = process
    next_is("round 1 of 1", seconds=3, ended="finished")
    out, lines = tmp_path / "out", []
    assert follow._start(tmp_path, out) == made[0].pid  # as if the program that watched it had been killed
    assert follow.run(tmp_path, out, lines.append).rounds == 1
    assert lines == ["the run is in progress; following it", "round 1 of 1"]
    assert len(made) == 1


def test_a_process_that_dies_is_replaced_until_it_does_so_thrice_without_a_round(tmp_path, process):
    made, next_is = process
    for said in (["round 1 of 3"], [], []):
        next_is(*said)
    next_is()
    lines = []
    with pytest.raises(RunError, match=r"the process of the run has ended; see .*; resume it: kinfed flower run"):
        follow.run(tmp_path, tmp_path / "out", lines.append)
    assert len(made) == 4
    assert lines.count("the process of the run has ended; another one continues after the last complete round") == 3


def test_a_run_that_fails_says_why_at_once(tmp_path, process):
    made, next_is = process
    next_is(ended="failed", why="the disk is full")
    with pytest.raises(RunError, match=r"^the disk is full; resume it: kinfed flower run"):
        follow.run(tmp_path, tmp_path / "out", print)
    assert len(made) == 1


def test_a_run_whose_program_is_stopped_is_stopped(tmp_path, process):
    made, next_is = process
    next_is("round 1 of 9", seconds=60)

    def stop(line):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated, match="stopped; resume it: kinfed flower run"), catch_signals():
        follow.run(tmp_path, tmp_path / "out", stop)
    with pytest.raises(ProcessLookupError):
        os.kill(made[0].pid, 0)
    assert not ending.process(tmp_path / "out")


def test_a_process_that_has_just_begun_is_alive():
    """For an instant after its start the system has no command line of it."""
    for _ in range(60):
        command = [sys.executable, "-c", "import time; time.sleep(30)", f"kinfed_flower.programs.{ending.PROGRAM}"]
        with subprocess.Popen(command) as process:
            alive = subprocesses.is_alive(process.pid, ending.PROGRAM)
            process.kill()
        assert alive
