"""Execution: where and how a run is carried out."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..core.field_checks import Count, NonNegative, Settings
from ..core.history import History
from ..core.sharing import Sharing
from ..errors import UsageError

Progress = Callable[[History, int], None]


@dataclass(frozen=True)
class Execution(Settings):
    """Where and how to run: nothing here changes a result by more than rounding.

    What is left open, as "auto" or None, is chosen by a rule; an interrupted run continues with what it had. Raises
    UsageError for settings of a wrong kind.
    """

    # loop: one client at a time; vmap: clients in batches; fused: these without autograd
    executor: Literal["auto", "loop", "vmap", "fused"] = "auto"
    workers: Count | None = None  # cores to use: loop trains a client on each; None: all
    chunk: Count | None = None  # clients in a batch of vmap or fused
    precision: Literal["float32", "tf32", "bf16"] | None = None  # of products in local training; None: float32
    device: str = "auto"  # cpu, cuda or cuda:NUMBER
    onednn: bool | None = None  # whether that library computes products on a CPU; None: by the rule in kinfed.ops.gemm
    checkpoint_seconds: NonNegative = 10.0  # the least time between checkpoints
    track: tuple[str, ...] = ()  # tensorboard, mlflow, or FILE.py:NAME of yours; see docs/runs.md
    keep_state: bool = True  # whether a finished run keeps the state with which it can go on and newcomers can join
    progress: Progress = lambda history, rounds: None  # called with the history so far and the number of rounds
    planned: Callable[[Sharing], None] = lambda sharing: None  # called with what will travel, before the first round

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, takes in (("progress", "a history and the number of rounds"), ("planned", "a Sharing")):
            if not callable(given := getattr(self, name)):
                raise UsageError(f"{name} must be a function of {takes}; got {given!r:.80}")

    @property
    def rounding_settings(self) -> dict[str, Any]:
        """What is not left open of the settings that decide about rounding."""
        given = {name: getattr(self, name) for name in ROUNDING}
        return {name: value for name, value in given.items() if value not in (None, "auto")}


NOT_ROUNDING = ("checkpoint_seconds", "track", "keep_state", "progress", "planned")
ROUNDING = tuple(f.name for f in fields(Execution) if f.name not in NOT_ROUNDING)
