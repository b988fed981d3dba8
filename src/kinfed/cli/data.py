"""kinfed data: the available data sets, where they come from, and what is in them."""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..core.graph import Graph
from ..core.tasks import Classification, Forecasting
from ..data.dataset import Dataset
from ..data.datasets import DATASETS, TABLES, YOURS, called
from ..data.datasets.sources import ORIGINALS, obtain, sha256
from ..data.federation import Federation
from ..data.split import SPLITS
from ..errors import UsageError, nearest, several
from ..plots.examples import examples
from ..runs.config import experiment as config
from ..runs.config import from_table, parts
from . import table_options
from .console import literal
from .options import plain

WITHOUT_FILE = {
    "digits": "built in",
    "synthetic": "built in",
    **dict.fromkeys(YOURS, "your files"),
    **dict.fromkeys(TABLES, "your table"),
}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the commands to the parser."""
    data = commands.add_parser("data")
    kinds = data.add_subparsers(required=True, metavar="list|fetch|inspect")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--data-dir",
        type=Path,
        default=os.environ.get("KINFED_DATA"),
        metavar="DIR",
        help="folder with the data sets, as NAME.npz (default: $KINFED_DATA)",
    )
    what = "list data sets, and which are on this machine"
    listed = kinds.add_parser("list", parents=[where, common], help=what, description=f"{what.capitalize()}.")
    listed.set_defaults(command=_list)
    fetched = kinds.add_parser(
        "fetch",
        parents=[where, common],
        help="download data sets from their publishers",
        description="Download the original files, check them, and write NAME.npz; an interrupted download is resumed.",
        epilog="KINFED_MIRROR is the address of a mirror that has the original files as NAME/FILE.",
    )
    fetched.add_argument("names", nargs="+", metavar="NAME", help=", ".join(ORIGINALS))
    fetched.add_argument(
        "--from",
        dest="folder",
        type=Path,
        metavar="DIR",
        help="read the original files from this folder; download nothing",
    )
    fetched.set_defaults(command=_fetch)
    looked = kinds.add_parser(
        "inspect",
        parents=[table_options.columns(), where, common],
        help="show what is in a data set, in the federation of an experiment, or in a table of yours",
        description="Show what is in a data set, in the federation of an experiment, or in a table of yours, and what "
        "would be trained, validated and tested on. Nothing is trained.",
        epilog="examples: kinfed data inspect metr_la stride=12; kinfed data inspect papers/sfl/table1/metr_la; "
        "kinfed data inspect shops.csv --client shop --target buys",
    )
    looked.add_argument("subject", metavar="NAME|FILE.toml|FILE.csv|papers/...")
    looked.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings of the data set or experiment"
    )
    looked.add_argument("--picture", type=Path, metavar="FILE.png", help="also draw what is in it, as this file")
    looked.set_defaults(command=_inspect)


def _list(args: argparse.Namespace, console: Console) -> None:
    rows = []
    for name in DATASETS:
        path = Path(args.data_dir) / f"{name}.npz" if args.data_dir else None
        here = path is not None and path.is_file()
        if name in WITHOUT_FILE:
            way = WITHOUT_FILE[name]
        elif here:
            way = "here"
        elif name in ORIGINALS:
            way = "fetch" if ORIGINALS[name].sources else "fetch --from"
        else:
            way = "your file"
        size = path.stat().st_size if path and here else 0
        what = DATASETS.summary(name)
        what = re.sub(rf"[,;] from {name}\.npz$", "", what.rstrip("."))
        rows.append((name, way, size, what))
    if args.json:
        print(json.dumps([dict(zip(("name", "status", "bytes", "what"), row, strict=True)) for row in rows]))
        return
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("data set", "status", "MB"):
        shown.add_column(column, justify="right" if column == "MB" else "left", no_wrap=True)
    shown.add_column("what it holds")
    for name, way, size, what in rows:
        shown.add_row(name, way, f"{size / 1e6:.1f}" if size else "", Text(what))
    literal().print(shown)
    if not args.data_dir:
        console.print("no data directory: set KINFED_DATA or --data-dir to see which data sets are on this machine")


def _fetch(args: argparse.Namespace, console: Console) -> None:
    if not args.data_dir:
        raise UsageError("no data directory: set KINFED_DATA or --data-dir to the folder for NAME.npz")
    unknown = [name for name in args.names if name not in ORIGINALS]
    if unknown:
        raise UsageError(f"there is nothing to fetch for '{unknown[0]}'; {nearest(unknown[0], ORIGINALS)}")
    if args.folder and len(args.names) > 1:
        raise UsageError("--from holds the originals of one data set; name just one")
    done = []
    columns = (TextColumn("{task.description}", markup=False), BarColumn(30), DownloadColumn(), TimeRemainingColumn())
    for name in args.names:
        with Progress(*columns, console=console, transient=True) as bar:
            tasks: dict[str, Any] = {}

            def show(file: str, so_far: int, whole: int, bar: Progress = bar, tasks: dict[str, Any] = tasks) -> None:
                if file not in tasks:
                    tasks[file] = bar.add_task(file)
                bar.update(tasks[file], completed=so_far, total=whole or None)

            try:
                result = obtain(name, Path(args.data_dir), args.folder, show)
            except KeyboardInterrupt as stop:
                raise type(stop)("interrupted; run the same command again to resume") from None
        console.print(f"{name}: {result.path}, {result.path.stat().st_size / 1e6:.1f} MB", soft_wrap=True)
        for note in result.notes:
            console.print(f"  {note}", soft_wrap=True)
        done.append({"name": name, "path": str(result.path), "notes": result.notes})
    if args.json:
        print(json.dumps(done))


def _inspect(args: argparse.Namespace, console: Console) -> None:
    folder = Path(args.data_dir) if args.data_dir else None
    choices = columns = None
    if table_options.is_table(args.subject) or args.subject.endswith(".toml") or args.subject.startswith("papers/"):
        # The method and the model do not matter here, so a config of the data alone is enough.
        learning = {"method": "local", "model": "linear"}
        experiment = config.resolve(learning | table_options.read(args.subject, args))
        yours = table_options.is_table(args.subject)
        dataset = table_options.dataset(experiment, args) if yours else experiment.dataset(folder)
        federation = experiment.federation(folder, experiment.seed, dataset)
        settings = experiment.table["federation"]["dataset"]
        facts = _dataset(dataset) | _federation(federation)
        if yours:
            columns, choices = federation.columns, from_table.choices(experiment, federation)
            facts["input"] = _shape(federation.x)
    else:
        if args.subject not in DATASETS:
            table_options.check_no_file(args.subject)
            raise UsageError(f"there is no data set '{args.subject}'; {nearest(args.subject, DATASETS)}")
        settings = config.override({"name": args.subject}, args.overrides)
        dataset = parts.make(DATASETS, settings, "dataset", given=1)[0](folder)
        facts = _dataset(dataset)
    name = called(settings)
    path = folder / f"{settings['name']}.npz" if folder else None
    if path and path.is_file() and settings["name"] not in WITHOUT_FILE:
        facts = {"file": str(path), "sha256": sha256(path)} | facts
    if args.picture:
        examples(dataset, name, args.picture)
        facts |= {"picture": str(args.picture)}
    if args.json:
        chosen: dict[str, Any] = {} if choices is None else {"choices": choices.said, "doubts": choices.doubts}
        chosen |= {} if columns is None else {"columns": columns.to_dict()}
        print(json.dumps({"name": name, **facts, **chosen}))
        return
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for key, value in facts.items():
        if key == "  graph" and value == facts["graph"]:
            continue
        text = f"{value:,}" if isinstance(value, int) else str(value)
        shown.add_row(key, Text(f"{text[:16]}..." if key == "sha256" else text))
    out = literal()
    out.print(name)
    out.print(shown)
    if columns is not None:
        out.print()
        out.print(table_options.columns_of(columns))
    if choices is not None:
        out.print(f"\n{table_options.command(args)}: this would choose a method and train as follows:", soft_wrap=True)
        table_options.tell(choices, out)


def _dataset(dataset: Dataset) -> dict[str, Any]:
    """What a data set holds, before it is divided among clients."""
    used = torch.arange(len(dataset.x)) if dataset.client is None else (dataset.client >= 0).nonzero().flatten()
    facts: dict[str, Any] = {
        "examples": len(used),
        "input": _shape(dataset.x),
        "task": type(dataset.task).__name__.lower(),
    }
    if isinstance(dataset.task, Classification):
        counts = torch.bincount(dataset.y[used], minlength=dataset.task.classes)
        facts["classes"] = f"{dataset.task.classes}, {_spread(counts)} examples each"
    else:
        facts["target"] = _shape(dataset.y)
    if isinstance(dataset.task, Forecasting) and dataset.time is not None and dataset.span > 1:
        numbers = dataset.y.as_strided((dataset.y.untyped_storage().nbytes() // dataset.y.element_size(),), (1,), 0)
        readings = numbers.view(len(dataset.owners), -1)  # [N, T]
        known = ~readings.isnan()
        gaps = int((dataset.time[: readings.shape[1]].diff() != 1).sum())
        facts["steps"] = f"{readings.shape[1]:,} with {gaps} gap{'s' * (gaps != 1)}, windows of {dataset.span}"
        share = 100 * (1 - known.double().mean(1))
        facts["missing readings"] = f"{float(share.mean()):.2f} %, at most {float(share.max()):.2f} % of a client's"
        values = readings[known]
        facts["readings"] = (
            f"{float(values.min()):g} to {float(values.max()):g}, mean {plain(float(values.double().mean()))}"
        )
    if dataset.client is not None:
        owners = torch.bincount(dataset.client[used], minlength=len(dataset.owners))
        facts["clients"] = f"{len(owners)}, {_spread(owners)} examples each"
    return facts | _graph(dataset.graph)


def _federation(federation: Federation) -> dict[str, Any]:
    """The examples for training, validation and testing."""
    facts: dict[str, Any] = {"federation": several(len(federation), "client")}
    for split in SPLITS:
        sizes = torch.tensor([len(rows) for rows in federation.rows[split]])
        facts[f"  {split}"] = f"{int(sizes.sum()):,} examples, {_spread(sizes)} per client"
    if isinstance(federation.task, Forecasting):
        facts["  scale"] = (
            f"mean {plain(federation.task.mean)}, deviation {plain(federation.task.deviation)} of training readings"
        )
    if federation.caution:
        facts["  caution"] = federation.caution
    return facts | {f"  {key}": value for key, value in _graph(federation.graph).items()}


def _graph(graph: Graph | None) -> dict[str, Any]:
    if graph is None:
        return {"graph": "none"}
    links = graph.weights.clone()
    links.diagonal(dim1=-2, dim2=-1).zero_()
    linked = links > 0
    both = torch.equal(links, links.transpose(-1, -2))
    alone = int((~(linked | linked.transpose(-1, -2)).any(-1)).sum())
    count = int(linked.sum()) // (2 if both else 1)
    joined = f"{count:,} {'link' if both else 'one-way link'}{'s' * (count != 1)}"
    lonely = f"{alone} client{'s' * (alone != 1)} without any"
    return {"graph": f"{graph.origin}, {joined} between different clients, {lonely}"}


def _shape(values: torch.Tensor) -> str:
    return " x ".join(map(str, values.shape[1:])) or "1"


def _spread(counts: torch.Tensor) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
