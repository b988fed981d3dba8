"""kinfed list."""

import argparse
import inspect
import json
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ..analyses import ANALYSES
from ..attacks import ATTACKS
from ..baselines import REFERENCES
from ..datasets import DATASETS
from ..experiments import config
from ..graphs.known import GRAPHS
from ..methods import METHODS
from ..models import MODELS
from ..papers import published_table
from ..partitions import PARTITIONS
from .console import literal

SHELVES: dict[str, tuple[dict[str, Any], int]] = {  # name: the table, and how many arguments are not settings
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
    """Put the command into the parser."""
    shelf = commands.add_parser("list", parents=[common], help="available methods, data sets, models and other parts")
    shelf.add_argument("shelf", choices=[*SHELVES, "papers", "tables"])
    shelf.set_defaults(command=_list)


def _list(asked: argparse.Namespace, console: Console) -> None:
    shelf, given = SHELVES.get(asked.shelf, ({}, 0))
    entries: dict[str, tuple[str, dict[str, Any]]] = {}
    if asked.shelf == "tables":
        for name in published_table.tables():
            found = published_table.load(name)
            entries[name] = (found.title, {"methods": list(found.rows), "columns": list(found.columns)})
    if asked.shelf == "papers":
        for name, (table, column) in published_table.experiments().items():
            at = published_table.load(table).columns[column]
            entries[name] = (f"{at.dataset}, {at.setting}" + " (a subset)" * at.subset, {})
    for name, part in shelf.items():
        text = inspect.getdoc(inspect.getmodule(part) if asked.shelf == "methods" else part) or ""
        known = {
            key: None if p.default is inspect.Parameter.empty else config.plain(p.default)
            for key, p in config.settings(part, given).items()
        }
        entries[name] = (text.partition("\n")[0], known)
    if asked.json:
        print(json.dumps({name: {"what": what, "arguments": known} for name, (what, known) in entries.items()}))
        return
    out = literal()
    for name, (what, known) in entries.items():
        out.print(Text.assemble((name, "bold"), "  ", what))
        if known:
            said = Text(", ".join(f"{k}={_toml(v)}" for k, v in known.items()), style="dim")
            out.print(Padding(said, (0, 0, 0, 4)))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "(unset)" if value is None else json.dumps(value)
