"""FedAGHN: each client learns, layer by layer, whom to listen to (Song et al., 2025, Algorithm 1)."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from ..core.method import Params
from ..core.seeding import fold, key, normal
from ..core.tables import put, take
from ..core.trees import ModelOf, PerClient
from ..errors import UsageError
from ..ops.mixing import mix, spread_lists
from ..ops.similarity import cosine, inner_by_layer, inner_listed
from ..ops.sketch import SIZE, candidates, sketch_models
from .bases import GraphMethod
from .parts.granularity import GRANULARITIES, Groups

CHOICES = {
    "feedback": ("val", "train", "test"),
    "sign": ("descent", "paper"),
    "granularity": GRANULARITIES,
    "ablation": ("full", "frozen", "shared", "without-p", "without-q", "without-p-q", "selfless"),
}


class Server(NamedTuple):
    """What the server remembers. Each of G groups of layers has a graph of its own."""

    theta: PerClient  # [N, d] each client's latest model
    change: PerClient  # [N, d] what its last local training changed
    seen: PerClient  # [N] bool, has taken part
    home: PerClient  # [N, G] how much it keeps of itself: the paper's p; [N, 1] if the groups share it
    sharpness: PerClient  # [N, G] how choosy it is among the others: the paper's q
    sketch: PerClient  # [N, s] of the direction of each update, to find candidates by; [N, 0] if everyone is looked at


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    uphill: PerClient  # [d] the gradient on held-out examples at the model it received; [0] if that is not used


class Attention(NamedTuple):
    """Whom a cohort listens to, before a client and the others are brought to one scale: M of the N clients each."""

    near: Tensor | None  # [K, M] int64 whom each looks at, itself first; None: everyone in order
    itself: Tensor  # [K, M] bool
    alike: Tensor  # [G, K, M] cosines of updates
    others: Tensor  # [G, K, M] the softmax; a row of zeros where there is nobody to listen to
    keeps: Tensor  # [G, K] the weight of the client's own model beside it


@dataclass(frozen=True)
class FedAGHN(GraphMethod):
    r"""$w_{ij} = \mathrm{softmax}_{j \ne i}(q_i \cos(\Delta_i, \Delta_j)) / (1 + p_i)$, $w_{ii} = p_i / (1 + p_i)$.

    One $p$ and $q$ a client and layer, moved each round along the derivative of the mixed model contracted with the
    client's feedback (Equations 4 to 6 and A1). `sign="descent"` lowers the loss; the paper prints, and its released
    code runs, the opposite: `sign="paper"`. Without p a client's own model is one more entry of the softmax, and
    `ablation="selfless"` leaves it out altogether.
    """

    bn: Literal["averaged", "local", "personal"] = field(default="local", kw_only=True)
    home: float = 0.03  # initial p
    sharpness: float = 0.5  # initial q
    lr: float = 0.005  # of p and q
    feedback: str = "val"  # "val": held-out gradient; "train": what local training changed, as in the paper
    sign: str = "descent"
    granularity: str = "module"  # what has a graph of its own: module, tensor, block (child of the model) or model
    ablation: str = "full"
    clamp_sharpness: bool = False  # keep q at zero or more: nobody prefers who is unlike
    neighbours: int = 0  # others that a client looks at, with updates most like its own by their sketches; 0: all

    def __post_init__(self):
        if self.home < 0 or self.lr < 0:
            raise UsageError(f"fedaghn: home and lr must be zero or more; got {self.home} and {self.lr}")
        if self.clamp_sharpness and self.sharpness < 0:
            raise UsageError(f"fedaghn: clamp_sharpness needs a sharpness of zero or more; got {self.sharpness}")
        if self.neighbours < 0:
            raise UsageError(f"fedaghn: neighbours counts clients, 0 means all; got {self.neighbours}")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(f"fedaghn: {name} must be one of {', '.join(known)}; got '{getattr(self, name)}'")

    @property
    def _rates(self):
        """Of p and of q, zero for what does not move."""
        rate = self.lr if self.sign == "descent" else -self.lr
        still = self.ablation in ("frozen", "without-p-q")
        home = 0.0 if still or self.ablation in ("without-p", "selfless") else rate
        return home, 0.0 if still or self.ablation == "without-q" else rate

    def start(self, roster):
        theta = roster.copies()
        groups = 1 if self.ablation == "shared" else len(self._groups(roster))
        ones = theta.new_ones(len(roster), groups)
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        home = 0.0 if self.ablation in ("without-p", "without-p-q", "selfless") else self.home
        sharpness = 1.0 if self.ablation in ("without-q", "without-p-q") else self.sharpness
        sketch = theta.new_zeros(len(roster), SIZE if self.neighbours else 0)
        return Server(theta, torch.ones_like(theta), nobody, home * ones, sharpness * ones, sketch)

    def graph(self, roster, server, cohort):
        """[P, K, N], a graph a piece of the model, or [K, N] if the model is one."""
        attention = self._attend(roster, server, cohort)
        rows = self._rows(roster, attention)
        return rows if attention.near is None else spread_lists(rows, attention.near, len(roster))

    def send(self, roster, server, cohort):
        return Params(self._mix(roster, server, self._attend(roster, server, cohort)))

    def relation(self, roster, server, cohort):
        graph = self.graph(roster, server, roster.everyone)
        return graph if graph.ndim == 2 else self._groups(roster).by_layer(graph, roster.layout.layers)

    def aggregate(self, roster, server, cohort, uploads):
        groups, attention = self._groups(roster), self._attend(roster, server, cohort)
        change = self._mix(roster, server, attention)
        change = torch.sub(uploads.theta, change, out=change)
        home, sharpness = server.home[cohort], server.sharpness[cohort]
        if any(self._rates):
            way, sign = (change, -1) if self.feedback == "train" else (uploads.uphill, 1)
            # d loss / d w_ij is the inner product of client i's slope with client j's model, group by group.
            if attention.near is None:
                slope = inner_by_layer(way, server.theta, groups.layout)
            else:
                slope, _ = inner_listed(way, server.theta, attention.near, groups.layout)
            slope = sign * groups.sum(slope)  # [G, K, M]
            slopes = [s * _heard(server)[cohort] for s in _slopes(attention, slope)]
            if self.ablation == "shared":
                slopes = [s.sum(0, keepdim=True) for s in slopes]
            home, sharpness = (
                value - rate * s.T for value, rate, s in zip((home, sharpness), self._rates, slopes, strict=True)
            )
        return Server(
            theta=put(server.theta, cohort, uploads.theta),
            change=put(server.change, cohort, change),
            seen=put(server.seen, cohort, torch.ones_like(cohort, dtype=torch.bool)),
            home=put(server.home, cohort, home.clamp(min=0)),
            sharpness=put(server.sharpness, cohort, sharpness.clamp(min=0) if self.clamp_sharpness else sharpness),
            sketch=put(server.sketch, cohort, self._sketch(roster, change)),
        )

    def diagnostics(self, roster, server, cohort, sent, uploads):
        names = [""] if self.ablation == "shared" else self._groups(roster).names
        found = super().diagnostics(roster, server, cohort, sent, uploads)
        for name, p, q in zip(names, server.home.T, server.sharpness.T, strict=True):
            found |= {f"p {name}".strip(): p, f"q {name}".strip(): q}
        return found

    def train(self, client, state, received):
        asked = self.feedback != "train" and any(self._rates)
        uphill = client.gradient(received.theta, client.held_out) if asked else received.theta[:0]
        theta = client.descend(received.theta)
        return Params(theta), Upload(theta, uphill)

    def _groups(self, roster):
        return Groups.of(roster.layout, self.granularity)

    def _attend(self, roster, server, cohort):
        """Who has not taken part yet is not listened to and listens to all others alike."""
        groups, change, heard = self._groups(roster), server.change, _heard(server)
        mine, near = take(change, cohort), self._look(roster, server, cohort)
        if near is not None:
            inner, square = map(groups.sum, inner_listed(mine, change, near, groups.layout))
            length = square.sqrt()  # each list begins with the client itself
            alike = cosine(inner[..., None, :], length[..., :1], length)[..., 0, :]
        else:
            inner = groups.sum(inner_by_layer(mine, change, groups.layout))
            if mine is change:
                alike = cosine(inner)
            else:
                pieces = [change[:, piece.trainable].norm(dim=1).square() for piece in groups.layout.layers]
                length = groups.sum(torch.stack(pieces)).sqrt()
                alike = cosine(inner, length[:, cohort], length)
        itself = cohort[:, None] == (roster.everyone if near is None else near)  # [K, M]
        deaf = (~heard).expand(len(cohort), -1) if near is None else ~heard[near]
        if self.ablation not in ("without-p", "without-p-q"):
            deaf = deaf | itself
        alone = deaf.all(1)
        scores = server.sharpness[cohort].T[..., None] * alike * heard[cohort, None]
        others = scores.masked_fill(deaf, -torch.inf).softmax(-1).masked_fill(alone[:, None], 0)
        keeps = (server.home[cohort].T * heard[cohort]).masked_fill(alone, 1).expand(len(groups), -1)
        return Attention(near, itself, alike, others, keeps)

    def _rows(self, roster, attention):
        """[P, K, M] weights of those who are looked at, or [K, M] if the model is one piece."""
        rows = attention.others + attention.keeps[..., None] * attention.itself
        rows = rows / rows.sum(-1, keepdim=True)
        return rows[0] if self.granularity == "model" else rows[self._groups(roster).member.to(rows.device)]

    def _mix(self, roster, server, attention):
        """[K, d] what the clients are sent."""
        return mix(self._rows(roster, attention), server.theta, self._groups(roster).layout, attention.near)

    def _look(self, roster, server, cohort):
        """[K, M] int64 whom each looks at, itself first; None for everyone. Without an update of its own: anyone."""
        if not self.neighbours:
            return None
        draw = fold(key(roster.seed, "fedaghn.look", roster.round, device=roster.tags.device), roster.tags[cohort])
        anyone = vmap(lambda mine: normal(mine, server.sketch[0]))(draw)
        like = torch.where(server.seen[cohort, None], server.sketch[cohort], anyone)
        near = candidates(like, server.sketch, cohort, self.neighbours, _heard(server))
        return torch.cat([cohort[:, None], near], 1)

    def _sketch(self, roster, change):
        """[K, s] of the directions of updates: [K, d]."""
        if not self.neighbours:
            return change.new_zeros(len(change), 0)
        draw = key(roster.seed, "fedaghn.sketch", device=change.device)  # one for all rounds: old ones are compared
        return F.normalize(sketch_models(change, draw, roster.layout.trainable_on(change.device)))


def _heard(server):
    """[N] bool: who has taken part; everyone as long as nobody has."""
    return server.seen | ~server.seen.any()


def _slopes(attention, slope):
    """[G, K] derivatives of the loss by p and by q, from those by the weights, slope: [G, K, M]."""
    alike, others, keeps = attention.alike, attention.others, attention.keeps
    listened, total = (others * slope).sum(-1), others.sum(-1) + keeps
    own = (slope * attention.itself).sum(-1)
    by_home = (others.sum(-1) * own - listened) / total.square()
    by_sharpness = ((others * alike * slope).sum(-1) - (others * alike).sum(-1) * listened) / total
    return by_home, by_sharpness
