"""Successive halving of candidates by their clients' validation scores, paired by client and fold."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.engine import Rounds
from ..core.history import History
from ..core.method import Method
from ..core.mixins import Solves
from ..core.training import Training
from ..runs.reference_runs import BASES
from ..verdict.statistics import student

Array = NDArray[np.float64]
Advance = Callable[[Sequence["Entry"], int], Mapping["Entry", str]]  # trains until a round; who ended before, and why

STANDARD = "standard"  # the method of models that each client fits to its own rows
ROUNDING = 1e-6  # of a score, a gain that is none: as of methods that do the same in another order
FINALISTS = 4  # candidates that are trained to the end, Local and FedAvg among them


@dataclass(frozen=True)
class Candidate:
    """A method and how its clients train."""

    name: str  # of its folder, such as "fedaghn,lr=0.1"
    method_name: str
    method: Method
    training: Training
    settings: tuple[str, ...] = ()  # of the method, as overrides, key=value, where a config has none of them
    model: str = ""  # by its name among the models that are candidates; "": the usual one
    own_rounds: Rounds | None = None  # in place of those of the choice
    title: str = ""  # what a verdict calls it; "": as its method

    @property
    def most(self) -> int:
        """The most rounds of its own; 0 where it trains in those of the choice."""
        return 0 if self.own_rounds is None else self.own_rounds.count

    @property
    def is_solved(self) -> bool:
        """Whether its rounds are steps of a solver, which learns by itself how far to pool."""
        return Solves.from_method(self.method).solves

    @property
    def is_standard(self) -> bool:
        """Whether it is a standard model of each client's own, which needs nobody else."""
        return self.method_name == STANDARD

    @property
    def base(self) -> str:
        """ "local" or "fedavg", with which every other candidate is compared; "" if it is another."""
        return self.method_name if self.method_name in BASES else ""

    @property
    def stays(self) -> str:
        """What it is the example of that stays a candidate whatever its score, as it is simple; "" if it may leave."""
        return self.base or (self.model if self.is_solved else "")

    def reach(self, until: int, rounds: Rounds) -> int:
        """After how many rounds it is compared when the choice has come to `until`: a solver at its end."""
        if self.own_rounds is None or not until:
            return until
        if self.is_solved:
            return self.own_rounds.count
        count, every = self.own_rounds.count, self.own_rounds.evaluate_every
        return min(count, math.ceil(count * until / rounds.count / every) * every)


class Entry(NamedTuple):
    """One of a candidate's runs: `fold` says which of the examples are for validation."""

    candidate: Candidate
    fold: int


class Rung(NamedTuple):
    """After how many rounds candidates are compared, and how many of them then go on."""

    until: int
    enter: int


@dataclass
class Standing:
    """How far a candidate came, and its clients' validation scores there, higher being better: [F, N]."""

    candidate: Candidate
    rounds: int = 0
    values: Array = field(default_factory=lambda: np.full((1, 1), np.nan))
    drawn: float = math.nan  # the mean on more draws of validation examples, of a model that is solved
    preferred: bool = False  # of the models that are solved, by these
    problem: str = ""  # why it ended before its time
    trained: int = 0  # rounds on the first fold, fewer than were asked for where validation stopped improving

    @property
    def is_left(self) -> bool:
        """Whether it was trained and has not failed."""
        return self.rounds > 0 and not self.problem

    @property
    def mean(self) -> float:
        """Over the clients that have validation examples, and folds."""
        return float(np.nanmean(self.values)) if np.isfinite(self.values).any() else -math.inf

    def gain_over(self, other: "Standing") -> tuple[float, float, float]:
        """The mean gain over another candidate, its standard error, and half its interval, paired by client."""
        gains = self.values - other.values
        gain = np.nanmean(gains[:, np.isfinite(gains).any(0)], axis=0)
        if len(gain) < 2 or not np.isfinite(gain).all():
            return float(gain.mean()) if len(gain) else math.nan, math.inf, math.inf
        error = float(gain.std(ddof=1) / math.sqrt(len(gain)))
        return float(gain.mean()), error, error * student(len(gain) - 1)

    def is_clearly_above(self, other: "Standing") -> bool:
        """Whether the gain over another candidate is larger than its standard error, and than rounding.

        Or the gain of all clients but those with the largest and the smallest, so that an outlier at one of them, which
        makes the mean uncertain, does not keep the other.
        """
        gain, error, _ = self.gain_over(other)
        least = ROUNDING * abs(other.mean)
        if gain > max(error, least):
            return True
        gains = self.values - other.values
        trimmed, error = trim_mean(np.nanmean(gains[:, np.isfinite(gains).any(0)], axis=0))
        return gain > least and trimmed > max(error, least)

    def is_close_to(self, other: "Standing", share: float) -> bool:
        """Whether the interval of the gain over another candidate shows a loss of no more than a share of its score."""
        gain, _, half = self.gain_over(other)
        return gain - half >= -share * abs(other.mean)


def trim_mean(values: Array) -> tuple[float, float]:
    """The mean of values: [n] without a tenth at each end, at least one of six, and its standard error.

    The error is Yuen's (1974, doi:10.1093/biomet/61.1.165), by the winsorised deviation.
    """
    ordered = np.sort(values[np.isfinite(values)])
    n = len(ordered)
    cut = math.ceil(0.1 * n) if n >= 6 else 0
    if n - 2 * cut < 2:
        return math.nan, math.inf
    inner = ordered[cut : n - cut]
    squares = float(np.clip(ordered, inner[0], inner[-1]).var(ddof=1)) * (n - 1)
    return float(inner.mean()), math.sqrt(squares / (len(inner) * (len(inner) - 1)))


def plan_rounds(rounds: Rounds, own_rounds: Rounds | None = None, until: int = 0) -> Rounds:
    """A candidate's rounds, those of its own or of the choice, which are scored often enough to compare a quarter."""
    if own_rounds is not None:
        return replace(own_rounds, select_by=rounds.select_by, until=until)
    return replace(rounds, evaluate_every=min(rounds.evaluate_every, max(1, rounds.count // 4)), until=until)


def rungs(rounds: int, every: int, entrants: int, folds: int, budget: int, solving: Sequence[int] = ()) -> list[Rung]:
    """The rungs of a choice with so many entrants that takes `budget` training rounds in all, at most.

    `solving` has, for each candidate in the order in which they enter, the rounds that a solver takes in the first
    rung, and 0 of others. Candidates are compared after a quarter and a half of the rounds, and at the end. Whatever
    the budget, Local and FedAvg and at least one other candidate are trained to the end.
    """
    quarter, half = (min(rounds, max(1, round(rounds / part / every)) * every) for part in (4, 2))
    enter = entrants
    while True:
        later = [min(enter, max(FINALISTS, round(enter / 3))), min(enter, FINALISTS)]
        plan = [Rung(quarter, enter), Rung(half, later[0]), Rung(rounds, later[1])]
        ends = [rung.until for rung in plan]
        plan = [rung for i, rung in enumerate(plan) if rung.until not in ends[:i]]
        longer = [most - quarter for most in solving[:enter] if most]
        if cost(plan, folds) + folds * sum(longer) <= budget or enter <= 3:
            return plan
        enter -= 1


def cost(plan: Sequence[Rung], folds: int) -> int:
    """The training rounds that a plan takes."""
    before, total = 0, 0
    for rung in plan:
        total += (rung.until - before) * rung.enter * folds
        before = rung.until
    return total


def run(
    candidates: Sequence[Candidate],
    plan: Sequence[Rung],
    folds: int,
    advance: Advance,
    look: Callable[[Entry, int], Array],
    on_rung: Callable[[int, Sequence[Candidate]], None] = lambda rung, left: None,
) -> list[Standing]:
    """Every candidate's standing, the last to leave first, and among those the best validation score first.

    `advance` trains entries until a round, and says which ended before and why; `look` gives an entry's validation
    scores after so many rounds: [N]. The best candidate of each base, and of each model that is a candidate, stay
    whatever their scores. Candidates that the budget left out take the places of those that ended at once.
    """
    standings = {candidate.name: Standing(candidate) for candidate in candidates}
    left, waiting = list(candidates)[: plan[0].enter], list(candidates)[plan[0].enter :]
    for i, rung in enumerate(plan):
        if i:
            left = _best([standings[candidate.name] for candidate in left], rung.enter)
        on_rung(i, left)
        new = left
        while new:
            ended = advance([Entry(candidate, fold) for candidate in new for fold in range(folds)], rung.until)
            for entry, problem in ended.items():
                standings[entry.candidate.name].problem = problem
            free = 0 if i else len({entry.candidate.name for entry in ended})
            new, waiting = waiting[:free], waiting[free:]
            left = left + new
        left = [candidate for candidate in left if not standings[candidate.name].problem]
        for candidate in left:
            standing = standings[candidate.name]
            standing.rounds = rung.until
            standing.values = np.stack([look(Entry(candidate, fold), rung.until) for fold in range(folds)])
    return sorted(standings.values(), key=rank)


def rank(standing: Standing) -> tuple[bool, int, float]:
    """By which standings are sorted: who came far first, and then the best validation score."""
    return bool(standing.problem), -standing.rounds, -standing.mean


def _best(standings: Sequence[Standing], count: int) -> list[Candidate]:
    """The candidates that go on: the best of each that stays, and then the best of all, up to `count`."""
    ordered = sorted(standings, key=lambda standing: -standing.mean)
    bases = {standing.candidate.stays: standing for standing in ordered[::-1] if standing.candidate.stays}
    stay = list(bases.values())
    stay += [standing for standing in ordered if standing not in stay][: max(1, count - len(stay))]
    return [standing.candidate for standing in ordered if standing in stay]


def winner(standings: Sequence[Standing]) -> Standing | None:
    """The simplest of those that came as far as any, unless another is clearly better: see `Candidate.stays`.

    Simplest are models that are solved, which learn by themselves how far to pool, with one model for all and learning
    alone at the ends; then Local and FedAvg; then everything else. The best of a kind takes the place of a simpler one
    if its gain over the best of that, paired by client, is larger than the gain's standard error; of solved models the
    one that is `preferred` is taken. None if all have ended.
    """
    left = [standing for standing in standings if standing.is_left]
    solved = [standing for standing in left if standing.candidate.is_solved]
    bar = _farthest(solved)  # that others must clear
    chosen = next((standing for standing in solved if standing.preferred), bar)
    for kind in (
        [standing for standing in left if standing.candidate.base],
        [standing for standing in left if not standing.candidate.is_solved],
    ):
        best = _farthest(kind)
        if best is not None and (bar is None or best.is_clearly_above(bar)):
            chosen = bar = best
    return chosen


def base_of(standings: Sequence[Standing], base: str) -> Standing | None:
    """Local, or FedAvg, at the rate that came farthest, and of these at the best; None if all have ended."""
    return _farthest([standing for standing in standings if standing.candidate.base == base and standing.is_left])


def _farthest(standings: Sequence[Standing]) -> Standing | None:
    """The one that came farthest, and of these the best; None of none."""
    return max(standings, key=lambda standing: (standing.rounds, standing.mean), default=None)


def read_validation(history: History, until: int) -> Array:
    """[N] each client's validation score after so many rounds, higher being better; NaN without validation examples.

    Of the kind of model and the round that validation prefers by then, as in a run of so many rounds.
    """
    seen = sum(round < until for round in history.rounds)
    history = copy(history)
    history.rounds, history.scores = history.rounds[:seen], history.scores[:seen]
    values = history.validation(history.preference)
    if values is None:
        return np.full(len(history.names), np.nan)
    return (1.0 if history.selector.higher_is_better else -1.0) * values.double().numpy()
