"""What a person is told of Flower's programs: stand-ins for these say what the real ones say."""

import http.server
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("cryptography", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed import RunError, UsageError
from kinfed.flower import keys, processes
from kinfed.flower.processes import Link
from kinfed.interrupts import Terminated, heard

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
def server(tmp_path):
    """Starts a web server that answers anything, with TLS or without; returns its address."""
    started = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    def start(folder=None):
        made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        if folder:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server.crt", folder / "server.key")
            made.socket = context.wrap_socket(made.socket, server_side=True)
        made.handle_error = lambda *_: None
        threading.Thread(target=made.serve_forever, daemon=True).start()
        started.append(made)
        return f"127.0.0.1:{made.server_address[1]}"

    yield start
    for made in started:
        made.shutdown()
        made.server_close()


def test_a_superlink_is_reached_or_it_is_said_why_not(tmp_path, server):
    keys.make(tmp_path / "keys", [], [])
    keys.make(tmp_path / "other", [], [])
    secured, open_ = server(tmp_path / "keys"), server()
    ca = str(tmp_path / "keys" / "ca.crt")
    assert Link(secured, ca).problem() == ""
    assert Link(open_).problem() == ""
    assert "is not to be trusted" in Link(secured, str(tmp_path / "other" / "ca.crt")).problem()
    assert "was its SuperLink started with --insecure?" in Link(open_, ca).problem()
    assert "if its SuperLink uses TLS, give --keys" in Link(secured).problem()
    assert Link("127.0.0.1:9", ca).problem() == "nobody"
    assert "there is no host nowhere.invalid" in Link("nowhere.invalid:80", ca).problem()
    (tmp_path / "no.crt").write_text("no certificate")
    assert "no.crt is not a certificate" in Link(secured, str(tmp_path / "no.crt")).problem()
    assert "is not a certificate" in Link(secured, str(tmp_path / "none.crt")).problem()


@pytest.fixture
def node(tmp_path, server, monkeypatch):
    """Runs a node whose SuperNode is a script; returns what was said and how it ended."""
    (tmp_path / "x.npz").touch()
    address = server()

    def go(script, heard=lambda line: None):
        monkeypatch.setattr(processes, "_program", lambda name, *arguments: ["sh", "-c", script, name, *arguments])
        said = []

        def say(line):
            said.append(line)
            heard(line)

        with pytest.raises(RunError) as ended:
            processes.node("a", tmp_path / "x.npz", "y", tmp_path / "state", Link(address), None, "cpu", say)
        return said, str(ended.value)

    return go


def test_a_node_says_what_matters_and_logs_the_rest(node, tmp_path):
    said, ended = node(f"printf '{CONNECTED}'; exit 3")
    assert said[0].startswith("client a is connected to 127.0.0.1:")
    assert said[1:] == ["round 3", "client a: no space"]
    assert ended.startswith("the node of a ended: exit code 3; see ")
    assert "query.hello" in (tmp_path / "state" / "a" / "node" / "node.log").read_text()


def test_a_node_that_is_not_let_in_tries_again_and_then_says_what_to_do(node, monkeypatch):
    monkeypatch.setattr(processes.time, "sleep", lambda seconds, real=time.sleep: real(min(seconds, 0.3)))
    # Once it has said that it is not let in yet, the time is up.
    heard = lambda line: monkeypatch.setattr(processes, "FORGET", 0.0)  # noqa: E731
    said, ended = node(f"printf '{UNKNOWN}'; sleep 60", heard)
    assert len(said) == 1
    assert "may take this for a node that it has not noticed is gone" in said[0]
    assert "does not know the key of a: put its key.pub into sites/a of the server's keys" in ended


def test_a_node_that_is_taken_for_its_former_self_gets_in_when_that_is_forgotten(node, tmp_path, monkeypatch):
    monkeypatch.setattr(processes.time, "sleep", lambda seconds, real=time.sleep: real(min(seconds, 0.1)))
    flag = tmp_path / "tried"
    said, ended = node(f"if [ -e {flag} ]; then printf '{CONNECTED}'; exit 3; fi; touch {flag}; printf '{UNKNOWN}'")
    assert [line for line in said if "is connected" in line]
    assert "exit code 3" in ended


def test_other_ends_are_told_by_their_first_error(node):
    _, ended = node("echo 'ImportError: no module'; echo 'TypeError: more'; exit 1")
    assert ended.startswith("the node of a ended: ImportError: no module; see ")


MISMATCH = """\\033[91mERROR \\033[0m:     Exit Code: 606
Runtime version compatibility check failed.
SuperLink version 1.41.0 detected a runtime version mismatch: expected a peer from the same major.minor release, but \
received SuperNode version 1.42.0.
Upgrade your Flower version to the required version, or contact the server administrator.

For more information, visit: <https://flower.ai>
"""
PATH = """\\033[91mERROR \\033[0m:     Exit Code: 604
No such key.
The provided path is invalid.

For more information, visit: <https://flower.ai>
Error: more
"""


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            MISMATCH,
            "the server runs Flower 1.41.0 and this site 1.42.0; install the same here: pip install 'flwr==1.41.0'",
        ),
        (PATH, "No such key. The provided path is invalid."),
        (PATH.partition("\n\n")[0] + "\n", "No such key. The provided path is invalid."),
    ],
)
def test_an_end_with_a_code_is_told_by_its_reason(node, script, why):
    _, ended = node(f"printf '{script}'; exit 1")
    assert ended.startswith(f"the node of a ended: {why}; see ")


def test_a_program_that_ends_badly_does_not_silence_its_node(node):
    said, ended = node(f"printf '{PATH}{CONNECTED}'; exit 3")
    assert said[0].startswith("client a is connected to 127.0.0.1:")
    assert said[1:] == ["round 3", "client a: no space"]
    assert "No such key" in ended


def test_what_a_node_started_ends_with_it(node, tmp_path):
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
        with pytest.raises(UsageError, match="a node of client a runs already"), processes._only_one(home, "a"):
            pass
        other.stdin.close()
    with processes._only_one(home, "a"):
        pass


def test_a_number_that_belongs_to_another_program_now_is_no_superlink():
    assert not processes._is_alive({"pid": os.getpid()})
    assert not processes._is_alive({"pid": 2**22 + 1})


@pytest.mark.parametrize("end", ["exit 0", "echo \"httpx.HTTPStatusError: Client error '401 Unauthorized'\"; exit 1"])
def test_a_node_that_the_server_turns_away_says_so(node, end):
    _, ended = node(f"printf '{CONNECTED}'; {end}")
    assert "the node of a ended: the server does not know its key any more" in ended


@pytest.fixture
def slow_superlink(tmp_path, monkeypatch):
    """A SuperLink that never answers; returns the number of its process, once there is one."""
    script = f"echo $$ > {tmp_path}/pid; sleep 60"
    monkeypatch.setattr(processes, "_program", lambda name, *arguments: ["sh", "-c", script, name, *arguments])

    def number():
        deadline = time.monotonic() + 20
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int((tmp_path / "pid").read_text())

    return number


def test_an_interrupt_before_the_superlink_answers_ends_it(tmp_path, slow_superlink, monkeypatch):
    def interrupted(link, is_alive):
        assert json.loads((tmp_path / "home" / "link.json").read_text())["pid"] == slow_superlink()  # `down` finds it
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "_await", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.up(tmp_path / "home", "127.0.0.1", processes._free_port(), None, lambda line: None)
    assert not (tmp_path / "home" / "link.json").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(slow_superlink(), 0)


def test_a_superlink_with_an_old_certificate_is_told(tmp_path, server, monkeypatch):
    folder, said = tmp_path / "keys", []
    keys.make(folder, [], [])
    address = server(folder)
    (tmp_path / "link.json").write_text(json.dumps({"address": address, "ca": str(folder / "ca.crt"), "pid": 1}))
    monkeypatch.setattr(processes, "_is_alive", lambda running: True)
    monkeypatch.setattr(processes, "_admit", lambda *_: None)
    go = lambda: processes.up(tmp_path, "127.0.0.1", 1, folder, said.append)  # noqa: E731
    go()
    assert said == [f"the SuperLink runs already, at {address}"]
    keys.make(folder, ["hub"], [])
    go()
    assert said[2] == (
        f"it still shows the certificate that it was started with, not that in {folder}; "
        "start it anew: kinfed flower down, and up"
    )
    for name in ("ca.crt", "ca.key"):
        (folder / name).unlink()
    keys.make(folder, [], [])
    with pytest.raises(RunError, match=r"is not to be trusted .* start it anew: kinfed flower down, and up"):
        go()


@pytest.fixture
def flower(tmp_path, monkeypatch, finished):
    """Flower's runs: what each is said to be, and what it says; returns what was asked of Flower."""
    asked, runs, done = [], {}, finished(tmp_path / "told").read_summary()

    def flwr(home, *arguments):
        asked.append(arguments[0])
        if arguments[0] == "run":
            runs[str(len(runs) + 1)] = "running"
            return {"run-id": len(runs)}
        if arguments[3] not in runs:
            raise RunError("no such run")
        return {"runs": [{"status": runs[arguments[3]]}]}

    def follow(home, id, say):
        runs[id] = "finished:completed"
        return ["round 1 of 1", f"done: {json.dumps(done.to_dict())}"]

    monkeypatch.setattr(processes, "_flwr", flwr)
    monkeypatch.setattr(processes, "_follow", follow)
    monkeypatch.setattr(processes.signal, "signal", lambda *_: None)
    asked_and = type("Flower", (), {"asked": asked, "runs": runs})
    return asked_and


def test_a_run_that_lost_its_watcher_is_followed_and_not_started_twice(tmp_path, flower):
    out, said = tmp_path / "out", []
    out.mkdir()
    assert processes.run(tmp_path, {}, out, said.append).rounds == 1
    assert (out / ".run").read_text() == "1"
    flower.runs["1"] = "running"  # as if the program that watched it had been killed
    flower.asked.clear()
    assert processes.run(tmp_path, {}, out, said.append).rounds == 1
    assert said == ["the run goes on; following it"]
    assert "run" not in flower.asked
    assert processes.run(tmp_path, {}, out, said.append).rounds == 1  # it is over: another
    (out / ".run").write_text("of another SuperLink")
    assert processes.run(tmp_path, {}, out, said.append).rounds == 1
    assert flower.asked.count("run") == 2


def test_a_run_that_is_stopped_is_stopped_at_the_superlink_too(tmp_path, monkeypatch):
    calls = []

    def flwr(home, *arguments):
        calls.append(arguments[:2])
        if arguments[0] == "run":
            os.kill(os.getpid(), signal.SIGTERM)  # while its number is not known yet
        return {"run-id": 7}

    monkeypatch.setattr(processes, "_flwr", flwr)
    hung_up = signal.getsignal(signal.SIGHUP)
    try:
        with pytest.raises(Terminated, match="stopped; go on with: kinfed flower run --resume"), heard():
            processes.run(tmp_path, {}, tmp_path, print)
    finally:
        signal.signal(signal.SIGHUP, hung_up)
    assert [call[0] for call in calls] == ["run", "stop"]
    assert calls[1][1] == (tmp_path / processes.RUN).read_text() == "7"


def test_a_superlink_is_known_to_down_whenever_its_start_is_interrupted(tmp_path, monkeypatch):
    real, started = subprocess.Popen, []

    def popen(command, **how):
        started.append(real([sys.executable, "-c", "import time; time.sleep(30)", "flower-superlink"], **how))
        os.kill(os.getpid(), signal.SIGTERM)  # before anything is written
        return started[0]

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    try:
        with pytest.raises(Terminated), heard():
            processes.up(tmp_path, "127.0.0.1", processes._free_port(), None, print)
        monkeypatch.undo()
        processes.down(tmp_path, print)
        assert started[0].poll() is not None
    finally:
        started[0].kill()
        started[0].wait()
