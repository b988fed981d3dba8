"""kinfed papers analyse."""

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from kinfed.cli.findings import tell, write
from kinfed.cli.options import add_settings, place
from kinfed.cli.training import Bar, execution
from kinfed.errors import UsageError, nearest
from kinfed.runs.config import experiment, parts
from kinfed.search.study import Study

from ..analyses import ANALYSES


def add(actions: Any, common: argparse.ArgumentParser) -> None:
    """Add the action to the parser."""
    what = "analyse what a graph is worth, whose models are mixed"
    analyse = actions.add_parser(
        "analyse",
        parents=[place(), common],
        help=what,
        description="Run what an analysis needs and write its table and pictures. Finished runs are kept.",
        epilog="""example: kinfed papers analyse controls panacea seeds=3 'analysis.graphs=["oracle","shuffled"]'""",
    )
    analyse.add_argument("analysis", metavar="ANALYSIS", help=", ".join(ANALYSES))
    what = "the experiment: the built-in one with this method, or that of a config"
    analyse.add_argument("source", metavar="METHOD|FILE.toml", help=what)
    add_settings(analyse, "settings of the experiment, or of the analysis as analysis.KEY=VALUE")
    analyse.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the results (default: analyses/ANALYSIS/TIME)"
    )
    analyse.set_defaults(command=_analyse)


def _analyse(args: argparse.Namespace, console: Console) -> None:
    if args.analysis not in ANALYSES:
        raise UsageError(f"there is no analysis '{args.analysis}'; {nearest(args.analysis, ANALYSES)}")
    table = experiment.read(args.source, args.overrides)
    settings = table.pop("analysis", {})
    out = args.out or Path("analyses") / args.analysis / time.strftime("%Y-%m-%d-%H%M%S")
    with Bar(console, args.quiet) as bar:
        study = Study(table, execution(args, bar), out, bar.begin, args.data_dir)
        look, _ = parts.call(ANALYSES[args.analysis], settings, "analysis", given=1)
        experiment.warn_of_idle(args.source, args.overrides, {study.method: study.experiment().method})
        try:
            finding = look(study)
        except KeyboardInterrupt as stop:
            raise type(stop)(f"interrupted; run the same command with --out {out} to resume") from None
    write(finding, out)
    tell(finding, out, args, console)
