"""Starting a run at the SuperLink and following it to its end."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from ..core.summary import Summary
from ..errors import RunError
from ..experiments.run_folder import RunFolder
from ..files import make_folder, replacing
from ..interrupts import held
from . import gate, keys, superlink
from .flower_logs import COMPLETED, DONE, FAILED, FINISHED, KINFED, STOPPED, without_colours
from .subprocesses import environment, flwr, interrupt, secret

Report = Callable[[str], object]
RUN = ".run"  # in a run's folder: the number that Flower gave it
ATTEMPTS = 3  # times in a row that a run may end without a reason and without a finished round


def run(home: Path, out: Path, report: Report) -> Summary:
    """Start the run of out/config.toml, follow it to its end, and return its summary; raises RunError if it fails.

    A run that ends without a reason, because its process was killed, is resumed where it stopped.
    """
    last = superlink.started(home)
    ca = last.ca if last else ""
    app = home / "app"
    make_folder(app)
    settings = {"out": str(out), "keys": str(Path(ca).parent) if ca else ""}
    with replacing(app / "pyproject.toml") as part:
        part.write_text(tomli_w.dumps(gate.bundle(settings)))
    for line in keys.endings(Path(ca).parent) if ca else []:
        report(line)
    resume, left = f"resume it: kinfed flower run --resume {out}", ATTEMPTS
    folder = RunFolder(out)
    finished = folder.is_finished
    signal.signal(signal.SIGHUP, interrupt)  # a closed terminal stops the run as well
    while True:
        lines, status = _run_once(home, out, report, resume)
        last_line = lines[-1] if lines else ""
        if last_line.startswith(DONE) and status["status"] == COMPLETED:
            return Summary.from_json(last_line.removeprefix(DONE), "the last line of the run")
        if last_line.startswith(FAILED):
            raise RunError(f"{last_line.removeprefix(FAILED)}; {resume}")
        if not finished and folder.is_finished:  # its process ended after it had written its summary
            return folder.read_summary()
        left = ATTEMPTS if any(line.startswith("round ") for line in lines) else left - 1
        why = f"{status['status']}, {status.get('status-details')}"
        if status["status"] == STOPPED or not left:
            raise RunError(f"the run has ended ({why}); see {home / 'superlink.log'}; {resume}")
        report(f"the run's process has ended ({why}); restarting after the last complete round")


def _run_once(home: Path, out: Path, report: Report, resume: str) -> tuple[list[str], dict[str, Any]]:
    """Start the run, or find it in progress, and follow it; returns its lines and what Flower says of its end."""
    id = ""
    try:
        id = _in_progress(home, out)
        if id:
            report("the run is in progress; following it")
        else:
            with held():  # or a run that has started could not be stopped
                id = str(flwr(home, "run", str(home / "app"), "kinfed", "--format", "json")["run-id"])
                with replacing(out / RUN) as part:
                    part.write_text(id)
        lines = follow(home, id, report)
        return lines, _status(home, id)
    except KeyboardInterrupt as stop:
        if id:
            flwr(home, "stop", id, "kinfed", "--format", "json")
        raise type(stop)(f"stopped; {resume}") from None
    except RunError as problem:
        raise RunError(f"{problem}; {resume}") from None


def follow(home: Path, id: str, report: Report) -> list[str]:
    """Report the lines of a run until it is over; returns them all."""
    lines: list[str] = []
    while True:
        stream = subprocess.Popen(
            gate.command("flwr", "log", id, "kinfed", "--stream"),
            env=environment(home / "flwr", secret(home)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert stream.stdout is not None
        seen = 0
        try:
            for line in stream.stdout:
                line = without_colours(line).strip()
                if not line.startswith(KINFED):
                    continue
                line, seen = line.removeprefix(KINFED), seen + 1
                if seen > len(lines):  # a new stream repeats the lines of the last one
                    lines.append(line)
                    if not line.startswith((DONE, FAILED)):
                        report(line)
        finally:
            stream.terminate()
            stream.wait()
        if _status(home, id)["status"].startswith(FINISHED):
            return lines
        time.sleep(1)  # the SuperLink was away


def _in_progress(home: Path, out: Path) -> str:
    """The number of a run that still works in a folder although nobody follows it; empty if there is none."""
    try:
        id = (out / RUN).read_text()
        (row,) = flwr(home, "list", "kinfed", "--run-id", id, "--format", "json")["runs"]
    except (OSError, RunError, ValueError):
        return ""
    return "" if row["status"].startswith(FINISHED) else id


def _status(home: Path, id: str) -> dict[str, Any]:
    """What Flower says of a run; raises RunError if the SuperLink does not answer for a minute."""
    for attempt in range(60):
        try:
            (row,) = flwr(home, "list", "kinfed", "--run-id", id, "--format", "json")["runs"]
            return row  # type: ignore[no-any-return]
        except RunError:
            if attempt == 59:
                raise
            time.sleep(1)
    raise AssertionError
