"""Writing files so that they are complete or absent, and by one program at a time."""

import fcntl
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

from safetensors import SafetensorError

from .errors import RunError, UsageError

LOCK = ".lock"  # in a folder that a program has for itself
_holders: dict[Path, int] = {}  # of the folders that this program has for itself, the threads that asked for them


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


def write_json(path: Path, values: Any) -> None:
    """Replace a file by values as JSON, infinity included; raises RunError as `replacing` does."""
    with replacing(path) as part:
        part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def to_json(values: Any, **layout: Any) -> str:
    """Values as JSON that every reader takes, with null for NaN and infinity; `layout` is as of `json.dumps`."""
    return json.dumps(_without_nan(values), allow_nan=False, **layout)


def _without_nan(value: Any) -> Any:
    """A value with None for each number in it that JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def readable(path: Path, fix: str = "run again") -> Iterator[None]:
    """In this block a file is read: raises UsageError with this fix for what is wrong in it."""
    try:
        yield
    except PermissionError:  # nothing is wrong in it
        raise
    except (OSError, LookupError, ValueError, TypeError, BadZipFile, SafetensorError) as problem:
        raise UsageError(f"{path} cannot be read ({problem!s:.200}); {fix}") from None


def read_json(path: Path, fix: str = "") -> dict[str, Any]:
    """The table in a JSON file, empty if it is not there.

    Raises RunError with `fix`, what to do, if it cannot be read; without a fix it counts as not there.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as problem:
        if not fix or isinstance(problem, FileNotFoundError):
            return {}
        raise RunError(f"{path} cannot be read ({problem}); {fix}") from None


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


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """In this block no other program, and no other thread, is in such a block for the same folder.

    Raises UsageError while another one is. One that has ended in whatever way, even killed, no longer counts. Blocks of
    one thread may be nested.
    """
    path, thread = folder.resolve(), threading.get_ident()
    if _holders.get(path) == thread:
        yield
        return
    taken = UsageError(f"another program works in {folder}; wait until it has ended, or stop it")
    if _holders.setdefault(path, thread) != thread:
        raise taken
    try:
        with _hold_lock(path / LOCK, taken):
            yield
    finally:
        del _holders[path]


@contextmanager
def _hold_lock(path: Path, taken: UsageError) -> Iterator[None]:
    """Hold the lock of a file, which is there as long; raises `taken` if another program does."""
    try:
        file = _open_lock(path, taken)
    except OSError as problem:
        raise RunError(f"cannot write {path}: {problem.strerror or problem}") from None
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # before it is let go: who opens the file from now on makes another


def _open_lock(path: Path, taken: UsageError) -> IO[str]:
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise taken from None
        except OSError:  # a file system without locks
            return file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # it was removed by the program that has just ended
