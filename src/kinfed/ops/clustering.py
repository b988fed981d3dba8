"""k-means from distances alone: an iteration costs O(B^2 K), however long the B vectors are.

A centre is kept as its weights on the points. R restarts are computed side by side.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .similarity import Gram

IDENTICAL = 1e-12  # squared distances below this share of the widest are rounding


class Clusters(NamedTuple):
    """B points in K clusters, none of them empty."""

    label: Tensor  # [B] int64
    weights: Tensor  # [K, B] centre k is weights[k] @ points; rows sum to one, and are zero outside the cluster
    distance: Tensor  # [B] of each point to its centre


def distances(vectors: Gram) -> Tensor:
    """[B, B] squared distances of vectors, from float64 products; exactly 0 between identical ones."""
    apart = vectors.distances
    return torch.where(apart > IDENTICAL * apart.max(), apart, 0.0)


def count_distinct(apart: Tensor) -> int:
    """How many different points there are, from their squared distances [B, B]."""
    first = (apart == 0).int().argmax(1)  # the first point that each is identical with
    return len(first.unique())


def kmeans(apart: Tensor, count: int, lots: Tensor, *, medians: bool = False) -> Clusters:
    """The best of R runs of Lloyd's algorithm from k-means++ (Arthur and Vassilvitskii, 2007).

    apart: [B, B] squared distances of at least `count` different points. lots: [R, K, B] uniform numbers in (0, 1):
    they alone decide which centres a run starts from and how clusters are numbered, so lots that move with the points
    make the result independent of their order. With `medians` a centre minimises the sum of distances to its members
    and not of squared distances.
    """
    label, weights, away = _lloyd(apart, _seeds(apart, lots[:, :count]), medians)
    cost = (away.sqrt() if medians else away).sum(1)
    # Of runs that differ by rounding only the first is taken, whatever the rounding.
    best = int((cost <= cost.min() * (1 + 1e-9)).int().argmax())
    return Clusters(label[best], weights[best], away[best].sqrt())


def follow(apart: Tensor, square: Tensor, *, medians: bool = False) -> Clusters:
    """Lloyd's algorithm from given centres, whose numbers the clusters keep.

    apart: [B, B] squared distances of the points, square: [K, B] of the centres to the points.
    """
    label, weights, away = _lloyd(apart, square[None], medians)
    return Clusters(label[0], weights[0], away[0].sqrt())


def _seeds(apart: Tensor, lots: Tensor) -> Tensor:
    """[R, K, B] squared distances of all points to the K that k-means++ starts from; lots: [R, K, B].

    The first is drawn evenly, each next one in proportion to its squared distance from the nearest before it.
    """
    near = torch.ones_like(lots[:, 0])  # [R, B]
    chosen: list[Tensor] = []
    for lot in lots.unbind(1):
        # Of independent exponential times the least is point b's with probability in proportion to its rate near[b].
        chosen.append(apart[(-lot.log() / near).argmin(1)])
        near = torch.minimum(near, chosen[-1]) if len(chosen) > 1 else chosen[-1]
    return torch.stack(chosen, 1)


def _lloyd(apart: Tensor, square: Tensor, medians: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Labels [R, B], weights [R, K, B] and squared distances to the own centre [R, B].

    square: [R, K, B] squared distances to the first centres. At most 100 iterations, or until none of the objectives
    falls by a millionth.
    """
    before = torch.full_like(square[:, 0, 0], torch.inf)
    for _ in range(100):
        label = _assign(square)
        member = F.one_hot(label, square.shape[1]).mT.to(apart.dtype)
        weights = _medians(apart, member) if medians else member / member.sum(-1, keepdim=True)
        square = _from_centres(apart, weights)
        away = square.gather(1, label[:, None])[:, 0]
        now = (away.sqrt() if medians else away).sum(1)
        if (now >= (1 - 1e-6) * before).all():
            break
        before = now
    return label, weights, away


def _assign(square: Tensor) -> Tensor:
    """[R, B] the nearest centre of each point; square: [R, K, B].

    An empty cluster is given the point that is farthest from its centre, of those who are not alone in theirs.
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


def _from_centres(apart: Tensor, weights: Tensor) -> Tensor:
    """[R, K, B] squared distances of all points to the centres weights: [R, K, B], which are affine combinations."""
    inner = weights @ apart
    return (inner - (inner * weights).sum(-1, keepdim=True) / 2).clamp(min=0)


def _medians(apart: Tensor, member: Tensor) -> Tensor:
    """[R, K, B] weights of the members' geometric medians (Weiszfeld's iteration as mended by Vardi and Zhang, 2000).

    Begun at the mean, as two members alone have no other point to agree on; or at the best of the members if it is the
    median, because the iteration would be slow to arrive there.
    """
    reach = apart.max().sqrt()

    def pull(weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Which way the members pull the centres: [R, K, B], how far, how hard, and how many hold on: [R, K, 1]."""
        near = _from_centres(apart, weights).sqrt()
        touches = near <= 1e-7 * reach  # a point that the centre lies on would pull with infinite force
        force = torch.where(touches, 0.0, member / near)
        total = force.sum(-1, keepdim=True)
        step = torch.where(total > 0, force / total, weights) - weights
        length = (-(step @ apart * step).sum(-1, keepdim=True) / 2).clamp(min=0).sqrt()
        held = (member * touches).sum(-1, keepdim=True)
        return step, length, total * length, held

    begin = torch.where(member > 0, member @ apart.sqrt(), torch.inf).argmin(-1)
    best = F.one_hot(begin, member.shape[-1]).to(apart.dtype)
    _, _, strength, held = pull(best)
    weights = torch.where(strength < held - 1e-6, best, member / member.sum(-1, keepdim=True))
    for _ in range(3000):
        step, length, strength, held = pull(weights)
        part = 1 - torch.where(held < strength, held / strength, 1.0)
        weights = weights + part * step
        if (part * length <= 1e-9 * reach).all():
            break
    return weights
