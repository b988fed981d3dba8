"""SFL: models spread along a graph of the clients, known or learned (Chen et al., 2022, Algorithm 1)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.func import grad

from ..core.client import towards
from ..core.method import Method, Params
from ..core.optimiser import SGD
from ..core.seeding import key
from ..core.tables import blank, put, take
from ..core.trees import ModelOf, Pairwise, PerClient
from ..errors import UsageError
from ..ops.mixing import mix
from ..ops.similarity import gram
from ..ops.sketch import sketch_models
from ..ops.sparsify import largest, project_simplex

CHOICES = {
    "norm": ("row", "sym"),
    "begin": ("own", "mixed", "shared"),
    "reg": ("squared", "norm", "off"),
    "weights": ("uniform", "samples"),
    "absent": ("stale", "cohort"),
    "structure": ("given", "similarity", "qp", "official"),
    "compare": ("own", "mixed", "change"),
}


SPARSE = 20  # one link in so many pairs, from where on a sparse product is the faster one


class Server(NamedTuple):
    """What the server remembers."""

    theta: PerClient  # [N, d] each client's latest model: the paper's V
    change: PerClient  # [N, d] what its last training changed; [N, 0] unless updates are compared, and not by sketches
    seen: PerClient  # [N] bool, has taken part
    graph: Pairwise  # [N, N] who is linked to whom, itself included: the paper's A + I
    mixing: Pairwise  # [N, N] what the last aggregation made of it: U = mixing V
    common: PerClient  # [N] and its read-out: w = common V
    sketch: PerClient  # [N, s] of what is compared, `theta` or `change`; [N, 0] without sketches


class Sent(NamedTuple):
    """What a client receives."""

    mixed: ModelOf[PerClient]  # [d] its neighbourhood's model: the paper's u_i
    shared: PerClient  # [d] the read-out over all clients: the paper's w


@dataclass(frozen=True)
class SFL(Method):
    r"""$U = \rho P^m V + (1 - \rho) V$, $P = D^{-1}(A + I)$, $w = \frac1N \sum_i u_i$.

    Client i minimises $F_i(v) + \lambda (R(v, w) + R(v, u_i))$ with $R(a, b) = \frac12 \|a - b\|^2$ and $\lambda = 0$
    in the first round. The graph is `roster.graph`. With a `structure` other than "given" this is SFL*: after each
    aggregation the graph moves by `beta` towards one found from the models, and where none is known it starts complete.
    Released code: steps=3, begin="shared", reg="off".
    """

    steps: int = 1  # m, propagation steps
    norm: str = "row"  # "sym": D^-1/2 (A + I) D^-1/2, whose rows do not sum to one
    rho: float = 1.0  # share of the propagated model in u
    pull: float = 0.3  # lambda
    reg: str = "squared"  # R; "norm" is not squared, "off" is none
    begin: str = "own"  # local training starts from v, from u ("mixed") or from w ("shared")
    weights: str = "uniform"  # of the read-out; or by "samples"
    absent: str = "stale"  # models of clients outside the cohort are passed on, or only those of the "cohort"
    structure: str = "given"  # what the graph is moved towards: "similarity", "qp", or what "official" code does
    compare: str = "own"  # similar in v, in u ("mixed"), or in what training changed ("change")
    neighbours: int = 30  # K, most links of a client, itself included
    beta: float = 0.05  # share of the new graph
    gamma: float = 1.0  # of "qp": how much weights cost that similarity would not give
    sketch: int = 0  # numbers in a sketch that stands for a model where models are compared; 0: the models themselves

    def __post_init__(self):
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(f"sfl: {name} must be one of {', '.join(known)}; got '{getattr(self, name)}'")
        if self.steps < 0 or self.neighbours < 1 or self.sketch < 0:
            raise UsageError(
                "sfl: steps and sketch must be zero or more, neighbours at least 1; "
                f"got steps={self.steps}, sketch={self.sketch}, neighbours={self.neighbours}"
            )
        if self.sketch and self.structure == "given":
            raise UsageError(
                "sfl: a sketch stands for a model where models are compared; structure='given' compares none"
            )
        if not (0 <= self.rho <= 1 and 0 <= self.beta <= 1):
            raise UsageError(f"sfl: rho and beta are shares, in [0, 1]; got rho={self.rho}, beta={self.beta}")
        if not (0 <= self.pull < float("inf") and 0 < self.gamma < float("inf")):
            raise UsageError(
                f"sfl: pull must be zero or more, gamma positive; got pull={self.pull}, gamma={self.gamma}"
            )

    def origin_of(self, roster):
        if roster.graph is not None and (self.structure == "given" or roster.graph.origin == "oracle"):
            return roster.graph.origin
        return "learned"

    def start(self, roster):
        theta = roster.copies()
        return Server(
            theta=theta,
            change=torch.zeros_like(theta)
            if self.compare == "change" and not self.sketch
            else theta.new_zeros(len(roster), 0),
            seen=torch.zeros(len(roster), dtype=torch.bool, device=theta.device),
            graph=self._links(roster),
            mixing=torch.eye(len(roster), dtype=theta.dtype, device=theta.device),
            common=theta.new_full((len(roster),), 1 / len(roster)),
            sketch=self._sketch(roster, theta[:1] * (self.compare != "change")).repeat(len(roster), 1),
        )

    def send(self, roster, server, cohort):
        rows = torch.cat([server.mixing[cohort], server.common[None]])
        mixed = mix(rows, server.theta, roster.layout)  # both in one pass
        return Sent(mixed[:-1], mixed[-1].expand(len(cohort), -1))

    def aggregate(self, roster, server, cohort, uploads):
        change, compared = server.change, uploads.theta
        if self.compare == "change":
            began = self._began(roster, server, cohort)
            compared = torch.sub(uploads.theta, began, out=blank(len(cohort), began))
            if not self.sketch:
                change = put(change, cohort, compared)
        here = torch.ones_like(cohort, dtype=torch.bool)
        seen = put(server.seen, cohort, here)
        heard = seen if self.absent == "stale" else put(torch.zeros_like(seen), cohort, here)
        mixing = self.propagate(server.graph, heard, seen)
        readout = heard * (roster.sizes if self.weights == "samples" else torch.ones_like(roster.sizes))
        readout = readout.to(mixing.dtype)
        after = Server(
            put(server.theta, cohort, uploads.theta),
            change,
            seen,
            server.graph,
            mixing,
            readout / readout.sum() @ mixing,
            put(server.sketch, cohort, self._sketch(roster, compared)),
        )
        if self.structure == "given":
            return after
        return after._replace(graph=self._learn(roster, after, newcomer=seen & ~server.seen))

    def add_clients(self, roster, server, newcomers):
        """A newcomer is sent what its links bring it of the others' models; they hear of it once it has trained.

        Of a learned graph the others' rows give newcomers the share that the known links give them, if there are such.
        """
        wide, links = super().add_clients(roster, server, newcomers), self._links(roster)
        graph = links
        if self.structure != "given":
            new = torch.isin(roster.everyone, newcomers)
            given = _share(links) * new * (roster.graph is not None)
            learned = (1 - given.sum(1, keepdim=True)) * _share(wide.graph * ~new) + given
            graph = torch.where(wide.seen[:, None], learned, links)
        mixing = self.propagate(graph, wide.seen, wide.seen)
        return wide._replace(
            graph=graph,
            mixing=put(wide.mixing, newcomers, mixing[newcomers]),
            common=wide.common.index_fill(0, newcomers, 0.0),
        )

    def relation(self, roster, server, cohort):
        return server.mixing

    def diagnostics(self, roster, server, cohort, sent, uploads):
        pull = self.pull if self.reg != "off" and roster.round > 0 else 0.0
        update = (uploads.theta - sent.mixed)[:, roster.layout.trainable_on(cohort.device)].norm(dim=1)
        return {"update": roster.note(cohort, update), "pull": torch.tensor(pull)}

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        mixed, shared = received
        penalty = None
        pulled = self.reg != "off" and self.pull and client.round > 0
        if pulled and self.reg == "squared":
            penalty = towards(mixed, self.pull) + towards(shared, self.pull)
        elif pulled:
            moving = client.model.layout.index(client.model.layout.learned, mixed.device)
            anchors = torch.stack([mixed, shared])[:, moving]

            def penalty(theta):
                return self.pull * (theta[moving] - anchors).norm(dim=1).sum()

        begin = {"own": state.theta, "mixed": mixed, "shared": shared}[self.begin]
        theta = client.descend(begin, penalty=penalty)
        return Params(theta), Params(theta)

    def personalise(self, client, state, received):
        return {"mixed": Params(received.mixed), "own": state, "shared": Params(received.shared)}

    def propagate(self, graph, heard, seen):
        """[N, N] the weights of `theta` in u, from links: [N, N] and whose models are passed on, heard: [N].

        Who was not heard counts for itself alone, and who was never seen does so only if it hears nobody.
        """
        itself = torch.eye(len(graph), dtype=graph.dtype, device=graph.device)
        links = graph * (heard | ((itself > 0) & seen))
        links = torch.where(links.sum(1, keepdim=True) > 0, links, itself)
        degree = links.sum(1)
        step = links / degree[:, None] if self.norm == "row" else links * (degree[:, None] * degree).rsqrt()
        return self.rho * power(step, self.steps) + (1 - self.rho) * itself

    def _began(self, roster, server, cohort):
        """[K, d] what the cohort's training started from."""
        if self.begin == "own":
            return take(server.theta, cohort)
        return getattr(self.send(roster, server, cohort), self.begin)

    def _links(self, roster):
        """[N, N] the known graph, or the complete one, with a link of every client to itself."""
        if roster.graph is not None:
            links = roster.graph.weights.to(roster.theta)
            if self.norm == "sym" and not torch.equal(links, links.T):
                raise UsageError(
                    "sfl: norm='sym' needs a symmetric graph, and this one is not; use 'row' or symmetrise the graph"
                )
        elif self.structure == "given":
            raise UsageError(
                "sfl needs a graph of the clients and this data set has none: choose one by federation.graph, or let "
                "it be learned by method.structure=similarity"
            )
        else:
            links = roster.theta.new_ones(len(roster), len(roster))
        return links + torch.diag((links.diagonal() == 0).to(links.dtype))

    def _learn(self, roster, server, newcomer):
        """[N, N] the graph of the next round; rows of clients that were never seen stay as they are."""
        square = self._distances(roster, server, self.compare)
        if self.structure == "official":
            found, old = self._released(roster, square.sqrt(), server.seen), self._links(roster)
            rate = torch.full_like(found[:, :1], 1.0 if roster.graph is None else self.beta)
        else:
            others = self.structure == "qp" and self.compare != "own"
            own = self._distances(roster, server, "own") if others else square
            found, old = self._alike(square, own, server.seen), server.graph
            first = newcomer[:, None] & (roster.graph is None)
            rate = first.to(found.dtype).clamp(min=self.beta)
        new = torch.lerp(_share(old), _share(found), rate)
        return torch.where(server.seen[:, None], new, server.graph)

    def _distances(self, roster, server, compare):
        """[N, N] squared distances of the clients' "own" models, of "mixed" ones, or of what training changed."""
        return gram(self._compared(roster, server, compare)).distances.to(server.graph.dtype)

    def _compared(self, roster, server, compare):
        """What tells clients apart, tensor by tensor: tables [N, d] are large."""
        if self.sketch:
            other = compare != "change" and self.compare == "change"
            sketch = self._sketch(roster, server.theta) if other else server.sketch
            yield server.mixing @ sketch if compare == "mixed" else sketch
            return
        table = server.change if compare == "change" else server.theta
        for entry in roster.layout.entries:
            if entry.trainable:
                part = table[:, entry.at]
                yield mix(server.mixing, part, roster.layout) if compare == "mixed" else part

    def _sketch(self, roster, rows):
        """[K, s] sketches of the parameters in rows: [K, d], comparable over all rounds."""
        if not self.sketch:
            return rows.new_zeros(len(rows), 0)
        draw = key(roster.seed, "sfl.sketch", device=rows.device)
        return sketch_models(rows, draw, roster.layout.trainable_on(rows.device), self.sketch)

    def _alike(self, square, own, seen):
        r"""[N, N] links from squared distances: [N, N]: $e^{-d^2 / 2 \sigma^2}$, $\sigma^2$ the median, K a row.

        For "qp" row i is instead, on those links, the mixture that minimises
        $\lambda \|v_i - \sum_j a_j v_j\|^2 / \sigma_v^2 + \gamma \|a - a^*\|^2$, with $a^*$ the row of similarity;
        own: [N, N] are the squared distances of the v, $\sigma_v^2$ their median.
        """
        itself = torch.eye(len(square), dtype=torch.bool, device=square.device)
        pairs = seen[:, None] & seen & ~itself
        square = _in_medians(square, pairs)
        alike = torch.exp(-square / 2)
        linked = largest(alike.masked_fill(~seen, -1).masked_fill(itself, torch.inf), self.neighbours)
        linked &= seen | itself
        alike = _share(alike * linked)
        if self.structure == "similarity":
            return alike
        centre = torch.eye(len(square), dtype=torch.float64, device=square.device) - 1 / len(square)
        own = _in_medians(own, pairs).double()
        inner = -self.pull / 2 * centre @ own @ centre  # lambda times the centred models' inner products
        target = alike.double()
        steepest = torch.linalg.eigvalsh(inner)[-1].clamp(min=0) + self.gamma
        narrow = (self.gamma / steepest).sqrt()
        # Nesterov's gradient steps shrink the error by 1 - narrow each.
        row = ahead = target
        for _ in range(int(50 / narrow) + 1):
            slope = (ahead - itself.double()) @ inner + self.gamma * (ahead - target)
            before, row = row, project_simplex((ahead - slope / steepest).masked_fill(~linked, -torch.inf))
            ahead = row + (1 - narrow) / (1 + narrow) * (row - before)
        return row.to(square.dtype)

    def _released(self, roster, distance, seen):
        """[N, N] what the released code learns: it links clients whose models are far apart, and anew every round."""
        width, draw = 40, roster.generator("sfl")
        tables = [roster.normal(f"sfl.{side}.{roster.round}", width) for side in ("left", "right")]
        maps = [((2 * torch.rand(width + 1, width, generator=draw) - 1) / width**0.5).to(distance) for _ in tables]
        goal = F.normalize(distance)

        def links(values):
            left, right = (torch.tanh(3 * (x @ m[1:] + m[0])) for x, m in zip(values[:2], values[2:], strict=True))
            one_way = left @ right.T
            return torch.tanh(3 * (one_way - one_way.T)).relu()

        optimiser, values = SGD(0.01, weight_decay=1e-4), [*tables, *maps]
        memory = optimiser.init(values)
        for _ in range(10):
            slopes = grad(lambda now: F.mse_loss(F.normalize(links(now)), goal))(values)
            values, memory = optimiser.step(values, slopes, memory)
        found = links(values) * seen
        return found * largest(found, self.neighbours)


def power(step, count):
    """[N, N] the matrix step: [N, N] to this power; zeros are passed over where they are nearly all of it."""
    if count < 2 or SPARSE * torch.count_nonzero(step) > step.numel():
        return torch.linalg.matrix_power(step, count)
    links = step.to_sparse()
    for _ in range(count - 1):
        step = links @ step
    return step


def _in_medians(square, pairs):
    """[N, N] squared distances as multiples of their median over pairs: [N, N] bool."""
    apart = square[pairs]
    median = (apart.median() - (-apart).median()) / 2  # torch's is the lower of two in the middle
    return square / torch.where(median > 0, median, 1.0)  # 0: more than half are equal; NaN: there is no pair


def _share(rows):
    """[N, N] the rows, each divided by its sum; a row of zeros stays."""
    total = rows.sum(1, keepdim=True)
    return rows / torch.where(total > 0, total, 1.0)
