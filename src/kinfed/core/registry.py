"""Registry: parts by the name that a config or the command line uses, each imported only when it is used."""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError


def load(place: str) -> Any:
    """What "package.module:attribute" names, such as what `kinfed_papers` has, or a module without an attribute.

    Raises UsageError if its package, which comes with kinfed, is not installed.
    """
    name, _, attribute = place.partition(":")
    package = name.partition(".")[0]
    try:
        module = import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name != package:
            raise
        raise UsageError(f"this needs the package {package}, which comes with kinfed; install kinfed again") from None
    return getattr(module, attribute) if attribute else module


def lazy_attributes(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: its names by their places, of which each is imported when it is first asked for."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = load(places[name])
        setattr(sys.modules[package], name, value)
        return value

    return find


class Made(NamedTuple):
    """A part that a function makes from its name."""

    place: str  # of the function
    summary: str


class Listed(NamedTuple):
    """A method: where it is, and where it was published first, if one paper proposed it."""

    place: str
    authors: str = ""
    year: int | None = None
    title: str = ""


class Registry(Mapping[str, Any]):
    """A mapping from names to parts of a package, given as "module:attribute".

    `base` is the class that a part, or what it makes, must be of: "package.module:Class". A part's summary is the first
    line of its docstring, or of its file's with `by_file`; it is read without importing anything.
    """

    def __init__(self, package: str, places: Mapping[str, str | Made], base: str, by_file: bool = False) -> None:
        self._places, self._base, self._by_file = dict(places), base, by_file
        self._packages = dict.fromkeys(places, package)

    def __or__(self, other: "Registry") -> "Registry":
        """The parts of both, which are of the same base."""
        both = Registry("", {**self._places, **other._places}, self._base, self._by_file)
        both._packages = {**self._packages, **other._packages}
        return both

    def __getitem__(self, name: str) -> Any:
        place = self._places[name]
        return self._load(name, place) if isinstance(place, str) else self._load(name, place.place)(name)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def base(self) -> type:
        """What a part, or what it makes, is an instance of."""
        return load(self._base)

    @property
    def base_name(self) -> str:
        """How people import that class; kinfed's own from the top."""
        module, _, attribute = self._base.partition(":")
        return f"{'kinfed' if module.startswith('kinfed.') else module}.{attribute}"

    @property
    def places(self) -> dict[str, str]:
        """The same as "package.module:attribute", by the attribute."""
        return {attribute: f"{module}:{attribute}" for attribute, module in self.attributes.items()}

    @property
    def attributes(self) -> dict[str, str]:
        """Where the parts' own names in Python are: the attribute, and its module."""
        places = {name: place.partition(":") for name, place in self._places.items() if isinstance(place, str)}
        return {attribute: f"{self._packages[name]}.{module}" for name, (module, _, attribute) in places.items()}

    def attribute(self, name: str) -> Any:
        """A part by its own name in Python: a package's `__getattr__`."""
        if name not in self.attributes:
            raise AttributeError(f"module '{next(iter(self._packages.values()))}' has no attribute '{name}'")
        return getattr(import_module(self.attributes[name]), name)

    def summary(self, name: str) -> str:
        """A part in one line."""
        place = self._places[name]
        if not isinstance(place, str):
            return place.summary
        tree = self._source(name, place)
        parts = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        documented = tree if self._by_file else parts[place.partition(":")[2]]
        return (ast.get_docstring(documented) or "").partition("\n")[0]

    def differs(self, name: str) -> str:
        """What a part does otherwise than its paper, as its file says it in a paragraph "Differs: ..."; "" if none."""
        place = self._places[name]
        text = "" if not isinstance(place, str) else ast.get_docstring(self._source(name, place)) or ""
        paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        mark = "Differs: "
        return next((paragraph.removeprefix(mark) for paragraph in paragraphs if paragraph.startswith(mark)), "")

    def _source(self, name: str, place: str) -> ast.Module:
        """The syntax tree of a part's file."""
        folder = Path(sys.modules[self._packages[name]].__path__[0])
        return ast.parse((folder / f"{place.partition(':')[0]}.py").read_text(encoding="utf-8"))

    def _load(self, name: str, place: str) -> Any:
        module, _, attribute = place.partition(":")
        return getattr(import_module(f"{self._packages[name]}.{module}"), attribute)
