"""Signals that end a program, SIGINT (Ctrl-C) and SIGTERM (Slurm, Docker), as exceptions that wait where they must.

Only a program hears them so, by `heard`: a library leaves signals to whoever uses it, and there `held` does nothing.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}  # a program's exit code when one of these has ended it

_held = 0  # blocks of `held` that have been entered and not left
_waiting: type[KeyboardInterrupt] | None = None  # what came in them


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def heard(answer: Callable[[int, object], None] | None = None) -> Iterator[None]:
    """In this block SIGINT raises KeyboardInterrupt and SIGTERM Terminated, unless there is another `answer`.

    What is ignored, as Ctrl-C is by a program in the background, stays so. Afterwards all is as it was. It does nothing
    in a thread other than the main one, which alone may ask for signals.
    """
    global _waiting
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in CODES}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, answer or _raise)
    try:
        yield
    finally:
        _waiting = None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def held() -> Iterator[None]:
    """What is heard in this block, such as one that writes files, is raised at its end, and a second signal at once."""
    global _held, _waiting
    _held += 1
    try:
        yield
    finally:
        _held -= 1
        if _waiting is not None and not _held:
            came, _waiting = _waiting, None
            raise came


def _raise(number: int, frame: object) -> None:
    global _waiting
    came = Terminated if number == signal.SIGTERM else KeyboardInterrupt
    if _held and _waiting is None:
        _waiting = came
        return
    _waiting = None
    raise came
