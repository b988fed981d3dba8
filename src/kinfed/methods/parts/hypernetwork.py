"""Hypernetworks: what methods share whose server writes every client's model with a network of its own."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...core.client import Client
from ...core.layout import Entry, Layout
from ...core.method import Method, Params, Roster
from ...core.tables import put
from ...core.trees import Shared, Tree
from ...errors import UsageError


class Dense(NamedTuple):
    """The linear layers of a network."""

    weights: tuple[Shared, ...]  # [out, in] each
    biases: tuple[Shared, ...]  # [out] each


def dense(shapes: Iterable[tuple[int, int]], draw: torch.Generator, like: Tensor) -> Dense:
    """Layers of shapes (in, out), uniform in ±1/√in as those of `nn.Linear`, of the type and device of `like`."""
    both = [((2 * torch.rand(out, into + 1, generator=draw) - 1) / into**0.5).to(like) for into, out in shapes]
    return Dense(tuple(u[:, 1:].clone() for u in both), tuple(u[:, 0].clone() for u in both))


def check_size(
    who: str, shapes: Iterable[tuple[int, int]], copies: int, limit: float, like: Tensor, advice: str
) -> None:
    """Raise UsageError if `copies` of layers of shapes (in, out) would take more than `limit` GiB."""
    numbers = sum((into + 1) * out for into, out in shapes)
    gib = copies * numbers * like.element_size() / 2**30
    if gib > limit:
        raise UsageError(
            f"{who}: a network of {numbers:,} numbers, its gradient and its optimiser's memory would take {gib:.3g} "
            f"GiB, more than memory={limit:g}; use {advice}, or raise method.memory"
        )


def perceptron(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]) -> Tensor:
    """[K, out] of the last layer for x: [K, in], with ReLU between the layers."""
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = (x @ weight.T + bias).relu()
    return x @ weights[-1].T + biases[-1]


@dataclass(frozen=True)
class Form:
    """How what a network says becomes the tensors that it writes, side by side.

    With a `rank` r a matrix [a, b] (a kernel: [out, the rest]) is the product of [a, r] and [r, b], where that takes
    fewer numbers; everything else is said number by number.
    """

    entries: tuple[Entry, ...]
    rank: int = 0

    def __len__(self) -> int:
        return sum(sum(sizes) for sizes in map(self._sizes, self.entries))

    def _sizes(self, entry: Entry) -> tuple[int, ...]:
        """How many numbers are said for a tensor: all at once, or for the left and the right factor."""
        whole = entry.shape.numel()
        high, wide = entry.shape[0] if entry.shape else 1, whole // (entry.shape[0] if entry.shape else 1)
        return (high * self.rank, self.rank * wide) if 0 < self.rank * (high + wide) < whole else (whole,)

    def spreads(self, theta: Tensor) -> list[tuple[int, Tensor]]:
        """How many numbers in a row, and their standard deviation, []: so that tensors have a tenth of theta: [d]'s."""
        found = []
        for entry in self.entries:
            std, sizes = 0.1 * theta[entry.at].std(correction=0), self._sizes(entry)
            found += [(size, std if len(sizes) == 1 else (std / self.rank**0.5).sqrt()) for size in sizes]
        return found

    def assemble(self, said: Tensor) -> Tensor:
        """[K, d'] the tensors from said: [K, len(self)]."""
        if not self.rank:
            return said
        parts, at = [], 0
        for entry in self.entries:
            sizes = self._sizes(entry)
            factors = said[:, at : at + sum(sizes)].split(sizes, 1)
            at += sum(sizes)
            if len(factors) == 2:
                left, right = factors[0].unflatten(1, (-1, self.rank)), factors[1].unflatten(1, (self.rank, -1))
                factors = ((left @ right).flatten(1),)
            parts.append(factors[0])
        return torch.cat(parts, 1)


@dataclass(frozen=True)
class Hypernetwork(Method):
    """The client half of a method whose server writes the models; running statistics stay with the clients."""

    bn: Literal["averaged", "local", "personal"] = field(default="local", kw_only=True)
    client_clip = math.inf  # norm of the gradient in each local step

    def neighbours(self, roster: Roster) -> Tensor | None:
        """[N, N] the links that say whose embedding is like whose; None where nothing does."""
        return None

    def add_clients(self, roster: Roster, server: Tree, newcomers: Tensor) -> Tree:
        """A newcomer's embedding is the mean of its neighbours', or of everybody's where it has none."""
        known, table = roster.others(newcomers), server.network.embedding
        links = self.neighbours(roster)
        near = table.new_zeros(len(newcomers), len(known)) if links is None else links[newcomers][:, known]
        near = torch.where(near.sum(1, keepdim=True) > 0, near, 1.0)

        def widen(table: Tensor, rows: Tensor) -> Tensor:
            wide = table.new_zeros(len(roster), table.shape[1])
            return put(put(wide, known, table), newcomers, rows)

        embedding = widen(table, near / near.sum(1, keepdim=True) @ table)
        kept = {
            part: (widen(moments[0], torch.zeros_like(embedding[newcomers])), *moments[1:])  # the embedding's are first
            for part, moments in server.memory._asdict().items()
            if part != "step" and moments
        }
        return server._replace(
            network=server.network._replace(embedding=embedding), memory=server.memory._replace(**kept)
        )

    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor | None:
        return None

    def check_written(self, layout: Layout) -> None:
        """Raise UsageError if there is more in what the network should write than what is learned."""
        if layout.parameters < layout.size:
            raise UsageError(
                "a network cannot write running statistics; use bn='local', which leaves them at the clients"
            )

    def init_client(self, client: Client) -> Tree:
        return Params(client.model.theta)

    def train(self, client: Client, state: Tree, received: Tree) -> tuple[Tree, Tree]:
        theta = client.descend(received.theta, clip=self.client_clip)
        return Params(theta), Params(theta)

    def personalise(self, client: Client, state: Tree, received: Tree) -> dict[str, Tree]:
        return {"generated": received, "own": state}
