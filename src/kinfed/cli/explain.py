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
    record, tables = _gather(args)
    if args.json:
        print(to_json(record))
    else:
        show(tables, Literal(), soft_wrap=True)


def _gather(args: argparse.Namespace) -> tuple[dict[str, Any], list[Any]]:
    """What explains a client's model, for JSON and as tables: by its method, that of its state or of its relation."""
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
        return effects.to_dict() | {"client": deviations.to_dict()}, [*effects.grids(), deviations.grid()]
    columns = None if args.of or saved is None else SplitColumns.from_run(saved)
    if columns is not None:
        return {"client": args.client, "columns": columns.to_dict(args.client)}, [columns.grid(args.client)]
    shares = None if saved is None else OwnRows.from_run(saved)
    own_grid = [] if shares is None else [shares.grid(args.client)]
    of_own = {} if shares is None else {"own_rows": shares.to_dict(args.client)}
    if own_grid and args.of is None and not folder.relations.exists():
        return {"client": args.client} | of_own, own_grid
    reasons = explain(args.run, args.client, args.of, args.data_dir, args.top or TOP)
    return reasons.to_dict() | of_own, [*grids(reasons), *own_grid]
