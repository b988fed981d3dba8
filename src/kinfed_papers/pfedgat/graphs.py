"""pFedGAT without attention, as in Table 4 of its paper; and kinfed's attention with the paper's form of it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kinfed.core.method import Compared, Roster
from kinfed.core.trees import Pairwise, Tree
from kinfed.methods.attention import Attention, Dynamic as Dynamic  # which tables name here, with its like
from kinfed.methods.pfedgat import PFedGAT, Server
from kinfed.ops.sparsify import project_simplex


class Pairs(NamedTuple):
    """A number for each pair of clients; it knows nothing about clients that it has not seen."""

    weights: Pairwise  # [N, N]


@dataclass(frozen=True)
class Projected(PFedGAT):
    """The weights themselves are learned, and after each step projected onto the simplex: "without GAT"."""

    def draw(self, roster: Roster) -> Pairs:
        return Pairs(roster.theta.new_full((len(roster),) * 2, 1 / len(roster)))

    def weights(self, network: Pairs, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        part = network.weights[cohort][:, cohort]
        total = part.sum(1, keepdim=True)
        alone = torch.eye(len(cohort), dtype=part.dtype, device=part.device)
        return torch.where(total > 0, part / total.clamp(min=1e-12), alone)

    def learn(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Server:
        after: Server = super().learn(roster, server, cohort, uploads)
        if after.network is server.network:
            return after
        return after._replace(network=Pairs(project_simplex(after.network.weights)))

    def similarity(self, roster: Roster, server: Tree) -> Compared:
        return Compared("weight learned from losses", server.network.weights)

    def add_clients(self, roster: Roster, server: Tree, newcomers: Tensor) -> Server:
        wide: Server = super().add_clients(roster, server, newcomers)
        members = roster.others(newcomers)
        kept = 1 - len(newcomers) / len(roster)  # so that rows sum to what they did
        weights = wide.network.weights.index_put((members[:, None], members), kept * server.network.weights)
        return wide._replace(network=Pairs(weights))


@dataclass(frozen=True)
class Logits(PFedGAT):
    """The logits of the weights are learned."""

    def draw(self, roster: Roster) -> Pairs:
        return Pairs(roster.theta.new_zeros(len(roster), len(roster)))

    def weights(self, network: Pairs, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        return network.weights[cohort][:, cohort].softmax(1)

    def similarity(self, roster: Roster, server: Tree) -> Compared:
        return Compared("logit learned from losses", server.network.weights)


@dataclass(frozen=True)
class Static(Attention):
    """`attention` with the form of Equation 5 in place of a dynamic one, and all else the same."""

    projections = PFedGAT.projections
    network = PFedGAT.network
    scores = PFedGAT.scores
