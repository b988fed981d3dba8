"""The statistics of compared runs as tables."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...verdict.statistics import EXACT
from .compare import Comparison
from .run_rows import Row, decimals
from .run_statistics import ALONE, NAMED, RIVAL, Pair, Ranking, RunStatistics, Statistics, ranking, statistics
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
        stats = statistics(rows, comparison.named)
        notes = [*unpaired, *(f"! {note}" for note in stats.notes)]
        pairs = _pairs(stats, notes)
        means = _tabulate_means(stats, [] if pairs else notes)
        result += [grid.of_set(letter) for grid in (means, pairs, _stages(stats)) if grid]
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
    return [grid for grid in made if grid.name.startswith("pairs")] or made


def _tabulate_means(stats: Statistics, refused: Sequence[str]) -> Grid:
    """Means and intervals of runs, the best and the worst tenth of their clients, and how many gain and lose."""
    rows = stats.rows
    pairs = {pair.name: pair.comparison for pair in stats.families.get(ALONE, ())}
    shown = _Score(rows[0])
    lines, records, whys = [], [], dict[str, list[str]]()
    for run in stats.runs:
        local = pairs.get(run.name)
        interval = run.interval
        if interval.why:
            whys.setdefault(interval.why, []).append(run.name)
        lines.append(
            [
                run.name,
                shown.score(interval.mean),
                shown.write_interval(interval.low, interval.high),
                shown.score(run.worst),
                shown.score(run.best),
                "" if local is None else f"{round(local.worse * local.clients)} of {local.clients}",
                "" if run.gain is None else f"{run.gain}/{run.lose}",
            ]
        )
        bounds = {"low": interval.low, "high": interval.high, "over": interval.over}
        values: dict[str, Any] = {"mean": interval.mean, **bounds, "worst10": run.worst, "best10": run.best}
        values["worse_than_local"] = None if local is None else local.worse
        records.append(facts({"method": run.name, **values, "gain": run.gain, "lose": run.lose}))
    notes = [
        *refused,
        *_intervals(stats.runs),
        *(f"no interval for {', '.join(names)}: {why}" for why, names in whys.items()),
    ]
    if any(run.gain is not None for run in stats.runs):
        notes.append("gain/lose: clients that do beyond noise against learning alone, by paired test examples")
    headings = ("method", "mean", "95 % interval", "worst\n10 %", "best\n10 %", "worse off\nthan alone", "gain\n/lose")
    title = f"Means over clients, and their spread: {rows[0].describe()}"
    return Grid("means", title, headings, [lines], notes, records)


def _intervals(runs: Sequence[RunStatistics]) -> list[str]:
    over = {(run.interval.over, len(run.seeds), run.clients) for run in runs if not run.interval.why}
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


def _pairs(stats: Statistics, refused: Sequence[str]) -> Grid | None:
    """Paired differences to Local, FedAvg-FT and the best rival."""
    if not stats.families:
        return None
    shown, blocks, records = _Score(stats.rows[0]), list[list[list[str]]](), []
    whys = dict[tuple[str, str], list[str]]()
    for family, pairs in stats.families.items():
        blocks.append([[pair.name, pair.other, *_cells(pair, shown)] for pair in pairs])
        records += [_record(pair, family) for pair in pairs]
        for pair in pairs:
            if pair.comparison.why:
                what = "test" if math.isnan(pair.comparison.p) else "interval"
                whys.setdefault((what, pair.comparison.why), []).append(f"{pair.name} against {pair.other}")
    every = [pair.comparison for pairs in stats.families.values() for pair in pairs]
    notes = [*refused, *(f"no {what} of {', '.join(names)}: {why}" for (what, why), names in whys.items())]
    notes += DIFFERENCES
    if few := [paired.differ for paired in every if not math.isnan(paired.p) and paired.differ < 6]:
        notes.append(f"with {max(few)} clients that differ p is at least {2 / 2 ** max(few):.3g}, whatever they show")
    if NAMED in stats.families:
        notes.append("first block: what the paper compares")
    if RIVAL in stats.families:
        notes.append("last block: against the best rival, the best other run by its test scores")
    if any(not math.isnan(paired.p) and not paired.exact for paired in every):
        notes.append(f"p is a normal approximation where more than {EXACT} clients differ")
    headings = ("method", "against", "difference", "95 % interval", "p", "p, Holm", "worse\noff", "ahead")
    unit = " in points" if stats.rows[0].metric.is_share else ""
    title = f"Paired differences{unit} (above zero is better)"
    return Grid("pairs", title, headings, blocks, notes, records, 2)


def _cells(pair: Pair, shown: "_Score") -> list[str]:
    paired = pair.comparison
    return [
        shown.difference(paired.mean),
        shown.write_interval(paired.low, paired.high, signed=True),
        _p(paired.p),
        _p(pair.holm),
        f"{round(paired.worse * paired.clients)} of {paired.clients}",
        f"{paired.ahead} of {paired.seeds}",
    ]


def _record(pair: Pair, family: str) -> dict[str, Any]:
    seeds = {"paired_seeds": " ".join(map(str, pair.seeds)), "family": family}
    return facts({"method": pair.name, "against": pair.other, **pair.comparison._asdict(), "holm": pair.holm}) | seeds


def _stages(stats: Statistics) -> Grid | None:
    shown, lines, records = _Score(stats.rows[0]), [], []
    for run in stats.runs:
        if run.stages is None:
            continue
        before, after, low, high, pair = run.stages
        both = [before, shown.score(low), after, shown.score(high)]
        bounds = shown.write_interval(pair.low, pair.high, signed=True)
        lost = f"{round(pair.worse * pair.clients)} of {pair.clients}"
        lines.append([run.name, *both, shown.difference(pair.mean), bounds, lost])
        values = {"before": before, "mean_before": low, "after": after, "mean_after": high, "difference": pair.mean}
        records.append(
            facts({"method": run.name, **values, "low": pair.low, "high": pair.high, "p": pair.p, "worse": pair.worse})
        )
    if not lines:
        return None
    headings = ("method", "model\nbefore", "mean", "model\nafter", "mean", "difference", "95 % interval", "worse\noff")
    note = "each kind of model at the round that validation prefers for it; models by the names that methods give them"
    return Grid("training", "Before and after local training", headings, [lines], [note], records)


def _ranks(ranking: Ranking, comparison: Comparison) -> Grid:
    letters = comparison.letters
    order = sorted(range(len(ranking.names)), key=lambda i: float(ranking.ranks.mean[i]))
    shown = [_Score(rows[0]) for rows in comparison.sets]
    cells = [[form.score(x) for form, x in zip(shown, scores, strict=True)] for scores in ranking.scores.T]
    lines = [[ranking.names[i], f"{ranking.ranks.mean[i]:.2f}", *cells[i]] for i in order]
    records = [
        {"method": ranking.names[i], "mean_rank": float(ranking.ranks.mean[i])}
        | {letter: float(score) for letter, score in zip(letters, ranking.scores[:, i], strict=True)}
        for i in order
    ]
    notes = list(ranking.notes)
    if not math.isnan(ranking.ranks.critical):
        of = f"{len(ranking.names)} methods, {ranking.ranks.columns} data sets"
        notes.append(f"mean ranks up to {ranking.ranks.critical:.2f} apart do not differ at 5 % (Nemenyi: {of})")
    if math.isnan(ranking.ranks.p):
        notes.append(f"no test that all methods are alike: {ranking.ranks.why}")
    else:
        notes.append(f"Friedman's test that all methods are alike: p {_p(ranking.ranks.p)}")
    return Grid("ranks", "Mean ranks (1 is best)", ("method", "mean\nrank", *letters), [lines], notes, records)


class _Score:
    """How scores of comparable runs are written: shares in per cent."""

    def __init__(self, row: Row) -> None:
        self.times, self.digits = (100 if row.metric.is_share else 1), decimals([row])

    def score(self, value: float) -> str:
        return f"{self.times * value:.{self.digits}f}"

    def difference(self, value: float) -> str:
        return f"{self.times * value:+z.{self.digits}f}"  # z: no -0.00

    def write_interval(self, low: float, high: float, signed: bool = False) -> str:
        """An interval; empty if it has no bounds."""
        write = self.difference if signed else self.score
        return "" if math.isnan(low) else f"{write(low)} to {write(high)}"


def _p(value: float) -> str:
    if math.isnan(value):
        return ""
    return "<0.001" if value < 0.001 else f"{value:.3f}"
