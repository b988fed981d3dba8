"""How a Finding is written to files and printed."""

import argparse
import csv
import math
import textwrap
from pathlib import Path

from rich.console import Console

from ..files import replacing, sweep_up, to_json
from ..report.tables.text_table import draw
from ..search.study import Finding


def write(finding: Finding, out: Path) -> None:
    """Write the table to the folder, as table.csv and as table.md."""
    rows = [
        {name: f"{value:.7g}" if isinstance(value, float) else value for name, value in row.items()}
        for row in finding.rows
    ]
    with replacing(out / "table.csv") as part, part.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    columns = _columns(finding)
    lines = [list(columns), ["---" if _has_text(finding, name) else "---:" for name in columns]]
    lines += [[cell.replace("|", "\\|") for cell in row] for row in zip(*columns.values(), strict=True)]
    page = [
        f"{finding.title}",
        "",
        *(f"| {' | '.join(cells)} |" for cells in lines),
        "",
        *(f"- {n}" for n in finding.notes),
    ]
    with replacing(out / "table.md") as part:
        part.write_text("\n".join(page).rstrip() + "\n", encoding="utf-8")
    sweep_up(out)


def tell(finding: Finding, out: Path, args: argparse.Namespace, console: Console) -> None:
    """The table on standard error, or JSON on standard output."""
    if args.json:
        pictures = [str(path) for path in finding.pictures]
        print(to_json({"title": finding.title, "rows": finding.rows, "pictures": pictures, "notes": finding.notes}))
    if args.quiet:
        return
    console.print(finding.title)
    for columns in _split_by_width(_columns(finding), console.width):
        headings = [textwrap.fill(name, _width(name, c), break_on_hyphens=False) for name, c in columns.items()]
        text_columns = [i for i, name in enumerate(columns) if _has_text(finding, name)]
        console.print(draw(headings, zip(*columns.values(), strict=True), text_columns, text_columns, 1, "bottom"))
    for note in finding.notes:
        console.print(note, soft_wrap=True)
    console.print(
        f"table.csv and {', '.join(p.name for p in finding.pictures) or 'the runs'} are in {out}", soft_wrap=True
    )


def _columns(finding: Finding) -> dict[str, list[str]]:
    """Headings and cells of the columns that are not empty."""
    columns = {name: [row[name] for row in finding.rows] for name in finding.rows[0]}
    return {name: _cells(values) for name, values in columns.items() if values.count(None) < len(values)}


def _split_by_width(columns: dict[str, list[str]], width: int) -> list[dict[str, list[str]]]:
    """The columns in as many tables as the width requires; rows are numbered if there are several tables."""
    widths = {name: _width(name, cells) + 1 for name, cells in columns.items()}
    if sum(widths.values()) - 1 <= width:
        return [columns]
    rows = len(next(iter(columns.values())))
    numbers = [str(number) for number in range(1, rows + 1)]
    tables: list[dict[str, list[str]]] = []
    left = 0
    for name, cells in columns.items():
        left -= widths[name]
        if left < 0:
            tables.append({"#": numbers})
            left = width - len(numbers[-1]) - widths[name]
        tables[-1][name] = cells
    return tables


def _width(name: str, cells: list[str]) -> int:
    return max(map(len, [*cells, *name.split()]))


def _has_text(finding: Finding, name: str) -> bool:
    return any(isinstance(row.get(name), str) for row in finding.rows)


def _cells(values: list[str | int | float | None]) -> list[str]:
    """A column with enough decimals to give its largest number four digits."""
    largest = max((abs(value) for value in values if isinstance(value, float) and math.isfinite(value)), default=0.0)
    decimals = min(6, max(0, 3 - math.floor(math.log10(largest)))) if largest else 1
    formats = {float: lambda value: f"{value:z.{decimals}f}", type(None): lambda value: ""}
    return [formats.get(type(value), str)(value) for value in values]
