"""Graphs that are learned from how well their mixtures do: their base class, and graphs without a network."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from ...core.method import Compared, Roster
from ...core.optimiser import SGD, OptState
from ...core.settings import Settings
from ...core.trees import Pairwise, Tree
from ...ops.sparsify import project_simplex
from .feedback import Mixtures


class Lesson(NamedTuple):
    """What a graph is told about the last mixtures: of M models, for J clients."""

    gradient: Tensor  # [J, M] G, the derivative of a client's loss on its feedback by the weights
    rows: Tensor  # [J] int64 which of the M models is the client's own
    mix: Mixtures
    change: Tensor  # [J, d] by local training from the mixture; [J, 0] unless the graph or the channel asks for it


class LearnedGraph(Settings, ABC):
    """A graph of the clients of a cohort, made by a network: a NamedTuple of tensors that an optimiser trains."""

    @property
    def sees_updates(self) -> bool:
        """Whether it reads the table `change` of the server."""
        return False

    @property
    def learns_from_updates(self) -> bool:
        """Whether it is told what local training changed, too."""
        return False

    @abstractmethod
    def draw(self, roster: Roster) -> Any:
        """The first network."""

    @abstractmethod
    def weights(self, network: Any, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        """[K, K] the weights of the mixture for each of the cohort: [K]; rows sum to one."""

    def compared(self, network: Any, roster: Roster, server: Tree) -> Compared | None:
        """What weights are made of; None if the network has nothing of it."""
        return None

    def settle(self, network: Any) -> Any:
        """The network after a step of its optimiser, projected if need be."""
        return network

    def learn(self, roster: Roster, server: Tree, lesson: Lesson, lr: float) -> tuple[Any, OptState]:
        """The network and its optimiser after a round, here after a step against G."""

        def rows(network: Any) -> Tensor:
            return self.weights(network, roster, server, lesson.mix.mixed)[lesson.rows]

        pull_back = vjp(rows, server.network)[1]
        stepped, opt_state = SGD(lr).step(server.network, pull_back(lesson.gradient)[0], server.opt_state)
        return self.settle(type(server.network)(*stepped)), opt_state

    def add_clients(self, roster: Roster, before: Any, wide: Any, newcomers: Tensor) -> Any:
        """The network once newcomers: [M] are in the roster; `wide` is the one before, with their first rows."""
        return wide


class Pairs(NamedTuple):
    """A number for each pair of clients; it knows nothing about clients that it has not seen."""

    weights: Pairwise  # [N, N]


@dataclass(frozen=True)
class Projected(LearnedGraph):
    """No attention: the weights themselves are learned, and after each step projected onto the simplex."""

    def draw(self, roster: Roster) -> Pairs:
        return Pairs(roster.theta.new_full((len(roster),) * 2, 1 / len(roster)))

    def weights(self, network: Pairs, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        part = network.weights[cohort][:, cohort]
        total = part.sum(1, keepdim=True)
        alone = torch.eye(len(cohort), dtype=part.dtype, device=part.device)
        return torch.where(total > 0, part / total.clamp(min=1e-12), alone)

    def compared(self, network: Pairs, roster: Roster, server: Tree) -> Compared:
        return Compared("weight learned from losses", network.weights)

    def settle(self, network: Pairs) -> Pairs:
        return Pairs(project_simplex(network.weights))

    def add_clients(self, roster: Roster, before: Pairs, wide: Pairs, newcomers: Tensor) -> Pairs:
        known, kept = roster.others(newcomers), 1 - len(newcomers) / len(roster)  # so that rows sum to what they did
        return Pairs(wide.weights.index_put((known[:, None], known), kept * before.weights))


@dataclass(frozen=True)
class Logits(LearnedGraph):
    """No attention: the logits of the weights are learned."""

    def draw(self, roster: Roster) -> Pairs:
        return Pairs(roster.theta.new_zeros(len(roster), len(roster)))

    def weights(self, network: Pairs, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        return network.weights[cohort][:, cohort].softmax(1)

    def compared(self, network: Pairs, roster: Roster, server: Tree) -> Compared:
        return Compared("logit learned from losses", network.weights)
