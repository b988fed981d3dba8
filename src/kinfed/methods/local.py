"""Local: every client trains alone; the baseline of all personalisation.

Differs: of no paper; it trains for as many rounds as the others, where some papers train until nothing improves.
"""

from dataclasses import dataclass

import torch

from ..core.method import Method, Params
from ..core.mixins import Admits, Explains


@dataclass(frozen=True)
class Local(Method, Explains, Admits):
    r"""$\theta_i \leftarrow$ local training of $\theta_i$ on client $i$'s examples, as long as the others train."""

    weighs = "every client trains alone, so each learns from itself only"
    refuses = "every client trains alone, so there is nothing that a newcomer could be given"

    def send(self, roster, server, cohort):
        return ()

    def aggregate(self, roster, server, cohort, uploads):
        return ()

    def relation(self, roster, server, cohort):
        return torch.eye(len(roster), device=roster.theta.device)

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        return Params(client.descend(state.theta)), ()

    def personalise(self, client, state, received):
        return {"own": state}
