"""The statistics that a referee asks for, of compared runs; how each is computed is in docs/statistics.md."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import UsageError, list_seeds, note_failure
from ...verdict import statistics as by
from ...verdict.statistics import Array, Interval, Paired, Ranks
from .compare import Comparison
from .run_rows import Row, read, score_clients, setting_of

ALONE, TUNED, RIVAL, NAMED = "local", "fedavg-ft", "best rival", "named"
# Names that methods give to their models: before local training, and after it.
BEFORE = ("mixed", "received", "shared", "cluster", "generated", "combined")
AFTER = ("own", "tuned", "adapted")


class Pair(NamedTuple):
    """A run against another of the same clients, over the seeds that both have."""

    name: str
    other: str
    seeds: tuple[int, ...]
    comparison: Paired
    holm: float = math.nan  # its p-value, adjusted for the other runs of its family


class Stages(NamedTuple):
    """The scores of a run's models before and after local training."""

    before: str  # the models' names
    after: str
    mean_before: float
    mean_after: float
    comparison: Paired  # after against before


class RunStatistics(NamedTuple):
    """The statistics of one run."""

    name: str
    seeds: tuple[int, ...]
    clients: int  # whose scores these are
    interval: Interval
    worst: float  # mean of the tenth of clients with the worst scores, and of that with the best
    best: float
    gain: int | None  # clients that gain over Local beyond noise; None: not tested
    lose: int | None
    stages: Stages | None


@dataclass(frozen=True)
class Statistics:
    """Those of comparable runs, best first: each by itself, and pairs by what they are against."""

    rows: tuple[Row, ...]
    runs: tuple[RunStatistics, ...]
    families: dict[str, tuple[Pair, ...]]  # see above
    notes: tuple[str, ...]


class Ranking(NamedTuple):
    """Mean ranks of the runs that every set has, by name, and what each scores there: [D, k]."""

    names: list[str]
    scores: Array
    ranks: Ranks
    notes: list[str]


def names_of(rows: Sequence[Row]) -> list[str]:
    """A name for each of comparable runs, with its number in the list where a name would stand for several."""
    names = [row.name for row in rows]
    twins = len(set(names)) < len(names)
    return [f"{i} {name}" if twins else name for i, name in enumerate(names, 1)]


def statistics(rows: Sequence[Row], named: Sequence[tuple[str, str]] = ()) -> Statistics:
    """The statistics of comparable runs, best first, as `compare` finds them; `named` are methods to be paired."""
    names, notes = names_of(rows), list[str]()
    own_statistics = tuple(_own_statistics(name, row) for name, row in zip(names, rows, strict=True))
    families = {}
    for family in (NAMED, ALONE, TUNED, RIVAL):
        pairs = list[Pair]()
        for name, row in zip(names, rows, strict=True):
            rival = _other(family, row, rows, names, named)
            if rival is None:
                continue
            other, theirs = rival
            if any(
                (paired_runs.name, paired_runs.other) == (other, name) for paired_runs in pairs
            ):  # it is there, the other way round
                continue
            with note_failure(notes, f"{name} is not paired with {other}"):
                pairs.append(Pair(name, other, *pair(row, theirs)))
        adjusted = by.holm([paired_runs.comparison.p for paired_runs in pairs])
        families[family] = tuple(
            paired_runs._replace(holm=float(p)) for paired_runs, p in zip(pairs, adjusted, strict=True)
        )
        notes += _fewer_seeds(families[family], dict(zip(names, rows, strict=True)))
    return Statistics(
        tuple(rows), own_statistics, {key: pairs for key, pairs in families.items() if pairs}, tuple(notes)
    )


def pair(mine: Row, other: Row) -> tuple[tuple[int, ...], Paired]:
    """Compare two runs client by client, over the seeds that both have; returns these too.

    Raises UsageError if the runs have other data, splits, clients, test examples, or no seed in common.
    """
    if setting_of(mine.summary) != setting_of(other.summary):
        raise UsageError("their data, splits, clients or metrics differ")
    seeds = tuple(seed for seed in mine.seeds if seed in other.seeds)
    if not seeds:
        raise UsageError(f"they have no seed in common ({list_seeds(mine.seeds)}; {list_seeds(other.seeds)})")
    for seed in seeds:
        if unshared := sorted(set(mine.by_seed[seed].names) ^ set(other.by_seed[seed].names)):
            raise UsageError(f"only one of them has client '{unshared[0]}' with seed {seed}")
        tested, others = (row.by_seed[seed].by_client for row in (mine, other))
        if not tested.is_of_the_same_examples(others):
            raise UsageError(f"with seed {seed} they were not tested on the same examples")
    names = list(dict.fromkeys(name for seed in seeds for name in mine.by_seed[seed].names))
    a, b = (scores_of(row, seeds, names, row.model) for row in (mine, other))
    return seeds, by.compare_pairs(a, b, mine.metric.higher_is_better)


def scores_of(row: Row, seeds: Sequence[int], names: Sequence[str], model: str) -> Array:
    """[S, N] a model's test scores of the clients of these names; NaN for attackers, and where one is not there."""
    at = {name: i for i, name in enumerate(names)}
    table = np.full((len(seeds), len(names)), np.nan)
    for line, seed in zip(table, seeds, strict=True):
        run = row.by_seed[seed]
        line[[at[name] for name in run.names]] = score_clients(run, model)
    return table


def ranking(comparison: Comparison) -> Ranking | None:
    """The mean ranks over the sets of comparable runs; None if there is one set, or fewer than two runs in all sets."""
    tables = []
    for rows in comparison.sets:
        names = [row.name for row in rows]
        tables.append({row.name: row for row in rows if names.count(row.name) == 1})
    everywhere = set.intersection(*map(set, tables))
    shared = [name for name in tables[0] if name in everywhere]
    if len(tables) < 2 or len(shared) < 2:
        return None
    left = dict.fromkeys(row.name for rows in comparison.sets for row in rows if row.name not in shared)
    notes = [f"without {', '.join(left)}, not run once on every data set"] if left else []
    scores = np.array([[table[name].mean for name in shared] for table in tables])
    higher = [rows[0].metric.higher_is_better for rows in comparison.sets]
    return Ranking(shared, scores, by.mean_ranks(scores, higher), notes)


def _own_statistics(name: str, row: Row) -> RunStatistics:
    names = list(dict.fromkeys(name for run in row.runs for name in run.names))
    scores = scores_of(row, row.seeds, names, row.model)
    worst, best = by.tails(scores, row.metric.higher_is_better)
    counts = row.counts if row.counts is not None and row.counts.paired else None
    gain, lose = (int(counts.helped), int(counts.hurt)) if counts is not None else (None, None)
    scored = int(np.isfinite(scores).any(0).sum())
    interval = by.interval(scores, share=row.metric.is_share)
    return RunStatistics(
        name,
        seeds=row.seeds,
        clients=scored,
        interval=interval,
        worst=worst,
        best=best,
        gain=gain,
        lose=lose,
        stages=_stages(row, names),
    )


def _stages(row: Row, names: Sequence[str]) -> Stages | None:
    """The scores before and after local training, if the run has both kinds of model."""
    models = list(row.runs[0].summary.clients.scores)
    before, after = (next((name for name in models if name in kind), "") for kind in (BEFORE, AFTER))
    if not before or not after:
        return None
    first, second = (scores_of(row, row.seeds, names, model) for model in (before, after))
    means = [float(np.nanmean(scores, 1).mean()) for scores in (first, second)]
    return Stages(before, after, means[0], means[1], by.compare_pairs(second, first, row.metric.higher_is_better))


def _other(
    family: str, row: Row, rows: Sequence[Row], names: Sequence[str], named: Sequence[tuple[str, str]]
) -> tuple[str, Row] | None:
    """Which run this one is paired with in a family, and its name; None if with none."""
    others = [(name, other) for name, other in zip(names, rows, strict=True) if other is not row]
    if family == NAMED:
        rivals = [rival for method, rival in named if method == row.method]
        return next((candidate for candidate in others if candidate[1].method in rivals), None)
    same_attack = [(name, other) for name, other in others if other.attack == row.attack] or others
    if family in (ALONE, TUNED):
        if row.method in (ALONE, family):  # Local stands in no pair as the first
            return None
        trained = row.folder.reference(family)
        baselines = [(name, other) for name, other in same_attack if other.method == family]
        baselines = [candidate for candidate in baselines if set(row.seeds) & set(candidate[1].seeds)] or baselines
        if not baselines and trained.is_finished:
            return family, read(trained.path)
        return baselines[0] if baselines else None
    beside = [candidate for candidate in same_attack if set(row.seeds) & set(candidate[1].seeds)] or same_attack
    rival = beside[0] if beside else None
    above = rival is not None and {row.method, rival[1].method} & {ALONE, TUNED}  # which the other families have
    return None if above else rival


def _fewer_seeds(pairs: Sequence[Pair], rows: dict[str, Row]) -> list[str]:
    """A line for each choice of seeds that is not all of a run's."""
    few: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for paired_runs in pairs:
        if paired_runs.seeds != rows[paired_runs.name].seeds or (
            paired_runs.other in rows and paired_runs.seeds != rows[paired_runs.other].seeds
        ):
            few.setdefault((paired_runs.seeds, paired_runs.other), []).append(paired_runs.name)
    return [
        f"paired over the common seeds alone ({list_seeds(seeds)}): {', '.join(names)} against {other}"
        for (seeds, other), names in few.items()
    ]
