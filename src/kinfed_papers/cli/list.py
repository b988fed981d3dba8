"""kinfed papers list."""

import argparse
import json
import os
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from kinfed.cli.list import entries_of, show_entries
from kinfed.errors import UsageError

from .. import published_table
from ..analyses import ANALYSES
from ..claims import answered_claims
from ..coverage import claims, coverage, text
from ..references import REFERENCES
from ..reproduction import WITHOUT_FILE

REGISTRIES = {"analyses": (ANALYSES, 1), "references": (REFERENCES, 0)}  # and how many arguments are no settings
SUBJECTS = ("tables", "experiments", "claims", "coverage", *REGISTRIES)


def add(actions: Any, common: argparse.ArgumentParser) -> None:
    """Add the action to the parser."""
    listing = actions.add_parser(
        "list",
        parents=[common],
        help="list tables, experiments, claims, coverage, analyses",
        description="List what there is of papers. tables: their rows and columns. experiments: what kinfed run takes, "
        "papers/PAPER/TABLE/COLUMN. claims: what the papers claim, and what our runs say of it. coverage: how many "
        "published figures have been measured, by docs/papers/tables of a checkout, and why the others have not "
        "($KINFED_DATA names the folder of the data sets). analyses, references: with their settings if one is named.",
        epilog="examples: kinfed papers list tables; kinfed papers list analyses weights",
    )
    listing.add_argument("subject", metavar="WHAT", choices=SUBJECTS, help=", ".join(SUBJECTS))
    listing.add_argument("name", nargs="?", metavar="NAME", help="an analysis or a reference, such as weights")
    listing.set_defaults(command=_list)


def _list(args: argparse.Namespace, console: Console) -> None:
    if args.name and args.subject not in REGISTRIES:
        raise UsageError(f"kinfed papers list {args.subject} takes no name; got '{args.name}'")
    if args.subject == "coverage":
        return show_coverage(args.json, console.width)
    entries = _entries(args)
    if args.json:
        print(json.dumps(entries))
    elif args.subject == "claims":
        show_claims(entries, console.width)
    else:
        show_entries(entries)


def _entries(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What there is, or what is named, with its settings."""
    if args.subject not in REGISTRIES:
        return {"tables": _tables, "experiments": _experiments, "claims": _claims}[args.subject]()
    return entries_of(*REGISTRIES[args.subject], args.name, details=args.json)


def _tables() -> dict[str, dict[str, Any]]:
    loaded = {name: published_table.load(name) for name in published_table.tables()}
    return {
        name: {"what": table.title, "methods": list(table.rows), "columns": list(table.columns)}
        for name, table in loaded.items()
    }


def _experiments() -> dict[str, dict[str, Any]]:
    entries = {}
    for name, (table, column) in published_table.experiments().items():
        at = published_table.load(table).columns[column]
        entries[name] = {"what": f"{at.dataset}, {at.setting}{' (a subset)' if at.subset else ''}"}
    return entries


def _claims() -> dict[str, dict[str, Any]]:
    tested = {
        f"{table}: {verdict.claim.says} ({verdict.claim.where})": {
            "what": verdict.text,
            "answer": verdict.answer_with_reason,
        }
        for table, verdict in claims()
    }
    shown = {
        f"{claim.paper}: {claim.says} ({claim.where})": {
            "what": f"{claim.shows} See docs/{claim.page}." if claim.page else claim.shows,
            "answer": claim.answer,
        }
        for claim in answered_claims()
    }
    return {**tested, **shown}


def show_claims(entries: dict[str, dict[str, Any]], width: int) -> None:
    """Each claim with its answer, and below it the numbers, on lines that the terminal can show."""
    for name, entry in entries.items():
        print(textwrap.fill(f"{entry['answer']}: {name}", width, subsequent_indent="  "))
        print(textwrap.fill(entry["what"], width, initial_indent="    ", subsequent_indent="    "))
    counts = Counter(entry["answer"].partition(" (")[0] for entry in entries.values())
    print(f"{len(entries)} verdicts: {', '.join(f'{count} {answer}' for answer, count in counts.most_common())}")


def show_coverage(as_json: bool, width: int) -> None:
    """How many published figures have been measured, and why the others have not."""
    folder = os.environ.get("KINFED_DATA")
    at_hand = {path.stem for path in Path(folder).glob("*.npz")} if folder else set()
    covered = coverage(at_hand | {*WITHOUT_FILE})
    if as_json:
        print(json.dumps([table._asdict() for table in covered]))
        return
    for line in text(covered, width):
        print(line)
