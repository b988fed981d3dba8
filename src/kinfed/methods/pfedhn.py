"""pFedHN: a hypernetwork generates each client's model from an embedding of the client (Shamsian et al., 2021).

Differs: the gradients of all clients of a round are averaged; the authors' program takes one client a round.
"""

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from torch.func import vjp
from torch.utils._pytree import tree_leaves

from ..core.field_checks import Count, In, Positive
from ..core.method import Params
from ..core.mixins import Explains
from ..core.optimiser import SGD, Adam, Optimiser
from ..core.trees import PerClient, Shared
from .parts.hypernetwork import Hypernetwork, Server, check_size, draw_layers, perceptron, step


class Network(NamedTuple):
    """An MLP from embeddings to features, and on these one linear head a tensor, side by side: the last layer."""

    embedding: PerClient  # [N, m]
    weights: tuple[Shared, ...]  # [out, in] each
    biases: tuple[Shared, ...]  # [out] each


@dataclass(frozen=True)
class PFedHN(Hypernetwork, Explains):
    r"""$\theta_i = h(e_i; \varphi)$; the server descends along $(\partial \theta_i / \partial(\varphi, e_i))^\top
    (\theta_i - \tilde\theta_i)$.

    $\tilde\theta_i$ is the model after local training; the cohort's gradients are averaged. (The paper prints the sign
    of ascent; its code descends.)
    """

    embedding: Count | None = None  # m, numbers in a client's embedding; None: 1 + N / 4
    hidden: Count = 100  # width of the layers
    layers: Count = 3  # layers after the first one, up to the features
    optimiser: SGD | Adam | Optimiser = SGD(0.01, momentum=0.9, weight_decay=0.001)  # of the server's network
    clip: Positive = 50.0  # largest norm of the server's gradient; a longer one is scaled down
    client_clip: Annotated[float, In("(0, inf]")] = 50.0  # largest norm of the gradient in local steps; inf: any
    memory: Positive = 4.0  # GiB that network, gradient and optimiser may take; more is refused before it is allocated
    origin = "given"

    def start(self, roster):
        self.check_written(roster.layout)
        draw, size = roster.generator("pfedhn"), self.embedding or 1 + len(roster) // 4
        widths = [size] + [self.hidden] * (self.layers + 1) + [len(roster.theta)]
        advice = "a smaller hidden or model, or raise method.memory"
        check_size("pfedhn", widths, self.optimiser, self.memory, roster.theta, advice)
        embedding = roster.normal("pfedhn.embedding", size)
        network = Network(embedding, *draw_layers(widths, draw, roster.theta))
        return Server(network, self.optimiser.init(tree_leaves(network)))

    def add_clients(self, roster, server, newcomers):
        width = server.network.embedding.shape[1]  # chosen when there were fewer clients
        return Hypernetwork.add_clients(replace(self, embedding=width), roster, server, newcomers)

    def generate(self, network, cohort):
        """[K, d] the cohort's models."""
        features = perceptron(network.embedding[cohort], network.weights[:-1], network.biases[:-1])
        return features @ network.weights[-1].T + network.biases[-1]  # no ReLU in between: features may be negative

    def send(self, roster, server, cohort):
        return Params(self.generate(server.network, cohort))

    def aggregate(self, roster, server, cohort, uploads):
        theta, pull_back = vjp(lambda network: self.generate(network, cohort), server.network)
        grads = pull_back((theta - uploads.theta) / len(cohort))[0]
        return step(server, grads, self.optimiser, self.clip)
