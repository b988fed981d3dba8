"""pFedHN: a hypernetwork writes each client's model from an embedding of the client (Shamsian et al., 2021)."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

import torch
from torch.func import vjp
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..core.method import Params
from ..core.optimiser import SGD, OptState, shorten
from ..core.trees import Like, PerClient, Shared
from ..errors import UsageError
from .parts.hypernetwork import Hypernetwork, check_size, dense, perceptron


class Network(NamedTuple):
    """An MLP from embeddings to features, and on these one linear head a tensor, side by side: the last layer."""

    embedding: PerClient  # [N, m]
    weights: tuple[Shared, ...]  # [out, in] each
    biases: tuple[Shared, ...]  # [out] each


class Server(NamedTuple):
    """What the server remembers."""

    network: Network
    memory: Annotated[OptState, Like("network")]  # the optimiser's


@dataclass(frozen=True)
class PFedHN(Hypernetwork):
    r"""$\theta_i = h(e_i; \varphi)$; the server descends along $(\partial \theta_i / \partial(\varphi, e_i))^\top
    (\theta_i - \tilde\theta_i)$.

    $\tilde\theta_i$ is the model after local training; the cohort's gradients are averaged. Only trainable tensors
    are generated: running statistics stay with the client. (The paper prints the sign of ascent; its code descends.)
    """

    embedding: int | None = None  # m; None: 1 + N / 4
    hidden: int = 100
    layers: int = 3  # layers after the first one, which make features out of its outputs
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.001
    clip: float = 50.0  # norm of the server's gradient
    client_clip: float = 50.0  # norm of a client's gradient in each local step; inf: any
    sequential: bool = False  # the server takes a step a client, one after the other, not one along their mean
    sign: str = "descent"  # "paper": as printed, which is ascent
    memory: float = 4.0  # GiB that the network and its optimiser may take; more is refused
    origin = "given"

    def __post_init__(self):
        size = 1 if self.embedding is None else self.embedding
        if min(self.hidden, self.layers, size) < 1 or not min(self.clip, self.client_clip, self.lr) > 0:
            raise UsageError(
                "pfedhn: embedding, hidden and layers must be at least 1, clip, client_clip and lr positive; "
                f"got {self.embedding}, {self.hidden}, {self.layers}, {self.clip}, {self.client_clip} and {self.lr}"
            )
        if self.sign not in ("descent", "paper"):
            raise UsageError(f"pfedhn: sign must be 'descent' or 'paper'; got '{self.sign}'")
        if not self.memory > 0:
            raise UsageError(f"pfedhn: memory is in GiB and positive; got {self.memory}")

    @property
    def optimiser(self):
        return SGD(self.lr, self.momentum, self.weight_decay)

    def start(self, roster):
        self.check_written(roster.layout)
        draw = roster.generator("pfedhn")
        size = self.embedding or 1 + len(roster) // 4
        widths = [size] + [self.hidden] * (self.layers + 1) + [roster.layout.parameters]
        copies = 2 + (self.momentum > 0)  # weights and gradient, and the optimiser's memory
        check_size("pfedhn", pairwise(widths), copies, self.memory, roster.theta, "a smaller hidden or model")
        embedding = roster.normal("pfedhn.embedding", size)
        network = Network(embedding, *dense(pairwise(widths), draw, roster.theta))
        return Server(network, self.optimiser.init(tree_leaves(network)))

    def generate(self, network, cohort):
        """[K, d'] the cohort's trainable parameters."""
        features = perceptron(network.embedding[cohort], network.weights[:-1], network.biases[:-1])
        return features @ network.weights[-1].T + network.biases[-1]  # no ReLU in between: features may be negative

    def send(self, roster, server, cohort):
        return Params(self.generate(server.network, cohort))

    def aggregate(self, roster, server, cohort, uploads):
        every = torch.arange(len(cohort), device=cohort.device)
        turns = roster.tags[cohort].argsort()[:, None] if self.sequential else every[None]
        (values, structure), memory = tree_flatten(server.network), server.memory
        for turn in turns:
            sent, pull_back = vjp(
                lambda network, members=cohort[turn]: self.generate(network, members), tree_unflatten(values, structure)
            )
            downhill = (uploads.theta[turn] - sent) / len(turn)
            slopes = pull_back(-downhill if self.sign == "descent" else downhill)[0]
            values, memory = self.optimiser.step(values, shorten(tree_leaves(slopes), self.clip), memory)
        return Server(tree_unflatten(values, structure), memory)
