"""A relation graph between clients, as it is given to a method."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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


@dataclass(frozen=True, eq=False)
class NeighbourLists:
    """A relation of very many clients, of whom each learns from a few that it lists, and from the mean of the rest.

    It takes N x M numbers, where a table takes N x N. With one relation a layer weights have an axis of layers first.
    """

    weights: Tensor  # [N, M] or [L, N, M]
    near: Tensor  # [N, M] int32 whose weights these are; one that is listed twice has the sum
    rest: Tensor  # [N] or [L, N] the weight of all that a client does not list
    mass: Tensor  # [N] by how much each counts in the mean of the rest

    def __len__(self) -> int:
        return self.near.shape[0]

    def map(self, change: Callable[[Tensor], Tensor]) -> "NeighbourLists":
        """The same with each tensor changed."""
        return NeighbourLists(*map(change, self.tensors.values()))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The four by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def shape(self) -> torch.Size:
        """That of the table that these lists stand for."""
        return torch.Size([*self.weights.shape[:-1], len(self)])

    def layer(self, place: int) -> "NeighbourLists":
        """The lists of one of L layers."""
        return replace(self, weights=self.weights[place], rest=self.rest[place])

    def row(self, client: int) -> Tensor:
        """[N] or [L, N] the weights of one client."""
        near, weights = self.near[client].long(), self.weights[..., client, :]
        rest = self.mass.to(weights).index_fill(0, near, 0)
        rest = rest / rest.sum().clamp(min=torch.finfo(rest.dtype).tiny)
        return (self.rest[..., client, None] * rest).index_add(-1, near, weights)

    def with_rows(self, clients: Tensor, other: "NeighbourLists") -> "NeighbourLists":
        """The lists of these clients: [n] are those that other: n has among them alone."""
        if other.near.shape[1] != self.near.shape[1]:
            return self
        near = self.near.index_copy(0, clients, clients.to(other.near)[other.near.long()])
        weights = self.weights.index_copy(-2, clients, other.weights)
        return NeighbourLists(weights, near, self.rest.index_copy(-1, clients, other.rest), self.mass)

    @property
    def own(self) -> Tensor:
        """[N] each client's weight for itself, a mean over layers."""
        itself = self.near == torch.arange(len(self), device=self.near.device)[:, None]
        return (self.weights * itself).sum(-1).view(-1, len(self)).mean(0)

    def add_up(self, labels: Tensor, count: int) -> Tensor:
        """[P, P] the weights that the clients of one part give those of another, added up; labels: [N] in 0..P - 1."""
        labels = labels.to(self.near.device)
        weights = self.weights.double().view(-1, *self.near.shape).mean(0)
        rest, mass = self.rest.double().view(-1, len(self)).mean(0), self.mass.double()
        near = self.near.long()
        pairs = labels[:, None] * count + labels[near]
        sums = torch.bincount(pairs.flatten(), weights.flatten(), count * count).view(count, count)
        left = (mass.sum() - mass[near].sum(1)).clamp(min=1e-300)
        share = torch.where(rest != 0, rest / left, 0.0)  # of a unit of mass
        of_parts = torch.bincount(labels, mass, count)
        sums += torch.bincount(labels, share, count)[:, None] * of_parts
        listed = share[:, None] * mass[near]
        sums -= torch.bincount(pairs.flatten(), listed.flatten(), count * count).view(count, count)
        return sums


Relation = Tensor | NeighbourLists  # [N, N], [L, N, N], or one row for all, [N]; or lists


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


def relate_members(shares: Tensor) -> Tensor:
    """[N, N] row i has the weight of each client in client i's model, by shares: [N, C] of C models that all share.

    A model is of its clients by their shares of it. Who has not taken part, with shares of 0, is as all who have.

    >>> import torch
    >>> relate_members(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))[::3]
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.3333, 0.3333, 0.3333, 0.0000]])
    """
    part = shares.sum(1, keepdim=True) > 0
    if not part.any():
        return shares.new_full((len(shares), len(shares)), 1 / len(shares))
    rows = torch.where(part, shares, shares.sum(0) / part.sum())
    return rows @ (shares / shares.sum(0).clamp(min=torch.finfo(shares.dtype).tiny)).T
