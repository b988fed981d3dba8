"""Tables as people read them: numbers end under one another, and the heading of a group stands over its whole width.

A link to a CSV file that is a paragraph of its own is that table, under the link as its caption.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

NUMBER = re.compile(r"[+\-\u2212±]?\d[\d,.]*(e[+-]?\d+)?( ?± ?[\d,.]+)?( ?%)?( \([^)]*\d[^)]*\))?")
LINKED = re.compile(r"^\[[^\]]+\]\((\S+\.csv)\)$", re.MULTILINE)
ALIGNED = {"text-left", "text-center", "text-right"}


def show(text: str) -> str:
    """The text of a page with the directive of a table in place of each link that is one.

    A fence of backticks could not have any in its first line, and captions have some.
    """
    return LINKED.sub(lambda link: f"~~~{{csv-table}} {link[0]}\n:file: {link[1]}\n:header-rows: 1\n~~~", text)


def align(table: nodes.table) -> None:
    """Columns of numbers, but for the first column, are aligned to the right where the page says nothing of them."""
    rows = [row.children for row in table.findall(nodes.row)]
    body = [row.children for part in table.findall(nodes.tbody) for row in part.findall(nodes.row)]
    for at in range(1, min(map(len, rows))):
        cells: list[Any] = [row[at] for row in rows]
        said = [text for row in body if (text := row[at].astext().strip())]
        if said and all(map(NUMBER.fullmatch, said)) and not any(ALIGNED & set(cell["classes"]) for cell in cells):
            for cell in cells:
                cell["classes"].append("text-right")


def group(table: nodes.table) -> None:
    """A row of which only the first cell says something, in bold, is a heading: that cell is as wide as the table."""
    for part in table.findall(nodes.tbody):
        for row in part.findall(nodes.row):
            first, *others = row.children
            if others and next(first.findall(nodes.strong), None) and not any(cell.astext() for cell in others):
                first["morecols"] = len(others)
                first["classes"].append("group")
                row.children = [first]


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = show(source[0])


def _mend(app: Sphinx, page: nodes.document) -> None:
    for table in page.findall(nodes.table):
        align(table)
        group(table)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("doctree-read", _mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
