"""Execution: where and how a run is carried out."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from ..core.history import History
from ..errors import UsageError

Progress = Callable[[History, int], None]


@dataclass(frozen=True)
class Execution:
    """Where and how to run: nothing here changes a result, but for rounding.

    What is left open, as "auto" or None, is chosen by a rule; where an interrupted run goes on, it is as it was. Raises
    UsageError for settings of a wrong kind.
    """

    executor: str = "auto"  # loop: client by client; vmap: clients in batches; fused: these without autograd
    workers: int | None = None  # cores to use: loop trains a client on each; None: all
    chunk: int | None = None  # clients in a batch of vmap or fused
    precision: str | None = None  # of local training: float32, tf32 or bf16; None: float32
    device: str = "auto"  # cpu, cuda or cuda:NUMBER
    onednn: bool | None = None  # whether that library computes products on a CPU; None: by the rule in kinfed.ops.gemm
    checkpoint_seconds: float = 10.0  # the least time between two checkpoints in a run's folder
    progress: Progress = lambda history, rounds: None  # called with the history so far and the number of rounds

    def __post_init__(self) -> None:
        for name, count, what in (("workers", self.workers, "threads"), ("chunk", self.chunk, "clients")):
            if count is not None and not (isinstance(count, int) and count >= 1):
                raise UsageError(f"{name} counts {what}, so it must be at least 1; got {count!r}")
        seconds = self.checkpoint_seconds
        if not isinstance(seconds, Real) or not seconds >= 0:
            raise UsageError(f"checkpoint_seconds is a time, so it must be a number, zero or more; got {seconds!r:.80}")
        if not callable(self.progress):
            raise UsageError(
                f"progress must be a function of a history and the number of rounds; got {self.progress!r:.80}"
            )

    @property
    def requested(self) -> dict[str, Any]:
        """What is not left open of the settings that decide about rounding."""
        given = {name: getattr(self, name) for name in ROUNDING}
        return {name: value for name, value in given.items() if value not in (None, "auto")}


ROUNDING = tuple(f.name for f in fields(Execution) if f.name not in ("checkpoint_seconds", "progress"))
