"""kinfed run and kinfed resume."""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ..core.summary import Summary
from ..data.datasets.your_files import display_name
from ..data.federation import Federation
from ..errors import UsageError
from ..runs import reference_runs, trackers
from ..runs.config import experiment as config, from_table
from ..runs.config.experiment import Experiment, Table
from ..runs.further_rounds import further
from ..runs.launch import launch, resume
from ..runs.run_folder import RunFolder
from ..search.choice_folder import Request
from ..simulation import distributed
from . import table_options
from .choose import choose_for
from .estimate import Planned, dry_run
from .options import MORE, REPEATED, add_dry_run, add_how, add_settings, columns, detail, place
from .report import show_page, write_page
from .training import Bar, execution, show


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the commands to the parser."""
    running = argparse.ArgumentParser(add_help=False, parents=[place(), detail()])
    running.add_argument_group(MORE).add_argument(
        "--track", **REPEATED, metavar="WHERE", help="tensorboard, mlflow, wandb or FILE.py:NAME; repeatable"
    )
    run = commands.add_parser(
        "run",
        parents=[columns(), running, common],
        usage="%(prog)s METHOD|FILE.toml|FILE.csv [key=value ...] [options]",
        description="Train one model per client. A METHOD alone trains on rotated digits, which are built in. "
        "FILE.toml is an experiment, and FILE.csv a table of yours.",
        epilog="examples: kinfed run kin rounds=40 training.epochs=5 --out my-run; "
        "kinfed run shops.csv --client shop --target buys --out shops",
    )
    source = run.add_argument(
        "source",
        default="",
        metavar="METHOD|FILE.toml|FILE.csv",
        help="kin, mine.py:MyMethod, my-run/config.toml, shops.csv",
    )
    run.add_argument(
        "--method", metavar="NAME", default="", help="for a table (default: the one that kinfed choose finds)"
    )
    run.add_argument("--budget", metavar="ROUNDS|TIME", help="the most training that the choice of a method may take")
    add_settings(run, "settings, such as training.epochs=5 or seeds=3")
    run.add_argument(
        "--from",
        dest="former",
        action=partial(_InPlaceOf, source),
        type=Path,
        metavar="RUN",
        help="train a finished run for rounds=N more, in a new folder",
    )
    run.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/METHOD/DATASET/TIME)")
    run.add_argument(
        "--beside",
        metavar="WHICH",
        default="auto",
        help="baselines to train for a verdict: local,fedavg, local or none (default: both, if cheap)",
    )
    add_dry_run(run)
    run.add_argument("--open", action="store_true", help="end with a report page, and open it")
    run.set_defaults(command=_run)
    _add_resume(commands, running, common)


class _InPlaceOf(argparse.Action):
    """An option with which a positional argument may be left out."""

    def __init__(self, other: argparse.Action, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._other = other

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        self._other.required = False


def _add_resume(commands: Any, running: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    again = commands.add_parser(
        "resume",
        parents=[running, common],
        description="Continue an interrupted run. It ends with the same bytes as without the interruption. Executor, "
        "workers and device stay as they were, unless you name others here. The precision cannot change.",
    )
    again.add_argument("folder", type=Path, metavar="DIR", help="the run's folder")
    add_how(again)
    again.add_argument(
        "--beside",
        metavar="WHICH",
        help="also train these baselines, local or local,fedavg, and compare the run with them",
    )
    again.set_defaults(command=_resume)


def _run(args: argparse.Namespace, console: Console) -> None:
    """Run an experiment, a table of yours by the method that is named or suits it, or further what has finished."""
    args.wanted = reference_runs.parse(args.beside)
    trackers.check(args.track)
    if args.former is not None:
        return _continue(args, console)
    yours = table_options.is_table(args.source)
    raw = table_options.read(args.source, args, args.method)
    method = raw.get("method", {})
    if yours and isinstance(method, dict) and "name" not in method:
        with distributed.group():
            return _choose(raw, args, console)
    if args.budget:
        fix = "leave it out, or --method" if yours else "leave it out"
        raise UsageError(f"--budget is for finding a method on a table of yours; {fix}")
    experiment = config.resolve(raw)
    source = experiment.method_name if yours else args.source
    config.warn_of_idle(source, args.overrides, {experiment.method_name: experiment.method})
    with distributed.group():
        summary = _train(experiment, args, console, _tell(experiment, args, console) if yours else None)
    if yours and summary and not args.quiet:
        console.print(f"repeat it with: kinfed run {summary.out}/config.toml --out DIR", soft_wrap=True)


def _continue(args: argparse.Namespace, console: Console) -> None:
    other = args.source if args.source and "=" not in args.source else ""
    options = [option for option, given in (("--method", args.method), ("--budget", args.budget)) if given]
    if superfluous := [other, *options] if other else options:
        raise UsageError(f"--from goes on with the run's own method and config; leave out {superfluous[0]}, or --from")
    overrides = [args.source, *args.overrides] if args.source else args.overrides
    experiment, former = further(args.former, overrides)
    if args.dry_run:  # of the rounds that are added
        more = experiment.rounds.count - former.read_summary().rounds
        experiment = config.resolve({**experiment.table, "rounds": more})
    with distributed.group():
        _train(experiment, args, console, former=former)


def _train(
    experiment: Experiment,
    args: argparse.Namespace,
    console: Console,
    federation: Federation | None = None,
    former: RunFolder | None = None,
) -> Summary | None:
    """Launch a run, and show what it found; None in a process that does not lead, or of a dry run."""
    if args.dry_run:  # a run's seeds come one after the other
        planned = Planned(experiment.method_name, experiment, experiment.seeds)
        dry_run([planned], args, console, beside=args.wanted, federation=federation)
        return None
    with Bar(console, args.quiet or not distributed.leads(), args.verbose) as bar:
        how, beside = execution(args, bar), args.wanted
        summary = launch(experiment, args.out, how, args.data_dir, beside, bar.begin, federation, former)
    if summary:
        show(summary, args, console, hint=args.wanted == "auto")
        if args.open:
            _open(Path(summary.out), args, console)
    return summary


def _open(folder: Path, args: argparse.Namespace, console: Console) -> None:
    page = write_page([folder])
    if not args.quiet:
        console.print(f"the report is in {page}", soft_wrap=True)
    show_page(page, console)


def _tell(experiment: Experiment, args: argparse.Namespace, console: Console) -> Federation:
    """Say what was chosen for a table; data that cannot be trained on end here, before a folder is made."""

    def build() -> Federation:
        return experiment.federation(args.data_dir, experiment.seed, table_options.dataset(experiment, args))

    federation = distributed.build_once(build)
    args.frame = None  # which a process that did not build still has
    choices = from_table.choices(experiment, federation)
    if not args.quiet and distributed.leads():
        table_options.tell(choices, console)
    return federation


def _choose(raw: Table, args: argparse.Namespace, console: Console) -> None:
    stem = Path("runs") / display_name(raw["federation"]["dataset"]) / time.strftime("%Y-%m-%d-%H%M%S")
    request = Request(raw, args.out or stem, args.data_dir, args.budget, **table_options.door(args))
    if args.track:
        raise UsageError("--track goes with --method: finding a method trains many runs; track the one that it finds")
    if args.beside != "auto":
        raise UsageError("--beside goes with --method; without it Local and FedAvg are always beside the winner")
    request.check()
    federation = _tell(request.experiment("local"), args, console)
    choose_for(request, args, console, federation)
    if args.open and not args.dry_run:
        _open(request.out, args, console)


def _resume(args: argparse.Namespace, console: Console) -> None:
    wanted = reference_runs.parse(args.beside or "none")
    trackers.check(args.track)
    with distributed.group(), Bar(console, args.quiet or not distributed.leads(), args.verbose) as bar:
        summary = resume(args.folder, execution(args, bar), args.data_dir, wanted, bar.begin)
    if summary:
        show(summary, args, console)
