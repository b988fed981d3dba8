"""k-means from distances alone: an iteration costs O(B^2 K), however long the B vectors are.

A centre is kept as its weights on the points. R restarts are computed side by side.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from ..core.layout import Layout
from ..core.seeding import fold, uniform
from .mixing import mix
from .similarity import Gram

RESTARTS = 10
IDENTICAL = 1e-12  # squared distances below this share of the largest are rounding errors


class Clusters(NamedTuple):
    """B points in K clusters, none of them empty."""

    label: Tensor  # [B] int64
    weights: Tensor  # [K, B] centre k is weights[k] @ points; rows sum to one, and are zero outside the cluster
    distance: Tensor  # [B] of each point to its centre


def distances(vectors: Gram) -> Tensor:
    """[B, B] squared distances of vectors, from float64 products; exactly 0 between identical ones."""
    between = vectors.distances
    return torch.where(between > IDENTICAL * between.max(), between, 0.0)


def count_distinct(distances: Tensor) -> int:
    """How many different points there are, from their squared distances [B, B]."""
    first = (distances == 0).int().argmax(1)  # the first point that each is identical with
    return len(first.unique())


def cluster(vectors: Gram, count: int, key: Tensor, tags: Tensor) -> Clusters:
    """B vectors in at most `count` clusters: as many as there are different vectors, if these are fewer.

    Random draws depend on key: [] and on each vector's tag, of tags: [B], so the order of the vectors does not matter.
    """
    between = distances(vectors)
    count = min(count, count_distinct(between))
    like = between.new_empty(RESTARTS * count)
    lots = vmap(lambda tag_key: uniform(tag_key, like))(fold(key, tags)) + 2**-24  # never 0
    return kmeans(between, count, lots.T.view(RESTARTS, count, -1))


def cluster_means(label: Tensor, theta: Tensor, before: Tensor, layout: Layout) -> Tensor:
    """[C, d] the mean of each cluster's rows of theta: [K, d], by label: [K]; of none, its row of before: [C, d]."""
    member = F.one_hot(label, len(before)).T.to(theta.dtype)  # [C, K]
    count = member.sum(1, keepdim=True)
    return torch.where(count > 0, mix(member / count.clamp(min=1), theta, layout), before)


def cluster_weights(label: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, N] row i has equal weights for all of known: [N] bool that are in client i's cluster, by label: [N]."""
    rows = ((label[:, None] == label) & seen).to(dtype)
    return rows.div_(rows.sum(1, keepdim=True))


def nearest(theta: Tensor, centres: Tensor) -> Tensor:
    """[K] int64 the centre, of centres: [C, m], nearest to each row of theta: [K, m]; of equal ones the first."""
    return torch.stack([(theta - centre).square().sum(1) for centre in centres]).argmin(0)


def kmeans(distances: Tensor, count: int, lots: Tensor) -> Clusters:
    """The best of R runs of Lloyd's algorithm from k-means++ (Arthur and Vassilvitskii, 2007).

    apart: [B, B] squared distances of at least `count` different points. lots: [R, K, B] uniform numbers in (0, 1):
    only these decide which centres a run starts from and how clusters are numbered, so if they are tied to the points,
    the result does not depend on the points' order.
    """
    label, weights, away = _lloyd(distances, _seeds(distances, lots[:, :count]))
    cost = away.sum(1)
    # Of runs that differ only by rounding, the first is taken, whatever the rounding.
    best = int((cost <= cost.min() * (1 + 1e-9)).int().argmax())
    return Clusters(label[best], weights[best], away[best].sqrt())


def _seeds(distances: Tensor, lots: Tensor) -> Tensor:
    """[R, K, B] squared distances of all points to the K that k-means++ starts from; lots: [R, K, B].

    The first is drawn uniformly, each next one in proportion to its squared distance from the nearest one before.
    """
    near = torch.ones_like(lots[:, 0])  # [R, B]
    chosen: list[Tensor] = []
    for lot in lots.unbind(1):
        # The least of independent exponential times is point b's with probability in proportion to its rate near[b].
        chosen.append(distances[(-lot.log() / near).argmin(1)])
        near = torch.minimum(near, chosen[-1]) if len(chosen) > 1 else chosen[-1]
    return torch.stack(chosen, 1)


def _lloyd(distances: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Labels [R, B], weights [R, K, B] and each point's squared distance to its centre [R, B].

    square: [R, K, B] squared distances to the first centres. At most 100 iterations, or until none of the objectives
    falls by a millionth.
    """
    before = torch.full_like(square[:, 0, 0], torch.inf)
    for _ in range(100):
        label = _assign(square)
        member = F.one_hot(label, square.shape[1]).mT.to(distances.dtype)
        weights = member / member.sum(-1, keepdim=True)
        square = _from_centres(distances, weights)
        away = square.gather(1, label[:, None])[:, 0]
        now = away.sum(1)
        if (now >= (1 - 1e-6) * before).all():
            break
        before = now
    return label, weights, away


def _assign(square: Tensor) -> Tensor:
    """[R, B] the nearest centre of each point; square: [R, K, B].

    An empty cluster gets the point that is farthest from its centre, among points that are not alone in their cluster.
    """
    away, label = square.min(1)
    while True:
        size = F.one_hot(label, square.shape[1]).sum(1)  # [R, K]
        empty = size == 0
        if not empty.any():
            return label
        farthest = torch.where(size.gather(1, label) > 1, away, -1.0).argmax(1, keepdim=True)
        moved = label.scatter(1, farthest, empty.int().argmax(1, keepdim=True))
        label = torch.where(empty.any(1, keepdim=True), moved, label)


def _from_centres(distances: Tensor, weights: Tensor) -> Tensor:
    """[R, K, B] squared distances of all points to the centres weights: [R, K, B], which are affine combinations."""
    inner = weights @ distances
    return (inner - (inner * weights).sum(-1, keepdim=True) / 2).clamp(min=0)
