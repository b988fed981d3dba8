"""kinfed papers: the command about published papers, one file an action."""

import argparse
from typing import Any

from . import analyse, list, reference, run


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    papers = commands.add_parser(
        "papers",
        description="Run published tables again, analyse what their methods learn, and list what there is of them.",
        epilog="examples: kinfed papers list tables; kinfed papers run pfedgat.table1 --column cifar10/iid --dry-run",
    )
    actions = papers.add_subparsers(required=True, metavar="ACTION")
    for action in (run, analyse, reference, list):
        action.add(actions, common)
