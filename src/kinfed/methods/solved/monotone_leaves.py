"""Monotone leaves: of all leaf values of a tree that rise or fall as its columns must, those nearest to given ones.

That is isotonic regression (Barlow, Bartholomew, Bremner and Brunk, Statistical Inference under Order Restrictions,
1972) in the order of a tree: where a node splits such a column, no leaf on one side is above any leaf on the other.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ...core.tasks import Classification
from ...errors import UsageError
from ...models.trees import NOWHERE, Nodes

TINY = 1e-12  # of what is divided by


def read_signs(task: Any, tensors: dict[str, Tensor]) -> Tensor | None:
    """[f, k] 1 where an output must rise with an input, -1 where it must fall, 0 where it is free; None if all are.

    Of two classes it is the probability of the second that rises. Raises UsageError for more classes, and for a linear
    layer that goes the other way.
    """
    if (monotone := tensors.get("monotone")) is None:
        return None
    signs = monotone[:, None].expand(-1, tensors["leaf"].shape[2])
    if isinstance(task, Classification):
        if task.classes != 2:
            raise UsageError(
                f"model.monotone: of {task.classes} classes none is the one whose probability is to rise; leave "
                "monotone out, or make the target one of two classes"
            )
        signs = signs * signs.new_tensor([-1, 1])
    return signs


def sign_splits(nodes: Nodes, signs: Tensor) -> Tensor:
    """[T, J, k] the signs: [f, k] of the columns that nodes split, 0 where nothing splits."""
    return signs[nodes.column.long()] * (nodes.threshold < NOWHERE)[..., None]


def find_reached(nodes: Nodes) -> Tensor:
    """[T, L] 1 for leaves that some row can reach, 0 for those at the right of a node that does not split."""
    reached = torch.ones_like(nodes.threshold[:, :1])
    splits = ((nodes.threshold < NOWHERE) | (nodes.lost > 0.5)).to(reached)
    for level in range(int(math.log2(splits.shape[1] + 1))):
        right = reached * splits[:, (1 << level) - 1 : (2 << level) - 1]
        reached = torch.stack([reached, right], 2).flatten(1)
    return reached


def order_leaves(leaf: Tensor, weight: Tensor, nodes: Nodes, signs: Tensor) -> Tensor:
    """[T, L, k] the values nearest to leaf, in squares with weight: [T, L, k] both, that are ordered as signs say.

    Values that are in order stay as they are, to the bit. signs: [f, k], see `read_signs`. From the bottom up: two
    sides that are in order by themselves are brought in order by a bound, above which no value of the one lies, and
    below which none of the other, because isotonic regression within bounds is that without them, cut off at them.
    """
    reached = find_reached(nodes)[..., None].to(leaf)
    weight = weight.to(leaf).expand_as(leaf) * reached
    signs = sign_splits(nodes, signs).to(leaf)
    for level in range(int(math.log2(leaf.shape[1])) - 1, -1, -1):
        sign = signs[:, (1 << level) - 1 : (2 << level) - 1, None]  # [T, S, 1, k]
        sides, heavy, there = (
            part.expand_as(leaf).unflatten(1, (1 << level, 2, -1)).unbind(2) for part in (leaf, weight, reached)
        )
        low, high = (side * sign for side in sides)  # [T, S, m, k] each
        bound = _find_bound(low, high, *heavy)
        top = torch.where(there[0] > 0, low, -math.inf).amax(2, keepdim=True)
        crossed = (sign != 0) & (top > torch.where(there[1] > 0, high, math.inf).amin(2, keepdim=True))
        ordered = torch.minimum(low, bound) * sign, torch.maximum(high, bound) * sign
        pairs = zip(ordered, sides, strict=True)
        leaf = torch.stack([torch.where(crossed, new, old) for new, old in pairs], 2).flatten(1, 3)
    return leaf


def _find_bound(low: Tensor, high: Tensor, light: Tensor, heavy: Tensor) -> Tensor:
    """[T, S, 1, k] the bound that costs least, of values low and high: [T, S, m, k] with these weights.

    It is the mean of the low values above it and the high ones below it, which are those that it moves.
    """
    count = low.shape[2]
    value, at = torch.cat([low, high], 2).sort(2)
    weight = torch.cat([light, heavy], 2).gather(2, at)
    above, below = weight * (at < count), weight * (at >= count)

    def sum_moved(part_above: Tensor, part_below: Tensor) -> Tensor:
        """What a bound at each value moves: low values after it, and high ones up to it."""
        return part_above.sum(2, keepdim=True) - part_above.cumsum(2) + part_below.cumsum(2)

    moved, total = sum_moved(above, below), sum_moved(above * value, below * value)
    last = ((value * moved - total <= 0).sum(2, keepdim=True) - 1).clamp(min=0)  # the slope of the cost rises
    mean = total.gather(2, last) / moved.gather(2, last).clamp(min=TINY)
    ceiling = value.gather(2, (last + 1).clamp(max=2 * count - 1))
    return mean.maximum(value.gather(2, last)).minimum(ceiling)
