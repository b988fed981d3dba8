"""FedAMP: each client's model is drawn towards those that it resembles (Huang et al., 2021, Algorithm 1)."""

from dataclasses import dataclass

import torch

from ..core.method import Compared, Params
from ..core.seeding import key
from ..core.settings import CountOrZero
from ..core.tables import put, take
from ..ops.neighbours import Weights
from ..ops.similarity import gram
from ..ops.sketch import nearest, sketch_models
from .bases import GraphMethod
from .parts.heuristic_attention import Heuristic
from .parts.model_attention import Cosine, Gaussian, called


@dataclass(frozen=True)
class FedAMP(GraphMethod):
    r"""$u_i = \sum_j w_{ij} \theta_j$, with more weight for models that are alike; training is drawn towards $u_i$.

    The paper's weights and proximal term are `Gaussian()`; ours need not be tuned to distances between models or to
    the learning rate. Only the clients of a cohort are mixed with each other. If an own weight is negative, running
    statistics use the nearest weights of a mean.
    """

    attention: Cosine | Gaussian | Heuristic = Cosine()  # the weights of a mixture, and how training is drawn to it
    neighbours: CountOrZero = 0  # how many others are mixed for a client, those nearest to it; 0: all

    @property
    def remedy(self):
        return self.attention.remedy

    def start(self, roster):
        self.attention.check(roster.training.optimiser)
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
        theta = self.attention.train(client, state.theta, received.theta)
        return Params(theta), Params(theta)

    def compared(self, roster, server):
        vectors, layout = self.attention.compared(roster, server.theta)
        apart = gram(vectors[:, layer.trainable] for layer in layout.layers).distances
        if isinstance(self.attention, Gaussian):
            return Compared("squared distance of models", apart)
        return Compared(called(self.attention.compare), 1 - apart / 2)  # of directions, which have length 1

    def _attend(self, roster, theta):
        """The weights of the mixtures of a cohort whose models are theta: [K, d]."""
        compared, layout = self.attention.compared(roster, theta)
        near, everyone = None, torch.arange(len(theta), device=theta.device)
        if self.neighbours:
            draw = key(roster.seed, "fedamp.sketch", device=theta.device)
            sketch = sketch_models(compared, draw, layout.trainable_on(theta.device))
            near, apart = nearest(compared, sketch, everyone, self.neighbours, layout)
        else:
            apart = gram(compared[:, layer.trainable] for layer in layout.layers).distances.to(theta.dtype)
        itself = everyone[:, None] == (everyone if near is None else near)
        return Weights(self.attention.weights(apart, itself, len(roster)), near)
