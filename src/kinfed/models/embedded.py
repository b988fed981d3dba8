"""Embedded: an MLP that reads each category of a table's text as a learned vector."""

import keyword
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..data.tables.columns import Category
from ..data.tables.schema import Description
from ..data.tables.words import is_quotable
from ..errors import UsageError
from .mlp import mlp

WIDEST = 16  # numbers that stand for a category, at most, unless the width is set


def embedded_mlp(
    shape: tuple[int, ...],
    outputs: int,
    columns: Description | None,
    *,
    width: int = 0,  # numbers that stand for a category; 0: half as many as the column has inputs, at most 16
    hidden: Sequence[int] = (64,),  # widths of the layers before the last
) -> nn.Module:
    """An MLP that reads each category of a table's text as a learned vector, [B, d] -> [B, outputs].

    The inputs of a column of text, one for each category, are multiplied by its `embeddings.COLUMN`: [inputs, width];
    all others are read as they are. In the names of tensors a dot, a quotation mark and the like is an underscore, and
    a name that is taken has one more at its end. `columns` says which inputs these are. Raises UsageError for data
    without categories, for a shape that is not that of the columns, and for widths that are none.
    """
    categories = [] if columns is None else [column for column in columns.inputs if isinstance(column, Category)]
    if columns is None or not categories:
        raise UsageError("embedded: the data has no categories; use model=mlp")
    if shape != (len(columns.names),):
        raise UsageError(f"embedded: the columns make {len(columns.names)} inputs, but the shape is {list(shape)}")
    if width < 0:
        raise UsageError(f"embedded: width must be at least 1, or 0 for half of a column's inputs; got {width}")
    embeddings = _Embeddings(columns, width)
    rest = mlp((embeddings.outputs,), outputs, hidden=hidden)
    return nn.Sequential(OrderedDict(embeddings=embeddings, **dict(rest.named_children())))


class _Embeddings(nn.Module):
    """[B, d] -> [B, outputs]: the inputs of each category's column as its embedding, all others as they are."""

    def __init__(self, columns: Description, width: int) -> None:
        super().__init__()
        self.sizes = [len(column.parts) for column in columns.inputs]
        self.keys: list[str | None] = []  # of each column's tensor
        self.outputs = 0
        for column, size in zip(columns.inputs, self.sizes, strict=True):
            if not isinstance(column, Category):
                self.keys.append(None)
                self.outputs += size
                continue
            wide = width or min(WIDEST, -(-size // 2))
            key = "".join(c if is_quotable(c) and c != "." else "_" for c in column.name)
            while hasattr(self, key) or keyword.iskeyword(key):
                key += "_"
            self.register_parameter(key, nn.Parameter(torch.randn(size, wide)))
            self.keys.append(key)
            self.outputs += wide

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.split(self.sizes, 1), self.keys, strict=True)
        return torch.cat([part if key is None else part @ getattr(self, key) for part, key in parts], 1)
