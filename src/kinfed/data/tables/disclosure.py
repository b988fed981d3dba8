"""Statistics as they leave a site: so coarse that no number is that of a single row, or made up, and as JSON."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...errors import UsageError
from .column_statistics import DISTINCT, DateStatistics, NumberStatistics, Statistics, WordStatistics, cut
from .frame import natural

FEWEST = 5  # rows that a number which leaves a site must be made of
GROUPS = 256  # of a column's numbers, at most
LONGEST = 10_000_000  # steps of all sites together
LARGEST = float(np.finfo(np.float32).max)  # number that is believed, as inputs are float32
NEAR = 1e-5  # seconds, or units of numbers, within which two times are the same
MADE_UP = 1000  # rows of which statistics by what is public are
FORMS = {"number": NumberStatistics, "category": WordStatistics, "date": DateStatistics}


def coarse(statistics: Statistics, names: int | None = None, least: int = 1, fewest: int = FEWEST) -> Any:
    """Statistics without what single rows say; `names` is of how many categories the names may be told, None: of all.

    Names of categories in fewer than `least` rows are not told either.
    Numbers of fewer than `fewest` rows are left out altogether; of others, nothing but counts, the mean and the
    deviation, both `rounded`, and `near`, whose values stand for `fewest` rows or more each.
    """
    if isinstance(statistics, DateStatistics):
        return DateStatistics(coarse(statistics.years, fewest=fewest), statistics.clock)
    if isinstance(statistics, WordStatistics):
        order = sorted(statistics.counts, key=lambda word: (-statistics.counts[word], natural(word)))
        disclosed = [word for word in order[:names] if statistics.counts[word] >= least]
        rest = sum(statistics.counts[word] for word in order[len(disclosed) :])
        counts = {word: statistics.counts[word] for word in disclosed}
        return WordStatistics(
            counts, statistics.missing, statistics.others + rest, statistics.unnamed + len(order) - len(disclosed)
        )
    if statistics.present < fewest:
        return NumberStatistics(0, statistics.missing, 0.0, 0.0, (), {})
    rough = round_statistics(statistics)
    return rough._replace(distinct=_distinct(rough, fewest), near=_group_neighbours(rough.near, rough.present, fewest))


def round_statistics(statistics: NumberStatistics) -> NumberStatistics:
    """Statistics whose mean and deviation are on a grid as wide as what one row a deviation away changes, or wider."""
    change = statistics.deviation / max(statistics.present, 1)
    if not change > 0:
        return statistics
    step = math.ldexp(1.0, math.frexp(change)[1])  # the power of two above it
    mean, deviation = (float(np.rint(value / step)) * step for value in (statistics.mean, statistics.deviation))
    return statistics._replace(mean=mean, deviation=deviation) if math.isfinite(mean) else statistics


def _distinct(statistics: NumberStatistics, fewest: int) -> tuple[float, ...]:
    """As many different values, which are real ones only if they are all and each is in enough rows, or 0 and 1."""
    few = len(statistics.distinct) < DISTINCT
    enough = all(statistics.near.get(float(cut(np.array([value]))[0]), 0) >= fewest for value in statistics.distinct)
    if few and (enough or set(statistics.distinct) <= {0.0, 1.0} or len(statistics.distinct) == 1):
        return statistics.distinct
    spread = math.sqrt(2) * (statistics.deviation or 1.0)  # irrational, so that none is a value of a row
    return tuple(statistics.mean + spread * place for place in ((-1, 1) if few else (-1, 1, 2)))


def _group_neighbours(near: Mapping[float, int], rows: int, fewest: int) -> dict[float, int]:
    """How often values are there, neighbours together: a value of many rows by itself, or the mean of several."""
    least = max(fewest, math.ceil(rows / GROUPS))
    groups: list[list[tuple[float, int]]] = [[]]
    for value in sorted(near):
        if sum(count for _, count in groups[-1]) >= least:
            groups.append([])
        groups[-1].append((value, near[value]))
    if len(groups) > 1 and sum(count for _, count in groups[-1]) < least:
        groups[-2:] = [groups[-2] + groups[-1]]
    result: dict[float, int] = {}
    for group in groups:
        value, count = max(group, key=lambda pair: pair[1], default=(0.0, 0))
        total = sum(count for _, count in group)
        if count < fewest and total:
            value = float(cut(np.array([sum(member * times for member, times in group) / total]))[0])
        result[value] = result.get(value, 0) + total
    return result if near else {}


def to_json(statistics: Statistics) -> dict[str, Any]:
    """Statistics as JSON has them."""
    kind = next(name for name, form in FORMS.items() if isinstance(statistics, form))
    if isinstance(statistics, DateStatistics):
        return {"kind": kind, "years": to_json(statistics.years), "clock": statistics.clock}
    if isinstance(statistics, NumberStatistics):
        near = [[value, count] for value, count in statistics.near.items()]
        return {"kind": kind, **statistics._asdict(), "distinct": list(statistics.distinct), "near": near}
    return {"kind": kind, **statistics._asdict()}


def from_json(values: Any, kind: str, median: bool = True) -> Any:
    """The statistics that `to_json` made, of a column of this kind; raises UsageError for anything that it never makes.

    `median`: whether numbers were counted by value. What a site sends may be made up.
    """
    try:
        if kind == "date":
            years = from_json({"kind": "number", **values["years"]}, "number", median=False)
            return DateStatistics(years, _is(values["clock"], bool))
        if kind == "category":
            counts = {_is(word, str): _count(count) for word, count in _is(values["counts"], dict).items()}
            return WordStatistics(counts, *(_count(values[key]) for key in ("missing", "others", "unnamed")))
        near = {_number(value): _count(count) for value, count in values["near"]}
        distinct = tuple(_number(value) for value in values["distinct"])
        statistics = NumberStatistics(
            _count(values["present"]),
            _count(values["missing"]),
            _number(values["mean"]),
            abs(_number(values["deviation"])),
            distinct[:DISTINCT],
            near,
        )
        if sum(near.values()) != (statistics.present if median else 0) or len(near) > 2 * GROUPS:
            raise ValueError
        return statistics
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
        raise UsageError(f"it sent no statistics of a column of the kind {kind}") from None


def _is(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _count(value: Any) -> int:
    if not 0 <= _is(value, int) < 1 << 40:
        raise ValueError
    return int(value)


def _number(value: Any) -> float:
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError
    return number


def stretches(values: Sequence[float], most: int) -> list[list[float]]:
    """[begin, step, count] of values, ascending, so that begin + step * range(count) of all are these.

    Raises UsageError if that takes more than `most`.
    """
    result: list[list[float]] = []
    for value in values:
        last = result[-1] if result else None
        if last and last[2] == 1:
            last[1:] = [value - last[0], 2]
        elif last and abs(value - last[0] - last[1] * last[2]) < NEAR:
            last[2] += 1
        else:
            result.append([value, 0.0, 1])
        if len(result) > most:
            raise UsageError(f"times are so irregular that they are more than {most:,} stretches of equal steps")
    return result


def expand_stretches(parts: Any) -> list[float]:
    """The values of `stretches`; raises UsageError unless they are ascending numbers, `LONGEST` of them at most."""
    result: list[float] = []
    try:
        for begin, step, count in parts:
            if len(result) + _count(count) > LONGEST or (count > 1 and not step > 0):
                raise ValueError
            first, width = _number(begin), _number(step)
            result += [first + width * i for i in range(count)]
        if not result or any(later <= before for before, later in pairwise(result)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UsageError("it sent no times") from None
    return result


def read_public(kinds: Mapping[str, str], targets: Sequence[str], columns: Mapping[str, Any]) -> dict[str, Statistics]:
    """Statistics of made-up rows for inputs of these kinds and for targets that are numbers; raises UsageError."""
    wanted = {**kinds, **dict.fromkeys(targets, "number")}
    if lacking := [name for name in wanted if name not in columns]:
        raise UsageError(
            f"under privacy no row tells what a column is like, so privacy.columns must say what is public of each: it "
            f"lacks {', '.join(lacking)}; give the least and the largest number, such as [0, 100], or the categories"
        )
    return {name: _make_public(name, kind, columns[name]) for name, kind in wanted.items()}


def _make_public(name: str, kind: str, public: Any) -> Statistics:
    """Statistics as of made-up rows, by what is public of a column: numbers fill their range, categories are alike."""
    is_text = isinstance(public[0], str)
    if is_text != (kind == "category"):
        wanted = "its categories" if kind == "category" else "the least and the largest number"
        raise UsageError(f"privacy.columns.{name} must be {wanted}, as the table has it; got {public!r:.80}")
    if is_text:
        return WordStatistics(dict.fromkeys(public, MADE_UP), 1, 1, 1)
    low, high = map(float, public)
    middle = (low + high) / 2
    numbers = NumberStatistics(MADE_UP, 1, middle, (high - low) / 4, (low, middle, high), {middle: MADE_UP})
    return DateStatistics(numbers, False) if kind == "date" else numbers
