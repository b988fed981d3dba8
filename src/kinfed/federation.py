"""Federation: everyone's examples in one pool, and which rows of it are whose, for what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .errors import UsageError
from .seeding import generator, tags
from .tasks import Classification, Regression, Task

SPLITS = ("train", "validation", "test")
Origin = Literal["given", "learned", "oracle"]


@dataclass(frozen=True)
class Graph:
    """A relation between clients, `weights: [N, N]` or [L, N, N], and where it comes from.

    `given`: part of the problem or of the method's definition. `learned`: found from models or updates.
    `oracle`: uses knowledge that a real server would not have, such as labels or the true groups.
    """

    weights: Tensor
    origin: Origin


@dataclass(frozen=True)
class Dataset:
    """Examples that belong to nobody yet, or to the clients that they came from."""

    x: Tensor  # [n, ...] float
    y: Tensor  # [n] int64 labels, or [n, ...] float targets
    task: Task
    classes: Sequence[str] = ()  # their names
    client: Tensor | None = None  # [n] int64 owner of each example, 0..N-1, if the data set has owners
    graph: Graph | None = None  # a relation of those owners


class Parts(NamedTuple):
    """What a partition makes of a data set."""

    owned: list[Tensor]  # each client's rows, disjoint between clients
    dataset: Dataset  # with examples changed where the partition says so (turned images, swapped labels)
    groups: Tensor | None = None  # [N] the hidden group of each client, where there is one


class Partition(Protocol):
    """Deals a data set to clients; its settings are its constructor's arguments."""

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts: ...


@dataclass(frozen=True)
class Split:
    """Which shares of a client's examples are for validation (selecting rounds) and for the final test.

    With `examples` a client uses at most so many, drawn at random, and leaves the others alone: data at a smaller scale.
    """

    test: float = 0.2
    validation: float = 0.1
    examples: int = 0  # 0: all

    def __post_init__(self) -> None:
        if not (0 < self.test < 1 and 0 <= self.validation < 1 and self.test + self.validation < 1):
            raise UsageError(
                f"split: test must lie in (0, 1), validation in [0, 1), their sum below 1; "
                f"got test={self.test}, validation={self.validation}"
            )
        if self.examples < 0:
            raise UsageError(f"split: examples is the most that a client uses, or 0 for all; got {self.examples}")

    def __call__(self, rows: Tensor, draw: torch.Generator) -> dict[str, Tensor]:
        """Rows of one client, shuffled and cut; a share above zero gets at least one row."""
        rows = rows[torch.randperm(len(rows), generator=draw)][: self.examples or None]
        test = max(1, round(self.test * len(rows)))
        validation = max(1, round(self.validation * len(rows))) if self.validation else 0
        parts = rows.split([test, validation, len(rows) - test - validation]) if len(rows) >= test + validation else ()
        if not parts or not len(parts[2]):
            return {}
        return {"test": parts[0], "validation": parts[1], "train": parts[2]}


@dataclass(frozen=True)
class Federation:
    """N clients over a pool of examples `x: [n, ...]`, `y: [n, ...]`.

    `rows[split][i]` are client i's rows of the pool. `graph` is the relation the methods may use; `groups: [N]`
    is the hidden truth, for scoring learned graphs only: no method sees it.
    """

    x: Tensor
    y: Tensor
    rows: Mapping[str, Sequence[Tensor]]
    task: Task
    names: Sequence[str] = ()
    graph: Graph | None = None
    groups: Tensor | None = None
    classes: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        count = len(self.rows["train"])
        if not self.names:
            object.__setattr__(self, "names", tuple(str(i) for i in range(count)))
        if set(self.rows) != set(SPLITS) or any(len(r) != count for r in self.rows.values()) or count == 0:
            raise UsageError(
                f"a federation needs rows for {', '.join(SPLITS)}, one entry a client, and a client or more"
            )
        if len(self.names) != count or len(set(self.names)) != count:
            raise UsageError(f"{count} clients need {count} different names; got {len(set(self.names))}")
        if len(self.x) != len(self.y):
            raise UsageError(f"x has {len(self.x)} examples but y has {len(self.y)}")
        for what, values in (("x", self.x), ("y", self.y)):
            if values.is_floating_point() and not torch.isfinite(values).all():
                bad = (~torch.isfinite(values)).flatten(1).any(1) if values.ndim > 1 else ~torch.isfinite(values)
                where = int(bad.nonzero()[0])
                owner = next((n for n, r in zip(self.names, self.rows["train"], strict=True) if where in r), None)
                raise UsageError(
                    f"{what} holds NaN or infinity in {int(bad.sum())} of {len(values)} examples, first in example "
                    f"{where}{f' (client {owner})' if owner is not None else ''}; fill or drop these first"
                )
        self.task.check(self.y)
        validated = [len(r) > 0 for r in self.rows["validation"]]
        for split in ("train", "test") + (("validation",) if any(validated) else ()):
            empty = [n for n, r in zip(self.names, self.rows[split], strict=True) if not len(r)]
            if empty:
                raise UsageError(
                    f"{len(empty)} of {count} clients have no {split} example: {', '.join(empty[:8])}"
                    f"{', ...' if len(empty) > 8 else ''}; give them more examples or leave these clients out"
                )
        if isinstance(self.task, Classification) and count > 1:  # one alone cannot know what others learn
            seen = torch.cat(list(self.rows["train"]))
            missing = sorted(set(self.y[torch.cat([*self.rows["test"], seen])].tolist()) - set(self.y[seen].tolist()))
            if missing:
                raise UsageError(
                    f"no client has a training example of class {', '.join(map(str, missing))}, though some are tested "
                    "on it; change the partition or the split"
                )
        if self.graph is not None:
            check_graph(self.graph.weights, count)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def sizes(self) -> Tensor:
        """[N] int64: training examples of each client."""
        return torch.tensor([len(r) for r in self.rows["train"]])

    @property
    def outputs(self) -> int:
        """How many numbers a model gives for an example: one a class, or one a target."""
        return self.task.classes if isinstance(self.task, Classification) else self.y[:1].numel()

    def class_counts(self) -> Tensor:
        """[N, C] int64: examples of each class a client holds, all splits together."""
        if not isinstance(self.task, Classification):
            raise UsageError("class counts exist for classification only")
        owned = [torch.cat(parts) for parts in zip(*self.rows.values(), strict=True)]
        return torch.stack([torch.bincount(self.y[rows], minlength=self.task.classes) for rows in owned])

    def to(self, device: torch.device) -> "Federation":
        """The same federation with its pool on a device."""
        moved = {split: [r.to(device) for r in rows] for split, rows in self.rows.items()}
        return replace(self, x=self.x.to(device), y=self.y.to(device), rows=moved)

    @staticmethod
    def from_arrays(
        x: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        client: ArrayLike | Tensor,
        *,
        split: Split | None = None,
        seed: int = 0,
        task: Task | None = None,
        graph: ArrayLike | Tensor | None = None,
    ) -> "Federation":
        """A federation from your own arrays.

        `x: [n, ...]` are inputs, `y: [n]` labels (integers: classification) or targets (floats: regression),
        `client: [n]` says whose each example is; clients are ordered by this value. `graph: [N, N]` is a known
        relation in that order. Each client's examples are split at random into train, validation and test.
        Raises UsageError on anything that could not be trained on.
        """
        pool = _tensor(x, "x")
        pool = pool if pool.is_floating_point() else pool.to(torch.get_default_dtype())
        target = _tensor(y, "y")
        if task is None:
            if target.is_floating_point():
                task = Regression()
            else:
                target = target.to(torch.int64)
                task = Classification(int(target.max()) + 1 if len(target) else 1)
        elif not target.is_floating_point():
            target = target.to(torch.int64)
        owner = np.asarray(client)
        if owner.shape != (len(pool),) or len(pool) != len(target) or not len(pool):
            raise UsageError(
                f"x, y and client must agree on their first axis and not be empty; "
                f"got {len(pool)}, {len(target)} and {list(owner.shape)}"
            )
        names, index = np.unique(owner, return_inverse=True)
        owned = [torch.from_numpy(np.flatnonzero(index == i)) for i in range(len(names))]
        relation = None if graph is None else Graph(_tensor(graph, "graph").float(), "given")
        return divide(pool, target, owned, task, split or Split(), seed, names=tuple(map(str, names)), graph=relation)


def divide(
    x: Tensor,
    y: Tensor,
    owned: Sequence[Tensor],
    task: Task,
    split: Split,
    seed: int,
    *,
    names: Sequence[str] = (),
    graph: Graph | None = None,
    groups: Tensor | None = None,
    classes: Sequence[str] = (),
) -> Federation:
    """A federation from each client's rows `owned[i]`, split into train, validation and test."""
    names = names or tuple(str(i) for i in range(len(owned)))
    parts = [split(r, generator(seed, "split", int(tag))) for r, tag in zip(owned, tags(names), strict=True)]
    short = [f"{name} ({len(rows)})" for name, rows, part in zip(names, owned, parts, strict=True) if not part]
    if short:
        raise UsageError(
            f"{len(short)} of {len(names)} clients have too few examples for training, validation and test: "
            f"{', '.join(short[:8])}{', ...' if len(short) > 8 else ''}"
        )
    rows = {name: [part[name] for part in parts] for name in SPLITS}
    return Federation(x, y, rows, task, names, graph, groups, classes)


def check_graph(weights: Tensor, count: int) -> None:
    """Raise UsageError unless the relation is a finite, non-negative [N, N]."""
    if weights.shape != (count, count):
        raise UsageError(f"the graph must be [{count}, {count}] for {count} clients; got {list(weights.shape)}")
    if not torch.isfinite(weights).all() or (weights < 0).any():
        bad = (~torch.isfinite(weights) | (weights < 0)).nonzero()[0].tolist()
        raise UsageError(f"graph weights must be finite and not negative; entry {bad} is {float(weights[tuple(bad)])}")


def _tensor(values: ArrayLike | Tensor, name: str) -> Tensor:
    try:
        return values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    except TypeError as problem:
        raise UsageError(f"{name} must be an array of numbers: {problem}") from None
