"""Movements of models from a common one: how they compare, how long one may count, and who follows them."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.rows import subtract, take
from ..ops.mixing import mix
from ..ops.similarity import inner_by_layer, inner_listed


class Cosines(NamedTuple):
    """How K receivers' movements compare with those of N, or with those of M listed ones each, in L layers."""

    values: Tensor  # [L, K, N] or [L, K, M]
    length: Tensor  # [L, K] of the receivers' movements
    others: Tensor  # [L, 1, N] or [L, K, M] of those that they are compared with


def compare_movements(
    layout: Layout, theta: Tensor, origin: Tensor, ids: Tensor, near: Tensor | None, by_layer: bool
) -> Cosines:
    """How models of ids: [K] have moved from an origin: [d], compared with those of theta: [N, d], or of lists."""
    if near is None:
        moved = subtract(theta, origin)
        return compare(layout, take(moved, ids), moved, None, by_layer)
    return compare(layout, take(theta, ids) - origin, theta, near, by_layer, origin)


def compare(
    layout: Layout, rows: Tensor, moved: Tensor, near: Tensor | None, by_layer: bool, origin: Tensor | None = None
) -> Cosines:
    """Rows: [K, d] compared with moved: [N, d], or with those of lists near: [K, M]; as wholes without `by_layer`.

    Of lists moved may be models, which have moved from an origin: [d].
    """
    length = lengths_of(layout, rows, by_layer)
    if near is None:
        inner = inner_by_layer(rows, moved, layout)
        lengths = (length if rows is moved else lengths_of(layout, moved, by_layer))[:, None]
    else:
        inner, square = inner_listed(rows, moved, near, layout, origin)
        lengths = (square if by_layer else square.sum(0, keepdim=True)).sqrt()
    inner = inner if by_layer else inner.sum(0, keepdim=True)
    scale = length[..., None] * lengths
    return Cosines(torch.where(scale > 0, inner / scale, 0.0).clamp(-1, 1), length, lengths)


def lengths_of(layout: Layout, moved: Tensor, by_layer: bool) -> Tensor:
    """[L, N] how long moved: [N, d] are, layer by layer; [1, N] as wholes without `by_layer`."""
    lengths = torch.stack([moved[:, layer.trainable].norm(dim=1) for layer in layout.layers])
    return lengths if by_layer else lengths.norm(dim=0, keepdim=True)


def credit_own(cosines: Cosines, itself: Tensor, heard: Tensor, again: Tensor, credit: float) -> Tensor:
    r"""[L, K, M] cosines with $c_{ii} = g_i + (1 - g_i) \max(0, \max_{j \ne i} c_{ij})$, as noise lowers only others'.

    $g_i = e_i / (e_i + k)$ says how much of a difference is a client's own, with again: [K] e examples that it has
    trained on again, and a credit k. itself: [K, M] bool is where a receiver is its own other, and heard: [K, M] or [M]
    bool who has taken part. Who has not moved resembles nobody, not even itself.
    """
    nearest = cosines.values.masked_fill(itself | ~heard, 0).amax(-1).clamp(min=0)  # [L, K]
    share = torch.where(again + credit > 0, again / (again + credit), 1.0)
    own_cosine = torch.where(cosines.length > 0, nearest + (1 - nearest) * share, 0.0)
    return torch.where(itself, own_cosine[..., None], cosines.values)


def clip(weights: Tensor, lengths: Tensor, limit: float) -> Tensor:
    r"""[L, K, M] weights times $\min(1, \kappa \mu_i / \|m_j\|)$ in rows of sum one, of weights whose rows are so.

    lengths: [L, K, M], or [L, 1, M] for all, are those of the movements m, and $\mu_i$ is their median, in which each
    counts by its weight. So nobody gains weight by length.
    """
    ordered, order = lengths.sort(-1)
    shorter = weights.gather(-1, order.expand_as(weights)).cumsum(-1) < 0.5
    at = shorter.sum(-1, keepdim=True).clamp(max=weights.shape[-1] - 1)
    weights = weights * shorten(lengths, limit * ordered.expand_as(weights).gather(-1, at))
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def shorten(lengths: Tensor, limit: Tensor) -> Tensor:
    """[...] by what vectors of these lengths are multiplied, so that none is longer than its limit."""
    return torch.where(lengths > limit, limit / lengths.clamp(min=torch.finfo(lengths.dtype).tiny), 1.0)


def carry(moved: Tensor, weights: Tensor, theta: Tensor, change: Tensor, layout: Layout, near: Tensor | None) -> Tensor:
    r"""[M, d] models moved: [M, d] to $\theta_j + \sum_k v_{jk} \delta_k$ by changes: [K, d] of models theta: [K, d].

    weights: [L or 1, M, K] are the v, or those of lists near. Running statistics move by
    $v_{jk} (\theta_k - \theta_j)$, as a variance must not become negative.
    """
    buffers = ~layout.trainable_on(theta.device)
    weights = weights.expand(len(layout.layers), *weights.shape[1:])
    if buffers.any():
        change = torch.where(buffers, theta, change)
        kept = moved * buffers
        for layer, share in zip(layout.layers, weights.sum(-1), strict=True):
            kept[:, layer.at] *= share[:, None]
        moved = moved - kept
    return mix(weights, change, layout, near).add_(moved)
