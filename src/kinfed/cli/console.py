"""Where the commands print."""

from rich.console import Console


def literal(stderr: bool = False) -> Console:
    """Standard output or error, showing text as it is: [red] and :o: may be parts of a folder's name."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)
