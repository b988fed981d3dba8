"""Signals that end a program, SIGINT (Ctrl-C) and SIGTERM (Slurm, Docker), as exceptions that wait where they must.

Only a program handles them, by `heard`: a library leaves signals to its user, and there `held` has no effect.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}  # a program's exit code when one of these has ended it

_held = 0  # `held` blocks that are active
_waiting: type[KeyboardInterrupt] | None = None  # the signal that arrived in them


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


@contextmanager
def catch_signals(answer: Callable[[int, object], None] | None = None) -> Iterator[None]:
    """In this block SIGINT raises KeyboardInterrupt and SIGTERM Terminated, unless there is another `answer`.

    Ignored signals, such as Ctrl-C in a background program, stay ignored. Afterwards all handlers are restored. It has
    no effect outside the main thread, which alone may handle signals.
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
def defer_signals() -> Iterator[None]:
    """A signal in this block, such as one that writes files, is raised at its end; a second one at once."""
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
