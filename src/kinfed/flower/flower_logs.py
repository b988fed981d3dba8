"""What kinfed looks for in the output of Flower's programs: every string of theirs that it matches is in this file."""

import re
from itertools import dropwhile, takewhile

KINFED = "kinfed: "  # begins the lines that kinfed itself writes into Flower's logs
DONE, FAILED = "done: ", "failed: "  # begin the last such line of a run
FINISHED, COMPLETED, STOPPED = "finished", "finished:completed", "finished:stopped"  # what `flwr list` says of a run

_EXIT, _EXIT_ENDS = "Exit Code:", "For more information"
_REJECTED = "[code: 2004]"
_CONNECTED = "SuperNode ID:"
_TRAIN = "Receiving: train.round"
_ERROR = "rror:"
_KEY_UNKNOWN = "401 Unauthorized"
_ROUND = re.compile(r"ROUND (\d+)\]")
_TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")
_VERSIONS = re.compile(r"version (\S+) detected a runtime version mismatch.* received \S+ version (\S+?)\.?(\s|$)")

REMOVED = (
    "the server no longer knows its key; if that is a mistake, run kinfed flower up on the server and start the node "
    "again"
)


class NodeLog:
    """Reads a SuperNode's log line by line and picks out what the site's operator should know."""

    def __init__(self, connected: str) -> None:
        self.is_rejected = False  # whether the SuperLink has rejected the node's key
        self._connected, self._error, self._round = connected, "", ""
        self._exit: list[str] = []  # lines from an exit code on

    def read(self, line: str) -> str:
        """The news in a line, empty if there is none: `connected` once the node is, its rounds, kinfed's own lines."""
        line = _bare(line)
        if _REJECTED in line:
            self.is_rejected = True
        elif self._exit or _EXIT in line:
            self._exit.append(line)
            if line.startswith(_EXIT_ENDS):  # it may belong to a program that the node has started
                self._error, self._exit = _reason(self._exit), []
        elif _CONNECTED in line:
            return self._connected
        elif line.startswith(KINFED):
            return line.removeprefix(KINFED)
        elif round := _ROUND.search(line):
            self._round = round[1]
        elif _TRAIN in line and self._round != "0":
            return f"round {self._round}"
        elif _ERROR in line:
            self._error = self._error or line
        return ""

    def error(self, code: int) -> str:
        """Why the node ended with this exit code."""
        error = _reason(self._exit) or self._error or (f"exit code {code}" if code else "")
        # When its calls are refused, a node interrupts itself or breaks down.
        return REMOVED if not error or _KEY_UNKNOWN in error else error


def startup_error(log: str) -> str:
    """Why a SuperLink did not start, by its log; empty if the log does not say."""
    lines = [_bare(line) for line in log.splitlines()]
    errors = [line for line in lines if "ERROR" in line or _ERROR in line]
    return _reason(list(dropwhile(lambda line: _EXIT not in line, lines))) or (errors[-1] if errors else "")


def _bare(line: str) -> str:
    """A line without the time that `gate.Stamped` puts before it, and without colours."""
    return without_colours(_TIME.sub("", line)).strip()


def without_colours(text: str) -> str:
    """Text without the colour codes of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


def _reason(lines: list[str]) -> str:
    """Flower's reason for an exit, in one line; `lines` are those of a log from the exit code on."""
    reason = takewhile(lambda line: not line.startswith(_EXIT_ENDS), lines[1:])
    text = " ".join(line for line in reason if line)
    if versions := _VERSIONS.search(text):
        return (
            f"the server runs Flower {versions[1]} and this site {versions[2]}; install the same version here: "
            f"pip install 'flwr=={versions[1]}'"
        )
    return text
