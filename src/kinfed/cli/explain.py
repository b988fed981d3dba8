"""kinfed explain."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import UsageError
from .console import literal


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "explain",
        parents=[common],
        description="Why a client of a finished run hears others: its weights by layer and round, what the method "
        "compared, and its test score without each of them, measured.",
        epilog='examples: kinfed explain my-run --client 7; kinfed explain my-run --client "Shop 7" --of "Shop 3"',
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--client", required=True, metavar="NAME", help="whose weights are explained")
    parser.add_argument("--of", metavar="NAME", help="the one that it hears (default: those of most weight)")
    parser.add_argument("--top", type=int, metavar="N", help="how many of most weight (default: 5)")
    parser.add_argument("--data-dir", metavar="DIR", help="folder of data sets (default: $KINFED_DATA)")
    parser.set_defaults(command=_explain)


def _explain(args: argparse.Namespace, console: Console) -> None:
    from ..report import grid
    from ..report.reasons import TOP, explain, grids  # it imports PyTorch

    if args.top is not None and args.top < 1:
        raise UsageError(f"--top must be at least 1; got {args.top}")
    found = explain(args.run, args.client, args.of, args.data_dir, args.top or TOP)
    if args.json:
        print(json.dumps(found.to_dict()))
        return
    out = literal()
    for table in grids(found):
        for part in grid.terminal(table):
            out.print(part, soft_wrap=True)
