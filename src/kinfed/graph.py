"""Arithmetic on client models [N, d] and relations [N, N] or [L, N, N]: what graph methods are made of."""

import torch
from torch import Tensor

from .layout import Layout


def put(table: Tensor, cohort: Tensor, rows: Tensor) -> Tensor:
    """A copy of table: [N, ...] in which rows of the cohort: [K] are replaced by rows: [K, ...]."""
    return table.index_copy(0, cohort, rows.to(table.dtype))


def weighted_mean(theta: Tensor, weights: Tensor) -> Tensor:
    """[d] mean of theta: [K, d] with weights: [K] of any positive sum."""
    weights = weights.to(theta.dtype)  # counts would be divided in float32
    return weights / weights.sum() @ theta


def mix(weights: Tensor, theta: Tensor, layout: Layout) -> Tensor:
    """[K, d] mixtures of theta: [N, d] by weights: [K, N], or [L, K, N] with one relation a layer."""
    if weights.ndim == 2:
        return weights.to(theta.dtype) @ theta
    mixed = theta.new_empty(weights.shape[1], theta.shape[1])
    for layer, part in zip(layout.layers, weights.to(theta.dtype), strict=True):
        mixed[:, layer.at] = part @ theta[:, layer.at]
    return mixed


def inner_by_layer(a: Tensor, b: Tensor, layout: Layout) -> Tensor:
    """[L, K, N] inner products of a: [K, d] and b: [N, d], layer by layer, over trainable entries."""
    return torch.stack([a[:, layer.trainable] @ b[:, layer.trainable].T for layer in layout.layers])


def cosine(inner: Tensor, rows: Tensor | None = None, columns: Tensor | None = None, eps: float = 1e-12) -> Tensor:
    """[..., K, N] cosines from inner products of vectors whose lengths are rows: [..., K] and columns: [..., N].

    Without lengths the vectors are the same on both sides and the lengths lie on the diagonal. 0 beside a zero vector.
    """
    if rows is None or columns is None:
        rows = columns = inner.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    scale = rows[..., :, None] * columns[..., None, :]
    return torch.where(scale > eps, inner / scale.clamp(min=eps), torch.zeros_like(inner)).clamp(-1, 1)


def squared_distances(theta: Tensor) -> Tensor:
    """[N, N] squared Euclidean distances of the rows of theta: [N, m]; exactly 0 on the diagonal."""
    theta = theta - theta.mean(0)  # nearby models far from the origin would lose all digits in the Gram matrix
    inner = theta @ theta.T
    square = inner.diagonal()
    return (square[:, None] + square[None, :] - 2 * inner).clamp(min=0).fill_diagonal_(0)


def project_simplex(rows: Tensor) -> Tensor:
    """Euclidean projection of each row of [..., N] onto the probability simplex (Held et al., 1974)."""
    rows = rows - rows.amax(-1, keepdim=True)  # the projection is the same, and beside large numbers 1 is not lost
    ordered = rows.sort(dim=-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    rank = torch.arange(1, rows.shape[-1] + 1, device=rows.device, dtype=rows.dtype)
    active = (ordered - excess / rank > 0).sum(-1, keepdim=True)
    return (rows - excess.gather(-1, active - 1) / active).clamp(min=0)
