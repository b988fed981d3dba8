"""Runs that are followed, resumed and stopped, by a stand-in for Flower's command."""

import json
import os
import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("cryptography", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed import RunError
from kinfed.flower import follow
from kinfed.interrupts import Terminated, heard


@pytest.fixture
def flower(tmp_path, monkeypatch, finished):
    """A stand-in for Flower's command; returns the status of its runs, and which commands were given."""
    commands, runs, done = [], {}, finished(tmp_path / "done").read_summary()

    def flwr(home, *arguments):
        commands.append(arguments[0])
        if arguments[0] == "run":
            runs[str(len(runs) + 1)] = "running"
            return {"run-id": len(runs)}
        if arguments[3] not in runs:
            raise RunError("no such run")
        return {"runs": [{"status": runs[arguments[3]]}]}

    def ending(home, id, report):
        runs[id] = "finished:completed"
        return ["round 1 of 1", f"done: {json.dumps(done.to_dict())}"]

    monkeypatch.setattr(follow, "flwr", flwr)
    monkeypatch.setattr(follow, "follow", ending)
    monkeypatch.setattr(follow.signal, "signal", lambda *_: None)
    return SimpleNamespace(commands=commands, runs=runs)


def test_a_run_in_progress_is_followed_and_not_started_twice(tmp_path, flower):
    out, lines = tmp_path / "out", []
    out.mkdir()
    assert follow.run(tmp_path, out, lines.append).rounds == 1
    assert (out / ".run").read_text() == "1"
    flower.runs["1"] = "running"  # as if the program that watched it had been killed
    flower.commands.clear()
    assert follow.run(tmp_path, out, lines.append).rounds == 1
    assert lines == ["the run is in progress; following it"]
    assert "run" not in flower.commands
    assert follow.run(tmp_path, out, lines.append).rounds == 1  # it is over: another
    (out / ".run").write_text("of another SuperLink")
    assert follow.run(tmp_path, out, lines.append).rounds == 1
    assert flower.commands.count("run") == 2


def test_a_run_that_is_stopped_is_stopped_at_the_superlink_too(tmp_path, monkeypatch):
    calls = []

    def flwr(home, *arguments):
        calls.append(arguments[:2])
        if arguments[0] == "run":
            os.kill(os.getpid(), signal.SIGTERM)  # while its number is not known yet
        return {"run-id": 7}

    monkeypatch.setattr(follow, "flwr", flwr)
    hung_up = signal.getsignal(signal.SIGHUP)
    try:
        with pytest.raises(Terminated, match="stopped; resume it: kinfed flower run --resume"), heard():
            follow.run(tmp_path, tmp_path, print)
    finally:
        signal.signal(signal.SIGHUP, hung_up)
    assert [call[0] for call in calls] == ["run", "stop"]
    assert calls[1][1] == (tmp_path / follow.RUN).read_text() == "7"
