"""What FedAMP and HeurFedAMP share: a cohort's models are mixed by distances, and training is drawn to the mixtures."""

import math
import warnings
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...core.client import towards
from ...core.field_checks import CountOrZero
from ...core.layout import Layout
from ...core.method import Params
from ...core.mixins import Advises
from ...core.rows import put, take
from ...relations import Distance, Everyone, Kernel, Nearest, Softmax, relate
from .graph_mixing import RelationMixing
from .pulls import check_pull

ALIKE = math.log(1.05)  # logarithms of weights that differ by less tell nobody apart


@dataclass(frozen=True, kw_only=True)
class MessagePassing(RelationMixing, Advises):
    """A cohort's models are mixed with each other alone, and count alike; each client trains on from its own."""

    neighbours: CountOrZero = 0  # how many others are listed, the nearest; a sample stands for the rest; 0: all

    @property
    @abstractmethod
    def weighing(self) -> Kernel | Softmax:
        """How weights follow from squared distances."""

    @property
    @abstractmethod
    def strength(self) -> float:
        """Lambda / alpha, of the proximal term."""

    @abstractmethod
    def describe_flatness(self, squares: Tensor) -> str:
        """Why weights by squared distances of others: [P] tell nobody apart, and what to set; "" if they do."""

    def place(self, theta: Tensor, layout: Layout) -> Tensor:
        """[K, d] of which distances are taken, for models theta: [K, d]."""
        return theta

    def start(self, roster):
        name = type(self).__name__.lower()
        check_pull(name, roster.training.optimiser, self.strength, "the mixture", "lambda / alpha")
        return Params(roster.copies())

    def mark_seen(self, server):
        return torch.ones_like(server.theta[:, 0], dtype=torch.bool)  # others may resemble the first model

    def relate(self, roster, server, cohort):
        part, theta = roster.part(cohort), take(server.theta, cohort)
        among = Nearest(self.neighbours) if self.neighbours else Everyone()
        placed, mass = self.place(theta, roster.layout), torch.ones_like(theta[:, 0])
        among_them = partial(take, placed)
        relation = relate(Distance(), self.weighing, among, part, among_them, mass, part.everyone)
        return relation._replace(weights=relation.weights._replace(senders=cohort))

    def similarity(self, roster, server):
        compared = super().similarity(roster, server)
        return compared._replace(what="squared distance of models", values=-compared.values)

    def aggregate(self, roster, server, cohort, uploads):
        after = Params(put(server.theta, cohort, uploads.theta))
        if roster.round == 0 and len(cohort) > 2:  # of two clients weights cannot tell anybody apart
            (_, near, *_), _, (similarity,), _ = self.relate(roster, after, cohort)
            places = torch.arange(len(cohort), device=cohort.device)
            others = (places if near is None else near) != places[:, None]
            if reason := self.describe_flatness(-similarity[others]):
                warnings.warn(f"{type(self).__name__.lower()}: {reason}", stacklevel=2)
        return after

    def train(self, client, state, received):
        theta = client.descend(state.theta, penalty=towards(received.theta, self.strength) if self.strength else None)
        return Params(theta), Params(theta)
