"""The statistics of compared runs as tables."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...verdict.statistics import EXACT
from .compare import Comparison
from .run_rows import Row, decimals
from .run_statistics import ALONE, NAMED, RIVAL, Own, Pair, Ranking, Statistics, ranking, statistics
from .text_table import Grid, facts

DIFFERENCES = (
    "difference: client by client and seed by seed, a client's is its mean over seeds; its interval is Student's over "
    "clients",
    "p: Wilcoxon's signed ranks over clients, two-sided; Holm's is adjusted for the comparisons of its block",
    "worse off: clients with a lower score; ahead: seeds with a better mean",
)


def grids(comparison: Comparison) -> list[Grid]:
    """The tables of all sets of comparable runs, and of mean ranks over these."""
    result, unpaired = [], list[str]()
    if comparison.differing:
        sets = zip(comparison.letters[1:], comparison.sets[1:], strict=True)
        others = "; ".join(f"{letter}: {', '.join(row.name for row in rows)}" for letter, rows in sets)
        unpaired = [f"! no pairs with A, from which these differ in {comparison.differing}: {others}"]
    for letter, rows in zip(comparison.letters, comparison.sets, strict=True):
        found = statistics(rows, comparison.named)
        notes = [*unpaired, *(f"! {note}" for note in found.notes)]
        pairs = _pairs(found, notes)
        own = _tabulate_means(found, [] if pairs else notes)
        result += [grid.of_set(letter) for grid in (own, pairs, _stages(found)) if grid]
    if (over := ranking(comparison)) is not None:
        result.append(_ranks(over, comparison))
    seen: set[str] = set()
    for i, grid in enumerate(result):
        result[i] = replace(grid, notes=[note for note in grid.notes if note not in seen])
        seen |= set(grid.notes)
    return result


def pair_grids(comparison: Comparison) -> list[Grid]:
    """The paired differences alone; if there are none the means, with the reasons."""
    made = grids(comparison)
    return [one for one in made if one.name.startswith("pairs")] or made


def _tabulate_means(found: Statistics, refused: Sequence[str]) -> Grid:
    """Means and intervals of runs, the best and the worst tenth of their clients, and how many gain and lose."""
    rows, pairs = found.rows, {one.name: one.found for one in found.families.get(ALONE, ())}
    shown = _Score(rows[0])
    lines, records, whys = [], [], dict[str, list[str]]()
    for one in found.own:
        local = pairs.get(one.name)
        interval = one.interval
        if interval.why:
            whys.setdefault(interval.why, []).append(one.name)
        lines.append(
            [
                one.name,
                shown.score(interval.mean),
                shown.between(interval.low, interval.high),
                shown.score(one.worst),
                shown.score(one.best),
                "" if local is None else f"{round(local.worse * local.clients)} of {local.clients}",
                "" if one.gain is None else f"{one.gain}/{one.lose}",
            ]
        )
        bounds = {"low": interval.low, "high": interval.high, "over": interval.over}
        values: dict[str, Any] = {"mean": interval.mean, **bounds, "worst10": one.worst, "best10": one.best}
        values["worse_than_local"] = None if local is None else local.worse
        records.append(facts({"method": one.name, **values, "gain": one.gain, "lose": one.lose}))
    notes = [
        *refused,
        *_intervals(found.own),
        *(f"no interval for {', '.join(names)}: {why}" for why, names in whys.items()),
    ]
    if any(one.gain is not None for one in found.own):
        notes.append("gain/lose: clients that do beyond noise against learning alone, by paired test examples")
    headings = ("method", "mean", "95 % interval", "worst\n10 %", "best\n10 %", "worse off\nthan alone", "gain\n/lose")
    title = f"Means over clients, and their spread: {rows[0].describe()}"
    return Grid("means", title, headings, [lines], notes, records)


def _intervals(own: Sequence[Own]) -> list[str]:
    over = {(one.interval.over, len(one.seeds), one.clients) for one in own if not one.interval.why}
    seeds = sorted({count for kind, count, _ in over if kind == "seeds"})
    clients = sorted({count for kind, _, count in over if kind == "clients"})
    lines = []
    if seeds:
        lines.append(f"interval over {' or '.join(map(str, seeds))} seeds (Student's t): of the mean with another seed")
    if clients:
        counts = " or ".join(map(str, clients))
        lines.append(
            f"interval over {counts} clients (bootstrap), of one seed: of the mean of other clients like these"
        )
    return lines


def _pairs(found: Statistics, refused: Sequence[str]) -> Grid | None:
    """Paired differences to Local, FedAvg-FT and the best rival."""
    if not found.families:
        return None
    shown, blocks, records = _Score(found.rows[0]), list[list[list[str]]](), []
    whys = dict[tuple[str, str], list[str]]()
    for family, pairs in found.families.items():
        blocks.append([[one.name, one.other, *_cells(one, shown)] for one in pairs])
        records += [_record(one, family) for one in pairs]
        for one in pairs:
            if one.found.why:
                what = "test" if math.isnan(one.found.p) else "interval"
                whys.setdefault((what, one.found.why), []).append(f"{one.name} against {one.other}")
    every = [one.found for pairs in found.families.values() for one in pairs]
    notes = [*refused, *(f"no {what} of {', '.join(names)}: {why}" for (what, why), names in whys.items())]
    notes += DIFFERENCES
    if few := [one.differ for one in every if not math.isnan(one.p) and one.differ < 6]:
        notes.append(f"with {max(few)} clients that differ p is at least {2 / 2 ** max(few):.3g}, whatever they show")
    if NAMED in found.families:
        notes.append("first block: what the paper compares")
    if RIVAL in found.families:
        notes.append("last block: against the best rival, the best other run by its test scores")
    if any(not math.isnan(one.p) and not one.exact for one in every):
        notes.append(f"p is a normal approximation where more than {EXACT} clients differ")
    headings = ("method", "against", "difference", "95 % interval", "p", "p, Holm", "worse\noff", "ahead")
    title = f"Paired differences{' in points' * found.rows[0].metric.is_share} (above zero is better)"
    return Grid("pairs", title, headings, blocks, notes, records, 2)


def _cells(one: Pair, shown: "_Score") -> list[str]:
    found = one.found
    return [
        shown.difference(found.mean),
        shown.between(found.low, found.high, signed=True),
        _p(found.p),
        _p(one.holm),
        f"{round(found.worse * found.clients)} of {found.clients}",
        f"{found.ahead} of {found.seeds}",
    ]


def _record(one: Pair, family: str) -> dict[str, Any]:
    seeds = {"paired_seeds": " ".join(map(str, one.seeds)), "family": family}
    return facts({"method": one.name, "against": one.other, **one.found._asdict(), "holm": one.holm}) | seeds


def _stages(found: Statistics) -> Grid | None:
    shown, lines, records = _Score(found.rows[0]), [], []
    for one in found.own:
        if one.stages is None:
            continue
        before, after, low, high, pair = one.stages
        both = [before, shown.score(low), after, shown.score(high)]
        bounds = shown.between(pair.low, pair.high, signed=True)
        lost = f"{round(pair.worse * pair.clients)} of {pair.clients}"
        lines.append([one.name, *both, shown.difference(pair.mean), bounds, lost])
        values = {"before": before, "mean_before": low, "after": after, "mean_after": high, "difference": pair.mean}
        records.append(
            facts({"method": one.name, **values, "low": pair.low, "high": pair.high, "p": pair.p, "worse": pair.worse})
        )
    if not lines:
        return None
    headings = ("method", "model\nbefore", "mean", "model\nafter", "mean", "difference", "95 % interval", "worse\noff")
    note = "each kind of model at the round that validation prefers for it; models by the names that methods give them"
    return Grid("training", "Before and after local training", headings, [lines], [note], records)


def _ranks(found: Ranking, comparison: Comparison) -> Grid:
    letters = comparison.letters
    order = sorted(range(len(found.names)), key=lambda i: float(found.found.mean[i]))
    shown = [_Score(rows[0]) for rows in comparison.sets]
    cells = [[one.score(score) for one, score in zip(shown, each, strict=True)] for each in found.scores.T]
    lines = [[found.names[i], f"{found.found.mean[i]:.2f}", *cells[i]] for i in order]
    records = [
        {"method": found.names[i], "mean_rank": float(found.found.mean[i])}
        | {letter: float(score) for letter, score in zip(letters, found.scores[:, i], strict=True)}
        for i in order
    ]
    notes = list(found.notes)
    if not math.isnan(found.found.critical):
        of = f"{len(found.names)} methods, {found.found.columns} data sets"
        notes.append(f"mean ranks up to {found.found.critical:.2f} apart do not differ at 5 % (Nemenyi: {of})")
    if math.isnan(found.found.p):
        notes.append(f"no test that all methods are alike: {found.found.why}")
    else:
        notes.append(f"Friedman's test that all methods are alike: p {_p(found.found.p)}")
    return Grid("ranks", "Mean ranks (1 is best)", ("method", "mean\nrank", *letters), [lines], notes, records)


class _Score:
    """How scores of comparable runs are written: shares in per cent."""

    def __init__(self, row: Row) -> None:
        self.times, self.digits = (100 if row.metric.is_share else 1), decimals([row])

    def score(self, value: float) -> str:
        return f"{self.times * value:.{self.digits}f}"

    def difference(self, value: float) -> str:
        return f"{self.times * value:+z.{self.digits}f}"  # z: no -0.00

    def between(self, low: float, high: float, signed: bool = False) -> str:
        """An interval; empty if it has no bounds."""
        one = self.difference if signed else self.score
        return "" if math.isnan(low) else f"{one(low)} to {one(high)}"


def _p(value: float) -> str:
    return "" if math.isnan(value) else "<0.001" if value < 0.001 else f"{value:.3f}"
