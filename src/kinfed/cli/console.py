"""Where the commands print."""

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from ..report.grid import Grid


class Literal(Console):
    """A console that shows text as it is: [red] and :o: may be parts of a folder's name.

    What is printed with `soft_wrap` may hold a path or a command to copy, so its words are never broken: a terminal
    wraps it between words, and a file or a pipe is given it as one line.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **how)

    def print(self, *objects: Any, soft_wrap: bool | None = None, **how: Any) -> None:
        """Print as rich does."""
        if soft_wrap and self.is_terminal:
            objects = tuple(self._wrapped(one) for one in objects)
        super().print(*objects, soft_wrap=soft_wrap, **how)

    def _wrapped(self, what: Any) -> Any:
        """Text in lines that fit, as far as its words do; anything else as it is."""
        if not isinstance(what, str | Text):
            return what
        lines = [
            textwrap.wrap(line, self.width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
            for line in str(what).split("\n")
        ]
        shown = "\n".join("\n".join(line) for line in lines)
        return shown if isinstance(what, str) else Text(shown, what.style)


def literal(stderr: bool = False) -> Console:
    """Standard output or error."""
    return Literal(stderr=stderr)


def show(tables: "Iterable[Grid]", console: Console, soft_wrap: bool = False) -> None:
    """Print tables."""
    from ..report.grid import terminal  # with its package it imports PyTorch

    for table in tables:
        for part in terminal(table):
            console.print(part, soft_wrap=soft_wrap)
