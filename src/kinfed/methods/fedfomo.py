"""FedFomo: clients weigh each other's models by what these do to their own held-out loss (Zhang et al., 2021).

Differs: each place of what a client is sent is filled by chance with a constant probability, which the released code
lowers from round to round; in the sums of weights by which others are chosen one below 0 counts as -1 at least.
A client whom no model helps keeps its newest own model, trained in this round.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..core.field_checks import Count, Share
from ..core.method import Compared, Method, Params
from ..core.mixins import Explains
from ..core.rows import put, take
from ..core.seeding import fold, key
from ..core.trees import ModelOf, Pairwise, PerClient


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's latest model
    seen: PerClient  # [N] bool, has taken part
    liking: Pairwise  # [N, N] the sum of the weights that each client gave to each other's models
    weight: Pairwise  # [N, N] the weights that it gave them last; the rest to one is its own


class Sent(NamedTuple):
    """What a client receives."""

    models: PerClient  # [M, d] models of others
    there: PerClient  # [M] bool; where there are too few others, its own model fills up


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    weight: PerClient  # [M] of the models that it was sent; below 0, to -1, if one would have raised its loss


class State(NamedTuple):
    """A client's private state."""

    theta: ModelOf[PerClient]  # [d] its latest model
    old: PerClient  # [d] that from which it was trained


@dataclass(frozen=True)
class FedFomo(Method, Explains):
    r"""$w_{ij} \propto \max\bigl(0, \frac{L_i(\theta_i^{old}) - L_i(\theta_j)}{\|\theta_j - \theta_i^{old}\|}\bigr)$,
    over the models $j$ that client $i$ is sent and its own.

    $L_i$ is the loss on held-out examples, $\theta_i^{old}$ the model before the client's last local training. The next
    one starts from the mean of models by these weights. A client is sent the models that have helped it most, and
    others; one that would have raised its loss comes after those that it has not tried.
    """

    models: Count = 5  # M: models of others that a client is sent
    explore: Share = 0.3  # epsilon: with what probability each of these is drawn at random
    feedback: Literal["held-out", "validation", "train", "test"] = "held-out"  # the held-out examples
    origin = "learned"

    def start(self, roster):
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=roster.theta.device)
        table = roster.theta.new_zeros(len(roster), len(roster))
        return Server(roster.copies(), nobody, table, table.clone())

    def choose_models(self, roster, server, cohort):
        """[K, M] the clients whose models each one of the cohort is sent; itself where there are no others."""
        count = min(self.models, len(roster) - 1)
        start = fold(key(roster.seed, "fedfomo", roster.round, device=cohort.device), roster.tags[cohort])
        luck = (fold(start[:, None], roster.tags) >> 12).to(torch.float64) / 2**52  # [K, N] from -0.5 to 0.5
        luck = luck - 1.0 * ~server.seen  # those who have taken part first
        luck = luck.masked_fill(cohort[:, None] == roster.everyone, -torch.inf)
        best = server.liking[cohort].double() + 1e-9 * luck  # luck decides a draw
        places = [cohort.new_zeros(len(cohort), 0)]
        for place in range(count):
            by_chance = (fold(start, -1 - place) >> 12).to(torch.float64) / 2**52 + 0.5 < self.explore  # [K]
            other = torch.where(by_chance[:, None], luck, best).argmax(1, keepdim=True)
            best, luck = (table.scatter(1, other, -torch.inf) for table in (best, luck))
            places.append(other)
        others = torch.cat(places, 1)
        others = torch.where(server.seen[others], others, cohort[:, None])
        return torch.cat([others, cohort[:, None].expand(-1, self.models - count)], 1)

    def send(self, roster, server, cohort):
        chosen = self.choose_models(roster, server, cohort)
        return Sent(server.theta[chosen], chosen != cohort[:, None])

    def aggregate(self, roster, server, cohort, uploads):
        chosen = self.choose_models(roster, server, cohort)
        given = torch.zeros_like(server.liking[cohort]).scatter(1, chosen, uploads.weight)
        return Server(
            put(server.theta, cohort, uploads.theta),
            server.seen.index_fill(0, cohort, True),
            put(server.liking, cohort, take(server.liking, cohort) + given),
            put(server.weight, cohort, given.clamp(min=0)),
        )

    def relation(self, roster, server, cohort):
        return server.weight + torch.diag(1 - server.weight.sum(1))

    def similarity(self, roster, server):
        given = server.liking.clone().fill_diagonal_(torch.nan)
        return Compared("sum of weights given over rounds", given)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        return {"own weight": 1 - server.weight.sum(1)}

    def init_client(self, client):
        return State(client.model.theta, client.model.theta)

    def mix(self, client, state, received):
        """[M] weights of the models that were sent, and the mean by the positive ones and the own model's, [d]."""
        learned, before = client.model.layout.trainable_on(state.theta.device), client.loss(state.old, client.held_out)

        def gain(theta):
            far = (learned * (theta - state.old)).norm()
            return torch.where(far > 0, (before - client.loss(theta, client.held_out)) / far, 0.0)

        gains = [
            torch.where(there, gain(theta), 0.0) for theta, there in zip(received.models, received.there, strict=True)
        ]
        # A loss that is not finite is the worst there is, and must not reach the sums.
        gains = torch.stack([gain(state.theta), *gains]).nan_to_num(-1e30, 1e30, -1e30)
        total = gains.clamp(min=0).sum()
        scale = torch.where(total > 0, total, gains.abs().sum()).clamp(min=torch.finfo(gains.dtype).tiny)
        weight = (gains / scale).clamp(min=-1)[1:]
        used = weight.clamp(min=0)
        return weight, (1 - used.sum()) * state.theta + used @ received.models

    def train(self, client, state, received):
        weight, start = self.mix(client, state, received)
        theta = client.descend(start)
        return State(theta, start), Upload(theta, weight)

    def personalise(self, client, state, received):
        return {"mixed": Params(self.mix(client, state, received)[1]), "own": Params(state.theta)}
