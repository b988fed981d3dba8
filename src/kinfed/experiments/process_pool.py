"""Process pool: runs one after the other, or in parallel processes; a failed run does not stop the others."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import RunError, UsageError
from ..interrupts import heard, held
from ..simulation.execution import Execution
from . import config
from .config import Experiment, Table
from .launch import check_same, once
from .run_folder import RunFolder


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

    With `jobs` above one, that many processes share the cores, and progress is not shown. `on_begin` is called with
    the name of each run before it begins. Closing the iterator, or Ctrl-C, interrupts the runs; they can be resumed.
    Raises UsageError, before the first run begins, for a folder that holds another experiment.
    """
    if jobs < 1:
        raise UsageError(f"jobs counts parallel runs, so it must be at least 1; got {jobs}")
    for experiment, folder in requested.values():
        check_same(experiment, folder)
    if jobs > 1:
        yield from _side_by_side(requested, execution, jobs, on_begin, data_dir)
        return
    for name, (experiment, folder) in requested.items():
        on_begin(name)
        problem = None
        try:
            once(experiment, folder, execution, data_dir)
        except Exception as caught:
            problem = caught
        yield Outcome(name, folder, problem)


def _side_by_side(
    requested: Mapping[str, tuple[Experiment, Path]],
    execution: Execution,
    jobs: int,
    on_begin: Callable[[str], None],
    data_dir: Path | None,
) -> Generator[Outcome]:
    # Forked from a server process that has everything imported, so that a process starts at once.
    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    context.set_forkserver_preload(["kinfed.experiments.launch"])
    options = {field.name: getattr(execution, field.name) for field in fields(execution) if field.name != "progress"}
    threads = max(1, torch.get_num_threads() // jobs)
    waiting = list(requested.items())[::-1]
    running: dict[connection.Connection, tuple[str, Path, Any]] = {}
    try:
        while waiting or running:
            if waiting and len(running) < jobs:
                name, (experiment, folder) = waiting.pop()
                if RunFolder(folder).is_finished:
                    yield Outcome(name, folder, None)
                    continue
                on_begin(name)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_work, args=(sender, experiment.table, folder, options, data_dir, threads)
                )
                with held():  # an interrupt in between would leave a process that nobody ends
                    with _ignoring_interrupts():
                        process.start()
                    running[receiver] = name, folder, process
                sender.close()
                continue
            for pipe in connection.wait(list(running)):
                assert isinstance(pipe, connection.Connection)
                name, folder, process = running[pipe]
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
                yield Outcome(name, folder, received)
    finally:
        for _, _, process in running.values():
            process.terminate()
        for _, _, process in running.values():
            process.join()


def _work(
    pipe: connection.Connection,
    table: Table,
    folder: Path,
    options: dict[str, Any],
    data_dir: Path | None,
    threads: int,
) -> None:
    """In a process of its own: carry out a run, and send its warnings (text) and its end (None or an exception)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for Windows, where `_ignoring_interrupts` does nothing
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.showwarning = lambda message, *_, **__: pipe.send(str(message))
    torch.set_num_threads(threads)
    try:
        with heard():
            once(config.resolve(table), folder, Execution(**options), data_dir)
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
