"""kinfed estimate."""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from ..core.registry import load
from ..errors import RunError, UsageError, explain
from ..report.tables.text_table import duration
from ..runs import reference_runs
from ..runs.config import experiment as config
from ..runs.config.experiment import Experiment
from ..search.arena import PRICE
from ..search.budget import RUNS
from ..search.estimate import Cost, estimate
from . import table_options
from .console import literal
from .options import add_settings, columns, place
from .training import data_dir, unwatched

CHOOSING = "choosing: a candidate"
TABLES = "kinfed_papers.cli.reproduce"  # has the options and the runs of published tables


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    ahead = commands.add_parser(
        "estimate",
        parents=[load(f"{TABLES}:request")(), columns(), place(), common],
        description="Time a few rounds with some of the examples, a few seconds for each method and column, and "
        "extrapolate.",
        epilog="example: kinfed estimate pfedgat.table1 --column cifar10/iid --seeds 1 --scale 0.1",
    )
    ahead.add_argument(
        "subject",
        metavar="FILE.toml|METHOD|ID|FILE.csv",
        help="an experiment, a published table such as pfedgat.table1, or a table of yours, for which a method is "
        "chosen unless --method names one",
    )
    add_settings(ahead)
    ahead.add_argument(
        "--budget",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to time each method and column (default: 5)",
    )
    ahead.set_defaults(command=_estimate)


def _estimate(args: argparse.Namespace, console: Console) -> None:
    if args.budget <= 0:
        raise UsageError(f"--budget is a time in seconds, so it must be positive; got {args.budget:g}")
    args.published = load(f"{TABLES}:is_published")(args.subject)
    runs, parallel = _runs(args)
    where = unwatched(args, workers=1 if len(runs) > 1 and parallel > 1 else None)
    costs: dict[str, tuple[Cost, int]] = {}
    broken: dict[str, str] = {}
    silent = args.quiet or not console.is_terminal
    column = TextColumn("timing {task.description}", markup=False)
    with Progress(column, console=console, transient=True, disable=silent) as bar:
        task = bar.add_task("")
        loaded, federation, note = None, None, ""
        for name, experiment, count in runs:
            bar.update(task, description=name)
            try:
                if experiment.table["federation"] != loaded or federation is None:  # the next row often has the same
                    federation = None  # so that two are never in memory
                    federation = experiment.federation(data_dir(args), experiment.seed)
                    loaded = experiment.table["federation"]
                cost = estimate(experiment, federation, where, args.budget)
                if name == CHOOSING:
                    cost = cost._replace(seconds=PRICE * cost.seconds, measured=f"FedAvg's on {cost.measured}")
                costs[name] = cost, count
                if name != CHOOSING and not args.published and not note:
                    extra, note = reference_runs.plan(experiment, federation)
                    runs += [(f"{other}, beside it", one, one.seeds) for other, one in extra.items()]
            except (UsageError, RunError) as problem:
                broken[name] = explain(problem)[1]
    for name, why in broken.items():
        console.print(f"kinfed: {name}: {why}", soft_wrap=True)
    if not costs:
        raise UsageError(f"{args.subject}: none of its runs can be started")
    _tell(costs, parallel, args.json, note)


def _runs(args: argparse.Namespace) -> tuple[list[tuple[str, Experiment, int]], int]:
    """The name of each experiment, the experiment, and how many runs it has; and how many runs go in parallel."""
    if args.published:
        return load(f"{TABLES}:runs_of")(args)  # type: ignore[no-any-return]
    yours = table_options.is_table(args.subject)
    if (args.method and not yours) or args.column or args.seeds is not None or args.scale != 1 or args.jobs is not None:
        raise UsageError(
            "--method, --column, --seeds, --scale and --jobs are for published tables, such as pfedgat.table1"
        )
    choosing = yours and not args.method
    method = "fedavg" if choosing else args.method
    experiment = config.resolve(table_options.read(args.subject, args, method if yours else ""))
    if choosing:
        return [(CHOOSING, experiment, RUNS)], 1
    return [(experiment.method_name, experiment, experiment.seeds)], 1  # a run's seeds come one after the other


def _tell(costs: dict[str, tuple[Cost, int]], parallel: int, as_json: bool, note: str) -> None:
    """Print the cost of each experiment, and of all of them, on standard output; `note` is a line to add."""
    total = sum(cost.seconds * count for cost, count in costs.values()) / parallel
    each_run = [cost.memory for cost, count in costs.values() for _ in range(count)]
    memory = sum(sorted(each_run, reverse=True)[:parallel])
    if as_json:
        each = {name: {**cost._asdict(), "runs": count} for name, (cost, count) in costs.items()}
        print(json.dumps({"runs": each, "seconds": total, "memory": memory, "jobs": parallel, "beside": note}))
        return
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("run", "one", "runs", "all", "memory", "measured with"):
        words = heading in ("run", "measured with")
        shown.add_column(heading, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for name, (cost, count) in costs.items():
        shown.add_row(
            *(name, duration(cost.seconds), str(count), duration(cost.seconds * count)),
            *(f"{cost.memory / 2**30:.1f} GiB", cost.measured),
        )
    out = literal()
    out.print(shown)
    together = f" with {parallel} in parallel" if parallel > 1 else ""
    out.print(f"in all {duration(total)}{together}, {memory / 2**30:.1f} GiB of memory")
    if note:
        out.print(note, soft_wrap=True)
