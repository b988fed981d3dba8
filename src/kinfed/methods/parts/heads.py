"""Decoders of a graph hypernetwork, which write models from embeddings of clients."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.field_checks import Count, Positive, Settings
from ...core.layout import Layout
from ...core.optimiser import Optimiser
from ...core.trees import Shared
from .hypernetwork import Dense, check_size, draw_layers, perceptron


class Heads(NamedTuple):
    """An MLP, and the embeddings of the C chunks of a model that it writes."""

    weights: tuple[Shared, ...]  # [out, in] each
    biases: tuple[Shared, ...]  # [out] each
    chunks: Shared  # [C, m]; [0, 0] if a model is written at once


@dataclass(frozen=True)
class FullHeads(Settings):
    """An MLP whose last layer is one linear head per tensor, side by side."""

    layers: Count = 3  # heads included
    hidden: Count = 100  # width of the layers below
    memory: Positive = 4.0  # GiB that heads, gradient and optimiser may take; more is refused before it is allocated

    def draw(self, size: int, optimiser: Optimiser, draw: torch.Generator, theta: Tensor) -> Heads:
        """New heads for embeddings of this size and models of the size of theta: [d]."""
        return Heads(*self._layers(size, len(theta), optimiser, draw, theta), theta.new_zeros(0, 0))

    def write(self, heads: Heads, z: Tensor, size: int) -> Tensor:
        """[K, d] models of this size from z: [K, e]."""
        return perceptron(self._inputs(heads, z), heads.weights, heads.biases).flatten(1)[:, :size]

    def scale(self, heads: Heads, z: Tensor, theta: Tensor, layout: Layout) -> Heads:
        """Heads that write, from z: [N, e], tensors with a tenth of the standard deviation of those in theta: [d]."""
        x = self._inputs(heads, z).flatten(0, -2)
        if len(heads.weights) > 1:
            x = perceptron(x, heads.weights[:-1], heads.biases[:-1]).relu()
        mean, square = x.mean(0), x.T @ x / len(x)  # so no table of N models is made
        sizes = [e.shape.numel() for e in layout.entries]
        stds = torch.stack([0.1 * theta[e.at].std(correction=0) for e in layout.entries])
        scaled = []
        for rows, wanted in self._parts(heads.weights[-1], sizes, stds):
            variance = ((rows @ square) * rows).sum(1).mean() - (rows @ mean).mean().square()
            scaled.append(rows * wanted / variance.clamp(min=1e-12).sqrt())
        bias = torch.zeros_like(heads.biases[-1])
        return heads._replace(weights=(*heads.weights[:-1], torch.cat(scaled)), biases=(*heads.biases[:-1], bias))

    def _layers(self, size: int, out: int, optimiser: Optimiser, draw: torch.Generator, like: Tensor) -> Dense:
        widths = [size] + [self.hidden] * (self.layers - 1) + [out]
        advice = "decoder=kinfed_papers.panacea.chunks:ChunkedHeads, or raise method.decoder.memory"
        check_size("panacea", widths, optimiser, self.memory, like, advice)
        return draw_layers(widths, draw, like)

    def _inputs(self, heads: Heads, z: Tensor) -> Tensor:
        """[K, e], or [K, C, e + m] of C chunks: what the first layer sees, from z: [K, e]."""
        return z

    def _parts(self, rows: Tensor, sizes: list[int], stds: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Rows of the last layer, [*, hidden], that are scaled alike, and the deviation of their outputs to reach."""
        return list(zip(rows.split(sizes), stds, strict=True))
