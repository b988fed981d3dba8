"""The verdict on what a paper claims of a table: yes, no or cannot tell, by the printed numbers and the measured ones.

A comparison speaks for a claim or against it as `report.comparison` says. All of a claim's comparisons must speak for
it for a yes, each at 5 % (an intersection-union test, which needs no correction); a no takes one of them against it
after Holm's correction over all that are measured. A run that is not ahead of what needs no network is not trained, so
nothing is compared with it; nor is a score of another protocol than the paper's. Equal scores count for neither.
"""

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from kinfed.errors import UsageError

from .claims import Claim, claims, classes, deviation
from .comparison import BySeed, Comparison, against, compare
from .published_table import CONTROL, REFERENCE, UNPRINTED, Protocol
from .reproduction import MEASURES, OTHER_PROTOCOL, Line
from .scoring import BY_TEST

CHANCE = 1.25  # times the share of one class of many: an accuracy of less has learned nothing
ACCURACIES = ("accuracy_pct", "mean_accuracy_pct")
UNJUDGED = {OTHER_PROTOCOL, BY_TEST}  # flags of scores on which no verdict rests
BEHIND = "not trained: no run is ahead of what needs no network"
NOTHING = "Here nothing of it is measured."
Floors = Mapping[tuple[str, str], float]  # by column and metric, the best score of what needs no network
LESS = ("subset", "stand-in", "generated")  # flags of other data than the paper's


class Figure(NamedTuple):
    """Our number of one method, metric and column."""

    column: str
    dataset: str
    setting: str
    printed: str
    metric: str
    by_seed: BySeed
    flags: tuple[str, ...]


class Verdict(NamedTuple):
    """What becomes of a claim."""

    claim: Claim
    answer: str  # yes, no or cannot tell; of the first two "at this scale" where runs are shorter or data are fewer
    text: str  # with the numbers
    measured: bool  # whether any measured number speaks to it
    why: str = ""  # it cannot be told

    @property
    def answer_with_reason(self) -> str:
        """The answer, with what keeps it from being told."""
        return f"{self.answer} ({self.why})" if self.why else self.answer


class World(NamedTuple):
    """Numbers by place, method and metric; each place as printed; and what needs no network."""

    numbers: Mapping[tuple[str, str, str], BySeed]
    places: Mapping[str, tuple[str, str]]
    floors: Floors

    def is_untrained(self, place: str, method: str, metric: str) -> bool:
        """Whether a run is not ahead of what needs no network, in this metric or in accuracy."""
        dataset = self.places[place][0]
        numbers = {name: self.numbers.get((place, method, name), {}) for name in (metric, *ACCURACIES)}
        floors = {name: self.floors.get((place, name)) for name in numbers}
        return any(by and not is_ahead(dataset, name, by, floors[name]) for name, by in numbers.items())


def is_ahead(dataset: str, metric: str, by_seed: BySeed, floor: float | None) -> bool:
    """Whether a score, by seed, is ahead of what needs no network: of the floor if that is known, and of chance."""
    better, mean = MEASURES[metric].better, fmean(by_seed.values())
    many = classes(dataset) if metric in ACCURACIES else 0
    if many and mean <= CHANCE * 100 / many:
        return False
    return floor is None or not better or better * (mean - floor) > 0


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
                if line["measured"]
            ]
    except (OSError, KeyError, ValueError) as problem:
        raise UsageError(f"{path} is not a table.csv of kinfed papers run: {problem!r:.80}") from None


def seeds_of(line: Mapping[str, str]) -> dict[int, float]:
    """Our number in a row of table.csv by seed; one that does not say is of seed 0."""
    pairs = [pair.split(":") for pair in line.get("by_seed", "").split()]
    return {int(seed): float(value) for seed, value in pairs} or {0: float(line["measured"])}


def verdicts(protocol: Protocol, figures: Sequence[Figure], floors: Floors | None = None) -> list[Verdict]:
    """The verdict on every claim that is made of a table, as far as there are figures.

    `floors` has what needs no network, where that is known. A figure that was scored by another protocol than the
    paper's, or by test examples, decides nothing.
    """
    aside = {figure.printed for figure in figures if UNJUDGED & set(figure.flags)}
    figures = [figure for figure in figures if not UNJUDGED & set(figure.flags)]
    printed = World(
        {
            (f"{data}, {at}", method, metric): {0: number.mean}
            for (data, at, method, metric), number in protocol.numbers.items()
        },
        {f"{data}, {at}": (data, at) for data, at, _, _ in protocol.numbers},
        {},
    )
    numbers: dict[tuple[str, str, str], BySeed] = {}
    for figure in figures:
        numbers.setdefault(
            (figure.column, figure.printed, figure.metric), figure.by_seed
        )  # the first of rows printed alike
    ours = World(numbers, {figure.column: (figure.dataset, figure.setting) for figure in figures}, floors or {})
    judgements = []
    for claim in claims():
        if claim.table == protocol.name:
            flags = {
                flag
                for figure in figures
                for flag in (*figure.flags, *_stand_in(protocol, figure.column))
                if claim.is_about(figure.dataset, figure.setting, figure.metric) and figure.printed == claim.method
            }
            judged = _verdict(protocol, claim, printed, ours, flags)
            if judged.why == "not run" and claim.method in aside:
                text = judged.text.replace(NOTHING, "Here it is measured by another protocol, which decides nothing.")
                judged = judged._replace(why="scored by another protocol than the paper's", text=text)
            judgements.append(judged)
    return judgements


def _stand_in(protocol: Protocol, column: str) -> list[str]:
    return ["stand-in"] if column in protocol.columns and protocol.columns[column].stand_in else []


def _verdict(protocol: Protocol, claim: Claim, printed: World, ours: World, flags: set[str]) -> Verdict:
    in_print = [comparison for comparison in _comparisons(protocol, claim, printed) if comparison.differences]
    behind = [comparison for comparison in in_print if comparison.mean < 0]
    if not in_print:
        in_words = "Not printed in numbers."
    elif behind:
        worst = _describe_comparison(_worst(behind))
        in_words = f"In the paper {len(behind)} of {_many(len(in_print))} against it, most of all {worst}."
    else:
        in_words = f"In the paper it holds ({_many(len(in_print))})."
    comparisons = list(_comparisons(protocol, claim, ours))
    have = [comparison for comparison in comparisons if comparison.differences]
    yes, no = [comparison for comparison in have if comparison.speaks_for], against(have)
    places = {place for place, (data, at) in ours.places.items() if _speaks(protocol, claim, data, at)}
    in_paper = {printed.places[place] for place in printed.places if _speaks(protocol, claim, *printed.places[place])}
    complete = {ours.places[place] for place in places} >= in_paper and len(have) == len(comparisons)
    answer, why = "cannot tell", ""
    if no:
        answer = "no"
    elif complete and comparisons and len(yes) == len(comparisons):
        answer = "yes"
    if answer == "cannot tell":
        why = f"needs {claim.lacks}" if claim.lacks else _explain_indecision(comparisons, have)
    if claim.tuned and answer != "cannot tell":
        answer = "cannot tell"
        why = "one setting of each method here, where the paper chose among many"
    if claim.given and answer == "yes":
        answer, why = "cannot tell", f"settings alone give it: {claim.given}"
    scaled = sorted(flag for flag in flags if flag.startswith("scaled") or flag in LESS)
    how = f" ({', '.join(scaled)})" if scaled else ""
    here = NOTHING
    if have:
        here = f"Here{how}: {_count_comparisons(comparisons, have, yes, no)}."
    elif any(comparison.untrained for comparison in comparisons):
        here = f"Here{how} runs are not ahead of what needs no network."
    if scaled and answer != "cannot tell":
        answer += " at this scale"
    return Verdict(claim, answer, f"{in_words} {here}", bool(have), why)


def _explain_indecision(comparisons: Sequence[Comparison], have: Sequence[Comparison]) -> str:
    """Why nothing can be told, where nothing that a claim needs is lacking."""
    if not have:
        return BEHIND if any(comparison.untrained for comparison in comparisons) else "not run"
    if all(comparison.speaks_for for comparison in have):
        return "a part of it not run"
    return "too near to tell"


def _count_comparisons(
    comparisons: Sequence[Comparison], have: Sequence[Comparison], yes: Sequence[Comparison], no: Sequence[Comparison]
) -> str:
    """How many comparisons speak for and against a claim, and which the most against it."""
    level = [comparison for comparison in have if not any(comparison.differences.values()) and comparison not in yes]
    decided = {id(comparison) for comparison in (*yes, *no, *level)}
    open_ = [comparison for comparison in have if id(comparison) not in decided]
    single = sum(len(comparison.differences) == 1 for comparison in open_)
    chance = sum(comparison.untrained for comparison in comparisons)
    counts = {
        "for it": len(yes),
        "against it": len(no),
        "equal": len(level),
        "within the error": len(open_) - single,
        "of one seed and too near to tell": single,
        "not trained": chance,
        "not measured": len(comparisons) - len(have) - chance,
    }
    counted = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    left_out = any(comparison.left_out for comparison in have)
    paired = "; seeds that only one side has are left out" if left_out else ""
    return f"of {_many(len(comparisons))} {counted}; least in favour: {_describe_comparison(_worst(have))}{paired}"


def _many(count: int) -> str:
    return f"{count} comparison" if count == 1 else f"{count} comparisons"


def _worst(some: Sequence[Comparison]) -> Comparison:
    return min(some, key=lambda comparison: comparison.mean)


def _describe_comparison(comparison: Comparison) -> str:
    digits, seeds = MEASURES[comparison.metric].digits, len(comparison.differences)
    low, high = comparison.bounds
    error = f", {low:+.{digits}f} to {high:+.{digits}f} over {seeds} seeds" if seeds > 1 else ""
    return f"{comparison.where} ({comparison.mean:+.{digits}f}{error})"


def _speaks(protocol: Protocol, claim: Claim, dataset: str, setting: str) -> bool:
    """Whether a claim is about any metric of a column."""
    if claim.falling:
        return any(setting in step.split("|") for step in claim.falling)
    metrics = {metric for *_, metric in protocol.numbers}
    return any(claim.is_about(dataset, setting, metric) for metric in metrics)


def _comparisons(protocol: Protocol, claim: Claim, world: World) -> Iterator[Comparison]:
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
            options: Any = {"deviation": deviation(claim.table, metric), "margin": claim.level}
            if claim.than:
                options["deviation"] = max(deviation(claim.table, metric), deviation(claim.table, claim.than))
                other = read(place, claim.method, claim.than)
                yield compare(f"{MEASURES[claim.than].label} {where}", metric, mine, other, **options)
            elif claim.least is not None:
                least = compare(where, metric, mine, dict.fromkeys(mine, claim.least), **options)
                yield _leave_untrained(least, world, (place, claim.method))
            else:
                sign = MEASURES[metric].better * (-1 if claim.worst else 1)
                factor = 1 + MEASURES[metric].better * claim.by
                for rival in _rivals(protocol, claim, dataset, setting, metric):
                    comparison = compare(
                        f"{rival} {where}", metric, mine, read(place, rival, metric), factor, sign, **options
                    )
                    yield _leave_untrained(comparison, world, (place, claim.method), (place, rival))


def _leave_untrained(made: Comparison, world: World, *runs: tuple[str, str]) -> Comparison:
    """A comparison, which is none if a run on either side, a place and a method, is not trained."""
    behind = made.differences and any(world.is_untrained(*run, made.metric) for run in runs)
    return made._replace(differences={}, untrained=True) if behind else made


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
        row.printed: row.kind for row in protocol.rows.values() if row.kind not in (CONTROL, UNPRINTED, REFERENCE)
    }
    here = [name for name in others if (dataset, setting, name, metric) in protocol.numbers]
    return [
        name for name in (here if len(here) > 1 else others) if name != claim.method and name not in claim.except_for
    ]


def _falls(claim: Claim, world: World, metrics: Sequence[str]) -> Iterator[Comparison]:
    """A method's numbers fall from each setting to the next; columns of a subset are compared with each other."""
    families: dict[str, dict[str, str]] = {}  # the place of each setting, of a data set or a subset of it
    for place, (_, setting) in world.places.items():
        families.setdefault(place.replace(", ", "/").partition("/")[0], {})[setting] = place
    measured = [metric for metric in metrics if not claim.metrics or metric in claim.metrics]
    steps = [  # "a|b" is a step of two settings, each of which is compared with the next
        (earlier, later)
        for before, after in itertools.pairwise(claim.falling)
        for earlier, later in itertools.product(before.split("|"), after.split("|"))
    ]
    for places, metric, (earlier, later) in itertools.product(families.values(), measured, steps):
        first, second = (
            world.numbers.get((places.get(setting, ""), claim.method, metric), {}) for setting in (earlier, later)
        )
        spread = deviation(claim.table, metric)
        fall = compare(f"from {earlier} to {later}", metric, first, second, deviation=spread)
        runs = [(places[setting], claim.method) for setting in (earlier, later) if setting in places]
        yield _leave_untrained(fall, world, *runs)
