"""Statistics as they leave a site: no number of a single row, the same after JSON, and medians to a group's width."""

import json

import numpy as np
import pytest

from kinfed import UsageError
from kinfed.data.tables.column_statistics import DateStatistics, NumberStatistics, WordStatistics, merge_statistics
from kinfed.data.tables.disclosure import FEWEST, coarse, expand_stretches, from_json, stretches, to_json


def numbers(*values):
    return NumberStatistics.from_values(np.array(values, float))


@pytest.mark.parametrize("seed", range(4))
def test_every_value_that_is_told_stands_for_several_rows(seed):
    draw = np.random.default_rng(seed)
    values = draw.lognormal(3, 1 + seed, 30 * 4**seed)
    told = coarse(numbers(*values))
    assert sum(told.near.values()) == told.present == len(values)
    assert min(told.near.values()) >= FEWEST
    assert not {*told.distinct} & {*values}
    rank = (values < told.median).mean()
    assert abs(rank - 0.5) <= max(FEWEST, len(values) / 256) / len(values)


def test_values_of_many_rows_stay_as_they_are():
    told = coarse(numbers(*[0] * 30, *[1] * 9, *[2] * 40))
    assert told.near == {0.0: 30, 1.0: 9, 2.0: 40}
    assert told.median == 2
    assert coarse(numbers(*[18] * 3, *[19] * 40)).near == {19.0: 43}  # what is rare joins its neighbour
    assert coarse(numbers(*[1.5, 2.5, 3.5, 4.5, 5.5])).near == {3.5: 5}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([0, 1, 1, 1, 1, 1], (0.0, 1.0)),  # a flag, whose mean says the same
        ([7] * 6, (7.0,)),
        ([7] * 6 + [9] * 5, (7.0, 9.0)),
        ([7] * 6 + [9] * 4, 2),
        ([1, 2, 3, 4, 5, 6], 3),
    ],
)
def test_how_many_values_differ_is_told_but_no_value_of_few_rows(values, told):
    found = coarse(numbers(*values)).distinct
    if isinstance(told, int):
        assert len(found) == told
        assert not {*found} & {*map(float, values)}
    else:
        assert found == told


def test_of_fewer_rows_nothing_is_told():
    assert coarse(numbers(4, 5, 6, 7, np.nan)) == NumberStatistics(0, 1, 0.0, 0.0, (), {})


def test_names_of_categories_are_capped_or_refused_and_still_counted():
    known = WordStatistics({"a": 9, "b": 2, "c": 5, "d": 2}, 3)
    assert coarse(known) == known
    assert coarse(known, 2) == WordStatistics({"a": 9, "c": 5}, 3, 4, 2)
    assert coarse(known, 0) == WordStatistics({}, 3, 18, 4)
    assert merge_statistics([coarse(known, 2), known]) == WordStatistics({"a": 18, "b": 2, "c": 10, "d": 2}, 6, 4, 2)


def test_statistics_are_the_same_after_json():
    dates = DateStatistics(NumberStatistics.from_values(np.array([2020.0] * 7), median=False), True)
    for known, kind in (
        (numbers(*range(40)), "number"),
        (WordStatistics({"a": 9}, 3, 4, 2), "category"),
        (dates, "date"),
    ):
        told = coarse(known)
        assert from_json(json.loads(json.dumps(to_json(told))), kind) == told


GOOD = to_json(coarse(numbers(*range(40))))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (None, "number"),
        ([], "date"),
        (GOOD, "category"),
        (GOOD | {"mean": float("nan")}, "number"),
        (GOOD | {"mean": 1e308, "deviation": 1e308}, "number"),
        (GOOD | {"present": 1 << 39, "near": []}, "number"),  # so that the one in the middle would be none
        (GOOD | {"present": -1}, "number"),
        (GOOD | {"present": 41}, "number"),  # not the sum of its counts
        (GOOD | {"near": [["a", 40]]}, "number"),
        (GOOD | {"near": [[i, 1] for i in range(9999)], "present": 9999}, "number"),
        ({"counts": {"a": 1.5}, "missing": 0, "others": 0, "unnamed": 0}, "category"),
        ({"counts": ["a"], "missing": 0, "others": 0, "unnamed": 0}, "category"),
        ({"years": GOOD, "clock": 1}, "date"),
    ],
)
def test_statistics_that_are_made_up_are_refused(values, kind):
    with pytest.raises(UsageError, match=f"it sent no statistics of a column of the kind {kind}"):
        from_json(values, kind)


def test_times_are_told_as_stretches_of_equal_steps():
    times = [0.0, 300, 600, 900, 3000, 3300, 3600, 5000]
    parts = stretches(times, 3)
    assert parts == [[0.0, 300.0, 4], [3000, 300, 3], [5000, 0.0, 1]]
    assert expand_stretches(json.loads(json.dumps(parts))) == times
    with pytest.raises(UsageError, match="more than 2 stretches"):
        stretches(times, 2)


@pytest.mark.parametrize(
    "parts", [None, [], [[1, 2]], [[0, 0, 2]], [[0, -1, 2]], [[0, 1, 3], [2, 1, 2]], [[0, 1, 1e9]]]
)
def test_times_that_are_made_up_are_refused(parts):
    with pytest.raises(UsageError, match="it sent no times"):
        expand_stretches(parts)


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_too_coarse_to_give_the_one_row_that_somebody_does_not_know(seed):
    """Quite another last row can leave the same mean; what leaves is no farther from what is than one row moves it."""
    draw = np.random.default_rng(seed)
    rows = draw.normal(70 * seed, 12, draw.integers(20, 400))
    exact, told = numbers(*rows), coarse(numbers(*rows))
    step = exact.deviation / len(rows)
    assert abs(told.mean - exact.mean) <= step
    assert abs(told.deviation - exact.deviation) <= step
    others = [coarse(numbers(*rows[:-1], rows[-1] + far * exact.deviation)).mean for far in (-0.5, -0.25, 0.25, 0.5)]
    assert told.mean in others
