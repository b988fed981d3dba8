"""FedAGHN: each client learns, layer by layer, the weights of the others' models (Song et al., 2025, Algorithm 1).

Differs: p and q descend on the training loss; the paper's Algorithm 1 prints the sign by which they climb it, as does
its code. The first p and q are those of its released example, as the paper prints none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from ..core.field_checks import CountOrZero, NonNegative
from ..core.layout import Layout
from ..core.method import Compared, Normalisation, Params, Roster
from ..core.mixins import Advises
from ..core.rows import active, put, take
from ..core.seeding import fold, key, normal
from ..core.trees import ModelOf, PerClient
from ..ops.neighbours import Weights
from ..ops.similarity import cosine, inner_by_layer, inner_listed
from ..ops.sketch import SIZE, candidates, sketch_models
from .bases import GraphMethod


class Server(NamedTuple):
    """The server's state. Each of L layers has a graph of its own."""

    theta: PerClient  # [N, d] each client's latest model
    change: PerClient  # [N, d] its last update: what local training changed
    seen: PerClient  # [N] bool, has taken part
    home: PerClient  # [N, L] p: how much it keeps of itself; [N, 1] if the layers share it
    sharpness: PerClient  # [N, L] q: how selective it is among the others
    sketch: PerClient  # [N, s] of the direction of each update, to find candidates; [N, 0] if all are candidates


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    held_out_grad: PerClient  # [d] the gradient on held-out examples at the model it received; [0] if that is not used


class Attention(NamedTuple):
    """The weights of a cohort's mixtures: of M of the N clients for each, in L layers."""

    near: Tensor | None  # [K, M] int64 the clients that each one mixes, itself first; None: everyone in order
    itself: Tensor  # [K, M] bool
    alike: Tensor  # [L, K, M] cosines of updates
    others: Tensor  # [L, K, M] the softmax; a row of zeros if no other client has taken part
    keeps: Tensor  # [L, K] the weight of the client's own model, beside the softmax

    @property
    def weights(self) -> Weights:
        """Equation 5: weights of the client and of the others, normalised."""
        rows = self.others + self.keeps[..., None] * self.itself
        return Weights(rows / rows.sum(-1, keepdim=True), self.near)

    def grads(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """[L, K] derivatives of the loss by p and by q (Equation A1), from grad: [L, K, M], those by the weights."""
        alike, others = self.alike, self.others
        mean, total = (others * grad).sum(-1), others.sum(-1) + self.keeps
        itself_grad = (grad * self.itself).sum(-1)
        by_p = (others.sum(-1) * itself_grad - mean) / total.square()
        by_q = ((others * alike * grad).sum(-1) - (others * alike).sum(-1) * mean) / total
        return by_p, by_q


@dataclass(frozen=True)
class FedAGHN(GraphMethod, Advises):
    r"""$w_{ij} = \mathrm{softmax}_{j \ne i}(q_i \cos(\Delta_i, \Delta_j)) / (1 + p_i)$, $w_{ii} = p_i / (1 + p_i)$.

    $p$ and $q$ of a client's layer move along the derivatives of the mixed model contracted with the client's feedback
    (Equations 4 to 6, A1): down the loss. $\Delta$ is a client's last update.
    """

    bn: Normalisation = field(default="local", kw_only=True)  # running statistics stay with the clients
    home: NonNegative = 0.03  # initial p: a client's weight on its own model, relative to all others' together
    sharpness: float = 0.5  # initial q: how strongly the weights favour clients with similar updates
    lr: NonNegative = 0.005  # learning rate of p and q; 0: they are fixed
    feedback: Literal["train", "held-out", "validation", "test"] = "train"  # of a gradient; train: its update
    neighbours: CountOrZero = 0  # mixes only this many others, of most similar updates (by sketches); 0: all
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {  # the paper's, for each data set
        "home": (0.02, 0.03, 0.06),
        "sharpness": (0.1, 0.2, 0.5, 1.0, 3.0, 10.0),
    }
    by_layer: ClassVar[bool] = True

    @property
    def includes_itself(self) -> bool:
        """Whether a client's own model is one more entry of the softmax."""
        return False

    @property
    def speeds(self) -> tuple[float, float]:
        """Learning rates of p and of q."""
        return self.lr, self.lr

    def start(self, roster):
        theta = roster.copies()
        ones = theta.new_ones(len(roster), len(roster.layout.layers))
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        sketch = theta.new_zeros(len(roster), SIZE if self.neighbours else 0)
        return Server(theta, torch.ones_like(theta), nobody, self.home * ones, self.sharpness * ones, sketch)

    def _attend(self, roster, server, cohort):
        """Equation 4. A client that has not taken part has no weight, and weights all others alike."""
        near = look(roster, server.sketch, server.seen, cohort, self.neighbours)
        columns = roster.everyone if near is None else near  # [N], or [K, M]
        itself, heard = cohort[:, None] == columns, active(server.seen)  # [K, M], [N]
        silent = ~heard[columns] if self.includes_itself else ~heard[columns] | itself
        alone = silent.expand(itself.shape).all(1)
        p, q = (values[cohort].T * heard[cohort] for values in (server.home, server.sharpness))  # [L, K]
        alike = cosines(roster.layout, server.change, cohort, near)  # [L, K, M]
        others = (q[..., None] * alike).masked_fill(silent, -torch.inf).softmax(-1)
        others = others.masked_fill(alone[:, None], 0)
        return Attention(near, itself, alike, others, p.masked_fill(alone, 1).expand(len(others), -1))

    def attend(self, roster, server, cohort):
        """The attention and the mixtures by it: [K, d], which all functions of a round share."""
        made_of = (self, server.theta, server.change, server.seen, server.home, server.sharpness, cohort, roster.round)

        def make():
            attention = self._attend(roster, server, cohort)
            return attention, attention.weights.mix(server.theta, roster.layout)

        return roster.memo.once("fedaghn", made_of if self.neighbours else made_of[:-1], make)

    def graph(self, roster, server, cohort):
        """[L, K, N], a graph for each layer."""
        return self.attend(roster, server, cohort)[0].weights.dense(len(roster))

    def similarity(self, roster, server):
        return Compared("cosine of updates", cosines(roster.layout, server.change, roster.everyone, None).mean(0))

    def send(self, roster, server, cohort):
        return Params(self.attend(roster, server, cohort)[1])

    def train(self, client, state, received):
        needed = self.feedback != "train" and any(self.speeds)
        held_out_grad = client.gradient(received.theta, client.held_out) if needed else received.theta[:0]
        theta = client.descend(received.theta)
        return Params(theta), Upload(theta, held_out_grad)

    def aggregate(self, roster, server, cohort, uploads):
        attention, sent = self.attend(roster, server, cohort)
        change, moved = uploads.theta - sent, (server.home[cohort], server.sharpness[cohort])
        if any(self.speeds):
            # d loss / d w_ij is the inner product of client i's gradient with client j's model, layer by layer.
            way, sign = (change, -1) if self.feedback == "train" else (uploads.held_out_grad, 1)
            grad = sign * inner(roster.layout, way, server.theta, attention.near)
            judges = active(server.seen)[cohort]  # who has taken part; at first all
            moved = self.step(moved, [g * judges for g in attention.grads(grad)])
        return Server(
            theta=put(server.theta, cohort, uploads.theta),
            change=put(server.change, cohort, change),
            seen=put(server.seen, cohort, torch.ones_like(cohort, dtype=torch.bool)),
            home=put(server.home, cohort, moved[0].clamp(min=0)),
            sharpness=put(server.sharpness, cohort, moved[1]),
            sketch=put(server.sketch, cohort, sketched(roster, change, self.neighbours)),
        )

    def step(self, values, grads):
        """p and q: [K, L] each, after a step against their gradients: [L, K] each (lines 6 and 7)."""
        return tuple(v - rate * g.T for v, g, rate in zip(values, grads, self.speeds, strict=True))

    def diagnostics(self, roster, server, cohort, sent, uploads):
        numbers, layers = super().diagnostics(roster, server, cohort, sent, uploads), roster.layout.layers
        names = [layer.name for layer in layers] if server.home.shape[1] == len(layers) else [""]
        for name, p, q in zip(names, server.home.T, server.sharpness.T, strict=True):
            numbers |= {f"p {name}".strip(): p, f"q {name}".strip(): q}
        return numbers


def inner(layout: Layout, rows: Tensor, table: Tensor, near: Tensor | None) -> Tensor:
    """[L, K, M] inner products of rows: [K, d] with those of table: [N, d] that near: [K, M] lists; None: all."""
    return inner_by_layer(rows, table, layout) if near is None else inner_listed(rows, table, near, layout)[0]


def cosines(layout: Layout, table: Tensor, cohort: Tensor, near: Tensor | None) -> Tensor:
    """[L, K, M] cosines of the cohort's rows of table: [N, d] with those listed; a list begins with its owner."""
    rows = take(table, cohort)
    if near is not None:
        products, square = inner_listed(rows, table, near, layout)
        length = square.sqrt()
        return cosine(products[..., None, :], length[..., :1], length)[..., 0, :]
    products = inner_by_layer(rows, table, layout)
    if rows is table:
        return cosine(products)
    length = torch.stack([table[:, layer.trainable].norm(dim=1) for layer in layout.layers])
    return cosine(products, length[:, cohort], length)


def sketched(roster: Roster, change: Tensor, count: int) -> Tensor:
    """[K, s] sketches of the directions of updates: [K, d]."""
    if not count:
        return change.new_zeros(len(change), 0)
    draw = key(roster.seed, "fedaghn.sketch", device=change.device)  # the same in all rounds, as old sketches are kept
    return F.normalize(sketch_models(change, draw, roster.layout.trainable_on(change.device)))


def look(roster: Roster, sketch: Tensor, seen: Tensor, cohort: Tensor, count: int) -> Tensor | None:
    """[K, M] int64 candidates for each of the cohort, itself and then up to `count` others; None for everyone.

    sketch: [N, s]. A client without an update of its own, by seen: [N], gets random candidates.
    """
    if not count:
        return None
    draw = fold(key(roster.seed, "fedaghn.look", roster.round, device=roster.tags.device), roster.tags[cohort])
    random_direction = vmap(lambda client_key: normal(client_key, sketch[0]))(draw)
    like = torch.where(seen[cohort, None], sketch[cohort], random_direction)
    return torch.cat([cohort[:, None], candidates(like, sketch, cohort, count, active(seen))], 1)
