"""Runs that are stopped: when a signal is heard, what is kept, and that a run goes on to the same bytes."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch

from kinfed import SGD, Execution, Federation, Training, UsageError, fit
from kinfed.cli import main
from kinfed.core import checkpoint
from kinfed.core.history import Recorder
from kinfed.interrupts import Terminated, catch_signals, defer_signals
from kinfed.methods import FedAGHN, Local
from kinfed.runs import run_folder
from kinfed.simulation.simulation import Simulation
from kinfed.simulation.state_store import States

NUMBERS = (signal.SIGINT, signal.SIGTERM)
COMMAND = ["run", "fedaghn", "rounds=4", "federation.clients=4", "federation.partition.groups=2", "model=linear"]
COMMAND += ["how.checkpoint_seconds=0", "--quiet"]
FILES = ("models.safetensors", "history.csv", "relations.npz", "diagnostics.csv")


@pytest.fixture(autouse=True)
def ctrl_c():
    """Whoever runs the tests in the background has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def handlers():
    return [signal.getsignal(number) for number in NUMBERS]


def test_signals_are_exceptions_while_they_are_heard():
    before = handlers()
    for number, came in zip(NUMBERS, (KeyboardInterrupt, Terminated), strict=True):
        with pytest.raises(KeyboardInterrupt) as caught, catch_signals():
            signal.raise_signal(number)
        assert caught.type is came
        assert handlers() == before


def test_what_is_ignored_stays_so_and_other_threads_ask_for_nothing():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with catch_signals():
        signal.raise_signal(signal.SIGINT)
    before, seen = handlers(), []

    def other():
        with catch_signals(), defer_signals():
            seen.extend(handlers())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == before


def test_a_signal_waits_for_the_end_of_what_must_be_whole_and_a_second_does_not():
    done = []

    def work(signals):
        with defer_signals():
            with defer_signals():
                for _ in range(signals):
                    signal.raise_signal(signal.SIGTERM)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(Terminated), catch_signals():
        work(1)
    assert done == ["inner", "outer"]
    with pytest.raises(Terminated), catch_signals():
        work(2)
    assert done == ["inner", "outer"]
    with catch_signals():  # nothing is left of it
        work(0)
    assert done[2:] == ["inner", "outer", "after"]


def data():
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    return Federation.from_arrays(x, (x.sum(1) > 0).long(), torch.arange(6).repeat_interleave(10))


def run(folder, method=Local, **how):
    torch.manual_seed(0)
    training = Training(epochs=1, batch=4, optimiser=SGD(0.1))
    return fit(
        method(), data(), torch.nn.Linear(5, 2), rounds=5, training=training, folder=folder, execution=Execution(**how)
    )


PLACES = (Simulation, "train"), (States, "put"), (States, "settle"), (Recorder, "add")
MOMENTS = [(place, when) for place in PLACES for when in ("before", "after")]


@pytest.mark.parametrize(
    ("place", "when", "as_a_program"), [(*moment, i % 4 in (0, 3)) for i, moment in enumerate(MOMENTS)]
)
def test_wherever_it_is_interrupted_a_fit_goes_on_to_the_same_bits(place, when, as_a_program, tmp_path, monkeypatch):
    unbroken, calls = run(None), []
    real = getattr(*place)

    def interrupting(*asked, **how):
        calls.append(1)
        if len(calls) == 3 and when == "before":
            signal.raise_signal(signal.SIGINT)
        found = real(*asked, **how)
        if len(calls) == 3 and when == "after":
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(*place, interrupting)
    with pytest.raises(KeyboardInterrupt), catch_signals() if as_a_program else nullcontext():
        run(tmp_path, checkpoint_seconds=1e9)
    monkeypatch.undo()
    if as_a_program:  # a round that is being counted is counted, so that there is always something to keep
        assert checkpoint.how(tmp_path / "checkpoint.safetensors")["executor"] == "fused"
    resumed = run(tmp_path)
    assert torch.equal(resumed.history.models["theta"], unbroken.history.models["theta"])
    assert torch.equal(resumed.history.curve("own", "test", "loss"), unbroken.history.curve("own", "test", "loss"))


def test_an_interruption_does_not_write_the_same_checkpoint_twice(tmp_path, monkeypatch):
    saved, real = [], checkpoint.save

    def save(path, progress, history):
        saved.append(progress.done)
        real(path, progress, history)
        if progress.done == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr("kinfed.runs.checkpoints.PAUSE", 0)
    with pytest.raises(Terminated), catch_signals():
        run(tmp_path, checkpoint_seconds=0)
    assert saved == [1, 2]


def test_a_fit_runs_in_any_thread(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(run(tmp_path, checkpoint_seconds=0)))
    thread.start()
    thread.join()
    assert found[0].history.cost.done == 5


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_the_time_between_checkpoints_is_checked(seconds, tmp_path):
    with pytest.raises(UsageError, match=r"Execution.checkpoint_seconds must be zero or more; got"):
        run(tmp_path / "a", checkpoint_seconds=seconds)
    assert not (tmp_path / "a").exists()


class Killed(BaseException):
    """SIGKILL, as far as one process can play it: nothing is kept."""


def numbers(folder):
    return [(folder / name).read_bytes() for name in FILES]


def stop_in_round(number, stop, monkeypatch):
    real = Simulation.train

    def train(self, round, cohort, sent):
        if round == number:
            stop()
        return real(self, round, cohort, sent)

    monkeypatch.setattr(Simulation, "train", train)


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_run_killed_before_its_first_checkpoint_goes_on_as_it_was_asked_for(seeds, tmp_path, monkeypatch):
    command = [*COMMAND, f"seeds={seeds}", "how.executor=loop", "how.precision=bf16"]
    assert main([*command, "--out", str(tmp_path / "a")]) == 0

    def kill():
        raise Killed

    stop_in_round(0, kill, monkeypatch)
    with pytest.raises(Killed):
        main([*command, "--out", str(tmp_path / "b")])
    monkeypatch.undo()
    assert main(["resume", str(tmp_path / "b"), "--quiet"]) == 0
    for seed in [""] if seeds == 1 else ["seed-0", "seed-1"]:
        assert numbers(tmp_path / "a" / seed) == numbers(tmp_path / "b" / seed)
        assert not (tmp_path / "b" / seed / "how.json").exists()


def test_what_was_asked_and_what_was_found_is_written_before_the_first_round(tmp_path, monkeypatch):
    def look():
        for name, value in {"executor": "fused", "precision": "float32", "device": "cpu", "workers": 1}.items():
            assert json.loads((tmp_path / "a" / "how.json").read_text())[name] == value
        raise Killed

    stop_in_round(0, look, monkeypatch)
    with pytest.raises(Killed):
        main([*COMMAND, "how.workers=1", "--out", str(tmp_path / "a")])
    (tmp_path / "a" / "how.json").write_text("{")
    assert main(["resume", str(tmp_path / "a"), "--quiet"]) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_program_that_is_stopped_keeps_its_rounds_and_says_how_to_go_on(number, code, tmp_path, capsys, monkeypatch):
    assert main([*COMMAND, "--out", str(tmp_path / "a")]) == 0
    before = handlers()
    stop_in_round(2, lambda: signal.raise_signal(number), monkeypatch)
    capsys.readouterr()
    assert main([*COMMAND, "how.checkpoint_seconds=1000", "--out", str(tmp_path / "b")]) == code
    assert capsys.readouterr().err == f"kinfed: interrupted; resume with: kinfed resume {tmp_path / 'b'}\n"
    assert handlers() == before
    monkeypatch.undo()
    begun = []
    stop_in_round(2, lambda: begun.append(1), monkeypatch)
    assert main(["resume", str(tmp_path / "b"), "--quiet"]) == 0
    assert begun
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")


@pytest.mark.parametrize("stop", [lambda: signal.raise_signal(signal.SIGTERM), "kill"])
def test_a_run_stopped_while_its_folder_is_written_ends_with_the_same_bytes(stop, tmp_path, monkeypatch):
    assert main([*COMMAND, "--out", str(tmp_path / "a")]) == 0
    real = run_folder.write_relations

    def write(*asked):
        if stop == "kill":
            raise Killed
        stop()
        real(*asked)

    monkeypatch.setattr(run_folder, "write_relations", write)
    command = [*COMMAND, "--out", str(tmp_path / "b")]
    if stop == "kill":
        with pytest.raises(Killed):
            main(command)
        (tmp_path / "b" / ".history.csv.1.part").write_text("half")
    else:
        assert main(command) == 143
        assert (tmp_path / "b" / "summary.json").exists()  # what was begun was brought to its end
    monkeypatch.undo()
    assert main(["resume", str(tmp_path / "b"), "--quiet"]) == 0
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert sorted(os.listdir(tmp_path / "a")) == sorted(os.listdir(tmp_path / "b"))


def test_a_half_written_table_is_swept_up(tmp_path):
    command = ["sweep", "local", *COMMAND[2:], "--out", str(tmp_path)]
    (tmp_path / ".table.md.1.part").write_text("half")
    assert main(command) == 0
    assert sorted(os.listdir(tmp_path)) == ["runs", "table.csv", "table.md"]


EARLY = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from kinfed.cli import main
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            signal.raise_signal(int(sys.argv[1]))
sys.meta_path.insert(0, Finder())
sys.exit(main(["run", "local", "--out", sys.argv[2]]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_program_can_be_stopped_while_it_is_still_being_imported(number, code, tmp_path):
    command = [sys.executable, "-c", EARLY, str(int(number)), str(tmp_path / "run")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (code, "", "kinfed: interrupted\n")
    assert not (tmp_path / "run").exists()


def test_equal_runs_give_equal_bytes_without_an_executor_being_named(tmp_path):
    for name in "ab":
        assert main([*COMMAND, "--out", str(tmp_path / name)]) == 0
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")


def test_a_server_with_a_graph_goes_on_from_its_last_whole_round(tmp_path, monkeypatch):
    unbroken = run(None, FedAGHN)
    stop_in_round(3, lambda: signal.raise_signal(signal.SIGTERM), monkeypatch)
    with pytest.raises(Terminated), catch_signals():
        run(tmp_path, FedAGHN, checkpoint_seconds=1e9)
    monkeypatch.undo()
    resumed = run(tmp_path, FedAGHN)
    assert torch.equal(resumed.history.models["theta"], unbroken.history.models["theta"])
    assert torch.equal(resumed.relation, unbroken.relation)
