"""The command line: run, resume, compare, list."""

import argparse
import inspect
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from . import __version__, config, runs
from .datasets import DATASETS
from .errors import RunError, UsageError
from .methods import METHODS
from .models import MODELS
from .partitions import PARTITIONS
from .record import History
from .relations import GRAPHS
from .report.compare import compare, table
from .runs import Machine

SHELVES: dict[str, tuple[dict[str, Any], int]] = {  # name: the table, and how many arguments are not settings
    "methods": (METHODS, 0),
    "datasets": (DATASETS, 1),
    "partitions": (PARTITIONS, 0),
    "graphs": (GRAPHS, 2),
    "models": (MODELS, 2),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 if a run failed, 2 if the request was wrong, 130 if interrupted."""
    asked = _parser().parse_args(arguments)
    console = Console(stderr=True, highlight=False)
    warnings.showwarning = lambda message, *_, **__: print(f"kinfed: warning: {message}", file=sys.stderr)
    try:
        asked.command(asked, console)
        return 0
    except (KeyboardInterrupt, Exception) as problem:
        code, text = _explain(problem)
        if asked.debug:
            traceback.print_exc()
        print(f"kinfed: {text}".replace("\n", " "), file=sys.stderr)
        return code


def _explain(problem: BaseException) -> tuple[int, str]:
    """Exit code and the one line that a person reads."""
    match problem:
        case KeyboardInterrupt():
            return 130, str(problem) or "interrupted"
        case UsageError():
            return 2, str(problem)
        case RunError() | OSError():
            return 1, str(problem)
        case MemoryError():
            return 1, "out of memory; choose a smaller model, fewer clients or --executor loop"
    return 1, f"unexpected {type(problem).__name__}: {problem} (--debug shows where; please report it)"


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the full traceback of an error")
    common.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    running = argparse.ArgumentParser(add_help=False)
    running.add_argument(
        "--data-dir",
        type=Path,
        default=os.environ.get("KINFED_DATA"),
        metavar="DIR",
        help="folder of data sets, NAME.npz each (default: $KINFED_DATA)",
    )
    running.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:i (default: auto)")
    running.add_argument("--executor", default="auto", choices=["auto", "loop", "vmap"], help="default: auto")
    running.add_argument(
        "--checkpoint", type=float, default=10, metavar="SECONDS", help="least time between checkpoints (default: 10)"
    )
    running.add_argument("--quiet", action="store_true", help="no progress bar and no table")
    parser = argparse.ArgumentParser(
        prog="kinfed", description="Graph-guided personalised federated learning: every client learns from its kin."
    )
    parser.add_argument("--version", action="version", version=f"kinfed {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        parents=[running, common],
        help="train one personalised model a client",
        description="Run an experiment: a method's name runs the embedded one, rotated digits; a .toml file its own.",
        epilog="example: kinfed run fedaghn rounds=40 method.sharpness=10 --out my-run",
    )
    run.add_argument("source", metavar="METHOD|FILE.toml")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="such as training.epochs=5 or seeds=3")
    run.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/METHOD/DATASET/TIME)")
    run.set_defaults(command=_run)
    again = commands.add_parser("resume", parents=[running, common], help="go on with an interrupted run")
    again.add_argument("folder", type=Path, metavar="DIR")
    again.set_defaults(command=_resume)
    beside = commands.add_parser("compare", parents=[common], help="set runs side by side")
    beside.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    beside.set_defaults(command=_compare)
    shelf = commands.add_parser("list", parents=[common], help="what there is to choose from")
    shelf.add_argument("shelf", choices=list(SHELVES))
    shelf.set_defaults(command=_list)
    return parser


def _run(asked: argparse.Namespace, console: Console) -> None:
    experiment = config.resolve(config.read(asked.source, asked.overrides))
    with _Bar(console, asked.quiet) as bar:
        summary = runs.launch(experiment, asked.out, _machine(asked, bar))
    _show(summary, asked, console)


def _resume(asked: argparse.Namespace, console: Console) -> None:
    with _Bar(console, asked.quiet) as bar:
        summary = runs.resume(asked.folder, _machine(asked, bar))
    _show(summary, asked, console)


def _compare(asked: argparse.Namespace, console: Console) -> None:
    found = compare(asked.folders)
    if asked.json:
        print(json.dumps(found.to_dict()))
    else:
        Console(highlight=False).print(table(found))


def _list(asked: argparse.Namespace, console: Console) -> None:
    shelf, given = SHELVES[asked.shelf]
    entries = {}
    for name, part in shelf.items():
        text = inspect.getdoc(inspect.getmodule(part) if asked.shelf == "methods" else part) or ""
        known = {
            key: None if p.default is inspect.Parameter.empty else p.default
            for key, p in config.settings(part, given).items()
        }
        entries[name] = (text.partition("\n")[0], known)
    if asked.json:
        print(json.dumps({name: {"what": what, "arguments": known} for name, (what, known) in entries.items()}))
        return
    out = Console(highlight=False)
    for name, (what, known) in entries.items():
        out.print(Text.assemble((name, "bold"), "  ", what))
        if known:
            said = Text(", ".join(f"{k}={_toml(v)}" for k, v in known.items()), style="dim")
            out.print(Padding(said, (0, 0, 0, 4)))


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "(unset)" if value is None else json.dumps(value)


def _machine(asked: argparse.Namespace, bar: "_Bar") -> Machine:
    data_dir = Path(asked.data_dir) if asked.data_dir else None
    return Machine(data_dir, asked.device, asked.executor, asked.checkpoint, bar.update)


class _Bar:
    """The live progress bar: rounds, the headline score on validation data, time left."""

    def __init__(self, console: Console, quiet: bool) -> None:
        columns = (BarColumn(30), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=quiet)
        self._task = self._bar.add_task("loading data and model", total=None)

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, history: History, rounds: int) -> None:
        """Show where a run stands."""
        said = f"round {history.done} of {rounds}"
        if history.rounds:
            metric, name = history.task.metric, history.headline
            split = "validation" if (name, "validation", metric) in history.scores[-1] else "test"
            said += f", {split} {metric} {history.scores[-1][name, split, metric].mean():.3f}"
        self._bar.update(self._task, completed=history.done, total=rounds, description=said)


def _show(summary: dict[str, Any], asked: argparse.Namespace, console: Console) -> None:
    """The closing table on standard error, or JSON on standard output."""
    if asked.json:
        print(json.dumps(summary))
    if asked.quiet:
        return
    repeated = "seeds" in summary
    seeds = f"seeds {summary['seeds'][0]} to {summary['seeds'][-1]}" if repeated else f"seed {summary['seed']}"
    title = (
        f"{summary['method']} on {summary['dataset']}: {summary['clients']} clients, {summary['rounds']} rounds, "
        f"{summary['parameters']:,} parameters, {seeds}"
    )
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    # Accuracies are told in percent, as in the pictures and comparisons.
    share = summary["metric"].endswith("accuracy")
    percent, digits = (100, ".2f") if share else (1, ".4g")
    shown.add_column("model")
    for column in (f"test {summary['metric']}{', %' * share}", "over clients", "worst 5 %", "best 5 %"):
        shown.add_column(column, justify="right")
    shown.add_column("over seeds" if repeated else "best round", justify="right")
    for name, s in summary["scores"].items():
        mean, std, worst, best, seeds_std = (
            f"{percent * s.get(key, 0):{digits}}" for key in ("mean", "std", "worst5", "best5", "std_seeds")
        )
        mark = " *" if name == summary["chosen"] and len(summary["scores"]) > 1 else ""
        shown.add_row(name + mark, mean, f"± {std}", worst, best, f"± {seeds_std}" if repeated else str(s["round"]))
    console.print(shown)
    if len(summary["scores"]) > 1:
        console.print("* chosen on validation data: the models that are saved")
    if summary["leaking"]:
        console.print("LEAKING: the method used test examples as feedback; these scores are not a fair estimate")
    relation = summary["relation"]
    if relation and {"auroc", "within", "between"} <= relation.keys():
        console.print(
            f"{relation['origin']} relation: finds the hidden groups with AUROC {relation['auroc']:.3f}, "
            f"mean weight {relation['within']:.4f} within and {relation['between']:.4f} between groups"
        )
    reason = f" ({summary['reason']})" if "reason" in summary else ""
    console.print(
        f"{summary['seconds']:.1f} s with executor {summary['executor']}{reason}, "
        f"{_bytes(summary['bytes_up'])} up, {_bytes(summary['bytes_down'])} down"
    )
    console.print(f"everything is in {summary['out']}", soft_wrap=True)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
