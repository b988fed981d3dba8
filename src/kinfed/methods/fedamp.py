"""FedAMP: each client's model is drawn towards those that it resembles (Huang et al., 2021, Algorithm 1).

Differs: alpha stays, where the paper lets it shrink over rounds. The paper has no values for all data: alpha, sigma and
lambda are those that FedAGHN's tables give for FedAMP.
"""

import warnings
from abc import abstractmethod
from dataclasses import dataclass

import torch

from ..core.client import towards
from ..core.field_checks import CountOrZero, NonNegative, Positive
from ..core.method import Compared, Params
from ..core.mixins import Advises
from ..core.rows import put, take
from ..core.seeding import key
from ..ops.neighbours import Weights
from ..ops.similarity import gram
from ..ops.sketch import nearest, sketch_models
from .bases import GraphMethod
from .parts.pulls import check_pull

ALIKE = 1.05  # weights of which none is this many times another's tell nobody apart


@dataclass(frozen=True, kw_only=True)
class MessagePassing(GraphMethod, Advises):
    """What FedAMP and HeurFedAMP share: a cohort's models are mixed, and training is drawn to the mixtures."""

    neighbours: CountOrZero = 0  # how many others are mixed for a client, those nearest to it; 0: all, as in the paper

    @property
    @abstractmethod
    def strength(self):
        """Lambda / alpha, of the proximal term."""

    @abstractmethod
    def vectors(self, theta, layout):
        """[K, d] of which squared distances are taken, for models theta: [K, d]."""

    @abstractmethod
    def weights(self, apart, itself):
        """[K, M] rows summing to one, from squared distances apart: [K, M]; itself: [K, M] bool, its own."""

    @abstractmethod
    def doubt(self, apart, others):
        """Why weights of others: [P], at squared distances apart: [P], tell nobody apart; "" if they do."""

    def start(self, roster):
        name = type(self).__name__.lower()
        check_pull(name, roster.training.optimiser, self.strength, "the mixture", "lambda / alpha")
        return Params(roster.copies())

    def graph(self, roster, server, cohort):
        rows, near = self.attend(roster, server, cohort)
        near = cohort.expand(len(cohort), -1) if near is None else cohort[near]
        return Weights(rows, near).dense(len(roster))

    def send(self, roster, server, cohort):
        theta = take(server.theta, cohort)
        return Params(self.attend(roster, server, cohort).mix_freely(theta, roster.layout))

    def aggregate(self, roster, server, cohort, uploads):
        if roster.round == 0 and len(cohort) > 2:  # of two clients weights cannot tell anybody apart
            apart, itself, _ = self.compare(roster, uploads.theta)
            if doubt := self.doubt(apart[~itself], self.weights(apart, itself)[~itself]):
                warnings.warn(f"{type(self).__name__.lower()}: {doubt}", stacklevel=2)
        return Params(put(server.theta, cohort, uploads.theta))

    def train(self, client, state, received):
        penalty = towards(received.theta, self.strength) if self.strength else None
        theta = client.descend(state.theta, penalty=penalty)
        return Params(theta), Params(theta)

    def attend(self, roster, server, cohort):
        """The weights of the mixtures of a cohort's models."""

        def make():
            apart, itself, near = self.compare(roster, take(server.theta, cohort))
            return Weights(self.weights(apart, itself), near)

        return roster.memo.once("attention", (self, server.theta, cohort), make)

    def compare(self, roster, theta):
        """[K, M] squared distances of a cohort's models theta: [K, d], where they are a client's own, and whose."""
        vectors, layout = self.vectors(theta, roster.layout), roster.layout
        everyone = torch.arange(len(theta), device=theta.device)
        if not self.neighbours:
            return distances(vectors, layout).to(theta.dtype), everyone[:, None] == everyone, None
        draw = key(roster.seed, "fedamp.sketch", device=theta.device)
        sketch = sketch_models(vectors, draw, layout.trainable_on(theta.device))
        near, apart = nearest(vectors, sketch, everyone, self.neighbours, layout)
        return apart, everyone[:, None] == near, near


@dataclass(frozen=True)
class FedAMP(MessagePassing):
    r"""$u_i = \sum_j w_{ij} \theta_j$ with $w_{ij} = \alpha A'(\|\theta_i - \theta_j\|^2)$, the rest its own model's.

    $A(x) = 1 - e^{-x / \sigma}$. Each client trains on from its own model, on
    $F_i(\theta) + \frac{\lambda}{2 \alpha} \|\theta - u_i\|^2$. Only the clients of a cohort are mixed with each other.
    If the weights of others sum to more than one, a client's own is negative; running statistics then use the nearest
    weights of a mean.
    """

    alpha: NonNegative = 100.0  # length of the step towards the others
    sigma: Positive = 1e4  # squared distance over which attention fades: best near those of related clients' models
    pull: NonNegative = 1.0  # lambda: how strongly local training is drawn to the mixture, as pull / alpha

    remedy = (
        "lower the learning rate or pull / alpha, and keep every client's own weight positive: alpha up to "
        "sigma / (N - 1)"
    )

    @property
    def strength(self):
        return self.pull / self.alpha if self.alpha else 0.0

    def vectors(self, theta, layout):
        return theta

    def weights(self, apart, itself):
        rows = (self.alpha / self.sigma * torch.exp(-apart / self.sigma)).masked_fill(itself, 0)
        keeps = 1 - rows.sum(1)  # the client's own weight
        if (keeps < 0).any():
            warnings.warn(
                "fedamp: a client resembles so many others that its own weight is negative; method.alpha up to "
                f"sigma / (N - 1), of a sigma of {self.sigma:g} and N clients a round, keeps weights positive",
                stacklevel=2,
            )
        return torch.where(itself, keeps[:, None], rows)

    def doubt(self, apart, others):
        none = others.max() < 1e-3 * self.alpha / self.sigma
        if not self.alpha or not (none or others.max() < ALIKE * others.min()):
            return ""
        return (
            f"{'no other has weight' if none else 'all others weigh alike'}, as models' squared distances, of median "
            f"{float(apart.median()):.2g}, are far from a sigma of {self.sigma:g}; set method.sigma near them and "
            "method.alpha up to sigma / (N - 1), or use kin, which needs no scale"
        )

    def similarity(self, roster, server):
        return Compared("squared distance of models", distances(server.theta, roster.layout))


def distances(vectors, layout):
    """[K, K] float64 squared distances of vectors: [K, d], over trainable entries."""
    return gram(vectors[:, layer.trainable] for layer in layout.layers).distances
