"""kinfed list."""

import argparse
import inspect
import json
import os
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfed_papers.analyses import ANALYSES
from kinfed_papers.references import REFERENCES

from ..core.registry import Shelf
from ..data.datasets import DATASETS
from ..data.graphs import GRAPHS
from ..data.partitions import PARTITIONS
from ..errors import UsageError
from ..methods import FAMILIES, METHODS
from ..models import MODELS
from ..simulation.attacks import ATTACKS

if TYPE_CHECKING:
    from rich.console import Console

SHELVES: dict[str, tuple[Shelf, int]] = {  # name: the shelf, and how many arguments of its parts are not settings
    "methods": (METHODS, 0),
    "datasets": (DATASETS, 1),
    "partitions": (PARTITIONS, 0),
    "graphs": (GRAPHS, 2),
    "models": (MODELS, 2),
    "attacks": (ATTACKS, 0),
    "analyses": (ANALYSES, 1),
    "references": (REFERENCES, 0),
}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    shelf = commands.add_parser(
        "list",
        parents=[common],
        description="List what a config can name, one line each; with NAME, list the settings of that part: their "
        "type, default and use.",
        epilog="examples: kinfed list methods; kinfed list methods fedprox; kinfed list tables --coverage",
    )
    shelf.add_argument("shelf", choices=[*SHELVES, "papers", "tables", "claims"])
    shelf.add_argument("name", nargs="?", metavar="NAME", help="a part, such as fedaghn or mine.py:Stay")
    shelf.add_argument(
        "--coverage",
        action="store_true",
        help="with tables: how many published figures have been measured, by docs/papers/tables of a checkout, and "
        "why the others have not ($KINFED_DATA names the folder of the data sets)",
    )
    shelf.set_defaults(command=_list)


def _list(args: argparse.Namespace, console: "Console") -> None:
    if args.coverage and args.shelf != "tables":
        raise UsageError(f"--coverage is of tables; got 'kinfed list {args.shelf}'")
    if args.shelf in PUBLISHED:
        if args.name:
            raise UsageError(f"kinfed list {args.shelf} takes no name; got '{args.name}'")
        if args.coverage:
            return _coverage(args.json, console.width)
        entries = PUBLISHED[args.shelf]()
    else:
        shelf, given = SHELVES[args.shelf]
        if args.name is None and not args.json:
            entries = {name: {"what": shelf.summary(name)} for name in shelf}
        else:
            names = list(shelf) if args.name is None else [args.name]
            entries = {name: _described(shelf, name, given) for name in names}
    if args.shelf == "methods":
        entries = {name: {**entry, **_origin(name)} for name, entry in entries.items()}
    if args.json:
        print(json.dumps(entries))
        return
    if args.shelf == "claims":
        return _show_claims(entries, console.width)
    family = None
    for name, entry in entries.items():
        if entry.get("family") != family:
            family = entry["family"]
            print(f"{family}:")
        print(f"{name}  {entry['what']}")
        if entry.get("paper"):
            print(f"    {entry['paper']['title']} ({entry['paper']['year']})")
        if args.name and entry.get("differs"):
            print(f"    differs: {entry['differs']}")
        for key, values in entry.get("grid", {}).items():
            print(f"    grid: {key} = {', '.join(map(_toml, values))}")
        for key, value in entry.items():
            if key in ("methods", "columns"):
                print(f"    {key}: {', '.join(value)}")
        for setting in entry.get("settings", ()):
            print(f"    {setting['name']} = {_toml(setting['default'])}  ({setting['kind']})")
            if setting["use"]:
                print(f"        {setting['use']}")


def _described(shelf: Shelf, name: str, given: int) -> dict[str, Any]:
    """A part: what it is, and its settings."""
    from ..core.settings import described, kinds_of, sentences
    from ..runs.config import parts, plugins

    part = parts.take(shelf, name, "kinfed list", given)
    kinds, uses = kinds_of(part), sentences(part)
    settings = [
        {
            "name": key,
            "kind": described(kinds.get(key, Any)),
            "default": None if p.default is inspect.Parameter.empty else parts.plain(p.default),
            "use": uses.get(key, ""),
        }
        for key, p in parts.settings(part, given).items()
    ]
    what = (inspect.getdoc(part) or "").partition("\n")[0] if plugins.is_path(name) else shelf.summary(name)
    grid = {key: list(map(parts.plain, values)) for key, values in getattr(part, "grid", {}).items()}
    return {"what": what, **({"grid": grid} if grid else {}), "settings": settings}


def _origin(name: str) -> dict[str, Any]:
    """A method's family, its paper and what differs from it; nothing for one from a file of yours."""
    for family, methods in FAMILIES.items():
        if name in methods:
            _, authors, year, title = methods[name]
            paper = {"authors": authors, "year": year, "title": title} if title else None
            return {"family": family, "paper": paper, "differs": METHODS.differs(name)}
    return {}


def _tables() -> dict[str, dict[str, Any]]:
    from kinfed_papers import published_table

    loaded = {name: published_table.load(name) for name in published_table.tables()}
    return {
        name: {"what": table.title, "methods": list(table.rows), "columns": list(table.columns)}
        for name, table in loaded.items()
    }


def _papers() -> dict[str, dict[str, Any]]:
    from kinfed_papers import published_table

    entries = {}
    for name, (table, column) in published_table.experiments().items():
        at = published_table.load(table).columns[column]
        entries[name] = {"what": f"{at.dataset}, {at.setting}" + " (a subset)" * at.subset}
    return entries


def _claims() -> dict[str, dict[str, Any]]:
    from kinfed_papers.claims import answered
    from kinfed_papers.coverage import claims

    tested = {
        f"{table}: {one.claim.says} ({one.claim.where})": {"what": one.text, "answer": one.told}
        for table, one in claims()
    }
    shown = {
        f"{one.paper}: {one.says} ({one.where})": {
            "what": one.shows + f" See docs/{one.page}." * bool(one.page),
            "answer": one.answer,
        }
        for one in answered()
    }
    return {**tested, **shown}


def _show_claims(entries: dict[str, dict[str, Any]], width: int) -> None:
    """Each claim with its answer, and below it the numbers, on lines that the terminal can show."""
    for name, entry in entries.items():
        print(textwrap.fill(f"{entry['answer']}: {name}", width, subsequent_indent="  "))
        print(textwrap.fill(entry["what"], width, initial_indent="    ", subsequent_indent="    "))
    counts = Counter(entry["answer"].partition(" (")[0] for entry in entries.values())
    print(f"{len(entries)} verdicts: {', '.join(f'{count} {answer}' for answer, count in counts.most_common())}")


def _coverage(as_json: bool, width: int) -> None:
    from kinfed_papers.coverage import coverage, text
    from kinfed_papers.reproduction import WITHOUT_FILE

    folder = os.environ.get("KINFED_DATA")
    at_hand = {path.stem for path in Path(folder).glob("*.npz")} if folder else set()
    covered = coverage(at_hand | {*WITHOUT_FILE})
    if as_json:
        print(json.dumps([one._asdict() for one in covered]))
        return
    for line in text(covered, width):
        print(line)


PUBLISHED = {"papers": _papers, "tables": _tables, "claims": _claims}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "(left out)" if value is None else json.dumps(value)
