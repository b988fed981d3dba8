"""Where the commands print."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from ..report.grid import Grid


def literal(stderr: bool = False) -> Console:
    """Standard output or error, showing text as it is: [red] and :o: may be parts of a folder's name."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def show(tables: "Iterable[Grid]", console: Console, soft_wrap: bool = False) -> None:
    """Print tables."""
    from ..report.grid import terminal  # with its package it imports PyTorch

    for table in tables:
        for part in terminal(table):
            console.print(part, soft_wrap=soft_wrap)
