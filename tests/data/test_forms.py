"""Numbers and dates as people write them, decided over a whole column."""

import json
import re
import warnings
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pandas
import polars
import pytest
import torch

import kinfed
from kinfed import UsageError
from kinfed.data.tables.new_readings import Series
from kinfed.data.tables.open_table import frame_of
from kinfed.data.tables.owners import Owners
from kinfed.data.tables.schema import Description

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
        (["3,14", "2,5", "7", ""], [3.14, 2.5, 7, NONE]),
        (["0,125", "-0,250", "12"], [0.125, -0.25, 12]),  # no thousands begin with 0
        (["1,250", "2,500", "3,75"], [1.25, 2.5, 3.75]),
        (["1,5E-05", "2,5e3", "1"], [1.5e-5, 2500, 1]),
        (["3,5", "1.200,5"], [3.5, 1200.5]),
        (["12 kg", "7kg", "5,5 kg"], [12, 7, 5.5]),
        (["-3.5 °C", "20 °C", "21 °C"], [-3.5, 20, 21]),
        (["5 m", "6.5 m"], [5, 6.5]),
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
        (["12 kg", "500 g", "3 kg"], "row 2, column 'x': '500 g' is in g, but others of the column are in kg; write"),
        (["3,14", "2.5", "1,5"], "row 2, column 'x': '2.5' is not written as most of this column are, as '3,14' is"),
        (["2.5", "1.5", "3,14"], "row 3, column 'x': '3,14' is not a finite number; write a decimal point for the"),
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


@pytest.mark.parametrize(
    "cells",
    [["A 5", "b"], ["5 apples", "6 pears"], ["5m", "6g"], ["1,2,3", "4,5,6"], ["1,5 a", "2"], ["a", "b", "12 %"]],
)
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


@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        (["31.01.25", "01.02.25", ""], ["2025-01-31", "2025-02-01", None]),
        (["1/31/25 1:05 PM", "2/5/25"], ["2025-01-31 13:05", "2025-02-05"]),
        (["31/12/99", "01/01/00", "05/02/68", "06/02/69"], ["1999-12-31", "2000-01-01", "2068-02-05", "1969-02-06"]),
        (["31-01-98", "30-01-99"], ["1998-01-31", "1999-01-30"]),
    ],
)
def test_two_digits_of_a_year_are_those_of_1969_to_2068(cells, wanted):
    one = frame(cells)
    with pytest.warns(UserWarning, match="is read as"):
        kind = one.kind("x")
    assert kind == "dates"
    found = one.seconds("x").tolist()
    seconds = [None if day is None else datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() for day in wanted]
    assert [None if value != value else value for value in found] == seconds


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (["01.01.20", "01.02.20", "01.01.21"], "'01.01.20' may be 01 January 2020 or 20 January 2001, and the column"),
        (["25-01-31", "24-02-28"], "'25-01-31' may be 25 January 2031 or 31 January 2025, and the column does not"),
        (["05/04/25", "06/04/25"], "'05/04/25' may be 05 April or 04 May, and the column does not decide"),
        (["31.01.25", "30.02.25", "02.03.25"], "'30.02.25' is not a date"),
    ],
)
def test_two_digits_of_a_year_that_nothing_decides_are_refused(cells, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        frame(cells).seconds("x")


def test_a_year_of_two_digits_that_comes_first_is_text_and_said_so():
    with pytest.warns(UserWarning, match="'x' is taken for text; if '99-01-31' is a date, write its year with four"):
        assert frame(["99-01-31", "98-02-15"]).kind("x") == "text"


def test_two_marks_make_no_date():
    with pytest.warns(UserWarning, match="'x' is taken for text; if '10-12.50' is a date"):
        assert frame(["10-12.50", "31-12.51"]).kind("x") == "text"


def described(**columns):
    """What rows of two shops, whose columns are written so, say of these; each row is there ten times."""
    rows = {name: cells * 10 for name, cells in columns.items()}
    count = len(next(iter(rows.values())))
    rows |= {"shop": ["A", "B"] * (count // 2), "sold": [i % 7 + 0.5 for i in range(count)]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = kinfed.from_frame(polars.DataFrame(rows), client="shop", target="sold").columns
    return Description.from_dict(json.loads(json.dumps(found.to_dict())))


WAYS = {  # training cells, a new cell that alone would be read otherwise or not at all, the same as training writes it
    "day first": (["31/01/2025", "05/02/2025"], "03/04/2025", "2025-04-03"),
    "month first": (["01/31/2025", "02/05/2025"], "03/04/2025", "2025-03-04"),
    "comma": (["1.200,50 €", "12 €"], "1.500 €", 1500.0),
    "point": (["1,200.50 €", "12 €"], "1,500 €", 1500.0),
    "comma without a unit": (["1.200,5", "7"], "1.500", 1500.0),
    "thousands": (["1,200", "12"], "1,500", 1500.0),
    "percent": (["12 %", "7,5 %"], "1,250 %", 1.25),
    "two digits of a year": (["31.01.25", "05.02.25"], "03.04.26", "2026-04-03"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_new_cell_is_read_as_training_cells_were_written(way):
    cells, new, wanted = WAYS[way]
    found = described(x=cells)
    typed = datetime.fromisoformat(wanted) if isinstance(wanted, str) else wanted
    x, same = (found.encode(frame([cell]), "A") for cell in (new, typed))
    np.testing.assert_array_equal(x, same)
    assert found.encode(frame([*cells, new]), "A")[2].equal(x[0])


@pytest.mark.parametrize(
    ("cells", "new", "wanted", "said"),
    [
        (["12 kg", "7 kg"], ["5,5 kg", "1 kg"], [5.5, 1], True),  # training did not say
        (["12 kg", "7 kg"], ["5.5 kg", "1,200.5 kg"], [5.5, 1200.5], False),
        (["12.5 kg", "7 kg"], ["5,5 kg", "1.200,5 kg"], [5.5, 1200.5], True),  # training said otherwise
        (["12,5 kg", "7 kg"], ["5.5 kg"], [5.5], True),
        (["12,5 kg", "7 kg"], ["5.500 kg"], [5500], False),  # may be as in training
    ],
)
def test_new_cells_show_their_own_decimal_mark(cells, new, wanted, said):
    found = described(x=cells)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        x = found.encode(frame(new), "A")
    torch.testing.assert_close(x, found.encode(frame([float(one) for one in wanted]), "A"))
    shown = [str(one.message) for one in told]
    assert shown == ([f"the frame: column 'x': '{new[0]}' is read as {wanted[0]:g}"] if said else [])


@pytest.mark.parametrize(
    ("cells", "new", "told"),
    [
        (["12 kg", "7 kg"], ["5,500 kg"], "'5,500 kg' may have thousands or a fraction behind the ','"),
        (["12.5 kg", "7 kg"], ["5,5 kg", "1.5 kg"], "'5,5 kg' is not written as in training, such as 1,200.5 kg"),
    ],
)
def test_new_cells_that_do_not_show_their_decimal_mark_are_refused(cells, new, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        described(x=cells).encode(frame(new), "A")


OTHER = {  # training cells, a new cell that would be a number or a date by itself, what is said of it
    "month first": (["31/01/2025", "05/02/2025"], "03/14/2025", "'03/14/2025' is not written as in training"),
    "ISO among others": (["31/01/2025", "05/02/2025"], "2025-04-03", "such as 31/01/2025; write it so"),
    "others among ISO": (["2025-01-31", "2025-02-05"], "14/03/2025", "'14/03/2025' is not a date such as 2012"),
    "another unit": (["1,200.50 €", "12 €"], "$ 12", "such as 1,200.5 €; write it so"),
    "no unit": (["12 %", "7 %"], "12", "'12' is not written as in training, such as 1,200.5 %"),
    "a new unit": (["12", "7"], "12 %", "'12 %' is not a finite number; in training they were written such as 1200.5"),
    "thousands": (["1200", "7"], "1,200", "'1,200' is not a finite number; in training"),
    "a fraction": (["1.200,5", "7"], "1.5", "'1.5' is not written as in training, such as 1.200,5"),
    "no truth": (["true", "False"], "yes", "'yes' is neither true nor false, as all were in training"),
    "no zone": (["2025-01-31 10:00Z", "2025-02-05 11:30Z"], "2025-02-05 11:30", "has no time zone, but in training"),
    "a zone": (["2025-01-31 10:00", "2025-02-05 11:30"], "2025-02-05 11:30+02:00", "has a time zone, but in training"),
}


def test_truth_values_stay_what_they_were_in_training_beside_numbers():
    found = described(x=["true", "False"])
    x = found.encode(frame(["TRUE", "0", "false", "1"]), "A")
    torch.testing.assert_close(x, found.encode(frame(["true", "false", "false", "true"]), "A"))


@pytest.mark.parametrize("way", OTHER)
def test_a_new_cell_that_is_written_otherwise_is_refused_with_its_place(way):
    cells, new, told = OTHER[way]
    with pytest.raises(UsageError, match=re.escape(f"row 3, column 'x': '{new}'")) as problem:
        described(x=cells).encode(frame([cells[0], None, new]), "A")
    assert told in str(problem.value)


NAIVE = [datetime(2025, 1, 31, 10), datetime(2025, 2, 5, 11, 30)]
AWARE = [one.replace(tzinfo=UTC) for one in NAIVE]
CLOCKS = {  # training cells and a new cell without a time zone, and a new one with it
    "text": (["2025-01-31 10:00", "2025-02-05 11:30"], "2025-02-05 11:30", "2025-02-05 13:30+02:00"),
    "day first": (["31/01/2025 10:00", "05/02/2025 11:30"], "05/02/2025 11:30", "2025-02-05 13:30+02:00"),
    "typed": (NAIVE, NAIVE[1], AWARE[1].astimezone(timezone(timedelta(hours=2)))),
    "dates": (["2025-01-31", "2025-02-05"], "2025-02-05 11:30", AWARE[1]),
}


@pytest.mark.filterwarnings("ignore:.*was read as")
@pytest.mark.parametrize("trained", CLOCKS)
@pytest.mark.parametrize("new", ["text", "typed"])
def test_times_of_new_rows_are_of_the_clock_of_training_of_whatever_type(trained, new):
    plain, zoned = CLOCKS[new][1:]
    known = described(x=CLOCKS[trained][0])
    if (trained, new) != ("day first", "text"):  # whose own form is asked for
        known.encode(frame([plain]), "A")
        with pytest.raises(UsageError, match=r"row 1, column 'x': .* has a time zone, but in training times had no"):
            known.encode(frame([zoned]), "A")
    if trained in ("text", "typed"):
        known = described(x=AWARE if trained == "typed" else [f"{one}Z" for one in CLOCKS["text"][0]])
        found = known.encode(frame([zoned]), "A")
        assert torch.equal(found, known.encode(frame([AWARE[1]]), "A"))
        with pytest.raises(UsageError, match=r"row 1, column 'x': .* has no time zone, but in training times had a"):
            known.encode(frame([plain]), "A")


def test_moments_of_two_clocks_in_one_column_are_refused():
    with pytest.raises(UsageError, match="column 'x' holds values of another kind"):
        frame_of(pandas.DataFrame({"x": [NAIVE[0], AWARE[0]]})).seconds("x")


def test_a_description_without_forms_reads_new_rows_by_themselves():
    old = described(x=["31/01/2025", "05/02/2025"]).to_dict()
    del old["written"], old["dropped"]
    with pytest.warns(UserWarning, match="is read as 2025-03-14"):
        Description.from_dict(old).encode(frame(["03/14/2025"]), "A")


def test_times_and_readings_of_series_are_read_as_in_training():
    days = [f"{day:02d}/{month:02d}/2025" for month in (1, 2, 3) for day in range(1, 29)]
    rows = {"shop": ["A"] * 84, "day": days, "level": [f"1.{200 + i},5" for i in range(84)]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = kinfed.from_frame(polars.DataFrame(rows), client="shop", target="level", time="day", past=2)
    scale = json.loads(json.dumps(found.scale))
    series = Series.from_dict(scale["series"], scale["inputs"]["reading"])
    new = frame_of(polars.DataFrame({"day": ["01/02/2025", "02/02/2025"], "level": ["1.300", "1.400"]}))
    ahead = series.windows(new, Owners(["A"], np.array([0, 0]), None))
    known = ahead.x[ahead.at][0, :, 0].double() * series.deviation + series.mean
    np.testing.assert_allclose(known, [1300, 1400], rtol=1e-4)
