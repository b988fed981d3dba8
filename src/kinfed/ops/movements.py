"""Movements of models, layer by layer: their lengths, cosines, and how long one may count."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import Layout
from .similarity import inner_by_layer, inner_listed


class Alike(NamedTuple):
    """How K receivers' movements compare with those of N or, with lists, of M others each, in L layers."""

    cosines: Tensor  # [L, K, N] or [L, K, M]
    length: Tensor  # [L, K] of the receivers' movements
    lengths: Tensor  # [L, 1, N] or [L, K, M] of the others'


def compare(layout: Layout, rows: Tensor, moved: Tensor, near: Tensor | None, by_layer: bool) -> Alike:
    """Rows: [K, d] compared with moved: [N, d], or with those of lists near: [K, M]; as wholes without `by_layer`."""
    length = lengths_of(layout, rows, by_layer)
    if near is None:
        inner = inner_by_layer(rows, moved, layout)
        lengths = (length if rows is moved else lengths_of(layout, moved, by_layer))[:, None]
    else:
        inner, square = inner_listed(rows, moved, near, layout)
        lengths = (square if by_layer else square.sum(0, keepdim=True)).sqrt()
    inner = inner if by_layer else inner.sum(0, keepdim=True)
    scale = length[..., None] * lengths
    return Alike(torch.where(scale > 0, inner / scale, 0.0).clamp(-1, 1), length, lengths)


def lengths_of(layout: Layout, moved: Tensor, by_layer: bool) -> Tensor:
    """[L, N] how long moved: [N, d] are, layer by layer; [1, N] as wholes without `by_layer`."""
    lengths = torch.stack([moved[:, layer.trainable].norm(dim=1) for layer in layout.layers])
    return lengths if by_layer else lengths.norm(dim=0, keepdim=True)


def middle(weights: Tensor, lengths: Tensor) -> Tensor:
    """[L, K, 1] medians of lengths: [L, 1 or K, M], each of which counts by its weight: [L, K, M]; rows sum to one."""
    ordered, order = lengths.sort(-1)
    shorter = weights.gather(-1, order.expand_as(weights)).cumsum(-1) < 0.5
    at = shorter.sum(-1, keepdim=True).clamp(max=weights.shape[-1] - 1)
    return ordered.expand_as(weights).gather(-1, at)


def shorten(lengths: Tensor, limit: Tensor) -> Tensor:
    """[...] by what vectors of these lengths are multiplied, so that none is longer than its limit."""
    return torch.where(lengths > limit, limit / lengths.clamp(min=torch.finfo(lengths.dtype).tiny), 1.0)
