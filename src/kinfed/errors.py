"""Errors of two kinds: the request was wrong, or the run could not continue."""

import difflib
import logging
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from .interrupts import CODES, Terminated

FEW = 30  # names that an error may list
SHOWN = 8  # of them in a sentence
NO_GPU_MEMORY = "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory"
NO_MEMORY = "DefaultCPUAllocator: "  # how PyTorch begins to say it of the machine's own
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # and what turns text around
LONG = 80  # an error repeats a word of up to this many letters without a space or slash


class Fault(StrEnum):
    """What is wrong with a file of examples, in words that hold nothing of what is in it."""

    GONE = "it is not there"
    CHANGED = "it changed while it was read"
    REPLACED = "its examples are not those with which it joined"
    UNREADABLE = "it cannot be read as a table"
    EMPTY = "it has no rows"
    COLUMNS = "a column is missing or duplicated"
    WITHHELD = "the server asked for a column that stays at the site"
    KIND = "a column holds something other than numbers, text or dates"
    INPUTS = "no column is left for the inputs"
    TARGET = "its target has no value in any row, or a different one in nearly every row"
    FEW = "it has too few examples for training, validation and test"
    MISSING = "a value is missing"
    NUMBER = "a cell is not a number"
    COUNT = "a cell is not a count"
    WEIGHT = "a cell is not a weight"
    DATE = "a cell is not a date or time"
    WRITTEN = "it is not clear how a column's numbers or dates are written"
    CLOCKS = "some times name a time zone and others do not"
    TWICE = "two readings have the same time"


class _OneLine(Exception):
    """An error whose message is one line, whatever it quotes."""

    def __init__(self, message: object = "") -> None:
        super().__init__(" ".join(line.strip() for line in str(message).splitlines()))

    def __str__(self) -> str:
        return printable(short(super().__str__()))


class UsageError(_OneLine, ValueError):
    """The request cannot be carried out as written; the message says what to change. Exit code 2.

    Where a file of examples is at fault, `fault` says so to those who may not see what is in it.
    """

    def __init__(self, message: object = "", fault: Fault | None = None) -> None:
        super().__init__(message)
        self.fault = fault


class RunError(_OneLine, RuntimeError):
    """A well-formed run could not continue; the message says where and why. Exit code 1."""


class DataError(RunError):
    """A run could not begin because its data cannot be read; the message says why. Exit code 1."""


def printable(text: str) -> str:
    """Text whose control characters are U+FFFD, as a terminal would obey them; ends of lines and tabs stay."""
    return CONTROLS.sub("\ufffd", text)


def short(text: str) -> str:
    """Text in which very long words, such as numbers of hundreds of digits, are cut in the middle."""
    return re.sub(rf"[^\s/]{{{LONG + 1},}}", lambda word: f"{word[0][:40]}...{word[0][-10:]}", text)


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether memory did not suffice, a GPU's or the machine's."""
    lacks = isinstance(problem, RuntimeError) and NO_MEMORY in str(problem)
    return lacks or isinstance(problem, MemoryError) or lacks_gpu_memory(problem)


def lacks_gpu_memory(problem: BaseException) -> bool:
    """Whether it was a GPU's memory; cuBLAS and cuDNN, which allocate some, have their own messages."""
    torch = sys.modules.get("torch")  # imported by any program that can run out of a GPU's memory
    return (torch is not None and isinstance(problem, torch.cuda.OutOfMemoryError)) or (
        isinstance(problem, RuntimeError) and any(message in str(problem) for message in NO_GPU_MEMORY)
    )


def out_of_memory(problem: BaseException) -> str:
    """The line that a person reads where memory did not suffice."""
    if lacks_gpu_memory(problem):
        return "the GPU's memory is too small for these examples and models; use fewer clients or --device cpu"
    allocation = re.search(r"allocate (\d+) bytes", str(problem))
    more = f" ({int(allocation[1]) / 1e9:.3g} GB more were needed)" if allocation else ""
    return f"out of memory{more}; use fewer clients, a smaller model or how.executor=loop"


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The alternatives for an error: the closest one if there is one, or if there are many; otherwise all of them."""
    candidates = sorted(candidates)
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6 if len(candidates) <= FEW else 0)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(candidates) or 'none'}"


def list_names(names: Sequence[str], most: int = SHOWN) -> str:
    """Names, the first of many."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def reason_of(problem: Exception) -> str:
    """The first line that a library says of what it could not do."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")


def several(count: int, what: str) -> str:
    """Such as "1 client" or "20 clients"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def list_seeds(seeds: Sequence[int]) -> str:
    """Such as "seed 0" or "seeds 0, 1"."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def some(few: int, count: int, what: str) -> str:
    """The subject of a sentence, such as "1 of 20 clients has" or "2 of 20 clients have"."""
    return f"{few:,} of {several(count, what)} {'has' if few == 1 else 'have'}"


def explain(problem: BaseException) -> tuple[int, str]:
    """Exit code and the one line that a person reads."""
    match problem:
        case KeyboardInterrupt():
            number = signal.SIGTERM if isinstance(problem, Terminated) else signal.SIGINT
            return CODES[number], str(problem) or "interrupted"
        case UsageError():
            return 2, str(problem)
        case OSError() if problem.strerror and problem.filename:
            return 1, short(f"{problem.filename}: {problem.strerror}")
        case RunError() | OSError():
            return 1, short(str(problem))
        case Exception() if is_out_of_memory(problem):
            return 1, out_of_memory(problem)
    return 1, f"unexpected {type(problem).__name__}: {short(str(problem))} (--debug shows where; please report it)"


def log_failure(problem: Exception) -> str:
    """The line that a person reads of a failure that ends nothing else; the log has where it was, for --debug."""
    logging.getLogger("kinfed").debug("what follows was caught, and the rest goes on", exc_info=problem)
    return explain(problem)[1]


def hear_warnings(say: Callable[[str], None]) -> None:
    """Let a command's warnings be said, also where they are to be errors (-W error): they end nothing."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        say(str(message))

    if any(action == "error" for action, *_ in warnings.filters):
        warnings.simplefilter("default")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)  # as by default
    warnings.showwarning = show


@contextmanager
def note_failure(problems: list[str], what: str) -> Iterator[None]:
    """Whatever is raised in this block is added to the problems, as `what` and why, and the rest goes on."""
    try:
        yield
    except Exception as problem:
        problems.append(f"{what}: {log_failure(problem)}")
