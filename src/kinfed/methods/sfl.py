"""SFL: models are propagated along a graph of the clients, known or learned (Chen et al., 2022, Algorithm 1).

Differs: whole models are multiplied by the normalised graph, as in the released code, where the paper names a graph
network; lambda and the number of steps, which it does not give, are 0.3 (released) and 1; without a known graph one is
learned (SFL*), by similarities of models where the paper gives an objective only (Equations 5 and 6).
"""

import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.client import towards
from ..core.field_checks import Count, CountOrZero, NonNegative, Positive, Settings, Share
from ..core.graph import Origin
from ..core.method import Compared, Method, Params, Roster, SharedParams
from ..core.mixins import Explains
from ..core.rows import active, put
from ..core.trees import ModelOf, Pairwise, PerClient, Shared
from ..ops.mixing import mix, power
from ..ops.similarity import gram, in_medians
from ..ops.sparsify import largest, nearest_mixtures, to_rows, with_itself


class Server(NamedTuple):
    """The server's state."""

    theta: PerClient  # [N, d] V: each client's latest model
    seen: PerClient  # [N] bool, has taken part
    links: Pairwise  # [N, N] A + I: the graph, self-links included
    mixing: Pairwise  # [N, N] the weights that the last aggregation derived from it: U = mixing V


class Sent(NamedTuple):
    """What a client receives."""

    mixed: ModelOf[PerClient]  # [d] u_i, the mixture of its neighbourhood's models
    shared: Shared  # [d] w, the mean of all u


@dataclass(frozen=True)
class Known(Settings):
    """The graph is known and stays; where none is known it is learned, as by `Similarity()`."""

    def start(self, roster: Roster) -> Tensor:
        """[N, N] the first links, one of every client to itself among them: complete where no graph is known."""
        if roster.graph is None:
            return roster.theta.new_ones(len(roster), len(roster))
        return with_itself(roster.graph.weights.to(roster.theta))

    def origin_of(self, roster: Roster) -> Origin:
        return roster.graph.origin if roster.graph is not None else "learned"

    def learn(self, roster: Roster, server: Server, newcomer: Tensor, pull: float) -> Tensor:
        """[N, N] the links of the next round; newcomer: [N] bool took part for the first time."""
        return server.links

    def similarity(self, roster: Roster, server: Server) -> Compared:
        """What links are made of."""
        return Compared("weight of the known link", server.links)

    def add_clients(self, roster: Roster, server: Server, newcomers: Tensor) -> Tensor:
        """[N, N] the links once newcomers: [M] have joined."""
        return self.start(roster)


@dataclass(frozen=True)
class Similarity(Known):
    r"""SFL\*: $A \leftarrow (1 - \beta) A + \beta S$ with $S_{ij} = e^{-d_{ij}^2 / 2 \sigma^2}$ of the nearest K.

    d_ij is the distance of two clients' models, sigma^2 the median of its square over pairs; rows are divided by their
    sums. If no graph is known, A starts complete, and a client's first row is S alone.
    """

    neighbours: Count = 30  # K: most links of a client, itself included
    beta: Share = 0.05  # share of the new graph S in the next one

    def origin_of(self, roster):
        return "oracle" if roster.graph is not None and roster.graph.origin == "oracle" else "learned"

    def learn(self, roster, server, newcomer, pull):
        learned, first = self.find(roster, server, pull), newcomer[:, None] & (roster.graph is None)
        beta = first.to(learned.dtype).clamp(
            min=self.beta
        )  # 1 where the first row, of the complete graph, says nothing
        return torch.where(
            server.seen[:, None], torch.lerp(to_rows(server.links), to_rows(learned), beta), server.links
        )

    def find(self, roster: Roster, server: Server, pull: float) -> Tensor:
        """[N, N] the graph by the similarity of the current models."""
        square = self.similarity(roster, server).values.nan_to_num(0.0)
        kernel, itself = torch.exp(-square / 2), torch.eye(len(roster), dtype=torch.bool, device=square.device)
        linked = largest(kernel.masked_fill(~server.seen, -1).masked_fill(itself, torch.inf), self.neighbours)
        linked &= server.seen | itself
        return self.weigh(to_rows(kernel * linked), linked, square, pull)

    def distances(self, roster: Roster, server: Server) -> Tensor:
        """[N, N] squared distances of the clients' models, over parameters."""
        entries = [server.theta[:, e.at] for e in roster.layout.entries if e.trainable]
        return gram(entries).distances.to(server.links.dtype)

    def weigh(self, kernel: Tensor, linked: Tensor, square: Tensor, pull: float) -> Tensor:
        """[N, N] rows of weights, from those by similarity, the links, and squared distances in medians."""
        return kernel

    def similarity(self, roster, server):
        both = server.seen[:, None] & server.seen
        square = in_medians(self.distances(roster, server), both.clone().fill_diagonal_(False))
        return Compared("squared distance of models, in medians", square.masked_fill(~both, torch.nan))

    def add_clients(self, roster, server, newcomers):
        """In the others' rows, newcomers get the share that the known graph gives them, if there is one."""
        links, new = self.start(roster), torch.isin(roster.everyone, newcomers)
        given = to_rows(links) * new * (roster.graph is not None)
        learned = (1 - given.sum(1, keepdim=True)) * to_rows(server.links * ~new) + given
        return torch.where(server.seen[:, None], learned, links)


@dataclass(frozen=True)
class QP(Similarity):
    r"""SFL\*, Equation 6: on the same links row i is the mixture a of models that minimises
    $\lambda \|v_i - \sum_j a_j v_j\|^2 / \sigma^2 + \gamma \|a - S_i\|^2$.
    """

    gamma: Positive = 1.0  # weight of the distance to the similarities S

    def weigh(self, kernel, linked, square, pull):
        centre = torch.eye(len(square), dtype=torch.float64, device=square.device) - 1 / len(square)
        inner = -pull / 2 * centre @ square.double() @ centre  # lambda times the centred models' inner products
        return nearest_mixtures(inner, kernel.double(), linked, self.gamma).to(square.dtype)


@dataclass(frozen=True)
class SFL(Method, Explains):
    r"""$U = \rho P^m V + (1 - \rho) V$, $P = D^{-1}(A + I)$, $w = \frac1N \sum_i u_i$.

    Client i minimises $F_i(v) + \lambda (R(v, w) + R(v, u_i))$ with $R(a, b) = \frac12 \|a - b\|^2$ and $\lambda = 0$
    in the first round. With a `structure` that is learned, or without a known graph, this is SFL*. Released code:
    steps=3, begin="shared" and pull=0, as its regulariser has no gradient.
    """

    steps: CountOrZero = 1  # m: propagation steps: how often models are averaged with their neighbours'
    rho: Share = 1.0  # weight of the propagated model in u; the rest is the client's own model
    pull: NonNegative = 0.3  # lambda: weight of the proximal terms towards w and towards u
    begin: Literal["own", "mixed", "shared"] = "own"  # where local training starts: v (own), u (mixed) or w (shared)
    structure: Known | Similarity | QP = Known()  # the graph: known, or learned from the models
    mixes = "theta"

    def rule(self, roster):
        """The structure: where a graph should be known and is not, the learned one."""
        return Similarity() if roster.graph is None and type(self.structure) is Known else self.structure

    def origin_of(self, roster):
        return self.structure.origin_of(roster)

    def start(self, roster):
        theta = roster.copies()
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        return Server(theta, nobody, self.structure.start(roster), torch.eye(len(roster)).to(theta))

    def send(self, roster, server, cohort):
        rows = torch.cat([server.mixing[cohort], self.read_out(server)[None]])
        mixed = mix(rows, server.theta, roster.layout)  # all in one pass
        return Sent(mixed[:-1], mixed[-1])

    def aggregate(self, roster, server, cohort, uploads):
        if roster.round == 0 and self.rule(roster) is not self.structure:
            warnings.warn(
                "sfl: this data set has no graph of the clients, so one is learned, as by method.structure=similarity "
                "(SFL*); to use a known one set federation.graph",
                stacklevel=2,
            )
        seen = server.seen.index_fill(0, cohort, True)
        theta = put(server.theta, cohort, uploads.theta)
        after = Server(theta, seen, server.links, self.propagate(server.links, seen))
        return after._replace(links=self.rule(roster).learn(roster, after, seen & ~server.seen, self.pull))

    def propagate(self, links, seen):
        """[N, N] the weights of V in U: rho P^m + (1 - rho) I, without clients that have never taken part.

        A client without a link to one that has taken part keeps its model.
        """
        itself = torch.eye(len(links), dtype=links.dtype, device=links.device)
        links = links * seen
        links = torch.where(links.sum(1, keepdim=True) > 0, links, itself)
        return self.rho * power(links / links.sum(1, keepdim=True), self.steps) + (1 - self.rho) * itself

    def read_out(self, server):
        """[N] the weights of V in w: the mean of the u of all clients that have taken part; of all before round 1."""
        weights = active(server.seen).to(server.mixing.dtype)
        return weights / weights.sum() @ server.mixing

    def add_clients(self, roster, server, newcomers):
        """A newcomer is sent the mixture by its links; its model enters the others' mixtures once it has trained."""
        wide = super().add_clients(roster, server, newcomers)
        wide = wide._replace(links=self.rule(roster).add_clients(roster, wide, newcomers))
        rows = self.propagate(wide.links, wide.seen)[newcomers]
        return wide._replace(mixing=put(wide.mixing, newcomers, rows))

    def relation(self, roster, server, cohort):
        return server.mixing

    def similarity(self, roster, server):
        return self.rule(roster).similarity(roster, server)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        update = (uploads.theta - sent.mixed)[:, roster.layout.trainable_on(cohort.device)].norm(dim=1)
        return {"update": roster.note(cohort, update), "pull": torch.tensor(self.pull if roster.round > 0 else 0.0)}

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        pulled = self.pull > 0 and client.round > 0  # in the first round u and w carry no information
        penalty = towards(received.mixed, self.pull) + towards(received.shared, self.pull) if pulled else None
        begin = {"own": state.theta, "mixed": received.mixed, "shared": received.shared}[self.begin]
        theta = client.descend(begin, penalty=penalty)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"mixed": Params(received.mixed), "own": state, "shared": SharedParams(received.shared)}
