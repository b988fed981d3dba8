"""kinfed explain."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ..files import to_json
from .console import Literal, show
from .options import count


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "explain",
        parents=[common],
        description="Show why a client of a finished run learns from others: its weights by layer and round, what the "
        "method compared, and its test score without each of them, measured. Of a model that partial pooling solves, "
        "show how much its own rows weigh, column by column; of a mixed model, its estimates with standard errors; of "
        "boosted trees, which columns move its answers.",
        epilog='examples: kinfed explain my-run 7; kinfed explain my-run "Shop 7" "Shop 3"',
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("client", metavar="CLIENT", help="the client whose weights are explained")
    parser.add_argument("of", nargs="?", metavar="OTHER", help="explain this client's weight (default: the largest)")
    parser.add_argument("--top", type=count, metavar="N", help="how many of the largest weights (default: 5)")
    parser.add_argument("--data-dir", metavar="DIR", help="folder of data sets (default: $KINFED_DATA)")
    parser.set_defaults(command=_explain)


def _explain(args: argparse.Namespace, console: Console) -> None:
    from ..report.explain.mixed_effects import MixedEffects, OwnEffects  # it imports PyTorch
    from ..report.explain.own_rows import OwnRows
    from ..report.explain.reasons import TOP, explain, grids
    from ..report.explain.split_columns import SplitColumns
    from ..runs.openers import open_models
    from ..runs.run_folder import RunFolder

    folder = RunFolder(args.run)
    saved = open_models(folder)
    effects = None if saved is None else MixedEffects.read(folder)
    if saved is not None and effects is not None:
        deviations = OwnEffects.from_run(saved, effects, args.client)
        if args.json:
            print(to_json(effects.to_dict() | {"client": deviations.to_dict()}))
            return
        show([*effects.grids(), deviations.grid()], Literal(), soft_wrap=True)
        return
    columns = None if args.of or saved is None else SplitColumns.from_run(saved)
    if columns is not None:
        if args.json:
            print(to_json({"client": args.client, "columns": columns.to_dict(args.client)}))
            return
        show([columns.grid(args.client)], Literal(), soft_wrap=True)
        return
    shares = None if saved is None else OwnRows.from_run(saved)
    if shares is not None and args.of is None and not folder.relations.exists():
        if args.json:
            print(to_json({"client": args.client, "own_rows": shares.to_dict(args.client)}))
            return
        show([shares.grid(args.client)], Literal(), soft_wrap=True)
        return
    reasons = explain(args.run, args.client, args.of, args.data_dir, args.top or TOP)
    if args.json:
        print(to_json(reasons.to_dict() | ({} if shares is None else {"own_rows": shares.to_dict(args.client)})))
        return
    tables = grids(reasons)
    show(tables if shares is None else [*tables, shares.grid(args.client)], Literal(), soft_wrap=True)
