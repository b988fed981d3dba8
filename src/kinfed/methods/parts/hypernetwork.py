"""Hypernetworks: shared parts of methods whose server writes every client's model with a network."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...core.layout import Layout
from ...core.method import Method, Normalisation, Params, Roster
from ...core.mixins import Admits
from ...core.optimiser import Optimiser, OptState, clip_norm
from ...core.rows import put
from ...core.trees import Like, Shared, Tree, replace_rows
from ...errors import UsageError

FITS = 10  # rounds of the server's steps on a newcomer's embedding, in one of its own


class Server(NamedTuple):
    """The server's state."""

    network: Tree  # its first tensor is `embedding`: [N, m], one per client
    opt_state: Annotated[OptState, Like("network")]


class Dense(NamedTuple):
    """The linear layers of a network."""

    weights: tuple[Shared, ...]  # [out, in] each
    biases: tuple[Shared, ...]  # [out] each


def draw_layers(widths: list[int], draw: torch.Generator, like: Tensor) -> Dense:
    """Layers from each width to the next, uniform in ±1/√in as in `nn.Linear`, of the type and device of `like`."""
    uniform = [(2 * torch.rand(out, into + 1, generator=draw) - 1) / into**0.5 for into, out in pairwise(widths)]
    both = [u.to(like) for u in uniform]
    return Dense(tuple(u[:, 1:].clone() for u in both), tuple(u[:, 0].clone() for u in both))


def perceptron(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...], averaging: Tensor | None = None
) -> Tensor:
    """[K, out] of the last layer for x: [K, in], with ReLU between the layers; averaging: [K, K] is before each."""
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = x.relu() if layer else x
        x = x if averaging is None else averaging @ x
        x = x @ weight.T + bias
    return x


def check_size(who: str, widths: list[int], optimiser: Optimiser, limit: float, like: Tensor, advice: str) -> None:
    """Raise UsageError if layers of these widths, with gradient and optimiser, would take more than `limit` GiB."""
    numbers = sum((size + 1) * out for size, out in pairwise(widths))
    _, *kept = optimiser.init([like[:1]])
    gib = (2 + sum(map(len, kept))) * numbers * like.element_size() / 2**30
    if gib > limit:
        raise UsageError(
            f"{who}: a network of {numbers:,} numbers, its gradient and its optimiser's state would take {gib:.3g} "
            f"GiB, more than memory={limit:g}; use {advice}"
        )


def step(server: Any, grads: Tree, optimiser: Optimiser, clip: float) -> Any:
    """The network after a step of the optimiser with a gradient clipped to the norm `clip`."""
    values, structure = tree_flatten(server.network)
    values, opt_state = optimiser.step(values, clip_norm(tree_leaves(grads), clip), server.opt_state)
    return server._replace(network=tree_unflatten(values, structure), opt_state=opt_state)


@dataclass(frozen=True)
class Hypernetwork(Method, Admits):
    """The client half of a method whose server writes the models; running statistics stay with the clients."""

    bn: Normalisation = field(default="local", kw_only=True)  # running statistics stay with the clients
    client_clip = math.inf  # norm of the gradient in each local step

    def links(self, roster: Roster) -> Tensor | None:
        """[N, N] the links between clients with similar embeddings; None if there are none."""
        return None

    def add_clients(self, roster, server, newcomers):
        """A newcomer's embedding is the mean of its neighbours', or of all clients' if it has none."""
        wide, earlier = super().add_clients(roster, server, newcomers), roster.others(newcomers)
        links, table = self.links(roster), server.network.embedding
        near = table.new_zeros(len(newcomers), len(earlier)) if links is None else links[newcomers][:, earlier]
        near = torch.where(near.sum(1, keepdim=True) > 0, near, 1.0)
        embedding = put(wide.network.embedding, newcomers, near / near.sum(1, keepdim=True) @ table)
        return wide._replace(network=wide.network._replace(embedding=embedding))

    def join(self, roster, server, newcomers, uploads):
        """A newcomer's embedding is fitted to its model by steps of the server's optimiser; the network is frozen."""
        for _ in range(FITS):
            server = replace_rows(server, newcomers, self.aggregate(roster, server, newcomers, uploads))
        return server

    def relation(self, roster, server, cohort):
        return None

    def check_written(self, layout: Layout) -> None:
        """Raise UsageError if the network would have to write more than the learned parameters."""
        if layout.parameters < layout.size:
            raise UsageError(
                "a network cannot write running statistics; use bn='local', which leaves them at the clients"
            )

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        theta = client.descend(received.theta, clip=self.client_clip)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"generated": received, "own": state}
