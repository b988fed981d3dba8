"""Starting and stopping a SuperLink, and whose keys it admits."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("cryptography", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed import RunError, UsageError
from kinfed.interrupts import Terminated, catch_signals
from kinfed_flower.programs import ending, subprocesses, superlink
from kinfed_flower.wire import keys
from kinfed_flower.wire.link import Link


def test_the_number_of_another_program_is_not_a_superlink():
    assert not subprocesses.is_alive(os.getpid(), superlink.PROGRAM)
    assert not subprocesses.is_alive(2**22 + 1, superlink.PROGRAM)


@pytest.fixture
def slow_superlink(tmp_path, monkeypatch):
    """A SuperLink that never answers; returns the number of its process, once there is one."""

    def start(module, *arguments, home, log):
        command = ["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60", f"{subprocesses.__package__}.{module}"]
        return subprocess.Popen(command, start_new_session=True)

    monkeypatch.setattr(superlink, "start", start)

    def number():
        deadline = time.monotonic() + 20
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int((tmp_path / "pid").read_text())

    return number


def test_an_interrupt_before_the_superlink_answers_ends_it(tmp_path, slow_superlink, monkeypatch, free_port):
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
    monkeypatch.setattr(superlink, "is_alive", lambda pid, program: True)
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


def test_a_superlink_is_known_to_down_whenever_its_start_is_interrupted(tmp_path, monkeypatch, free_port):
    started = []

    def start(module, *arguments, home, log):
        command = [sys.executable, "-c", "import time; time.sleep(30)", f"{subprocesses.__package__}.{module}"]
        started.append(subprocess.Popen(command, start_new_session=True))
        os.kill(os.getpid(), signal.SIGTERM)  # before anything is written
        return started[0]

    monkeypatch.setattr(superlink, "start", start)
    try:
        with pytest.raises(Terminated), catch_signals():
            superlink.up(tmp_path, "127.0.0.1", free_port(), None, print)
        superlink.down(tmp_path, print)
        assert started[0].poll() is not None
    finally:
        started[0].kill()
        started[0].wait()


def test_down_ends_the_run_in_progress_too(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", "import time; time.sleep(30)", f"{ending.__package__}.{ending.PROGRAM}"]
    with subprocess.Popen(command, start_new_session=True) as run:
        ending.note(out, pid=run.pid)
        (tmp_path / superlink.LAST).write_text(json.dumps({"out": str(out)}))
        assert ending.process(out) == run.pid
        with pytest.raises(UsageError, match="no SuperLink of"):
            superlink.down(tmp_path, print)
        with pytest.raises(ProcessLookupError):
            os.kill(run.pid, 0)
    assert not ending.process(out)
