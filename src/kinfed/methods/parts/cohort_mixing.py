"""The server half of a method that mixes the last models of a round's clients with each other."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ...core.graph import Origin
from ...core.method import Method, Params, Roster
from ...core.mixins import Admits, Explains
from ...core.rows import put, take
from ...core.trees import Tree, replace_rows
from ...ops.mixing import mix_freely, weighted_mean


class CohortMixing(Method, Explains, Admits):
    """A method whose clients of a round are mixed with each other, by weights that `graph` gives and `learn` improves.

    The server's state has `uploads: [N, d]`, the models as last trained; `theta: [N, d]`, as last mixed, from which
    clients start; `present: [N]`, who was mixed last, and `seen: [N]`, who has taken part. Other clients than the
    cohort keep their models; one that has never taken part starts from the mean.
    """

    origin: ClassVar[Origin] = "learned"
    mixes: ClassVar[str] = "uploads"

    @abstractmethod
    def graph(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        """[K, K] the weights of the mixture for each of the cohort; rows sum to one."""

    @abstractmethod
    def learn(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        """The server once it knows how the last mixtures did, from the cohort: [K] that sent uploads."""

    def send(self, roster, server, cohort):
        return Params(begin(server, cohort))

    def aggregate(self, roster, server, cohort, uploads):
        return self.mix(roster, server, cohort, uploads, cohort)

    def mix(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree, heard: Tensor) -> Tree:
        """The uploads of the cohort: [K] are kept, and the models of heard: [M] mixed anew."""
        server = self.learn(roster, server, cohort, uploads)._replace(
            uploads=put(server.uploads, cohort, uploads.theta),
            present=torch.zeros_like(server.present).index_fill(0, heard, True),
            seen=server.seen.index_fill(0, cohort, True),
        )
        mixed = mix_freely(self.graph(roster, server, heard), take(server.uploads, heard), roster.layout)
        return server._replace(theta=put(server.theta, heard, mixed))

    def join(self, roster, server, newcomers, uploads):
        """A newcomer's model is mixed with the last ones of all who have taken part."""
        heard = server.seen.index_fill(0, newcomers, True).nonzero().squeeze(1)
        after = self.mix(roster, server._replace(present=server.seen), newcomers, uploads, heard)
        return replace_rows(server, newcomers, after)

    def relation(self, roster, server, cohort):
        weights = self.graph(roster, server, cohort)
        rows = torch.eye(len(roster), dtype=weights.dtype, device=weights.device)
        if server.seen.any():
            rows[~server.seen] = server.seen.to(rows) / server.seen.sum()
        return put(rows, cohort, torch.zeros_like(rows[cohort]).index_copy(1, cohort, weights))

    def init_client(self, client):
        return Params(client.model.theta)

    def personalise(self, client, state, received):
        return {"mixed": Params(received.theta), "own": state}


def begin(server: Tree, cohort: Tensor) -> Tensor:
    """[K, d] the models that the cohort starts from: the mean of all for those who have never taken part."""
    theta, new = take(server.theta, cohort), ~server.seen[cohort]
    both = new.any() and server.seen.any()
    return torch.where(new[:, None], weighted_mean(server.theta, server.seen), theta) if both else theta
