"""A data set, and the result of a partition."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.batches import Ragged
from ..core.graph import Graph
from ..core.tasks import Task
from .tables.schema import Description


@dataclass(frozen=True)
class Dataset:
    """Examples that have no owner yet, or belong to the clients that they came from."""

    x: Tensor  # [n, ...] float
    y: Tensor  # [n] int64 labels, or [n, ...] float targets
    task: Task
    classes: Sequence[str] = ()  # their names
    client: Tensor | None = None  # [n] int64 owner of each example, 0..N-1, if it has owners; -1: not to be used
    graph: Graph | None = None  # a relation of those owners
    owners: Sequence[str] = ()  # their names
    time: Tensor | None = None  # [n] int64 the step at which each example begins, if examples have a time
    span: int = 1  # how many steps an example covers, from there on
    past: int = 0  # how many steps before it an example reads, which may be of another part of a split
    blocks: Tensor | None = None  # [n] int64 whom or what each example is of, if several are of one
    stratify: bool = False  # whether the split is stratified by class unless the split says otherwise
    # Takes a data set with these examples, after a partition, and all training rows [n]; returns it scaled by the mean
    # and deviation of these rows.
    prepare: "Prepare | None" = None
    # The scale that `prepare` used, needed to apply a model to new examples: mean and deviation of each of `inputs`
    # (and of `targets`, if outputs are scaled) by name; a scaled number is (value - mean) / deviation.
    scale: Mapping[str, Any] = field(default_factory=dict)
    columns: Description | None = None  # of a table, as `prepare` found them
    places: Tensor | None = None  # [N, 2] where the owners are, if that is known: latitude and longitude, in degrees
    weights: Tensor | None = None  # [n] as how many rows each example counts, above 0; None: all as one


Prepare = Callable[[Dataset, Tensor], Dataset]


class Parts(NamedTuple):
    """A data set dealt to clients."""

    owned: Sequence[Tensor]  # each client's rows, disjoint between clients unless there are lots
    dataset: Dataset  # with examples changed by the partition, if it does so (turned images, renamed labels)
    groups: Tensor | None = None  # [N] the hidden group of each client, if there are groups
    lots: Tensor | None = None  # [n] in [0, 1), if clients share examples: puts each into the same split for all


@runtime_checkable
class Partition(Protocol):
    """Deals a data set to clients, every example once; its settings are its constructor's arguments.

    Called with the data set, the number of clients and a generator, the only source of its draws; returns `Parts`.
    """

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts: ...


def rows_by_owner(dataset: Dataset) -> Sequence[Tensor]:
    """Each owner's rows of the data set, in their order; empty for an owner without any."""
    assert dataset.client is not None
    used = (dataset.client >= 0).nonzero().flatten()
    counts = torch.bincount(dataset.client[used], minlength=len(dataset.owners))  # [N]
    return Ragged(used[dataset.client[used].argsort(stable=True)], counts)
