"""A data set, and what a partition makes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.graph import Graph
from ..core.tasks import Task


@dataclass(frozen=True)
class Dataset:
    """Examples that belong to nobody yet, or to the clients that they came from."""

    x: Tensor  # [n, ...] float
    y: Tensor  # [n] int64 labels, or [n, ...] float targets
    task: Task
    classes: Sequence[str] = ()  # their names
    client: Tensor | None = None  # [n] int64 owner of each example, 0..N-1, if it has owners; -1: not to be used
    graph: Graph | None = None  # a relation of those owners
    owners: Sequence[str] = ()  # their names
    time: Tensor | None = None  # [n] int64 the step at which each example begins, if it has a place in time
    span: int = 1  # how many steps an example covers
    stratify: bool = False  # whether each class is split on its own unless the split says otherwise
    # From a data set with these examples, as a partition has left them, and all training rows [n]: the same on a scale
    # that is found in these rows.
    prepare: Callable[["Dataset", Tensor], "Dataset"] | None = None
    # What `prepare` found and did, for those who use a model on new examples: each of `inputs` (and of `targets`, where
    # outputs are so scaled) by name as its mean and deviation; a scaled number is (value - mean) / deviation.
    scale: Mapping[str, Any] = field(default_factory=dict)


class Parts(NamedTuple):
    """What a partition makes of a data set."""

    owned: list[Tensor]  # each client's rows, disjoint between clients unless there are lots
    dataset: Dataset  # with examples changed where the partition says so (turned images, swapped labels)
    groups: Tensor | None = None  # [N] the hidden group of each client, where there is one
    lots: Tensor | None = None  # [n] in [0, 1), where clients share examples: what puts one in the same split for all


@runtime_checkable
class Partition(Protocol):
    """Deals a data set to clients; its settings are its constructor's arguments."""

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts: ...


def rows_by_owner(dataset: Dataset) -> list[Tensor]:
    """Each owner's rows of the data set, in their order; empty for an owner without any."""
    assert dataset.client is not None
    used = (dataset.client >= 0).nonzero().flatten()
    counts = torch.bincount(dataset.client[used], minlength=len(dataset.owners))  # [N]
    return list(used[dataset.client[used].argsort(stable=True)].split(counts.tolist()))
