"""Where the program begins: signals first, then the command, whose imports take a second."""

import gc
import os
import signal

from ..interrupts import CODES, catch_signals


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0, 1 if a run failed, 2 if the request was wrong, 130 if interrupted (Ctrl-C), 143 if terminated (SIGTERM).
    """
    if arguments is None and "OMP_WAIT_POLICY" not in os.environ:
        # Read when PyTorch is imported. By default a thread that waits for others keeps its core busy for milliseconds;
        # beside other programs that made a run of small steps ten times as long.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        # Most objects of a short run are of imported modules and stay: looking through them for cycles took a tenth.
        gc.set_threshold(50_000, 20, 20)
    with catch_signals(_leave):
        from .program import execute

        code = execute(arguments)
    if arguments is None:  # a program, whose last moments are nothing to interrupt
        for number in CODES:
            signal.signal(number, signal.SIG_IGN)
    return code


def _leave(number: int, frame: object) -> None:
    """End at once: no command has begun, and in modules that are just being imported an exception might get lost."""
    os.write(2, b"kinfed: interrupted\n")  # print may be at work just now, and is not to be entered twice
    os._exit(CODES[signal.Signals(number)])
