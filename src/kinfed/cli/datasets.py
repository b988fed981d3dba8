"""What `kinfed list` says of data: which sets there are, where they come from, and what is in one, or in a table."""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ..core.graph import Graph
from ..core.tasks import Classification, Forecasting
from ..data.dataset import Dataset
from ..data.datasets import DATASETS
from ..data.datasets.sources.originals import ORIGINALS, obtain, sha256
from ..data.datasets.your_files import TABLES, YOURS, display_name
from ..data.federation import Federation
from ..data.split import SPLITS
from ..errors import UsageError, nearest, several
from ..files import to_json
from ..plots.examples import examples
from ..report.tables.text_table import draw
from ..runs.config import experiment as config, from_table, parts
from ..verdict.verdict import plain
from . import table_options
from .console import Literal

WITHOUT_FILE = {
    "digits": "built in",
    "synthetic": "built in",
    **dict.fromkeys(YOURS, "your files"),
    **dict.fromkeys(TABLES, "your table"),
}


def show_all(entries: dict[str, dict[str, Any]], args: argparse.Namespace, console: Console) -> None:
    """Print the data sets, and which of them are on this machine."""
    folder = args.data_dir
    for name, entry in entries.items():
        path = None if folder is None else folder / f"{name}.npz"
        entry["bytes"] = path.stat().st_size if path is not None and path.is_file() else 0
        entry["status"] = _how_to_get(name, bool(entry["bytes"]))
    if args.json:
        print(to_json(entries))
        return
    rows = []
    for name, entry in entries.items():
        what = re.sub(rf"[,;] from {name}\.npz$", "", entry["what"].rstrip("."))
        rows.append([name, entry["status"], f"{entry['bytes'] / 1e6:.1f}" if entry["bytes"] else "", what])
    Literal().print(draw(("data set", "status", "MB", "what it holds"), rows, (0, 1, 3), (3,)))
    if folder is None:
        console.print("no data directory: set KINFED_DATA or --data-dir to see which data sets are on this machine")


def _how_to_get(name: str, here: bool) -> str:
    if name in WITHOUT_FILE:
        return WITHOUT_FILE[name]
    if here:
        return "here"
    if name in ORIGINALS:
        return "--fetch" if ORIGINALS[name].sources else "--fetch --from"
    return "your file"


def fetch(args: argparse.Namespace, console: Console) -> None:
    """Download data sets from their publishers, check them, and write NAME.npz each."""
    if not args.data_dir:
        raise UsageError("no data directory: set KINFED_DATA or --data-dir to the folder for NAME.npz")
    unknown = [name for name in args.fetch if name not in ORIGINALS]
    if unknown:
        raise UsageError(f"there is nothing to fetch for '{unknown[0]}'; {nearest(unknown[0], ORIGINALS)}")
    if args.folder and len(args.fetch) > 1:
        raise UsageError("--from holds the originals of one data set; name just one")
    done = []
    columns = (TextColumn("{task.description}", markup=False), BarColumn(30), DownloadColumn(), TimeRemainingColumn())
    for name in args.fetch:
        with Progress(*columns, console=console, transient=True) as bar:
            tasks: dict[str, Any] = {}

            def show(file: str, so_far: int, size: int, bar: Progress = bar, tasks: dict[str, Any] = tasks) -> None:
                if file not in tasks:
                    tasks[file] = bar.add_task(file)
                bar.update(tasks[file], completed=so_far, total=size or None)

            try:
                result = obtain(name, args.data_dir, args.folder, show)
            except KeyboardInterrupt as stop:
                raise type(stop)("interrupted; run the same command again to resume") from None
        console.print(f"{name}: {result.path}, {result.path.stat().st_size / 1e6:.1f} MB", soft_wrap=True)
        for note in result.notes:
            console.print(f"  {note}", soft_wrap=True)
        done.append({"name": name, "path": str(result.path), "notes": result.notes})
    if args.json:
        print(to_json(done))


def inspect_one(args: argparse.Namespace) -> dict[str, Any]:
    """What is in a data set with these settings; nothing without any where it is not on this machine."""
    folder = args.data_dir
    path = None if folder is None else folder / f"{args.name}.npz"
    built_in = WITHOUT_FILE.get(args.name) == "built in"
    if not (args.overrides or args.out or built_in or (path is not None and path.is_file())):
        return {}
    settings = config.override({"name": args.name}, args.overrides)
    dataset = parts.make(DATASETS, settings, "dataset", given=1)[0](folder)
    return _facts(dataset, settings, folder, args.out)


def _facts(dataset: Dataset, settings: dict[str, Any], folder: Path | None, picture: Path | None) -> dict[str, Any]:
    """What a data set holds and where it is; with `picture` it is drawn, too."""
    facts = _dataset(dataset)
    path = folder / f"{settings['name']}.npz" if folder else None
    if path and path.is_file() and settings["name"] not in WITHOUT_FILE:
        facts = {"file": str(path), "sha256": sha256(path)} | facts
    if picture:
        examples(dataset, display_name(settings), picture)
        facts |= {"picture": str(picture)}
    return facts


def inspect(args: argparse.Namespace) -> None:
    """Print what is in the federation of an experiment, or in a table of yours; nothing is trained."""
    folder, yours = args.data_dir, table_options.is_table(args.subject)
    # The method and the model do not matter here, so a config of the data alone is enough.
    experiment = config.resolve({"method": "local", "model": "linear"} | table_options.read(args.subject, args))
    dataset = table_options.dataset(experiment, args) if yours else experiment.dataset(folder)
    federation = experiment.federation(folder, experiment.seed, dataset)
    settings = experiment.table["federation"]["dataset"]
    facts = _facts(dataset, settings, folder, args.out) | _federation(federation)
    columns = federation.columns
    choices = from_table.choices(experiment, federation) if yours else None
    if yours:
        facts["input"] = _shape(federation.x)
    if args.json:
        chosen: dict[str, Any] = {} if choices is None else {"choices": choices.sentences, "warnings": choices.warnings}
        chosen |= {} if columns is None or choices is None else {"columns": columns.to_dict()}
        print(to_json({"name": display_name(settings), **facts, **chosen}))
        return
    out = Literal()
    out.print(display_name(settings))
    show_facts(facts)
    if choices is None:
        return
    if columns is not None:
        out.print()
        out.print(table_options.columns_of(columns))
    out.print(f"\n{table_options.command(args)}: this would choose a method and train as follows:", soft_wrap=True)
    table_options.tell(choices, out)


def show_facts(facts: dict[str, Any]) -> None:
    """Print what is in a data set."""
    rows = []
    for key, value in facts.items():
        if key == "  graph" and value == facts["graph"]:
            continue
        text = f"{value:,}" if isinstance(value, int) else str(value)
        rows.append([key, f"{text[:16]}..." if key == "sha256" else text])
    Literal().print(draw(("", ""), rows, (0, 1), (1,)))


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
    if isinstance(dataset.task, Forecasting) and dataset.time is not None and dataset.past + dataset.span > 1:
        numbers = dataset.y.as_strided((dataset.y.untyped_storage().nbytes() // dataset.y.element_size(),), (1,), 0)
        readings = numbers.view(len(dataset.owners), -1)  # [N, T]
        present = ~readings.isnan()
        gaps = int((dataset.time[: readings.shape[1]].diff() != 1).sum())
        facts["steps"] = f"{readings.shape[1]:,} with {several(gaps, 'gap')}, windows of {dataset.past + dataset.span}"
        share = 100 * (1 - present.double().mean(1))
        facts["missing readings"] = f"{float(share.mean()):.2f} %, at most {float(share.max()):.2f} % of a client's"
        values = readings[present]
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
    joined = several(count, "link" if both else "one-way link")
    return {"graph": f"{graph.origin}, {joined} between different clients, {several(alone, 'client')} without any"}


def _shape(values: torch.Tensor) -> str:
    return " x ".join(map(str, values.shape[1:])) or "1"


def _spread(counts: torch.Tensor) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
