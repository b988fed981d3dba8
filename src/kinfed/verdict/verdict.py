"""The verdict: what learning from others was worth, over the best baseline without others and the best pooled one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.summary import Metric
from ..errors import UsageError, several
from .dependence import INDEPENDENT, Blocks, block_length
from .statistics import signed_ranks, student

Array = NDArray[np.float64]
Scores = Sequence[Sequence[Any]]  # of one run: by seed and client, [n] the score of each test example

LEVEL = 0.95  # of intervals; and 1 - LEVEL is the share of false ones among clients said to gain or lose
FEW = 2  # clients that leave no interval
FARTHEST = 100.0  # ratio of errors from which the smaller one is nearly zero
LOCAL, FEDAVG = "Local", "FedAvg"  # the names of these two as baselines
ALONE, ONE = "learning alone", "one model for all"
BEST_ALONE, BEST_POOLED = "the best baseline without others", "the best pooled baseline"
EACH, OF_CLIENT = (
    "for each client",
    "the client's ",
)  # how the names of standard models end, or begin, that need no others
IN_ONE_PLACE = " in one place"
HELPS, HELPS_NOT = "Learning from others helps", "Learning from others does not help here"
NOT_WORTH_IT = "Learning from others is not worth it here"


@dataclass(frozen=True)
class Difference:
    """How much better a method is than another: the plain mean over clients, and its interval; positive is better.

    Scores in the metric's own unit, an accuracy as a share; errors, if they are `relative`, as shares of the other's
    error: one minus the geometric mean of the clients' ratios, which is below one, as is its interval. That is NaN
    where clients leave no estimate of the noise: there are one or two, or all differ by the same. `per_row` is the same
    with each client weighted by its test examples.
    """

    mean: float
    low: float
    high: float
    relative: bool = False
    per_row: "Difference | None" = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a number that is not defined is None."""
        values = {"mean": self.mean, "low": self.low, "high": self.high}
        present = {name: value if math.isfinite(value) else None for name, value in values.items()}
        rows = {} if self.per_row is None else {"per_row": self.per_row.to_dict()}
        return {**present, "relative": self.relative, **rows}


class ScoredBaseline(NamedTuple):
    """A baseline that a method is judged against."""

    name: str
    scores: Scores
    needs_rows: bool = False  # whether it needs all rows in one place
    rivals: int = 1  # among how many test examples have chosen it


@dataclass(frozen=True)
class Verdict:
    """What a method is worth on these clients' test examples, in a sentence and in numbers; `print` shows the sentence.

    `over["alone"]` and `over["pooled"]` have the mean difference over the best baseline without others and over the
    best pooled one, which `baselines` names: points for accuracies, shares of the other's error for errors. `gain`,
    `lose` and `undecided` name clients, against the former, by their own test examples; `notes` says in words who
    gains, and what cannot be said. How it is decided: docs/verdict.md.
    """

    sentence: str
    over: dict[str, Difference]  # "alone", and "pooled" if there is such a baseline
    baselines: dict[str, str]  # their names
    gain: list[str]
    lose: list[str]
    undecided: list[str]
    notes: list[str] = field(default_factory=list)
    candidates: int = 1  # from which the method was chosen
    level: float = LEVEL  # of each interval
    worse: int = 0  # clients whose mean score is lower than alone, by however little

    def __str__(self) -> str:
        return "\n".join([self.sentence, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a bound that is not a number is None."""
        return asdict(self) | {"over": {other: shown.to_dict() for other, shown in self.over.items()}}


def judge(
    method: str,
    mine: Scores,
    alone: ScoredBaseline,
    pooled: ScoredBaseline | None = None,
    *,
    names: Sequence[str],
    metric: Metric,
    candidates: int = 1,
    blocks: Blocks = INDEPENDENT,
    saved: str = "",
    notes: Sequence[str] = (),
) -> Verdict:
    """Compare a method with the best baseline without others, and with the best pooled one, on the same test examples.

    Scores are given by seed, then by client in the order of `names`: [n] one for each test example, in the same order
    for all methods. A client without any, such as an attacker, is left out, and so are examples without a score (NaN).

    A client's difference is that of its mean scores, averaged over seeds: of accuracies, or of logarithms of errors.
    The number is the plain mean over clients, with Student's interval at level `LEVEL`. It is not widened for a choice
    among several `candidates`, which other examples have made. Its upper bound is (Bonferroni), where test examples
    have chosen the baseline among several rivals. That a pooled baseline helps where the method is not shown to is said
    by a lower bound that allows for its rivals, and for the method.

    A client gains or loses if its paired test examples say so: by the sign test where scores are 0 or 1 (McNemar's
    exact test), else by Wilcoxon's signed ranks, two-sided. Examples of one block are one observation, see `Blocks`.
    Over seeds, which may share examples, a p-value is twice the mean (Vovk and Wang 2020, doi:10.1093/biomet/asaa027),
    and over clients the false discovery rate is bounded by 1 - `LEVEL` (Benjamini and Hochberg 1995). All others are
    undecided.

    `saved` says which models are saved, for the sentence; `notes` are further remarks.

    Raises UsageError for scores that cannot be paired.
    """
    sign = 1 if metric.higher_is_better else -1
    if method == "fedavg" and pooled is not None and pooled.name == FEDAVG:
        pooled = None
    pairs_alone = _Pairs.from_scores(mine, alone.scores, names, sign, blocks)
    rows = Blocks(totals=blocks.totals)  # which examples belong together does not move a mean
    over = {"alone": pairs_alone.difference(metric.higher_is_better, alone.rivals)}
    between = None
    if pooled is not None:
        pairs = _Pairs.from_scores(mine, pooled.scores, names, sign, rows)
        over["pooled"] = pairs.difference(metric.higher_is_better, pooled.rivals)
        # The method has had a chance already to show that others help.
        between = _Pairs.from_scores(pooled.scores, alone.scores, names, sign, rows).difference(
            metric.higher_is_better, alone.rivals, pooled.rivals + 1
        )
    shown = pairs_alone.decide()
    here = [name for name, present in zip(names, pairs_alone.paired_clients, strict=True) if present]
    decided = {names[i] for i in (*shown.gain, *shown.lose)}
    case = _Case(
        method,
        alone,
        pooled,
        over_alone=over["alone"],
        over_pooled=over.get("pooled"),
        between=between,
        metric=metric,
        clients=len(here),
        candidates=candidates,
        saved=saved,
    )
    remarks = [*case.remarks(), *notes]
    if len(here) > 1 and not case.is_alone:
        remarks = [*pairs_alone.remarks(shown), *remarks]
    return Verdict(
        sentence=case.sentence(),
        over=over,
        baselines={"alone": alone.name} | ({} if pooled is None else {"pooled": pooled.name}),
        gain=[names[i] for i in shown.gain],
        lose=[names[i] for i in shown.lose],
        undecided=[name for name in here if name not in decided],
        notes=remarks,
        candidates=candidates,
        level=LEVEL,
        worse=pairs_alone.worse,
    )


def difference(mine: Sequence[Any], other: Sequence[Any], names: Sequence[str], higher_is_better: bool) -> Difference:
    """How much better the scores of one run are than those of another, given by client, as in `judge`."""
    return _Pairs.from_scores([mine], [other], names, 1 if higher_is_better else -1).difference(higher_is_better)


def decide(
    mine: Scores, others: Scores, names: Sequence[str], higher_is_better: bool, blocks: Blocks = INDEPENDENT
) -> tuple[list[str], list[str]]:
    """The clients that gain, and those that lose, by their own test examples, as in `judge`."""
    shown = _Pairs.from_scores(mine, others, names, 1 if higher_is_better else -1, blocks).decide()
    return [names[i] for i in shown.gain], [names[i] for i in shown.lose]


class Evidence(NamedTuple):
    """What one client's test examples say of a method against another, all seeds together."""

    better: int  # examples that the method scores better on
    worse: int
    same: int
    p: float  # two-sided, not corrected for the number of clients; 1 where ranks contradict the mean


def evidence(
    mine: Scores, others: Scores, names: Sequence[str], higher_is_better: bool, blocks: Blocks = INDEPENDENT
) -> dict[str, Evidence]:
    """Client by client, what `judge` decides by; clients without a pair of scores are left out."""
    pairs = _Pairs.from_scores(mine, others, names, 1 if higher_is_better else -1, blocks)
    values = {i: p for i, p, _ in pairs.p_values()}
    result = {}
    for i, p in values.items():
        gain = pairs.sign * np.concatenate([a[i] - b[i] for a, b in zip(pairs.mine, pairs.others, strict=True)])
        up, down = int((gain > 0).sum()), int((gain < 0).sum())
        result[names[i]] = Evidence(up, down, len(gain) - up - down, p)
    return result


class _Decided(NamedTuple):
    """The positions of clients that gain and that lose."""

    gain: list[int]
    lose: list[int]


class _Pairs(NamedTuple):
    """The scores of two methods on the same test examples, by seed and client; positive differences are better."""

    mine: list[list[Array]]
    others: list[list[Array]]
    blocks: list[list[NDArray[np.int64]]]  # of each pair the block, or its place in the client's rows
    sign: int
    kind: Blocks  # whether these are blocks

    @classmethod
    def from_scores(
        cls, mine: Scores, others: Scores, names: Sequence[str], sign: int, blocks: Blocks = INDEPENDENT
    ) -> "_Pairs":
        """The examples that have a score in both."""
        pairs = cls([], [], [], sign, blocks)
        for seed, (ours, theirs) in enumerate(zip(mine, others, strict=True)):
            if len(ours) != len(names) or len(theirs) != len(names):
                raise UsageError(f"scores must be given for each of {several(len(names), 'client')}")
            triples = [_pair_scores(a, b, name) for a, b, name in zip(ours, theirs, names, strict=True)]
            pairs.mine.append([a for a, _, _ in triples])
            pairs.others.append([b for _, b, _ in triples])
            pairs.blocks.append([blocks.select(seed, i, real) for i, (_, _, real) in enumerate(triples)])
        if not any(pairs.paired_clients):
            raise UsageError("no client has a test score in both runs, so they cannot be compared")
        return pairs

    @property
    def paired_clients(self) -> list[bool]:
        """[N] which clients have a pair, with any seed."""
        return [any(len(scores) > 0 for scores in client) for client in zip(*self.mine, strict=True)]

    @property
    def single(self) -> bool:
        """Whether there is one score for each client."""
        return all(len(client) <= 1 for seed in self.mine for client in seed)

    def means(self, scores: list[list[Array]]) -> Array:
        """[n] the mean scores of clients that are known, over seeds."""
        by_seed = np.array([[client.mean() if len(client) else np.nan for client in seed] for seed in scores])
        return np.nanmean(by_seed[:, self.paired_clients], 0)

    @property
    def differ(self) -> bool:
        """Whether any example is scored differently."""
        seeds = zip(self.mine, self.others, strict=True)
        return any((np.abs(a - b) > 1e-9).any() for pair in seeds for a, b in zip(*pair, strict=True))

    @property
    def worse(self) -> int:
        return int((self.sign * (self.means(self.mine) - self.means(self.others)) < -1e-9).sum())

    def difference(self, higher_is_better: bool, rivals: int = 1, tried: int = 1) -> Difference:
        """The mean over clients with its interval; of errors, if none is 0, by the logarithms of their ratios.

        Errors are compared in their own unit if one is nearly zero, or if ratios say the opposite of mean errors.
        `rivals` and `tried` are those of `interval_over_clients`.
        """
        mine, others = self.means(self.mine), self.means(self.others)
        seeds = [*self.mine, *self.others]
        relative = not higher_is_better and all(
            float(client.mean()) > 0 for seed in seeds for client in seed if len(client)
        )
        gains = self.sign * (mine - others)
        if relative:
            ratios = np.log(others / mine)
            farthest, mean = float(np.abs(ratios).max()), float(ratios.mean())
            relative = farthest <= math.log(FARTHEST) and (mean > 0) == (float(gains.mean()) > 0)
        values = ratios if relative else gains
        sizes = self.kind.totals or [list(map(len, seed)) for seed in self.mine]
        counts = np.array(sizes)[:, self.paired_clients].sum(0)

        def difference_of(bounds: tuple[float, float, float], per_row: Difference | None = None) -> Difference:
            mean, low, high = (-math.expm1(-bound) for bound in bounds) if relative else bounds
            return Difference(mean, low, high, relative, per_row)

        per_row = None if self.single else difference_of(interval_per_row(values, counts))
        return difference_of(interval_over_clients(values, rivals, tried), per_row)

    def p_values(self) -> list[tuple[int, float, bool]]:
        """Each known client's position, its two-sided p-value, and whether the method is better on average."""
        length, values = self.block_length, []
        for i in (i for i, present in enumerate(self.paired_clients) if present):
            by_seed, gains = [], []
            for mine, others, blocks in zip(self.mine, self.others, self.blocks, strict=True):
                if not len(mine[i]):
                    continue
                gain = self.sign * (mine[i] - others[i])
                binary = bool(np.isin([mine[i], others[i]], (0, 1)).all())
                gains.append(gain.mean())
                if self.kind.declared or length > 1:
                    gain, binary = self._by_block(gain, blocks[i], length), False
                by_seed.append(_p_values(gain, binary))
            p = np.mean(by_seed, 0) * (2 if len(by_seed) > 1 else 1)
            better = float(np.mean(gains))
            # A test of ranks may contradict the mean: then nothing is decided.
            agree = better > 0 if p[0] < p[1] else better < 0
            values.append((i, min(1.0, 2 * float(p.min())) if agree else 1.0, better > 0))
        return values

    @property
    def block_length(self) -> int:
        """How many neighbouring examples are one observation, where no blocks are declared; 1: they are independent."""
        if self.kind.declared or self.kind.ids is None:
            return 1
        gains = [
            self.sign * (mine - others)[np.argsort(places, kind="stable")]
            for seeds in zip(self.mine, self.others, self.blocks, strict=True)
            for mine, others, places in zip(*seeds, strict=True)
        ]
        return block_length(gains)

    def _by_block(self, gain: Array, blocks: NDArray[np.int64], length: int) -> Array:
        """[m] the mean gains of a client's blocks: declared ones, or so many neighbouring examples."""
        if not self.kind.declared:
            order = np.argsort(blocks, kind="stable")
            gain, blocks = gain[order], np.arange(len(gain)) // length
        _, at, count = np.unique(blocks, return_inverse=True, return_counts=True)
        return np.bincount(at, gain) / count

    def decide(self) -> _Decided:
        """The positions of the clients that gain, and of those that lose."""
        values = self.p_values()
        p = np.sort([p_value for _, p_value, _ in values])
        bound = p[p <= (1 - LEVEL) * np.arange(1, len(p) + 1) / max(len(p), 1)].max(initial=-1)  # Benjamini, Hochberg
        chosen = [(i, up) for i, p_value, up in values if p_value <= bound]
        return _Decided([i for i, up in chosen if up], [i for i, up in chosen if not up])

    def remarks(self, shown: _Decided) -> Iterator[str]:
        """Who gains and loses, and what is not independent or missing, one remark each."""
        gain, lose, clients = len(shown.gain), len(shown.lose), sum(self.paired_clients)
        left = clients - gain - lose
        if self.single:
            yield "with one score for each client, nobody can say which clients gain"
        elif gain or lose:
            gains = "gains" if gain == 1 else "gain"
            loses = "loses" if lose == 1 else "lose"
            rest = f"; of {left} there are too few test rows to say" if left else ""
            yield f"by their own test rows {several(gain, 'client')} {gains}, {lose} {loses}{rest}"
        elif not self.differ:
            yield "no test row is scored differently, so no client gains or loses"
        else:
            yield "with so few test rows, we cannot say which clients gain"
        if self.kind.declared:
            yield "test rows of one group count as one observation"
        elif not self.single and (length := self.block_length) > 1:
            yield f"neighbouring test rows are not independent, so {length} of them count as one observation"
        if self.kind.spanning:
            have = "has" if self.kind.spanning == 1 else "have"
            yield (
                f"{several(self.kind.spanning, 'group')} {have} rows of several clients, so these clients are not "
                "independent and the intervals may be too narrow"
            )
        if lacking := len(self.paired_clients) - clients:
            yield f"{several(lacking, 'client')} without test scores {'is' if lacking == 1 else 'are'} left out"


def plain(value: float, sign: str = "z", digits: int = 4) -> str:
    """Four digits, and more where whole numbers have them; `sign` as in format strings."""
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.{digits}g}"


def interval_over_clients(values: Array, rivals: int = 1, tried: int = 1) -> tuple[float, float, float]:
    """The plain mean over clients of values: [n], and Student's interval.

    Its upper bound holds for the worst of so many `rivals`, its lower bound for the best of so many `tried`, by
    Bonferroni. NaN of two or fewer clients, or where all are the same and not 0.
    """
    mean, n = float(values.mean()), len(values)
    if n <= FEW or (mean != 0 and np.ptp(values) <= 1e-9 * abs(mean)):
        return mean, math.nan, math.nan
    error = float(values.std(ddof=1)) / math.sqrt(n)
    below, above = (student(n - 1, 1 - (1 - LEVEL) / count) * error for count in (tried, rivals))
    return mean, mean - below, mean + above


def interval_per_row(values: Array, counts: NDArray[np.int64] | Array) -> tuple[float, float, float]:
    """The mean of clients' values: [n], each weighted by its examples' number or weight: [n], and its interval.

    The variance is that of a weighted mean of independent clients, whose effective number is one over the sum of
    squared weights (Kish 1965); NaN where that is two or less, or where all values are the same and not 0.
    """
    weights = counts / counts.sum()
    mean, squares = float((weights * values).sum()), float(np.square(weights).sum())
    if 1 / squares <= FEW or (mean != 0 and np.ptp(values) <= 1e-9 * abs(mean)):
        return mean, math.nan, math.nan
    variance = float((np.square(weights) * np.square(values - mean)).sum()) / (1 - squares)
    half = student(1 / squares - 1, LEVEL) * math.sqrt(variance)
    return mean, mean - half, mean + half


def _pair_scores(mine: Any, other: Any, name: str) -> tuple[Array, Array, NDArray[np.bool_]]:
    """One client's scores of two methods, without examples that have none, and which have: [n]."""
    a, b = np.asarray(mine, np.float64), np.asarray(other, np.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise UsageError(
            f"client {name}: the runs were not tested on the same examples, they have scores {list(a.shape)} and "
            f"{list(b.shape)}; repeat both with the same data, split and seed"
        )
    real = ~(np.isnan(a) | np.isnan(b))
    return a[real], b[real], real


def _p_values(gain: Array, binary: bool) -> tuple[float, float]:
    """The one-sided p-values of gain: [n] being positive, and of it being negative."""
    if binary:
        from scipy import special  # here, as it would add to every start

        up, unequal = int((gain > 0).sum()), int((gain != 0).sum())
        return float(special.bdtrc(up - 1, unequal, 0.5)), float(special.bdtr(up, unequal, 0.5))
    return signed_ranks(gain)


def _write_difference(shown: Difference, metric: Metric, clients: int, over: str = "") -> str:
    """A difference in words, in points or in per cent of the other's error, with its interval."""
    mean, low, high = shown.mean, shown.low, shown.high
    percent = shown.relative or metric.is_share
    scale, digits = (100, "z.1f") if percent else (1, "z,.0f" if abs(mean) >= 1000 else "z.3g")
    if metric.higher_is_better and not shown.relative:
        unit = "points" if metric.is_share else metric.unit or ("" if over else metric.name)
        text = f"{scale * mean:+{digits}} {unit}".rstrip()
        text = f"{metric.name} {text} against {over}" if over else text
    else:
        unit = "%" if shown.relative else metric.unit
        unit = f" {unit}" if unit else ""
        text = f"{metric.name.replace('_', ' ')} {scale * abs(mean):{digits}}{unit} {'higher' if mean < 0 else 'lower'}"
        text = f"{text} than {over}" if over else text
        if mean < 0:
            low, high = -high, -low
    if mean == low == high == 0:
        return f"{text} (every client scores the same)"
    if math.isnan(low):
        why = "two clients leave none" if clients <= FEW else "every client differs by as much"
        return f"{text} (no interval, as {why})"
    label = f"{100 * LEVEL:.0f} % interval " if over else ""
    return f"{text} ({label}{scale * low:{digits}} to {scale * high:{digits}})"


class _Case(NamedTuple):
    """What a sentence is made from."""

    method: str
    alone: ScoredBaseline
    pooled: ScoredBaseline | None
    over_alone: Difference
    over_pooled: Difference | None
    between: Difference | None  # the pooled baseline over the one without others
    metric: Metric
    clients: int
    candidates: int
    saved: str

    @property
    def is_alone(self) -> bool:
        """Whether the method is the best baseline without others itself."""
        return self.alone.name == (LOCAL if self.method == "local" else self.method)

    @property
    def is_standard(self) -> bool:
        """Whether the method is a standard model that each client has by itself."""
        return self.method == "standard" or self.method.endswith(EACH) or self.method.startswith(OF_CLIENT)

    @property
    def pooling_helps(self) -> bool:
        """Whether the pooled baseline is shown to be ahead of the one without others."""
        return self.between is not None and self.between.low > 0

    def remarks(self) -> Iterator[str]:
        """What the pooled baseline gains, where that alone shows that others help."""
        if self.between is not None and self.pooled is not None and self._head().startswith(f"{HELPS}, but"):
            over = f"{BEST_ALONE}, {self.alone.name}"
            yield f"{self.pooled.name} has {_write_difference(self.between, self.metric, self.clients, over)}"

    def sentence(self) -> str:
        """The verdict in one or two sentences."""
        if self.clients == 1:
            return f"There is one client, which has nobody to learn from. Keep {BEST_ALONE}, {self.alone.name}."
        first = self._head()
        if not self.is_alone:
            over = f"{BEST_ALONE}, {self.alone.name}"
            number = _write_difference(self.over_alone, self.metric, self.clients, over)
            first = f"{first}. On test rows it has {number}" if self.is_standard else f"{first}: {number}"
        return " ".join(f"{sentence}." for sentence in (first, self._second()) if sentence)

    def _head(self) -> str:
        """What can be said, in a few words."""
        shown = self.over_alone
        if self.method == "local":
            if self.candidates > 1:
                return "No way of learning from others was clearly better than learning alone on validation rows"
            return "Only learning alone was trained, so nobody can say here whether learning from others helps"
        if self.is_standard:
            better = "no way was clearly better on validation rows than"
            return f"{NOT_WORTH_IT}: {better} {self.method}, which needs nobody else"
        if self.clients <= FEW:
            return "Two clients are too few to say whether learning from others helps"
        if shown.low > 0:
            return f"{ONE[0].upper()}{ONE[1:]} helps" if self.method == "fedavg" else HELPS
        if self.pooling_helps:
            return f"{HELPS}, but {self.method} is not shown to"
        return HELPS_NOT if shown.high < 0 else "Cannot tell whether learning from others helps"

    def _second(self) -> str:
        """The best pooled baseline, and what is saved."""
        saved = f"the {self.saved} models are saved" if self.saved else ""
        shown, pooled = self.over_pooled, self.pooled
        if shown is None or pooled is None:
            return saved[:1].upper() + saved[1:]
        name = f"{BEST_POOLED}, {pooled.name}{IN_ONE_PLACE if pooled.needs_rows else ''}"
        number = _write_difference(shown, self.metric, self.clients)
        if shown.low > 0:
            text = (
                f"It {'also beats' if self.over_alone.low > 0 and not self.is_standard else 'beats'} {name}: {number}"
            )
        else:
            does = "does better" if shown.high < 0 else "may do as well"
            text = f"{name[0].upper()}{name[1:]}, {does}: against it {self.method} has {number}"
        return f"{text}; {saved}" if saved else text
