"""What `kinfed list` says of papers: their tables, the experiments in these, and what becomes of their claims."""

import json
import os
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from .. import published_table
from ..claims import answered
from ..coverage import claims, coverage, text
from ..reproduction import WITHOUT_FILE


def _tables() -> dict[str, dict[str, Any]]:
    loaded = {name: published_table.load(name) for name in published_table.tables()}
    return {
        name: {"what": table.title, "methods": list(table.rows), "columns": list(table.columns)}
        for name, table in loaded.items()
    }


def _papers() -> dict[str, dict[str, Any]]:
    entries = {}
    for name, (table, column) in published_table.experiments().items():
        at = published_table.load(table).columns[column]
        entries[name] = {"what": f"{at.dataset}, {at.setting}" + " (a subset)" * at.subset}
    return entries


def _claims() -> dict[str, dict[str, Any]]:
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
        print(json.dumps([one._asdict() for one in covered]))
        return
    for line in text(covered, width):
        print(line)


ENTRIES = {"papers": _papers, "tables": _tables, "claims": _claims}
