"""Relation graphs between clients: from what is known of them, and the controls that show whether a graph matters."""

from collections.abc import Callable
from typing import Literal

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .errors import UsageError
from .federation import Federation, Graph, check_graph
from .seeding import fold, key, tags
from .tasks import Classification


def adjacency(weights: ArrayLike | Tensor) -> Graph:
    """The graph of known links, `weights: [N, N]`: row i says how much client i should hear of each client.

    Raises UsageError unless the weights are a square of finite numbers that are not negative.
    """
    links = _square(weights, "weights")
    check_graph(links, len(links))
    return Graph(links.float(), "given")


def distance(distances: ArrayLike | Tensor, *, sigma: float | None = None, threshold: float = 0.1) -> Graph:
    r"""$w_{ij} = \exp(-d_{ij}^2 / \sigma^2)$, or 0 where that is below `threshold` (Shuman et al., 2013).

    `distances: [N, N]` in any unit, infinite where there is no way from i to j; `sigma` in the same unit (default:
    the standard deviation of the finite distances between different clients). Raises UsageError on NaN, negative
    distances, and where sigma has to be told.
    """
    apart = _square(distances, "distances").double()
    if torch.isnan(apart).any() or (apart < 0).any():
        row, column = (torch.isnan(apart) | (apart < 0)).nonzero()[0].tolist()
        raise UsageError(
            f"distances must be zero or more, infinite where there is no way; entry [{row}, {column}] is "
            f"{float(apart[row, column])}"
        )
    if not 0 <= threshold <= 1:
        raise UsageError(f"threshold is the least weight to keep, in [0, 1]; got {threshold}")
    if sigma is None:
        known = apart[torch.isfinite(apart) & ~torch.eye(len(apart), dtype=torch.bool)]
        sigma = float(known.std(correction=0)) if len(known) else 0.0
        if sigma == 0:
            raise UsageError("the distances between clients do not differ, so they give no scale; choose sigma")
    if not sigma > 0:
        raise UsageError(f"sigma is a distance, so it must be positive; got {sigma}")
    near = torch.exp(-(apart / sigma).square())
    return Graph(torch.where(near >= threshold, near, 0.0).float(), "given")


def given(federation: Federation, seed: int) -> Graph | None:
    """The data set's own relation, where it has one."""
    return federation.graph


def oracle(federation: Federation, seed: int) -> Graph:
    """Clients of one hidden group are linked: what a perfect graph would know."""
    groups = federation.groups
    if groups is None:
        raise UsageError(
            "federation.graph: these clients have no hidden groups for an oracle to tell; choose a partition with "
            "groups, or another graph"
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
    """A graph with its clients interchanged at random: as many links of each weight, between the wrong clients.

    `of` is the graph to shuffle (default: the data set's own, or the oracle where it has none).
    """
    base, tag = _base(federation, seed, of), tags(federation.names)
    # Who takes whose place depends on names alone, so listing clients in another order changes nothing.
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


GRAPHS: dict[str, Callable[..., Graph | None]] = {
    "given": given,
    "oracle": oracle,
    "label_overlap": label_overlap,
    "shuffled": shuffled,
    "random": random,
    "identity": identity,
    "complete": complete,
}


def _base(federation: Federation, seed: int, of: Literal["given", "oracle"] | None) -> Graph:
    if federation.graph is None and of == "given":
        raise UsageError("federation.graph: the data set has no graph of its own; choose of = 'oracle'")
    return oracle(federation, seed) if federation.graph is None or of == "oracle" else federation.graph


def _square(values: ArrayLike | Tensor, what: str) -> Tensor:
    try:
        table = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise UsageError(f"{what} must be numbers [N, N]: {problem}") from None
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not len(table) or table.is_complex():
        raise UsageError(f"{what} must be real numbers [N, N], one row a client; got {list(table.shape)}")
    return table
