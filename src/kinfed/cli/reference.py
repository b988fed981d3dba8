"""kinfed reference."""

import argparse
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from ..baselines import REFERENCES
from ..baselines.centralised import train
from ..datasets import called
from ..errors import UsageError
from ..experiments import config
from ..experiments.devices import pick_device
from ..experiments.run_folder import write_history
from ..files import make_folder, replacing
from .running import Bar, place, show


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Put the command into the parser."""
    reference = commands.add_parser(
        "reference",
        parents=[place(), common],
        description="Train a centralised reference on the data of an experiment: the same readings, split and scores.",
        epilog="example: kinfed reference graph-wavenet papers/sfl/table1/metr_la reference.epochs=10",
    )
    reference.add_argument("reference", choices=list(REFERENCES), metavar="REFERENCE", help=", ".join(REFERENCES))
    reference.add_argument("source", metavar="FILE.toml|papers/...")
    reference.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="of the experiment, or reference.KEY=VALUE"
    )
    reference.add_argument("--out", type=Path, metavar="DIR", help="default: runs/REFERENCE/DATASET/TIME")
    reference.set_defaults(command=_reference)


def _reference(asked: argparse.Namespace, console: Console) -> None:
    table = config.read(asked.source, asked.overrides)
    reference, settings = config.call(REFERENCES[asked.reference], table.pop("reference", {}), "reference")
    experiment = config.resolve(table)
    if experiment.table["seeds"] > 1:
        raise UsageError("a reference is trained once: write seeds=1, and which seed it has as in seed=2")
    seed, dealt = experiment.table["seed"], experiment.table["federation"]
    out = asked.out or Path("runs") / asked.reference / called(dealt["dataset"]) / time.strftime("%Y-%m-%d-%H%M%S")
    if (out / "summary.json").exists():
        raise UsageError(f"{out} holds a run already; choose another --out")
    device = pick_device(asked.device)
    federation = experiment.federation(asked.data_dir, seed)
    new = not out.exists()
    make_folder(out)
    try:
        with Bar(console, asked.quiet) as bar:
            found = train(reference, federation, seed=seed, device=device, progress=bar.update)
    except BaseException:  # there is nothing to go on with
        if new:
            with suppress(OSError):
                out.rmdir()
        raise
    config.write({**experiment.table, "reference": settings}, out / "config.toml")
    write_history(found.history, None, "given", [], out)
    summary = {
        **found.summary(),
        "method": asked.reference,
        "dataset": called(dealt["dataset"]),
        "federation": dealt,
        "reference": settings,
        "executor": "centralised",
        "out": str(out),
    }
    with replacing(out / "summary.json") as part:
        part.write_text(json.dumps(summary, indent=1) + "\n")
    show(summary, asked, console)
