"""From an experiment to a finished run folder, begun or resumed."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

from ..core.summary import Summary
from ..errors import DataError, RunError, UsageError
from ..interrupts import held
from ..simulation import distributed
from ..simulation.execution import Execution
from . import config, own_parts
from .config import Experiment
from .fit import fit
from .results import write_run
from .run_folder import RunFolder
from .seeds import run_seeds

OPEN = ("device", "executor", "workers", "precision")  # what decides about rounding, and may be left open


def launch(
    experiment: Experiment, out: Path | None, execution: Execution = Execution(), data_dir: Path | None = None
) -> Summary | None:
    """Run an experiment in a folder of its own and return its summary; None in a process that is not the leader.

    Without `out` the folder is runs/METHOD/DATASET/TIME. Raises UsageError if `out` already holds a run.
    A request that cannot be carried out, or data that cannot be read, leave no folder behind.
    """
    if distributed.is_on() and experiment.seeds > 1:
        raise UsageError("several processes run one seed at a time; leave seeds out, or run without torchrun")
    if out is None:
        stamp = time.strftime("%Y-%m-%d-%H%M%S")
        parent = Path("runs") / own_parts.called(experiment.method_name) / experiment.dataset_name
        out = next(p for i in range(1000) if not (p := parent / (f"{stamp}-{i}" if i else stamp)).exists())
    if RunFolder(out).is_begun:
        raise UsageError(f"{out} already holds a run; resume it: kinfed resume {out}, or choose another --out")
    folder = RunFolder(distributed.agree(out))
    new = not folder.path.exists()
    if distributed.leads():
        folder.make()
        folder.write_how(_open(execution))
        config.write(experiment.table, folder.config)  # last: a run with a config can be resumed
    try:
        return _go_on(experiment, folder, execution, data_dir)
    except (UsageError, DataError):  # such as missing data: there is nothing to resume
        begun = (folder.config.name, folder.how.name)
        whole = folder.path.rglob("*")
        if new and distributed.leads() and all(path.name in begun or path.is_dir() for path in whole):
            shutil.rmtree(folder.path)
        raise


def resume(path: Path, execution: Execution = Execution(), data_dir: Path | None = None) -> Summary | None:
    """Resume an interrupted run, or return the summary of a finished one.

    Settings that `execution` leaves open are as they were when the run began.
    """
    folder = RunFolder(path)
    if not folder.is_begun:
        raise UsageError(f"{folder} is not a run's folder: it has no config.toml")
    if distributed.agree(folder.is_finished):
        if distributed.leads():
            folder.tidy()
        return folder.read_summary()
    experiment = config.of_run(folder.config)
    try:
        return _go_on(experiment, folder, execution, data_dir)
    except (UsageError, RunError, OSError, MemoryError):
        raise
    except Exception as problem:  # a checkpoint from elsewhere can raise anything
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

    Raises UsageError if the folder holds another experiment.
    """
    check_same(experiment, path)
    folder = RunFolder(path)
    if folder.is_begun:
        resume(path, execution, data_dir)
    else:
        launch(experiment, path, execution, data_dir)
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


def _go_on(experiment: Experiment, out: RunFolder, execution: Execution, data_dir: Path | None) -> Summary | None:
    execution = _as_begun(execution, out)
    try:
        if experiment.seeds == 1:
            return _one(experiment, experiment.seed, out, execution, data_dir)
        if distributed.leads():
            out.write_how(_open(execution))
        summaries = []
        for seed in experiment.every_seed:
            folder = out.of_seed(seed)
            if folder.is_finished:
                summaries.append(folder.read_summary())
                continue
            folder.make()
            config.write({**experiment.table, "seed": seed, "seeds": 1}, folder.config)
            summary = _one(experiment, seed, folder, _as_begun(execution, folder), data_dir)
            assert summary is not None  # several processes run one seed
            summaries.append(summary)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"interrupted; resume with: kinfed resume {out}") from None
    whole = run_seeds(summaries, str(out))
    out.write_summary(whole)
    out.tidy()
    return whole


def _one(
    experiment: Experiment, seed: int, out: RunFolder, execution: Execution, data_dir: Path | None
) -> Summary | None:
    federation = experiment.federation(data_dir, seed)
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
    if not distributed.leads():
        return None
    with held():
        return write_run(run, experiment.table, out)
