"""pFedLA: a hypernetwork for each client weighs all clients' models, layer by layer (Ma et al., 2022, Algorithm 1).

Differs: networks descend on the training loss, where the paper prints, and its public programs run, the sign by which
they climb it; all scores are zero at first. HeurpFedLA, which keeps some layers at home, is not offered.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch.func import vjp
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..core.field_checks import Count, Positive
from ..core.optimiser import SGD, Adam, Optimiser, OptState
from ..core.rows import active, put
from ..core.trees import Axis, Like, Pairwise, PerClient, Tree, axes
from ..errors import UsageError
from ..ops.similarity import inner_by_layer
from .parts.graph_mixing import GraphMethod


class Network(NamedTuple):
    """N perceptrons, each from its client's embedding to a score of every client in every layer of the model."""

    embedding: PerClient  # [N, m]
    weights: tuple[PerClient, ...]  # [N, out, in] each
    biases: tuple[PerClient, ...]  # [N, out] each
    last: Pairwise  # [L, h, N, N] zero at first, so that all weigh the same
    offset: Pairwise  # [L, N, N]


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's latest model
    seen: PerClient  # [N] bool, has taken part
    network: Network
    opt_state: Annotated[OptState, Like("network")]


@dataclass(frozen=True)
class PFedLA(GraphMethod):
    r"""$\bar\theta_i^l = \sum_j \alpha_{ij}^l \theta_j^l$ with $\alpha_i^l = \mathrm{softmax}(h_i^l(v_i; \psi_i))$.

    After local training from $\bar\theta_i$ to $\theta_i$ the server descends along $(\partial \bar\theta_i /
    \partial(v_i, \psi_i))^\top (\bar\theta_i - \theta_i)$. (The paper prints the sign of ascent.)
    """

    embedding: Count = 100  # m, numbers in a client's embedding
    hidden: Count = 100  # h, width of the layers
    layers: Count = 3  # layers below the last
    optimiser: SGD | Adam | Optimiser = SGD(0.005)  # of the hypernetworks
    memory: Positive = 4.0  # GiB that networks, gradients and optimiser may take; more is refused
    by_layer: ClassVar[bool] = True
    weighs = "a hypernetwork learns the weights from how local training changes the mixtures, and compares no clients"

    def start(self, roster):
        count, parts, theta = len(roster), len(roster.layout.layers), roster.copies()
        widths = [self.embedding] + [self.hidden] * self.layers
        self._check_size(roster, widths)
        weights = tuple(
            roster.normal(f"pfedla.{at}", out * into).view(count, out, into) / (3 * into) ** 0.5
            for at, (into, out) in enumerate(pairwise(widths))
        )
        network = Network(
            roster.normal("pfedla.embedding", self.embedding),
            weights,
            tuple(theta.new_zeros(count, out) for out in widths[1:]),
            theta.new_zeros(parts, self.hidden, count, count),
            theta.new_zeros(parts, count, count),
        )
        nobody = torch.zeros(count, dtype=torch.bool, device=theta.device)
        return Server(theta, nobody, network, self.optimiser.init(tree_leaves(network)))

    def _check_size(self, roster, widths):
        count, parts = len(roster), len(roster.layout.layers)
        numbers = count * (widths[0] + sum((into + 1) * out for into, out in pairwise(widths)))
        numbers += parts * (self.hidden + 1) * count**2
        _, *kept = self.optimiser.init([roster.theta[:1]])
        gib = (2 + sum(map(len, kept))) * numbers * roster.theta.element_size() / 2**30
        if gib > self.memory:
            raise UsageError(
                f"pfedla: hypernetworks of {numbers:,} numbers for {count} clients, gradients and the state of the "
                f"optimiser would take {gib:.3g} GiB, more than memory={self.memory:g}; use a smaller hidden or raise "
                "method.memory"
            )

    def graph(self, roster, server, cohort):
        return self.weigh(server.seen, _rows(axes(server).network, server.network, cohort))

    def weigh(self, seen, network):
        """[L, K, N] weights by the networks of a cohort; who has never taken part, seen: [N], has none."""
        x = network.embedding
        for weight, bias in zip(network.weights, network.biases, strict=True):
            x = (torch.einsum("koi,ki->ko", weight, x) + bias).relu()
        scores = torch.einsum("lhkn,kh->lkn", network.last, x) + network.offset
        return scores.masked_fill(~active(seen), -torch.inf).softmax(-1)

    def slopes(self, change, theta, layout):
        """[L, K, N] the derivatives by the weights: of models theta: [N, d] with what training changed, [K, d]."""
        return -inner_by_layer(change, theta, layout)

    def aggregate(self, roster, server, cohort, uploads):
        sent = self.send(roster, server, cohort).theta
        slopes = self.slopes(uploads.theta - sent, server.theta, roster.layout)
        before = server.network, server.opt_state
        declared = axes(server).network, axes(server).opt_state
        network, opt_state = _rows(declared, before, cohort)
        pull_back = vjp(lambda network: self.weigh(server.seen, network), network)[1]
        values, structure = tree_flatten(network)
        values, opt_state = self.optimiser.step(values, tree_leaves(pull_back(slopes)[0]), opt_state)
        after = tree_unflatten(values, structure), opt_state
        theta, seen = put(server.theta, cohort, uploads.theta), server.seen.index_fill(0, cohort, True)
        return Server(theta, seen, *tree_map(lambda *part: _put(cohort, *part), declared, before, after))


def _rows(declared: Tree, tree: Tree, cohort: torch.Tensor) -> Tree:
    """The part of networks and optimiser that is about the cohort: [K]."""

    def pick(axis, table):
        return table if axis is Axis.SHARED else table.index_select(0 if axis is Axis.PER_CLIENT else -2, cohort)

    return tree_map(pick, declared, tree)


def _put(cohort, axis, table, rows):
    """The table with new rows of the cohort."""
    return rows if axis is Axis.SHARED else table.index_copy(0 if axis is Axis.PER_CLIENT else -2, cohort, rows)
