"""A site's own examples: read from its file, and divided as they would be among all the others'."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kinfed.core.seeding import generator, tags
from kinfed.core.tasks import Classification, Regression, Task
from kinfed.data.datasets import directory
from kinfed.data.federation import Federation
from kinfed.data.split import Split
from kinfed.data.tables.databases import is_address
from kinfed.data.tables.frame import Frame
from kinfed.data.tables.open_table import kind_of, open_table
from kinfed.errors import Fault, UsageError
from kinfed.files import replacing

from .. import plan
from ..wire.messages import Fields
from .drawn_rows import Disclosure, Withheld
from .site_reading import Reading
from .site_series import SiteSeries
from .site_table import SiteTable

PARTS = ("", "_train", "_test", "_validation")  # of names of arrays: all examples, or those of one split


class OwnFileError(UsageError):
    """What is wrong with a site's file; `public` says so without anything that is in it."""

    def __init__(self, message: object = "", fault: Fault | None = None, where: str = "") -> None:
        """`where` is the place in the file, by column and line at most."""
        super().__init__(message, fault)
        self.public = f"its file cannot be used: {fault or 'something is wrong'}{where}; its own screen says more"


def find(path: Path, name: str, reading: Reading, limits: Disclosure | None = None) -> "SiteData":
    """The examples in a site's file, drawn within `limits`; raises UsageError for another kind of file."""
    if path.suffix.lower() == ".npz":
        if reading.time or reading.group or reading.columns or reading.ignore or reading.weight:
            raise UsageError(
                f"{path} holds arrays: --time, --group, --column, --ignore and --weight are for tables; put example "
                "weights into an array `weight` beside x and y"
            )
        return SiteArrays(path, name, limits)
    if not kind_of(path):
        if not path.exists():
            raise OwnFileError(f"there is no file or folder {path}; put it there", Fault.GONE)
        raise UsageError(
            f"{path}: a site's examples must be in a file .npz, .csv or .parquet, or in a folder of tables"
        )
    return (SiteSeries if reading.past else SiteTable)(path, name, reading, limits)


def open_examples(source: str, query: str, reading: Reading) -> Path | Frame:
    """Where a site's examples are: its file, or what a query finds in a database now.

    Raises UsageError, or DataError for a connection that is lost again and again, if there are none.
    """
    if is_address(source):
        frame = open_table(source, query)
        named = frame.rename(reading.columns)
        named.check_types({*named.columns} - {*reading.ignore})
        return frame
    if query:
        raise UsageError(f"{source} is not a database; leave --query out")
    if not Path(source).exists():
        raise UsageError(f"there is no file {source}")
    return Path(source)


def keep_examples(examples: Path | Frame, folder: Path) -> Path:
    """The file of examples; what a database answered is written into the folder, as it may answer otherwise later."""
    if isinstance(examples, Path):
        return examples
    path = folder / "rows.parquet"
    with replacing(path) as part:
        examples.write(part)
    return path


@contextmanager
def at_home(data: "SiteData") -> Iterator[None]:
    """Turn what is wrong with a table into an OwnFileError, whose public part names a line and a column at most."""
    try:
        yield
    except UsageError as problem:
        if isinstance(data, SiteArrays) or isinstance(problem, Withheld):  # which say shapes, types and counts
            raise
        text = str(problem)
        columns = vars(data)["frame"].columns if "frame" in vars(data) else ()
        column = next((name for name in columns if f", column '{name}': " in text), None)
        where = f", in column '{column}'" if column is not None else ""
        line = re.search(r", line (\d+), column", text)
        at = f" (line {line[1]})" if where and line else ""
        raise OwnFileError(problem, problem.fault, where + at) from None


def read(path: Path) -> dict[str, np.ndarray]:
    """A site's arrays by name: x and y, or x_train, y_train, x_test and y_test, perhaps also those of validation.

    Beside each y there may be an array of example weights, `weight`; examples of weight 0 are left out. Raises
    UsageError or RunError naming the file if it is missing, damaged or of another form.
    """
    names = [f"{k}{part}" for part in PARTS for k in ("x", "y", "weight")]
    arrays = directory.read(path.parent, path.stem, (), names)[1]
    arrays = {name: np.atleast_1d(array) for name, array in arrays.items()}
    wholes = [name for name in PARTS if f"x{name}" in arrays or f"y{name}" in arrays]
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
    weighted = [name for name in PARTS if f"weight{name}" in arrays]
    if weighted and set(weighted) != set(wholes):
        wanted = ", ".join(f"weight{name}" for name in wholes)
        got = ", ".join(f"weight{name}" for name in weighted)
        raise UsageError(f"{path}: all examples have weights, or none; it needs {wanted}, and holds {got}")
    for name in weighted:
        arrays |= _check_weights(path, name, {k: arrays[f"{k}{name}"] for k in ("x", "y", "weight")})
    return arrays


def _check_weights(path: Path, part: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The examples of a part that have a weight above 0, and their weights."""
    weight = arrays["weight"]
    if weight.dtype.kind not in "fiu" or weight.shape != arrays["y"].shape[:1]:
        raise UsageError(
            f"{path}: weight{part} must be a number for each of y{part}'s {len(arrays['y'])}; got {weight.dtype} "
            f"{list(weight.shape)}"
        )
    if not (np.isfinite(weight) & (weight >= 0)).all() or not weight.any():
        raise UsageError(f"{path}: weight{part} must be finite numbers from 0, at least one of them above; correct it")
    return {f"{k}{part}": array[weight > 0] for k, array in arrays.items()}


@dataclass(frozen=True)
class SiteArrays:
    """Arrays of the site `name`, which are used as they are."""

    path: Path
    name: str
    limits: Disclosure | None = None

    def hello(self) -> Fields:
        """What the server must know to see which examples fit together."""
        arrays = read(self.path)
        task = task_of(arrays)
        y = arrays.get("y", arrays.get("y_train"))
        assert y is not None
        return {
            "shape": list(next(iter(arrays.values())).shape[1:]),
            "outputs": task.classes if isinstance(task, Classification) else int(np.prod(y.shape[1:])),
            "task": plan.describe_task(task),
            "columns": [],
        }

    def describe(self, agreed: Fields, split: Split, seed: int) -> Fields:
        """Never asked for."""
        raise UsageError(f"{self.path} holds arrays, of which there is no description")

    def federate(self, fields: Fields, task: Task, split: Split, seed: int, cut: float = math.inf) -> Federation:
        """A federation of one client, divided as it would be among all others: draws depend on its name alone.

        Images as uint8 are scaled to [-1, 1], as kinfed's own image sets are; all other numbers are used as they are.
        """
        path, name, arrays = self.path, self.name, read(self.path)
        kind = np.int64 if isinstance(task, Classification) else np.float32
        x = {n: torch.from_numpy(a).float() for n, a in arrays.items() if n.startswith("x")}
        x = {n: t.div_(127.5).sub_(1) if arrays[n].dtype == np.uint8 else t for n, t in x.items()}
        y = {n: torch.from_numpy(a.astype(kind)) for n, a in arrays.items() if n.startswith("y")}
        weight = {n: torch.from_numpy(a).float() for n, a in arrays.items() if n.startswith("weight")}
        if isinstance(task, Classification) != (next(iter(y.values())).ndim == 1 and _integers(arrays)):
            wanted = "labels" if isinstance(task, Classification) else "targets"
            raise UsageError(f"{path}: y must be {wanted}, as at the other sites")
        if "x" in x:
            owner = np.full(len(x["x"]), name)
            federation = Federation.from_arrays(
                *(x["x"], y["y"], owner), split=split, seed=seed, task=task, weights=weight.get("weight")
            )
            return self._check_draw(federation, split, seed)
        if "x_validation" not in x:
            draw = generator(seed, "split", int(tags([name])))
            _cut({"x": x, "y": y, "weight": weight}, split, isinstance(task, Classification), draw)
        rows, at = {}, 0
        for part in ("train", "validation", "test"):
            count = len(x[f"x_{part}"])
            rows[part] = [torch.arange(at, at + count)]
            at += count

        def pool(table: dict[str, Tensor], key: str) -> Tensor:
            return torch.cat([table[f"{key}_{part}"] for part in rows])

        weights = pool(weight, "weight") if weight else None
        federation = Federation(pool(x, "x"), pool(y, "y"), rows, task, (name,), weights=weights)
        return self._check_draw(federation, split, seed)

    def _check_draw(self, federation: Federation, split: Split, seed: int) -> Federation:
        """The federation, once its draw of rows is within the site's limits."""
        if self.limits:
            rows = {name: parts[0].numpy() for name, parts in federation.rows.items()}
            self.limits.check_draw(self.path, split, seed, rows)
        return federation

    def describe_reading(self, fields: Fields, federation: Federation) -> Fields:
        """What new rows need: nothing, as arrays are used as they are."""
        return {}


SiteData = SiteTable | SiteSeries | SiteArrays  # a site's examples, whatever they are


def _cut(tables: dict[str, dict[str, Tensor]], split: Split, labelled: bool, draw: torch.Generator) -> None:
    """Move some of the training examples, x, y and perhaps weights, to the validation examples."""
    y = tables["y"]
    rows = torch.arange(len(y["y_train"]))
    parts: dict[str, Tensor] = {"test": rows[:0], "train": rows}
    if split.validation:
        two = Split(split.validation, 0.0)
        by_label = labelled and split.stratify is not False
        [parts] = two([rows], [draw], y["y_train"] if by_label else None)
    if not parts:
        raise UsageError("a single training example leaves none for validation; set federation.split.validation=0")
    for key, table in tables.items():
        if table:
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
