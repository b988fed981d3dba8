"""The verdict on what a paper claims of a table: yes, no or cannot tell, in print and by runs of ours.

A comparison counts if the interval of its difference over common seeds, 95 % by Student's t, leaves zero out; runs with
one seed decide nothing.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ..errors import UsageError
from ..experiments.reproduction import MEASURES, Line
from ..metrics.statistics import interval
from ..papers.claims import Claim, claims
from ..papers.published_table import CONTROL, OURS_ONLY, REFERENCE, Protocol

BySeed = Mapping[int, float]


class Figure(NamedTuple):
    """Our number of one method, metric and column."""

    column: str
    dataset: str
    setting: str
    printed: str
    metric: str
    by_seed: BySeed
    flags: tuple[str, ...]


class Test(NamedTuple):
    """One comparison that a claim makes; differences are positive where they speak for it."""

    where: str
    metric: str
    differences: BySeed  # by seed, in the metric's unit
    left_out: bool = False  # whether only one side has some of the seeds

    @property
    def mean(self) -> float:
        return fmean(self.differences.values())

    @property
    def bounds(self) -> tuple[float, float]:
        """The 95 % interval of the mean over seeds; everything with one seed."""
        if len(self.differences) < 2:
            return -math.inf, math.inf
        found = interval(np.array([[value] for value in self.differences.values()]))
        return (found.mean, found.mean) if math.isnan(found.low) else (found.low, found.high)  # all are equal


class Verdict(NamedTuple):
    """What becomes of a claim."""

    claim: Claim
    answer: str  # yes, no or cannot tell; and "at this scale" where runs are shorter or data are fewer
    text: str  # with the numbers
    measured: bool  # whether any number of ours speaks to it


class World(NamedTuple):
    """Numbers by place, method and metric; and the data set and setting of each place, as printed."""

    numbers: Mapping[tuple[str, str, str], BySeed]
    places: Mapping[str, tuple[str, str]]


def of_lines(lines: Sequence[Line]) -> list[Figure]:
    """The figures of a table that is in memory."""
    return [
        Figure(
            line.column.name,
            line.column.dataset,
            line.column.setting,
            line.row.printed,
            line.metric,
            line.by_seed,
            line.flags,
        )
        for line in lines
        if line.by_seed
    ]


def of_csv(path: Path) -> list[Figure]:
    """The figures of a table.csv; raises UsageError if it is none."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [
                Figure(
                    line["column"],
                    line["dataset"],
                    line["setting"],
                    line["printed"],
                    line["metric"],
                    seeds_of(line),
                    tuple(flag for flag in line["flags"].split("; ") if flag),
                )
                for line in csv.DictReader(file)
                if line["ours"]
            ]
    except (OSError, KeyError, ValueError) as problem:
        raise UsageError(f"{path} is not a table.csv of kinfed reproduce: {problem!r:.80}") from None


def seeds_of(line: Mapping[str, str]) -> dict[int, float]:
    """Our number in a row of table.csv by seed; one that does not say is of seed 0."""
    pairs = [pair.split(":") for pair in line.get("by_seed", "").split()]
    return {int(seed): float(value) for seed, value in pairs} or {0: float(line["ours"])}


def verdicts(protocol: Protocol, figures: Sequence[Figure]) -> list[Verdict]:
    """The verdict on every claim that is made of a table, as far as there are figures."""
    printed = World(
        {
            (f"{data}, {at}", method, metric): {0: one.mean}
            for (data, at, method, metric), one in protocol.numbers.items()
        },
        {f"{data}, {at}": (data, at) for data, at, _, _ in protocol.numbers},
    )
    numbers: dict[tuple[str, str, str], BySeed] = {}
    for one in figures:
        numbers.setdefault((one.column, one.printed, one.metric), one.by_seed)  # the first of rows printed alike
    ours = World(numbers, {one.column: (one.dataset, one.setting) for one in figures})
    found = []
    for claim in claims():
        if claim.table == protocol.name:
            flags = {
                flag
                for one in figures
                for flag in one.flags
                if claim.is_about(one.dataset, one.setting, one.metric) and one.printed == claim.method
            }
            found.append(_verdict(protocol, claim, printed, ours, flags))
    return found


def _verdict(protocol: Protocol, claim: Claim, printed: World, ours: World, flags: set[str]) -> Verdict:
    in_print = [test for test in _tests(protocol, claim, printed) if test.differences]
    against = [test for test in in_print if test.mean < 0]
    if not in_print:
        said = "Not printed in numbers."
    elif against:
        said = f"In print {len(against)} of {_many(len(in_print))} against it, most of all {_told(_worst(against))}."
    else:
        said = f"In print it holds ({_many(len(in_print))})."
    tests = list(_tests(protocol, claim, ours))
    have = [test for test in tests if test.differences]
    yes = [test for test in have if test.bounds[0] >= 0]
    no = [test for test in have if test.bounds[1] < 0]
    places = {place for place, (data, at) in ours.places.items() if _speaks(protocol, claim, data, at)}
    whole = {printed.places[place] for place in printed.places if _speaks(protocol, claim, *printed.places[place])}
    complete = {ours.places[place] for place in places} >= whole and len(have) == len(tests)
    answer = "no" if no else "yes" if complete and tests and len(yes) == len(tests) else "cannot tell"
    scaled = sorted(flag for flag in flags if flag.startswith("scaled") or flag == "subset")
    how = f" ({', '.join(scaled)})" if scaled else ""
    here = f"Here{how}: {_counted(tests, have, yes, no)}." if have else "Here nothing of it is measured."
    return Verdict(claim, answer + " at this scale" * bool(scaled and have), f"{said} {here}", bool(have))


def _counted(tests: Sequence[Test], have: Sequence[Test], yes: Sequence[Test], no: Sequence[Test]) -> str:
    """How many comparisons speak for and against a claim, and which the most against it."""
    alone = [test for test in have if len(test.differences) == 1]
    single, leading = len(alone), sum(test.mean >= 0 for test in alone)
    counts = {
        "for it": len(yes),
        "against it": len(no),
        "within the error": len(have) - len(yes) - len(no) - single,
        f"of one seed ({leading} in favour)": single,
        "not measured": len(tests) - len(have),
    }
    counted = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    paired = "; seeds that only one side has are left out" * any(test.left_out for test in have)
    return f"of {_many(len(tests))} {counted}; least in favour: {_told(_worst(have))}{paired}"


def _many(count: int) -> str:
    return f"{count} comparison{'s' * (count != 1)}"


def _worst(tests: Sequence[Test]) -> Test:
    return min(tests, key=lambda test: test.mean)


def _told(test: Test) -> str:
    digits, seeds = MEASURES[test.metric].digits, len(test.differences)
    low, high = test.bounds
    error = f", {low:+.{digits}f} to {high:+.{digits}f} over {seeds} seeds" if seeds > 1 else ""
    return f"{test.where} ({test.mean:+.{digits}f}{error})"


def _speaks(protocol: Protocol, claim: Claim, dataset: str, setting: str) -> bool:
    """Whether a claim is about any metric of a column."""
    if claim.falling:
        return any(setting in step.split("|") for step in claim.falling)
    return any(claim.is_about(dataset, setting, metric) for metric in {metric for *_, metric in protocol.numbers})


def _tests(protocol: Protocol, claim: Claim, world: World) -> Iterator[Test]:
    """The comparisons that a claim makes; without differences where a number is missing."""
    metrics = dict.fromkeys(metric for *_, metric in protocol.numbers)

    def read(place: str, method: str, metric: str) -> BySeed:
        return world.numbers.get((place, method, metric), {})

    if claim.falling:
        yield from _falls(claim, world, list(metrics))
        return
    for place, (dataset, setting) in world.places.items():
        for metric in metrics:
            if not claim.is_about(dataset, setting, metric) or metric not in _metrics(protocol, dataset, setting):
                continue
            mine, where = read(place, claim.method, metric), _where(place, metric, metrics)
            if claim.than:
                other = read(place, claim.method, claim.than)
                yield _less(f"{MEASURES[claim.than].label} {where}", metric, mine, other)
            elif claim.least is not None:
                yield Test(where, metric, {seed: value - claim.least for seed, value in mine.items()})
            else:
                sign = MEASURES[metric].better * (-1 if claim.worst else 1)
                factor = 1 + MEASURES[metric].better * claim.by
                for rival in _rivals(protocol, claim, dataset, setting, metric):
                    scaled = {seed: factor * value for seed, value in read(place, rival, metric).items()}
                    yield _less(f"{rival} {where}", metric, mine, scaled, sign)


def _where(place: str, metric: str, metrics: Mapping[str, None]) -> str:
    return f"on {place}" + (f" ({MEASURES[metric].label})" if len(metrics) > 1 else "")


def _metrics(protocol: Protocol, dataset: str, setting: str) -> set[str]:
    """The metrics that are printed of a column; all of the table's if none is."""
    mine = {metric for data, at, _, metric in protocol.numbers if (data, at) == (dataset, setting)}
    return mine or {metric for *_, metric in protocol.numbers}


def _rivals(protocol: Protocol, claim: Claim, dataset: str, setting: str, metric: str) -> list[str]:
    """The methods that a claim's is compared with: those printed there, or all rows of a table that prints few."""
    if claim.against:
        return list(claim.against)
    others = {
        row.printed: row.kind for row in protocol.rows.values() if row.kind not in (CONTROL, OURS_ONLY, REFERENCE)
    }
    here = [name for name in others if (dataset, setting, name, metric) in protocol.numbers]
    return [name for name in (here if len(here) > 1 else others) if name != claim.method and name not in claim.apart]


def _falls(claim: Claim, world: World, metrics: Sequence[str]) -> Iterator[Test]:
    """A method's numbers fall from each setting to the next; columns of a subset are compared with each other."""
    families: dict[str, dict[str, str]] = {}
    for place, (_, setting) in world.places.items():
        families.setdefault(place.replace(", ", "/").partition("/")[0], {})[setting] = place
    for at in families.values():
        for metric in [one for one in metrics if not claim.metrics or one in claim.metrics]:
            for before, after in zip(claim.falling, claim.falling[1:], strict=False):
                for one in before.split("|"):
                    for other in after.split("|"):
                        first, second = (
                            world.numbers.get((at.get(setting, ""), claim.method, metric), {})
                            for setting in (one, other)
                        )
                        yield _less(f"from {one} to {other}", metric, first, second)


def _less(where: str, metric: str, mine: BySeed, other: BySeed, sign: float = 1) -> Test:
    """One number less another, over the seeds that both have."""
    differences = {seed: sign * (mine[seed] - other[seed]) for seed in mine if seed in other}
    return Test(where, metric, differences, bool(differences) and set(mine) != set(other))
