"""From an experiment to a finished run folder, begun or resumed."""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..core.engine import ServerError
from ..core.summary import Summary
from ..data.federation import Federation
from ..errors import DataError, RunError, UsageError, log_failure, note_failure
from ..files import LOCK
from ..interrupts import held
from ..simulation import distributed
from ..simulation.execution import Execution
from . import continuation
from . import reference_runs as others
from .config import experiment as config
from .config import plugins
from .config.experiment import Experiment
from .fit import fit
from .repeats import run_seeds
from .results import write_run
from .run_folder import RunFolder
from .test_scores import NO_VERDICT, chose_otherwise
from .trained_run import TrainedRun

Begin = Callable[[str], None]
OPEN = ("device", "executor", "workers", "precision")  # what decides about rounding, and may be left open


def silent(name: str) -> None:
    """Say nothing when a run begins."""


def launch(
    experiment: Experiment,
    out: Path | None,
    execution: Execution = Execution(),
    data_dir: Path | None = None,
    beside: str | Sequence[str] = (),
    on_begin: Begin = silent,
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
    if out is None:
        stamp = time.strftime("%Y-%m-%d-%H%M%S")
        parent = Path("runs") / plugins.called(experiment.method_name) / experiment.dataset_name
        out = next(p for i in range(1000) if not (p := parent / (f"{stamp}-{i}" if i else stamp)).exists())
    if distributed.agree(RunFolder(out).is_begun):
        raise UsageError(f"{out} already holds a run; resume it: kinfed resume {out}, or choose another --out")
    folder = RunFolder(distributed.agree(out))
    new = not folder.path.exists()
    if distributed.leads():
        folder.make()
    with folder.alone():
        if distributed.leads():
            folder.write_how({**_open(execution), "beside": beside})
            if former is not None:
                continuation.link(former, folder)
            config.write(experiment.table, folder.config)  # last: a run with a config can be resumed
        try:
            return _go_on(experiment, folder, execution, data_dir, beside, on_begin, federation)
        except (UsageError, DataError):  # such as missing data: there is nothing to resume
            begun = (folder.config.name, folder.how.name, folder.origin.name, LOCK)
            whole = folder.path.rglob("*")
            if new and distributed.leads() and all(path.name in begun or path.is_dir() for path in whole):
                shutil.rmtree(folder.path)
            raise


def resume(
    path: Path,
    execution: Execution = Execution(),
    data_dir: Path | None = None,
    beside: Sequence[str] = (),
    on_begin: Begin = silent,
    federation: Federation | None = None,
) -> Summary | None:
    """Resume an interrupted run, or return the summary of a finished one.

    `federation` is the experiment's, for its first seed, if it has been built.
    Settings that `execution` leaves open are as they were when the run began. With `beside` a run that was trained
    without Local or FedAvg is compared with them now.
    """
    folder = RunFolder(path)
    if not folder.is_begun:
        raced = "; a choice goes on with the command that began it" * (path / "race").exists()
        raise UsageError(f"{folder} is not a run's folder: it has no config.toml{raced}")
    if distributed.agree(folder.is_finished) and not beside:
        return _read_finished(folder, execution)
    with folder.alone():
        return _resume_alone(folder, execution, data_dir, beside, on_begin, federation)


def _read_finished(folder: RunFolder, execution: Execution) -> Summary | None:
    """The summary of a finished run; None in a process that is not the leader."""
    if execution.track:
        raise UsageError(f"{folder} has finished: trackers follow a run while it goes on; leave --track out")
    if not distributed.leads():
        return None
    folder.tidy()
    return folder.read_summary()


def _resume_alone(
    folder: RunFolder,
    execution: Execution,
    data_dir: Path | None,
    beside: Sequence[str],
    on_begin: Begin,
    federation: Federation | None,
) -> Summary | None:
    """The same, of a run in whose folder no other program works."""
    experiment = config.of_run(folder.config)
    if distributed.agree(folder.is_finished):  # perhaps by the program that worked in it until now
        summary = _read_finished(folder, execution)
        return _compare(experiment, folder, execution, data_dir, beside, on_begin) if beside else summary
    asked = beside or distributed.agree(folder.read_how().get("beside", ()))
    try:
        return _go_on(experiment, folder, execution, data_dir, asked, on_begin, federation)
    except Exception as problem:  # a checkpoint from elsewhere can raise anything
        if isinstance(problem, UsageError | RunError | OSError | MemoryError) and not isinstance(problem, ServerError):
            raise
        kept = next(folder.path.rglob(folder.checkpoint.name), None)
        if kept is None:
            raise
        raise RunError(
            f"{kept} is not a checkpoint of this version of kinfed ({problem!s:.300}; --debug shows where); delete it "
            "to start over"
        ) from problem


def once(
    experiment: Experiment, path: Path, execution: Execution = Execution(), data_dir: Path | None = None
) -> RunFolder:
    """The folder of an experiment's finished run, after launching or resuming it if necessary.

    Raises UsageError if the folder holds another experiment, RunError if one of its seeds has failed.
    """
    check_same(experiment, path)
    folder = RunFolder(path)
    execution = replace(execution, keep_state=False)  # of many runs it would fill a disk
    begun = distributed.agree(folder.is_begun)
    summary = resume(path, execution, data_dir) if begun else launch(experiment, path, execution, data_dir)
    if summary is not None and (lost := sorted({*experiment.every_seed} - {*summary.seeds})):
        why = next(one for one in summary.warnings if one.startswith(f"seed {lost[0]} failed"))
        raise RunError(f"{why}; delete {folder} to try again")
    return folder


def check_same(experiment: Experiment, path: Path) -> None:
    """Raise UsageError if the folder holds another experiment."""
    folder = RunFolder(path)
    if folder.is_begun and config.of_run(folder.config).table != experiment.table:
        raise UsageError(f"{folder} holds another experiment than the requested one; choose another folder")


def _open(execution: Execution) -> dict[str, object]:
    """The settings that may be left open but are not."""
    return {name: value for name, value in execution.requested.items() if name in OPEN}


def _as_begun(execution: Execution, folder: RunFolder) -> Execution:
    """The same, with open settings as the run in this folder had them."""
    begun = {name: value for name, value in folder.read_how().items() if name in OPEN}
    return replace(execution, **begun | _open(execution))


def _go_on(
    experiment: Experiment,
    out: RunFolder,
    execution: Execution,
    data_dir: Path | None,
    beside: str | Sequence[str],
    on_begin: Begin,
    first: Federation | None = None,
) -> Summary | None:
    request, execution = execution, _as_begun(execution, out)
    try:
        if first is None and (beside == "auto" or experiment.seeds == 1):
            first = _federation(experiment, experiment.seed, out, data_dir)
        if beside == "auto" and first is not None:
            beside = others.BASES if others.is_cheap(experiment, first) else ()
        _prepare(experiment, out, request, beside)
        if experiment.seeds == 1:
            run = _one(experiment, experiment.seed, out, execution, data_dir, first)
            problems = _train_beside(out, request, data_dir, on_begin, first)
            if not distributed.leads():
                return None
            with held():
                found = None
                if others.folders(out):
                    with note_failure(problems, NO_VERDICT):
                        found = others.judged(experiment, {experiment.seed: run.by_client}, out)
                return write_run(run, experiment.table, out, found, problems)
        if distributed.leads():
            out.write_how(_open(execution))
        first = None  # each seed has its own
        summaries, problems = _seed_by_seed(experiment, out, execution, data_dir)
        problems += _train_beside(out, request, data_dir, on_begin)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"interrupted; resume with: kinfed resume {out}") from None
    whole = run_seeds(summaries, str(out))
    return _conclude(experiment, out, whole, problems)


def _seed_by_seed(
    experiment: Experiment, out: RunFolder, execution: Execution, data_dir: Path | None
) -> tuple[list[Summary], list[str]]:
    """The summaries of the seeds that ended well, and why others did not; raises the first's error if none did."""
    summaries, problems, first = list[Summary](), list[str](), None
    for seed in experiment.every_seed:
        try:
            summaries.append(_of_seed(experiment, seed, out, execution, data_dir))
        except Exception as problem:
            if isinstance(problem, UsageError | DataError) and not summaries:  # of the request, not of the seed
                raise
            first = first or problem
            problems.append(f"seed {seed} failed: {log_failure(problem)}")
    if not summaries and first is not None:
        raise first
    return summaries, problems


def _of_seed(experiment: Experiment, seed: int, out: RunFolder, execution: Execution, data_dir: Path | None) -> Summary:
    """The finished run of one seed of several."""
    folder = out.of_seed(seed)
    if folder.is_finished:
        return folder.read_summary()
    folder.make()
    continuation.link_seed(out, folder, seed)
    config.write({**experiment.table, "seed": seed, "seeds": 1}, folder.config)
    run = _one(experiment, seed, folder, _as_begun(execution, folder), data_dir)
    with held():
        return write_run(run, experiment.table, folder)


def _one(
    experiment: Experiment,
    seed: int,
    out: RunFolder,
    execution: Execution,
    data_dir: Path | None,
    federation: Federation | None = None,
) -> TrainedRun:
    federation = federation or _federation(experiment, seed, out, data_dir)
    run = fit(
        experiment.method,
        federation,
        experiment.module(federation, seed),
        rounds=experiment.rounds,
        training=experiment.training,
        participation=experiment.participation,
        seed=seed,
        execution=execution,
        folder=out.path,
        attack=experiment.attack,
    )
    if distributed.leads():
        with suppress(Exception):  # here, where it can still be interrupted; `write_run` says why it failed
            run.tested()
    return run


def _federation(experiment: Experiment, seed: int, out: RunFolder, data_dir: Path | None) -> Federation:
    """The experiment's federation, in the scale of the run that it goes on from, if there is one."""
    return experiment.federation(data_dir, seed, known=continuation.known(out, seed))


def _prepare(experiment: Experiment, out: RunFolder, execution: Execution, beside: Sequence[str]) -> None:
    """Begin the folders of the runs beside this one, so that resuming it finds which these are, and how to run them."""
    if not distributed.leads():
        return
    for name, other in others.companions(experiment, beside).items():
        folder = out.beside(name)
        if not folder.is_begun:
            folder.make()
            folder.write_how(_open(execution))
            continuation.link_beside(out, folder, name, other)
            config.write(other.table, folder.config)


def _train_beside(
    out: RunFolder, execution: Execution, data_dir: Path | None, on_begin: Begin, federation: Federation | None = None
) -> list[str]:
    """Train the runs beside this one that are not finished; returns what went wrong. `federation` is that of all.

    That they cannot be trained does not take this run's results away.
    """
    problems = list[str]()
    for name, folder in distributed.agree(others.folders(out)).items():
        on_begin(f"{name}, beside it")
        with note_failure(problems, f"{name}, which was trained beside it, failed"):
            resume(folder.path, execution, data_dir, federation=federation)
    return problems


def _compare(
    experiment: Experiment,
    out: RunFolder,
    execution: Execution,
    data_dir: Path | None,
    beside: Sequence[str],
    on_begin: Begin,
) -> Summary | None:
    """Train the runs beside a finished one, and add the verdict to its summary."""
    _prepare(experiment, out, execution, beside)
    try:
        problems = _train_beside(out, execution, data_dir, on_begin)
    except KeyboardInterrupt as stop:
        again = f"kinfed resume {out} --beside {','.join(beside)}"
        raise type(stop)(f"interrupted; resume with: {again}") from None
    if not distributed.leads():
        return None
    return _conclude(experiment, out, out.read_summary(), problems)


def _conclude(experiment: Experiment, out: RunFolder, summary: Summary, problems: Sequence[str]) -> Summary:
    """Write a finished run's summary with its verdict."""
    repeats = out.repeats_of(summary)
    found, warnings = None, [*summary.warnings, *problems]
    with note_failure(warnings, NO_VERDICT):
        found = others.judged(experiment, others.tested_by_seed(out, summary), out)
    if found is not None and (each := chose_otherwise(repeats, summary.selection.chosen)):
        warnings.append(f"the verdict is on the model that each seed chose ({each}), the starred row on one for all")
    verdict = None if found is None else found.to_dict()
    summary = replace(summary, verdict=verdict, warnings=warnings, out=str(out))
    out.write_summary(summary)
    out.tidy()
    return summary
