"""Parts of a user's own: what they give is checked, so that a mixture is made of no number that is wrong."""

from typing import Any

import torch
from torch import Tensor

from ..core.layout import Layout
from ..errors import UsageError, is_out_of_memory
from .comparisons import Comparison
from .weighings import Weighing

ROUNDING = 1e-3  # by how much a row of weights may miss a sum of one, or that of a receiver alone


def compare_vectors(part: Comparison, rows: Tensor, others: Tensor, near: Tensor | None, layout: Layout) -> Tensor:
    """[L, K, N], or [L, K, M] of lists, as `Comparison.compare`; raises UsageError for similarities that are none."""
    if not _is_own(part):
        return part.compare(rows, others, near, layout)
    similarity, where = _call(part, "compare", rows, others, near, layout), f"method.compare: {type(part).__name__}"
    count, layers = others.shape[0] if near is None else near.shape[1], len(layout.layers)
    _check_shape(similarity, [(n, len(rows), count) for n in (1, layers)], where)
    if not bool(similarity.isfinite().all()):
        raise UsageError(f"{where} gives a similarity that is no finite number; give 0 where nothing can be said")
    if len(rows) > 1:
        first = _call(part, "compare", rows[:1], others, None if near is None else near[:1], layout)
        largest = float(similarity.abs().max())
        if first.shape != similarity[:, :1].shape or not _are_close(first, similarity[:, :1], ROUNDING * largest):
            raise UsageError(f"{where} {_BY_OTHERS}; compare each of `rows` by itself")
    return similarity


def weigh_similarities(
    part: Weighing, similarity: Tensor, mass: Tensor, itself: Tensor, counts: Tensor, unheard: Tensor
) -> Tensor:
    """[L, K, M] rows that sum to one, as `Weighing.weigh`; raises UsageError for rows that are none.

    Of receivers that are unheard: [K] bool nobody uses the row, so it may give weight to whom it likes.
    """
    if not _is_own(part):
        return part.weigh(similarity, mass, itself, counts)
    where = f"method.weigh: {type(part).__name__}"
    rows = _call(part, "weigh", similarity, mass, itself, counts)
    _check_shape(rows, [tuple(similarity.shape)], where)
    if not bool(((rows.sum(-1) - 1).abs() < ROUNDING).all()):  # also if one is no number
        raise UsageError(f"{where} gives rows that do not sum to one; divide each by its sum")
    heard = rows[:, ~unheard]
    if bool((heard.masked_fill(itself[~unheard], 0) < 0).any()):
        raise UsageError(f"{where} gives another client a negative weight; only a client's own may be negative")
    if bool((heard.masked_fill(mass[~unheard] > 0, 0) != 0).any()):
        raise UsageError(
            f"{where} gives weight to a client of mass 0, which has not taken part or is no neighbour; multiply rows "
            "by (mass > 0) before they are divided by their sums"
        )
    if len(mass) > 1:
        first = _call(part, "weigh", similarity[:, :1], mass[:1], itself[:1], counts[:1])
        if first.shape != rows[:, :1].shape or not _are_close(first, rows[:, :1], ROUNDING):
            raise UsageError(f"{where} {_BY_OTHERS}; make each row of its similarities alone")
    return rows


_BY_OTHERS = "gives a client's row by who else is asked, so that it would change with the round's cohort"


def _is_own(part: Any) -> bool:
    """Whether a part is not one of kinfed's, which are tested."""
    return not type(part).__module__.startswith("kinfed.")


def _call(part: Any, function: str, *arguments: Any) -> Tensor:
    """What a part gives; raises UsageError if it fails."""
    try:
        result: Tensor = getattr(part, function)(*arguments)
    except Exception as problem:
        if isinstance(problem, UsageError) or is_out_of_memory(problem):
            raise
        name = type(part).__name__
        raise UsageError(f"method.{function}: {name} fails: {type(problem).__name__}: {problem}") from problem
    return result


def _check_shape(given: Any, shapes: list[tuple[int, ...]], where: str) -> None:
    """Raise UsageError unless what a part gives is a tensor of one of these shapes."""
    if not isinstance(given, Tensor):
        raise UsageError(f"{where} gives a {type(given).__name__}; it must be a tensor {list(shapes[0])}")
    if given.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise UsageError(f"{where} gives {list(given.shape)}; it must be {expected}")


def _are_close(first: Tensor, second: Tensor, gap: float) -> bool:
    return torch.allclose(first, second, rtol=0, atol=gap)
