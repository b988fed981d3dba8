"""A site's own examples: read from its file, and divided as they would be among all the others'."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.seeding import generator, tags
from ..core.tasks import Classification, Regression, Task
from ..data import tables
from ..data.federation import Federation
from ..data.split import Split
from ..datasets import directory
from ..errors import UsageError
from .plan import Plan


def read(path: Path, target: str = "y") -> tuple[dict[str, np.ndarray], list[str]]:
    """A site's examples by name: x and y, or x_train, y_train, x_test and y_test, perhaps also those of validation.

    For a table, `target` is the column to predict; the names of the others are returned in the order of x. Raises
    UsageError or RunError naming the file if it is missing, damaged or of another form.
    """
    load = LOADERS.get(path.suffix.lower())
    if load is None:
        raise UsageError(f"{path}: a site's examples must be in one of these kinds of files: {', '.join(LOADERS)}")
    arrays, columns = load(path, target)
    wholes = [name for name in ("", "_train", "_test", "_validation") if f"x{name}" in arrays or f"y{name}" in arrays]
    if ("" in wholes and len(wholes) > 1) or ("" not in wholes and not {"_train", "_test"} <= set(wholes)):
        raise UsageError(
            f"{path} must hold x and y, or x_train, y_train, x_test and y_test; it holds {', '.join(arrays) or 'none'}"
        )
    for name in wholes:
        x, y = arrays.get(f"x{name}"), arrays.get(f"y{name}")
        if x is None or y is None or len(x) != len(y) or not len(x):
            got = "and".join(f" {len(a)} of {k}{name} " for k, a in (("x", x), ("y", y)) if a is not None)
            raise UsageError(f"{path} needs as many x{name} as y{name}, and at least one; got{got}")
        if x.dtype.kind not in "fiu" or y.dtype.kind not in "fiu" or x.ndim < 2:
            raise UsageError(
                f"{path}: x{name} must be numbers [n, ...] and y{name} labels or targets [n, ...]; "
                f"got {x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}"
            )
    return arrays, columns


def federate(path: Path, name: str, task: Task, plan: Plan, target: str = "y") -> Federation:
    """A federation of one client, divided as it would be among all others: draws depend on its name alone.

    Images as uint8 are scaled to [-1, 1], as kinfed's own image sets are; all other numbers are used as they are.
    """
    arrays, _ = read(path, target)
    kind = np.int64 if isinstance(task, Classification) else np.float32
    x = {n: torch.from_numpy(a).float() for n, a in arrays.items() if n.startswith("x")}
    x = {n: t.div_(127.5).sub_(1) if arrays[n].dtype == np.uint8 else t for n, t in x.items()}
    y = {n: torch.from_numpy(a.astype(kind)) for n, a in arrays.items() if n.startswith("y")}
    if isinstance(task, Classification) != (next(iter(y.values())).ndim == 1 and _integers(arrays)):
        raise UsageError(
            f"{path}: y must be {'labels' if isinstance(task, Classification) else 'targets'}, as at the other sites"
        )
    seed, split = plan.learning.seed, plan.split
    if "x" in x:
        owner = np.full(len(x["x"]), name)
        return Federation.from_arrays(x["x"], y["y"], owner, split=split, seed=seed, task=task)
    if "x_validation" not in x:
        _cut(x, y, split, isinstance(task, Classification), generator(seed, "split", int(tags([name]))))
    rows, at = {}, 0
    for part in ("train", "validation", "test"):
        count = len(x[f"x_{part}"])
        rows[part] = [torch.arange(at, at + count)]
        at += count
    whole = [torch.cat([table[f"{k}_{part}"] for part in rows]) for k, table in (("x", x), ("y", y))]
    return Federation(whole[0], whole[1], rows, task, (name,))


def _cut(x: dict[str, Tensor], y: dict[str, Tensor], split: Split, labelled: bool, draw: torch.Generator) -> None:
    """Move some of the training examples to the validation examples."""
    rows = torch.arange(len(x["x_train"]))
    parts: dict[str, Tensor] = {"test": rows[:0], "train": rows}
    if split.validation:
        two = Split(split.validation, 0.0)
        by_label = labelled and split.stratify is not False
        [parts] = two([rows], [draw], y["y_train"] if by_label else None)
    if not parts:
        raise UsageError("a single training example leaves none for validation; set federation.split.validation=0")
    for table, key in ((x, "x"), (y, "y")):
        table[f"{key}_validation"] = table[f"{key}_train"][parts["test"]]
        table[f"{key}_train"] = table[f"{key}_train"][parts["train"]]


def task_of(arrays: dict[str, np.ndarray]) -> Task:
    """Classification if the labels are whole numbers, with as many classes as they show; otherwise regression."""
    labels = [a for name, a in arrays.items() if name.startswith("y")]
    if _integers(arrays):
        return Classification(max(int(a.max()) for a in labels) + 1)
    return Regression()


def _integers(arrays: dict[str, np.ndarray]) -> bool:
    return all(a.dtype.kind in "iu" and a.ndim == 1 for name, a in arrays.items() if name.startswith("y"))


def _npz(path: Path, target: str) -> tuple[dict[str, np.ndarray], list[str]]:
    names = [f"{k}{part}" for part in ("", "_train", "_validation", "_test") for k in "xy"]
    arrays = directory.read(path.parent, path.stem, (), names)[1]
    return {name: np.atleast_1d(array) for name, array in arrays.items()}, []


Loader = Callable[[Path, str], tuple[dict[str, np.ndarray], list[str]]]
# A kind of file, and what reads its arrays and columns as `read` explains them.
LOADERS: dict[str, Loader] = {".npz": _npz, ".csv": tables.of_one_client, ".parquet": tables.of_one_client}
