"""pFedHN: a hypernetwork writes each client's model from an embedding of the client (Shamsian et al., 2021)."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from ..errors import UsageError
from ..graph import put
from ..method import Method, Params
from ..optimiser import SGD, Memory


class Network(NamedTuple):
    """An MLP from embeddings to models; its last layer is one linear head a tensor, side by side."""

    embedding: Tensor  # [N, m]
    weights: tuple[Tensor, ...]  # [out, in] each
    biases: tuple[Tensor, ...]  # [out] each


class Server(NamedTuple):
    """What the server remembers."""

    network: Network
    memory: Memory  # the optimiser's


@dataclass(frozen=True)
class PFedHN(Method):
    r"""$\theta_i = h(e_i; \varphi)$; the server descends along $(\partial \theta_i / \partial(\varphi, e_i))^\top
    (\theta_i - \tilde\theta_i)$.

    $\tilde\theta_i$ is the model after local training; the cohort's gradients are averaged. Only trainable tensors
    are generated: running statistics stay with the client. (The paper prints the sign of ascent; its code descends.)
    """

    embedding: int | None = None  # m; None: 1 + N / 4
    hidden: int = 100
    layers: int = 3  # hidden layers after the first
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.001
    clip: float = 50.0  # norm of the server's gradient
    origin = "given"

    def __post_init__(self):
        size = 1 if self.embedding is None else self.embedding
        if min(self.hidden, self.layers, size) < 1 or self.clip <= 0 or self.lr <= 0:
            raise UsageError(
                "pfedhn: embedding, hidden and layers must be at least 1, clip and lr positive; "
                f"got {self.embedding}, {self.hidden}, {self.layers}, {self.clip} and {self.lr}"
            )

    @property
    def optimiser(self):
        return SGD(self.lr, self.momentum, self.weight_decay)

    def start(self, roster):
        draw = roster.generator("pfedhn")
        size = self.embedding or 1 + len(roster) // 4
        widths = [size] + [self.hidden] * (self.layers + 1) + [roster.layout.parameters]
        like = roster.theta
        uniform = [((2 * torch.rand(b, a + 1, generator=draw) - 1) / a**0.5).to(like) for a, b in pairwise(widths)]
        embedding = roster.normal("pfedhn.embedding", size)
        network = Network(embedding, tuple(u[:, 1:].clone() for u in uniform), tuple(u[:, 0].clone() for u in uniform))
        return Server(network, self.optimiser.init(_flat(network)))

    def generate(self, network, cohort):
        """[K, d'] the cohort's trainable parameters."""
        x = network.embedding[cohort]
        for weight, bias in zip(network.weights[:-1], network.biases[:-1], strict=True):
            x = (x @ weight.T + bias).relu()
        return x @ network.weights[-1].T + network.biases[-1]

    def send(self, roster, server, cohort):
        return Params(self.generate(server.network, cohort))

    def aggregate(self, roster, server, cohort, uploads):
        sent, pull_back = vjp(lambda network: self.generate(network, cohort), server.network)
        slopes = _flat(pull_back((sent - uploads.theta) / len(cohort))[0])
        norm = torch.stack([s.square().sum() for s in slopes]).sum().sqrt()
        shrink = (self.clip / norm.clamp(min=1e-12)).clamp(max=1)
        flat, memory = self.optimiser.step(_flat(server.network), [s * shrink for s in slopes], server.memory)
        count = len(server.network.weights)
        return Server(Network(flat[0], tuple(flat[1 : 1 + count]), tuple(flat[1 + count :])), memory)

    def relation(self, roster, server, cohort):
        return None

    def join(self, client):
        return Params(client.model.theta)  # of which only the running statistics are used

    def train(self, client, state, received):
        theta = client.descend(self._with_own_statistics(client, state, received))
        return Params(theta), Params(theta[self._generated(client)])

    def personalise(self, client, state, received):
        return {"generated": Params(self._with_own_statistics(client, state, received)), "own": state}

    def _generated(self, client):
        return client.model.layout.trainable.nonzero().squeeze(1).to(client.tag.device)

    def _with_own_statistics(self, client, state, received):
        return put(state.theta, self._generated(client), received.theta)


def _flat(network):
    return [network.embedding, *network.weights, *network.biases]
