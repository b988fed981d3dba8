"""Runs one after the other and side by side."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from multiprocessing import active_children

import pytest

from kinfed.errors import RunError, UsageError
from kinfed.runs.config import experiment as config
from kinfed.runs.launch import Job, run_all
from kinfed.runs.pool import share_work
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.execution import Execution

SMALL = ["rounds=2", "federation.clients=4", "federation.partition.groups=2", "model=linear"]
MACHINE = Execution("vmap", checkpoint_seconds=0)
ALONE = partial(run_all, execution=MACHINE)
BESIDE = partial(ALONE, parallel=2)


def asked(folder, **overrides):
    made = {name: config.resolve(config.read("local", [*SMALL, *more])) for name, more in overrides.items()}
    return [Job(name, experiment, folder / name) for name, experiment in made.items()]


def test_side_by_side_every_run_ends_as_it_does_alone(tmp_path):
    several = {"a": ["seed=1"], "b": ["training.optimiser.lr=1e38"]}
    said = []
    alone = {one.name: one for one in ALONE(asked(tmp_path / "1", **several), on_begin=said.append)}
    assert said == list(alone) == ["a", "b"]
    beside = {one.name: one for one in BESIDE(asked(tmp_path / "2", **several, c=[]), on_begin=said.append)}
    assert sorted(said[2:]) == sorted(beside) == ["a", "b", "c"]
    assert alone["a"].problem is beside["a"].problem is beside["c"].problem is None
    summaries = [RunFolder(one["a"].folder).read_summary() for one in (alone, beside)]
    assert summaries[0].clients == summaries[1].clients
    assert isinstance(beside["b"].problem, RunError)
    assert str(alone["b"].problem) == str(beside["b"].problem)

    # Nothing that is finished is done again, and nothing else goes into its folder.
    before = (tmp_path / "2" / "a" / "history.csv").stat().st_mtime_ns
    again = list(BESIDE(asked(tmp_path / "2", a=["seed=1"]), on_begin=said.append))
    assert [(one.name, one.problem) for one in again] == [("a", None)]
    assert said[5:] == []
    assert (tmp_path / "2" / "a" / "history.csv").stat().st_mtime_ns == before
    with pytest.raises(UsageError, match="holds another experiment"):
        next(BESIDE(asked(tmp_path / "2", e=[], a=["seed=3"]), on_begin=said.append))
    assert not (tmp_path / "2" / "e").exists()
    with pytest.raises(UsageError, match="jobs counts parallel runs, so it must be at least 1; got 0"):
        next(ALONE([], parallel=0, on_begin=said.append))


def _wait_for(path, seconds=60):
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"no {path.name} after {seconds} s"
        time.sleep(0.02)


PROGRAM = """
import sys
from pathlib import Path
from kinfed.runs.config import experiment as config
from kinfed.interrupts import catch_signals
from kinfed.runs.launch import Job, run_all
from kinfed.runs.pool import share_work
from kinfed.simulation.execution import Execution
small = sys.argv[2:]
made = {n: config.resolve(config.read("local", [*small, f"seed={n}"])) for n in "12"}
both = [Job(name, one, Path(sys.argv[1]) / name) for name, one in made.items()]
if __name__ == "__main__":
    machine = Execution("vmap", checkpoint_seconds=0)
    with catch_signals():
        for one in run_all(both, machine, parallel=2):
            print(one.name, one.problem, flush=True)
"""


SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGKILL)]


@pytest.mark.parametrize("number", [signal.SIGTERM, *SLOW])
def test_when_it_is_interrupted_or_killed_its_processes_end_and_leave_what_can_be_taken_up(tmp_path, number):
    program = tmp_path / "program.py"
    program.write_text(
        f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{PROGRAM}"
    )  # not SIG_IGN
    long = [*SMALL, "rounds=1000000", "evaluate_every=100"]
    process = subprocess.Popen([sys.executable, str(program), str(tmp_path), *long], stderr=subprocess.DEVNULL)
    checkpoints = [tmp_path / name / "checkpoint.safetensors" for name in "12"]
    for path in checkpoints:
        _wait_for(path)
    process.send_signal(number)
    assert process.wait(60) != 0
    before = None
    while before != (before := [path.stat().st_mtime_ns for path in checkpoints]):  # nobody writes there any more
        time.sleep(1)
    assert not list(tmp_path.rglob("*.part"))


def test_a_run_whose_process_is_killed_is_told_and_the_others_go_on(tmp_path):
    both = asked(tmp_path, long=["rounds=1000000", "evaluate_every=100"], short=[])
    with closing(BESIDE(both)) as outcomes:
        assert next(outcomes)[::2] == ("short", None)
        _wait_for(tmp_path / "long" / "checkpoint.safetensors")
        (process,) = active_children()
        process.kill()
        name, folder, problem = next(outcomes)
    assert (name, folder) == ("long", tmp_path / "long")
    assert str(problem) == "its process was killed (exit code -9); was there enough memory?"
    assert not active_children()


def test_warnings_of_other_processes_are_heard(tmp_path):
    crowded = config.resolve(config.read("fedamp", [*SMALL, "method.alpha=5000"]))
    with pytest.warns(UserWarning, match="a client resembles so many others"):
        outcomes = list(BESIDE([Job("a", crowded, tmp_path / "a")]))
    assert outcomes == [("a", tmp_path / "a", None)]


def test_copies_of_this_process_share_work(tmp_path):
    def work(i):
        while len(list(tmp_path.iterdir())) < 2 and i < 2:  # each of the first two waits for the other
            (tmp_path / str(os.getpid())).touch()
            time.sleep(0.01)
        return i, os.getpid()

    results = share_work(work, 20, 2)
    assert [results[i][0] for i in range(20)] == list(range(20))
    assert len({process for _, process in results.values()}) == 2
    assert share_work(work, 20, 1).keys() == results.keys()
    assert share_work(work, 0, 2) == {}
    assert not active_children()


def test_what_a_killed_copy_was_doing_is_missing(tmp_path):
    here = os.getpid()

    def work(i):
        if os.getpid() == here:
            while not (tmp_path / "killed").exists():
                time.sleep(0.01)
        else:
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return i

    assert len(share_work(work, 6, 2)) == 5


def test_what_this_process_raises_ends_its_copies(tmp_path):
    def work(i):
        (tmp_path / str(os.getpid())).touch()
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        if os.getpid() != here:
            time.sleep(60)
        raise KeyboardInterrupt

    here, began = os.getpid(), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        share_work(work, 2, 2)
    assert time.monotonic() - began < 30
    assert not active_children()
