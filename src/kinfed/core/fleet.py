"""A fleet: all clients, wherever they run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import RunError
from .trees import Tree

Key = tuple[str, str, str]  # model, split, metric
LONGEST = 1e15  # of a model as a vector; sums of squares of such, as in distances and cosines, fit into float32


class Evaluation(NamedTuple):
    """Scores of every named model, and the models themselves, by name."""

    scores: dict[Key, Tensor]  # [K] each
    models: Mapping[str, Tree]  # [K, ...]
    shares: Tensor | None = None  # [K, C] by how much each client belongs to each of C models, where it can be seen


class Reduced(NamedTuple):
    """Uploads of which the server has seen no more than what a method's `aggregate` gets: their means and sums."""

    tree: Tree  # without the clients' axis
    nbytes: int  # of all uploads


class Fleet(Protocol):
    """All clients, wherever they run. Results come in the order of the cohort's ids.

    An evaluation may be a function to call for it when the next round is over, see `Recorder`.
    """

    names: Sequence[str]

    # who replied, with what: [K, ...], or Reduced
    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]: ...

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Evaluation | Callable[[], Evaluation]: ...


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity; if its sum is finite, no mask is needed."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def raise_if_diverged(
    names: Any, round: int, cohort: Tensor, uploads: Tree, remedy: str, models: Tensor | None = None
) -> None:
    """Raise RunError naming the clients for which one of `uploads`, trees: [K, ...], holds NaN or infinity.

    So do models: [K, d] of which the server could not add up the squares, although all of their numbers are finite.
    """
    good = torch.ones(len(cohort), dtype=torch.bool, device=cohort.device)
    short = models is not None and float(torch.linalg.vector_norm(models)) < LONGEST  # and so finite
    for leaf in tree_leaves(uploads):
        if not (short and leaf is models) and not is_finite(leaf):
            good &= torch.isfinite(leaf).reshape(len(cohort), -1).all(1)
    if not good.all():
        raise _divergence_error(names, round, cohort[~good], "NaN or infinity", remedy)
    if models is not None and not short:
        long = ~(torch.linalg.vector_norm(models, dim=1) < LONGEST)
        if long.any():
            raise _divergence_error(names, round, cohort[long], f"a model of length above {LONGEST:.0e}", remedy)


def _divergence_error(names: Any, round: int, ids: Tensor, where: str, remedy: str) -> RunError:
    """The error for clients ids: [M] of which training went to `where`."""
    bad = [names[i] for i in ids.tolist()]
    return RunError(
        f"round {round + 1}: training diverged to {where} at client{'s' if len(bad) > 1 else ''} {', '.join(bad[:5])}"
        f"{f' and {len(bad) - 5} more' if len(bad) > 5 else ''}; {remedy}"
    )
