"""Steps that partitions share: checks of a data set, and the result."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...core.tasks import Classification
from ...errors import UsageError, list_names
from ..dataset import Dataset, Parts


def check_clients(name: str, dataset: Dataset, clients: int, least: int = 1) -> None:
    """Raise UsageError unless the examples may be dealt anew, and there are at least `least` for each client."""
    if dataset.time is not None:
        raise UsageError(f"{name}: this partition cannot split time series across clients; use partition 'natural'")
    if clients < 1:
        raise UsageError(f"{name}: a federation needs at least 1 client; got {clients}; set federation.clients")
    if len(dataset.x) < clients * least:
        raise UsageError(
            f"{name}: {clients} clients need at least {least} example{'s' if least > 1 else ''} each, "
            f"{clients * least} together, but the data set has {len(dataset.x)}; use fewer clients"
        )


def rows_by_class(name: str, dataset: Dataset, draw: torch.Generator) -> list[Tensor]:
    """Rows of each class 0..C-1, shuffled; UsageError unless the data set has labels."""
    if not isinstance(dataset.task, Classification):
        raise UsageError(
            f"{name}: this partition deals examples by class, but this data set has targets that are not classes; "
            "use 'iid' or 'natural'"
        )
    dataset.task.check(dataset.y)
    order = torch.randperm(len(dataset.y), generator=draw)
    order = order[dataset.y[order].argsort(stable=True)]
    return list(order.split(torch.bincount(dataset.y, minlength=dataset.task.classes).tolist()))


def hidden_groups(name: str, groups: int, clients: int) -> Tensor:
    """[N] int64: clients in order, cut into groups of (nearly) equal size."""
    if not 1 <= groups <= clients:
        raise UsageError(f"{name}: {groups} groups need at least {groups} clients; got {clients}")
    return torch.arange(clients) * groups // clients


def hand_over(
    name: str, dataset: Dataset, owned: Sequence[Tensor], groups: Tensor | None = None, lots: Tensor | None = None
) -> Parts:
    """The parts of new clients: the natural owners and their graph are dropped.

    Raises UsageError if a client would own nothing.
    """
    empty = [str(i) for i, rows in enumerate(owned) if not len(rows)]
    if empty:
        raise UsageError(
            f"{name}: {len(empty)} of {len(owned)} clients would get no example: {list_names(empty)}; use fewer "
            "clients or more examples"
        )
    return Parts(list(owned), replace(dataset, client=None, graph=None, owners=()), groups, lots)
