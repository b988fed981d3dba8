"""Twins: equal experiments are run once. A cell of a published table may read the finished run of another table.

In place of the folder seed-S a cell then has the file seed-S.same, which names the folder of the run.
"""

import hashlib
import json
import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from kinfed.errors import UsageError
from kinfed.files import make_folder, replacing
from kinfed.runs.run_folder import SAME, RunFolder


def identity(table: dict[str, Any]) -> str:
    """What an experiment is known by: the digest of its complete config, the seed among it."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def find_finished_runs(out: Path, precision: str | None) -> dict[str, Path]:
    """The finished runs of a reproduction and of those in folders beside it, trained in this precision, by identity."""
    folders: dict[str, Path] = {}
    for root in [out, *sorted(path for path in out.absolute().parent.glob("*") if path != out.absolute())]:
        for depth in ("*/*", "*/*/*"):  # the names of columns have one part, or two
            for path in sorted(root.glob(f"runs/{depth}/seed-*/config.toml")):
                folder = RunFolder(path.parent)
                is_run = folder.path.name.removeprefix("seed-").isdecimal()  # and no copy that somebody keeps
                if is_run and folder.is_finished and _precision(folder) == (precision or "float32"):
                    folders.setdefault(_of_file(path, path.stat().st_mtime_ns), folder.path)
    return folders


def point(folder: Path, run: Path) -> None:
    """Let a seed's folder, which does not exist, be that of another run."""
    make_folder(folder.parent)
    with replacing(_pointer(folder)) as part:
        part.write_text(Path(os.path.relpath(run, folder.parent)).as_posix() + "\n", encoding="utf-8")


def folders(cell: Path) -> list[Path]:
    """The folders of a cell's seeds, its own and those that are another run's."""
    return sorted({path.with_name(path.name.removesuffix(SAME)) for path in cell.glob("seed-*")})


def flag_shared_run(folder: Path, run: Path) -> list[str]:
    """Whose run a seed reads, in words; nothing if it is its own."""
    if folder == run:
        return []
    *_, root, path = ["", *run.as_posix().rsplit("/runs/", 1)]
    return [f"the run of {Path(root).name}/{path.rpartition('/')[0]}"]


def _pointer(folder: Path) -> Path:
    return folder.with_name(folder.name + SAME)


def _precision(folder: RunFolder) -> str:
    try:
        return folder.read_summary().cost.precision or "float32"
    except UsageError:  # a broken folder of another table does not concern this one
        return ""


@cache
def _of_file(path: Path, changed: int) -> str:
    """The identity of the config in a file, which was changed at this time."""
    try:
        return identity(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError):
        return ""
