"""kinfed list."""

import argparse
import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..core.registry import Registry
from ..data.datasets import DATASETS
from ..data.graphs import GRAPHS
from ..data.partitions import PARTITIONS
from ..errors import UsageError, nearest
from ..methods import FAMILIES, METHODS
from ..methods.solved import SOLVED
from ..models import MODELS
from ..simulation.attacks import ATTACKS
from .options import add_settings, columns, data_folder

if TYPE_CHECKING:
    from rich.console import Console

REGISTRIES: dict[
    str, tuple[Registry, int]
] = {  # name: the registry, and how many arguments of its parts are not settings
    "methods": (METHODS, 0),
    "datasets": (DATASETS, 1),
    "partitions": (PARTITIONS, 0),
    "graphs": (GRAPHS, 2),
    "models": (MODELS, 2),
    "attacks": (ATTACKS, 0),
}

CITATIONS = "citations"  # how to cite kinfed and what it has its methods from
TITLE = "kinfed: graph-guided personalised federated learning"
OWN = "kinfed's own"  # the first family
# and what else no paper has
OWN_TOO = ("partial-pooling", "mixed-model", "private-pooling", "private-kin", "personal-boosting", "standard")
WIDTH = 80


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    registry = commands.add_parser(
        "list",
        parents=[columns(), data_folder(), common],
        description="List what a config can name. With NAME, list the settings of that part: their type, default and "
        "use; of a data set also what is in it, if it is on this machine. With a table of yours or an experiment, show "
        "what is in it, and what would be trained, validated and tested on; nothing is trained.",
        epilog="examples: kinfed list methods; kinfed list methods fedprox; kinfed list datasets --fetch metr_la; "
        "kinfed list datasets metr_la stride=12; kinfed list shops.csv --client shop --target buys",
    )
    registry.add_argument(
        "subject", metavar="WHAT", help=f"{', '.join((*REGISTRIES, CITATIONS))}; or FILE.csv, FILE.toml, papers/..."
    )
    registry.add_argument("name", nargs="?", metavar="NAME", help="a part, such as fedaghn or mine.py:Stay")
    add_settings(registry, "settings of the data set or experiment that is looked at", how=False)
    registry.add_argument(
        "--fetch",
        nargs="+",
        metavar="NAME",
        help="with datasets: download these from their publishers, check them, and write NAME.npz; an interrupted "
        "download is resumed. KINFED_MIRROR is the address of a mirror that has the files as NAME/FILE",
    )
    registry.add_argument(
        "--from",
        dest="folder",
        type=Path,
        metavar="DIR",
        help="with --fetch: read the original files from this folder; download nothing",
    )
    registry.add_argument("--out", type=Path, metavar="FILE.png", help="also draw what is in the data, as this file")
    registry.set_defaults(command=_list)


def _list(args: argparse.Namespace, console: "Console") -> None:
    if args.name and "=" in args.name:
        args.name, args.overrides = None, [args.name, *args.overrides]
    if args.fetch and args.subject != "datasets":
        raise UsageError(f"--fetch is of datasets; got 'kinfed list {args.subject}'")
    if args.folder and not args.fetch:
        raise UsageError("--from goes with --fetch")
    if args.subject not in (*REGISTRIES, CITATIONS) or args.subject == "datasets":
        return _list_data(args, console)
    if args.overrides:
        raise UsageError(f"kinfed list {args.subject} takes no settings; got '{args.overrides[0]}'")
    if args.subject == CITATIONS:
        return _cite(args.name)
    entries = _entries(args)
    if args.json:
        print(json.dumps(entries))
    elif args.subject == "methods" and args.name is None:
        _show_families()
    else:
        show_entries(entries)


def _list_data(args: argparse.Namespace, console: "Console") -> None:
    """Data sets, one of them, or what is in a table of yours or an experiment."""
    from . import datasets, table_options  # they import PyTorch

    if args.subject != "datasets":
        if not (table_options.is_table(args.subject) or args.subject.endswith(".toml") or "/" in args.subject):
            table_options.check_no_file(args.subject)  # says what is wrong with a file that is there
            hint = nearest(args.subject, (*REGISTRIES, CITATIONS))
            raise UsageError(f"there is no '{args.subject}' to list, and no such table or experiment; {hint}")
        datasets.inspect(args)
    elif args.fetch:
        datasets.fetch(args, console)
    elif args.name is None:
        datasets.show_all(_entries(args), args, console)
    else:
        entries = _entries(args)
        facts = datasets.inspect_one(args)
        if args.json:
            print(json.dumps({args.name: {**entries[args.name], **facts}}))
        else:
            show_entries(entries)
            datasets.show_facts(facts)


def _entries(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What is in a registry, or what is named, with its settings."""
    registry, given = REGISTRIES[args.subject]
    entries = entries_of(SOLVED if args.name in SOLVED else registry, given, args.name, details=args.json)
    return {name: {**entry, **_origin(name)} for name, entry in entries.items()} if args.name or args.json else entries


def entries_of(registry: Registry, given: int, name: str | None, details: bool) -> dict[str, dict[str, Any]]:
    """What is in a registry, or the part of this name, which has its settings; all of them have with `details`."""
    if name is None and not details:
        return {name: {"what": registry.summary(name)} for name in registry}
    return {name: _describe_part(registry, name, given) for name in ([name] if name else registry)}


def _show_families() -> None:
    """The methods, by family; on one screen."""
    for family, methods in FAMILIES.items():
        names = [*methods, *OWN_TOO] if family == OWN else list(methods)
        print(textwrap.fill(", ".join(names), WIDTH, initial_indent=f"{family}: ", subsequent_indent="    "))
    print("\nA method, its paper and its settings: kinfed list methods NAME")
    print("How to cite kinfed and a method: kinfed list citations NAME")
    print("Which one for my data? docs/methods/README.md; kinfed choose finds it by trying.")


def _cite(name: str | None) -> None:
    """BibTeX for kinfed, and for one method's paper, or for those of all methods."""
    if name is not None and ":" in name:
        raise UsageError(f"{name} is your own: cite where you have it from, and kinfed, as kinfed list citations says")
    if name is not None and name not in METHODS:
        raise UsageError(f"there is no method '{name}'; {nearest(name, METHODS)}")
    print(_bibtex("software", "kinfed", title=f"{{{TITLE}}}", author="{The kinfed authors}", version=__version__))
    methods = {
        method: listed for family in FAMILIES.values() for method, listed in family.items() if name in (None, method)
    }
    for listed in {listed.title: listed for listed in methods.values() if listed.title}.values():
        key = f"{listed.authors.split()[0].lower()}{listed.year}{listed.place.partition(':')[0].replace('_', '')}"
        authors = listed.authors.replace(" et al.", " and others")
        print(_bibtex("misc", key, title=f"{{{listed.title}}}", author=authors, year=listed.year))
    if name is not None and not methods[name].title:
        print(f"% {name} is {'our own' if name in FAMILIES[OWN] else 'of no single paper'}: cite kinfed")


def _bibtex(kind: str, key: str, **fields: object) -> str:
    return "\n".join([f"@{kind}{{{key},", *(f"  {name} = {{{value}}}," for name, value in fields.items()), "}"])


def show_entries(entries: dict[str, dict[str, Any]]) -> None:
    """Parts, each with its settings if it has them."""
    for name, entry in entries.items():
        _write(f"{name}  {entry['what']}", 0)
        if entry.get("family"):
            _write(f"family: {entry['family']}")
        if entry.get("paper"):
            _write(f"{entry['paper']['title']} ({entry['paper']['authors']}, {entry['paper']['year']})")
        if entry.get("differs"):
            _write(f"differs: {entry['differs']}")
        for key, values in entry.get("grid", {}).items():
            _write(f"grid: {key} = {', '.join(map(_toml, values))}")
        for key, value in entry.items():
            if key in ("methods", "columns"):
                _write(f"{key}: {', '.join(value)}")
        for setting in entry.get("settings", ()):
            _write(f"{setting['name']} = {_toml(setting['default'])}  ({setting['kind']})")
            if setting["use"]:
                _write(setting["use"], 8)


def _write(text: str, indent: int = 4) -> None:
    """Print text whose further lines are indented by four more."""
    first, further = " " * indent, " " * (indent + 4)
    print(
        textwrap.fill(
            text,
            WIDTH,
            initial_indent=first,
            subsequent_indent=further,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _describe_part(registry: Registry, name: str, given: int) -> dict[str, Any]:
    from ..core.field_checks import describe_setting, kinds_of, sentences
    from ..runs.config import parts, plugins

    part = parts.take(registry, name, "list", given)
    kinds, uses = kinds_of(part), sentences(part)
    settings = [
        {
            "name": key,
            "kind": describe_setting(kinds.get(key, Any)),
            "default": None if p.default is inspect.Parameter.empty else parts.plain(p.default),
            "use": uses.get(key, ""),
        }
        for key, p in parts.settings(part, given).items()
    ]
    if plugins.is_path(name):
        what = _without_formulas((inspect.getdoc(part) or "").partition("\n")[0])
    else:
        what = registry.summary(name)
    grid = {key: list(map(parts.plain, values)) for key, values in getattr(part, "grid", {}).items()}
    return {"what": what, **({"grid": grid} if grid else {}), "settings": settings}


def _without_formulas(text: str) -> str:
    """A docstring's line whose formulas, between dollars, are plain letters."""

    def write(formula: re.Match[str]) -> str:
        spaced = re.sub(r"\\[,;:! ]|~", " ", formula[1])
        return re.sub(r"\\([a-zA-Z]+)", r"\1", re.sub(r"[{}]", "", spaced))

    return re.sub(r"\$([^$]+)\$", write, text)


def _origin(name: str) -> dict[str, Any]:
    """A method's family, its paper and what differs from it; nothing for one from a file of yours."""
    for family, methods in FAMILIES.items():
        if name in methods:
            _, authors, year, title = methods[name]
            paper = {"authors": authors, "year": year, "title": title} if title else None
            return {"family": family, "paper": paper, "differs": METHODS.differs(name)}
    return {}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "(left out)" if value is None else json.dumps(value)
