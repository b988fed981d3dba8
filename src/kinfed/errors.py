"""What can go wrong, in two kinds: the request was wrong, or the run could not go on."""

import difflib
from collections.abc import Iterable

import torch

FEW = 30  # names that an error may list
OUT_OF_MEMORY = "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory"


class _OneLine(Exception):
    """What is said is one line, whatever is quoted in it."""

    def __init__(self, said: object = "") -> None:
        super().__init__(" ".join(line.strip() for line in str(said).splitlines()))


class UsageError(_OneLine, ValueError):
    """The request cannot be carried out as written; the message says what to change. Exit code 2."""


class RunError(_OneLine, RuntimeError):
    """A well-formed run could not go on; the message says where and why. Exit code 1."""


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether a GPU had too little memory; cuBLAS and cuDNN, which take some themselves, have words of their own."""
    return isinstance(problem, torch.cuda.OutOfMemoryError) or (
        isinstance(problem, RuntimeError) and any(words in str(problem) for words in OUT_OF_MEMORY)
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """How an error names the alternatives: the closest one if there is one, or if they are many; else all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6 if len(known) <= FEW else 0)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known) or 'none'}"


def explain(problem: BaseException) -> tuple[int, str]:
    """Exit code and the one line that a person reads."""
    match problem:
        case KeyboardInterrupt():
            return 130, str(problem) or "interrupted"
        case UsageError():
            return 2, str(problem)
        case RunError() | OSError():
            return 1, str(problem)
        case MemoryError():
            return 1, "out of memory; choose a smaller model, fewer clients or --executor loop"
        case RuntimeError() if is_out_of_memory(problem):
            return (
                1,
                "the GPU's memory is too small for these examples and models; choose fewer clients or --device cpu",
            )
    return 1, f"unexpected {type(problem).__name__}: {problem} (--debug shows where; please report it)"
