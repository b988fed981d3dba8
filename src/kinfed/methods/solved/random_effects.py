"""Random effects: which coefficients of a mixed model differ from client to client, by the columns that users name."""

import torch
from torch import Tensor

from ...core.method import Roster
from ...errors import UsageError, nearest
from .partial_pooling import coefficients_of

INTERCEPT, ALL = "intercept", "all"


def place_effects(random: str | tuple[str, ...], roster: Roster) -> Tensor:
    """[q] int64 the places, in order, of the named columns' inputs among those of the last layer, whose last is the 1.

    `random` names columns, between spaces or in a list, and "intercept", or is "all". A category has an effect for
    each of its inputs. Raises UsageError for what is no column, and where inputs of the last layer have no names.
    """
    names = random.split() if isinstance(random, str) else [*random]
    inputs = len(coefficients_of(roster.layout, roster.theta)) - 1
    if names == [ALL]:
        return torch.arange(inputs + 1)
    if not names or len({*names}) < len(names):
        raise UsageError(f"method.random must name columns once each, or '{INTERCEPT}' or '{ALL}'; got {random!r}")
    columns = [name for name in names if name != INTERCEPT]
    if columns and not roster.columns:
        raise UsageError(
            f"method.random: inputs are no columns of a table; use '{INTERCEPT}' or '{ALL}'; got {random!r}"
        )
    if columns and {entry.name for entry in roster.layout.entries} != roster.layout.head:
        raise UsageError(
            f"method.random: only the inputs of a linear model are columns; use model.name=linear, '{INTERCEPT}' or "
            f"'{ALL}'; got {random!r}"
        )
    for name in columns:
        if name not in roster.columns:
            guess = nearest(name, [*roster.columns, INTERCEPT])
            raise UsageError(f"method.random: '{name}' is no column of the inputs; {guess}")
    chosen = {*columns}
    places = [at for at, name in enumerate(roster.columns) if name in chosen]
    return torch.tensor([*places, inputs] if INTERCEPT in names else places)
