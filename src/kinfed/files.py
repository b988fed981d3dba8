"""Writing files so that they are complete or absent."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import RunError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; it replaces `path` if the block succeeds, and is removed if it does not.

    Raises RunError naming the file when the disk is full or the folder cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            yield part
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as problem:
            raise RunError(f"cannot write {path}: {problem.strerror or problem}") from problem
    finally:
        with suppress(OSError):  # a folder that cannot be written holds no part either
            part.unlink(missing_ok=True)


@contextmanager
def together(folder: Path) -> Iterator[Path]:
    """An empty folder: what is written there is moved into `folder` if the block succeeds, and removed if it does not.

    Then `folder` and its parents are not there either, unless they were before. Raises RunError naming the folder when
    it cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    part = folder / f".{os.getpid()}.part"
    try:
        make_folder(folder)
        make_folder(part)
        yield part
        try:
            for path in sorted(part.iterdir()):
                path.replace(folder / path.name)
        except OSError as problem:
            raise RunError(f"cannot write into {folder}: {problem.strerror}") from problem
    finally:
        shutil.rmtree(part, ignore_errors=True)
        for path in made:
            with suppress(OSError):  # what is not empty stays
                path.rmdir()


def sweep_up(folder: Path) -> None:
    """Remove half-written files of killed programs from a folder in which no program is writing."""
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless it exists; raises RunError naming it if it cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"cannot create the folder {path}: {problem.strerror}") from None
