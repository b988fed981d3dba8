"""What is read in the output of Flower's programs, by lines that the real ones print."""

import io
from datetime import UTC, datetime

import pytest

from kinfed.flower.flower_logs import REMOVED, NodeLog, startup_error
from kinfed.flower.gate import Stamped

RED = "\x1b[91mERROR \x1b[0m:     "
INFO = "\x1b[92mINFO \x1b[0m:      "
CONNECTED = f"""{INFO}SuperNode ID: 123
{INFO}[RUN 7, ROUND 0]
{INFO}Receiving: train.round message (ID: 1)
{INFO}[RUN 7, ROUND 3]
{INFO}Receiving: query.hello message (ID: 2)
{INFO}Receiving: train.round message (ID: 3)
kinfed: client a: no space
"""
MISMATCH = f"""{RED}Exit Code: 606
Runtime version compatibility check failed.
SuperLink version 1.41.0 detected a runtime version mismatch: expected a peer from the same major.minor release, but \
received SuperNode version 1.42.0.
Upgrade your Flower version to the required version, or contact the server administrator.

For more information, visit: <https://flower.ai>
"""
PATH = f"""{RED}Exit Code: 604
No such key.
The provided path is invalid.

For more information, visit: <https://flower.ai>
Error: more
"""


def read(text):
    """The log after some lines, and the news in them."""
    log = NodeLog("connected")
    return log, [news for line in text.splitlines(keepends=True) if (news := log.read(line))]


def test_connections_rounds_and_kinfeds_own_lines_are_news():
    log, news = read(CONNECTED)
    assert news == ["connected", "round 3", "client a: no space"]
    assert log.error(3) == "exit code 3"
    assert not log.is_rejected


def test_a_rejected_key_is_noticed():
    log, news = read(f"{RED}Exit Code: 305\nFailed to initialize the connection.\n[code: 2004] Failed to activate.\n")
    assert log.is_rejected
    assert news == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            MISMATCH,
            "the server runs Flower 1.41.0 and this site 1.42.0; install the same version here: "
            "pip install 'flwr==1.41.0'",
        ),
        (PATH, "No such key. The provided path is invalid."),
        (PATH.partition("\n\n")[0], "No such key. The provided path is invalid."),
        ("ImportError: no module\nTypeError: more\n", "ImportError: no module"),
        ("httpx.HTTPStatusError: Client error '401 Unauthorized'\n", REMOVED),
    ],
)
def test_an_end_is_explained_by_its_exit_message_or_else_by_the_first_error(text, why):
    assert read(text)[0].error(1) == why


def test_a_node_that_ends_by_itself_was_removed():
    assert read(CONNECTED)[0].error(0) == REMOVED


def test_a_program_that_ends_badly_does_not_silence_its_node():
    log, news = read(PATH + CONNECTED)
    assert news == ["connected", "round 3", "client a: no space"]
    assert "No such key" in log.error(3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{INFO}Starting\n{RED}one\n{RED}two\n", "ERROR :     two"),
        (f"{RED}one\n" + PATH, "No such key. The provided path is invalid."),
        (f"{INFO}Starting\n", ""),
    ],
)
def test_why_a_superlink_did_not_start(text, why):
    assert startup_error(text) == why


class Kept(io.StringIO):
    """A stream that other programs may write to, and ask whether it is a terminal."""


def test_each_line_of_a_log_begins_with_its_time_and_reads_as_before():
    kept = Kept()
    stamped = Stamped(kept)
    for piece in ["kinf", "ed: client a: no space\n", f"{INFO}SuperNode ID: 1", "\n", "", "one\ntwo\n", "three"]:
        assert stamped.write(piece) == len(piece)
    stamped.writelines(["\n", "four\n"])
    assert not stamped.isatty()
    with pytest.raises(TypeError):  # or it would pass for a binary stream
        stamped.write(b"")
    lines = kept.getvalue().splitlines()
    texts = [line.partition(" ")[2] for line in lines]
    assert texts == ["kinfed: client a: no space", f"{INFO}SuperNode ID: 1", "one", "two", "three", "four"]
    for line in lines:
        assert abs(datetime.fromisoformat(line.partition(" ")[0]) - datetime.now(UTC)).total_seconds() < 60
    assert read(kept.getvalue())[1] == ["client a: no space", "connected"]


def test_why_a_server_did_not_start_is_found_behind_times():
    kept = Kept()
    Stamped(kept).write(MISMATCH)
    assert startup_error(kept.getvalue()) == startup_error(MISMATCH) != ""
