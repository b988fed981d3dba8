"""Prediction intervals: a client's answer, and how far on both sides the truth may be.

Split conformal prediction (Lei et al., Journal of the American Statistical Association 2018, Algorithm 2), with errors
in units of each client's own. A client with few test rows has no quantile, but a mean error, which is drawn to that of
all clients as far as their differences follow from chance.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

Array = NDArray[np.float64]


def read_percent(percent: Any, what: str) -> float:
    """The share of truths that intervals are to hold; `what` asks for them. Raises UsageError for what is no share."""
    if not isinstance(percent, int | float) or isinstance(percent, bool) or not 1 <= percent < 100:
        got = f"{percent:g}" if isinstance(percent, float) else f"{percent!r:.80}"
        raise UsageError(f"{what} is in per cent, from 1 to below 100, such as 90; got {got}")
    return percent / 100


def find_half_widths(errors: Sequence[NDArray[Any]], level: float) -> Array:
    r"""[N + 1, C] half of each client's interval for C outputs, and at last that of a client without test rows.

    `errors` are those of test rows, [n, C] for each of N clients, NaN where the truth is missing. With $m_i$ the mean
    of client $i$'s $n_i$ absolute errors and $m$ that of all clients' rows, $s_i = (n_i m_i + k m) / (n_i + k)$,
    where $k$ is the variance of errors within clients over that of $m_i$ between them. The half is $q s_i$, and $q$
    the conformal quantile of errors over $s_i$, in which a row's own error has no part.

    Raises UsageError if there are fewer test rows than the level needs.
    """
    columns = [[np.abs(table[:, c][~np.isnan(table[:, c])]) for table in errors] for c in range(errors[0].shape[1])]
    return np.stack([_find_of_output(column, level) for column in columns], 1)


def _find_of_output(errors: Sequence[Array], level: float) -> Array:
    """[N + 1] the same of a single output, whose absolute errors are: [n] for each client."""
    sizes = np.array([len(column) for column in errors])
    rows = int(sizes.sum())
    rank = math.ceil((rows + 1) * level - 1e-9)
    if rank > rows:
        raise UsageError(
            f"intervals that hold {level:.4g} of all rows need at least {math.ceil(level / (1 - level) - 1e-9)} rows "
            f"of all clients together that were held out; got {rows}, so hold out more"
        )
    sums = np.array([column.sum() for column in errors])
    mean = float(np.concatenate(errors).mean())
    mean = max(mean, float(np.finfo(float).tiny))
    drawn = _spread_between(errors, sums, sizes)
    scales = (drawn * sums + mean) / (drawn * sizes + 1)
    ratios = [
        column / ((drawn * (total - column) + mean) / (drawn * (len(column) - 1) + 1))
        for column, total in zip(errors, sums, strict=True)
    ]
    quantile = float(np.sort(np.concatenate(ratios))[rank - 1])
    return np.append(scales, mean) * quantile


def _spread_between(errors: Sequence[Array], sums: Array, sizes: NDArray[np.int64]) -> float:
    """$1 / k$: the variance of clients' expected absolute errors over that of errors within clients, by moments."""
    rows, clients = int(sizes.sum()), int((sizes > 0).sum())
    if clients < 2 or rows <= clients:
        return 0.0
    means = sums / np.maximum(sizes, 1)
    within = sum(float(((column - mean) ** 2).sum()) for column, mean in zip(errors, means, strict=True))
    within /= rows - clients
    between = float((sizes * (means - sums.sum() / rows) ** 2).sum()) - (clients - 1) * within
    between /= rows - float((sizes**2).sum()) / rows
    if within <= 0:
        return 0.0
    return max(between, 0.0) / within
