"""Numbers and dates as people write them, decided over a whole column."""

import re
import warnings
from datetime import UTC, datetime

import numpy as np
import polars
import pytest

import kinfed
from kinfed import UsageError
from kinfed.data.reading import frame_of

NONE = float("nan")


def frame(cells):
    return frame_of(polars.DataFrame({"x": cells}))


def numbers(cells):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = frame(cells)
        assert one.kind("x") == "numbers"
        return one.numbers("x").tolist()


@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        (["12 %", "7%", "", "-3.5 %", "0"], [12, 7, NONE, -3.5, 0]),
        (["€ 1,200.50", "€5", "-€ 3", "€ -1,000,000"], [1200.5, 5, -3, -1e6]),
        (["1.200,50 €", "12 €", "0,5 €"], [1200.5, 12, 0.5]),
        (["1,200", "950", "na", "12,000"], [1200, 950, NONE, 12000]),
        (["1,200,300", "2,000"], [1200300, 2000]),
        (["1.200.300", "2.000", "5"], [1200300, 2000, 5]),
        (["1.200,5", "2.000", "7"], [1200.5, 2000, 7]),
        (["1 200", "1\u202f000,5", "3"], [1200, 1000.5, 3]),
        (["1'200.50", "3"], [1200.5, 3]),
        (["USD 5", "1,300 USD", "?"], [5, 1300, NONE]),
        (["12.500 %", "3 %"], [12.5, 3]),
        (["$ 1.50", "$ 12.25"], [1.5, 12.25]),
        (["\N{MINUS SIGN}5 %", "+5 %"], [-5, 5]),
    ],
)
def test_amounts(cells, wanted):
    np.testing.assert_array_equal(numbers(cells), wanted)


def test_a_warning_says_what_a_cell_was_read_as():
    with pytest.warns(UserWarning, match=re.escape("the frame: column 'x': '€ 1,200.50' is read as 1200.5")):
        frame(["€ 5", "€ 1,200.50"][::-1]).numbers("x")


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (["€ 5", "$ 5", "€ 7"], "row 2, column 'x': '$ 5' is in $, but others of the column are in €"),
        (["12 %", "0.5", "13 %"], "row 2, column 'x': '0.5' has no unit, but others of the column are in %"),
        (["1,200", "3,400"], "row 1, column 'x': '1,200' may have thousands or a fraction behind the ','"),
        (["€ 1.200", "€ 3.400"], "and nothing in the column decides; write 1200 or 1.200"),
        (
            ["€ 1,5", "€ 1.5", "€ 2.5"],
            "row 1, column 'x': '€ 1,5' is not written as most of this column are, as '1.5' is",
        ),
        (["€ 5", "free", "€ 6"], "row 2, column 'x': 'free' is not a finite number"),
    ],
)
def test_amounts_that_nothing_decides_are_refused(cells, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        frame(cells).numbers("x")


@pytest.mark.parametrize("cells", [["A 5", "b"], ["5 apples", "6 pears"], ["1,5 a", "2"], ["a", "b", "12 %"]])
def test_what_is_no_amount_stays_as_it_is(cells):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert frame([*cells, *cells[:1]]).kind("x") in ("text", "numbers")


def moment(*parts):
    return datetime(*parts, tzinfo=UTC).timestamp()


DATES = [
    (["31.01.2025", "1.2.2025"], [(2025, 1, 31), (2025, 2, 1)]),
    (["01/31/2025", "02/01/2025"], [(2025, 1, 31), (2025, 2, 1)]),
    (["31/01/2025", "02/01/2025"], [(2025, 1, 31), (2025, 1, 2)]),
    (["31-01-2025", "02-01-2025"], [(2025, 1, 31), (2025, 1, 2)]),
    (["05/05/2025", "06/06/2025"], [(2025, 5, 5), (2025, 6, 6)]),
    (["31.01.2025 10:05", "1.2.2025"], [(2025, 1, 31, 10, 5), (2025, 2, 1)]),
    (["1/31/2025 1:05 PM", "2/1/2025, 12:00 am"], [(2025, 1, 31, 13, 5), (2025, 2, 1)]),
    (["1/31/2025 1:05:09 PM", "1/31/2025 23:05:09"], [(2025, 1, 31, 13, 5, 9), (2025, 1, 31, 23, 5, 9)]),
    (["31.01.2025 10:05:01.250000", "1.2.2025"], [(2025, 1, 31, 10, 5, 1, 250000), (2025, 2, 1)]),
    (["2025/01/31", "2025/02/01 07:30"], [(2025, 1, 31), (2025, 2, 1, 7, 30)]),
    (["31 January 2025", "1 Feb 2025"], [(2025, 1, 31), (2025, 2, 1)]),
    (["January 31, 2025", "Feb 1, 2025"], [(2025, 1, 31), (2025, 2, 1)]),
    (["31-Jan-2025", "01-Feb-2025"], [(2025, 1, 31), (2025, 2, 1)]),
]


@pytest.mark.parametrize(("cells", "wanted"), DATES)
def test_dates(cells, wanted):
    one = frame([*cells, ""])
    with pytest.warns(UserWarning, match="column 'x': '.*' is read as 2025-"):
        kind = one.kind("x")
    assert kind == "dates"
    assert one.seconds("x").tolist()[:2] == [moment(*each) for each in wanted]
    assert np.isnan(one.seconds("x")[2])


def test_rows_in_order_of_such_dates():
    """Split by time: the last days are tested on, whatever the order of digits."""
    days = [f"{day:02}/{month:02}/2025" for month in (1, 2, 3) for day in range(1, 29)]
    table = polars.DataFrame(
        {"who": ["a", "b"] * 42, "day": days, "x": range(84), "y": [i % 7 + 0.5 for i in range(84)]}
    )
    with pytest.warns(UserWarning, match="'13/01/2025' is read as 2025-01-13|read as"):
        federation = kinfed.from_frame(table, client="who", target="y", time="day")
    assert all(
        federation.x[rows, 0].min() > federation.x[federation.rows["train"][i], 0].max()
        for i, rows in enumerate(federation.rows["test"])
    )


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (
            ["05/04/2025", "01/02/2025"],
            "row 1, column 'x': '05/04/2025' may be 05 April or 04 May, and the column does",
        ),
        (
            ["31/01/2025", "30/01/2025", "01/31/2025"],
            "row 3, column 'x': '01/31/2025' and '31/01/2025' have day and month in different orders; write",
        ),
        (["31/01/2025", "01/31/2025"], "have day and month in different orders"),
        (["31.01.2025", "01.02.2025", "30.02.2025"], "row 3, column 'x': '30.02.2025' is not a date"),
        (["31.01.2025", "01.02.2025", "soon"], "row 3, column 'x': 'soon' is not a date"),
        (
            ["2025-01-31 10:00+01:00", "2025-01-31 10:00"],
            "row 2, column 'x': '2025-01-31 10:00' has no time zone, but '2025-01-31 10:00+01:00' has one, so",
        ),
    ],
)
def test_dates_that_nothing_decides_are_refused(cells, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        frame(cells).seconds("x")


def test_several_zones_are_one_clock_and_said():
    cells = ["2025-01-31 10:00+01:00", "2025-06-30T10:00+0200", "2025-01-31 10:00Z"]
    with pytest.warns(UserWarning, match=r"times of 3 time zones \(\+01:00, \+02:00, UTC\); all are taken in UTC"):
        hours = frame(cells).seconds("x")
    assert hours.tolist() == [moment(2025, 1, 31, 9), moment(2025, 6, 30, 8), moment(2025, 1, 31, 10)]


def test_two_digits_of_a_year_are_not_guessed():
    with pytest.warns(UserWarning, match="'x' is taken for text; if '31.01.25' is a date, write its year with four"):
        assert frame(["31.01.25", "01.02.25"]).kind("x") == "text"
