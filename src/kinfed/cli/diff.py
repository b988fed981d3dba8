"""kinfed diff."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import UsageError
from .console import literal, show
from .counts import count

SELECTED = "selected"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "diff",
        parents=[common],
        description="Show what changed between the relations of two finished runs of the same clients: edges gained "
        "and lost, weights by client and layer, how much of each client's row is unchanged, and whether the graph "
        "collapsed.",
        epilog="example: kinfed diff runs/fedamp runs/fedaghn; of one run over time: kinfed diff my-run my-run "
        "--rounds 1,20",
    )
    parser.add_argument("before", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument(
        "after", type=Path, metavar="RUN", help="the folder of another run of the same clients, or of the same run"
    )
    parser.add_argument(
        "--rounds",
        default=f"{SELECTED},{SELECTED}",
        metavar="A,B",
        help="a round of each run (default: the one that validation selected)",
    )
    parser.add_argument(
        "--edge",
        type=float,
        metavar="WEIGHT",
        help="smallest weight that counts as an edge (default: half of an even share, 1 / 2N)",
    )
    parser.add_argument(
        "--top", type=count, metavar="N", help="how many clients and edges to list (default: 10; all with --json)"
    )
    parser.set_defaults(command=_diff)


def _diff(args: argparse.Namespace, console: Console) -> None:
    from ..report.explain.relation_difference import TOP, diff, grids  # it imports PyTorch

    found = diff(args.before, args.after, rounds_of(args.rounds), args.edge)
    if args.json:
        print(json.dumps(found.to_dict(args.top or 0)))
        return
    show(grids(found, args.top or TOP), literal(), soft_wrap=True)


def rounds_of(text: str) -> list[int | None]:
    """Two rounds, from 1; None stands for the selected one."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part == SELECTED or (part.isdecimal() and int(part) > 0) for part in parts):
        raise UsageError(f"--rounds are two rounds, counted from 1, such as 1,20 or 1,{SELECTED}; got '{text}'")
    return [None if part == SELECTED else int(part) for part in parts]
