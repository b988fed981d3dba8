"""FedAGHN: each client learns, layer by layer, the weights of the others' models (Song et al., 2025, Algorithm 1).

Differs: p and q descend on the training loss; the paper's Algorithm 1 prints the sign by which they climb it, as does
its code. The first p and q are those of its released example, as the paper prints none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.field_checks import CountOrZero, NonNegative
from ..core.method import Normalisation, Params, Roster
from ..core.mixins import Advises
from ..core.rows import active, put, subtract, take
from ..core.trees import ModelOf, PerClient, Tree
from ..ops.similarity import inner_by_layer, inner_listed
from ..relations import Cosine, Relation, Sketches, Weights, list_alike, renew_directions, start_sketches
from .parts.graph_mixing import RelationMixing


class Server(NamedTuple):
    """The server's state. Each of L layers has a graph of its own."""

    theta: PerClient  # [N, d] each client's latest model
    change: PerClient  # [N, d] its last update: what local training changed
    seen: PerClient  # [N] bool, has taken part
    home: PerClient  # [N, L] p: how much it keeps of itself; [N, 1] if the layers share it
    sharpness: PerClient  # [N, L] q: how selective it is among the others
    sketch: Sketches | tuple[()]  # of the direction of each update, to find candidates; () if all are


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    held_out_grad: PerClient  # [d] the gradient on held-out examples at the model it received; [0] if that is not used


class Attention(NamedTuple):
    """The weights of a cohort's mixtures: of M of the N clients for each, in L layers."""

    near: Tensor | None  # [K, M] int64 the clients that each one mixes, itself first; None: everyone in order
    itself: Tensor  # [K, M] bool
    cosines: Tensor  # [L, K, M] of updates
    others: Tensor  # [L, K, M] the softmax; a row of zeros if no other client has taken part
    keeps: Tensor  # [L, K] the weight of the client's own model, beside the softmax

    @property
    def weights(self) -> Weights:
        """Equation 5: weights of the client and of the others, normalised."""
        rows = self.others + self.keeps[..., None] * self.itself
        return Weights(rows / rows.sum(-1, keepdim=True), self.near)

    def grads(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """[L, K] derivatives of the loss by p and by q (Equation A1), from grad: [L, K, M], those by the weights."""
        cosines, others = self.cosines, self.others
        mean, total = (others * grad).sum(-1), others.sum(-1) + self.keeps
        itself_grad = (grad * self.itself).sum(-1)
        by_p = (others.sum(-1) * itself_grad - mean) / total.square()
        by_q = ((others * cosines * grad).sum(-1) - (others * cosines).sum(-1) * mean) / total
        return by_p, by_q


@dataclass(frozen=True)
class FedAGHN(RelationMixing, Advises):
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
        sketch = start_sketches(roster) if self.neighbours else ()
        return Server(theta, torch.ones_like(theta), nobody, self.home * ones, self.sharpness * ones, sketch)

    def attend(self, roster: Roster, server: Tree, cohort: Tensor) -> Attention:
        """The attention of a round, which its functions share."""
        return roster.memo.once(
            "attention", self.made_of(roster, server, cohort), lambda: self._attend(roster, server, cohort)
        )

    def _attend(self, roster: Roster, server: Tree, cohort: Tensor) -> Attention:
        """Equation 4. A client that has not taken part has no weight, and weights all others alike."""
        near = list_alike(roster, server.sketch, server.seen, cohort, self.neighbours)
        columns = roster.everyone if near is None else near  # [N], or [K, M]
        itself, heard = cohort[:, None] == columns, active(server.seen)  # [K, M], [N]
        silent = ~heard[columns] if self.includes_itself else ~heard[columns] | itself
        alone = silent.expand(itself.shape).all(1)
        p, q = (values[cohort].T * heard[cohort] for values in (server.home, server.sharpness))  # [L, K]
        cosines = Cosine(by_layer=True).compare(take(server.change, cohort), server.change, near, roster.layout)
        others = (q[..., None] * cosines).masked_fill(silent, -torch.inf).softmax(-1)
        others = others.masked_fill(alone[:, None], 0)
        return Attention(near, itself, cosines, others, p.masked_fill(alone, 1).expand(len(others), -1))

    def relate(self, roster, server, cohort):
        attention, nobody = self.attend(roster, server, cohort), torch.zeros_like(server.seen[cohort])
        return Relation(attention.weights, nobody, attention.cosines, "cosine of updates")

    def made_of(self, roster, server, cohort):
        made_of = super().made_of(roster, server, cohort)
        return (*made_of, roster.round) if self.neighbours else made_of  # newcomers are listed others at random

    def train(self, client, state, received):
        needed = self.feedback != "train" and any(self.speeds)
        held_out_grad = client.gradient(received.theta, client.held_out) if needed else received.theta[:0]
        theta = client.descend(received.theta)
        return Params(theta), Upload(theta, held_out_grad)

    def aggregate(self, roster, server, cohort, uploads):
        change = subtract(uploads.theta, self.send(roster, server, cohort).theta)
        p, q = server.home[cohort], server.sharpness[cohort]
        if any(self.speeds):
            # d loss / d w_ij is the inner product of client i's gradient with client j's model, layer by layer.
            attention, layout = self.attend(roster, server, cohort), roster.layout
            way, sign = (change, -1) if self.feedback == "train" else (uploads.held_out_grad, 1)
            if attention.near is None:
                products = inner_by_layer(way, server.theta, layout)
            else:
                products, _ = inner_listed(way, server.theta, attention.near, layout)
            judges = active(server.seen)[cohort]  # who has taken part; at first all
            grads = [grad * judges for grad in attention.grads(sign * products)]
            p, q = (step(value, rate, grad) for value, rate, grad in zip((p, q), self.speeds, grads, strict=True))
        return Server(
            theta=put(server.theta, cohort, uploads.theta),
            change=put(server.change, cohort, change),
            seen=server.seen.index_fill(0, cohort, True),
            home=put(server.home, cohort, p.clamp(min=0)),
            sharpness=put(server.sharpness, cohort, q),
            sketch=renew_directions(roster, server.sketch, cohort, change),
        )

    def diagnostics(self, roster, server, cohort, sent, uploads):
        numbers, layers = super().diagnostics(roster, server, cohort, sent, uploads), roster.layout.layers
        names = [layer.name for layer in layers] if server.home.shape[1] == len(layers) else [""]
        for name, p, q in zip(names, server.home.T, server.sharpness.T, strict=True):
            numbers |= {f"p {name}".strip(): p, f"q {name}".strip(): q}
        return numbers


def step(values: Tensor, rate: float, grad: Tensor) -> Tensor:
    """[K, L] p or q after a step against its gradient: [L, K] (lines 6 and 7); [K, 1] if all layers share it."""
    return values - rate * (grad if len(grad) == values.shape[1] else grad.sum(0, keepdim=True)).T
