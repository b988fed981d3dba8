"""What a site lets a server compute of its rows: of one draw of them for each content of its file, never of a few."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core.method import Method
from kinfed.core.metrics import effective_rows
from kinfed.core.training import Training
from kinfed.data.split import SPLITS, Split
from kinfed.errors import UsageError, several
from kinfed.files import make_folder, read_json, write_json

FINEST = 1e-9  # score that is told from 0
STEP, TRAINING = 8, 10  # rows that a gradient, and all training, must be made of
REVEALS = "a gradient of few rows reveals them: that of one row, each of its cells and its target"


class Withheld(UsageError):
    """What a site does not let a server compute. The message says nothing of its rows, so it may leave the site."""


@dataclass(frozen=True)
class Disclosure:
    """The limits of a site: `draws` is the file that remembers draws, the others are rows that must be there."""

    draws: Path
    training: int = TRAINING  # for all training, and for sums
    step: int = STEP  # for a gradient

    def check_draw(self, data: Path, split: Split, seed: int, rows: Mapping[str, Any]) -> None:
        """Raise Withheld unless these are the rows of each split: [n] that were drawn of this content of a file before.

        What two draws are answered by differs in single rows, which a server could compute.
        """
        if len(rows["train"]) < self.training:
            raise Withheld(
                f"it has {several(len(rows['train']), 'training row')}, and its sums reveal single rows if there are "
                f"fewer than {self.training}: it takes part only if its operator says so (--few-rows)"
            )
        drawn = hashlib.sha256()
        for part in SPLITS:
            drawn.update(np.ascontiguousarray(rows[part], np.float64).tobytes() + b"/")
        draw = {"split": asdict(split), "seed": seed, "rows": drawn.hexdigest()}
        path, content = self.draws, _digest(data)
        draws = read_json(path, "its site's operator may delete it")
        before = draws.get(content)
        if before == draw:
            return
        if before is not None:
            named = [f"{key} {json.dumps(before[key])}" for key in ("split", "seed") if before[key] != draw[key]]
            raise Withheld(
                f"it answers for one split and seed of its file, as single rows follow from two, and has answered for "
                f"{' and '.join(named) or 'other rows of the same (by other columns, classes or times)'}; use that in "
                f"every run, or have its operator delete {path.name} beside the site's folder"
            )
        make_folder(path.parent)
        write_json(path, {**draws, content: draw})

    def check_steps(
        self,
        method: Method,
        training: Training,
        rows: Mapping[str, int],
        labels: Tensor,
        weights: Mapping[str, Tensor] | None,
    ) -> None:
        """Raise Withheld if a gradient, or a class's mean, that is uploaded is of too few rows.

        `rows` are how many each split has, `labels` those of training rows, and `weights` the example weights, if there
        are any: [n] of training rows, and of those for feedback.
        """
        batch = getattr(method, "batch", None)  # of a method that has one of its own
        step = min(rows["train"], batch or training.batch)
        if step < self.step:
            raise Withheld(
                f"a step of training takes {several(step, 'row')}, and {REVEALS}; set training.batch to {self.step} or "
                "more, or have the site's operator allow it (--few-rows)"
            )
        count = rows.get("held_out", self.step)
        if method.feedback != "none" and count < self.step:
            raise Withheld(
                f"the method takes feedback from {several(count, 'row')}, and {REVEALS}; set method.feedback to "
                f"'train' or the split so that there are {self.step}, or have the site's operator allow it (--few-rows)"
            )
        if weights is not None and self.step > 1:
            self._check_example_weights(method, step, weights)
        classes = not labels.is_floating_point() and len(labels) > 0
        if training.class_weights is not None and classes:
            self.check_weights(_weights(training, labels), "training.class_weights")
        by_class = getattr(method, "class_means", False) and classes
        if by_class and labels.unique(return_counts=True)[1].min() < self.step:
            raise Withheld(
                f"the method uploads means of each class, and one has fewer than {self.step} training rows, which such "
                "a mean reveals; choose another method, or have the site's operator allow it (--few-rows)"
            )

    def _check_example_weights(self, method: Method, batch: int, weights: Mapping[str, Tensor]) -> None:
        """Raise Withheld if by their weights a few rows decide a sum over all of them, or a step over the worst batch.

        The worst has the row of the largest weight, and beside it those of the smallest.
        """
        for split in ("train", "held_out") if method.feedback != "none" else ("train",):
            self.check_weights(weights[split], "the column of weights")
        if hasattr(method, "row_weights"):  # it uploads sums over all rows, and takes no steps
            return
        ordered = weights["train"].double().sort().values
        worst = torch.cat([ordered[-1:], ordered[: batch - 1]])
        if (count := effective_rows(worst)) < self.step:
            raise Withheld(
                f"by the column of weights {count:.1f} rows may decide a step of {several(batch, 'row')}, and "
                f"{REVEALS}; set a larger training.batch, use weights that are less far apart, or have the site's "
                "operator allow it (--few-rows)"
            )

    def check_weights(self, weights: Tensor, what: str) -> None:
        """Raise Withheld if sums with such weights: [n] are mostly of a few rows: of fewer than a step must take."""
        if (count := effective_rows(weights)) < self.step:
            raise Withheld(
                f"by {what} {count:.1f} rows of this site's {len(weights):,} decide what it would upload, and fewer "
                f"than {self.step} reveal themselves; use weights that are less far apart, or have the site's operator "
                "allow it (--few-rows)"
            )

    def round_score(self, score: float, rows: float) -> float:
        """A score as it leaves: no finer than one of so many rows changes it on average; exact if single rows may.

        The grid is a power of two, so it says nothing that the score does not.
        """
        if self.step <= 1 or not math.isfinite(score) or not score:
            return score
        step = 2.0 ** math.floor(math.log2(max(abs(score), FINEST) / max(rows, 1)))
        return round(score / step) * step


def _weights(training: Training, labels: Tensor) -> Tensor:
    """[n] the weight of each row in the loss."""
    counts = labels.bincount()
    if isinstance(training.class_weights, tuple):
        return torch.tensor(training.class_weights, dtype=torch.float64)[labels]
    return 1 / counts[labels].double()


def _digest(data: Path) -> str:
    """A hash of a file, or of all files in a folder."""
    hashed = hashlib.sha256()
    for path in sorted(file for file in data.rglob("*") if file.is_file()) if data.is_dir() else [data]:
        with path.open("rb") as file:
            hashed.update(hashlib.file_digest(file, "sha256").digest())
    return hashed.hexdigest()
