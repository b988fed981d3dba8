"""The files of a run's test examples: the score of each, and how far off its answers were."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from ..core import checkpoint
from ..files import readable

Array = NDArray[Any]


class TestedExamples(NamedTuple):
    """The test examples of a run with one seed, by client."""

    scores: list[Array]  # [n] by the client's chosen model
    blocks: list[Array]  # [n] int64 the block of each, or if none is declared its place in the pool
    declared: bool = False
    totals: Array | None = None  # [N] as how many rows they count, if they have weights

    def write(self, path: Path) -> None:
        """Write the score of every test example, all clients' after one another, and how many each client has."""
        arrays = {
            "scores": torch.from_numpy(np.concatenate(self.scores)),
            "sizes": torch.tensor([len(scores) for scores in self.scores]),
            "blocks" if self.declared else "places": torch.from_numpy(np.concatenate(self.blocks)),
        }
        arrays |= {} if self.totals is None else {"totals": torch.from_numpy(self.totals)}
        checkpoint.write(arrays, path)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """What `write` has written; None if nothing was. Older runs do not say where examples stand."""
        if not path.exists():
            return None
        with readable(path, f"delete the folder {path.parent} and run again"), safe_open(path, "np") as file:
            scores, cuts, keys = file.get_tensor("scores"), np.cumsum(file.get_tensor("sizes"))[:-1], set(file.keys())
            declared = "blocks" in keys
            key = "blocks" if declared else "places"
            blocks = file.get_tensor(key) if key in keys else np.arange(len(scores))
            totals = file.get_tensor("totals") if "totals" in keys else None
            return cls(np.split(scores, cuts), np.split(blocks, cuts), declared, totals)


def write_errors(path: Path, errors: Sequence[Array]) -> None:
    """Write how far each test example's answers were off, [n, C] of each client."""
    sizes = torch.tensor([len(table) for table in errors])
    checkpoint.write({"errors": torch.from_numpy(np.concatenate(errors)), "sizes": sizes}, path)


def read_errors(path: Path) -> list[Array] | None:
    """What `write_errors` has written; None if nothing was, as of classes or by an older version."""
    if not path.exists():
        return None
    with readable(path, "delete it to do without intervals"), safe_open(path, "np") as file:
        return np.split(file.get_tensor("errors"), np.cumsum(file.get_tensor("sizes"))[:-1])
