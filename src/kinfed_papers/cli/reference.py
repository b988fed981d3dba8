"""kinfed papers reference."""

import argparse
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kinfed.cli.options import add_settings, detail, place
from kinfed.cli.training import Bar, show
from kinfed.errors import UsageError
from kinfed.runs.config import experiment as config, parts
from kinfed.runs.results import draw_history
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.devices import pick_device
from kinfed_papers.references import REFERENCES

from ..references.centralised import train


def add(actions: Any, common: argparse.ArgumentParser) -> None:
    """Add the action to the parser."""
    reference = actions.add_parser(
        "reference",
        parents=[place(), detail(), common],
        help="train one network on all clients' series together",
        description="Train a centralised reference on the data of an experiment: the same readings, split and scores.",
        epilog="example: kinfed papers reference graph-wavenet papers/sfl/table1/metr_la reference.epochs=10",
    )
    reference.add_argument("reference", choices=list(REFERENCES), metavar="REFERENCE", help=", ".join(REFERENCES))
    reference.add_argument("source", metavar="FILE.toml|papers/...", help="the experiment whose data to use")
    add_settings(reference, "settings of the experiment, or of the reference as reference.KEY=VALUE", how=False)
    reference.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's folder (default: runs/REFERENCE/DATASET/TIME)"
    )
    reference.set_defaults(command=_reference)


def _reference(args: argparse.Namespace, console: Console) -> None:
    table = config.read(args.source, args.overrides)
    reference, settings = parts.call(REFERENCES[args.reference], table.pop("reference", {}), "reference")
    experiment = config.resolve(table)
    if experiment.seeds > 1:
        raise UsageError("a reference is trained once: write seeds=1, and choose its seed as in seed=2")
    dataset, stamp = experiment.dataset_name, time.strftime("%Y-%m-%d-%H%M%S")
    folder = RunFolder(args.out or Path("runs") / args.reference / dataset / stamp)
    if folder.is_finished:
        raise UsageError(f"{folder} already holds a run; choose another --out")
    device = pick_device(args.device)
    federation = experiment.federation(args.data_dir, experiment.seed)
    new = not folder.path.exists()
    folder.create()
    try:
        with Bar(console, args.quiet) as bar:
            run = train(reference, federation, seed=experiment.seed, device=device, progress=bar.update)
    except BaseException:  # there is nothing to resume
        if new:
            with suppress(OSError):
                folder.path.rmdir()
        raise
    config.write({**experiment.table, "reference": settings}, folder.config)
    run.history.origin = "given"
    folder.write_history(run.history, [])
    draw_history(run.history, [], folder)
    outcome = run.summary()
    summary = replace(
        outcome,
        method=args.reference,
        data=replace(outcome.data, dataset=dataset, federation=experiment.table["federation"]),
        out=str(folder),
    )
    folder.write_summary(summary)
    show(summary, args, console)
