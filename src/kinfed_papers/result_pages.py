"""Pages of which programs write parts, between marks, and people the rest; and what was measured, between runs.

A long table stands beside its page, as CSV in the folder of the page's name. The page has a link to it under a caption,
alone in its paragraph, for which the site shows the table.
"""

import csv
import io
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import kinfed
from kinfed.files import replacing
from kinfed.report.tables.text_table import split_row

PART = re.compile(r"^<!-- ([^>]+) -->$.*?^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL)  # as `put` writes them
ROWS = 8  # of the longest table that stands on its page
TABLE = re.compile(r"(?:^\*\*([^\n]+)\*\*\n\n)?((?:^\|.*\|\n?){3,})", re.MULTILINE)  # below a caption in bold, or none
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED = 6  # columns that a caption names at most
LENGTH = 48  # of a file's name


def put(page: Path, part: str, text: str, title: str, rows: int = ROWS) -> None:
    """Write one part of a page, and leave the others as they are; a new page begins with its title.

    Tables of more than so many rows are written beside the page.
    """
    write(page, *compose(page, part, text, title, rows))


def is_written(page: Path, part: str, text: str) -> bool:
    """Whether `put` would change nothing."""
    content, tables = compose(page, part, text, "", ROWS)
    return all(path.exists() and path.read_text() == text for path, text in {page: content, **tables}.items())


def compose(page: Path, part: str, text: str, title: str, rows: int) -> tuple[str, dict[Path, str]]:
    """A page with one part replaced, and the tables beside it that the part has, by their paths."""
    content = page.read_text() if page.exists() else f"# {title}\n"
    old = re.compile(rf"<!-- {re.escape(part)} -->.*<!-- end of {re.escape(part)} -->\n", re.DOTALL)
    above = old.split(content)[0] if old.search(content) else content
    text, tables = split_tables(page, text, part, (HEADING.findall(above) or [title])[-1], rows)
    text = f"<!-- {part} -->\n{text.strip()}\n<!-- end of {part} -->\n"
    return old.sub(lambda _: text, content) if old.search(content) else f"{content}\n{text}", tables


def write_page(page: Path, text: str) -> None:
    """Write a whole page, its long tables beside it."""
    write(page, *split_tables(page, text))


def write(page: Path, text: str, tables: dict[Path, str]) -> None:
    """Write a page and tables beside it; a table that the page no longer links is removed."""
    for path, content in (*tables.items(), (page, text)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write_text(content)
    for path in page.with_suffix("").glob("*.csv"):
        if f"({page.stem}/{path.name})" not in text:
            path.unlink()


def split_tables(
    page: Path, text: str, part: str = "", heading: str = "", rows: int = ROWS
) -> tuple[str, dict[Path, str]]:
    """A text with links in place of its tables of more than so many rows, and those tables as CSV by their paths.

    A caption is the line in bold above its table, else the heading above it with the names of the columns.
    """
    tables: dict[Path, str] = {}

    def move(match: re.Match[str]) -> str:
        cells = [split_row(line) for line in match[2].splitlines()]
        if len(cells) - 2 <= rows:
            return match[0]
        above = HEADING.findall(before + match.string[: match.start()])
        caption = match[1] or f"{(above or [heading])[-1]} ({name_columns(cells[0])})"
        path = first = place_table(page, part, match[1] or (above or [""])[-1])
        number = 2
        while path in tables:
            path, number = first.with_stem(f"{first.stem}-{number}"), number + 1
        tables[path] = write_csv([cells[0], *cells[2:]])
        label = caption.replace("[", "(").replace("]", ")")
        return f"[{label}]({page.stem}/{path.name})\n"

    pieces, before = [], ""
    for piece in FENCED.split(text):
        pieces.append(piece if piece.startswith("```") else TABLE.sub(move, piece))
        before += "" if piece.startswith("```") else piece
    return "".join(pieces), tables


def place_table(page: Path, part: str, caption: str) -> Path:
    """Where a page's table stands: in the folder of its name, named by its caption up to an "of"."""
    named = re.sub(r"[^a-z0-9]+", "-", f"{part} {caption.partition(' of ')[0]}".lower()).strip("-")
    return page.with_suffix("") / f"{named[:LENGTH].rstrip('-') or page.stem}.csv"


def name_columns(names: list[str]) -> str:
    """The first columns of a table; those that are numbered say nothing without the page."""
    shown = [name for name in names if name and not name.isdecimal()]
    return "; ".join([*shown[:NAMED], *(["..."] if len(shown) > NAMED else [])])


def write_csv(rows: list[list[str]]) -> str:
    """Rows as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def keep(path: Path, measured: Any) -> None:
    """Write what was measured so far, as JSON; a program that is killed meanwhile leaves what was there."""
    with replacing(path) as file:
        file.write_text(json.dumps(measured))


def version() -> str:
    """What was measured: kinfed's version, the commit and the day."""
    ask = ["git", "rev-parse", "--short", "HEAD"]
    named = subprocess.run(ask, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True).stdout.strip()
    day = time.gmtime()
    return f"kinfed {kinfed.__version__} of {day.tm_mday} {time.strftime('%B %Y', day)} (commit {named or 'unknown'})"
