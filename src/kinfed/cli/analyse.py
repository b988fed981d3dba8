"""kinfed analyse."""

import argparse
import csv
import json
import math
import textwrap
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import config
from ..analyses import ANALYSES
from ..files import replacing
from ..study import Finding, Study
from .running import Bar, machine, options


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Put the command into the parser."""
    analyse = commands.add_parser(
        "analyse",
        parents=[options(), common],
        help="look deeper: what a graph is worth, whose models are mixed, late clients, ...",
        description="Run what an analysis needs and write its table and pictures. Finished runs are kept.",
        epilog="""example: kinfed analyse controls panacea seeds=3 'analysis.graphs=["oracle","shuffled"]'""",
    )
    analyse.add_argument("analysis", choices=list(ANALYSES), metavar="ANALYSIS", help=", ".join(ANALYSES))
    analyse.add_argument("source", metavar="METHOD|FILE.toml")
    analyse.add_argument("overrides", nargs="*", metavar="key=value", help="of the experiment, or analysis.KEY=VALUE")
    analyse.add_argument("--out", type=Path, metavar="DIR", help="default: analyses/ANALYSIS/TIME")
    analyse.set_defaults(command=_analyse)


def _analyse(asked: argparse.Namespace, console: Console) -> None:
    table = config.read(asked.source, asked.overrides)
    settings = table.pop("analysis", {})
    out = asked.out or Path("analyses") / asked.analysis / time.strftime("%Y-%m-%d-%H%M%S")
    with Bar(console, asked.quiet) as bar:
        study = Study(table, machine(asked, bar), out, bar.begin)
        look, _ = config.call(ANALYSES[asked.analysis], settings, "analysis", given=1)
        found = look(study)
    _write(found, out)
    if asked.json:
        print(json.dumps({"title": found.title, "rows": found.rows, "pictures": [str(p) for p in found.pictures]}))
    if not asked.quiet:
        _show(found, out, console)


def _write(found: Finding, out: Path) -> None:
    with replacing(out / "table.csv") as part, part.open("w", newline="") as file:
        table = csv.DictWriter(file, list(found.rows[0]))
        table.writeheader()
        for row in found.rows:
            table.writerow({name: f"{value:.7g}" if isinstance(value, float) else value for name, value in row.items()})


def _show(found: Finding, out: Path, console: Console) -> None:
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title=found.title, title_justify="left")
    columns = []
    for name in found.rows[0]:
        values = [row[name] for row in found.rows]
        if all(value is None for value in values):
            continue
        columns.append(_cells(values))
        width = max(map(len, [*columns[-1], *name.split()]))
        words = any(isinstance(value, str) for value in values)
        heading = textwrap.fill(name, width, break_on_hyphens=False)
        shown.add_column(heading, justify="left" if words else "right", vertical="bottom", no_wrap=True)
    for cells in zip(*columns, strict=True):
        shown.add_row(*cells)
    console.print(shown)
    for note in found.notes:
        console.print(note)
    console.print(
        f"table.csv and {', '.join(p.name for p in found.pictures) or 'the runs'} are in {out}", soft_wrap=True
    )


def _cells(values: list[str | int | float | None]) -> list[str]:
    """A column with as many decimals as give its largest number four digits."""
    largest = max((abs(value) for value in values if isinstance(value, float) and math.isfinite(value)), default=0.0)
    decimals = min(6, max(0, 3 - math.floor(math.log10(largest)))) if largest else 1
    said = {float: lambda value: f"{value:.{decimals}f}", type(None): lambda value: ""}
    return [said.get(type(value), str)(value) for value in values]
