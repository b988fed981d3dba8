"""kinfed sweep."""

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import RunError, log_failure
from ..files import replacing
from ..report.tables import text_table
from ..report.tables.compare import compare
from ..report.tables.statistics_tables import pair_grids
from ..runs.config import experiment
from ..runs.run_folder import RunFolder
from ..search.study import Study
from ..search.sweep import Sweep, parse, plan_sweep
from .console import show
from .estimate import Planned, dry_run
from .findings import tell, write
from .options import add_dry_run, add_settings, place
from .training import Bar, execution


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    sweeping = commands.add_parser(
        "sweep",
        parents=[place(), common],
        description="Run every combination of values for every method and seed. Finished runs are kept: the same "
        "command with the same --out resumes, and one with more values runs what is missing.",
        epilog="examples: kinfed sweep local training.optimiser.lr=0.01,0.1 seed=0..2 --method local,fedavg --out lr; "
        "kinfed sweep fedprox grid=paper",
    )
    what = "the experiment: the built-in one with this method, or that of a config"
    sweeping.add_argument("source", metavar="METHOD|FILE.toml", help=what)
    what = (
        "values to try, as key=a,b,c; 0..2 is 0,1,2, and [1,2] is one value; methods.NAME.KEY is for one method; "
        "grid=paper also tries what each method's paper tries, as kinfed list methods NAME shows it"
    )
    add_settings(sweeping, what)
    sweeping.add_argument("--method", metavar="A,B", help="methods to sweep (default: the experiment's)")
    sweeping.add_argument("--jobs", type=int, default=1, metavar="N", help="runs in parallel (default: 1)")
    sweeping.add_argument("--out", type=Path, metavar="DIR", help="the sweep's folder (default: sweeps/TIME)")
    add_dry_run(sweeping)
    sweeping.set_defaults(command=_sweep)


def _sweep(args: argparse.Namespace, console: Console) -> None:
    out = args.out or Path("sweeps") / time.strftime("%Y-%m-%d-%H%M%S")
    methods = args.method.split(",") if args.method else []
    with Bar(console, args.quiet) as bar:
        # Fixed settings of the data apply from the start, so that your own table replaces the embedded digits entirely.
        fixed = [f"{key}={values[0]}" for key, values in parse(args.overrides).items() if len(values) == 1]
        table = experiment.read(args.source, [setting for setting in fixed if setting.startswith("federation.")])
        study = Study(table, execution(args, bar), out, data_dir=args.data_dir)
        wanted = plan_sweep(study, methods, args.overrides)
        for line in wanted.check():
            if not args.quiet:
                console.print(line)
        experiment.warn_of_idle(args.source, args.overrides, wanted.methods_by_name)
        if args.dry_run:
            count = len(wanted.seeds)
            return dry_run(
                [Planned(*setting, count) for setting in wanted.experiments().items()], args, console, args.jobs
            )
        try:
            failed = _carry_out(wanted, args, bar, console)
        except KeyboardInterrupt as stop:
            raise type(stop)(f"interrupted; run the same command with --out {out} to resume") from None
    count = len(wanted.runs())
    if len(failed) < count:
        outcomes = wanted.score_settings(failed)
        finding = wanted.tabulate(outcomes)
        write(finding, out)
        tell(finding, out, args, console)
        _compare_winners(wanted.winners(outcomes), out, args, console)
    if failed:
        raise RunError(
            f"{len(failed)} of {count} runs failed; run the same command with --out {out} to try these again"
        )


def _compare_winners(winners: Sequence[RunFolder], out: Path, args: argparse.Namespace, console: Console) -> None:
    """Compare the methods' best settings, pair by pair: in winners.md, and on standard error."""
    if len(winners) < 2:
        return
    tables = pair_grids(compare([folder.path for folder in winners]))
    with replacing(out / "winners.md") as part:
        part.write_text("\n".join(map(text_table.markdown, tables)), encoding="utf-8")
    if not args.quiet:
        show(tables, console)


def _carry_out(wanted: Sweep, args: argparse.Namespace, bar: Bar, console: Console) -> set[str]:
    """Run what is not finished, printing each new kind of failure; returns the names of failed runs."""
    runs, done = wanted.runs(), 0
    failed: set[str] = set()
    reported: set[str] = set()

    def begin(name: str) -> None:
        if args.jobs == 1:
            bar.begin(f"{name.partition('/')[0]}, run {done + 1} of {len(runs)}")

    if args.jobs > 1:
        bar.count(0, len(runs))
    with closing(replace(wanted.study, on_begin=begin).attempts(runs, args.jobs)) as outcomes:
        for outcome in outcomes:
            done += 1
            if args.jobs > 1:
                bar.count(done, len(runs))
            if outcome.problem is None:
                continue
            failed.add(outcome.name)
            text = log_failure(outcome.problem)
            if text not in reported:
                reported.add(text)
                console.print(f"kinfed: {outcome.name} failed: {text}", soft_wrap=True)
    return failed
