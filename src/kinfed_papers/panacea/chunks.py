"""A decoder of Panacea for models too large for a head per tensor; its paper has no such models without pretraining."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kinfed.core.field_checks import Count, In
from kinfed.core.optimiser import Optimiser
from kinfed.methods.parts.heads import FullHeads, Heads


@dataclass(frozen=True)
class ChunkedHeads(FullHeads):
    """One MLP for all chunks of a model, with an embedding of the chunk as further input: for large models."""

    layers: Annotated[int, In("[2, inf)")] = 3  # with a single one all chunks would be alike
    chunk: Count = 4096  # numbers in a chunk
    code: Count = 100  # m, numbers in the embedding of a chunk

    def draw(self, size: int, optimiser: Optimiser, draw: torch.Generator, theta: Tensor) -> Heads:
        layers = self._layers(size + self.code, min(self.chunk, len(theta)), optimiser, draw, theta)
        return Heads(*layers, torch.randn(-(-len(theta) // self.chunk), self.code, generator=draw).to(theta))

    def _inputs(self, heads: Heads, z: Tensor) -> Tensor:
        count = len(heads.chunks)
        return torch.cat((z[:, None].expand(-1, count, -1), heads.chunks.expand(len(z), -1, -1)), -1)

    def _parts(self, rows: Tensor, sizes: list[int], stds: Tensor) -> list[tuple[Tensor, Tensor]]:
        numbers = torch.tensor(sizes).to(stds)  # one layer writes all tensors
        return [(rows, (numbers @ stds.square() / numbers.sum()).sqrt())]
