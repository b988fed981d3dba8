"""What a run writes down of how it is doing, for those who ask. Imports neither Flower nor PyTorch."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from kinfed.errors import RunError
from kinfed.files import read_json, write_json

FILE = "status.json"  # in a run's folder


def write(out: Path, progress: dict[str, Any]) -> None:
    """Write down how a run is doing; that this fails must not end it."""
    with suppress(RunError):
        write_json(out / FILE, progress)


def read(out: Path) -> dict[str, Any]:
    """What the run in a folder wrote last; empty if it has not, or was of another version."""
    progress = read_json(out / FILE)
    return progress if "state" in progress else {}
