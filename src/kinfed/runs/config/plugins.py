"""The user's own parts: a class or function of a file, named "mine.py:Stay", or of an installed package.

A file's path is relative to the working directory, as is every path in a config. The file is executed once for each
content, by itself: it may import installed packages, but not the files beside it. A complete config records in `[code]`
the content it was written with, and is refused with another one.

At a site of a real federation the operator names the files: `local(files)` wraps the code that reads the server's
config. The server sends names without folders, `for_sites(table)`, and the hashes that `check_sent` compares, but
nothing that a site would execute.
"""

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ...core.registry import Registry
from ...errors import UsageError, nearest

Table = dict[str, Any]

_MARK = "__kinfed_own__"  # an attribute of the modules that files are loaded as
_FILES: ContextVar[Mapping[str, Path] | None] = ContextVar("files", default=None)  # None: any that a config names


def is_path(name: object) -> bool:
    """Whether the name of a part is a path, "FILE.py:NAME" or "PACKAGE.MODULE:NAME"."""
    return isinstance(name, str) and ":" in name and name.rpartition(":")[2].isidentifier()


def short_name(name: str) -> str:
    """A part's name in folders and tables: its name, or that of the class or function if it is a path."""
    return name.rpartition(":")[2] if is_path(name) else name


def load(name: str, where: str) -> Any:
    """The class or function that a path names; `where` is the setting. Raises UsageError if it does not exist."""
    source, _, attribute = name.rpartition(":")
    module = _from_file(source, where) if source.endswith(".py") else _from_package(source, where)
    if not hasattr(module, attribute):
        defined = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        exported = defined or list(getattr(module, "__all__", ()))  # a package's names are of modules within it
        raise UsageError(f"{where}: there is no '{attribute}' in {source}; {nearest(attribute, exported)}")
    part = getattr(module, attribute)
    if _FILES.get() is not None:  # a server names it, and must not reach what the file only imports
        kinds = (type, FunctionType) if module_of(module.__name__) else (type,)
        if not (isinstance(part, kinds) and part.__module__ == module.__name__):
            raise UsageError(f"{where}: at a site '{attribute}' must be a class that {source} itself defines")
    return part


def module_of(name: str) -> ModuleType | None:
    """The module that a file was loaded as, by the `__module__` of its classes; None for any other name."""
    module = sys.modules.get(name)
    return module if getattr(module, _MARK, False) else None


def check_kind(part: Any, name: str, where: str, registry: Registry, given: int) -> None:
    """Raise UsageError for a user's own part of the wrong kind for a registry.

    `given` counts the arguments that are not settings. If it is 0 the part must be a class of that kind itself. A class
    must have all methods of its base, and only settings among its own annotations.
    """
    is_kind = given or _members(registry.base) or (inspect.isclass(part) and issubclass(part, registry.base))
    if not is_kind:
        raise UsageError(f"{where}: '{name}' is not a {registry.base_name}: derive the class from it")
    if not callable(part):
        raise UsageError(f"{where}: '{name}' is not a class or function that could make a {registry.base_name}")
    if not inspect.isclass(part):
        return
    if lacks := sorted(getattr(part, "__abstractmethods__", ())):
        raise UsageError(f"{where}: '{name}' cannot be made: write {' and '.join(lacks)} in the class")
    if is_dataclass(part):
        settings = {field.name for field in fields(part)}
        for annotated, kind in inspect.get_annotations(part).items():
            if annotated not in settings and not str(kind).removeprefix("typing.").startswith("ClassVar"):
                raise UsageError(
                    f"{where}: '{annotated}' of '{name}' is not a setting yet: write @dataclass(frozen=True) above the "
                    "class"
                )


def guard_part(part: Any, name: str, where: str, registry: Registry) -> Callable[..., Any]:
    """A user's own part that raises UsageError if it fails or makes an object of another kind than the registry's."""

    @wraps(part, updated=())
    def make(*args: Any, **settings: Any) -> Any:
        try:
            made = part(*args, **settings)
        except UsageError:
            raise
        except Exception as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise UsageError(f"{where}: '{name}' cannot be made: {reason}") from problem
        if not isinstance(made, registry.base):
            lacks = [member for member in _members(registry.base) if not hasattr(made, member)]
            got = f", and what it makes has no {', '.join(lacks)}" if lacks else f"; got {made!r:.80}"
            raise UsageError(f"{where}: '{name}' must make a {registry.base_name}{got}")
        return made

    return make


def _members(kind: type) -> list[str]:
    """The members that a protocol requires; none for a class."""
    if not getattr(kind, "_is_protocol", False):
        return []
    return sorted(
        name for name in {*vars(kind), *inspect.get_annotations(kind)} if name[0] != "_" or name == "__call__"
    )


def code(table: Table, before: object) -> Table:
    """The `[code]` of a complete config: the SHA-256 of each file that it names, or nothing.

    Raises UsageError if `before`, that of the config as read, has another hash for one of them.
    """
    now = {source: _digest(_content(source, "code")) for source in sorted(_files_in(table))}
    if not isinstance(before, dict):
        raise UsageError(f"code must be a table of files and their SHA-256; got {before!r:.80}")
    for source, digest in before.items():
        if source not in now:
            raise UsageError(f"code: this config names no file '{source}'; leave it out")
        if digest != now[source]:
            raise UsageError(
                f"{source} is not what this config was written with (code.'{source}' is its SHA-256): put it back as "
                "it was, or leave [code] out in a new run"
            )
    return {"code": now} if now else {}


def check_sent(table: Table) -> None:
    """Raise UsageError unless this site has every file that a server's config names, with the same content."""
    sent, allowed = table.get("code", {}), _FILES.get() or {}
    if not isinstance(sent, dict):
        raise UsageError(f"code must be a table of files and their SHA-256; got {sent!r:.80}")
    for source in sorted(_files_in(table)):
        theirs = sent.get(source)
        actual = _digest(_content(source, "code")) if source in allowed else "none: it has no such file"
        if actual != theirs:
            raise UsageError(
                f"the server uses the file {source!r:.80} with SHA-256 {theirs!s:.64}, this site's is {actual}; if you "
                "trust the server's, get the same file and restart the node with --code and its path"
            )


def for_sites(table: Any) -> Any:
    """A complete config as a server sends it: files by their names, without the folders that they are in."""
    return _rename_keys(table, lambda source: Path(source).name)


def absolute(table: Any) -> Any:
    """A complete config whose files are named by absolute paths, for a program that runs in another folder."""
    return _rename_keys(table, lambda source: str(Path(source).resolve()))


def _rename_keys(table: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(table, list):
        return [_rename_keys(inner, rename) for inner in table]
    if not isinstance(table, dict):
        return table
    renamed = {key: _rename_keys(value, rename) for key, value in table.items()}
    if is_path(renamed.get("name")):
        source, colon, attribute = renamed["name"].rpartition(":")
        if source.endswith(".py"):
            renamed["name"] = f"{rename(source)}{colon}{attribute}"
    if isinstance(table.get("code"), dict):
        renamed["code"] = {rename(source): digest for source, digest in table["code"].items()}
    return renamed


@contextmanager
def local(files: Sequence[Path]) -> Iterator[None]:
    """In this block only these files can be loaded, by their names; no other file and no installed module.

    Raises UsageError for a missing file, or for two files of the same name.
    """
    named = {path.name: path for path in files}
    if len(named) < len(files):
        raise UsageError("--code names two files of the same name; rename one")
    for path in files:
        if not path.is_file():
            raise UsageError(f"--code: there is no file {path}")
    token = _FILES.set(named)
    try:
        yield
    finally:
        _FILES.reset(token)


def _files_in(table: Any) -> set[str]:
    """The files of the parts of a complete config, as it names them."""
    if isinstance(table, list):
        return set().union(*map(_files_in, table))
    if not isinstance(table, dict):
        return set()
    source = str(table["name"]).rpartition(":")[0] if is_path(table.get("name")) else ""
    return set().union({source} if source.endswith(".py") else (), *map(_files_in, table.values()))


def _content(source: str, where: str) -> bytes:
    files = _FILES.get()
    if files is not None and source not in files:
        raise UsageError(
            f"{where}: this site has no file '{source}'; if its operator trusts it, start the node with --code"
        )
    path = Path(source) if files is None else files[source]
    try:
        return path.read_bytes()
    except OSError as problem:
        at = "" if path.is_absolute() else f" (in {Path.cwd()})"
        raise UsageError(f"{where}: cannot read {path}{at}: {problem.strerror}") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _from_file(source: str, where: str) -> ModuleType:
    content = _content(source, where)
    name = f"{Path(source).stem}_{_digest(content)[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = ModuleType(name)  # registered while it runs: dataclasses look up their module
    module.__file__ = source
    setattr(module, _MARK, True)
    try:
        exec(compile(content, source, "exec"), vars(module))
    except BaseException as problem:
        del sys.modules[name]
        if not isinstance(problem, Exception | SystemExit):
            raise
        raise UsageError(f"{where}: {source} cannot be imported: {_reason(problem, source)}") from problem
    return module


def reason(problem: BaseException, part: type) -> str:
    """What went wrong in a part of the user's own, and in which line of its file, if it is of a file."""
    module = module_of(part.__module__)
    return _reason(problem, "" if module is None else str(module.__file__))


def _reason(problem: BaseException, source: str) -> str:
    """What went wrong in a file, and in which line."""
    if isinstance(problem, SyntaxError):
        return f"line {problem.lineno}: {problem.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == source]
    return f"line {lines[-1]}: {type(problem).__name__}: {problem}" if lines else f"{type(problem).__name__}: {problem}"


def _from_package(source: str, where: str) -> ModuleType:
    if _FILES.get() is not None and not source.startswith("kinfed_papers."):
        raise UsageError(f"{where}: a server cannot choose the module '{source}' of a site; name a file")
    try:
        return importlib.import_module(source)
    except (Exception, SystemExit) as problem:
        missing = isinstance(problem, ModuleNotFoundError) and f"{source}.".startswith(f"{problem.name}.")
        reason = (
            "it is not installed; a file of yours ends in .py" if missing else f"{type(problem).__name__}: {problem}"
        )
        raise UsageError(f"{where}: '{source}' cannot be imported: {reason}") from problem
