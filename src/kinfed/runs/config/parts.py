"""Parts: from a table of a config to an object, with every setting checked, and back to the complete table."""

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ...core.field_checks import check, describe_kind, kinds_of, name_of, options_of, split_interval
from ...core.registry import Registry
from ...data.tables.schema import Description
from ...errors import UsageError, nearest
from . import plugins
from .plugins import Table


def settings(part: Callable[..., Any], given: int = 0) -> dict[str, inspect.Parameter]:
    """A part's settings: its constructor's arguments after the first `given`, which the user cannot set.

    All arguments of a dataclass are settings; its objects are called with the `given` arguments. A description of a
    table's columns is none: the data give it.
    """
    parameters = list(inspect.signature(part).parameters.values())
    given = 0 if is_dataclass(part) else given
    not_set = {*_find_columns(part), *(p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD))}
    return {p.name: p for p in parameters[given:] if p.name not in not_set}


def _find_columns(part: Callable[..., Any]) -> list[str]:
    """The arguments that are the description of a table's columns, by their annotation."""
    return [name for name, kind in kinds_of(inspect.unwrap(part)).items() if Description in options_of(kind)]


def make(registry: Registry, requested: Any, where: str, given: int = 0) -> tuple[Any, Table]:
    """The part that `requested` names, with its settings, and the complete table.

    With `given` the part is a function whose first arguments are passed later: it is returned with the others set, and
    takes `columns`, the description of a table's columns, for a part that has an argument for it.
    """
    requested = require_name(requested, where, registry)
    name = requested.pop("name")
    part = take(registry, name, where, given)
    if plugins.is_path(name):
        part = plugins.guard_part(part, name, where, registry)
    made, table = call(part, requested, where, given=given)
    return made, {"name": name, **table}


def call(
    part: Callable[..., Any], requested: Table, where: str, given: int = 0, default: Any = None, **ready: Any
) -> tuple[Any, Table]:
    """Call a part with checked settings; returns the result and the complete table without the `ready` arguments.

    Settings missing from `requested` are taken from `default`, an object made by the same part, if there is one.
    """
    if not isinstance(requested, dict):
        raise UsageError(f"{where} must be a table; got {requested!r}")
    parameters = {name: p for name, p in settings(part, given).items() if name not in ready}
    check_keys(requested, set(parameters), where + ".", set(ready))
    hints = kinds_of(inspect.unwrap(part))
    values, table = {}, {}
    for name, p in parameters.items():
        values[name] = getattr(default, name, p.default)
        if name in requested:
            at, kind = f"{where}.{name}", hints.get(name, Any)
            values[name], table[name] = _check(requested[name], kind, at, values[name], inspect.unwrap(part))
        elif (written := plain(values[name])) is not None:
            table[name] = written
    missing = [name for name, value in values.items() if value is inspect.Parameter.empty]
    if missing:
        raise UsageError(f"{where} needs a value for {', '.join(missing)}")
    if given and not is_dataclass(part):
        described = _find_columns(part)
        return (lambda *first, columns=None: part(*first, **dict.fromkeys(described, columns), **values)), table
    return part(**values, **ready), table


def take(registry: Mapping[str, Any], name: str, where: str, given: int = 0) -> Any:
    """The part with this name in a registry, or the user's own at this path; raises UsageError if there is none."""
    if plugins.is_path(name):
        part = plugins.load(name, where)
        if isinstance(registry, Registry):
            plugins.check_kind(part, name, where, registry, given)
        return part
    if name not in registry:
        raise UsageError(f"{where}: there is no '{name}'; {nearest(name, registry)}")
    return registry[name]


def require_name(requested: Any, where: str, alternatives: Iterable[str]) -> Table:
    """What is requested of a part as a table with its name; UsageError if it has none, with the `alternatives`."""
    requested = {"name": requested} if isinstance(requested, str) else requested
    if not isinstance(requested, dict) or not isinstance(requested.get("name"), str):
        raise UsageError(f"{where} needs a name; known: {', '.join(sorted(alternatives))}")
    return dict(requested)


def _part(kinds: Sequence[type], requested: Any, where: str, default: Any) -> tuple[Any, Table]:
    """The object that a setting names, of one of `kinds` or of the user's own class, and its complete table.

    A table without a name changes the setting's default, or makes the one kind that may stand for text; naming the
    default's own class keeps its other settings.
    """
    by_name: dict[str, Any] = {name_of(kind): kind for kind in kinds if is_dataclass(kind)}
    has_default = isinstance(default, tuple(by_name.values()))
    if (
        isinstance(requested, dict)
        and "name" not in requested
        and (has_default or (str in kinds and len(by_name) == 1))
    ):
        chosen = name_of(type(default)) if has_default else next(iter(by_name))
        _suggest_name(requested, by_name, chosen, where)
        requested = {"name": chosen, **requested}
    requested = require_name(requested, where, by_name)
    name = requested.pop("name")
    kind = take(by_name, name, where)
    if plugins.is_path(name):
        common = set.intersection(*({name for name in dir(kind) if name[0] != "_"} for kind in kinds))
        common -= {name for kind in kinds if is_dataclass(kind) for name in kind.__dataclass_fields__}
        if not inspect.isclass(kind) or (lacks := sorted(common - set(dir(kind)))):
            why = f"it has no {', '.join(lacks)}" if inspect.isclass(kind) else "it is not a class"
            raise UsageError(f"{where}: '{name}' cannot stand here: {why}")
    made, table = call(kind, requested, where, default=default if type(default) is kind else None)
    return made, {"name": name, **table}


def _suggest_name(requested: Table, by_name: Mapping[str, Any], chosen: str, where: str) -> None:
    """Raise UsageError for a key that the part `chosen` without a name lacks, and that another part has."""
    has = {name: {field.name for field in fields(kind)} for name, kind in by_name.items()}
    for key in requested:
        if key not in has[chosen] and (others := [name for name, keys in has.items() if key in keys]):
            listed = " or ".join(f"{where}.name={name}" for name in others)
            raise UsageError(f"{where}: '{chosen}' has no '{key}'; set {listed} as well")


def plain(value: Any) -> Any:
    """A setting's value as it is written in a config."""
    if is_dataclass(value):
        values = {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"name": name_of(type(value)), **{name: inner for name, inner in values.items() if inner is not None}}
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value


def table_of(table: Table, name: str, where: str) -> Table:
    """The table of this name within a table, empty if it is not there; UsageError if it is no table."""
    inner = table.get(name, {})
    if not isinstance(inner, dict):
        raise UsageError(f"{where}{name} must be a table; got {inner!r}")
    return inner


def value_of(table: Table, name: str, kind: type, default: Any, where: str = "") -> Any:
    """The value of this name within a table, or the default, as the kind; UsageError if it is of another."""
    return _check(table.get(name, default), kind, where + name)[0]


def check_keys(table: Table, allowed: set[str], where: str, read: Iterable[str] = ()) -> None:
    """Raise UsageError for a key that is not known; `read` names further keys for the hint."""
    for name in table:
        if name not in allowed:
            raise UsageError(f"unknown key '{where}{name}'; {nearest(name, allowed.union(read))}")


def _check(value: Any, kind: Any, where: str, default: Any = None, part: Any = None) -> tuple[Any, Any]:
    """The value as the annotated kind, and as a complete config has it; or UsageError. `part` has the setting."""
    options = options_of(kind)
    scalar = isinstance(value, str) and any(split_interval(option)[0] in (str, Any) for option in options)
    literal = any(
        typing.get_origin(option) is typing.Literal and value in typing.get_args(option) for option in options
    )
    if any(map(is_dataclass, options)) and isinstance(value, str | dict) and not (scalar or literal):
        accepts_text = any(typing.get_origin(option) is typing.Literal for option in options)
        accepts_text = accepts_text and isinstance(value, str) and not plugins.is_path(value)
        if accepts_text and f"'{value}'" not in map(describe_kind, options):
            raise UsageError(f"{where} must be {' or '.join(map(describe_kind, options))}; got {value!r:.80}")
        return _part([option for option in options if option is not type(None)], value, where, default)
    objects = all(is_dataclass(option) or getattr(option, "_is_protocol", False) for option in options)
    if objects and isinstance(value, bool | int | float | list):
        raise UsageError(f"{where} must be {' or '.join(map(describe_kind, options))}; got {value!r:.80}")
    check(value, kind, where, part)
    made = _convert_value(value, [split_interval(option)[0] for option in options])
    return made, plain(made)


def _convert_value(value: Any, kinds: Sequence[Any]) -> Any:
    """A checked value as a part takes it: integers become floats where a float is expected, lists become tuples."""
    if isinstance(value, list | tuple):
        inner = next((typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) in (tuple, Sequence)), Any)
        return tuple(
            _convert_value(item, [split_interval(option)[0] for option in options_of(inner)]) for item in value
        )
    return float(value) if float in kinds and int not in kinds and isinstance(value, int) else value
