"""Weights by which a client mixes numbers of its own model with those that it received, each with its own."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.client import Client
from ...core.method import Params
from ...core.trees import ModelOf, PerClient
from ..bases import Averaging


class Mixing(NamedTuple):
    """A client's private state."""

    theta: ModelOf[PerClient]  # [d] its model after local training
    weight: PerClient  # [m] in [0, 1]: of what is received, for each number that is mixed
    started: PerClient  # [] bool, has trained before; until then it takes what it receives


class LearnedMixture(Averaging):
    """Averaging, where clients begin from a mixture of their own model and the shared one that lowers their loss."""

    rate: float  # learning rate of the weights; 0: they stay 1
    share: float = 1.0  # of the training batches that a pass uses to learn them: the first ones of a shuffled pass
    mix_epochs: int  # such passes in a round

    @abstractmethod
    def where(self, client: Client) -> Tensor:
        """[m] where the numbers that are mixed lie in the part of the model that travels."""

    def init_client(self, client):
        theta = client.model.theta
        started = torch.zeros((), dtype=torch.bool, device=theta.device)
        return Mixing(theta, torch.ones_like(theta[self.where(client)]), started)

    def mix(self, client: Client, state: Mixing, theta: Tensor) -> tuple[Tensor, Tensor]:
        r"""The weights: [m] in [0, 1], and the mixture: [d] with what was received, theta: [d].

        Weights descend on the loss of $\hat\theta = \theta_i + W \odot (\theta - \theta_i)$.
        Until the client has trained the mixture is what it received.
        """
        at, weight = self.where(client), state.weight
        way, steps = (theta - state.theta)[at], client.training.count_steps(client.size, epochs=1)
        used = (self.share * steps).ceil()
        for t, batch in enumerate(client.batches(epochs=self.mix_epochs) if self.rate else ()):
            grad = client.gradient(mix_at(state, weight, theta, at), batch)[at]
            moved = (weight - self.rate * grad * way).clamp(0, 1)
            weight = batch.keep(weight, torch.where(state.started & (t % steps < used), moved, weight))
        return weight, mix_at(state, weight, theta, at)

    def personalise(self, client, state, received):
        return {"mixed": Params(self.mix(client, state, received.theta)[1]), "own": Params(state.theta)}


def mix_at(state: Mixing, weight: Tensor, theta: Tensor, at: Tensor) -> Tensor:
    """[d] what was received, theta: [d], with the client's mixture at: [m]; until it has trained, as it came."""
    start = theta.index_copy(0, at, torch.lerp(state.theta[at], theta[at], weight))
    return torch.where(state.started, start, theta)
