"""Where the commands print."""

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import printable

if TYPE_CHECKING:
    from ..report.tables.text_table import Grid

WIDEST = 1000  # characters of a table


class Literal(Console):
    """A console that shows text as it is: [red] and :o: may be parts of a folder's name, but no control character.

    What is printed with `soft_wrap` may hold a path or a command to copy, so its words are never broken: a terminal
    wraps it between words, and a file or a pipe is given it as one line. A table is as wide as its words and numbers
    need, as a number without its last digits is another one; a narrower terminal wraps its lines.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **how)

    def print(self, *objects: Any, soft_wrap: bool | None = None, **how: Any) -> None:
        """Print as rich does, except what does not fit."""
        objects = tuple(printable(text) if isinstance(text, str) else text for text in objects)
        if soft_wrap and self.is_terminal:
            objects = tuple(self._wrap(text) for text in objects)
        for table in objects:
            if isinstance(table, Table):
                self._keep_whole(table)
                how["crop"] = False
        super().print(*objects, soft_wrap=soft_wrap, **how)

    def _keep_whole(self, table: Table) -> None:
        """Give each column the width below which its words, or its lines that may not wrap, would be cut."""
        unbounded = self.options.update(max_width=WIDEST)
        for column in table.columns:
            sizes = [self.measure(cell, options=unbounded) for cell in (column.header, *column.cells)]
            column.min_width = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
        needed = sum((column.min_width or 0) + table.padding[1] for column in table.columns)
        needed -= 0 if table.pad_edge else table.padding[1]  # after the last column
        if needed > self.width:  # rich would leave out columns
            table.width = needed

    def _wrap(self, what: Any) -> Any:
        """Text in lines that fit, as far as its words do; anything else as it is."""
        if not isinstance(what, str | Text):
            return what
        lines = [
            textwrap.wrap(line, self.width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
            for line in str(what).split("\n")
        ]
        shown = "\n".join("\n".join(line) for line in lines)
        return shown if isinstance(what, str) else Text(shown, what.style)


def show(tables: "Iterable[Grid]", console: Console, soft_wrap: bool = False) -> None:
    """Print tables."""
    from ..report.tables.text_table import terminal  # with its package it imports PyTorch

    for table in tables:
        for part in terminal(table):
            console.print(part, soft_wrap=soft_wrap)
