"""Process pool: runs one after the other, or in parallel processes; a failed run does not stop the others."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import RunError, UsageError, hear_warnings
from ..interrupts import heard, held
from ..simulation.execution import Execution
from .config import experiment as config
from .config.experiment import Experiment, Table
from .launch import check_same, once
from .run_folder import RunFolder


class Job(Protocol):
    """Work for a process of its own; it is pickled."""

    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        ...

    def work(self, execution: Execution) -> None:
        """Do it."""
        ...


@dataclass(frozen=True)
class Launch:
    """A run, as a job: an experiment by its config, as its parts may not be picklable."""

    table: Table
    folder: Path
    data_dir: Path | None = None

    def is_done(self) -> bool:
        """Whether the folder holds the finished run."""
        return RunFolder(self.folder).is_finished

    def work(self, execution: Execution) -> None:
        """Run or resume it."""
        once(config.resolve(self.table), self.folder, execution, self.data_dir)


class Outcome(NamedTuple):
    """How a run ended: its folder holds a finished run, unless there was a problem."""

    name: str
    folder: Path
    problem: Exception | None


def carry_out(
    requested: Mapping[str, tuple[Experiment, Path]],
    execution: Execution,
    jobs: int,
    on_begin: Callable[[str], None],
    data_dir: Path | None = None,
) -> Generator[Outcome]:
    """Run each experiment in its folder, or resume it, unless it is finished; yield the outcome of each as it ends.

    With `jobs` above one, that many processes share the cores, and neither plans nor progress are shown. `on_begin` is
    called with the name of each run before it begins. Closing the iterator, or Ctrl-C, interrupts the runs; they can be
    resumed. Raises UsageError, before the first run begins, for a folder that holds another experiment.
    """
    if jobs < 1:
        raise UsageError(f"jobs counts parallel runs, so it must be at least 1; got {jobs}")
    for experiment, folder in requested.values():
        check_same(experiment, folder)
    if jobs > 1:
        launches = {name: Launch(one.table, folder, data_dir) for name, (one, folder) in requested.items()}
        with closing(side_by_side(launches, execution, jobs, on_begin)) as ended:
            for name, problem in ended:
                yield Outcome(name, launches[name].folder, problem)
        return
    for name, (experiment, folder) in requested.items():
        on_begin(name)
        problem = None
        try:
            once(experiment, folder, execution, data_dir)
        except Exception as caught:
            problem = caught
        yield Outcome(name, folder, problem)


def side_by_side(
    requested: Mapping[str, Job],
    execution: Execution,
    jobs: int,
    on_begin: Callable[[str], None] = lambda name: None,
) -> Generator[tuple[str, Exception | None]]:
    """Do jobs in that many processes, which share the cores; yield each one's name as it ends, and its problem.

    Closing the iterator, or Ctrl-C, interrupts them. Progress is not shown.
    """
    # Forked from a server process that has everything imported, so that a process starts at once.
    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    context.set_forkserver_preload(["kinfed.runs.launch"])
    shown = ("progress", "planned")
    options = {field.name: getattr(execution, field.name) for field in fields(execution) if field.name not in shown}
    threads = max(1, torch.get_num_threads() // jobs)
    waiting = list(requested.items())[::-1]
    running: dict[connection.Connection, tuple[str, Any]] = {}
    try:
        while waiting or running:
            if waiting and len(running) < jobs:
                name, job = waiting.pop()
                if job.is_done():
                    yield name, None
                    continue
                on_begin(name)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(sender, job, options, threads))
                with held():  # an interrupt in between would leave a process that nobody ends
                    with _ignoring_interrupts():
                        process.start()
                    running[receiver] = name, process
                sender.close()
                continue
            for pipe in connection.wait(list(running)):
                assert isinstance(pipe, connection.Connection)
                name, process = running[pipe]
                try:
                    received = pipe.recv()
                except EOFError:
                    process.join()
                    received = RunError(
                        f"its process was killed (exit code {process.exitcode}); was there enough memory?"
                    )
                if isinstance(received, str):
                    warnings.warn(received, stacklevel=1)
                    continue
                del running[pipe]
                pipe.close()
                process.join()
                yield name, received
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def _work(pipe: connection.Connection, job: Job, options: dict[str, Any], threads: int) -> None:
    """In a process of its own: do a job, and send its warnings (text) and its end (None or an exception)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for Windows, where `_ignoring_interrupts` does nothing
    threading.Thread(target=_end_with_parent, daemon=True).start()
    hear_warnings(pipe.send)
    torch.set_num_threads(threads)
    try:
        with heard():
            job.work(Execution(**options))
            pipe.send(None)
    except KeyboardInterrupt:
        pass
    except (UsageError, RunError, OSError, MemoryError) as problem:
        pipe.send(problem)
    except Exception as problem:  # it may not be picklable
        pipe.send(RunError(f"unexpected {type(problem).__name__}: {problem}"))


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Processes started in this block ignore Ctrl-C, which goes to all of a terminal's: their parent ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
