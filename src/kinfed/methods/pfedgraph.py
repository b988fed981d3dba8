"""pFedGraph: a collaboration graph by a quadratic programme in the models' similarity (Ye et al., 2023).

Differs: nothing. (A client that has not taken part yet has no weight; the authors' program pushes models away from the
others, and sets cosines above 0.9 to 1.)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.client import Alignment
from ..core.field_checks import CountOrZero, NonNegative, Positive
from ..core.method import Params, Roster
from ..core.rows import put, subtract, take
from ..core.trees import ModelOf, PerClient, Tree
from ..relations import Cosine, Everyone, Nearest, Simplex, Sketches, relate, renew, start_sketches
from ..relations.movements import lengths_of
from .parts.graph_mixing import RelationMixing


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] each client's latest model
    seen: PerClient  # [N] bool, has taken part
    sketch: Sketches | tuple[()]  # of how far it moved, to find the most alike; () if nobody is left out


class Sent(NamedTuple):
    """What a client receives."""

    theta: ModelOf[PerClient]  # [d] its mixture
    others: PerClient  # [d] the same mixture of the models' directions, which have length 1


@dataclass(frozen=True)
class PFedGraph(RelationMixing):
    r"""Row $i$ of the graph is the mean's weights nearest to $p + \frac{1}{2\alpha} s_i$.

    $s_{ij}$ is the cosine of how far the models of $i$ and $j$ moved from the initial one, $p$ the shares of examples.
    A client trains from its mixture on $F_i(\theta) - \lambda \sum_j w_{ij} \cos(\theta, \theta_j)$.
    """

    alpha: Positive = 0.8  # how near the weights are to the shares of examples; large: FedAvg, small: Local
    pull: NonNegative = 0.01  # lambda: towards the direction of the mixed models, from the second round on
    neighbours: CountOrZero = 0  # how many others are listed, the most alike; a sample stands for the rest; 0: all

    def start(self, roster):
        sketch = start_sketches(roster) if self.neighbours else ()
        return Server(roster.copies(), torch.zeros(len(roster), dtype=torch.bool, device=roster.theta.device), sketch)

    def relate(self, roster, server, cohort):
        def take_moves(ids: Tensor) -> Tensor:
            return subtract(take(server.theta, ids), roster.theta)

        among, mass = Nearest(self.neighbours) if self.neighbours else Everyone(), self.mass(roster, server)
        relation = relate(Cosine(), Simplex(self.alpha), among, roster, take_moves, mass, cohort, server.sketch)
        return relation._replace(what="cosine of how far models moved")

    def compose(self, roster, server, weights, unheard):
        lengths = roster.memo.once("lengths", (self, *server), lambda: self.measure(roster, server))
        return Sent(*(self.mix(roster, server, weights, unheard, scale) for scale in (1.0, 1 / lengths)))

    def measure(self, roster: Roster, server: Tree) -> Tensor:
        """[N] lengths of the models, of those that count; 1 of the others."""
        heard = (self.mass(roster, server) > 0).nonzero().squeeze(1)
        lengths = lengths_of(roster.layout, take(server.theta, heard), by_layer=False)[0]
        lengths = lengths.clamp(min=torch.finfo(lengths.dtype).tiny)
        return lengths.new_ones(len(roster)).index_copy(0, heard, lengths)

    def aggregate(self, roster, server, cohort, uploads):
        seen = server.seen.index_fill(0, cohort, True)
        sketch = renew(roster, server.sketch, cohort, uploads.theta - roster.theta) if self.neighbours else ()
        return Server(put(server.theta, cohort, uploads.theta), seen, sketch)

    def train(self, client, state, received):
        learned = client.model.layout.trainable_on(received.theta.device)
        penalty = Alignment(self.pull, learned * received.others, learned)
        theta = client.descend(received.theta, penalty=penalty if self.pull and client.round else None)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"own": state, "mixed": Params(received.theta)}
