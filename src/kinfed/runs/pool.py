"""Process pool: several tasks at a time, each in a process of its own, or in copies of this one."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from typing import Any, TypeVar

import torch

from ..errors import RunError, UsageError, hear_warnings
from ..interrupts import catch_signals, defer_signals
from ..simulation.devices import pick_device
from ..simulation.execution import Execution
from ..simulation.workers import threads

Result = TypeVar("Result")
Task = Callable[[Execution], object]  # it is pickled


def side_by_side(
    tasks: Mapping[str, Task], execution: Execution, parallel: int, on_begin: Callable[[str], None] = lambda name: None
) -> Generator[tuple[str, Exception | None]]:
    """Do tasks in that many processes, which share the cores; yield each one's name as it ends, and its problem.

    Closing the iterator, or Ctrl-C, interrupts them. Progress is not shown.
    """
    # Forked from a server process that has everything imported, so that a process starts at once.
    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    context.set_forkserver_preload(["kinfed.runs.launch"])
    shown = ("progress", "planned")
    options = {field.name: getattr(execution, field.name) for field in fields(execution) if field.name not in shown}
    cores = max(1, torch.get_num_threads() // parallel)
    waiting = list(tasks.items())[::-1]
    running: dict[connection.Connection, tuple[str, Any]] = {}
    try:
        while waiting or running:
            if waiting and len(running) < parallel:
                name, task = waiting.pop()
                on_begin(name)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(sender, task, options, cores))
                with defer_signals():  # an interrupt in between would leave a process that nobody ends
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


def can_copy(execution: Execution) -> bool:
    """Whether copies of this process can compute: on Linux without a GPU, because no copy can use a GPU of this one."""
    return sys.platform == "linux" and pick_device(execution.device).type == "cpu" and not torch.cuda.is_initialized()


def share_work(work: Callable[[int], Result], count: int, processes: int) -> dict[int, Result]:
    """What `work` returns for 0 to count - 1, done by this process and copies of it; each takes the next of them.

    A copy begins at once and has all that this process holds. It computes on one core, because the threads of OpenMP
    do not survive a copy. What a copy was doing when it was killed is missing in the result.
    """
    size, context = 4, get_context("fork")
    waiting, writer = os.pipe()  # its capacity is 64 KiB; several processes never read the same bytes
    os.write(writer, b"".join(i.to_bytes(size, "little") for i in range(count)))
    os.close(writer)

    def work_off() -> dict[int, Result]:
        results = dict[int, Result]()
        while number := os.read(waiting, size):
            i = int.from_bytes(number, "little")
            results[i] = work(i)
        return results

    def begin(sender: connection.Connection) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        sender.send(work_off())
        os._exit(0)  # with no regard to what this process would do at its end

    copies = []
    try:
        with threads(1):
            for _ in range(processes - 1):
                receiver, sender = context.Pipe(duplex=False)
                with defer_signals(), _ignoring_interrupts():
                    copies.append((context.Process(target=begin, args=(sender,)), receiver))
                    copies[-1][0].start()
                sender.close()
            results = work_off()
        for _, receiver in copies:
            with suppress(EOFError):
                results |= receiver.recv()
        return results
    finally:
        os.close(waiting)
        for process, _ in copies:
            process.kill()
            process.join()


def _work(pipe: connection.Connection, task: Task, options: dict[str, Any], cores: int) -> None:
    """In a process of its own: do a task, and send its warnings (text) and its end (None or an exception)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for Windows, where `_ignoring_interrupts` does nothing
    threading.Thread(target=_end_with_parent, daemon=True).start()
    hear_warnings(pipe.send)
    torch.set_num_threads(cores)
    try:
        with catch_signals():
            task(Execution(**options))
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
