"""FedAMP: each client's model is pulled towards those that it resembles (Huang et al., 2021, Algorithm 1)."""

import warnings
from dataclasses import dataclass

import torch

from ..core.client import towards
from ..core.method import Params
from ..core.optimiser import SGD
from ..core.seeding import key
from ..core.settings import CountOrZero, NonNegative, Positive
from ..core.tables import put, take
from ..errors import UsageError
from ..ops.neighbours import Weights
from ..ops.similarity import gram
from ..ops.sketch import nearest, sketch_models
from .bases import GraphMethod


@dataclass(frozen=True)
class FedAMP(GraphMethod):
    r"""$w_{ij} = \frac{\alpha}{\sigma} e^{-\|\theta_i - \theta_j\|^2 / \sigma}$, $w_{ii} = 1 - \sum_{j \ne i} w_{ij}$.

    Each client minimises $F_i(\theta) + \frac{\lambda}{2\alpha} \|\theta - \sum_j w_{ij} \theta_j\|^2$. Only the
    clients of a cohort are mixed with each other. If the weights of others sum to more than one, a client's own weight
    is negative, and running statistics use the nearest weights of a mean.
    """

    alpha: NonNegative = 1.0  # length of the step towards the others
    sigma: Positive = 20.0  # squared distance over which attention fades
    pull: NonNegative = 0.1  # lambda in the paper: how strongly local training is pulled to the mixture
    neighbours: CountOrZero = 0  # how many others are mixed for a client, those nearest to it; 0: all

    @property
    def remedy(self):
        return (
            "lower the learning rate or pull / alpha, and keep every client's own weight positive: alpha up to "
            "sigma / (N - 1)"
        )

    def start(self, roster):
        optimiser = roster.training.optimiser
        if isinstance(optimiser, SGD) and self.alpha:
            step, most = optimiser.lr * self.pull / self.alpha, 2 * (1 + optimiser.momentum)
            if step >= most:  # on the pull alone, whatever the loss
                raise UsageError(
                    f"fedamp: lr * pull / alpha is {step:.3g}, but from {most:.3g} on each local step moves the model "
                    "farther from the mixture; lower method.pull or the learning rate, or raise method.alpha"
                )
        return Params(roster.copies())

    def graph(self, roster, server, cohort):
        rows, near = self._attend(roster, take(server.theta, cohort))
        near = cohort.expand(len(cohort), -1) if near is None else cohort[near]
        return Weights(rows, near).dense(len(roster))

    def send(self, roster, server, cohort):
        theta = take(server.theta, cohort)
        return Params(self._attend(roster, theta).mix_freely(theta, roster.layout))

    def aggregate(self, roster, server, cohort, uploads):
        return Params(put(server.theta, cohort, uploads.theta))

    def train(self, client, state, received):
        penalty = towards(received.theta, self.pull / self.alpha) if self.alpha else None
        theta = client.descend(state.theta, penalty=penalty)
        return Params(theta), Params(theta)

    def _attend(self, roster, theta):
        """The weights of the mixtures of a cohort whose models are theta: [K, d]."""
        near, everyone = None, torch.arange(len(theta), device=theta.device)
        if self.neighbours:
            draw = key(roster.seed, "fedamp.sketch", device=theta.device)
            sketch = sketch_models(theta, draw, roster.layout.trainable_on(theta.device))
            near, apart = nearest(theta, sketch, everyone, self.neighbours, roster.layout)
        else:
            apart = gram(theta[:, layer.trainable] for layer in roster.layout.layers).distances.to(theta.dtype)
        itself = everyone[:, None] == (everyone if near is None else near)
        rows = (self.alpha / self.sigma * torch.exp(-apart / self.sigma)).masked_fill(itself, 0)
        keeps = 1 - rows.sum(1)  # the client's own weight
        if (keeps < 0).any():
            warnings.warn(
                f"fedamp: a client resembles so many others that its own weight is {float(keeps.min()):.2g}; "
                f"alpha up to sigma / (N - 1) = {self.sigma / (len(roster) - 1):.3g} keeps weights positive",
                stacklevel=2,
            )
        return Weights(torch.where(itself, keeps[:, None], rows), near)
