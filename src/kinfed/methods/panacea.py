"""Panacea: a graph neural network on the clients' graph generates their models (Lin et al., 2025, Algorithm 1).

Differs: the server descends, from models generated at each step, where Algorithm 1 prints ascent by the first change.
The first model is added to the output; z stands for its MLP (Equation 5). Clip 50, lambda .1 and SGD .03 are kinfed's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch.func import vjp
from torch.utils._pytree import tree_leaves

from ..core.field_checks import Count, NonNegative
from ..core.method import Params
from ..core.mixins import Advises, Explains
from ..core.optimiser import SGD, Adam, Optimiser, OptState
from ..core.trees import Like, PerClient, Tree
from ..errors import UsageError
from .parts.graph_hypernetwork import GCN, MLP, draw_pairs, link_loss
from .parts.heads import FullHeads, Heads
from .parts.hypernetwork import Dense, Hypernetwork, draw_layers, perceptron, step


class Network(NamedTuple):
    """The graph hypernetwork: psi."""

    embedding: PerClient  # [N, m] H: what the encoder starts from
    encoder: Dense  # psi_e
    decoder: Heads  # psi_m


class Server(NamedTuple):
    """The server's state."""

    network: Tree
    opt_state: Annotated[OptState, Like("network")]


@dataclass(frozen=True)
class Panacea(Hypernetwork, Explains, Advises):
    r"""$\theta_i = \theta_0 + M(z_i)$, $Z = f(P \cdots f(P H W_1) \cdots W_L)$, $P = D^{-1}(A + I)$.

    The server descends on $\frac{1}{2K} \sum_i \|\tilde\theta_i - \theta_i\|^2 + \lambda_d L_d$ over the cohort, where
    $\tilde\theta_i$ is the model after local training and $L_d$ the cross-entropy of $\sigma(z_u^\top z_v)$ with the
    links (Equations 3 to 5). Links are the graph's positive weights. Panacea-GN is `reconstruction=0`, Panacea-MLP is
    that with `encoder=MLP()`, which needs no graph.
    """

    embedding: Count = 100  # m: numbers in a client's learned embedding
    encoder: GCN | MLP = GCN()  # makes embeddings that depend on neighbours, by a graph network, or does not
    decoder: FullHeads = FullHeads()  # M: writes a model from such an embedding
    residual: bool = True  # whether the common initial model is added to what is written
    steps: Count = 10  # K_s: steps of the server in a round
    optimiser: SGD | Adam | Optimiser = SGD(0.03)  # of the server's network; its lr is alpha
    reconstruction: NonNegative = 0.1  # lambda_d: weight of L_d
    clip: ClassVar[float] = 50.0  # largest norm of the server's gradient, as in pFedHN
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "optimiser.lr": (0.001, 0.003, 0.01, 0.03, 0.1),
        "reconstruction": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    }
    origin = "given"

    def start(self, roster):
        self.check_written(roster.layout)
        if roster.graph is None and self.encoder.needs_graph:
            raise UsageError(
                "panacea: this data has no graph of the clients, which it needs: federation.graph names one; or use "
                "method.encoder=mlp, without one, or the method kin, which learns one"
            )
        draw, theta = roster.generator("panacea"), roster.theta
        embedding = roster.normal("panacea.embedding", self.embedding)
        encoder = draw_layers([self.embedding] + [self.encoder.hidden] * self.encoder.layers, draw, theta)
        network = Network(embedding, encoder, self.decoder.draw(self.encoder.hidden, self.optimiser, draw, theta))
        if self.residual:
            z = self.encode(roster, network)
            network = network._replace(decoder=self.decoder.scale(network.decoder, z, theta, roster.layout))
        return Server(network, self.optimiser.init(tree_leaves(network)))

    def links(self, roster):
        """[N, N] A without self-links; None if nothing uses them, or no graph is known."""
        if roster.graph is None or not (self.encoder.needs_graph or self.reconstruction):
            return None
        weights = roster.graph.weights.to(roster.theta)
        return weights - torch.diag(weights.diagonal())

    def encode(self, roster, network):
        """[N, e] Z."""
        averaging = self.encoder.averaging(self.links(roster))
        return perceptron(network.embedding, *network.encoder, averaging)  # Equation 3

    def write(self, roster, network, z):
        """[K, d] models from z: [K, e] (Equation 3)."""
        written = self.decoder.write(network.decoder, z, len(roster.theta))
        return roster.theta + written if self.residual else written

    def send(self, roster, server, cohort):
        return Params(self.write(roster, server.network, self.encode(roster, server.network)[cohort]))

    def aggregate(self, roster, server, cohort, uploads):
        links, draw, sent = self.links(roster), roster.generator("panacea.pairs"), None
        averaging = self.encoder.averaging(links)
        for _ in range(self.steps):
            pairs = draw_pairs(roster, draw)

            def generate(network, pairs=pairs):
                z = perceptron(network.embedding, *network.encoder, averaging)
                return self.write(roster, network, z[cohort]), self.reconstruct(z, links, pairs)

            (theta, loss), pull_back = vjp(generate, server.network)
            sent = theta if sent is None else sent
            grad = self.away(sent, theta, uploads.theta) / len(cohort)
            grads = pull_back((grad, torch.full_like(loss, self.reconstruction)))[0]
            server = step(server, grads, self.optimiser, self.clip)
        return server

    def away(self, sent, theta, trained):
        """[K, d] the gradient of Equation 4, times K, by models theta; `sent` are those at the start of the round."""
        return theta - trained

    def reconstruct(self, z, links, pairs):
        """[] L_d; zero if it does not count, or there is no graph."""
        counts = self.reconstruction and links is not None
        return link_loss(z, links, pairs) if counts else z.new_zeros(())

    def diagnostics(self, roster, server, cohort, sent, uploads):
        z, links = self.encode(roster, server.network), self.links(roster)
        away = uploads.theta - self.write(roster, server.network, z[cohort])
        numbers = super().diagnostics(roster, server, cohort, sent, uploads)
        numbers["distance"] = roster.note(cohort, away.square().sum(1) / 2)  # its share of the first term
        if self.reconstruction and links is not None:
            pairs = draw_pairs(roster, roster.generator("panacea.notes"))
            numbers["reconstruction"] = self.reconstruct(z, links, pairs)
        return numbers
