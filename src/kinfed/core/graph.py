"""A relation graph between clients, as it is given to a method."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import UsageError

Origin = Literal["given", "fixed", "learned", "oracle"]


@dataclass(frozen=True)
class Graph:
    """A relation between clients, `weights: [N, N]` or [L, N, N], and its origin.

    `given`: part of the problem. `fixed`: by the method's definition, as in FedAvg.
    `learned`: from models or updates.
    `oracle`: uses knowledge that a real server would not have, such as labels or the true groups.

    >>> import torch
    >>> kinfed.Graph(torch.eye(3), "given").origin
    'given'
    """

    weights: Tensor
    origin: Origin


def check_graph(weights: Tensor, count: int) -> None:
    """Raise UsageError unless the relation is a finite, non-negative [N, N]."""
    if weights.shape != (count, count):
        raise UsageError(f"the graph must be [{count}, {count}] for {count} clients; got {list(weights.shape)}")
    if not torch.isfinite(weights).all() or (weights < 0).any():
        bad = (~torch.isfinite(weights) | (weights < 0)).nonzero()[0].tolist()
        raise UsageError(f"graph weights must be finite and not negative; entry {bad} is {float(weights[tuple(bad)])}")


def whole_relation(relation: Tensor) -> Tensor:
    """[N, N] or [L, N, N] a relation, also if it is given as one row for all clients: [N]; nothing is copied."""
    return relation.expand(len(relation), -1) if relation.ndim == 1 else relation
