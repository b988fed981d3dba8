"""What a run's test examples say: the score of each, and how far off its answers were; and their files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from ..core import checkpoint
from ..core.summary import Summary, list_attackers
from ..files import readable
from .run_folder import RunFolder

Array = NDArray[Any]


class Tested(NamedTuple):
    """The test scores of a run with one seed, by client: its own, and those of its test examples."""

    means: dict[str, float]  # the score of each client that is no attacker
    examples: dict[str, Array] | None = None  # [n] those of the examples of every client, if they were written
    leaking: bool = False
    blocks: dict[str, Array] | None = None  # [n] int64 the block of each example or, if none is declared, its place
    declared: bool = False  # whether these are blocks, such as a person
    totals: dict[str, float] | None = None  # as how many rows each client's examples count, if they have weights
    attackers: int = 0  # clients that attack

    def scores(self, client: str, by_example: bool) -> Array:
        """[n] the scores of a client's examples; or [1] the client's."""
        return self.examples[client] if by_example and self.examples is not None else np.array([self.means[client]])

    def is_of_the_same_examples(self, other: "Tested") -> bool:
        """Whether every client in both has as many test examples in each, as far as that was written."""
        mine, theirs = self.examples or {}, other.examples or {}
        return all(len(mine[name]) == len(theirs[name]) for name in mine.keys() & theirs.keys())

    def write(self, path: Path) -> None:
        """Write the score of every test example, all clients' after one another, and how many each client has."""
        scores, blocks = (list(by_name.values()) for by_name in (self.examples or {}, self.blocks or {}))
        arrays = {
            "scores": torch.from_numpy(np.concatenate(scores)),
            "sizes": torch.tensor([len(scores_of_client) for scores_of_client in scores]),
            "blocks" if self.declared else "places": torch.from_numpy(np.concatenate(blocks)),
        }
        if self.totals is not None:
            arrays["totals"] = torch.tensor(list(self.totals.values()), dtype=torch.float64)
        checkpoint.write(arrays, path)

    @classmethod
    def read(cls, folder: RunFolder) -> Self:
        """Those in the folder of a finished run with one seed. Older runs do not say where examples stand."""
        summary, path = folder.read_summary(), folder.tested
        tested = cls.from_summary(summary)
        if not path.exists():
            return tested
        with readable(path, f"delete the folder {path.parent} and run again"), safe_open(path, "np") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            scores, sizes = arrays["scores"], arrays["sizes"]
        names, declared = summary.clients.names, "blocks" in arrays
        if len(sizes) != len(names):
            raise folder.of_another(path)
        places = arrays.get("blocks" if declared else "places", np.arange(len(scores)))
        examples, blocks = (
            dict(zip(names, np.split(values, np.cumsum(sizes)[:-1]), strict=True)) for values in (scores, places)
        )
        totals = dict(zip(names, arrays["totals"].tolist(), strict=True)) if "totals" in arrays else None
        return tested._replace(examples=examples, blocks=blocks, declared=declared, totals=totals)

    @classmethod
    def from_summary(cls, summary: Summary) -> Self:
        """The scores of clients alone."""
        attackers = list_attackers(summary)
        scores = summary.clients.by_name(summary.selection.chosen)
        honest = {name: score for name, score in scores.items() if name not in attackers}
        return cls(honest, leaking=bool(summary.selection.caution), attackers=len(attackers))


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
