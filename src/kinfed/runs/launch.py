"""From experiments to finished run folders, begun or resumed: a list of jobs, or one run with what belongs to it."""

import shlex
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..core.engine import ServerError
from ..core.summary import Summary
from ..data.federation import Federation
from ..errors import DataError, RunError, UsageError, log_failure, note_failure
from ..files import LOCK
from ..interrupts import defer_signals
from ..simulation import distributed
from ..simulation.execution import Execution
from . import baselines, further_rounds, reference_runs
from .baselines import Baseline
from .config import experiment as config, plugins
from .config.experiment import Experiment, Table
from .fit import fit
from .pool import side_by_side
from .results import identify, run_seeds, write_run
from .run import Run
from .run_folder import CANDIDATES, RunFolder
from .test_scores import NO_STANDARD, NO_VERDICT, chose_otherwise

Begin = Callable[[str], None]
OPEN = ("device", "executor", "workers", "precision")  # what decides about rounding, and may be left open


@dataclass(frozen=True)
class Job:
    """An experiment, and the folder of its run; `former` is the finished run from which it goes on."""

    name: str
    experiment: Experiment
    folder: Path
    former: RunFolder | None = None

    def __reduce__(self) -> Any:  # by its config, as an experiment's parts may not be picklable
        return _job_of, (self.name, self.experiment.table, self.folder, self.former)


def _job_of(name: str, table: Table, folder: Path, former: RunFolder | None) -> Job:
    return Job(name, config.resolve(table), folder, former)


class Outcome(NamedTuple):
    """How a job ended: its folder holds a finished run, unless there was a problem."""

    name: str
    folder: Path
    problem: Exception | None


def run_all(
    jobs: Sequence[Job],
    execution: Execution = Execution(),
    data_dir: Path | None = None,
    parallel: int = 1,
    on_begin: Begin = lambda name: None,
    federation: Federation | None = None,
) -> Generator[Outcome]:
    """Run or resume each job, unless it has finished; yield the outcome of each as it ends. A failure stops no other.

    With `parallel` above one, that many processes share the cores, and neither plans nor progress are shown.
    `on_begin` is called with the name of each job before it begins; `federation` is that of all, if it has been built.
    Closing the iterator, or Ctrl-C, interrupts the runs; they can be resumed. Raises UsageError, before the first run
    begins, for a folder that holds another experiment.
    """
    if parallel < 1:
        raise UsageError(f"jobs counts parallel runs, so it must be at least 1; got {parallel}")
    for job in jobs:
        check_same(job.experiment, job.folder)
    finished = distributed.agree({job.name for job in jobs if RunFolder(job.folder).is_finished})
    beside = {job.name: job for job in jobs if parallel > 1 and job.name not in finished}
    for job in jobs:
        if job.name in beside:
            continue
        if job.name not in finished:
            on_begin(job.name)
        problem = None
        try:
            run_job(job, execution, data_dir, federation)
        except Exception as caught:
            problem = caught
        yield Outcome(job.name, job.folder, problem)
    if beside:
        tasks = {name: partial(run_job, job, data_dir=data_dir) for name, job in beside.items()}
        with closing(side_by_side(tasks, execution, parallel, on_begin)) as ended:
            for name, problem in ended:
                yield Outcome(name, beside[name].folder, problem)


def run_job(
    job: Job, execution: Execution = Execution(), data_dir: Path | None = None, federation: Federation | None = None
) -> None:
    """Launch or resume a job's run, unless it has finished.

    Raises UsageError if the folder holds another experiment, RunError if one of its seeds has failed.
    """
    check_same(job.experiment, job.folder)
    folder = RunFolder(job.folder)
    if not distributed.agree(folder.is_begun):
        launch(job.experiment, job.folder, execution, data_dir, federation=federation, former=job.former)
    elif not distributed.agree(folder.is_finished):
        resume(job.folder, execution, data_dir, federation=federation)
    elif distributed.leads():
        folder.tidy()
    if distributed.leads() and job.experiment.seeds > 1:
        summary = folder.read_summary()
        if lost := sorted({*job.experiment.every_seed} - {*summary.seeds}):
            why = next(warning for warning in summary.warnings if warning.startswith(f"seed {lost[0]} failed"))
            raise RunError(f"{why}; delete {folder} to try again")


def check_same(experiment: Experiment, path: Path) -> None:
    """Raise UsageError if the folder holds another experiment."""
    folder = RunFolder(path)
    if folder.is_begun and config.of_run(folder.config).table != experiment.table:
        raise UsageError(f"{folder} holds another experiment than the requested one; choose another folder")


def launch(
    experiment: Experiment,
    out: Path | None,
    execution: Execution = Execution(),
    data_dir: Path | None = None,
    beside: str | Sequence[str] = (),
    on_begin: Begin = lambda name: None,
    federation: Federation | None = None,
    former: RunFolder | None = None,
) -> Summary | None:
    """Run an experiment in a folder of its own and return its summary; None in a process that is not the leader.

    Without `out` the folder is runs/METHOD/DATASET/TIME. Raises UsageError if `out` already holds a run.
    A request that cannot be carried out, or data that cannot be read, leave no folder behind.
    The runs named in `beside`, "local" and "fedavg", are trained in folders within and compared with it; "auto" trains
    both where that is cheap (`kinfed.runs.reference_runs`). `on_begin` is called with the name of each of them.
    `federation` is the experiment's, for its first seed, if it has been built. An experiment that `further` made goes
    on from the finished run in `former`.
    """
    if distributed.is_on() and experiment.seeds > 1:
        raise UsageError("several processes run one seed at a time; leave seeds out, or run without torchrun")
    folder = RunFolder(distributed.agree(out or _new_path(experiment)))
    if distributed.agree(folder.is_begun):
        raise UsageError(f"{folder} already holds a run; resume it: kinfed resume {folder}, or choose another --out")
    new = not folder.path.exists()
    if distributed.leads():
        folder.create()
    with folder.lock():
        if distributed.leads():
            folder.write_how({**_open(execution), "beside": beside})
            if former is not None:
                further_rounds.link(former, folder)
            config.write(experiment.table, folder.config)  # last: a run with a config can be resumed
        try:
            return _Run(experiment, folder, execution, data_dir, on_begin).finish(beside, federation)
        except (UsageError, DataError):  # such as missing data: there is nothing to resume
            begun = (folder.config.name, folder.how.name, folder.origin.name, LOCK)
            paths = folder.path.rglob("*")
            if new and distributed.leads() and all(path.name in begun or path.is_dir() for path in paths):
                shutil.rmtree(folder.path)
            raise


def resume(
    path: Path,
    execution: Execution = Execution(),
    data_dir: Path | None = None,
    beside: Sequence[str] = (),
    on_begin: Begin = lambda name: None,
    federation: Federation | None = None,
) -> Summary | None:
    """Resume an interrupted run, or return the summary of a finished one.

    `federation` is the experiment's, for its first seed, if it has been built.
    Settings that `execution` leaves open are as they were when the run began. With `beside` a run that was trained
    without Local or FedAvg is compared with them now.
    """
    folder = RunFolder(path)
    if not folder.is_begun:
        hint = "; a choice goes on with the command that began it" if (path / CANDIDATES).exists() else ""
        raise UsageError(f"{folder} is not a run's folder: it has no config.toml{hint}")
    if distributed.agree(folder.is_finished) and not beside:
        return _read_finished(folder, execution)
    with folder.lock():
        return _Run(config.of_run(folder.config), folder, execution, data_dir, on_begin).resume(beside, federation)


def _new_path(experiment: Experiment) -> Path:
    """Where a run goes that was given no folder."""
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    parent = Path("runs") / plugins.short_name(experiment.method_name) / experiment.dataset_name
    return next(path for i in range(1000) if not (path := parent / (f"{stamp}-{i}" if i else stamp)).exists())


def _read_finished(folder: RunFolder, execution: Execution) -> Summary | None:
    """The summary of a finished run; None in a process that is not the leader."""
    if execution.track:
        raise UsageError(f"{folder} has finished: trackers follow a run while it goes on; leave --track out")
    if not distributed.leads():
        return None
    folder.tidy()
    summary = folder.read_summary()
    experiment = config.of_run(folder.config)
    for seed in experiment.every_seed:
        single = folder if experiment.seeds == 1 else folder.of_seed(seed)
        provenance = single.read_summary().provenance if single.is_finished else None
        if provenance is None or provenance.former or not provenance.identity:  # failed, of newcomers, or of before
            continue
        table = config.resolve({**experiment.table, "seed": seed, "seeds": 1}).table
        if identify(table, seed, single) != provenance.identity:
            raise UsageError(
                f"{single} has finished with other settings than {folder.config} or {single.history.name} now has; "
                f"for a run with these: kinfed run {shlex.quote(str(folder.config))} --out NEW"
            )
    return summary


@dataclass(frozen=True)
class _Run:
    """An experiment's run in its folder, which no other program works in, with its seeds and the runs beside it."""

    experiment: Experiment
    out: RunFolder
    execution: Execution  # as requested: what it leaves open is as it was when the run began
    data_dir: Path | None
    on_begin: Begin

    def resume(self, beside: Sequence[str], federation: Federation | None) -> Summary | None:
        """Finish an interrupted run; with `beside`, compare a finished one with these."""
        if distributed.agree(self.out.is_finished):  # perhaps by the program that worked in it until now
            summary = _read_finished(self.out, self.execution)
            return self._compare(beside) if beside else summary
        names = beside or distributed.agree(self.out.read_how().get("beside", ()))
        try:
            return self.finish(names, federation)
        except Exception as problem:  # a checkpoint from elsewhere can raise anything
            understood = isinstance(problem, UsageError | RunError | OSError | MemoryError)
            if understood and not isinstance(problem, ServerError):
                raise
            kept = next(self.out.path.rglob(self.out.checkpoint.name), None)
            if kept is None:
                raise
            raise RunError(
                f"{kept} is not a checkpoint of this version of kinfed ({problem!s:.300}; --debug shows where); delete "
                "it to start over"
            ) from problem

    def finish(self, beside: str | Sequence[str], federation: Federation | None) -> Summary | None:
        """Train what is not yet trained, and write the summary with its verdict."""
        experiment, out, single = self.experiment, self.out, self.experiment.seeds == 1
        begun = {name: value for name, value in out.read_how().items() if name in OPEN}
        how = replace(self.execution, **begun | _open(self.execution))
        try:
            if federation is None and (beside == "auto" or single):
                former = further_rounds.read_former(out, experiment.seed)  # whose scale is kept
                build = partial(experiment.federation, self.data_dir, experiment.seed, former=former)
                federation = distributed.build_once(build)
            if beside == "auto" and federation is not None:
                beside = [*reference_runs.plan(experiment, federation)[0]]
            self._begin_references(beside)
            if not single:
                federation = None  # each seed has its own
                summaries, problems = self._train_seeds(how)
                return self._conclude(run_seeds(summaries, str(out)), problems + self._train_references())
            assert federation is not None
            run = fit(
                experiment.method,
                federation,
                experiment.module(federation, experiment.seed),
                rounds=experiment.rounds,
                training=experiment.training,
                participation=experiment.participation,
                seed=experiment.seed,
                execution=how,
                folder=out.path,
                attack=experiment.attack,
            )
            if distributed.leads():
                with suppress(Exception):  # here, where it can still be interrupted; `write_run` says why it failed
                    run.score_examples()
            problems = self._train_references(federation)
            if not distributed.leads():
                return None
            standard = list[Baseline]()
            if reference_runs.folders(out):
                with note_failure(problems, NO_STANDARD):
                    by = run.history.selector.score
                    standard, left_out = baselines.standard_baselines(run.federation, by, named=experiment.baselines)
                    problems += left_out
            with defer_signals():
                verdict = None
                if reference_runs.folders(out):
                    with note_failure(problems, NO_VERDICT):
                        mine = {experiment.seed: run.by_client}
                        verdict = reference_runs.judge_run(experiment, mine, {experiment.seed: standard}, out)
                return write_run(run, experiment.table, out, verdict, problems, standard=standard)
        except KeyboardInterrupt as stop:
            raise type(stop)(f"interrupted; resume with: kinfed resume {out}") from None

    def _train_seeds(self, execution: Execution) -> tuple[list[Summary], list[str]]:
        """The summaries of the seeds that ended well, and why others did not; raises the first's error if none did."""
        table, out = self.experiment.table, self.out
        out.write_how(_open(execution))
        jobs = []
        for seed in self.experiment.every_seed:
            experiment = config.resolve({**table, "seed": seed, "seeds": 1})
            jobs.append(Job(f"seed {seed}", experiment, out.of_seed(seed).path, further_rounds.former_of(out, seed)))
        summaries, failed = list[Summary](), dict[str, Exception]()
        for name, path, problem in run_all(jobs, execution, self.data_dir, on_begin=self.on_begin):
            if problem is None:
                summaries.append(RunFolder(path).read_summary())
                continue
            if isinstance(problem, UsageError | DataError) and not summaries:  # of the request, not of the seed
                raise problem
            failed[name] = problem
        if not summaries:
            raise next(iter(failed.values()))
        return summaries, [f"{name} failed: {log_failure(problem)}" for name, problem in failed.items()]

    def _begin_references(self, beside: Sequence[str]) -> None:
        """Begin the folders of the runs beside this one, so that resuming it finds which these are, and how to run."""
        if not distributed.leads():
            return
        for name, other in reference_runs.companions(self.experiment, beside).items():
            folder = self.out.reference(name)
            if not folder.is_begun:
                folder.create()
                folder.write_how(_open(self.execution))
                further_rounds.link_beside(self.out, folder, name, other)
                config.write(other.table, folder.config)

    def _train_references(self, federation: Federation | None = None) -> list[str]:
        """Train the runs beside this one that are not finished; returns what went wrong. `federation` is that of all.

        That they cannot be trained does not take this run's results away.
        """
        folders = distributed.agree(reference_runs.folders(self.out))
        jobs = [Job(name, config.of_run(folder.config), folder.path) for name, folder in folders.items()]

        def begin(name: str) -> None:
            self.on_begin(f"{name}, beside it")

        return [
            f"{name}, which was trained beside it, failed: {log_failure(problem)}"
            for name, _, problem in run_all(jobs, self.execution, self.data_dir, on_begin=begin, federation=federation)
            if problem is not None
        ]

    def _compare(self, beside: Sequence[str]) -> Summary | None:
        """Train the runs beside a finished one, and add the verdict to its summary."""
        self._begin_references(beside)
        try:
            problems = self._train_references()
        except KeyboardInterrupt as stop:
            again = f"kinfed resume {self.out} --beside {','.join(beside)}"
            raise type(stop)(f"interrupted; resume with: {again}") from None
        return self._conclude(self.out.read_summary(), problems) if distributed.leads() else None

    def _conclude(self, summary: Summary, problems: Sequence[str]) -> Summary:
        """Write a finished run's summary with its verdict."""
        out, judgement, warnings = self.out, None, [*summary.warnings, *problems]
        runs = dict(zip(summary.seeds, map(Run, out.repeats(summary)), strict=True))
        standard = self._standard_baselines(runs, warnings) if reference_runs.folders(out) else {}
        with note_failure(warnings, NO_VERDICT):
            tested = {seed: run.by_client for seed, run in runs.items()}
            judgement = reference_runs.judge_run(self.experiment, tested, standard, out)
        summaries = [run.summary for run in runs.values()]
        if judgement is not None and (chosen := chose_otherwise(summaries, summary.selection.chosen)):
            warnings.append(
                f"the verdict is on the model that each seed chose ({chosen}), the starred row on one for all"
            )
        verdict = None if judgement is None else judgement.to_dict()
        shown = baselines.rows(standard.values(), summary.metric.higher_is_better) or summary.baselines
        warnings = list(dict.fromkeys(warnings))
        summary = replace(summary, verdict=verdict, baselines=shown, warnings=warnings, out=str(out))
        out.write_summary(summary)
        out.tidy()
        return summary

    def _standard_baselines(self, runs: Mapping[int, Run], warnings: list[str]) -> dict[int, list[Baseline]]:
        """The standard models of each seed, fitted and written where that has not been done."""
        by_seed = dict[int, list[Baseline]]()
        for seed, run in runs.items():
            with note_failure(warnings, NO_STANDARD):
                if not run.folder.baselines.exists():
                    former = further_rounds.read_former(run.folder, seed)
                    federation = self.experiment.federation(self.data_dir, seed, former=former)
                    by = run.summary.selection.by
                    made, left_out = baselines.standard_baselines(federation, by, named=self.experiment.baselines)
                    warnings += left_out
                    baselines.write(run.folder, made)
                by_seed[seed] = run.standard_baselines[0]
        return by_seed


def _open(execution: Execution) -> dict[str, object]:
    """The settings that may be left open but are not."""
    return {name: value for name, value in execution.rounding_settings.items() if name in OPEN}
