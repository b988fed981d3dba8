"""The graph that SFL's released code learns, as it does: it links clients whose models are far apart."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from kinfed.core.method import Roster
from kinfed.core.optimiser import SGD
from kinfed.methods.sfl import Server, Similarity
from kinfed.ops.sparsify import largest, to_rows

WIDTH, STEPS = 40, 10  # of the node tables and layers; of the optimiser in a round
OPTIMISER = SGD(0.01, weight_decay=1e-4)


@dataclass(frozen=True)
class Released(Similarity):
    """Fitted to the matrix of distances, anew in every round, and blended with the graph that training started from.

    A learned link goes one way, none leads to oneself, and a row may be empty. Unlike there, rows are brought to sum
    to one, models are compared as uploaded, and the graph is used from the next round on.
    """

    def learn(self, roster: Roster, server: Server, newcomer: Tensor, pull: float) -> Tensor:
        rate = self.beta if roster.graph is not None else 1.0
        learned = to_rows(self.find(roster, server, pull))
        new = torch.lerp(to_rows(self.start(roster)), learned, torch.full_like(learned[:, :1], rate))
        return torch.where(server.seen[:, None], new, server.links)

    def find(self, roster: Roster, server: Server, pull: float) -> Tensor:
        distance, draw = self.distances(roster, server).sqrt(), roster.generator("sfl")
        tables = [roster.normal(f"sfl.{side}.{roster.round}", WIDTH) for side in ("left", "right")]
        maps = [((2 * torch.rand(WIDTH + 1, WIDTH, generator=draw) - 1) / WIDTH**0.5).to(distance) for _ in tables]
        goal = F.normalize(distance)
        values = [*tables, *maps]
        state = OPTIMISER.init(values)
        for _ in range(STEPS):
            grads = grad(lambda now: F.mse_loss(F.normalize(_links(now)), goal))(values)
            values, state = OPTIMISER.step(values, grads, state)
        learned: Tensor = _links(values) * server.seen
        return learned * largest(learned, self.neighbours)


def _links(values: list[Tensor]) -> Tensor:
    """[N, N] from two node tables: [N, width] and their layers: [1 + width, width], the first row the bias."""
    left, right = (torch.tanh(3 * (x @ m[1:] + m[0])) for x, m in zip(values[:2], values[2:], strict=True))
    one_way = left @ right.T
    return torch.tanh(3 * (one_way - one_way.T)).relu()
