"""pFedGAT: graph attention over the clients' models, trained on held-out loss (Algorithm 1, Equations 2 to 10)."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch.func import vjp

from ..core.method import Method, Params
from ..core.optimiser import SGD, OptState
from ..core.seeding import key
from ..core.tables import put, take
from ..core.trees import Axis, Like, ModelOf, PerClient, Shared, Tree
from ..errors import UsageError
from ..ops.mixing import mix_freely, weighted_mean
from ..ops.sketch import count_sketch
from ..ops.sparsify import project_simplex, prune
from .parts.attention import Network, Pairs, attend, draw_attention
from .parts.feedback import Delta, Directional, Exact, Mixtures, OnePoint, Replies, Sketch, TwoPoint

CHOICES = {
    "graph": ("attention", "projected", "raw", "logits"),
    "attention": ("v1", "v2"),
    "features": ("full", "sketch", "head", "delta"),
    "channel": ("exact", "delta", "directional", "sketch", "spsa", "one-point"),
    "feedback": ("val", "train", "test"),
    "newcomer": ("mean", "initial"),
}


class Server(NamedTuple):
    """What the server remembers."""

    network: Network
    memory: Annotated[OptState, Like("network")]  # the optimiser's
    uploads: PerClient  # [N, d] the models as last trained
    change: PerClient  # [N, d] what that training changed; [N, 0] unless it is what the network sees
    theta: PerClient  # [N, d] the models as last mixed: what clients start from
    present: PerClient  # [N] bool, in the cohort that was mixed last
    seen: PerClient  # [N] bool, has taken part
    key: Shared  # [] int64 of the random draws about the last mix
    step: Shared  # [] how far the network moved in the last round
    baseline: PerClient  # [N, 2] last answered loss, and 1 if there was one; [N, 0] unless channel is "one-point"


class Sent(NamedTuple):
    """What a client receives."""

    theta: ModelOf[PerClient]  # [d] its mixed model
    asked: Annotated[Tree, Axis.PER_CLIENT]  # what its channel asks


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    answer: PerClient  # [...] of its channel, about the model it received


@dataclass(frozen=True)
class PFedGAT(Method):
    r"""$R_{ij} = \frac1H \sum_h \mathrm{softmax}_j\, \mathrm{LeakyReLU}(a_h^\top [W_h h_i \| W_h h_j])$.

    $h_i$ is the normalised $\theta_i$ (LayerNorm), and $\theta_i \leftarrow \sum_j R_{ij} \theta_j$ over the cohort; a
    client outside it keeps its model. The network follows $G_{ij} = \partial L / \partial R_{ij} = \langle \nabla L_i,
    \theta_j \rangle$, where $L_i$ is the loss of the mixed model on examples set aside for it. The paper's scalar
    losses cannot give that gradient; `channel` says what does. Without attention $R$ itself is what is learned.
    """

    heads: int = 8
    width: int = 8  # f, features a head
    slope: float = 0.2  # of LeakyReLU below zero
    lr: float = 0.01  # of what makes the graph
    graph: str = "attention"  # or R itself: "projected" onto the simplex, "raw", or the softmax of "logits"
    attention: str = "v1"  # "v2" lets every listener have its own ranking of speakers
    features: str = "full"  # what the network sees of a client: its "full" model, a "sketch", its "head", its "delta"
    feature_size: int = 4096  # numbers in such a sketch
    channel: str = "exact"  # how G becomes known, see kinfed.feedback
    sketch: int = 256  # numbers in an answer of channel "sketch"
    probes: int = 4  # pairs of losses in an answer of channel "spsa"
    radius: float = 0.01  # of a probe, in weight: "spsa" and "one-point"
    balanced: bool = True  # signs of a probe sum to zero, so that its weights still sum to one
    feedback: str = "val"  # which examples L_i is measured on; "test", as in the paper, leaks
    newcomer: str = "mean"  # where a client starts: the "mean" of the models of all who took part, or the "initial" one
    neighbours: int = 0  # others that a client's mix keeps, those with most attention; 0: all
    memory: float = 1.0  # GiB that the network may take; a larger one is refused
    origin = "learned"

    def __post_init__(self):
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(f"pfedgat: {name} must be one of {', '.join(known)}; got '{getattr(self, name)}'")
        for name in ("heads", "width", "feature_size", "sketch", "probes"):
            if getattr(self, name) < 1:
                raise UsageError(f"pfedgat: {name} must be at least 1; got {getattr(self, name)}")
        for name in ("lr", "radius", "memory"):
            if getattr(self, name) <= 0:
                raise UsageError(f"pfedgat: {name} must be positive; got {getattr(self, name)}")
        if self.neighbours < 0 or (self.neighbours and self.graph != "attention"):
            raise UsageError(
                "pfedgat: neighbours counts clients, 0 means all, and it needs graph='attention'; "
                f"got {self.neighbours} and '{self.graph}'"
            )
        if self.channel == "delta" and self.feedback != "train":
            raise UsageError(
                "pfedgat: channel 'delta' reads the training loss off local training, so it needs feedback='train'; "
                f"got '{self.feedback}'"
            )

    @property
    def _channel(self):
        return {
            "exact": Exact(),
            "delta": Delta(),
            "directional": Directional(),
            "sketch": Sketch(self.sketch),
            "spsa": TwoPoint(self.probes, self.radius, self.balanced),
            "one-point": OnePoint(self.radius, self.balanced),
        }[self.channel]

    @property
    def remedy(self):
        if self.graph != "raw":
            return super().remedy
        return "lower the learning rate, or use graph='projected': raw weights may be far from a mean's"

    def start(self, roster):
        optimiser = roster.training.optimiser
        if self.channel == "delta" and optimiser != SGD(optimiser.lr):
            raise UsageError(
                "pfedgat: channel 'delta' reads gradients off what plain SGD changed: set training.optimiser to sgd "
                "without momentum or decay, or use channel 'exact'"
            )
        theta, network = roster.copies(), self._draw(roster)
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        change = torch.zeros_like(theta) if self.features == "delta" else theta.new_zeros(len(roster), 0)
        baseline = theta.new_zeros(len(roster), 2 if self.channel == "one-point" else 0)
        memory = SGD(self.lr).init(network)
        still = theta.new_zeros(())
        return Server(network, memory, theta, change, theta, nobody, nobody, _key(roster), still, baseline)

    def send(self, roster, server, cohort):
        asked = self._channel.ask(self._mixtures(roster, server, cohort))
        return Sent(self._begin(server, cohort), asked)

    def aggregate(self, roster, server, cohort, uploads):
        change = uploads.theta.new_zeros(len(cohort), 0)
        if "delta" in (self.channel, self.features):
            change = uploads.theta - self._begin(server, cohort)
        server = self._learn(roster, server, cohort, uploads.answer, change)
        here = torch.ones_like(cohort, dtype=torch.bool)
        server = server._replace(
            uploads=put(server.uploads, cohort, uploads.theta),
            change=put(server.change, cohort, change) if self.features == "delta" else server.change,
            present=put(torch.zeros_like(server.present), cohort, here),
            seen=put(server.seen, cohort, here),
            key=_key(roster),
        )
        weights = self._weights(server.network, roster, server, cohort)
        mixed = mix_freely(weights, uploads.theta, roster.layout)
        if self.channel == "one-point":
            mixed += self._channel.perturb(self._mixtures(roster, server, cohort))
        return server._replace(theta=put(server.theta, cohort, mixed))

    def add_clients(self, roster, server, newcomers):
        wide = super().add_clients(roster, server, newcomers)
        if self.graph not in ("projected", "raw"):
            return wide
        known, kept = roster.others(newcomers), 1 - len(newcomers) / len(roster)  # so that rows sum to what they did
        weights = wide.network.weights.index_put((known[:, None], known), kept * server.network.weights)
        return wide._replace(network=Pairs(weights))

    def relation(self, roster, server, cohort):
        weights = self._weights(server.network, roster, server, cohort)
        rows = torch.eye(len(roster), dtype=weights.dtype, device=weights.device)
        if self.newcomer == "mean" and server.seen.any():
            rows[~server.seen] = server.seen.to(rows) / server.seen.sum()
        return put(rows, cohort, torch.zeros_like(rows[cohort]).index_copy(1, cohort, weights))

    def diagnostics(self, roster, server, cohort, sent, uploads):
        weights = self._weights(server.network, roster, server, cohort)
        uniform = torch.full_like(weights, 1 / len(cohort))
        return super().diagnostics(roster, server, cohort, sent, uploads) | {
            "entropy": roster.note(cohort, torch.special.entr(weights.clamp(min=0)).sum(1)),
            "from uniform": roster.note(cohort, (weights - uniform).abs().sum(1) / 2),  # total variation
            "network step": server.step,
        }

    def train(self, client, state, received):
        answer = self._channel.answer(client, received.theta, received.asked)
        theta = client.descend(received.theta)
        return Params(theta), Upload(theta, answer)

    def init_client(self, client):
        return Params(client.model.theta)

    def personalise(self, client, state, received):
        return {"mixed": Params(received.theta), "own": state}

    def _learn(self, roster, server, cohort, answers, change):
        """One step of the network against the losses that the last mix led to; who received it can judge it."""
        told = server.present[cohort]
        if not told.any():
            return server._replace(step=torch.zeros_like(server.step))
        told, mixed = told.nonzero().squeeze(1), server.present.nonzero().squeeze(1)
        judges, answers = cohort[told], take(answers, told)
        steps = roster.training.count_steps(roster.sizes[judges])
        rate = steps.to(roster.theta.dtype) * roster.training.optimiser.lr
        replies = Replies(answers, take(change, told), rate, server.baseline[judges])
        slope = self._channel.slope(self._mixtures(roster, server, judges), replies)
        row = torch.searchsorted(mixed, judges)
        _, pull_back = vjp(lambda network: self._weights(network, roster, server, mixed)[row], server.network)
        stepped, memory = SGD(self.lr).step(server.network, pull_back(slope)[0], server.memory)
        network = type(server.network)(*stepped)
        if self.graph == "projected":
            network = Pairs(project_simplex(network.weights))
        if self.channel == "one-point":
            said = torch.stack([answers, torch.ones_like(answers)], 1)
            server = server._replace(baseline=put(server.baseline, judges, said))
        moved = sum((new - old).square().sum() for new, old in zip(network, server.network, strict=True)).sqrt()
        return server._replace(network=network, memory=memory, step=moved)

    def _weights(self, network, roster, server, cohort):
        """[K, K] the graph of the cohort."""
        if self.graph == "attention":
            rows = attend(network, self._describe(roster, server, cohort), self.slope)
            if not self.neighbours:
                return rows
            rows = prune(rows, self.neighbours)
            return rows / rows.sum(1, keepdim=True)
        part = network.weights[cohort][:, cohort]
        if self.graph == "logits":
            return part.softmax(1)
        if self.graph == "raw":
            return part * (len(roster) / len(cohort))
        total = part.sum(1, keepdim=True)
        alone = torch.eye(len(cohort), dtype=part.dtype, device=part.device)
        return torch.where(total > 0, part / total.clamp(min=1e-12), alone)

    def _describe(self, roster, server, cohort):
        """[K, m] what the network sees."""
        rows = take(server.change if self.features == "delta" else server.uploads, cohort)
        at = self._described(roster)
        rows = rows if len(at) == rows.shape[1] else rows[:, at]
        if self.features == "sketch":
            # A fixed one: the network must see the same number for the same entry in every round.
            return count_sketch(rows, key(roster.seed, "pfedgat.features", device=rows.device), self.feature_size)
        return rows

    def _described(self, roster):
        """[m] which entries of a model describe a client."""
        layout = roster.layout
        return layout.index(layout.head if self.features == "head" else layout.learned, roster.theta.device)

    def _draw(self, roster):
        """The first network, or weights that mix all clients alike."""
        if self.graph != "attention":
            return Pairs(roster.theta.new_full((len(roster),) * 2, 0.0 if self.graph == "logits" else 1 / len(roster)))
        size = self.feature_size if self.features == "sketch" else len(self._described(roster))
        if not size:
            raise UsageError("pfedgat: features='head' needs a model with a linear layer as head; use features='full'")
        dynamic = self.attention == "v2"
        gib = (1 + dynamic) * self.heads * self.width * size * roster.theta.element_size() / 2**30
        if gib > self.memory:
            raise UsageError(
                f"pfedgat: a network of {self.heads} heads of width {self.width} over {size:,} features would take "
                f"{gib:.3g} GiB, more than memory={self.memory:g}; use features='sketch', or fewer heads"
            )
        return draw_attention(self.heads, self.width, size, dynamic, roster.generator("pfedgat"), roster.theta)

    def _mixtures(self, roster, server, cohort):
        mixed = server.present.nonzero().squeeze(1)
        learned = roster.layout.trainable_on(server.theta.device)
        return Mixtures(server.uploads, mixed, roster.tags[mixed], roster.tags[cohort], server.key, learned)

    def _begin(self, server, cohort):
        """[K, d] what the cohort starts from."""
        theta, new = take(server.theta, cohort), ~server.seen[cohort]
        if self.newcomer == "initial" or not new.any() or not server.seen.any():
            return theta
        return torch.where(new[:, None], weighted_mean(server.theta, server.seen), theta)


def _key(roster):
    return key(roster.seed, "pfedgat", roster.round, device=roster.tags.device)
