"""Parts of one's own: a class or function of a file, named "mine.py:Stay", or of an installed package.

A file's path is relative to the folder that the program runs in, as every path in a config is. It is executed once for
each content, by itself: it may import what is installed, but not its neighbours.
"""

import hashlib
import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UsageError, nearest


def is_path(name: object) -> bool:
    """Whether the name of a part is a path, "FILE.py:NAME" or "PACKAGE.MODULE:NAME"."""
    return isinstance(name, str) and ":" in name and name.rpartition(":")[2].isidentifier()


def load(name: str, where: str) -> Any:
    """What a path names; `where` is the setting that has it. Raises UsageError if there is no such thing."""
    source, _, attribute = name.rpartition(":")
    module = _from_file(Path(source), where) if source.endswith(".py") else _from_package(source, where)
    if not hasattr(module, attribute):
        own = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        raise UsageError(f"{where}: there is no '{attribute}' in {source}; {nearest(attribute, own)}")
    return getattr(module, attribute)


def _from_file(path: Path, where: str) -> ModuleType:
    try:
        code = path.read_bytes()
    except OSError as problem:
        at = "" if path.is_absolute() else f" (in {Path.cwd()})"
        raise UsageError(f"{where}: cannot read {path}{at}: {problem.strerror}") from None
    name = f"{path.stem}_{hashlib.sha256(code).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = ModuleType(name)  # there while it runs: dataclasses look their module up
    module.__file__ = str(path)
    try:
        exec(compile(code, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as problem:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == str(path)]
        line = problem.lineno if isinstance(problem, SyntaxError) else (lines or [None])[-1]
        at = f"line {line}: " if line else ""
        said = problem.msg if isinstance(problem, SyntaxError) else str(problem)
        raise UsageError(f"{where}: {path} cannot be imported: {at}{type(problem).__name__}: {said}") from problem
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_package(source: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except (Exception, SystemExit) as problem:
        missing = isinstance(problem, ModuleNotFoundError) and f"{source}.".startswith(f"{problem.name}.")
        said = "it is not installed; a file of yours ends in .py" if missing else f"{type(problem).__name__}: {problem}"
        raise UsageError(f"{where}: '{source}' cannot be imported: {said}") from problem
