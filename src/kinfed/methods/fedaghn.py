"""FedAGHN: each client learns, layer by layer, the weights of the others' models (Song et al., 2025, Algorithm 1)."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from ..core.method import Compared, Normalisation, Params
from ..core.settings import CountOrZero, NonNegative, Share
from ..core.tables import active, put, take
from ..core.trees import ModelOf, PerClient
from .bases import GraphMethod
from .parts import update_sketches
from .parts.granularity import Groups
from .parts.tuning import Attention, Descent, Pooled


class Server(NamedTuple):
    """The server's state. Each of G groups of layers has a graph of its own."""

    theta: PerClient  # [N, d] each client's latest model
    change: PerClient  # [N, d] its updates, what local training changed: the last, and `past` of those before
    seen: PerClient  # [N] bool, has taken part
    home: PerClient  # [N, G] how much it keeps of itself: the paper's p; [N, 1] if the groups share it
    sharpness: PerClient  # [N, G] how selective it is among the others: the paper's q
    sketch: PerClient  # [N, s] of the direction of each update, to find candidates; [N, 0] if all are candidates


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    held_out_grad: PerClient  # [d] the gradient on held-out examples at the model it received; [0] if that is not used


@dataclass(frozen=True)
class FedAGHN(GraphMethod):
    r"""$w_{ij} = \mathrm{softmax}_{j \ne i}(q_i \cos(\Delta_i, \Delta_j)) / (1 + p_i)$, $w_{ii} = p_i / (1 + p_i)$.

    $p$ and $q$ of a layer move along the derivatives of the mixed model contracted with the clients' feedback
    (Equations 4 to 6, A1): down the loss. The paper climbs, see `kinfed.papers.fedaghn.ablations`, with `past=0`.
    """

    bn: Normalisation = field(default="local", kw_only=True)  # running statistics stay with the clients
    home: NonNegative = 0.3  # initial p: a client's weight on its own model, relative to all others' together
    sharpness: float = 10.0  # initial q: how strongly the weights favour clients with similar updates
    past: Share = 1.0  # how much an update counts a round later, in the sum that is compared; 0: only the last counts
    lr: NonNegative = 2.0  # learning rate of p and q; 0: p and q are fixed
    feedback: Literal["validation", "held-out", "train", "test"] = "validation"  # of a gradient; train: its update
    granularity: Literal["module", "tensor", "model"] = "module"  # what has a graph of its own: each of these
    tuning: Descent | Pooled = Pooled()  # how p and q are updated: one for all clients, or each client's own by descent
    neighbours: CountOrZero = 0  # mixes only this many others, of most similar updates (by sketches); 0: all

    def start(self, roster):
        theta = roster.copies()
        ones = theta.new_ones(len(roster), self.tuning.count(len(self._groups(roster))))
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        home, sharpness = self.tuning.start(self.home, self.sharpness)
        sketch = theta.new_zeros(len(roster), update_sketches.width(self.neighbours))
        return Server(theta, torch.ones_like(theta), nobody, home * ones, sharpness * ones, sketch)

    def _groups(self, roster):
        return Groups.of(roster.layout, self.granularity)

    def _attend(self, roster, server, cohort):
        """Equation 4. A client that has not taken part has no weight, and weights all others alike."""
        near = update_sketches.look(roster, server.sketch, server.seen, cohort, self.neighbours)
        columns = roster.everyone if near is None else near  # [N], or [K, M]
        itself, heard = cohort[:, None] == columns, active(server.seen)  # [K, M], [N]
        silent = ~heard[columns] if self.tuning.includes_itself else ~heard[columns] | itself
        alone = silent.expand(itself.shape).all(1)
        p, q = (values[cohort].T * heard[cohort] for values in (server.home, server.sharpness))  # [G, K]
        alike = self._groups(roster).cosines(server.change, cohort, near)  # [G, K, M]
        others = (q[..., None] * alike).masked_fill(silent, -torch.inf).softmax(-1)
        others = others.masked_fill(alone[:, None], 0)
        keeps = p.masked_fill(alone, 1).expand(len(others), -1)
        return Attention(near, itself, alike, others, keeps, whole=self.granularity == "model")

    def graph(self, roster, server, cohort):
        """[P, K, N], a graph for each piece of the model, or [K, N] if the model is one piece."""
        return self._attend(roster, server, cohort).weights.dense(len(roster))

    def relation(self, roster, server, cohort):
        graph = self.graph(roster, server, roster.everyone)
        return graph if graph.ndim == 2 else self._groups(roster).by_layer(graph, roster.layout.layers)

    def compared(self, roster, server):
        alike = self._groups(roster).cosines(server.change, roster.everyone, None)  # [G, N, N]
        return Compared("cosine of updates", alike.mean(0))

    def send(self, roster, server, cohort):
        attention = self._attend(roster, server, cohort)
        return Params(attention.weights.mix(server.theta, self._groups(roster).layout))

    def train(self, client, state, received):
        needed = self.feedback != "train" and any(self.tuning.rates(self.lr))
        held_out_grad = client.gradient(received.theta, client.held_out) if needed else received.theta[:0]
        theta = client.descend(received.theta)
        return Params(theta), Upload(theta, held_out_grad)

    def aggregate(self, roster, server, cohort, uploads):
        groups, attention = self._groups(roster), self._attend(roster, server, cohort)
        change = attention.weights.mix(server.theta, groups.layout)  # what was sent
        change = torch.sub(uploads.theta, change, out=change)
        moved = server.home[cohort], server.sharpness[cohort]
        if any(self.tuning.rates(self.lr)):
            # d loss / d w_ij is the inner product of client i's gradient with client j's model, group by group.
            way, sign = (change, -1) if self.feedback == "train" else (uploads.held_out_grad, 1)
            grad = sign * groups.inner(way, server.theta, attention.near)
            judges = self.tuning.judges(server.seen, cohort, grad)
            moved = self.tuning.step(moved, [g * judges for g in attention.grads(grad)], self.lr)
        if self.past:
            change += self.past * take(server.change, cohort) * server.seen[cohort, None]
        return Server(
            theta=put(server.theta, cohort, uploads.theta),
            change=put(server.change, cohort, change),
            seen=put(server.seen, cohort, torch.ones_like(cohort, dtype=torch.bool)),
            home=put(server.home, cohort, moved[0].clamp(min=0)),
            sharpness=put(server.sharpness, cohort, moved[1]),
            sketch=put(server.sketch, cohort, update_sketches.sketched(roster, change, self.neighbours)),
        )

    def diagnostics(self, roster, server, cohort, sent, uploads):
        groups = self._groups(roster)
        names = groups.names if self.tuning.count(len(groups)) == len(groups) else ("",)
        numbers = super().diagnostics(roster, server, cohort, sent, uploads)
        for name, p, q in zip(names, server.home.T, server.sharpness.T, strict=True):
            numbers |= {f"p {name}".strip(): p, f"q {name}".strip(): q}
        return numbers
