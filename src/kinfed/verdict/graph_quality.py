"""How well a relation, or a clustering, finds the groups that clients really belong to.

A relation is [N, N], row i holding what client i gets of everyone, or [L, N, N] with one a layer, and is then averaged
over its layers first. Groups are integer labels [N]; their values mean nothing, only who shares one. Where clients
belong together without falling into groups, `edge_auroc` and `group_weights` take [N, N] bool instead: which do.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.graph import NeighbourLists, Relation
from ..errors import UsageError
from .statistics import midranks

SPREADS = 30  # rounds of label propagation, at most


class GroupWeights(NamedTuple):
    """Mean weights of a relation; NaN where there is no such pair."""

    itself: float  # of the diagonal
    within: float  # between two different clients of one group
    between: float  # between clients of different groups


def edge_auroc(relation: Tensor, groups: Tensor) -> float:
    """The probability that a pair of clients from one group has a larger weight than a pair from two; ties count half.

    Every ordered pair of different clients counts on its own: a relation may be one-sided, and what i gets of j is
    another edge than what j gets of i. 1 is perfect, 0.5 is what a uniform relation scores. NaN if all clients are of
    one group, or no two are.
    """
    weights = _mean_over_layers(relation)
    same = _same(groups, len(weights))
    others = ~torch.eye(len(weights), dtype=torch.bool)
    edges, positive = weights[others], same[others]
    # Mann-Whitney: the positives' ranks, tied edges sharing the middle one, against the least they could sum to.
    rank = torch.from_numpy(midranks(edges.numpy()))
    hits, misses = int(positive.sum()), int((~positive).sum())
    if not hits or not misses:
        return float("nan")
    return float((rank[positive].sum() - hits * (hits + 1) / 2) / (hits * misses))


def group_weights(relation: Tensor, groups: Tensor) -> GroupWeights:
    """Mean weight of a client for itself, for others of its group, and for clients of other groups."""
    weights = _mean_over_layers(relation)
    same = _same(groups, len(weights))
    itself = torch.eye(len(weights), dtype=torch.bool)
    return GroupWeights(*(float(weights[pairs].mean()) for pairs in (itself, same & ~itself, ~same)))


def group_weights_of_lists(relation: NeighbourLists, groups: Tensor) -> GroupWeights:
    """The same of lists, without a table of all pairs."""
    labels = _labels(groups).unique(return_inverse=True)[1]
    sizes = torch.bincount(labels).double()
    sums = relation.add_up(labels, len(sizes))
    itself = float(relation.own.double().sum())
    count = len(labels)
    inside, pairs = float(sums.diagonal().sum()), float(sizes.square().sum())
    outside = float(sums.sum()) - inside
    return GroupWeights(itself / count, _divide(inside - itself, pairs - count), _divide(outside, count**2 - pairs))


def measure(relation: Relation, groups: Tensor | None) -> dict[str, float]:
    """How well a relation finds groups, without values that are undefined with a single group, or groups of one."""
    if groups is None:
        return {}
    if isinstance(relation, NeighbourLists):
        quality = group_weights_of_lists(relation, groups)._asdict()
    else:
        quality = {"auroc": edge_auroc(relation, groups), **group_weights(relation, groups)._asdict()}
    return {name: value for name, value in quality.items() if math.isfinite(value)}


def _divide(total: float, count: float) -> float:
    return total / count if count else float("nan")


def label_overlap(counts: Tensor) -> Tensor:
    """[N, N] the share of their labels that two clients have in common: sum_c min(p_ic, p_jc), 1 if alike, 0 if apart.

    `counts: [N, C]` says how many examples of each class a client holds; p are the shares. This is one less the total
    variation between two clients' label distributions.
    """
    shares = counts.double() / counts.sum(1, keepdim=True)
    return torch.minimum(shares[:, None], shares[None, :]).sum(-1)


def row_entropy(relation: Tensor) -> Tensor:
    """[N] entropy in nats of each row as a distribution: 0 for one source, log N if uniform; NaN for a row of zeros."""
    rows = _rows(relation)
    return -torch.xlogy(rows, rows).sum(1)


def distance_from_uniform(relation: Tensor) -> Tensor:
    """[N] total variation between each row, as a distribution, and the uniform one: from 0 to 1 - 1/N."""
    rows = _rows(relation)
    return (rows - 1 / len(rows)).abs().sum(1) / 2


def consensus(relation: Tensor) -> float:
    """How far a relation has collapsed to one mixture for all: 1 if all rows are alike, 0 if no two share a source.

    One less the mean total variation between the rows, as distributions, of two different clients; NaN for one client.
    """
    rows = _rows(relation)
    count = len(rows)
    distance = torch.cdist(rows, rows, p=1).sum() / 2
    return 1 - float(distance) / (count * (count - 1)) if count > 1 else float("nan")


def isolation(relation: Tensor) -> float:
    """How far a relation has collapsed to every client alone: 1 for the identity, 0 if the mean own weight is 1/N.

    Below 0, and at least -1 / (N - 1), if clients have less of themselves than of the others; NaN for one client.
    """
    rows = _rows(relation)
    count = len(rows)
    return (float(rows.diagonal().sum()) - 1) / (count - 1) if count > 1 else float("nan")


def row_overlap(relation: Tensor, other: Tensor) -> Tensor:
    """[N] how much of each row, as a distribution, two relations have in common: sum_j min(a_ij, b_ij), 1 if alike."""
    return torch.minimum(_rows(relation), _rows(other)).sum(1)


def row_correlation(relation: Tensor, other: Tensor) -> Tensor:
    """[N] Pearson's correlation of a client's weights for the others in two relations; NaN where one's are all equal.

    Its weight for itself is left out, as it would hide what changed among the others.
    """
    others = ~torch.eye(len(_mean_over_layers(relation)), dtype=torch.bool)
    a, b = (_mean_over_layers(weights)[others].view(len(others), -1) for weights in (relation, other))
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    scale = (a.square().sum(1) * b.square().sum(1)).sqrt()
    return torch.where(scale > 1e-15, (a * b).sum(1) / scale, torch.nan).clamp(-1, 1)


def rank_correlation(relation: Tensor, other: Tensor) -> float:
    """Spearman's correlation of two relations over ordered pairs of different clients; NaN if one's are all equal."""
    others = ~torch.eye(len(_mean_over_layers(relation)), dtype=torch.bool)
    a, b = (torch.from_numpy(midranks(_mean_over_layers(weights)[others].numpy())) for weights in (relation, other))
    a, b = a - a.mean(), b - b.mean()
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / scale if scale > 0 else float("nan")


def hops(graph: Tensor) -> Tensor:
    """[N, N] over how many links of a graph: [N, N] clients reach each other, whatever way they point; inf: never."""
    from scipy.sparse.csgraph import shortest_path

    links = ((graph != 0) | (graph != 0).T).numpy()
    return torch.from_numpy(shortest_path(links, unweighted=True, directed=False))


def rand_index(a: Tensor, b: Tensor) -> float:
    """The share of pairs of clients on which two clusterings [N] agree, together or apart (Rand, 1971)."""
    count = len(_labels(a))
    agree = _same(a, count) == _same(b, count)
    pairs = count * (count - 1)
    return float((agree.sum() - count) / pairs) if pairs else 1.0


def adjusted_rand_index(a: Tensor, b: Tensor) -> float:
    """The Rand index of two clusterings [N], rescaled so that chance scores 0 (Hubert and Arabie, 1985)."""
    _same(b, len(_labels(a)))
    from sklearn.metrics import adjusted_rand_score  # here, as it would add a second to every start

    return float(adjusted_rand_score(a.cpu().numpy(), b.cpu().numpy()))


def order_by_links(relation: NDArray[Any]) -> NDArray[Any]:
    """[N] an order in which clients that learn much from each other stand together, by relation: [N, N].

    By average linkage of the weights in both directions; that of the relation where these are all alike.
    """
    both = np.asarray(relation, np.float64) + np.asarray(relation, np.float64).T
    distances = (both.max() - both)[np.triu_indices(len(both), 1)]
    if len(both) < 3 or np.ptp(distances) <= 1e-5 * np.abs(both).max():
        return np.arange(len(both))
    from scipy.cluster.hierarchy import leaves_list, linkage

    return leaves_list(linkage(distances, "average"))


def clusters(relation: Tensor) -> Tensor:
    """[N] int64: clients that receive the same mixture share a label; -1 for clients with no weight in any mixture.

    With a method that clusters its cohort (FedCedar, CFL) these are its clusters, and -1 stands for absent clients, as
    long as the mixtures of two clusters differ by more than a relation's rounding.
    """
    weights = _mean_over_layers(relation)
    label: Tensor = weights.unique(dim=0, return_inverse=True)[1]
    return label.masked_fill((weights == 0).all(0), -1)


def find_communities(lists: NeighbourLists) -> NDArray[Any]:
    """[N] int64 who learns much from each other, the largest first: 0, 1, ...; -1 for clients whom nobody learns from.

    By label propagation (Raghavan, Albert and Kumara, 2007) over the weights of lists in both directions, as far as
    they exceed those of the mean of all. A client alone is in one of its own.
    """
    from scipy.sparse import csr_array, diags_array

    count, near = len(lists), lists.near.long()
    weights = lists.weights.double().view(-1, *near.shape).mean(0) - lists.mass.double()[near]
    weights = weights.masked_fill(near == torch.arange(count)[:, None], 0)
    begins = np.arange(count + 1) * near.shape[1]
    links = csr_array((weights.clamp(min=0).numpy().ravel(), near.numpy().ravel(), begins), (count, count))
    links = links + links.T
    links = links + diags_array(links.max(axis=1).toarray().ravel() / 2)  # so that two do not swap labels for ever
    labels = np.arange(count)
    for _ in range(SPREADS):
        votes = links @ csr_array((np.ones(count), labels, np.arange(count + 1)), (count, count))
        votes.sort_indices()
        before, labels = labels, votes.argmax(axis=1)
        if np.array_equal(before, labels):
            break
    heard = lists.mass.numpy() > 0
    kinds, places, sizes = np.unique(labels[heard], return_inverse=True, return_counts=True)
    ranks = np.empty(len(kinds), np.int64)
    ranks[np.argsort(-sizes, kind="stable")] = np.arange(len(kinds))
    community = np.full(count, -1)
    community[heard] = ranks[places]
    return community


def rand_by_round(labels: Tensor, groups: Tensor) -> Tensor:
    """[T, 2] the Rand and the adjusted Rand index of clusters, labels: [T, N], against groups: [N].

    Each round is judged on the clients that are there: those whose label is not -1.
    """
    scores = []
    for label in labels:
        here = label >= 0
        pair = label[here], _labels(groups)[here]
        scores.append([rand_index(*pair), adjusted_rand_index(*pair)])
    return torch.tensor(scores, dtype=torch.float64).view(-1, 2)


def _mean_over_layers(relation: Tensor) -> Tensor:
    """[N, N] float64 on the CPU."""
    if relation.ndim not in (2, 3) or relation.shape[-1] != relation.shape[-2] or 0 in relation.shape:
        raise UsageError(f"a relation must be [N, N], or [L, N, N] with one per layer; got {list(relation.shape)}")
    weights = relation.detach().cpu().double()
    weights = weights.mean(0) if weights.ndim == 3 else weights
    if not torch.isfinite(weights).all():
        raise UsageError("the relation holds NaN or infinity")
    return weights


def _rows(relation: Tensor) -> Tensor:
    """[N, N] rows that sum to one."""
    weights = _mean_over_layers(relation)
    if (weights < 0).any():
        raise UsageError(
            f"a relation with negative weights is not a distribution; its smallest is {float(weights.min()):.3g}"
        )
    return weights / weights.sum(1, keepdim=True)


def _labels(groups: Tensor) -> Tensor:
    """[N] on the CPU."""
    if groups.ndim != 1 or groups.is_floating_point():
        raise UsageError(f"groups must be integer labels [N]; got {groups.dtype} {list(groups.shape)}")
    return groups.cpu()


def _same(groups: Tensor, count: int) -> Tensor:
    """[N, N] bool: which clients share a group."""
    if groups.dtype == torch.bool and groups.shape == (count, count):
        return groups.cpu()
    labels = _labels(groups)
    if len(labels) != count:
        raise UsageError(f"{count} clients need {count} group labels; got {len(labels)}")
    return labels[:, None] == labels[None, :]
