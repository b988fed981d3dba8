"""Relation graphs that are known before training, and controls that show what a graph is worth."""

from typing import Literal

import torch

from ..core.graph import Graph
from ..core.seeding import fold, key, tags
from ..core.tasks import Classification
from ..data.federation import Federation
from ..errors import UsageError


def given(federation: Federation, seed: int) -> Graph | None:
    """The data set's own relation, if it has one."""
    return federation.graph


def oracle(federation: Federation, seed: int) -> Graph:
    """Clients of one hidden group are linked: what a perfect graph would know."""
    groups = federation.groups
    if groups is None:
        raise UsageError(
            "federation.graph: these clients have no hidden groups for an oracle; choose a partition with groups, or "
            "another graph"
        )
    return Graph((groups[:, None] == groups[None, :]).float(), "oracle")


def label_overlap(federation: Federation, seed: int, *, most: int = 5) -> Graph:
    """Clients that share one of their `most` frequent training labels are linked: an oracle, as labels are private."""
    if not isinstance(federation.task, Classification):
        raise UsageError("federation.graph: label_overlap needs class labels; this task has none")
    if most < 1:
        raise UsageError(f"federation.graph: most counts labels, so it must be at least 1; got {most}")
    counts = torch.stack(
        [torch.bincount(federation.y[rows], minlength=federation.task.classes) for rows in federation.rows["train"]]
    )  # [N, C]
    first = counts.argsort(dim=1, descending=True, stable=True)[:, :most]
    frequent = (torch.zeros_like(counts).scatter(1, first, 1) * (counts > 0)).float()
    return Graph((frequent @ frequent.T > 0).float().cpu(), "oracle")


def shuffled(federation: Federation, seed: int, *, of: Literal["given", "oracle"] | None = None) -> Graph:
    """A graph with its clients permuted at random: as many links of each weight, between the wrong clients.

    `of` is the graph to shuffle (default: the data set's own, or the oracle where it has none).
    """
    base, tag = _base(federation, seed, of), tags(federation.names)
    # The permutation depends on names only, so listing clients in another order changes nothing.
    place = torch.empty_like(tag)
    place[tag.argsort()] = fold(key(seed, "graph"), tag).argsort()
    return Graph(base.weights[place][:, place], base.origin)


def random(federation: Federation, seed: int, *, of: Literal["given", "oracle"] | None = None) -> Graph:
    """As many links as a graph has, between pairs of clients drawn at random; symmetric.

    `of` is the graph whose links are counted (default: the data set's own, or the oracle where it has none).
    """
    base, tag = _base(federation, seed, of), tags(federation.names)
    links = (base.weights != 0).fill_diagonal_(False)
    count = round(int(links.sum()) / 2)
    lots = fold(fold(key(seed, "graph"), torch.minimum(tag[:, None], tag)), torch.maximum(tag[:, None], tag))
    above = torch.triu_indices(len(tag), len(tag), 1)
    chosen = above[:, lots[above[0], above[1]].argsort()[:count]]
    weights = torch.zeros(len(tag), len(tag)).index_put((chosen[0], chosen[1]), torch.tensor(1.0))
    return Graph(weights + weights.T, base.origin)


def identity(federation: Federation, seed: int) -> Graph:
    """No client is linked to another."""
    return Graph(torch.eye(len(federation)), "given")


def complete(federation: Federation, seed: int) -> Graph:
    """All clients are linked alike."""
    return Graph(torch.ones(len(federation), len(federation)), "given")


def _base(federation: Federation, seed: int, of: Literal["given", "oracle"] | None) -> Graph:
    if federation.graph is None and of == "given":
        raise UsageError("federation.graph: the data set has no graph of its own; choose of = 'oracle'")
    return oracle(federation, seed) if federation.graph is None or of == "oracle" else federation.graph
