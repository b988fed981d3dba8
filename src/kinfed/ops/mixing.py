"""Arithmetic on client models [N, d] and relations [N, N] or [L, N, N], which graph methods are made of.

Tables [N, d] are large and memory is slow, above all new memory: so nothing is copied without need, and new memory
comes in large pages.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.layout import Layout
from ..core.rows import WORTH, blank, weighted_mean as weighted_mean
from .similarity import columns_of, fast_product
from .sparsify import project_simplex

FEW = 4  # rows are read one by one if at most one in this many counts
SPARSE = 20  # a sparse product is faster if at most one weight in this many is not zero


def mix(weights: Tensor, theta: Tensor, layout: Layout, near: Tensor | None = None) -> Tensor:
    """[K, d] mixtures of theta: [N, d] by weights: [K, N], or [L, K, N] with one relation a layer.

    With lists near: [K, M] of clients the weights are for these, [K, M] or [L, K, M]; no table [K, N] is made. See
    `mix_freely` for weights that are not those of a mean.
    """
    weights = weights.to(theta.dtype)
    pieces = [(slice(None), weights)] if weights.ndim == 2 else zip((x.at for x in layout.layers), weights, strict=True)
    if near is not None:
        mixed, (listed, place) = blank(len(near), theta), near.unique(return_inverse=True)
        for at, part in pieces:
            into = mixed[:, at]
            for columns, rows in columns_of(theta[:, at], listed):
                into[:, columns] = F.embedding_bag(place, rows, mode="sum", per_sample_weights=part)
        return mixed
    if weights.requires_grad or theta.requires_grad:
        return torch.cat([part @ theta[:, at] for at, part in pieces], 1)
    mixed = blank(weights.shape[-2], theta)
    with fast_product(theta, *mixed.shape[:1], *theta.shape):
        for at, part in pieces:
            torch.mm(part, theta[:, at], out=mixed[:, at])  # without a copy
    return mixed


def add_rows(weights: Tensor, theta: Tensor) -> Tensor:
    """[d] the rows of theta: [N, d] times weights: [N], added up; of a large table, if few count, only these are read.

    >>> add_rows(torch.tensor([2.0, 0.0, 1.0]), torch.tensor([[1.0, 3.0], [5.0, 5.0], [0.0, 1.0]]))
    tensor([2., 7.])
    """
    weights = weights.to(theta.dtype)
    if theta.nbytes >= WORTH and FEW * (counted := weights.nonzero().squeeze(1)).numel() < len(weights):
        return F.embedding_bag(counted[None], theta, mode="sum", per_sample_weights=weights[counted][None])[0]
    return weights @ theta


def mix_freely(weights: Tensor, theta: Tensor, layout: Layout, near: Tensor | None = None) -> Tensor:
    """[K, d] the same for weights that may be negative and need not sum to one.

    Running statistics are mixed by the nearest weights of a mean, because a variance must not become negative.
    """
    return mend_statistics(mix(weights, theta, layout, near), weights, theta, layout, near)


def mend_statistics(mixed: Tensor, weights: Tensor, theta: Tensor, layout: Layout, near: Tensor | None) -> Tensor:
    """[K, d] mixed: [K, d], in place, with running statistics by the nearest weights of a mean if any are negative."""
    learned = layout.trainable_on(theta.device)
    if not learned.all() and (weights < 0).any():
        mixed[:, ~learned] = mix(project_simplex(weights), theta, layout, near)[:, ~learned]
    return mixed


def spread_lists(weights: Tensor, near: Tensor, count: int) -> Tensor:
    """[..., K, N] the relation whose rows hold weights: [..., K, M] at near: [K, M] and are 0 elsewhere."""
    none = weights.new_zeros(*weights.shape[:-1], count)
    return none.scatter(-1, near.expand_as(weights), weights)


def power(step: Tensor, count: int) -> Tensor:
    """[N, N] the matrix step: [N, N] to this power; a matrix of nearly all zeros is multiplied as a sparse one."""
    if count < 2 or SPARSE * torch.count_nonzero(step) > step.numel():
        return torch.linalg.matrix_power(step, count)
    links = step.to_sparse()
    for _ in range(count - 1):
        step = links @ step
    return step
