"""What the process of a run leaves in its folder for those who follow it: its number, its lines, and how it ended."""

from pathlib import Path
from typing import Any

from kinfed.files import read_json, write_json

from .subprocesses import is_alive

FILE, JOURNAL = ".run", "journal.log"  # in a run's folder
PROGRAM = "runner"


def read(out: Path) -> dict[str, Any]:
    """What is known of the last process: its `pid`, where its lines `begin`, how it `ended`, and `why` it failed."""
    return read_json(out / FILE)


def note(out: Path, **facts: Any) -> None:
    """Remember more of it."""
    write_json(out / FILE, {**read(out), **facts})


def process(out: Path) -> int:
    """The number of the process that carries out the run now, 0 if there is none."""
    pid = read(out).get("pid", 0)
    return pid if isinstance(pid, int) and pid and is_alive(pid, PROGRAM) else 0
