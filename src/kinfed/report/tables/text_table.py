"""A grid: a table of text with remarks, for the terminal, as Markdown and LaTeX; and its numbers as CSV."""

import csv
import io
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from ...errors import printable
from ...verdict.verdict import plain

PREFIXES = ("", "k", "M", "G", "T")


@dataclass(frozen=True)
class Grid:
    """A table of text: first `text_columns` columns of names, then numbers."""

    name: str  # of its CSV file
    title: str
    headings: Sequence[str]
    blocks: Sequence[Sequence[Sequence[str]]]  # rows that belong together
    notes: Sequence[str] = ()
    records: Sequence[Mapping[str, Any]] = field(default_factory=list)  # the same numbers, not rounded
    text_columns: int = 1

    @property
    def filled_columns(self) -> list[int]:
        """The columns that are not empty."""
        every = [row for rows in self.blocks for row in rows]
        return [i for i, column in enumerate(zip(*every, strict=True)) if any(column)]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: its numbers, and the remarks."""
        return {"title": self.title, "rows": list(self.records), "notes": list(self.notes)}

    def of_set(self, letter: str) -> "Grid":
        """The same for one of several sets of comparable runs; the letter is empty if there is one."""
        records = [{"set": letter, **record} for record in self.records]
        title = f"{letter}: {self.title}" if letter else self.title
        return replace(self, name=self.name + letter, title=title, records=records)


def terminal(grid: Grid) -> Iterator[Table | Text]:
    """The parts of a grid for the terminal."""
    yield Text(f"\n{grid.title}", style="bold")
    rows = [row for block in grid.blocks for row in ([], *block)][1:]
    text_columns = range(sum(i < grid.text_columns for i in grid.filled_columns))
    shown = [[row[i] for i in grid.filled_columns] if row else [] for row in rows]
    yield draw([grid.headings[i] for i in grid.filled_columns], shown, text_columns, text_columns, 1, "bottom")
    yield from map(Text, grid.notes)


def draw(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    text_columns: Container[int] = (0,),
    wrapped: Container[int] = (),
    gap: int = 2,
    vertical: Literal["top", "bottom"] = "top",
) -> Table:
    """A table for the terminal: `text_columns` to the left, others to the right; those `wrapped` may be folded."""
    drawn = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=any(headings))
    for i, heading in enumerate(headings):
        way: Literal["left", "right"] = "left" if i in text_columns else "right"
        drawn.add_column(heading, justify=way, vertical=vertical, no_wrap=i not in wrapped, overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, map(printable, row)))
    return drawn


def markdown(grid: Grid) -> str:
    """A grid as Markdown."""
    one_line = [grid.headings[i].replace("\n", " ") for i in grid.filled_columns]
    ways = ["---" if i < grid.text_columns else "---:" for i in grid.filled_columns]
    out = [f"**{grid.title}**", "", f"| {' | '.join(one_line)} |", f"| {' | '.join(ways)} |"]
    for rows in grid.blocks:
        out += [f"| {' | '.join(row[i].replace('|', chr(92) + '|') for i in grid.filled_columns)} |" for row in rows]
    return "\n".join([*out, "", *(f"- {note}" for note in grid.notes)]) + "\n"


def of_markdown(text: str) -> list[Grid]:
    """The grids in a text that `markdown` has written, without their numbers; blocks are one."""
    grids, title, rows, notes = list[Grid](), "", list[list[str]](), list[str]()

    def end() -> None:
        if len(rows) > 1:
            text_columns = max(1, sum(cell == "---" for cell in rows[1]))
            grids.append(Grid("", title, rows[0], [rows[2:]], tuple(notes), text_columns=text_columns))
        rows.clear()
        notes.clear()

    for line in map(str.strip, text.splitlines()):
        if line.startswith("|"):
            if notes:
                end()
            rows.append(split_row(line))
        elif line.startswith("- ") and rows:
            notes.append(line.removeprefix("- "))
        elif line and not line.startswith("- "):
            end()
            title = line.strip("*")
    end()
    return grids


def split_row(line: str) -> list[str]:
    """The cells of a row of a Markdown table, which begins and ends with a bar."""
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def latex(grid: Grid) -> str:
    """A grid as a tabular of booktabs."""
    columns = grid.filled_columns
    ways = "".join("l" if i < grid.text_columns else "r" for i in columns)
    out = [f"% {grid.title}", rf"\begin{{tabular}}{{{ways}}}", r"\toprule"]
    out.append(" & ".join(tex(grid.headings[i].replace("\n", " ")) for i in columns) + r" \\")
    for rows in grid.blocks:
        out.append(r"\midrule")
        out += [" & ".join(tex(row[i]) for i in columns) + r" \\" for row in rows]
    return "\n".join([*out, r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in grid.notes)]) + "\n"


def as_csv(grid: Grid) -> str:
    """The numbers of a grid as CSV, one line a record; an empty cell is a number that is not defined."""
    out = io.StringIO()
    writer = csv.DictWriter(
        out, list(dict.fromkeys(key for record in grid.records for key in record)), lineterminator="\n"
    )
    writer.writeheader()
    for record in grid.records:
        writer.writerow({key: _write_cell(value) for key, value in record.items()})
    return out.getvalue()


def _write_cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.7g}"
    return "" if value is None else value


def facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON: None for a number that is not defined, NaN."""
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in values.items()}


def number(value: float) -> str:
    """A number with three decimals; nothing for one that is not defined."""
    return "" if math.isnan(value) else f"{value:.3f}"


def quantity(value: float, unit: str = "") -> str:
    """A number that is not negative in three digits, with a prefix, such as 1.23 kB."""
    rounded = float(f"{value:.3g}")  # 999,999 is 1 M
    power = min(len(PREFIXES) - 1, int(math.log10(rounded) // 3)) if rounded >= 1000 else 0
    return f"{rounded / 1000**power:g} {PREFIXES[power]}{unit}"


def tex(text: str) -> str:
    """Text in which nothing is a command of LaTeX."""
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    for mark, command in (("±", r"$\pm$"), ("~", r"\textasciitilde{}"), ("<", "$<$")):
        text = text.replace(mark, command)
    return text


def duration(seconds: float) -> str:
    """The time in a readable unit."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def score_text(score: float, share: bool) -> str:
    """A score as text, in percent if it is a share, as in pictures and comparisons."""
    return f"{100 * score:.2f}" if share else plain(score)
