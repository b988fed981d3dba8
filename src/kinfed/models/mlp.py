"""MLP: fully connected layers with ReLU between them."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from ..data.tables.schema import Description
from ..errors import UsageError


def mlp(
    shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (64,),  # widths of the layers before the last
    cut: float = 3.0,  # of a table's inputs, in deviations from the mean: those beyond are as if there; inf: none
    columns: Description | None = None,
) -> nn.Module:
    """Fully connected layers of the `hidden` widths, [B, *shape] -> [B, classes].

    Every layer but the last, `head`, is followed by ReLU. With `columns` the inputs are a table's, whose heavy tails
    would let training diverge: hidden layers see them cut. Raises UsageError for a shape without axes, a width below 1
    or a cut that is not above 0.
    """
    if not shape or min(shape) < 1:
        raise UsageError(f"mlp: an example needs an axis or more, none of them empty; got shape {list(shape)}")
    if any(width < 1 for width in hidden):
        raise UsageError(f"mlp: hidden widths must be at least 1; got {list(hidden)}")
    if not cut > 0:
        raise UsageError(f"mlp: cut must be above 0; got {cut}")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Flatten())
    if columns is not None and hidden and cut < math.inf:
        layers["cut"] = nn.Hardtanh(-cut, cut)
    widths = [math.prod(shape), *hidden]
    for i, (before, after) in enumerate(pairwise(widths), start=1):
        layers[f"fc{i}"], layers[f"relu{i}"] = nn.Linear(before, after), nn.ReLU()
    layers["head"] = nn.Linear(widths[-1], classes)
    return nn.Sequential(layers)
