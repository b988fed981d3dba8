"""What stands on pages where a mark such as `<!-- settings: methods -->` asks for it, as the code has it now."""

import contextlib
import dataclasses
import inspect
import io
import json
import re
from collections.abc import Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Union, get_args, get_type_hints

from numpy.typing import ArrayLike
from sphinx.application import Sphinx

import kinfed
from kinfed.cli import main
from kinfed.core.field_checks import describe_setting, kinds_of, sentences
from kinfed.report.page.page_settings import TOP
from kinfed.runs.config import parts

MARK = re.compile(r"^<!-- (settings|api): ([^>]+?) -->$", re.MULTILINE)
LIST = re.compile(r"^(?![ -])(.+)\n(- )", re.MULTILINE)  # that follows a line of text
COMMON = {"personal", "frozen", "bn"}  # settings that every method has, told once at the top of their page
FORMULA = re.compile(r"(?<!\\)\$([^$]+)\$")


def registry(name: str) -> Iterator[str]:
    """All parts of a kind, with their settings, as `kinfed list` has them."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([*(["papers"] if name in ("analyses", "references") else []), "list", name, "--json"])
    family = None
    for part, entry in json.loads(printed.getvalue()).items():
        if entry.get("family") != family:
            family = entry["family"]
            yield f"## {family}\n"
        yield f"### `{part}`\n"
        paper = entry.get("paper")
        yield f"{entry['what']}\n"
        if paper:
            yield f"*{paper['title']}* ({paper['authors']}, {paper['year']}).\n"
        own = [one for one in entry["settings"] if name != "methods" or one["name"] not in COMMON]
        rows = [(one["name"], one["default"], one["kind"], one["use"]) for one in own]
        yield from table(rows) if rows else ["It has no settings of its own.\n"]


def part(name: str) -> Iterator[str]:
    """The settings of one public class, such as Training."""
    kind = getattr(kinfed, name)
    kinds, uses = kinds_of(kind), sentences(kind)
    settings = parts.settings(kind, 0)
    yield from table(
        (
            key,
            None if one.default is one.empty else parts.plain(one.default),
            describe_setting(kinds.get(key, Any)),
            uses[key],
        )
        for key, one in settings.items()
        if key in uses
    )


def top() -> Iterator[str]:
    """The settings that stand at the top of a config."""
    yield "| setting | what it is for |\n| --- | --- |"
    for key, use in TOP.items():
        yield f"| `{key}` | {_cell(use)} |"


def table(rows: Any) -> Iterator[str]:
    """Settings as a table; without the second column where no setting has a sentence."""
    rows = list(rows)
    told = any(use for *_, use in rows)
    columns = ["setting", *(["what it is for"] if told else []), "default", "what it may be"]
    yield _row(columns) + "\n" + _row(["---"] * len(columns))
    for name, default, kind, use in rows:
        shown = "" if default is None or callable(default) else f"`{_cell(_toml(default))}`"
        allowed = "a function" if callable(default) else _cell(kind)
        yield _row([f"`{name}`", *([_cell(use or "")] if told else []), shown, allowed])
    yield ""


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    return "[" + ", ".join(map(_toml, value)) + "]" if isinstance(value, list | tuple) else json.dumps(value)


# Public names, as a mark of the page asks for them: names, "methods" for what methods are made of, or "registries".


def public(asked: str) -> Iterator[str]:
    """The descriptions of public names, one after the other."""
    if asked == "methods":
        names = [f"methods.{name}" for part in kinfed.methods.parts.PARTS.values() for name in part]
    else:
        names = list(kinfed._REGISTRIES) if asked == "registries" else asked.split()
    for name in names:
        yield from _described(name)


def _described(name: str) -> Iterator[str]:
    kind = attrgetter(name)(kinfed)
    yield "```{eval-rst}"
    if inspect.isclass(kind):
        yield f".. autoclass:: kinfed.{name}\n   :members:"
    elif inspect.isfunction(kind):
        yield f".. autofunction:: kinfed.{name}"
    elif inspect.ismodule(kind):
        yield f".. py:data:: kinfed.{name}\n\n   {kind.__doc__.partition(chr(10))[0]}"
    else:
        yield f".. py:data:: kinfed.{name}\n\n   {_constant(name, kind)}"
    yield "```\n"


def _constant(name: str, value: Any) -> str:
    return f"An annotation: {describe_setting(value)}."


def _docstring(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Formulas and lists as Sphinx writes them, and what each field of a dataclass is for."""
    text = LIST.sub(r"\1\n\n\2", "\n".join(lines))
    lines[:] = FORMULA.sub(r":math:`\1`", text).split("\n")
    if what == "class" and dataclasses.is_dataclass(thing):
        uses = sentences(thing)
        lines += [
            "",
            *(f":param {key}: {use}" for key, use in uses.items() if key in inspect.signature(thing).parameters),
        ]


class Array:
    """What numpy takes for an array, in signatures; numpy's own word for it is ten lines long."""


def _annotations(app: Sphinx, function: Any, bound: bool) -> None:
    """Plain types in signatures: what a setting may be is said in words, below them."""
    for key, hint in getattr(function, "__annotations__", {}).items():
        with contextlib.suppress(NameError):  # a name that is imported for a type checker alone
            found = get_type_hints(SimpleNamespace(__annotations__={key: hint}), getattr(function, "__globals__", {}))
            function.__annotations__[key] = _shorter(found[key])


def _signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """A default that a function makes has no name: `<factory>` is no Python, and Sphinx would show all as it is."""
    return re.sub(r"<[\w. ]+>", "...", signature) if signature else None, returned


def _shorter(hint: Any) -> Any:
    kinds, arrays = get_args(hint), get_args(ArrayLike)
    if any(kind not in kinds for kind in arrays):
        return hint
    return Union[(Array, *(kind for kind in kinds if kind not in arrays))]


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    def made(match: re.Match[str]) -> str:
        kind, asked = match[1], match[2]
        if kind == "api":
            return "\n".join(public(asked))
        made_by = top() if asked == "top" else part(asked) if asked[0].isupper() else registry(asked)
        return "\n".join(made_by)

    source[0] = MARK.sub(made, source[0])


def _outdated(app: Sphinx, env: Any, *changed: set[str]) -> list[str]:
    """Pages with marks are made anew every time: the code may have changed, which Sphinx does not see."""
    return [name for name in env.found_docs if MARK.search(env.doc2path(name).read_text(encoding="utf-8"))]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("env-get-outdated", _outdated)
    app.connect("source-read", _read)
    app.connect("autodoc-before-process-signature", _annotations)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
