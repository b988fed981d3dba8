"""kinfed demo."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

METHODS = {  # by the name of its folder, what is trained
    **{name: [name] for name in ("local", "fedavg", "fedavg-ft", "kin", "hedge")},
    **{name: [name] for name in ("sfl", "fedcedar", "fedaghn", "pfedgat")},
    "panacea": ["panacea", "method.structure=moved"],  # this data has no graph, which the paper's needs
}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    demo = commands.add_parser(
        "demo",
        parents=[common],
        description="See what kinfed does: train ten methods on rotated digits, which come with scikit-learn, compare "
        "them, and write one HTML page about them. It takes about a minute and needs no network. If interrupted, the "
        "same command continues.",
    )
    demo.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder of the runs (default: runs/demo)"
    )
    demo.add_argument("--quiet", action="store_true", help="print only the comparison")
    demo.set_defaults(command=_demo)


def _demo(args: argparse.Namespace, console: Console) -> None:
    from ..report.tables import runs_table
    from ..report.tables.compare import compare
    from ..runs.config import experiment as config
    from ..runs.launch import once
    from ..simulation.execution import Execution
    from .console import literal
    from .options import Bar, describe
    from .report import write_page

    folders = [args.out / name for name in METHODS]
    with Bar(console, args.quiet) as bar:
        for (name, (method, *settings)), folder in zip(METHODS.items(), folders, strict=True):
            bar.begin(name)
            experiment = config.resolve(config.read(method, settings))
            summary = once(experiment, folder, Execution(progress=bar.update)).read_summary()
            if not args.quiet:
                describe(summary, console)
                console.print()
    comparison, page = compare(folders), write_page(folders, args.out / "report.html")
    if args.json:
        print(json.dumps(comparison.to_dict() | {"out": str(args.out), "report": str(page)}))
        return
    out = literal()
    for part in runs_table.terminal(comparison):
        out.print(part, soft_wrap=True)
    out.print(
        f"\nwho learns from whom: {page}, one page that needs no network; the graph that kin has learned: "
        f"{args.out / 'kin' / 'relation.png'}, with a block for each of the four hidden groups",
        soft_wrap=True,
    )
