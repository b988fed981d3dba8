"""A site's node, by a stand-in for its connection."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed import RunError, UsageError
from kinfed_flower.programs import node as module
from kinfed_flower.site.site_reading import Reading
from kinfed_flower.wire import transport
from kinfed_flower.wire.connection import Arrived
from kinfed_flower.wire.link import Link
from kinfed_flower.wire.messages import Message


@pytest.fixture
def node(tmp_path, monkeypatch, server, examples):
    """Runs a node that is asked such things and then interrupted; returns its answers and what was reported."""
    np.savez(tmp_path / "x.npz", **examples["b"])
    address, answers, lines = server(), [], []

    def go(*asked, end=KeyboardInterrupt):
        waiting = [
            Arrived(None, kind, transport.pack(Message(words, {})) if words is not None else None, 1)
            for kind, words in asked
        ]

        class Connection:
            def __init__(self, link, key, home, report):
                pass

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def receive(self):
                if not waiting:
                    raise end
                return waiting.pop(0)

            def answer(self, arrived, content):
                answers.append(transport.unpack(content).fields)

        monkeypatch.setattr(module, "Connection", Connection)
        where = (Link(address), None, "cpu", [])
        with pytest.raises(type(end) if isinstance(end, Exception) else end) as ended:
            module.run("b", tmp_path / "x.npz", Reading(), tmp_path / "state", *where, lines.append)
        return SimpleNamespace(answers=answers, lines=lines, ended=str(ended.value))

    return go


def test_a_node_answers_and_tells_its_operator_what_matters(node, tmp_path):
    done = node(
        ("query.hello", {}), ("query.hello", {"refused": "of other columns"}), ("train.round", {"experiment": "e"})
    )
    assert done.answers[0]["client"] == "b"
    assert "task" not in done.answers[0]  # nothing of its rows, before its operator has agreed
    assert done.lines[0].startswith("client b is connected to 127.0.0.1:")
    assert "the server cannot use this node: of other columns" in done.lines
    assert done.answers[2]["refused"] == "the server's layout must be str; got None"
    log = (tmp_path / "state" / "b" / "node" / "node.log").read_text().splitlines()
    assert [line.partition("Z ")[2] for line in log] == done.lines


@pytest.mark.parametrize("asked", [("query.shell", {}), ("query.hello", None), ("system", {"client": "b"})])
def test_what_no_site_does_is_refused(node, asked):
    (answer,) = node(asked).answers
    assert "cannot be read, or asks for what no site does" in answer["refused"]


def test_an_error_of_kinfeds_own_ends_neither_the_node_nor_leaves_what_it_says(node, monkeypatch, caplog):
    caplog.set_level("DEBUG", "kinfed")

    def fail(self, message):
        raise ZeroDivisionError("of the row with age 47")

    monkeypatch.setattr(module.Site, "_hello", fail)
    done = node(("query.hello", {}), ("query.hello", {}))
    assert [one["refused"] for one in done.answers] == ["unexpected ZeroDivisionError"] * 2
    told = "client b: unexpected ZeroDivisionError: of the row with age 47 (--debug shows where; please report it)"
    assert told in done.lines
    assert "Traceback" in caplog.text  # which --debug prints


def test_a_node_that_cannot_go_on_says_why(node):
    done = node(end=RunError("the server no longer knows its key"))
    assert done.ended == "the node of b ended: the server no longer knows its key"


def test_what_the_server_says_is_one_printable_line(node):
    done = node(("query.hello", {"refused": "a\nclient b is connected\x1b[31m"}))
    assert "the server cannot use this node: a client b is connected [31m" in done.lines


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
