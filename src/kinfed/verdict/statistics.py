"""Statistics of scores: intervals, paired tests, ranks, agreement with print. Pure functions of arrays.

S seeds, N clients, k methods, D columns (data sets). A score that is NaN, such as an attacker's, is left out; a number
that is not defined is NaN, and `why` says in words why. Differences are positive where the first is better.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError

Array = NDArray[np.float64]

LEVEL = 0.95  # of intervals, and 1 - LEVEL of tests
RESAMPLES, FEW = 9_999, 1_000  # of a bootstrap; of more clients Student's interval is as good, and quick
EXACT = 50  # differences up to which a test of ranks counts all signs
INFINITE = "a score is infinite"
SAME = 6  # decimals, in units of the largest score, to which equal differences agree: scores are float32


class Interval(NamedTuple):
    """A mean and its interval: Student's over seeds, or bootstrapped over clients where there is one seed."""

    mean: float
    low: float
    high: float
    over: str  # "seeds" or "clients"
    why: str = ""  # it has no bounds

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a bound that is not a number is None, and `why` says why."""
        bounds = {key: None if math.isnan(value) else value for key, value in (("low", self.low), ("high", self.high))}
        return {**bounds, "over": self.over} | ({"why": self.why} if self.why else {})


class Paired(NamedTuple):
    """How much better one method is than another on the same clients with the same seeds."""

    mean: float  # over clients, of differences that are means over seeds
    low: float  # of Student's interval over clients
    high: float
    p: float  # of Wilcoxon's signed ranks over clients, two-sided
    clients: int  # pairs
    worse: float  # share of these with a negative difference
    differ: int  # how many have a difference other than zero, which the test ranks
    exact: bool  # whether p is, or else its normal approximation
    ahead: int  # seeds with a positive mean over clients
    seeds: int
    why: str = ""  # p or the interval is not defined


class Ranks(NamedTuple):
    """Mean ranks of k methods over D columns; 1 is best, equal scores share a rank."""

    mean: Array  # [k]
    p: float  # of Friedman's test that all methods are alike
    critical: float  # Nemenyi's critical difference: mean ranks that are less apart do not differ significantly
    columns: int  # D
    why: str = ""  # p or critical is not defined


def is_share(metric: str) -> bool:
    """Whether a metric is a share, and so lies in [0, 1] and is shown in percent."""
    return metric.endswith("accuracy")


def interval(scores: ArrayLike, share: bool = False) -> Interval:
    """The mean of scores: [S, N] or [N] and its interval, cut at 0 and 1 if they are of a `share`.

    With several seeds it is Student's, over the S means over clients: it holds for another seed on these clients. With
    one it is the bootstrap over clients, bias-corrected and accelerated (Efron 1987, doi:10.2307/2289144), with draws
    that are always the same: it holds for other clients like these. Over more than 1,000 clients, where the two agree,
    it is Student's. Raises UsageError if no score is a number.
    """
    by_seed = _by_seed(scores)
    over = "seeds" if len(by_seed) > 1 else "clients"
    unit = float(np.nanmax(np.abs(by_seed))) or 1.0
    if math.isinf(unit):
        with np.errstate(invalid="ignore"):  # of both signs
            return Interval(float(np.nanmean(by_seed)), math.nan, math.nan, over, INFINITE)
    by_seed = by_seed / unit
    means = np.array([np.nanmean(scores_of_seed) for scores_of_seed in by_seed])
    values = means if len(means) > 1 else by_seed[0][~np.isnan(by_seed[0])]
    mean = float(means.mean())
    if len(values) < 2:
        return Interval(unit * mean, math.nan, math.nan, over, "one client and one seed")
    if _are_equal(values):
        return Interval(unit * mean, math.nan, math.nan, over, f"all {over} have the same score")
    if over == "seeds" or len(values) > FEW:
        half = _half(values)
        low, high = unit * (mean - half), unit * (mean + half)
        return Interval(unit * mean, max(low, 0.0) if share else low, min(high, 1.0) if share else high, over)
    low, high = _bootstrap(values)
    return Interval(unit * mean, unit * low, unit * high, over)


def compare_pairs(mine: ArrayLike, others: ArrayLike, higher_is_better: bool) -> Paired:
    """Compare scores: [S, N] or [N] of two methods, client by client and seed by seed.

    A client's difference is its mean over the seeds that have both scores, so that a client counts once however many
    seeds there are. The test is `signed_ranks`, of the clients that differ. Raises UsageError for shapes that differ.
    """
    a = np.atleast_2d(np.asarray(mine, np.float64))
    b = np.atleast_2d(np.asarray(others, np.float64))
    if a.shape != b.shape or a.ndim != 2:
        raise UsageError(f"paired scores must have one shape, [S, N]; got {list(a.shape)} and {list(b.shape)}")
    scored = ~np.isnan(a) & ~np.isnan(b)
    if not scored.any():
        raise UsageError("no client has a score in both runs, so they cannot be paired")
    unit = float(np.abs(np.stack([a, b])[:, scored]).max()) or 1.0
    infinite, unit = math.isinf(unit), 1.0 if math.isinf(unit) else unit
    with np.errstate(invalid="ignore"):
        differences = np.where(a == b, 0, a / unit - b / unit) * (1 if higher_is_better else -1)  # [S, N]
        gains = np.nanmean(differences[:, scored.any(0)], 0)  # [n]
        gain = gains.round(SAME)
        by_seed = np.nanmean(differences[scored.any(1)], 1).round(SAME)
        mean = float(gains.mean())
    if abs(mean) < 0.5 * 10**-SAME:
        mean = 0.0  # the sign of what is left by rounding says nothing
    half = math.nan if infinite or _are_equal(gain) else _half(gains)
    nonzero = gain[gain != 0]
    p, why = math.nan, ""
    if len(gain) < 2:
        why = "one client"
    elif not len(nonzero):
        why = "all differences are zero"
    elif infinite:
        why = INFINITE
    else:
        p = min(1.0, 2 * min(signed_ranks(nonzero)))
        why = "all differences are equal" if math.isnan(half) else ""
    return Paired(
        unit * mean,
        unit * (mean - half),
        unit * (mean + half),
        p=float(p),
        clients=len(gain),
        worse=float((gain < 0).mean()),
        differ=len(nonzero),
        exact=len(nonzero) <= EXACT,
        ahead=int((by_seed > 0).sum()),
        seeds=len(by_seed),
        why=why,
    )


def signed_ranks(gain: ArrayLike) -> tuple[float, float]:
    """The one-sided p-values of gain: [n] being positive, and of it being negative: Wilcoxon's signed ranks.

    Zeros are left out (Wilcoxon 1945, doi:10.2307/3001968). Of up to 50 others p counts all signs that they could have;
    beyond that it is the normal approximation, corrected for ties and continuity.
    """
    values = np.asarray(gain, np.float64)
    values = values[values != 0]
    twice = (2 * midranks(np.abs(values))).astype(int)  # ranks of equal values lie between two whole numbers
    up, every, n = int(twice[values > 0].sum()), int(twice.sum()), len(values)
    if n > EXACT:
        over, width = 2 * up - every, math.sqrt(2) * float(np.linalg.norm(twice))
        return math.erfc((over - 2) / width) / 2, math.erfc((-over - 2) / width) / 2
    ways = np.zeros(every + 1)  # of signs, by the sum of the positive ranks
    ways[0] = 1.0
    for rank in twice:
        ways[rank:] = ways[rank:] + ways[: every + 1 - rank]
    return float(ways[up:].sum() / 2**n), float(ways[: up + 1].sum() / 2**n)


def midranks(values: ArrayLike) -> Array:
    """[n] the ranks of values, from 1; equal values share the mean of theirs."""
    _, at, count = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[at]


def student(freedom: float, level: float = LEVEL) -> float:
    """Half the width of an interval of Student's t, in standard errors."""
    from scipy import special  # here, as it would add to every start

    return float(special.stdtrit(freedom, (1 + level) / 2))


def holm(p: ArrayLike) -> Array:
    """Adjust the p-values of several tests, p: [k], for their number, by Holm's step-down method: [k].

    Whoever calls those below alpha significant errs, in any of them, with probability alpha at most (Holm 1979,
    Scandinavian Journal of Statistics 6(2), 65-70). Tests that are not defined (NaN) are not counted.
    """
    values = np.asarray(p, np.float64)
    order = np.argsort(values)[: int((~np.isnan(values)).sum())]  # NaN are last
    adjusted = np.full_like(values, np.nan)
    times = len(order) - np.arange(len(order))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(times * values[order]))
    return adjusted


def mean_ranks(scores: ArrayLike, higher_is_better: bool | Sequence[bool] = True) -> Ranks:
    """Rank k methods on each of D columns, scores: [D, k], as Demšar (2006, JMLR 7, 1-30).

    `higher_is_better` may be given for each column. The critical difference is Nemenyi's: two methods differ if their
    mean ranks are further apart. Raises UsageError for a score that is NaN, as ranks need every method on every column.
    """
    from scipy import stats  # here, as it would add to every start

    table = np.asarray(scores, np.float64)
    if table.ndim != 2 or np.isnan(table).any():
        raise UsageError(
            "ranks need a score of every method on every column, [D, k]; got "
            + (f"{int(np.isnan(table).sum())} NaN" if table.ndim == 2 else f"{list(table.shape)}")
        )
    columns, methods = table.shape
    up = np.broadcast_to(np.asarray(higher_is_better, bool), columns)
    unit = np.abs(np.where(np.isinf(table), 0, table)).max(1, keepdims=True, initial=0)
    table = (table / np.where(unit, unit, 1)).round(SAME)  # as `paired` finds differences of zero
    ranks = stats.rankdata(np.where(up[:, None], -table, table), axis=1)
    if methods < 2 or columns < 2:
        what = "one method" if methods < 2 else "one column"
        return Ranks(ranks.mean(0), math.nan, math.nan, columns, f"{what} is no ranking over several")
    p, why = math.nan, "Friedman's test needs three methods" if methods < 3 else ""
    if all(_are_equal(row) for row in ranks):
        why = "all methods score the same on every column"
    elif methods > 2:
        p = float(stats.friedmanchisquare(*ranks.T).pvalue)
    return Ranks(ranks.mean(0), p, critical_difference(methods, columns), columns, why)


def critical_difference(methods: int, columns: int, level: float = LEVEL) -> float:
    """Nemenyi's: q sqrt(k (k + 1) / 6 D), with q the quantile of the studentised range over sqrt(2) (Demšar 2006)."""
    from scipy import stats

    q = stats.studentized_range.ppf(level, methods, np.inf) / math.sqrt(2)
    return float(q * math.sqrt(methods * (methods + 1) / (6 * columns)))


def not_apart(ranks: ArrayLike, critical: float) -> list[tuple[int, ...]]:
    """The largest groups of methods whose mean ranks: [k] are at most `critical` apart, as positions, best first."""
    values = np.asarray(ranks, np.float64)
    order = np.argsort(values, kind="stable")
    groups: list[tuple[int, ...]] = []
    for first in range(len(order)):
        group = tuple(int(i) for i in order[first:] if values[i] - values[order[first]] <= critical + 1e-12)
        if len(group) > 1 and not any(set(group) <= set(other) for other in groups):
            groups.append(group)
    return groups


def kendall(ours: ArrayLike, printed: ArrayLike) -> float:
    """Kendall's tau-b (1945, doi:10.2307/2332303) of two scores of k methods: [k] each: 1 for the same order.

    Methods without both scores (NaN) are left out; NaN with fewer than two of them, or if all have one score.
    """
    from scipy import stats

    a, b = np.asarray(ours, np.float64), np.asarray(printed, np.float64)
    scored = ~np.isnan(a + b)
    if scored.sum() < 2 or _are_equal(a[scored]) or _are_equal(b[scored]):
        return math.nan
    return float(stats.kendalltau(a[scored], b[scored]).statistic)


def tails(scores: ArrayLike, higher_is_better: bool) -> tuple[float, float]:
    """The means of the worst and the best tenth of clients (at least one), scores: [S, N] or [N]; means over seeds."""
    worst, best = [], []
    for scores_of_seed in _by_seed(scores):
        ordered = np.sort(scores_of_seed[~np.isnan(scores_of_seed)])
        few = max(1, math.ceil(len(ordered) * 0.1 - 1e-9))
        ends = ordered[:few].mean(), ordered[-few:].mean()
        worst.append(ends[0] if higher_is_better else ends[1])
        best.append(ends[1] if higher_is_better else ends[0])
    return float(np.mean(worst)), float(np.mean(best))


def first_reaching(scores: ArrayLike, target: float, higher_is_better: bool) -> int | None:
    """The position of the first of scores: [T] that is at least as good as the target; None if none is."""
    values = np.asarray(scores, np.float64)
    reached = np.flatnonzero(values >= target if higher_is_better else values <= target)
    return int(reached[0]) if len(reached) else None


def _bootstrap(values: Array) -> tuple[float, float]:
    """The interval of the mean of values: [n] up to 1, bias-corrected and accelerated."""
    from scipy import special  # here, as it would add to every start

    draw, n = np.random.default_rng(0), len(values)
    parts = [values[draw.integers(0, n, (min(1000, RESAMPLES - i), n))].mean(1) for i in range(0, RESAMPLES, 1000)]
    means = np.concatenate(parts).round(12)
    mean = values.mean().round(12)  # so that equal means are seen to be
    bias = special.ndtri(((means < mean).mean() + (means <= mean).mean()) / 2)
    deviations = values - mean
    skew = (deviations**3).sum() / (6 * (deviations**2).sum() ** 1.5)
    ends = bias + special.ndtri([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    low, high = np.quantile(means, special.ndtr(bias + ends / (1 - skew * ends)))
    return float(low), float(high)


def _half(values: Array) -> float:
    """Half the width of Student's interval of the mean of values: [n]."""
    return student(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))


def _by_seed(scores: ArrayLike) -> Array:
    """[S, N]; raises UsageError for another shape, or a seed without a score."""
    values: Array = np.atleast_2d(np.asarray(scores, np.float64))
    if values.ndim != 2 or np.isnan(values).all(1).any():
        raise UsageError(f"scores must be [S, N], with a number for each seed; got {_shape(values)}")
    return values


def _shape(values: NDArray[Any]) -> str:
    return f"{list(values.shape)}{' with NaN only' if np.isnan(values).all() else ''}"


def _are_equal(values: Array) -> bool:
    """Whether all are the same number, up to rounding."""
    return bool(np.ptp(values) <= 1e-9 * max(1e-300, float(np.abs(values).max())))
