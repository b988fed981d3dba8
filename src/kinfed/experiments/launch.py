"""From an experiment to a finished run folder, begun or resumed."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core import checkpoint
from ..core.checkpoint import HOW
from ..core.history import History
from ..datasets import called
from ..errors import DataError, RunError, UsageError
from ..files import make_folder
from ..interrupts import held
from ..simulation import distributed
from . import config, own_parts
from .config import Experiment
from .fit import CHECKPOINT, fit
from .run_folder import check_same, read_summary, tidy, write_json, write_run
from .seeds import run_seeds

Progress = Callable[[History, int], None]
OPEN = ("device", "executor", "workers", "precision")  # what decides about rounding, and may be left open


@dataclass(frozen=True)
class Machine:
    """Where and how to run: nothing here changes a result, but for rounding."""

    data_dir: Path | None = None
    device: str = "auto"
    executor: str = "auto"
    workers: int | None = None  # cores to use: loop trains a client on each; None: all
    precision: str | None = None  # of local training: float32, tf32 or bf16; None: as before, or float32
    checkpoint_seconds: float = 10.0
    progress: Progress = lambda history, rounds: None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers counts threads, so it must be at least 1; got {self.workers}")
        if not self.checkpoint_seconds >= 0:
            raise UsageError(
                f"checkpoint is a time in seconds, so it must be zero or more; got {self.checkpoint_seconds}"
            )

    @property
    def asked(self) -> dict[str, Any]:
        """What is not left open of what decides about rounding."""
        given = {name: getattr(self, name) for name in OPEN}
        return {name: value for name, value in given.items() if value not in (None, "auto")}

    def as_begun(self, folder: Path) -> "Machine":
        """The same, and what it leaves open as the run in this folder has had it."""
        begun = checkpoint.recall(folder)
        return replace(self, **{name: begun[name] for name in OPEN if name in begun} | self.asked)


def launch(experiment: Experiment, out: Path | None, machine: Machine) -> dict[str, Any]:
    """Run an experiment in a folder of its own and return its summary.

    Without `out` the folder is runs/METHOD/DATASET/TIME. Raises UsageError if `out` holds a run already.
    A request that cannot be carried out leaves no folder, nor do data that cannot be read.
    """
    table = experiment.table
    if distributed.is_on() and table["seeds"] > 1:
        raise UsageError("several processes run one seed at a time; leave seeds out, or run without torchrun")
    if out is None:
        stamp = time.strftime("%Y-%m-%d-%H%M%S")
        parent = Path("runs") / own_parts.called(table["method"]["name"]) / called(table["federation"]["dataset"])
        out = next(p for i in range(1000) if not (p := parent / (f"{stamp}-{i}" if i else stamp)).exists())
    if (out / "config.toml").exists():
        raise UsageError(f"{out} holds a run already; go on with it: kinfed resume {out}, or choose another --out")
    out = distributed.agree(out)
    new = not out.exists()
    if distributed.leads():
        make_folder(out)
        checkpoint.remember(machine.asked, out)
        config.write(table, out / "config.toml")  # last: with it there is something to go on with
    try:
        return _go_on(experiment, out, machine)
    except (UsageError, DataError):  # such as data that is not there: what was begun with it is not worth going on with
        begun = ("config.toml", HOW)
        if new and distributed.leads() and all(path.name in begun or path.is_dir() for path in out.rglob("*")):
            shutil.rmtree(out)
        raise


def resume(folder: Path, machine: Machine) -> dict[str, Any]:
    """Go on with an interrupted run, or return the summary of a finished one.

    What `machine` leaves open is as it was when the run began.
    """
    path = folder / "config.toml"
    if not path.exists():
        raise UsageError(f"{folder} is not a run's folder: it has no config.toml")
    if distributed.agree((folder / "summary.json").exists()):
        if distributed.leads():
            tidy(folder)
        return read_summary(folder)
    experiment = config.resolve(config.read(str(path), []))
    try:
        return _go_on(experiment, folder, machine)
    except (UsageError, RunError, OSError, MemoryError):
        raise
    except Exception as problem:  # whatever a checkpoint from elsewhere can end in
        kept = next(folder.rglob(CHECKPOINT), None)
        if kept is None:
            raise
        raise RunError(
            f"{kept} is not what this kinfed writes ({problem!s:.300}; --debug shows where); delete it to start over"
        ) from problem


def once(experiment: Experiment, folder: Path, machine: Machine) -> Path:
    """The folder of an experiment's finished run: launched, taken up, or left as it is.

    Raises UsageError if the folder holds another experiment.
    """
    check_same(experiment, folder)
    if (folder / "config.toml").exists():
        resume(folder, machine)
    else:
        launch(experiment, folder, machine)
    return folder


def _go_on(experiment: Experiment, out: Path, machine: Machine) -> dict[str, Any]:
    table, machine = experiment.table, machine.as_begun(out)
    try:
        if table["seeds"] == 1:
            return _one(experiment, table["seed"], out, machine)
        if distributed.leads():
            checkpoint.remember(machine.asked, out)
        found = []
        for seed in range(table["seed"], table["seed"] + table["seeds"]):
            folder = out / f"seed-{seed}"
            if (folder / "summary.json").exists():
                found.append(read_summary(folder))
                continue
            make_folder(folder)
            config.write({**table, "seed": seed, "seeds": 1}, folder / "config.toml")
            found.append(_one(experiment, seed, folder, machine.as_begun(folder)))
    except KeyboardInterrupt as stop:
        raise type(stop)(f"interrupted; go on with: kinfed resume {out}") from None
    summary = run_seeds(found, out)
    write_json(summary, out / "summary.json")
    tidy(out)
    return summary


def _one(experiment: Experiment, seed: int, out: Path, machine: Machine) -> dict[str, Any]:
    table = experiment.table
    federation = experiment.federation(machine.data_dir, seed)
    run = fit(
        experiment.method,
        federation,
        experiment.module(federation, seed),
        rounds=table["rounds"],
        training=experiment.training,
        participation=experiment.participation,
        seed=seed,
        evaluate_every=table["evaluate_every"],
        executor=machine.executor,
        workers=machine.workers,
        precision=machine.precision,
        device=machine.device,
        folder=out,
        checkpoint_seconds=machine.checkpoint_seconds,
        progress=machine.progress,
        attack=experiment.attack,
        select_by=table.get("select_by", ""),
    )
    if not distributed.leads():
        return {}
    with held():
        return write_run(run, table, out)
