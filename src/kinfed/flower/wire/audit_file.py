"""The file of an audit log: where it is, and whether its lines are as they were written."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import RunError, UsageError

FILE = "audit.jsonl"
FIRST = "0" * 64  # in place of the hash before the first line


def of_site(state: Path, name: str) -> Path:
    """The audit log of a site, beside its folder, which may be deleted."""
    return state / f"{name}.{FILE}"


def find(path: Path) -> Path:
    """The audit log that a path names: a file, the folder of a run, or that of a site."""
    for one in (path, path / FILE, of_site(path.parent, path.name)):
        if one.is_file():
            return one
    raise UsageError(f"{path} has no audit log; give the folder of a run, or a site's, such as kinfed-site/ann")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of an audit log, each checked; raises RunError naming the first that is not as it was written."""
    before = FIRST
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            said = checked(path, number, line, before)
            before = said["hash"]
            yield said


def checked(path: Path, number: int, line: bytes, before: str | None) -> dict[str, Any]:
    """A line's content, if its hash, and that of the line `before`, are right."""
    try:
        said: dict[str, Any] = json.loads(line)
        own = said.pop("hash")
        good = own == hash_of(said) and before in (None, said["before"])
    except (ValueError, LookupError, TypeError, AttributeError):
        good = False
    if not good:
        raise RunError(f"{path}, line {number}: it is not what was written there, or a line before it is missing")
    return {**said, "hash": own}


def hash_of(said: dict[str, Any]) -> str:
    """The hash of a line."""
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
