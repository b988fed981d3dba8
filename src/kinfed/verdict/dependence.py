"""Test examples that are not independent: rows of one block, or neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CRITICAL = 1.645  # of a correlation of neighbours, one-sided at 5 %
LAGS = 50  # the most neighbours that are looked at


@dataclass(frozen=True)
class Blocks:
    """Which test examples belong together: `ids[seed][client]: [n]` the block, or the place of each example.

    Examples of one declared block, such as a person or a moment, are one observation. Without declared blocks `ids` are
    places in the table, by which neighbours are found. Without ids nothing is known, and all examples are independent.
    """

    ids: Sequence[Sequence[Any]] | None = None
    declared: bool = False
    spanning: int = 0  # blocks that have examples of several clients
    totals: Sequence[Sequence[float]] | None = None  # [seed][client] as how many rows examples count, if not as one

    def select(self, seed: int, client: int, real: NDArray[np.bool_]) -> NDArray[np.int64]:
        """[n] those of a client's examples that have scores."""
        if self.ids is None:
            return np.flatnonzero(real)
        ids = np.asarray(self.ids[seed][client], np.int64)
        return ids[real] if len(ids) == len(real) else np.flatnonzero(real)


INDEPENDENT = Blocks()  # as far as is known


def block_length(gains: Sequence[Array]) -> int:
    """How many neighbouring examples are one observation, from clients' gains in order: [n] each; 1 if independent.

    Neighbours at a lag are dependent if the products of their residuals, from each client's mean and in its deviations,
    are larger than chance over all clients together. Observations are twice as long as the dependence reaches, so that
    two neighbouring observations have little in common (Künsch 1989, doi:10.1214/aos/1176347265).
    """
    scaled = []
    for gain in gains:
        if len(gain) > 2 and (deviation := float(gain.std(ddof=1))) > 0:
            scaled.append((gain - gain.mean()) / deviation)
    reach = 0
    while reach < LAGS and _correlate(scaled, reach + 1) > CRITICAL:
        reach += 1
    return 2 * (reach + 1) if reach else 1


def _correlate(residuals: Sequence[Array], lag: int) -> float:
    """How far neighbours at a lag are correlated, in standard errors; residuals are centred, so they repel by 1 / n."""
    total, pairs = 0.0, 0
    for residual in residuals:
        if (count := len(residual) - lag) > 0:
            total += float((residual[lag:] * residual[:-lag]).sum()) + count / len(residual)
            pairs += count
    return total / np.sqrt(pairs) if pairs else 0.0
