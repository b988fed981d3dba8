"""IFCA: one model a cluster, and each client trains the one that fits its examples best (Ghosh et al., 2020)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..core.method import Params
from ..core.seeding import fold, key, uniform
from ..core.trees import ModelOf, PerClient, Shared
from ..errors import UsageError
from .parts.centres import Centres


class Sent(NamedTuple):
    """What a client receives."""

    theta: Shared  # [C, d] the models of all clusters


class Upload(NamedTuple):
    """What a client returns."""

    theta: ModelOf[PerClient]  # [d] after local training
    cluster: PerClient  # [] int64 which model it was trained from


@dataclass(frozen=True)
class IFCA(Centres):
    r"""Client $i$ trains from $\theta_{c_i}$ with $c_i = \arg\min_c F_i(\theta_c)$, on all its training examples.

    The paper starts from random models, of which often one is best for nearly everybody and the others are never
    trained. Here clusters first come from the clients' updates.
    """

    weighs = "each client takes the cluster whose model fits its own examples best, by losses that it keeps to itself"
    begin: Literal["updates", "random"] = "updates"  # where clusters come from: updates, or models drawn at random

    def start(self, roster):
        first = super().start(roster)
        if self.begin == "updates":
            return first
        if self.clusters is None:
            raise UsageError("ifca: begin='random' needs clusters, the number of models that are drawn")
        return first._replace(theta=shuffled(roster, self.clusters), change=first.change[:, :0])

    def divides(self, server):
        return self.begin == "updates" and super().divides(server)

    def send(self, roster, server, cohort):
        return Sent(server.theta)

    def assign(self, roster, server, uploads):
        return uploads.cluster

    def diagnostics(self, roster, server, cohort, sent, uploads):
        at = roster.layout.trainable_on(cohort.device)
        moved = (uploads.theta - sent.theta[uploads.cluster])[:, at].norm(dim=1)
        label = server.label.to(moved.dtype)
        return {"update": roster.note(cohort, moved), "cluster": torch.where(label < 0, torch.nan, label)}

    def _best(self, client, theta):
        """[] int64 the model, of theta: [C, d], with the least loss on the training examples; of equal ones the first.

        With it the model itself, [d].
        """
        losses = torch.stack([client.loss(one, client.data) for one in theta])
        best = losses.nan_to_num(torch.inf, torch.inf).argmin()  # else a model without a loss would be the best
        return best, theta.index_select(0, best[None])[0]

    def train(self, client, state, received):
        cluster, theta = self._best(client, received.theta)
        theta = client.descend(theta)
        return Params(theta), Upload(theta, cluster)

    def personalise(self, client, state, received):
        return {"cluster": Params(self._best(client, received.theta)[1]), "own": state}


def shuffled(roster, count):
    """[count, d] models whose learned tensors hold the numbers of the initial model in an order of their own."""
    models = roster.theta.repeat(count, 1)
    for number, entry in enumerate(e for e in roster.layout.entries if e.trainable):
        start = key(roster.seed, "ifca", number, device=models.device)
        for c, model in enumerate(models):
            part = model[entry.at]
            part.copy_(part[uniform(fold(start, c), part.double()).argsort()])
    return models
