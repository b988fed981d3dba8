"""Graphs of the clients that the server learns from their models as training goes on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.graph import Origin
from ...core.method import Compared, Roster
from ...core.settings import Count, CountOrZero, Positive, Settings, Share
from ...core.trees import Tree
from ...ops.similarity import cosine, gram, in_medians
from ...ops.sparsify import largest, to_rows, with_itself
from .answers import Answers, kept
from .model_attention import called


@dataclass(frozen=True)
class Similarity(Settings):
    r"""Learned: $A \leftarrow (1 - \beta) A + \beta S$ with $S_{ij} = e^{-d_{ij}^2 / 2 \sigma^2}$ of the nearest K.

    d_ij is the distance of two clients' models, sigma^2 the median of its square over pairs; rows are divided by their
    sums. If no graph is known, A starts complete, and a client's first row is S alone.
    """

    neighbours: Count = 30  # K: most links of a client, itself included
    beta: Share = 0.05  # share of the new graph S in the next one
    # what models are compared by: a sketch of so many numbers, or their answers; 0: whole models are compared
    sketch: CountOrZero | Answers = 0

    def origin_of(self, roster: Roster) -> Origin:
        return "oracle" if roster.graph is not None and roster.graph.origin == "oracle" else "learned"

    def start(self, roster: Roster) -> Tensor:
        if roster.graph is None:
            return roster.theta.new_ones(len(roster), len(roster))
        return with_itself(roster.graph.weights.to(roster.theta))

    def sketches(self, roster: Roster, theta: Tensor) -> Tensor:
        return kept(self.sketch, roster, theta)

    def learn(self, roster: Roster, server: Tree, newcomer: Tensor, pull: float) -> Tensor:
        new_rows = self.find(roster, server, pull)
        first = newcomer[:, None] & (roster.graph is None)  # the complete graph carries no information
        new = torch.lerp(to_rows(server.links), to_rows(new_rows), first.to(new_rows.dtype).clamp(min=self.beta))
        return torch.where(server.seen[:, None], new, server.links)

    def find(self, roster: Roster, server: Tree, pull: float) -> Tensor:
        """[N, N] the graph by the similarity of the current models."""
        seen, itself = server.seen, torch.eye(len(roster), dtype=torch.bool, device=server.seen.device)
        square = self.apart(roster, server, seen[:, None] & seen & ~itself)
        alike = torch.exp(-square / 2)
        linked = largest(alike.masked_fill(~seen, -1).masked_fill(itself, torch.inf), self.neighbours)
        linked &= seen | itself
        return self.weigh(to_rows(alike * linked), linked, square, pull)

    def apart(self, roster: Roster, server: Tree, pairs: Tensor) -> Tensor:
        """[N, N] d^2 / sigma^2; pairs: [N, N] bool are those of two clients that took part."""
        return in_medians(self.distances(roster, server), pairs)

    def compared(self, roster: Roster, server: Tree) -> Compared:
        """What links are made of, of clients that have taken part; NaN of others."""
        both = server.seen[:, None] & server.seen
        what, values = self.told(self.apart(roster, server, both & ~torch.eye(len(both), dtype=torch.bool).to(both)))
        return Compared(what, values.masked_fill(~both, torch.nan))

    def told(self, square: Tensor) -> Compared:
        """The same of all clients, from what `apart` gives: [N, N]."""
        of = "answers" if isinstance(self.sketch, Answers) else "models"
        return Compared(f"squared distance of {of}, in medians", square)

    def distances(self, roster: Roster, server: Tree) -> Tensor:
        """[N, N] squared distances of the clients' models, or of their sketches, over parameters."""
        entries = [server.theta[:, e.at] for e in roster.layout.entries if e.trainable]
        return gram([server.sketch] if self.sketch else entries).distances.to(server.links.dtype)

    def weigh(self, alike: Tensor, linked: Tensor, square: Tensor, pull: float) -> Tensor:
        """[N, N] rows of weights, from those by similarity, the links, and squared distances in medians."""
        return alike

    def add_clients(self, roster: Roster, server: Tree, newcomers: Tensor) -> Tensor:
        """In the others' rows, newcomers get the share that the known graph gives them, if there is one."""
        links, new = self.start(roster), torch.isin(roster.everyone, newcomers)
        given = to_rows(links) * new * (roster.graph is not None)
        learned = (1 - given.sum(1, keepdim=True)) * to_rows(server.links * ~new) + given
        return torch.where(server.seen[:, None], learned, links)


@dataclass(frozen=True)
class Moved(Similarity):
    r"""Learned likewise, with $S_{ij} = e^{(\cos_{ij} - 1) / \tau}$ of how far models moved from the initial one.

    These cosines are near 1 where clients are alike and near 0 where they have nothing in common, whatever the scale.
    """

    beta: Share = 0.5  # share of what was found in the next graph
    tau: Positive = 0.1  # the temperature: the smaller, the more is kept of the most similar alone

    def apart(self, roster: Roster, server: Tree, pairs: Tensor) -> Tensor:
        """[N, N] 2 (1 - cos) / tau, which is a squared distance of directions."""
        initial = roster.theta[None]
        entries = [server.theta[:, e.at] - initial[:, e.at] for e in roster.layout.entries if e.trainable]
        if self.sketch:
            known = not isinstance(self.sketch, Answers)  # answers are less the initial ones already, if they should be
            entries = [server.sketch - known * self.sketches(roster, initial)]
        return (2 * (1 - cosine(gram(entries).inner, eps=0.0)) / self.tau).to(server.links.dtype)

    def told(self, square: Tensor) -> Compared:
        return Compared(called(self.sketch if isinstance(self.sketch, Answers) else "moved"), 1 - square * self.tau / 2)
