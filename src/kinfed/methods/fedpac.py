"""FedPAC: features drawn to shared centroids of classes, and heads combined where they help (Xu et al., 2023).

Differs: centroids are means over examples; the head's rate and its one epoch are those of the released code.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..core.field_checks import CountOrZero, NonNegative, Positive, Share
from ..core.method import Method, Params
from ..core.metrics import positive
from ..core.mixins import Advises, Explains
from ..core.rows import put
from ..core.trees import ModelOf, Pairwise, PerClient, Shared
from ..errors import UsageError
from ..ops.mixing import weighted_mean
from ..ops.quadratic import smallest_mixture
from .parts.classes import members, moments


class Server(NamedTuple):
    """The server's state."""

    theta: Shared  # [d] the mean of the clients' models
    head: PerClient  # [N, m] each client's combined head
    alpha: Pairwise  # [N, N] whose heads it combines; a row of zeros until it has taken part
    centroid: Shared  # [C, f] the mean features of each class
    seen: Shared  # [C] bool, has had examples of the class


class Sent(NamedTuple):
    """What a client receives."""

    theta: ModelOf[PerClient]  # [d] the mean base under the client's combined head; the mean head until it has one
    centroid: Shared  # [C, f]
    seen: Shared  # [C] bool


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    moment: PerClient  # [C, f] of features of the base that was received: see `Moments`
    variance: PerClient  # [] of these
    sizes: PerClient  # [C] training examples of each class
    centroid: PerClient  # [C, f] their mean features, of the base that was trained


@dataclass(frozen=True)
class FedPAC(Method, Explains, Advises):
    r"""Client $i$ is sent $\sum_j \alpha_{ij} h_j$, $\alpha_i = \arg\min \alpha^\top (\mathrm{diag}(V) + G_i) \alpha$.

    $V$ are variances and $G_i$ inner products of differences of the clients' moments of features. A client trains the
    head, then the base with $\lambda$ times the mean squared distance of features from their class's centroid.
    """

    pull: NonNegative = 1.0  # lambda: of features to the centroids of their classes, from the second round on
    head_epochs: CountOrZero = 1  # of the head, in a round
    base_epochs: CountOrZero | None = None  # of the base; None: as many as in the training settings
    head_lr: Positive | None = 0.1  # learning rate of the head; None: as in the training settings
    least: Share = 0.001  # weights of heads below this are taken as zero
    class_means = True  # means of a class's features are uploaded
    origin = "learned"
    remedy = "lower the learning rate, method.head_lr or method.pull"
    weighs = "whose heads are combined follows from moments of the clients' features, which the server does not keep"

    def start(self, roster):
        layout = roster.layout
        heads = [e.shape for e in layout.entries if e.name in layout.head and len(e.shape) == 2]
        if len(heads) != 1 or not layout.base:
            raise UsageError(
                "fedpac combines heads over a common base, so it needs a linear head after other layers, neither of "
                "them personal or frozen; if the head is another layer, name it: kinfed.Model(module, head='NAME')"
            )
        table = torch.zeros(heads[0]).to(roster.theta)  # [C, f]
        head = roster.theta[layout.index(layout.head, table.device)].repeat(len(roster), 1)
        return Server(roster.theta, head, table.new_zeros(len(roster), len(roster)), table, table[:, 0] > 0)

    def send(self, roster, server, cohort):
        at = roster.layout.index(roster.layout.head, cohort.device)
        head = torch.where(server.alpha[cohort].any(1, keepdim=True), server.head[cohort], server.theta[at])
        return Sent(server.theta.repeat(len(cohort), 1).index_copy(1, at, head), server.centroid, server.seen)

    def aggregate(self, roster, server, cohort, uploads):
        at = roster.layout.index(roster.layout.head, cohort.device)
        alpha = self.combine(uploads.moment, uploads.variance)
        count = uploads.sizes.sum(0)[:, None]  # [C, 1]
        centroid = (uploads.sizes[..., None] * uploads.centroid).sum(0) / positive(count)
        rows = alpha.new_zeros(len(cohort), len(roster)).index_copy(1, cohort, alpha)
        return Server(
            weighted_mean(uploads.theta, roster.weights[cohort]),
            put(server.head, cohort, alpha @ uploads.theta[:, at]),
            put(server.alpha, cohort, rows),
            torch.where(count > 0, centroid, server.centroid),
            server.seen | (count[:, 0] > 0),
        )

    def combine(self, moment, variance):
        """[K, K] rows alpha from moments: [K, C, f] and variances: [K]."""
        exact, spread = moment.flatten(1).double(), torch.diag(variance.double().clamp(min=0))
        kept = torch.stack([smallest_mixture(spread + (i - exact) @ (i - exact).T) for i in exact]).to(moment)
        kept = kept * (kept >= min(self.least, 1 / len(kept)))
        return kept / kept.sum(1, keepdim=True)

    def relation(self, roster, server, cohort):
        """One graph a layer: the mean of the cohort, and for the head alpha."""
        weights = roster.weights[cohort].to(server.alpha.dtype)
        row = weights.new_zeros(len(roster)).index_copy(0, cohort, weights / weights.sum())
        base, head = row.expand(len(roster), -1), torch.where(server.alpha.any(1, keepdim=True), server.alpha, row)
        heads = {name.rpartition(".")[0] for name in roster.layout.head}
        return torch.stack([head if layer.name in heads else base for layer in roster.layout.layers])

    def train(self, client, state, received):
        layout, chosen = client.for_whole_model.model.layout, members(client, "fedpac")  # [n, C]
        before = moments(chosen, client.model.features(received.theta, client.data.x))
        goal = torch.where(received.seen[:, None], received.centroid, before.mean)
        pull = self.pull if client.round else 0.0

        def objective(outputs, batch, features):
            distance = (features() - goal[batch.y]).square().mean(1)
            return client.losses(outputs, batch, None) + pull * distance

        theta = received.theta
        if self.head_epochs:
            optimiser = replace(client.training.optimiser, lr=self.head_lr) if self.head_lr else None
            theta = client.descend(theta, only=layout.head, epochs=self.head_epochs, optimiser=optimiser)
        if self.base_epochs != 0:
            theta = client.descend(theta, only=layout.base, epochs=self.base_epochs, objective=objective)
        after = moments(chosen, client.model.features(theta, client.data.x))
        return Params(theta), Upload(theta, before.moment, before.variance, before.sizes, after.mean)

    def init_client(self, client):
        return Params(client.model.theta)

    def personalise(self, client, state, received):
        return {"combined": Params(received.theta), "own": state}
