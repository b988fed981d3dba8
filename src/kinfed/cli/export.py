"""kinfed export."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import UsageError, several
from ..files import to_json
from .predict import of_all


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    export = commands.add_parser(
        "export",
        parents=[common],
        description="Write clients' models as files that need no kinfed, each with a model card beside it. onnx "
        "includes the preprocessing of rows: scales, categories, missing cells; safetensors holds the tensors alone.",
        epilog="example: kinfed export my-run --format onnx --out models",
    )
    export.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run, or of a choice")
    export.add_argument("--client", metavar="NAME", help="whose model (default: all)")
    export.add_argument("--format", choices=["onnx", "safetensors"], default="onnx", help="file format (default: onnx)")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write into")
    export.add_argument(
        "--licence",
        default="",
        metavar="TEXT",
        help="the licence that the cards name (default: left for you to fill in)",
    )
    export.add_argument("--force", action="store_true", help="overwrite existing files")
    export.set_defaults(command=_export)


def _export(args: argparse.Namespace, console: Console) -> None:
    from ..report.tables.text_table import draw
    from ..runs.openers import experiment_at
    from ..runs.run import Run
    from ..serving.export import export

    if experiment_at(args.run) is not None:
        what = "is the folder of a site, whose model kinfed predict and kinfed serve use"
        raise UsageError(f"{args.run} {what}; only models of runs are exported")
    saved = Run.open(args.run)
    clients = saved.names if of_all(args.client, saved.names) else [args.client]
    made = export(saved, clients, args.format, args.out, args.licence, args.force)
    if args.json:
        print(to_json([model._asdict() | {"path": str(model.path)} for model in made]))
        return
    rows = []
    for model in made[:20]:
        gap = "" if model.difference is None else f"{model.difference:.0e}"
        rows.append([model.client, str(model.path), f"{model.size / 1e3:,.0f}", f"{model.seconds:.2f}", gap])
    console.print(draw(("client", "file", "kB", "seconds", "from PyTorch"), rows, (0, 1), range(5)))
    console.print(f"{several(len(made), 'model')} in {args.out}, a card beside each", soft_wrap=True)
