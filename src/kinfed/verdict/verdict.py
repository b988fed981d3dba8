"""The verdict: what learning from others was worth, over learning alone and over one model for all."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError, several
from .statistics import signed_ranks, student

Array = NDArray[np.float64]
Scores = Sequence[Sequence[Any]]  # of one run: by seed and client, [n] the score of each test example

LEVEL = 0.95  # of intervals; and 1 - LEVEL is the share of false ones among clients said to gain or lose
FEW = 2  # clients that leave no interval
ALONE, ONE = "learning alone", "one model for all"
HELPS, HELPS_NOT = "learning from others helps", "learning from others does not help here"
KEEP = "keep your own models"


@dataclass(frozen=True)
class Difference:
    """How much better a method is than another: the mean over clients, and its interval; positive is better.

    A client counts as far as its test examples tell, see `weighted_interval`: one with few of them less.

    Scores in the metric's own unit, an accuracy as a share; errors, if they are `relative`, as shares of the other's
    error: one minus the geometric mean of the clients' ratios, which is below one, as is its interval. That is NaN
    where clients leave no estimate of the noise: there are one or two, or all differ by the same.
    """

    mean: float
    low: float
    high: float
    relative: bool = False


@dataclass(frozen=True)
class Verdict:
    """What a method is worth on these clients' test examples, in a sentence and in numbers; `print` shows the sentence.

    `over["local"]` and `over["fedavg"]` have the mean difference and its interval: points for accuracies, shares of the
    other's error for errors. `gain`, `lose` and `undecided` name clients, against learning alone, by their own test
    examples. How it is decided: docs/verdict.md.
    """

    sentence: str
    over: dict[str, Difference]  # "local", and "fedavg" if it was run
    gain: list[str]
    lose: list[str]
    undecided: list[str]
    candidates: int = 1  # from which the method was chosen
    level: float = LEVEL  # of each interval
    worse: int = 0  # clients whose mean score is lower than alone, by however little

    def __str__(self) -> str:
        return self.sentence

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a bound that is not a number is None."""
        over = {
            other: {name: value if math.isfinite(value) else None for name, value in asdict(difference).items()}
            for other, difference in self.over.items()
        }
        return asdict(self) | {"over": over}


def judge(
    method: str,
    mine: Scores,
    local: Scores,
    fedavg: Scores | None = None,
    *,
    names: Sequence[str],
    metric: str,
    higher_is_better: bool,
    unit: str | None = None,
    candidates: int = 1,
    leaking: bool = False,
) -> Verdict:
    """Compare a method with Local, and with FedAvg if it is there, on the same test examples.

    Scores are given by seed, then by client in the order of `names`: [n] one for each test example, in the same order
    for all methods. A client without any, such as an attacker, is left out, and so are examples without a score (NaN).

    A client's difference is that of its mean scores, averaged over seeds. Means and intervals, at level `LEVEL`, are
    those of `weighted_interval`, of accuracies and of logarithms of ratios of errors. They are not widened for a choice
    among several `candidates`, which other examples have made. A client gains or loses if its paired test examples say
    so: by the sign test where scores are 0 or 1 (McNemar's exact test), else by Wilcoxon's signed ranks, two-sided;
    over seeds, which may share examples, a p-value is twice the mean (Vovk and Wang 2020, doi:10.1093/biomet/asaa027),
    and over clients the false discovery rate is bounded by 1 - `LEVEL` (Benjamini and Hochberg 1995). All others are
    undecided. `leaking` says that test examples influenced training.

    `unit` is what the metric is counted in, "%" for a share; None: an accuracy is a share.

    Raises UsageError for scores that cannot be paired.
    """
    if method == "fedavg":
        fedavg = None
    sign = 1 if higher_is_better else -1
    alone = _Pairs.of(mine, local, names, sign)
    shared = None if fedavg is None else _Pairs.of(mine, fedavg, names, sign)
    over = {"local": alone.difference(higher_is_better)}
    if shared is not None and fedavg is not None:
        over["fedavg"] = shared.difference(higher_is_better)
    gain, lose = alone.decided()
    here = [name for name, known in zip(names, alone.known, strict=True) if known]
    case = _Case(
        method,
        over["local"],
        over.get("fedavg"),
        None if fedavg is None else _Pairs.of(fedavg, local, names, sign).difference(higher_is_better),
        metric,
        higher_is_better,
        len(here),
        candidates,
        ("%" if metric.endswith("accuracy") else "") if unit is None else unit,
    )
    single = all(len(one) <= 1 for seed in alone.mine for one in seed)
    count = f"{several(alone.examples, 'test example')} of {several(len(here), 'client')}"
    if single:  # of a test example or, where those of examples were not kept, of all
        count = f"{several(len(here), 'client')} with one score each"
    parts = [
        case.sentence(count)
        if len(here) > 1
        else "there is one client, which has nobody to learn from: keep its own model (method=local)"
    ]
    if len(here) > 1 and method != "local" and not case.for_one:
        counted = _count_gains(len(gain), len(lose), len(here))
        parts.append("one score each does not tell which clients gain" if single else counted)
    if leaking:
        parts.append("leaking: these scores are not a fair estimate")
    return Verdict(
        "; ".join(parts),
        over,
        [names[i] for i in gain],
        [names[i] for i in lose],
        [name for name in here if name not in {names[i] for i in [*gain, *lose]}],
        candidates,
        LEVEL,
        alone.worse,
    )


def difference(mine: Sequence[Any], other: Sequence[Any], names: Sequence[str], higher_is_better: bool) -> Difference:
    """How much better the scores of one run are than those of another, given by client, as in `judge`."""
    return _Pairs.of([mine], [other], names, 1 if higher_is_better else -1).difference(higher_is_better)


class Evidence(NamedTuple):
    """What one client's test examples say of a method against another, all seeds together."""

    better: int  # examples that the method scores better on
    worse: int
    same: int
    p: float  # two-sided, not corrected for the number of clients; 1 where ranks contradict the mean


def evidence(mine: Scores, others: Scores, names: Sequence[str], higher_is_better: bool) -> dict[str, Evidence]:
    """Client by client, what `judge` decides by; clients without a pair of scores are left out."""
    pairs = _Pairs.of(mine, others, names, 1 if higher_is_better else -1)
    values = {i: p for i, p, _ in pairs.p_values()}
    result = {}
    for i, p in values.items():
        gain = pairs.sign * np.concatenate([a[i] - b[i] for a, b in zip(pairs.mine, pairs.others, strict=True)])
        up, down = int((gain > 0).sum()), int((gain < 0).sum())
        result[names[i]] = Evidence(up, down, len(gain) - up - down, p)
    return result


class _Pairs(NamedTuple):
    """The scores of two methods on the same test examples, by seed and client; positive differences are better."""

    mine: list[list[Array]]
    others: list[list[Array]]
    sign: int

    @classmethod
    def of(cls, mine: Scores, others: Scores, names: Sequence[str], sign: int) -> "_Pairs":
        """The examples that have a score in both."""
        pairs = cls([], [], sign)
        for own, other in zip(mine, others, strict=True):
            if len(own) != len(names) or len(other) != len(names):
                raise UsageError(f"scores must be given for each of {several(len(names), 'client')}")
            both = [_pair_scores(a, b, name) for a, b, name in zip(own, other, names, strict=True)]
            pairs.mine.append([a for a, _ in both])
            pairs.others.append([b for _, b in both])
        if not any(pairs.known):
            raise UsageError("no client has a test score in both runs, so they cannot be compared")
        return pairs

    @property
    def examples(self) -> int:
        return sum(len(one) for seed in self.mine for one in seed)

    @property
    def known(self) -> list[bool]:
        """[N] which clients have a pair, with any seed."""
        return [any(len(one) > 0 for one in client) for client in zip(*self.mine, strict=True)]

    def means(self, scores: list[list[Array]]) -> Array:
        """[n] the mean scores of clients that are known, over seeds."""
        each = np.array([[one.mean() if len(one) else np.nan for one in seed] for seed in scores])
        means: Array = np.nanmean(each[:, self.known], 0)
        return means

    @property
    def worse(self) -> int:
        return int((self.sign * (self.means(self.mine) - self.means(self.others)) < -1e-9).sum())

    def difference(self, higher_is_better: bool) -> Difference:
        """The mean over clients with its interval; of errors, if none is 0, by the logarithms of their ratios."""
        mine, others = self.means(self.mine), self.means(self.others)
        seeds = [*self.mine, *self.others]
        relative = not higher_is_better and all(float(one.mean()) > 0 for seed in seeds for one in seed if len(one))
        values = np.log(others / mine) if relative else self.sign * (mine - others)
        mean, low, high = weighted_interval(values, self._noise(relative))
        if relative:
            mean, low, high = (-math.expm1(-one) for one in (mean, low, high))
        return Difference(mean, low, high, relative)

    def _noise(self, relative: bool) -> Array:
        """[n] the variance of each known client's difference that its number of examples leaves.

        That of single examples is taken to be the same at all clients, as few of them have enough to tell.
        """
        squares, free = 0.0, 0
        for mine, others in zip(self.mine, self.others, strict=True):
            for a, b in ((a, b) for a, b in zip(mine, others, strict=True) if len(a)):
                gain = b / b.mean() - a / a.mean() if relative else a - b
                squares, free = squares + float(np.square(gain - gain.mean()).sum()), free + len(a) - 1
        counts = np.array([[len(one) or np.nan for one in seed] for seed in self.mine])[:, self.known]
        noise: Array = squares / max(free, 1) * np.nanmean(1 / counts, 0)
        return noise

    def p_values(self) -> list[tuple[int, float, bool]]:
        """Each known client's position, its two-sided p-value, and whether the method is better on average."""
        clients = [i for i, known in enumerate(self.known) if known]
        values = []
        for i in clients:
            pairs = [(mine[i], others[i]) for mine, others in zip(self.mine, self.others, strict=True) if len(mine[i])]
            each = np.array([_p_values(self.sign * (a - b), bool(np.isin([a, b], (0, 1)).all())) for a, b in pairs])
            p = each.mean(0) * (2 if len(each) > 1 else 1)
            better = float(self.sign * np.mean([a.mean() - b.mean() for a, b in pairs]))
            # A test of ranks may contradict the mean: then nothing is decided.
            agree = better > 0 if p[0] < p[1] else better < 0
            values.append((i, min(1.0, 2 * float(p.min())) if agree else 1.0, better > 0))
        return values

    def decided(self) -> tuple[list[int], list[int]]:
        """The positions of the clients that gain, and of those that lose."""
        values = self.p_values()
        p = np.sort([one for _, one, _ in values])
        bound = p[p <= (1 - LEVEL) * np.arange(1, len(p) + 1) / max(len(p), 1)].max(initial=-1)  # Benjamini, Hochberg
        chosen = [(i, up) for i, one, up in values if one <= bound]
        return [i for i, up in chosen if up], [i for i, up in chosen if not up]


def plain(value: float, sign: str = "z", digits: int = 4) -> str:
    """Four digits, and more where whole numbers have them; `sign` as in format strings."""
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.{digits}g}"


def weighted_interval(values: Array, noise: Array) -> tuple[float, float, float]:
    """The mean over clients and its interval, from each client's value: [n] and the variance of its noise: [n].

    A random-effects mean: the variance between clients is such that weighted squares are as expected (Paule and Mandel
    1982, doi:10.6028/jres.087.022), and the interval is Student's of weighted values (Hartung and Knapp 2001,
    doi:10.1002/sim.791). Where noise is the same for all it is Student's interval. NaN of two or fewer clients, or
    where all are the same and not 0.
    """
    mean, n = float(values.mean()), len(values)
    if n <= FEW or (mean != 0 and np.ptp(values) <= 1e-9 * abs(mean)):
        return mean, math.nan, math.nan
    variance = float(values.var(ddof=1))

    def weighted(between: float) -> tuple[Array, float, float]:
        weights = 1 / (between + noise)
        middle = float(np.average(values, weights=weights))
        return weights, middle, float((weights * (values - middle) ** 2).sum())

    least = 1e-6 * variance  # so that there are weights where no client has noise
    between = least
    if variance > 0 and weighted(least)[2] > n - 1:
        high = max(variance, least) * n
        for _ in range(60):  # halvings
            between, high = (middle, high) if weighted(middle := (between + high) / 2)[2] > n - 1 else (between, middle)
    if variance > 0:
        weights, mean, squares = weighted(between)
        variance = n * squares / ((n - 1) * float(weights.sum()))
    half = student(n - 1, LEVEL) * math.sqrt(variance / n)
    return mean, mean - half, mean + half


def _pair_scores(mine: Any, other: Any, name: str) -> tuple[Array, Array]:
    """One client's scores of two methods, without examples that have none."""
    a, b = np.asarray(mine, np.float64), np.asarray(other, np.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise UsageError(
            f"client {name}: the runs were not tested on the same examples, they have scores {list(a.shape)} and "
            f"{list(b.shape)}; repeat both with the same data, split and seed"
        )
    real = ~(np.isnan(a) | np.isnan(b))
    return a[real], b[real]


def _p_values(gain: Array, binary: bool) -> tuple[float, float]:
    """The one-sided p-values of gain: [n] being positive, and of it being negative."""
    if binary:
        from scipy import special  # here, as it would add to every start

        up, apart = int((gain > 0).sum()), int((gain != 0).sum())
        return float(special.bdtrc(up - 1, apart, 0.5)), float(special.bdtr(up, apart, 0.5))
    return signed_ranks(gain)


class _Case(NamedTuple):
    """What a sentence is made from."""

    method: str
    alone: Difference  # over Local
    shared: Difference | None  # over FedAvg
    fedavg: Difference | None  # FedAvg over Local
    metric: str
    higher_is_better: bool
    clients: int
    candidates: int
    unit: str  # of the metric

    @property
    def for_one(self) -> bool:
        """Whether one model for all does at least as well, and better than learning alone."""
        if self.shared is None or self.fedavg is None or self.method == "local":
            return False
        return self.shared.mean <= 0 and (self.alone.low > 0 or self.fedavg.low > 0)

    def sentence(self, count: str) -> str:
        """The verdict in words; `count` says on how many test examples and clients it rests."""
        alone, shared, chosen = self.alone, self.shared, ""
        if self.candidates > 1:
            chosen = f", chosen among {self.candidates} candidates"
        if self.method == "local":
            return self._of_local(count, chosen)
        if shared and self.fedavg and self.for_one:
            how = "better" if shared.high < 0 else "as well"
            worth, mine = self._number(self.fedavg, ALONE), self._number(shared, ONE, short=True)
            return f"{ONE} does {how} here: method=fedavg, {worth}; {self.method}{chosen}: {mine}"
        by = f" ({self.method}{chosen})" * bool(chosen)
        also = ""
        if shared:
            unclear = alone.low > 0 and not shared.low > 0
            lead = f"; it is unclear whether that beats {ONE}: " if unclear else ", and "
            also = f"{lead}{self._number(shared, ONE, short=True)}"
        if alone.low > 0:
            helps = f"{ONE} helps" if self.method == "fedavg" else HELPS
            return f"{helps}{by}: {self._number(alone, ALONE)}{also}"
        if alone.high < 0:
            return f"{HELPS_NOT}: {KEEP} (method=local); {self.method}{chosen}: {self._number(alone, ALONE)}"
        if self.clients <= FEW:  # each of them may gain beyond noise
            return f"two clients do not tell what others would gain{by}: {self._number(alone, ALONE)}{also}"
        return f"cannot tell from {count}{by}: {self._number(alone, ALONE)}{also}"

    def _of_local(self, count: str, chosen: str) -> str:
        """The sentence on learning alone itself, of which the one thing known is how it compares with FedAvg."""
        shared = self.shared
        none = "no candidate was clearly better than learning alone on validation examples"
        if shared is None:
            return f"cannot tell whether {HELPS}: only learning alone was trained"
        if chosen:
            number = f"on test examples {self._number(shared, ONE)}"
            if shared.low > 0:
                return f"{ONE} does not help here, and {none}: {KEEP} (method=local{chosen}); {number}"
            return f"cannot tell whether {HELPS}: {none}, so each client keeps its own (method=local{chosen}); {number}"
        if shared.low > 0:
            return f"{ONE} does not help here: {KEEP} (method=local); local: {self._number(shared, ONE)}"
        if shared.high < 0:
            return f"{ONE} does better here: method=fedavg; local: {self._number(shared, ONE)}"
        return f"cannot tell from {count}: {self._number(shared, ONE)}"

    def _number(self, found: Difference, other: str, short: bool = False) -> str:
        """A difference in words: in points, or in per cent of the other's error."""
        mean, low, high = found.mean, found.low, found.high
        average = "" if short else " on average"
        if not found.relative:
            percent = self.unit == "%"
            unit = "" if short else " points" if percent else f" {self.unit or self.metric}"
            scale, digits = (100, "z.1f") if percent else (1, "z,.0f" if abs(mean) >= 1000 else "z.3g")
            sign = 1 if self.higher_is_better else -1  # errors are written as they are, lower being better
            mean, low, high = (sign * mean, low, high) if sign > 0 else (-mean, -high, -low)
            text = f"{scale * mean:+{digits}}{unit}{average} over {other}"
        else:
            if mean < 0:
                low, high = -high, -low
            scale, digits = 100, "z.1f"
            text = f"{100 * abs(mean):.1f} % {'higher' if mean < 0 else 'lower'}{average}"
            text = f"{text if short else f'{self.metric} {text}'} than {'when ' * (other == ALONE)}{other}"
        if math.isnan(low):
            why = (
                f"from {several(self.clients, 'client')}"
                if self.clients <= FEW
                else "as every client differs by as much"
            )
            return f"{text} (no interval, {why})"
        label = "" if short else f"{100 * LEVEL:.0f} % interval "
        return f"{text} ({label}{scale * low:{digits}} to {scale * high:{digits}})"


def _count_gains(gain: int, lose: int, clients: int) -> str:
    if not gain and not lose:
        return "no single client's difference can be told from noise"
    gains, loses = "gain" + "s" * (gain == 1), "lose" + "s" * (lose == 1)
    return f"{gain} of {several(clients, 'client')} {gains}, {lose} {loses}, {clients - gain - lose} undecided"
