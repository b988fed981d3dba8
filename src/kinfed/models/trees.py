"""Trees: a linear layer, and binary trees of one depth whose leaves are added to it; `personal-boosting` grows them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..data.tables.columns import Number
from ..data.tables.schema import Description
from ..errors import UsageError, nearest

NOWHERE = 1e6  # the threshold of a node that does not split: nothing is above it
DEEPEST = 8  # levels of a tree, whose leaves double with each


class Trees(nn.Module):
    """head(x) + the leaves that x reaches, one in each tree: a node sends x right if its column is above a threshold.

    Nodes are in the order of a heap: those below node j are 2 j + 1, left, and 2 j + 2. A number that is missing, by
    the input that says so, goes right where `lost` is 1, and left where it is 0.

    With `monotone` no answer falls as an input of 1 rises, or rises as one of -1 does; who grows the trees sees to it.
    """

    column: Tensor  # [T, J] which input a node reads
    threshold: Tensor  # [T, J]
    lost: Tensor  # [T, J]
    monotone: Tensor | None  # [inputs] 1, -1, or 0 where answers may do both; None: nowhere else

    def __init__(
        self,
        inputs: int,
        outputs: int,
        trees: int,
        depth: int,
        holes: list[tuple[int, int]],
        monotone: Sequence[int] = (),
    ) -> None:
        """`holes` has the places of numbers, and of the inputs that are 1 where these are missing."""
        super().__init__()
        self.depth, self.holes = depth, holes
        self.flat, self.head = nn.Flatten(), nn.Linear(inputs, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.leaf = nn.Parameter(torch.zeros(trees, 1 << depth, outputs))
        nodes = torch.zeros(trees, (1 << depth) - 1)
        self.register_buffer("column", nodes)
        self.register_buffer("threshold", torch.full_like(nodes, NOWHERE))
        self.register_buffer("lost", nodes.clone())
        self.register_buffer("monotone", torch.tensor(monotone, dtype=torch.float32) if any(monotone) else None)

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] inputs to [B, outputs]."""
        x = self.flat(x)
        at = Nodes(self.column, self.threshold, self.lost).find_leaf(self.with_holes(x).T, self.depth)
        # In single precision a sum depends on where a row stands among others, and might turn by its rounding.
        exact = None if self.monotone is None else torch.float64
        return self.head(x) + values(self.leaf, at).sum(0, dtype=exact).to(self.leaf.dtype)

    def to_shap(self, output: int = 0) -> dict[str, Any]:
        """The trees of an output as `shap.TreeExplainer` of the package shap takes them, of inputs `with_holes`.

        A split counts as if it sent half of what reaches it either way, where the explainer is given no rows. Raises
        UsageError if the linear layer is not constant.
        """
        if self.head.weight[output].any():
            raise UsageError("shap explains trees alone, and this model has a linear layer that is not constant")
        parts = (self.column, self.threshold, self.lost, self.leaf[..., output])
        grown = [_list_nodes(*(part.tolist() for part in tree)) for tree in zip(*parts, strict=True)]
        return {"trees": grown, "base_offset": self.head.bias[output].item()}

    def with_holes(self, x: Tensor) -> Tensor:
        """[B, inputs] with NaN in the place of each number that is missing."""
        if not self.holes:
            return x
        places, flags = torch.tensor(self.holes, device=x.device).T
        missing = x.index_select(1, flags) > 0.5
        return x.index_copy(1, places, torch.where(missing, math.nan, x.index_select(1, places)))


def _list_nodes(column: list[float], threshold: list[float], lost: list[float], leaf: list[float]) -> dict[str, Any]:
    """A tree as lists over those of its nodes that split, [J] each, and the leaves, [L], below them."""
    names = "children_left", "children_right", "children_default", "features", "thresholds", "values"
    made: dict[str, list[Any]] = {name: [] for name in (*names, "node_sample_weight")}

    def add(j: int, share: float) -> int:
        """Add a node and all below it; returns its place."""
        while j < len(column) and threshold[j] >= NOWHERE and lost[j] < 0.5:
            j = 2 * j + 1  # nothing splits here
        place, splits = len(made["values"]), j < len(column)
        about = (column[j], threshold[j], 0.0) if splits else (-2, -2.0, leaf[j - len(column)])
        for name, entry in zip(made, (-1, -1, -1, int(about[0]), about[1], [about[2]], share), strict=True):
            made[name].append(entry)
        if splits:
            sides = [add(2 * j + 1, share / 2), add(2 * j + 2, share / 2)]
            made["children_left"][place], made["children_right"][place] = sides
            made["children_default"][place] = sides[lost[j] > 0.5]
        return place

    add(0, 1.0)
    return {name: np.array(values) for name, values in made.items()}


class Nodes(NamedTuple):
    """What the inner nodes of trees read: [T, J] each, see `Trees`."""

    column: Tensor
    threshold: Tensor
    lost: Tensor

    def walk(self, x: Tensor, levels: int) -> list[Tensor]:
        """[T, B] the nodes, in a heap's order, that inputs x: [f, B] reach at level 0, 1, ... and at last `levels`."""
        holes = x.isnan()
        column = self.column.long() + len(x) * (self.lost > 0.5)  # of x with its holes at left, right
        sides = torch.cat([x.masked_fill(holes, -math.inf), x.masked_fill(holes, math.inf)])
        right = sides.index_select(0, column[:, 0]) > self.threshold[:, :1]
        reached = [torch.zeros_like(right, dtype=torch.int64), right.long() + 1]
        while len(reached) <= levels:
            at = reached[-1]
            right = sides.gather(0, column.gather(1, at)) > self.threshold.gather(1, at)
            reached.append(right.long().add(at, alpha=2) + 1)
        return reached[: levels + 1]

    def find_leaf(self, x: Tensor, depth: int) -> Tensor:
        """[T, B] the leaf of each tree that inputs x: [f, B] reach."""
        return self.walk(x, depth)[-1] - ((1 << depth) - 1)


def values(leaf: Tensor, at: Tensor) -> Tensor:
    """[T, B, k] the numbers of the leaves at: [T, B]; leaf: [T, L, k]."""
    return leaf.gather(1, at[..., None].expand(-1, -1, leaf.shape[2]))


def split_variances(threshold: Tensor, leaf: Tensor) -> Tensor:
    """[T, J] how much of the variance of a tree's answers each split makes, summed over outputs.

    threshold: [T, J]; leaf: [T, L, k]. Each split is taken to send half of what reaches it either way. Then its share
    is the probability to reach it, times the square of half the difference between the mean answers below it, and the
    shares of a tree add up to its variance.
    """
    splits, mean, shares = threshold < NOWHERE, leaf, []
    reach = [torch.ones_like(threshold[:, :1])]
    for level in range(int(math.log2(leaf.shape[1]))):
        split = splits[:, (1 << level) - 1 : (2 << level) - 1]
        left = torch.where(split, reach[-1] / 2, reach[-1])
        right = torch.where(split, reach[-1] / 2, 0)
        reach.append(torch.stack([left, right], 2).flatten(1))
    for level in range(len(reach) - 2, -1, -1):
        split = splits[:, (1 << level) - 1 : (2 << level) - 1, None]
        left, right = mean[:, 0::2], mean[:, 1::2]
        shares.append(reach[level] * (torch.where(split, right - left, 0) / 2).square().sum(2))
        mean = torch.where(split, (left + right) / 2, left)
    return torch.cat(shares[::-1], 1)


def trees(
    shape: tuple[int, ...],
    classes: int,
    *,
    columns: Description | None = None,
    trees: int = 200,  # the most that can grow
    depth: int = 4,  # levels of each, so it has 2^depth leaves
    monotone: str | Sequence[str] = "",  # columns with which no answer may fall, or rise: "age:+ dose:-", or a list
) -> nn.Module:
    """[B, *shape] -> [B, classes]: boosted trees, which `personal-boosting` grows; they begin as nothing.

    Raises UsageError for a shape without axes, for trees of no depth or more than `DEEPEST` levels, and for columns in
    `monotone` that are no numbers.
    """
    if not shape or min(shape) < 1:
        raise UsageError(f"trees: an example needs an axis or more, none of them empty; got shape {list(shape)}")
    if trees < 1 or not 1 <= depth <= DEEPEST:
        raise UsageError(f"trees: needs a tree or more of 1 to {DEEPEST} levels; got trees={trees}, depth={depth}")
    return Trees(
        inputs=math.prod(shape),
        outputs=classes,
        trees=trees,
        depth=depth,
        holes=find_holes(columns),
        monotone=find_monotone(columns, monotone),
    )


def find_holes(columns: Description | None) -> list[tuple[int, int]]:
    """The places of numbers that may be missing, and of the inputs that are 1 where they are."""
    holes, at = [], 0
    for column in () if columns is None else columns.inputs:
        if isinstance(column, Number) and column.missing:
            holes.append((at, at + 1))
        at += len(column.parts)
    return holes


def find_monotone(columns: Description | None, monotone: str | Sequence[str]) -> list[int]:
    """[inputs] 1 where answers may not fall as an input rises, -1 where they may not rise, 0 elsewhere; see `trees`.

    Raises UsageError for what names no number, or no direction.
    """
    directions = dict[str, int]()
    for entry in monotone.split() if isinstance(monotone, str) else monotone:
        name, _, sign = entry.rpartition(":")
        if sign not in ("+", "-") or not name:
            raise UsageError(f"model.monotone: write COLUMN:+ or COLUMN:-, such as age:+; got '{entry}'")
        if directions.setdefault(name, 1 if sign == "+" else -1) != (1 if sign == "+" else -1):
            raise UsageError(f"model.monotone: '{name}' cannot both rise and fall; leave one of them out")
    kinds = {column.name: column for column in columns.inputs} if columns is not None else {}
    if directions and not kinds:
        raise UsageError("model.monotone names columns of a table, and there is none; leave it out")
    for name in directions:
        if name not in kinds:
            raise UsageError(f"model.monotone: there is no input '{name}'; {nearest(name, kinds)}")
        if not isinstance(kinds[name], Number):
            what = f"'{name}' is a {kinds[name].kind}"
            raise UsageError(f"model.monotone: {what}, and only numbers have an order; leave it out")
    return [
        directions.get(column.name, 0) if place == 0 else 0
        for column in kinds.values()
        for place in range(len(column.parts))
    ]
