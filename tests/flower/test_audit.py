"""The audit log: a line for each message, in a chain that shows what was changed or taken out."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed import RunError
from kinfed.cli import main
from kinfed_flower.wire import audit_file, messages
from kinfed_flower.wire.audit import AuditLog
from kinfed_flower.wire.messages import Message

REPLY = Message({"client": "ann", "round": 0, "scores": []}, {"upload/theta": torch.arange(5.0)})


@pytest.fixture
def log(tmp_path):
    """A log of three messages, by two programs, one after the other."""
    path = audit_file.of_site(tmp_path, "ann")
    first = AuditLog(path)
    first.note("sent", "hub:8000", "hello", Message({"client": "ann", "kinfed": "1"}, {}))
    first.note("sent", "hub:8000", "round", REPLY)
    AuditLog(path).note("sent", "hub:8000", "verdict", Message({"client": "ann", "alone": 0.5}, {}))
    return path


def test_a_log_says_what_was_sent_to_whom(log, capsys):
    lines = [*audit_file.read(log)]
    assert [line["kind"] for line in lines] == ["hello", "round", "verdict"]
    assert lines[1]["holds"] == ["round", "scores", "upload/theta"]
    assert (lines[1]["bytes"], lines[1]["message"]) == (messages.size(REPLY), messages.digest(REPLY))
    assert main(["flower", "log", str(log.parent / "ann"), "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines
    assert main(["flower", "log", str(log.parent / "ann")]) == 0
    assert "3 messages, each as it was written" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("line", [0, 1, 2])
@pytest.mark.parametrize("change", ["alter", "remove", "swap", "scramble"])
def test_a_log_that_was_changed_is_seen(log, line, change, capsys):
    lines = log.read_bytes().splitlines(keepends=True)
    if change == "alter":
        lines[line] = lines[line].replace(b"hub:8000", b"hub:8001")
    elif change == "scramble":
        lines[line] = b"\xff[1]\n"
    elif change == "swap":
        lines[line], lines[line - 1] = lines[line - 1], lines[line]
    else:
        del lines[line]
    log.write_bytes(b"".join(lines))
    if change == "remove" and line == 2:  # which the hash that was noted elsewhere alone shows
        assert len([*audit_file.read(log)]) == 2
    else:
        assert main(["flower", "log", str(log)]) == 1
        assert "it is not what was written there, or a line before it is missing" in " ".join(
            capsys.readouterr().err.split()
        )


def test_a_half_written_last_line_is_taken_away_and_the_chain_goes_on(log):
    whole = log.read_bytes()
    log.write_bytes(whole[:-20])
    AuditLog(log).note("sent", "hub:8000", "round", REPLY)
    assert [line["kind"] for line in audit_file.read(log)] == ["hello", "round", "round"]


def test_what_cannot_be_written_down_is_an_error_and_leaves_the_log_as_it_was(log):
    """On a full disk, as a limit of the file's size plays one."""
    before = log.read_bytes()
    program = (
        "import sys; from pathlib import Path; from kinfed_flower.wire.audit import AuditLog\n"
        "from kinfed_flower.wire.messages import Message\n"
        "AuditLog(Path(sys.argv[1])).note('sent', 'hub', 'round', Message({}, {}))"
    )

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, len(before) + 50))

    asked = {"capture_output": True, "text": True, "env": os.environ, "preexec_fn": limit, "check": False}
    done = subprocess.run([sys.executable, "-c", program, str(log)], **asked)
    assert "so nothing is sent" in done.stderr.splitlines()[-1]
    assert log.read_bytes() == before


def test_both_sides_note_the_same_messages(trial):
    """What came from sites, in the log of the run, and what a site says that it sent."""
    run = trial("fedavg", rounds=2)
    run.serve()
    lines = [*audit_file.read(run.folder / "out" / audit_file.FILE)]
    came = {line["message"] for line in lines if line["way"] == "come" and line["kind"] == "round"}
    assert {line["kind"] for line in lines} == {"hello", "join", "round"}
    sent = set()
    for name in run.examples:
        own = [*audit_file.read(audit_file.of_site(run.folder / "sites" / name, name))]
        sent |= {line["message"] for line in own if line["kind"] == "round"}
    assert came == sent


def test_a_log_whose_last_line_is_damaged_is_not_continued(log):
    log.write_bytes(log.read_bytes()[:-20] + b"\n")
    with pytest.raises(RunError, match="line 3: it is not what was written there"):
        AuditLog(log)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b'{"hash": "0"}\n',
        b"null\n",
        b"\x00" * 50 + b"\n",
        json.dumps({"before": audit_file.FIRST, "hash": audit_file.hash_of({"before": audit_file.FIRST})}).encode(),
    ],
    ids=["nested", "empty", "hash alone", "null", "zeros", "right hash of nothing"],
)
def test_a_line_that_is_no_message_is_named(log, line, capsys):
    log.write_bytes(line + log.read_bytes())
    assert main(["flower", "log", str(log)]) == 1
    said = capsys.readouterr().err
    assert "line 1: it is not what was written there" in " ".join(said.split())
    assert "Traceback" not in said


def test_names_in_a_log_cannot_draw_on_the_terminal(tmp_path, capsys):
    path = audit_file.of_site(tmp_path, "ann")
    counts = {"statistics": {"ward": {"kind": "category", "counts": {"\x1b[2Jward": 9}, "others": 0, "missing": 0}}}
    AuditLog(path, with_fields=True).note(
        "sent", "\x1b]0;hub", "\x9bhello", Message({"rows": 9, **counts, "\x07": 1}, {})
    )
    assert main(["flower", "log", str(path)]) == 0
    out = capsys.readouterr().out
    assert "ward (9)" in out
    assert not {*"\x1b\x07\x9b"} & {*out}
