"""Jobs: runs one after the other, or side by side in a process each; a failed one does not stop the others."""

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
    asked: Mapping[str, tuple[Experiment, Path]],
    execution: Execution,
    jobs: int,
    said: Callable[[str], None],
    data_dir: Path | None = None,
) -> Generator[Outcome]:
    """Run each experiment in its folder, or take it up, or leave it if it is finished; tell of each when it has ended.

    With `jobs` above one that many processes share the cores; progress is then not told. `said` hears the
    name of each run before it begins. Closing the iterator, or Ctrl-C, interrupts what is running: it can be taken up.
    Raises UsageError, before the first run begins, for a folder that holds another experiment.
    """
    if jobs < 1:
        raise UsageError(f"jobs counts runs side by side, so it must be at least 1; got {jobs}")
    for experiment, folder in asked.values():
        check_same(experiment, folder)
    if jobs > 1:
        yield from _side_by_side(asked, execution, jobs, said, data_dir)
        return
    for name, (experiment, folder) in asked.items():
        said(name)
        problem = None
        try:
            once(experiment, folder, execution, data_dir)
        except Exception as caught:
            problem = caught
        yield Outcome(name, folder, problem)


def _side_by_side(
    asked: Mapping[str, tuple[Experiment, Path]],
    execution: Execution,
    jobs: int,
    said: Callable[[str], None],
    data_dir: Path | None,
) -> Generator[Outcome]:
    # Forked from a server that has imported everything and runs nothing, so that a process begins at once.
    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    context.set_forkserver_preload(["kinfed.experiments.launch"])
    how = {field.name: getattr(execution, field.name) for field in fields(execution) if field.name != "progress"}
    threads = max(1, torch.get_num_threads() // jobs)
    waiting = list(asked.items())[::-1]
    running: dict[connection.Connection, tuple[str, Path, Any]] = {}
    try:
        while waiting or running:
            if waiting and len(running) < jobs:
                name, (experiment, folder) = waiting.pop()
                if RunFolder(folder).is_finished:
                    yield Outcome(name, folder, None)
                    continue
                said(name)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(theirs, experiment.table, folder, how, data_dir, threads))
                with held():  # or there would be a process that nobody ends
                    with _deaf():
                        process.start()
                    running[ours] = name, folder, process
                theirs.close()
                continue
            for pipe in connection.wait(list(running)):
                assert isinstance(pipe, connection.Connection)
                name, folder, process = running[pipe]
                try:
                    told = pipe.recv()
                except EOFError:
                    process.join()
                    told = RunError(f"its process was killed (exit code {process.exitcode}); was there memory enough?")
                if isinstance(told, str):
                    warnings.warn(told, stacklevel=1)
                    continue
                del running[pipe]
                pipe.close()
                process.join()
                yield Outcome(name, folder, told)
    finally:
        for _, _, process in running.values():
            process.terminate()
        for _, _, process in running.values():
            process.join()


def _work(
    pipe: connection.Connection, table: Table, folder: Path, how: dict[str, Any], data_dir: Path | None, threads: int
) -> None:
    """In a process of its own: carry out a run, and send its warnings (text) and its end (None or what went wrong)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `_deaf`, which there is not on Windows
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.showwarning = lambda message, *_, **__: pipe.send(str(message))
    torch.set_num_threads(threads)
    try:
        with heard():
            once(config.resolve(table), folder, Execution(**how), data_dir)
            pipe.send(None)
    except KeyboardInterrupt:
        pass
    except (UsageError, RunError, OSError, MemoryError) as problem:
        pipe.send(problem)
    except Exception as problem:  # which may not be one that can be sent
        pipe.send(RunError(f"unexpected {type(problem).__name__}: {problem}"))


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that begin in this block never hear Ctrl-C, which goes to all of a terminal's: who asked ends them."""
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
