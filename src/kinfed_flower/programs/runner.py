"""The process of a run: it carries out the run of a folder, at the SuperLink.

    python -m kinfed_flower.programs.runner HOME OUT TRACKER ...

It asks the SuperLink for a run and takes that run's task itself, so that the task's token is in no other process and on
no command line. What the run's user should see, and how it ended, is in its folder, see `ending`.
"""

import fcntl
import hashlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w

from kinfed.errors import RunError, UsageError
from kinfed.interrupts import Terminated, catch_signals

from ..wire import flower_names
from ..wire.calls import Wire, url_of
from ..wire.link import Link
from ..wire.run_grid import RunGrid
from . import control, ending, server_app, superlink
from .subprocesses import secret

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
CALLS = 60.0  # seconds within which the SuperLink must answer a call


def main(home: Path, out: Path, track: Sequence[str]) -> None:
    """Carry out the run of a folder, and note how it ended; if the SuperLink gave it up meanwhile, nothing is noted."""
    os.umask(0o077)
    with (out / ending.JOURNAL).open("a", encoding="utf-8") as journal, catch_signals():

        def log(text: str) -> None:
            print(text, file=journal, flush=True)

        try:
            last = superlink.running(home)
            if last is None:
                raise RunError(f"no SuperLink of {home} is running; start it: kinfed flower up")
            flower = flower_names.load("run")
            with _grid(home, last.link, out, flower) as grid:
                server_app.carry_out(grid, out, str(Path(last.ca).parent) if last.ca else "", log, track)
            ending.note(out, ended="finished")
        except Terminated:
            ending.note(out, ended="stopped")
        except (UsageError, RunError, OSError) as problem:
            ending.note(out, ended="failed", why=str(problem))
        except BaseException as problem:
            traceback.print_exc()
            if type(problem).__name__ in ("KeyboardInterrupt", "RunNotRunningException"):
                log("the SuperLink has given the run up")  # it no longer knows the task
                return
            ending.note(out, ended="failed", why=f"unexpected {type(problem).__name__}: {problem}; please report it")


@contextmanager
def _grid(home: Path, link: Link, out: Path, flower: Any) -> Iterator[Any]:
    """The grid of a new run, which ends with this context."""
    with control.explain_failures(link), (home / "acquire.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the next task must be this run's
        with control.client(home, link, flower) as calls:
            id = calls.StartRun(flower.StartRunRequest(fab=_bundle(out, flower))).run_id
        token = _take(home, link, id, flower)
    url, wire = url_of(link.address, link.ca), Wire(link.ca, seconds=CALLS)
    certificate = Path(link.ca).read_bytes() if link.ca else None
    status, why = "failed", "the process of the run has ended"
    with flower.RuntimeHttpClient(url, interceptors=[flower.RuntimeTokenHttpInterceptor(token), wire]) as task:
        with control.explain_failures(link):
            given = task.PullTaskInput(flower.PullTaskInputRequest())
        identity = flower.TaskIdentity
        identity.task_id, identity.run_id = given.task_id, given.run.run_id
        identity.node_id = given.context.node_id
        grid = flower.HttpGrid(link.address, not link.ca, certificate, token=token)
        grid.set_run(flower.run_from_proto(given.run))
        beat = flower.HeartbeatSender(flower.make_task_heartbeat_fn_http(task))
        beat.start()
        try:
            yield RunGrid(grid, task, given.run.run_id, flower)
            status, why = "completed", ""
        except KeyboardInterrupt:
            status, why = "stopped", "stopped by its user"
            raise
        finally:
            with suppress(Exception):  # a SuperLink that is away notices by itself
                task.PushTaskOutput(flower.PushTaskOutputRequest(sub_status=status, details=why))


def _take(home: Path, link: Link, id: int, flower: Any) -> str:
    """The token of a run's task; tasks of runs that were begun before and never taken are left to end."""
    signer = flower.SuperExecAuthHttpInterceptor(master_secret=secret(home).encode(), protected_methods={ACQUIRE})
    calls = [signer, Wire(link.ca)]
    with flower.RuntimeHttpClient(url_of(link.address, link.ca), interceptors=calls) as superexec:
        for _ in range(100):
            got = superexec.AcquireTask(flower.AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
            if got.token and got.task.run_id == id:
                return str(got.token)
            time.sleep(0 if got.token else 0.1)
    raise RunError("the SuperLink does not give out the task of the run; restart it: kinfed flower down, then up")


def _bundle(out: Path, flower: Any) -> Any:
    """kinfed's app as Flower's runs name it; it holds no code."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text(tomli_w.dumps(server_app.bundle({"out": str(out)})))
        content = flower.build_fab_from_disk(Path(folder))
    return flower.Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
