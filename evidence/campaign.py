"""The campaign fills published tables, in order of worth, beside other work: python evidence/campaign.py COMMAND

run       do what is left of the queue, at the lowest priority, on one core; stop it at any moment and by any means, and
          the same command goes on where it was
status    what is done, what is next, how long the rest takes, and what cannot be run
publish   the tables of finished runs into docs/papers/*-tables.md, between marks, and their scores beside, in tables/;
          numbers there whose runs are lost stay, beside new ones if the settings that the page tells are the same;
          then the pages that follow from these tables, as leaderboard.py and coverage.py do
check     name the numbers in those pages' sentences that no command has printed

The queue is campaign.toml: entries in order of worth, each of which asks for methods and columns of a table, a number
of seeds, and perhaps a scale and a precision; or for a program that goes on by itself with what it has left. Runs lie
in KEEP/PART/runs/COLUMN/METHOD/seed-SEED, where `kinfed papers run --out KEEP/PART` puts them too; one is done if it is
there, or if its numbers are on a page: what another machine has published is not run again. A run that failed has a
file failed.txt, which says why; delete it to try again. A run whose checkpoint is broken, or of another version of
kinfed, begins again. The models of a finished run are deleted: tables need its scores only.
"""

import argparse
import fcntl
import os
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import campaign_pages
import coverage
import leaderboard
import torch
from safetensors import safe_open

from kinfed import Execution, RunError, UsageError
from kinfed.core.checkpoint import FOREIGN, ForeignError
from kinfed.errors import explain
from kinfed.files import make_folder, replacing
from kinfed.interrupts import Terminated, catch_signals
from kinfed.runs.config.experiment import Experiment
from kinfed.runs.launch import Job, check_same, run_job
from kinfed.runs.pool import side_by_side
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.devices import pick_device
from kinfed.simulation.precision import PRECISIONS, check as check_precision
from kinfed_papers import published_table, twins
from kinfed_papers.environment import remember
from kinfed_papers.reproduction import Reproduction

HERE = Path(__file__).parent
HOUR = 3600.0  # a unit of work: then the queue is read again
NEEDED = ("part", "method", "column", "seeds")
KINDS = {"part": str, "method": str, "column": str, "seeds": int, "scale": float, "precision": str}


@dataclass(frozen=True)
class Entry:
    """What the queue asks for of a table."""

    part: str  # a table's name, perhaps with one of its own after "-"
    method: str  # names, separated by spaces
    column: str
    seeds: int
    scale: float = 1.0
    precision: str | None = None

    def make_reproduction(self, keep, data, methods=(), columns=()):
        table = published_table.load(self.part.partition("-")[0])
        return Reproduction(table, keep / self.part, data, methods, columns, self.seeds, self.scale)


@dataclass(frozen=True, eq=False)
class Work:
    """A run of the queue."""

    entry: Entry
    name: str
    experiment: Experiment
    folder: RunFolder
    column: str  # the first of those that read this run
    method: str
    published: bool  # its numbers are on a page, whether or not its folder is still there

    @property
    def failure(self):
        """Why it failed, if it did."""
        path = self.folder.path / "failed.txt"
        return (path.read_text().strip() or "nobody knows why") if path.exists() else ""

    @property
    def stale(self):
        """Why its folder cannot be its own, if it holds another experiment."""
        try:
            check_same(self.experiment, self.folder.path)
        except UsageError as problem:
            return explain(problem)[1]
        return ""

    @property
    def state(self):
        if self.failure:  # perhaps before its config was written
            return "failed"
        if not self.folder.is_begun:
            return "published" if self.published else "waiting"
        if self.stale:
            return "stale"
        return "done" if self.folder.is_finished else "begun"

    @property
    def rounds(self):
        return self.experiment.rounds.count

    def progress(self):
        """Rounds done, and the seconds they took."""
        if self.folder.is_finished:
            return self.rounds, self.folder.read_summary().cost.seconds
        try:
            with safe_open(self.folder.checkpoint, "np") as file:
                return int(file.metadata()["done"]), float(file.metadata()["seconds"])
        except FOREIGN:  # there is none, or it is of another version, and the run will begin again
            return 0, 0.0

    def set_aside(self):
        """Rename the folder if it holds another experiment, as after a change of the table's settings."""
        if self.stale:
            path = self.folder.path
            aside = next(to for n in range(1000) if not (to := path.with_name(f"{path.name}.aside-{n}")).exists())
            path.rename(aside)
            say(f"aside   {self.name}: its folder held another experiment, and is now {aside.name}")

    def tidy(self):
        """Remove the models of a finished run, which are there if the campaign was killed before it could."""
        if self.folder.is_finished:
            self.folder.models.unlink(missing_ok=True)

    def job(self, data):
        return Unit(Job(self.name, self.experiment, self.folder.path), data, self.entry.precision)


@dataclass(frozen=True)
class Unit:
    """A run as a task for a process of its own."""

    job: Job
    data: Path | None
    precision: str | None = None

    def __call__(self, execution):
        how = replace(execution, precision=self.precision, keep_state=False)
        folder = RunFolder(self.job.folder)
        with hold_folder(folder.path):  # a process of a campaign that was killed may still be saving
            try:
                run_job(self.job, how, self.data)
            except ForeignError:
                say(f"anew    {folder}: its checkpoint is broken, or of another version of kinfed, and is deleted")
                folder.checkpoint.unlink(missing_ok=True)
                run_job(self.job, how, self.data)
        folder.models.unlink(missing_ok=True)


@dataclass(frozen=True)
class Program:
    """A program beside this file as a task: `name` is its file and its options."""

    name: str

    def job(self, data):
        return self

    def __call__(self, execution):
        command = [sys.executable, HERE / self.name.split()[0], *self.name.split()[1:]]
        with subprocess.Popen(command, start_new_session=True) as begun:
            try:
                code = begun.wait()
            except KeyboardInterrupt:
                os.killpg(begun.pid, signal.SIGTERM)  # with the processes that it has started
                raise
        if code:
            raise RunError(f"it ended with exit code {code}")


def read_queue(path):
    """The entries of a queue; raises UsageError that names the one that is wrong."""
    try:
        raw = [dict(table) for table in tomllib.loads(path.read_text())["queue"]]
    except (OSError, KeyError, TypeError, ValueError) as problem:
        raise UsageError(f"{path} is not a queue, which has entries [[queue]]: {problem!r}") from None
    entries = []
    for place, table in enumerate(raw, 1):
        where = f"{path}, entry {place}"
        if set(table) == {"program"}:
            entries.append(Program(table["program"]))
            continue
        if unknown := set(table) - set(KINDS):
            raise UsageError(f"{where}: unknown key '{min(unknown)}'; known: {', '.join(KINDS)}, or program alone")
        for key, kind in KINDS.items():
            if not isinstance(table.get(key), kind) and (key in table or key in NEEDED):
                raise UsageError(f"{where}: {key} must be of kind {kind.__name__}; got {table.get(key)!r}")
        if table.get("precision") not in (None, *PRECISIONS):
            allowed = ", ".join(PRECISIONS)
            raise UsageError(f"{where}: precision must be one of {allowed}; got {table['precision']!r}")
        entry = Entry(**table)
        entries.append(entry)
        first = next(other for other in entries if isinstance(other, Entry) and other.part == entry.part)
        if (first.scale, first.precision) != (entry.scale, entry.precision):
            raise UsageError(f"{where}: {first.part} has another scale or precision above; name this part otherwise")
    return entries


def expand(entries, args, share=False):
    """The runs and programs of a queue, in its order, and in sentences what cannot be run on this device.

    With `share` equal runs of several tables are run once, and the others read it.
    """
    keep, data = args.keep, args.data_dir
    units, problems = {}, []

    def possible(entry, **named):
        try:
            return entry.make_reproduction(keep, data, **named)
        except UsageError as problem:
            problems.append(f"{entry.part}: {explain(problem)[1]}")

    for entry in entries:
        if isinstance(entry, Program):
            units[entry] = entry
            continue
        if entry.precision is not None:
            try:
                check_precision(entry.precision, torch.device(args.device), torch.float32)
            except UsageError as problem:
                problems.append(f"{entry.part}: {explain(problem)[1]}")
                continue
        columns = [name for name in entry.column.split() if possible(entry, columns=[name])]
        methods = entry.method.split() if columns else []
        methods = [name for name in methods if possible(entry, columns=columns, methods=[name])]
        if methods and (made := possible(entry, columns=columns, methods=methods)):
            if share:
                made.share(entry.precision)
            published_by_cell = campaign_pages.published_seeds(args.results / "tables" / entry.part, entry.scale)
            for name, experiment, path in ((job.name, job.experiment, job.folder) for job in made.runs()):
                cell, _, seed = name.rpartition(", seed ")
                method, _, column = cell.partition(" on ")
                published = int(seed) in published_by_cell.get((column, method), ())
                work = Work(entry, f"{entry.part}: {name}", experiment, RunFolder(path), column, method, published)
                units.setdefault(work.name, work)
    return list(units.values()), list(dict.fromkeys(problems))


@contextmanager
def hold_folder(folder, wait=True):
    """Hold a folder, when no other process does; raises BlockingIOError if one does and we do not wait.

    The system lets go of it when a process ends, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(held)


def say(text):
    print(f"{time.strftime('%d %b %H:%M:%S')}  {text}", flush=True)


def run(args):
    """Do what is left, unit by unit, until nothing is or the time is over; whether no run has failed.

    Raises UsageError, before anything begins, for a device that is not here, or no jobs.
    """
    pick_device(args.device)  # else every run of the queue would fail by it
    if args.jobs < 1:
        raise UsageError(f"--jobs counts runs side by side, so it must be at least 1; got {args.jobs}")
    os.nice(19)
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    ended, works = {}, []  # programs, and whether they ended well; what was last asked for
    while (left := until - time.monotonic()) > 0:
        works, problems = expand(read_queue(args.queue), args, share=True)
        for work in works:
            if isinstance(work, Work):
                work.set_aside()
                work.tidy()
        waiting = [
            work
            for work in works
            if (work.name not in ended if isinstance(work, Program) else work.state in ("waiting", "begun"))
        ]
        if not waiting:
            say("nothing is left" + (f" but what cannot be run: {'; '.join(problems)}" if problems else ""))
            break
        unit(first_of_equal(waiting), args, min(HOUR, left), ended)
    else:
        say("the time is over; the same command goes on")
    return all(ended.values()) and not any(isinstance(work, Work) and work.failure for work in works)


def first_of_equal(works):
    """The works, of runs of one experiment only the first: when it has ended, the others will read it."""
    seen = {}
    for work in works:
        is_run = isinstance(work, Work)
        seen.setdefault((twins.identity(work.experiment.table), work.entry.precision) if is_run else work.name, work)
    return [*seen.values()]


def unit(waiting, args, seconds, ended):
    """Work one after the other, or --jobs side by side, until the time is over; what has begun by then is saved."""
    jobs, begun, over = {work.name: work.job(args.data_dir) for work in waiting}, {}, False
    parts = {work.name: work.entry.part for work in waiting if isinstance(work, Work)}

    def alarm(number, frame):
        nonlocal over
        over = True
        signal.raise_signal(signal.SIGTERM)  # which waits where it must

    def begin(name):
        begun[name] = time.monotonic()
        say(f"begun   {name}")

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        with catch_signals():
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
            execution = Execution(device=args.device, workers=1)
            with closing(side_by_side(jobs, execution, args.jobs, begin)) as results:
                for name, problem in results:
                    took = time.monotonic() - begun.get(name, time.monotonic())
                    say(f"done    {name}, {took:.0f} s" if problem is None else f"failed  {name}: {one_line(problem)}")
                    if isinstance(jobs[name], Program):
                        ended[name] = problem is None
                    elif problem is None:
                        remember(args.keep / parts[name])
                    else:
                        make_folder(place := jobs[name].job.folder)
                        with replacing(place / "failed.txt") as part:
                            part.write_text(one_line(problem) + "\n")
    except Terminated:
        if not over:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def one_line(problem):
    return explain(problem)[1].replace("\n", " ")


def pace(runs):
    """Seconds a round, measured: medians by part, column and method, by part and column, and by part."""
    seen = defaultdict(list)
    for one_run in runs:
        done, seconds = one_run.progress()
        for key in like(one_run) if done else ():
            seen[key].append(seconds / done)
    return {key: statistics.median(values) for key, values in seen.items()}


def like(one_run):
    """What its pace is read from, the nearest first."""
    return [
        (one_run.entry.part, one_run.column, one_run.method),
        (one_run.entry.part, one_run.column),
        (one_run.entry.part,),
    ]


def rest(one_run, paces):
    """Seconds that a run still takes; None if nothing like it has been measured."""
    measured = [paces[key] for key in like(one_run) if key in paces]
    return (one_run.rounds - one_run.progress()[0]) * measured[0] if measured else None


def duration(seconds):
    minutes = round(seconds / 60)
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def status(args):
    """Print what is done, what is next, how long the rest takes, and what cannot be run."""
    works, problems = expand(read_queue(args.queue), args)
    runs = {work: work.state for work in works if isinstance(work, Work)}
    paces = pace([one_run for one_run, state in runs.items() if state in ("begun", "done")])
    for part in [*dict.fromkeys(one_run.entry.part for one_run in runs), ""]:
        mine = {one_run: state for one_run, state in runs.items() if part in ("", one_run.entry.part)}
        count = Counter(mine.values())
        parts = [f"{count['done'] + count['published']} of {len(mine)} runs done"]
        if count["published"]:
            parts.append(f"{count['published']} of them published and no longer here")
        parts += [f"{count[name]} {name}" for name in ("begun", "failed", "stale") if count[name]]
        left = [rest(one_run, paces) for one_run, state in mine.items() if state in ("begun", "waiting")]
        durations = [seconds for seconds in left if seconds is not None]
        more = len(left) - len(durations)  # no run like them has been measured
        without = f", without {more} whose time is not known yet" if more else ""
        parts += [f"{duration(sum(durations))} left{without}"] if durations else []
        parts += [f"the time of {more} is not known yet"] if more and not durations else []
        print(f"{part or 'in all'}: {', '.join(parts)}")
    for one_run in [waiting for waiting, state in runs.items() if state in ("begun", "waiting")][: args.next]:
        print(f"next: {one_run.name}: {one_run.progress()[0]} of {one_run.rounds} rounds")
    for one_run, state in runs.items():
        if state in ("failed", "stale"):
            print(f"{state}: {one_run.name}: {one_run.failure or one_run.stale}")
    for line in [f"program: {work.name}" for work in works if isinstance(work, Program)] + problems:
        print(line if line.startswith("program") else f"cannot be run: {line}")


def publish(args):
    """Write the tables of finished runs into pages, and their scores beside."""
    works, _ = expand(read_queue(args.queue), args)
    problems = []
    runs = [work for work in works if isinstance(work, Work)]
    for part in dict.fromkeys(one_run.entry.part for one_run in runs):
        try:
            outcome = campaign_pages.publish(part, [one_run for one_run in runs if one_run.entry.part == part], args)
            print(f"{part}: {outcome}")
        except UsageError as problem:
            problems.append(f"{part}: {explain(problem)[1]}")
    if args.results == campaign_pages.RESULTS:
        leaderboard.main()
        coverage.write(coverage.read_at_hand())
    if problems:
        sys.exit("\n".join(problems))


def check(args):
    """Name the numbers in sentences that no command has printed."""
    unprinted = [
        line for page in campaign_pages.result_pages(args.results) for line in campaign_pages.find_unprinted(page)
    ]
    if unprinted:
        sys.exit("\n".join([*unprinted, f"{len(unprinted)} numbers in sentences that no command has printed"]))


def main(arguments=None):
    commands = {"run": run, "status": status, "publish": publish, "check": check}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    parser.add_argument("--queue", type=Path, default=HERE / "campaign.toml", metavar="FILE")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "campaign", metavar="DIR", help="the runs' folder")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("KINFED_DATA"), metavar="DIR")
    parser.add_argument("--minutes", type=float, metavar="M", help="run: stop after this time (default: never)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="run: side by side, as on a GPU (default: 1)")
    parser.add_argument("--device", default="cpu", help="where runs train: cpu or cuda (default: cpu)")
    parser.add_argument("--next", type=int, default=3, metavar="N", help="status: how many of the next to name")
    parser.add_argument(
        "--results", type=Path, default=campaign_pages.RESULTS, metavar="DIR", help="publish, check: the pages' folder"
    )
    args = parser.parse_args(arguments)
    try:
        if args.command != "run":
            return commands[args.command](args)
        with hold_folder(args.keep, wait=False):
            well = run(args)
    except BlockingIOError:
        sys.exit(f"a campaign is already running in {args.keep}; stop it first, or name another folder: --keep")
    except (UsageError, RunError) as problem:
        sys.exit(explain(problem)[1])
    if not well:
        sys.exit("something has failed, see above; `status` names the runs and says why")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
