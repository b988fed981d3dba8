"""Text: characters, or other symbols, as learned vectors, read by one recurrent layer."""

from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .rnn import CELLS


def text(
    shape: tuple[int, ...],
    outputs: int,
    *,
    embedding: int = 8,  # numbers that stand for a symbol
    hidden: int = 64,  # width
    cell: Literal["rnn", "gru"] = "gru",  # kind of recurrent layer
    symbols: int = 0,  # how many there are; 0: as many as outputs
) -> nn.Module:
    """Places of symbols [B, L] -> [B, outputs], such as the next character.

    Raises UsageError unless the shape is [L] with at least two symbols.
    """
    if len(shape) != 1 or shape[0] < 2:
        raise UsageError(
            f"text: needs texts [length] of at least 2 symbols; got shape {list(shape)}; use another model"
        )
    if min(embedding, hidden) < 1 or symbols < 0:
        raise UsageError(f"text: embedding and hidden are widths of at least 1; got {embedding} and {hidden}")
    recurrent = CELLS[cell](embedding, hidden, batch_first=True)
    return _Reader(nn.Embedding(symbols or outputs, embedding), recurrent, nn.Linear(hidden, outputs))


class _Reader(nn.Module):
    def __init__(self, embedding: nn.Embedding, cell: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = embedding, cell, head

    def forward(self, x: Tensor) -> Tensor:
        # Examples are floats everywhere; some methods also ask models for their answers to random numbers.
        places = x.to(torch.int64).clamp(0, self.embedding.num_embeddings - 1)
        return self.head(self.cell(self.embedding(places))[0][:, -1])
