"""Controls that show what a graph is worth: its links between the wrong clients, as many at random, none, or all."""

from typing import Literal

import torch

from ...core.graph import Graph
from ...core.seeding import fold, key, tags
from ...errors import UsageError
from ..federation import Federation
from .known import label_overlap, oracle

Base = Literal["given", "oracle", "label_overlap"]


def shuffled_graph(
    federation: Federation,
    seed: int,
    *,
    of: Base | None = None,  # the graph; left out: the data's own, or the oracle
) -> Graph:
    """A graph with its clients permuted at random: as many links of each weight, between the wrong clients."""
    base, tag = _base(federation, seed, of), tags(federation.names)
    # The permutation depends on names only, so listing clients in another order changes nothing.
    place = torch.empty_like(tag)
    place[tag.argsort()] = fold(key(seed, "graph"), tag).argsort()
    return Graph(base.weights[place][:, place], base.origin)


def random(
    federation: Federation,
    seed: int,
    *,
    of: Base | None = None,  # the graph; left out: the data's own, or the oracle
) -> Graph:
    """As many links as a graph has, between pairs of clients drawn at random; symmetric."""
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


def _base(federation: Federation, seed: int, of: Base | None) -> Graph:
    if federation.graph is None and of == "given":
        raise UsageError("federation.graph: the data set has no graph of its own; choose of = 'oracle'")
    if of == "label_overlap":
        return label_overlap(federation, seed)
    return oracle(federation, seed) if federation.graph is None or of == "oracle" else federation.graph
