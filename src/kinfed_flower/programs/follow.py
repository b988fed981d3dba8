"""Starting a run and following it to its end."""

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kinfed.core.summary import Summary
from kinfed.errors import RunError
from kinfed.files import make_folder, write_json
from kinfed.interrupts import Terminated, defer_signals
from kinfed.runs.run_folder import RunFolder

from ..wire import keys
from . import ending, superlink
from .subprocesses import end, is_alive, start

Report = Callable[[str], object]
ATTEMPTS = 3  # times in a row that a run may end without a reason and without a finished round
DIED = "the process of the run has ended"


def run(home: Path, out: Path, report: Report, track: Sequence[str] = ()) -> Summary:
    """Start the run of out/config.toml, follow it to its end, and return its summary; raises RunError if it fails.

    A run that ends without a reason, because its process was killed, is resumed where it stopped. `track` names what
    follows it; one that is resumed is followed by what did before, unless others are named.
    """
    last = superlink.read_last(home)
    for line in keys.endings(Path(last.ca).parent) if last and last.ca else []:
        report(line)
    resume, left = f"resume it: kinfed flower run {out}", ATTEMPTS
    folder = RunFolder(out)
    signal.signal(signal.SIGHUP, _hang_up)  # a closed terminal stops the run as well
    while True:
        pid = ending.process(out)
        try:
            if pid:
                report("the run is in progress; following it")
            else:
                pid = _start(home, out, track)
            lines = follow(out, pid, report)
        except KeyboardInterrupt as stop:
            if pid := ending.process(out):
                end(pid)
            raise type(stop)(f"stopped; {resume}") from None
        if folder.is_finished:
            return folder.read_summary()
        outcome = ending.read(out)
        if outcome.get("ended") == "failed":
            raise RunError(f"{outcome.get('why')}; {resume}")
        left = ATTEMPTS if any(line.startswith("round ") for line in lines) else left - 1
        if outcome.get("ended") == "stopped" or not left:
            why = "it was stopped" if outcome.get("ended") == "stopped" else f"{DIED}; see {out / 'process.log'}"
            raise RunError(f"the run has ended: {why}; {resume}")
        report(f"{DIED}; another one continues after the last complete round")


def _start(home: Path, out: Path, track: Sequence[str] = ()) -> int:
    """Start the process of a run; returns its number."""
    make_folder(home / "flwr")
    with defer_signals(), (out / "process.log").open("ab") as log:  # or a run that has started could not be stopped
        path = out / ending.JOURNAL
        path.touch()
        process = start(ending.PROGRAM, str(home.resolve()), str(out.resolve()), *track, home=home / "flwr", log=log)
        write_json(out / ending.FILE, {"pid": process.pid, "begin": path.stat().st_size})
        write_json(home / superlink.LAST, {"out": str(out.resolve())})
    return process.pid


def follow(out: Path, pid: int, report: Report) -> list[str]:
    """Report the lines of a run's process until it is over; returns them all."""
    lines: list[str] = []
    with (out / ending.JOURNAL).open(encoding="utf-8") as file:
        file.seek(ending.read(out).get("begin", 0))
        rest = ""
        while True:
            alive = is_alive(pid, ending.PROGRAM)
            *complete, rest = (rest + file.read()).split("\n")
            for line in complete:
                lines.append(line)
                report(line)
            if not alive:
                return lines
            time.sleep(0.2)


def _hang_up(number: int, frame: object) -> None:
    raise Terminated
