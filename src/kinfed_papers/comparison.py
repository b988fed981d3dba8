"""One comparison of two methods' scores over seeds, and whether it speaks for a claim or against it.

With several seeds it does at 5 % by Student's paired t. Beside that, a difference counts which no seed could move, one
seed or more: it is over four standard errors, where the error of a seed is the largest standard deviation over seeds
that any cell of the paper's tables has (`papers/claims.toml`, [deviations]).
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from kinfed.verdict.statistics import holm, interval

BySeed = Mapping[int, float]

LEVEL = 0.05  # two-sided
BEYOND = 4.0  # standard errors: no seed moves a score so far


class Comparison(NamedTuple):
    """One comparison that a claim makes; differences are positive where they speak for it."""

    where: str
    metric: str
    differences: BySeed  # by seed, in the metric's unit
    error: float = math.nan  # the standard deviation over seeds of one difference, from other cells; NaN: not known
    margin: float = 0.0  # a difference of so much less than zero is still level
    left_out: bool = False  # whether only one side has some of the seeds
    untrained: bool = False  # one side is not ahead of what needs no network, so nothing is compared

    @property
    def mean(self) -> float:
        return fmean(self.differences.values())

    @property
    def bounds(self) -> tuple[float, float]:
        """The 95 % interval of the mean over seeds; everything with one seed."""
        if len(self.differences) < 2:
            return -math.inf, math.inf
        mean_interval = interval(np.array([[value] for value in self.differences.values()]))
        if math.isnan(mean_interval.low):  # all are equal
            return mean_interval.mean, mean_interval.mean
        return mean_interval.low, mean_interval.high

    @property
    def p(self) -> float:
        """The two-sided p-value of the mean difference, with the margin added, against zero."""
        from scipy import stats  # here, as it would add to every start

        values = np.array([*self.differences.values()]) + self.margin
        if not values.any():
            return 1.0
        p, mean = 1.0, float(values.mean())
        if len(values) > 1:
            same = bool(np.ptp(values) <= 1e-9 * np.abs(values).max())
            p = 0.0 if same else float(stats.ttest_1samp(values, 0).pvalue)
        errors = abs(mean) / self.error * math.sqrt(len(values)) if self.error > 0 else 0.0
        return min(p, float(2 * stats.norm.sf(errors))) if errors >= BEYOND else p

    @property
    def speaks_for(self) -> bool:
        """Whether it does by itself, without a correction."""
        return self.p < LEVEL and self.mean + self.margin > 0


def compare(
    where: str,
    metric: str,
    mine: BySeed,
    other: BySeed,
    factor: float = 1.0,
    sign: float = 1.0,
    *,
    deviation: tuple[float, bool] = (math.nan, False),
    margin: float = 0.0,
) -> Comparison:
    """A number less `factor` times another, times `sign`, over the seeds that both have.

    `deviation` is the standard deviation over seeds of a score, and whether that is a share of the score.
    """
    differences = {seed: sign * (mine[seed] - factor * other[seed]) for seed in mine if seed in other}
    of, is_share = deviation
    sizes = [abs(mine[seed]) + abs(other[seed]) for seed in differences]
    error = of * math.hypot(1, factor) * (max(sizes, default=0.0) / 2 if is_share else 1)
    return Comparison(
        where, metric, differences, error=error, margin=margin, left_out=bool(differences) and set(mine) != set(other)
    )


def against(some: Sequence[Comparison]) -> list[Comparison]:
    """Those that speak against a claim, by Holm's correction over all of them."""
    adjusted = holm([comparison.p for comparison in some])
    return [
        comparison
        for comparison, p in zip(some, adjusted, strict=True)
        if p < LEVEL and comparison.mean + comparison.margin < 0
    ]
