"""kNN-Per: FedAvg's answers mixed with those of the nearest of a client's own examples (Marfoq et al., 2022).

Differs: the kernel is that of the released code, exp(-d^2 / f) with f features, where the text has exp(-d).
"""

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import one_hot

from ..core.field_checks import Count, Positive, Share
from ..core.method import AveragedParams
from ..core.metrics import positive
from ..core.mixins import Predicts
from ..core.tasks import Classification
from ..core.trees import ModelOf, PerClient, Shared
from ..errors import UsageError
from .bases import Averaging
from .parts.remembering import Remembering

EQUAL = 32  # rounding errors of squared lengths, within which distances are the same
GRID = 11  # weights that are tried: 0, 0.1, ..., 1


class Sent(NamedTuple):
    """What a client receives."""

    theta: ModelOf[Shared]  # [d]
    most: Shared  # [] int64 examples of the largest client, the rows that every memory has


class Memory(NamedTuple):
    """A client's model: the shared one, and features and classes of the client's training examples."""

    theta: ModelOf[PerClient]  # [d]
    features: PerClient  # [M, f]
    classes: PerClient  # [M, C] the example's weight in the place of its class; zeros in rows that only fill up
    weight: PerClient  # [] lambda, of the neighbours' answer


@dataclass(frozen=True)
class KNNPer(Averaging, Predicts):
    r"""$\lambda_i\, k(y) + (1 - \lambda_i)\, \mathrm{softmax}(w(x))_y$, with $k(y)$ the share of class $y$ in the
    $e^{-d^2 / (s f)}$ of the nearest examples.

    $d$ are distances of the $f$ features that the shared model's head sees. Nothing of the memory leaves the client.
    A neighbour counts by its example weight.
    """

    neighbours: Count = 10  # how many of a client's training examples answer; a client with fewer uses all
    scale: Positive = 1.0  # s, beside the number of features
    weight: Share | None = None  # lambda; None: of 0, 0.1, ..., 1 what the client's validation examples prefer

    def start(self, roster):
        few = int((roster.sizes < self.neighbours).sum())
        if few:
            warnings.warn(
                f"knn-per: {few} of {len(roster)} clients have fewer training examples than neighbours="
                f"{self.neighbours}, so all of theirs are neighbours; set fewer",
                stacklevel=2,
            )
        return super().start(roster)

    def send(self, roster, server, cohort):
        return Sent(server.theta, roster.sizes.max())

    def train(self, client, state, received):
        return (), AveragedParams(client.descend(received.theta))

    def personalise(self, client, state, received):
        if not isinstance(client.task, Classification):
            raise UsageError("knn-per compares classes, and this data has numbers to predict; use method 'fedavg-ft'")
        whole_client, theta = client.for_whole_model, client.whole(received.theta)
        x, y, real = client.data
        z = whole_client.model.features(theta, x)
        rows, classes = int(received.most), one_hot(y, client.task.classes).to(z.dtype) * real[:, None]
        z = z * (real > 0)[:, None]
        z, classes = (torch.cat([t[:rows], t.new_zeros(max(0, rows - len(t)), t.shape[1])]) for t in (z, classes))
        memory = Memory(theta, z, classes, z.new_zeros(()) if self.weight is None else z.new_full((), self.weight))
        if self.weight is None:
            memory = memory._replace(weight=self._best(whole_client, memory))
        return {"mixed": memory, "shared": memory._replace(weight=torch.zeros_like(memory.weight))}

    def _best(self, client, memory):
        """[] the least weight with the most right answers on the client's validation examples; 0 if it has none."""
        x, y, real = client.examples("validation")
        weights = torch.linspace(0, 1, GRID, dtype=real.dtype, device=real.device)
        if not len(y):
            return weights[0]
        model, votes = self._answers(client.model, memory, x)
        mixed = torch.lerp(model, votes, weights[:, None, None])  # [11, B, C]
        right = ((mixed.argmax(-1) == y) * real).sum(1)  # [11]
        return torch.where(right == right.max(), weights, 1).min()

    def _answers(self, model, memory, x):
        """[B, C] probabilities of the shared model, and [B, C] of the neighbours."""
        z = model.features(memory.theta, x)
        return model.head(memory.theta, z).softmax(-1), self.vote(z, memory.features, memory.classes)

    def vote(self, z, features, classes):
        """[B, C] shares of classes among the neighbours of z: [B, f] in features: [M, f], as classes: [M, C] weigh.

        All that are as far as the last neighbour count, as rounding errors must not choose among them.
        """
        centre = features.mean(0)  # so that products lose no digits of distances
        z, features = z - centre, features - centre
        lengths = z.square().sum(1)[:, None] + features.square().sum(1)  # [B, M]
        weight = classes.sum(1)
        square = (lengths - 2 * z @ features.T).clamp(min=0).masked_fill(weight == 0, torch.inf)
        near = square.topk(min(self.neighbours, square.shape[1]), largest=False).values
        there = (square <= near[:, -1:] + EQUAL * torch.finfo(z.dtype).eps * lengths) & square.isfinite()
        gap = (near[:, :1] - torch.where(there, square, 0)) / (self.scale * z.shape[1])  # of the nearest 0: all finite
        kernel = torch.where(there, gap + weight.log(), -torch.inf).softmax(1)
        return kernel @ (classes / positive(weight)[:, None])

    def _mix(self, model, memory, x):
        """[B, C] logarithms of the mixed probabilities."""
        mixed = torch.lerp(*self._answers(model, memory, x), memory.weight)
        return mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log()

    def predict(self, client, personal, x):
        return self._mix(client.model, personal, x)

    def export(self, model, personal):
        return Remembering(self, model.export(personal.theta), model.head_name, personal).eval()
