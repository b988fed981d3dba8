"""The file of an audit log: where it is, and whether its lines are as they were written."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kinfed.errors import RunError, UsageError

FILE = "audit.jsonl"
FIRST = "0" * 64  # in place of the hash before the first line


def of_site(state: Path, name: str) -> Path:
    """The audit log of a site, beside its folder, which may be deleted."""
    return state / f"{name}.{FILE}"


def find(path: Path) -> Path:
    """The audit log that a path names: a file, the folder of a run, or that of a site."""
    for candidate in (path, path / FILE, of_site(path.parent, path.name)):
        if candidate.is_file():
            return candidate
    raise UsageError(f"{path} has no audit log; give the folder of a run, or a site's, such as kinfed-site/ann")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of an audit log, each checked; raises RunError naming the first that is not as it was written."""
    before = FIRST
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            entry = check_line(path, number, line, before)
            before = entry["hash"]
            yield entry


def check_line(path: Path, number: int, line: bytes, before: str | None) -> dict[str, Any]:
    """A line's content, if its hash, and that of the line `before`, are right."""
    try:
        entry: dict[str, Any] = json.loads(line)
        written = entry.pop("hash")
        good = written == hash_of(entry) and before in (None, entry["before"]) and _is_entry(entry)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise RunError(f"{path}, line {number}: it is not what was written there, or a line before it is missing")
    return {**entry, "hash": written}


def _is_entry(entry: dict[str, Any]) -> bool:
    """Whether a line has what a message's has."""
    texts = all(isinstance(entry[name], str) for name in ("at", "way", "peer", "kind", "message"))
    return texts and all(isinstance(name, str) for name in entry["holds"]) and type(entry["bytes"]) is int


def hash_of(entry: dict[str, Any]) -> str:
    """The hash of a line."""
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
