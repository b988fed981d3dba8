"""Starting and stopping a SuperLink, and whose keys it admits."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("cryptography", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed import RunError
from kinfed.flower import gate, keys, superlink
from kinfed.flower.link import Link
from kinfed.flower.subprocesses import free_port
from kinfed.interrupts import Terminated, heard


def test_the_number_of_another_program_is_not_a_superlink():
    assert not superlink.is_alive(superlink.Started("", "", os.getpid()))
    assert not superlink.is_alive(superlink.Started("", "", 2**22 + 1))


@pytest.fixture
def slow_superlink(tmp_path, monkeypatch):
    """A SuperLink that never answers; returns the number of its process, once there is one."""
    script = f"echo $$ > {tmp_path}/pid; sleep 60"
    monkeypatch.setattr(gate, "command", lambda name, *arguments: ["sh", "-c", script, name, *arguments])

    def number():
        deadline = time.monotonic() + 20
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int((tmp_path / "pid").read_text())

    return number


def test_an_interrupt_before_the_superlink_answers_ends_it(tmp_path, slow_superlink, monkeypatch):
    def interrupted(self, is_alive):
        assert json.loads((tmp_path / "home" / "link.json").read_text())["pid"] == slow_superlink()  # `down` finds it
        raise KeyboardInterrupt

    monkeypatch.setattr(Link, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        superlink.up(tmp_path / "home", "127.0.0.1", free_port(), None, lambda line: None)
    assert not (tmp_path / "home" / "link.json").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(slow_superlink(), 0)


def test_a_superlink_with_an_old_certificate_is_reported(tmp_path, server, monkeypatch):
    folder, lines = tmp_path / "keys", []
    keys.make(folder, [], [])
    address = server(folder)
    (tmp_path / "link.json").write_text(json.dumps({"address": address, "ca": str(folder / "ca.crt"), "pid": 1}))
    monkeypatch.setattr(superlink, "is_alive", lambda started: True)
    monkeypatch.setattr(superlink, "admit", lambda *_: None)
    go = lambda: superlink.up(tmp_path, "127.0.0.1", 1, folder, lines.append)  # noqa: E731
    go()
    assert lines == [f"the SuperLink is already running at {address}"]
    keys.make(folder, ["hub"], [])
    go()
    assert lines[2] == (
        f"it still uses the certificate that it was started with, not the one in {folder}; "
        "restart it: kinfed flower down, then up"
    )
    for name in ("ca.crt", "ca.key"):
        (folder / name).unlink()
    keys.make(folder, [], [])
    with pytest.raises(RunError, match=r"cannot be trusted .* restart it: kinfed flower down, then up"):
        go()


def test_a_superlink_is_known_to_down_whenever_its_start_is_interrupted(tmp_path, monkeypatch):
    real, started = subprocess.Popen, []

    def popen(command, **how):
        started.append(real([sys.executable, "-c", "import time; time.sleep(30)", "flower-superlink"], **how))
        os.kill(os.getpid(), signal.SIGTERM)  # before anything is written
        return started[0]

    monkeypatch.setattr(superlink.subprocess, "Popen", popen)
    try:
        with pytest.raises(Terminated), heard():
            superlink.up(tmp_path, "127.0.0.1", free_port(), None, print)
        monkeypatch.undo()
        superlink.down(tmp_path, print)
        assert started[0].poll() is not None
    finally:
        started[0].kill()
        started[0].wait()
