"""What a site's operator is told of its SuperNode: stand-ins for it print what the real one prints."""

import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("cryptography", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed import RunError, UsageError
from kinfed.flower import gate
from kinfed.flower import node as module
from kinfed.flower.link import Link
from kinfed.flower.site_reading import Reading

UNKNOWN = """\\033[91mERROR \\033[0m:     Exit Code: 305
Failed to initialize the connection to the SuperLink.
[code: 2004] Failed to activate SuperNode.
"""
CONNECTED = """\\033[92mINFO \\033[0m:      SuperNode ID: 123
\\033[92mINFO \\033[0m:      [RUN 7, ROUND 0]
\\033[92mINFO \\033[0m:      Receiving: query.hello message (ID: 1)
\\033[92mINFO \\033[0m:      [RUN 7, ROUND 3]
\\033[92mINFO \\033[0m:      Receiving: train.round message (ID: 2)
kinfed: client a: no space
"""


@pytest.fixture
def node(tmp_path, server, monkeypatch):
    """Runs a node whose SuperNode is a script; returns what was reported and how it ended."""
    (tmp_path / "x.npz").touch()
    address = server()

    def go(script, on_report=lambda line: None):
        monkeypatch.setattr(gate, "command", lambda name, *arguments: ["sh", "-c", script, name, *arguments])
        lines = []

        def report(line):
            lines.append(line)
            on_report(line)

        with pytest.raises(RunError) as ended:
            module.run("a", tmp_path / "x.npz", Reading(), tmp_path / "state", Link(address), None, "cpu", [], report)
        return lines, str(ended.value)

    return go


def test_a_node_reports_what_matters_and_logs_the_rest(node, tmp_path):
    lines, ended = node(f"printf '{CONNECTED}'; exit 3")
    assert lines[0].startswith("client a is connected to 127.0.0.1:")
    assert lines[1:] == ["round 3", "client a: no space"]
    assert ended.startswith("the node of a ended: exit code 3; see ")
    assert "query.hello" in (tmp_path / "state" / "a" / "node" / "node.log").read_text()


def test_a_node_that_is_not_admitted_tries_again_and_then_says_what_to_do(node, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds, real=time.sleep: real(min(seconds, 0.3)))
    # Once it has reported that it is not admitted yet, the time is up.
    expire = lambda line: monkeypatch.setattr(module, "FORGET", 0.0)  # noqa: E731
    lines, ended = node(f"printf '{UNKNOWN}'; sleep 60", expire)
    assert len(lines) == 1
    assert "not admitted yet: 127.0.0.1:" in lines[0]
    assert "does not know the key of a: put its key.pub into sites/a of the server's keys" in ended


def test_a_node_is_admitted_once_its_predecessor_is_forgotten(node, tmp_path, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds, real=time.sleep: real(min(seconds, 0.1)))
    flag = tmp_path / "tried"
    lines, ended = node(f"if [ -e {flag} ]; then printf '{CONNECTED}'; exit 3; fi; touch {flag}; printf '{UNKNOWN}'")
    assert [line for line in lines if "is connected" in line]
    assert "exit code 3" in ended


def test_a_node_without_an_exit_message_is_explained_by_its_first_error(node):
    _, ended = node("echo 'ImportError: no module'; echo 'TypeError: more'; exit 1")
    assert ended.startswith("the node of a ended: ImportError: no module; see ")


def test_programs_that_a_node_started_end_with_it(node, tmp_path):
    node(f"sleep 300 & echo $! > {tmp_path}/pid; exit 1")
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a process was left behind")


def test_a_client_has_one_node_at_a_time(tmp_path):
    home = tmp_path / "node"
    home.mkdir()
    hold = (
        "import fcntl,sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(home / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="a node of client a is already running"), module.only_one(home, "a"):
            pass
        other.stdin.close()
    with module.only_one(home, "a"):
        pass


@pytest.mark.parametrize("end", ["exit 0", "echo \"httpx.HTTPStatusError: Client error '401 Unauthorized'\"; exit 1"])
def test_a_node_that_the_server_removed_says_so(node, end):
    _, ended = node(f"printf '{CONNECTED}'; {end}")
    assert "the node of a ended: the server no longer knows its key" in ended
