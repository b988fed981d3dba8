"""Attention: a graph that a network computes from features of the clients, so that it also serves newcomers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.method import Compared, Roster
from ...core.settings import Count, CountOrZero, Positive
from ...core.trees import Shared, Tree
from ...errors import UsageError
from ...ops.sparsify import prune
from .features import Full, Head, Sketch, Update
from .learned_graph import LearnedGraph

Glorot = Callable[..., Tensor]
Network = Any  # one of the two below


class Heads(NamedTuple):
    """The network: each of its H heads adds a score of the listener (who receives) and one of the speaker."""

    project: Shared  # [H, f, m] one projection per head, from m features of a client
    listen: Shared  # [H, f] scores the listener
    speak: Shared  # [H, f] scores the speaker


class DynamicHeads(NamedTuple):
    """The network of dynamic attention."""

    listen: Shared  # [H, f, m] projects the listener
    speak: Shared  # [H, f, m] projects the speaker
    score: Shared  # [H, f]


@dataclass(frozen=True)
class Attention(LearnedGraph):
    r"""The paper's $R_{ij} = \frac1H \sum_h \mathrm{softmax}_j\, \mathrm{LeakyReLU}(a_h^\top [W_h h_i \| W_h h_j])$.

    $h_i$ is the normalised $\theta_i$ (LayerNorm). Within a head all listeners rank speakers alike, so one head cannot
    show groups.
    """

    heads: Count = 8  # H, how many heads are averaged
    width: Count = 8  # f, how many numbers a head makes of a client's features
    slope: float = 0.2  # of LeakyReLU below zero
    features: Full | Head | Update | Sketch = Full()  # what the network sees of a client
    neighbours: CountOrZero = 0  # how many others, those with most attention, a client's mixture keeps; 0: all
    memory: Positive = 1.0  # GiB that the network may take; a larger one is refused
    projections: ClassVar[int] = 1  # per head

    @property
    def sees_updates(self) -> bool:
        return self.features == Update()

    def draw(self, roster: Roster) -> Heads | DynamicHeads:
        size = self.features.count(roster)
        gib = self.projections * self.heads * self.width * size * roster.theta.element_size() / 2**30
        if gib > self.memory:
            raise UsageError(
                f"attention: a network of {self.heads} heads of width {self.width} over {size:,} features would take "
                f"{gib:.3g} GiB, more than memory={self.memory:g}; use features='sketch', or fewer heads"
            )
        generator = roster.generator("pfedgat")

        def glorot(fans: int, *shape: int) -> Tensor:
            """[H, f, ...] numbers after Glorot and Bengio (2010)."""
            numbers: Tensor = 2 * torch.rand(self.heads, self.width, *shape, generator=generator) - 1
            return numbers.mul_((6 / fans) ** 0.5).to(roster.theta)

        return self.network(glorot, size)

    def network(self, glorot: Glorot, size: int) -> Heads | DynamicHeads:
        """The first network for `size` features a client."""
        fans = 2 * self.width + 1
        return Heads(glorot(size + self.width, size), glorot(fans), glorot(fans))

    def weights(self, network: Network, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        rows = self.attend(network, self.features.of(roster, server, cohort))
        if not self.neighbours:
            return rows
        rows = prune(rows, self.neighbours)
        return rows / rows.sum(1, keepdim=True)

    def compared(self, network: Network, roster: Roster, server: Tree) -> Compared:
        described = self.features.of(roster, server, roster.everyone)
        scores = self.scores(network, F.layer_norm(described, described.shape[1:]))
        return Compared("attention score, mean over heads", scores.mean(0))

    def attend(self, network: Network, described: Tensor) -> Tensor:
        """[K, K] positive weights whose rows sum to one, from features: [K, m]."""
        scores = self.scores(network, F.layer_norm(described, described.shape[1:]))
        return scores.softmax(-1).mean(0)

    def scores(self, network: Network, features: Tensor) -> Tensor:
        """[H, K, K] each head's scores of speakers (columns) for listeners (rows); features: [K, m]."""
        seen = torch.einsum("hfm,km->hkf", network.project, features)
        listen = torch.einsum("hkf,hf->hk", seen, network.listen)
        speak = torch.einsum("hkf,hf->hk", seen, network.speak)
        return F.leaky_relu(listen[:, :, None] + speak[:, None, :], self.slope)


@dataclass(frozen=True)
class DynamicAttention(Attention):
    """Heads that look at listener and speaker together (Brody et al., 2022): each listener has its own ranking."""

    projections: ClassVar[int] = 2

    def network(self, glorot: Glorot, size: int) -> DynamicHeads:
        project = glorot(size + self.width, size), glorot(size + self.width, size)
        return DynamicHeads(*project, glorot(self.width + 1))

    def scores(self, network: Network, features: Tensor) -> Tensor:
        listener, speaker = (torch.einsum("hfm,km->hkf", w, features) for w in (network.listen, network.speak))
        together = F.leaky_relu(listener[:, :, None] + speaker[:, None, :], self.slope)  # [H, K, K, f]
        return torch.einsum("hijf,hf->hij", together, network.score)
