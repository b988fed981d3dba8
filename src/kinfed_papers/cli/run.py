"""kinfed papers run."""

import argparse
import json
import os
import shlex
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kinfed.cli.compare import write_tables
from kinfed.cli.console import show as show_tables
from kinfed.cli.estimate import Planned, dry_run
from kinfed.cli.options import add_dry_run, add_how, place
from kinfed.cli.training import activity_column, execution
from kinfed.data.split import LEAST
from kinfed.errors import RunError, log_failure, several
from kinfed.files import make_folder, replacing, sweep_up
from kinfed.report.tables.statistics_tables import grids
from kinfed.report.tables.text_table import Grid
from kinfed.runs.config import plugins
from kinfed.runs.launch import Job, run_all
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.precision import PRECISIONS

from .. import published_table
from ..claim_verdicts import Verdict, of_lines, verdicts
from ..coverage import floors
from ..environment import read_machines, remember, sentences
from ..published_table import LEAST_ROUNDS
from ..reproduction import Line, Reproduction
from ..sheet import Sheet, latex, markdown, sheet, table_csv, terminal
from ..table_statistics import comparison

STATISTICS = Path("statistics") / "statistics.md"
LINK = f"\nIntervals, paired tests, scores before and after local training, mean ranks: [statistics]({STATISTICS}).\n"


def add(actions: Any, common: argparse.ArgumentParser) -> None:
    """Add the action to the parser."""
    run = actions.add_parser(
        "run",
        parents=[place(), common],
        help="run a table again, our numbers beside the paper's",
        description="Run a published table's methods on its columns, several seeds each, and put our numbers beside "
        "the published ones: table.md, table.csv and table.tex, with intervals, paired tests and mean ranks in "
        "statistics/. Finished runs are kept and interrupted ones resumed, so "
        "repeating the command does the rest. kinfed papers list tables names the tables.",
        epilog="example: kinfed papers run pfedgat.table1 --method pfedgat,fedavg --column cifar10/iid --scale 0.1",
    )
    run.add_argument("table", metavar="ID", help="the table, such as pfedgat.table1")
    add_how(run)
    run.add_argument(
        "--method",
        metavar="NAME,...",
        default="",
        help="rows of the table, other methods of kinfed, or your own, mine.py:Stay (default: all rows)",
    )
    run.add_argument("--column", metavar="NAME,...", default="", help="columns of the table (default: all)")
    run.add_argument("--seeds", type=int, metavar="N", help="runs of each cell (default: as many as the paper has)")
    run.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="F",
        help=f"for small machines: F times the rounds, rounded up, at least {LEAST_ROUNDS}; a client uses a share F of "
        f"its examples, at least {LEAST:,} or all that it has; settings that count rounds shrink alike; evaluated at "
        f"least {LEAST_ROUNDS} times where rounds are selected; clients and local epochs stay; the table says so "
        "(default: 1)",
    )
    run.add_argument("--jobs", type=int, metavar="N", help="runs in parallel (default: one per core; 1 on a GPU)")
    run.add_argument(
        "--model", metavar="NAME", default="", help="a network in place of the paper's, such as mlp or mine.py:Net"
    )
    run.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the results (default: reproductions/ID, with -scaled-F if scaled)",
    )
    add_dry_run(run)
    run.set_defaults(command=_run)


def read(args: argparse.Namespace) -> Reproduction:
    """The reproduction that the options ask for."""
    scaled = f"-scaled-{args.scale:g}" if args.scale < 1 else ""
    scaled += f"-{plugins.short_name(args.model)}" if args.model else ""
    return Reproduction(
        protocol=published_table.load(args.table),
        out=args.out or Path("reproductions") / f"{args.table}{scaled}",
        data_dir=args.data_dir,
        methods=[name for name in args.method.split(",") if name],
        columns=[name for name in args.column.split(",") if name],
        seeds=args.seeds,
        scale=args.scale,
        model=args.model,
    )


def jobs(args: argparse.Namespace) -> int:
    """How many runs go in parallel."""
    if args.jobs is not None:
        return int(args.jobs)
    return 1 if args.device != "cpu" and torch.cuda.is_available() else cores()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(args: argparse.Namespace, console: Console) -> None:
    made, parallel = read(args), jobs(args)
    if args.dry_run:
        cells = [(cell, cell.experiment) for cell in made.cells() if cell.experiment is not None]
        planned = [
            Planned(f"{planned_cell.row.name} on {planned_cell.column.name}", experiment, made.count)
            for planned_cell, experiment in cells
        ]
        return dry_run(planned, args, console, parallel)
    made.lines()  # raises before anything is run if the folder's runs do not fit into the table
    if parallel > 0:  # or it is refused below
        made.share(execution(args).precision)
    runs = made.runs()
    left = {job.name for job in runs if not RunFolder(job.folder).is_finished}
    try:
        failed = _carry_out(made, runs, left, parallel, args, console)
    except KeyboardInterrupt as stop:
        raise type(stop)("interrupted; run the same command again to resume") from None
    if len(left) > len(failed):
        remember(made.out)
    tables = write_statistics(made)
    shown = _write(made, failed)
    if args.json:
        more = {"statistics": {table.name: table.to_dict() for table in tables}} if tables else {}
        print(json.dumps({**shown._asdict(), **more, "out": str(made.out)}))
    if not args.quiet:
        _show(made, shown, tables, console)
    if failed:
        raise RunError(f"{len(failed)} of {len(runs)} runs failed; the table has the others")
    if broken := [line for line in made.lines() if line.status.startswith("failed: ")]:
        cell = f"{broken[0].row.name} on {broken[0].column.name}"
        raise RunError(f"{cell} {broken[0].status}; the table has what can be read")


def _carry_out(
    made: Reproduction,
    runs: Sequence[Job],
    left: set[str],
    parallel: int,
    args: argparse.Namespace,
    console: Console,
) -> dict[str, str]:
    """Do the runs that are `left`, with a bar on a terminal and lines in a log; why each that failed did, by folder."""
    where = replace(execution(args, workers=1 if parallel > 1 else None), keep_state=False)
    failed, going = dict[str, str](), list[str]()
    logs = not (console.is_terminal or args.quiet)

    def log(text: str) -> None:
        if logs:
            console.print(text, soft_wrap=True)

    def begin(name: str) -> None:
        going.append(name)
        bar.update(task, description="; ".join(going))
        log(f"begun: {name}")

    if parallel > 0:
        count = several(len(runs), "run")
        log(f"{made.protocol.name}: {len(left)} of {count} to do, {parallel} at a time, in {made.out}")
    with _bar(console, console.is_terminal and not args.quiet) as bar:
        task = bar.add_task("", total=len(runs), completed=len(runs) - len(left))
        with closing(run_all(runs, where, made.data_dir, parallel, begin)) as outcomes:
            for outcome in outcomes:
                going[:] = [name for name in going if name != outcome.name]
                bar.update(task, advance=outcome.name in left, description="; ".join(going))
                if outcome.problem is not None:
                    why = log_failure(outcome.problem).replace("\n", " ")
                    failed[str(outcome.folder)] = why
                    console.print(f"kinfed: {outcome.name}: {why}", soft_wrap=True)
                elif outcome.name in left:
                    _write(made, failed)
                    log(f"done: {outcome.name}")
    return failed


def _bar(console: Console, shown: bool) -> Progress:
    """How many runs have ended, how long that takes, and which are going on."""
    columns = (BarColumn(30), MofNCompleteColumn(), TextColumn("runs"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    names = activity_column(45, console)
    return Progress(*columns, *times, names, console=console, transient=True, disable=not shown)


def _show(made: Reproduction, shown: Sheet, tables: Sequence[Grid], console: Console) -> None:
    """Print the table with its statistics; of several columns the mean ranks alone."""
    many = any(table.name == "ranks" for table in tables)
    for part in terminal(shown):
        console.print(part)
    show_tables((table for table in tables if table.name == "ranks" or not many), console)
    console.print(f"table.md, table.csv, table.tex and the runs are in {made.out}", soft_wrap=True)
    if tables:
        console.print(f"intervals, paired tests and ranks of every column: {made.out / STATISTICS}", soft_wrap=True)


def write_statistics(made: Reproduction) -> list[Grid]:
    """Write the statistics of the finished runs into a folder beside the table, and give their tables."""
    compared = comparison(made)
    if not compared.sets:
        return []
    for problem in compared.warnings:
        warnings.warn(problem, stacklevel=2)
    tables = grids(compared)
    write_tables(compared, tables, made.out / STATISTICS.parent)
    return tables


def contents(made: Reproduction, lines: Sequence[Line], made_with: Sequence[str]) -> Sheet:
    """The table with the verdicts on the paper's claims; `made_with` are sentences to be added."""
    claims = [
        f"{verdict.answer_with_reason}: {verdict.claim.says} ({verdict.claim.where}). {verdict.text}"
        for verdict in _verdicts(made, lines)
    ]
    return sheet(made, lines, claims, made_with)


def _write(made: Reproduction, failed: dict[str, str]) -> Sheet:
    make_folder(made.out)
    lines = made.lines(failed)
    command_line = command(made, lines)
    shown = contents(made, lines, sentences(read_machines(made.out), made.seconds()))
    for name, text in (
        ("table.md", markdown(shown, command_line) + (LINK if (made.out / STATISTICS).is_file() else "")),
        ("table.csv", table_csv(lines)),
        ("table.tex", latex(shown, command_line)),
    ):
        with replacing(made.out / name) as part:
            part.write_text(text, encoding="utf-8")
    sweep_up(made.out)
    return shown


def _verdicts(made: Reproduction, lines: Sequence[Line]) -> list[Verdict]:
    """What becomes of the paper's claims; nothing with another network than the paper's."""
    return [] if made.model else verdicts(made.protocol, of_lines(lines), floors(made.protocol.name))


def command(made: Reproduction, lines: Sequence[Line]) -> str:
    """The command that makes everything in the table, which may have been made by several commands."""
    arguments = ["kinfed", "papers", "run", made.protocol.name]
    for option, names, names_given in (
        (
            "--method",
            {line.row.name for line in lines},
            {name: row.command_name for name, row in made.protocol.rows.items()},
        ),
        ("--column", {line.column.name for line in lines}, {name: name for name in made.protocol.columns}),
    ):
        if len(names) < len(names_given) or any(given != name for name, given in names_given.items()):
            arguments += [option, ",".join(given for name, given in names_given.items() if name in names)]
    seeds = max([made.count, *(len(line.by_seed) for line in lines)])
    if seeds != made.protocol.seeds:
        arguments += ["--seeds", str(seeds)]
    arguments += ["--scale", f"{made.scale:g}"] if made.scale < 1 else []
    arguments += ["--model", made.model] if made.model else []
    for precision in PRECISIONS:
        if any(line.by_seed for line in lines) and all(precision in line.flags for line in lines if line.by_seed):
            arguments.append(f"how.precision={precision}")
    return shlex.join(arguments)
