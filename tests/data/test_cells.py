"""Numbers and dates in the formats that are said, and what the error of any other cell advises."""

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
from kinfed.data.tables.cells import FormatSettings
from kinfed.data.tables.moments import read_seconds
from kinfed.data.tables.new_readings import Series
from kinfed.data.tables.open_table import frame_of
from kinfed.data.tables.owners import Owners
from kinfed.data.tables.schema import Description

NONE = float("nan")


def frame(cells, **formats):
    return frame_of(polars.DataFrame({"x": cells})).read_as(FormatSettings(**formats).formats)


@pytest.fixture(autouse=True)
def _nothing_is_guessed_and_so_nothing_is_said():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*read as")
        yield


NUMBERS = [
    ({}, ["12", "-1.5", " 1e3", "+2.", ".5", "na", "", "\N{MINUS SIGN}5"], [12, -1.5, 1000, 2, 0.5, NONE, NONE, -5]),
    ({"units": "%"}, ["12 %", "7%", "", "-3.5 %", "0"], [12, 7, NONE, -3.5, 0]),
    ({"units": "€", "thousands": ","}, ["€ 1,200.50", "€5", "-€ 3", "€ -1,000,000"], [1200.5, 5, -3, -1e6]),
    ({"units": "€", "thousands": ".", "decimal": ","}, ["1.200,50 €", "12 €", "0,5 €"], [1200.5, 12, 0.5]),
    ({"thousands": ","}, ["1,200", "950", "na", "12,000"], [1200, 950, NONE, 12000]),
    ({"thousands": ".", "decimal": ","}, ["1.200.300", "2.000,25", "5"], [1200300, 2000.25, 5]),
    ({"thousands": " ", "decimal": ","}, ["1 200", "1\u202f000,5", "3"], [1200, 1000.5, 3]),
    ({"thousands": "'"}, ["1'200.50", "3", "1\u2019000"], [1200.5, 3, 1000]),
    ({"decimal": ","}, ["3,14", "2,5", "7", "1,5E-05"], [3.14, 2.5, 7, 1.5e-5]),
    ({"units": ["km", "m"]}, ["5 km", "7"], [5, 7]),
]


@pytest.mark.parametrize(("said", "cells", "wanted"), NUMBERS)
def test_numbers_are_read_in_the_format_that_is_said(said, cells, wanted):
    one = frame(cells, **said)
    assert one.kind("x") == "numbers"
    np.testing.assert_array_equal(one["x"].numbers(), wanted)


ADVICE = [
    (["7", "12 %", "5"], {}, "row 2, column 'x': '12 %' is not a number; units=[\"%\"] would read it as 12"),
    (["12 kg", "7 kg"], {}, "row 1, column 'x': '12 kg' is not a number (and 1 more); units=[\"kg\"] would"),
    (["€ 1,200.50"], {}, 'thousands="," units=["€"] would read it as 1200.5'),
    (["1.200,50", "7"], {}, 'decimal="," thousands="." would read it as 1200.5'),
    (["1,200", "3,400"], {}, 'decimal="," would read it as 1.2, thousands="," would read it as 1200'),
    (["1,200", "3,4"], {}, 'is not a number (and 1 more); decimal="," would read it as 1.2'),
    (["1 200", "5"], {}, 'thousands=" " would read it as 1200'),
    (["3,14", "2.5", "1,5"], {}, 'decimal="," would read it as 3.14, but others of the column are written otherwise'),
    (["2,5", "1.5"], {"decimal": ","}, "row 2, column 'x': '1.5' is not a number; decimal=\".\" would read it as 1.5"),
    (["2,5", "1.50"], {"decimal": ",", "thousands": "."}, "row 2, column 'x': '1.50' is not a number"),
    (["5 kg", "6 g"], {"units": "kg"}, "row 2, column 'x': '6 g' is not a number; units=[\"kg\", \"g\"] would"),
    (["€ 5", "$ 6"], {"units": ["€", "$"]}, "row 2, column 'x': '$ 6' is in $, but others are in €; convert them"),
    (["5", "free", "6"], {}, "row 2, column 'x': 'free' is not a number; correct it, leave it empty if it is missing"),
]


@pytest.mark.parametrize(("cells", "said", "told"), ADVICE)
def test_a_number_in_another_format_is_refused_with_the_option_that_would_read_it(cells, said, told):
    one = frame(cells, **said)
    assert one.kind("x") == "numbers"
    with pytest.raises(UsageError, match=re.escape(told)):
        one["x"].numbers()


def test_an_option_that_is_advised_reads_the_cell_as_it_says():
    for cells, said, _ in ADVICE:
        with pytest.raises(UsageError) as problem:
            frame(cells, **said)["x"].numbers()
        advised = re.findall(
            r'((?:(?:decimal|thousands|units)=(?:"."|\[[^]]*\]) ?)+)would read it as ([\d.]+)', str(problem.value)
        )
        for options, value in advised:
            settings = dict(re.findall(r'(\w+)=("."|\[[^]]*\])', options))
            cell = re.search(r"'(.*?)' is not", str(problem.value).replace("column 'x': ", ""))[1]
            formats = said | {name: json.loads(one) for name, one in settings.items()}
            assert frame([cell], **formats)["x"].numbers().tolist() == [float(value.rstrip("."))]


@pytest.mark.parametrize(
    "cells",
    [["A 5", "b"], ["5 apples", "6 pears"], ["5m", "6g"], ["1,2,3", "4,5,6"], ["1.2.3", "1.2.4"], ["a", "b", "12 %"]],
)
def test_what_is_no_number_in_any_format_is_text(cells):
    assert frame(cells).kind("x") == "text"


def test_a_column_may_be_said_to_be_text():
    assert frame(["5 kg", "10 kg"], text="x").kind("x") == "text"
    assert frame(["1", "2"], text=["x"]).kind("x") == "text"
    table = polars.DataFrame(
        {"who": ["a", "b"] * 30, "zip": ["01067", "10115", "80331"] * 20, "y": [0.5, 1.5, 2.5] * 20}
    )
    found = kinfed.from_frame(table, client="who", target="y", text="zip").columns
    assert found.names == ["zip=01067", "zip=10115", "zip=80331"]


def moment(*parts):
    return datetime(*parts, tzinfo=UTC).timestamp()


DATES = [
    ("%d.%m.%Y", ["31.01.2025", "1.2.2025"], [(2025, 1, 31), (2025, 2, 1)]),
    ("%m/%d/%Y", ["01/31/2025", "02/01/2025"], [(2025, 1, 31), (2025, 2, 1)]),
    ("%d/%m/%Y", ["02/01/2025", "2025-02-01"], [(2025, 1, 2), (2025, 2, 1)]),
    (["%d.%m.%Y", "%d.%m.%Y %H:%M"], ["31.01.2025 10:05", "1.2.2025"], [(2025, 1, 31, 10, 5), (2025, 2, 1)]),
    ("%m/%d/%Y %I:%M %p", ["1/31/2025 1:05 PM", "2/1/2025 12:00 am"], [(2025, 1, 31, 13, 5), (2025, 2, 1)]),
    ("%d %B %Y", ["31 January 2025", "1 Feb 2025"], [(2025, 1, 31), (2025, 2, 1)]),
    ("%d.%m.%y", ["31.01.25", "01.02.70"], [(2025, 1, 31), (1970, 2, 1)]),
    ("%y-%m-%d", ["25-01-31", "68-02-01"], [(2025, 1, 31), (2068, 2, 1)]),
    ((), ["2025-01-31", "2025-02-01T07:30"], [(2025, 1, 31), (2025, 2, 1, 7, 30)]),
]


@pytest.mark.parametrize(("said", "cells", "wanted"), DATES)
def test_dates_are_read_in_the_format_that_is_said(said, cells, wanted):
    one = frame([*cells, ""], dates=said)
    assert one.kind("x") == "dates"
    assert read_seconds(one["x"]).tolist()[:2] == [moment(*each) for each in wanted]
    assert np.isnan(read_seconds(one["x"])[2])


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (["31/01/2025", "02/01/2025"], 'dates="%d/%m/%Y" would read it as 31 January 2025'),
        (["02/01/2025", "31/01/2025"], 'dates="%d/%m/%Y" would read it as 02 January 2025'),
        (
            ["05/04/2025", "01/02/2025"],
            'dates="%d/%m/%Y" would read it as 05 April 2025, dates="%m/%d/%Y" would read it as 04 May 2025',
        ),
        (["31/01/2025", "01/31/2025"], "but others of the column are written otherwise; write all in one way"),
        (
            ["2025-01-31", "31.01.2025"],
            "row 2, column 'x': '31.01.2025' is not a date such as 2012-03-01 00:05; dates=",
        ),
        (["31.01.25", "05.12.25"], 'dates="%d.%m.%y" would read it as 31 January 2025, dates="%y.%m.%d" would'),
        (
            ["2025-01-31", "2025-02-01", "soon"],
            "row 3, column 'x': 'soon' is not a date such as 2012-03-01 00:05; corr",
        ),
        (
            ["2025-01-31 10:00+01:00", "2025-01-31 10:00"],
            "row 2, column 'x': '2025-01-31 10:00' has no time zone, but '2025-01-31 10:00+01:00' has one, so",
        ),
    ],
)
def test_a_date_in_another_format_is_refused_with_the_option_that_would_read_it(cells, told):
    one = frame(cells)
    assert one.kind("x") == "dates"
    with pytest.raises(UsageError, match=re.escape(told)):
        read_seconds(one["x"])


def test_a_format_that_reads_iso_dates_otherwise_is_the_only_one():
    one = frame(["2025-02-01", "2025-01-31"], dates="%Y-%d-%m")
    with pytest.raises(UsageError, match="'2025-01-31' is not a date"):
        read_seconds(one["x"])


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"decimal": ";"}, "decimal is the mark before fractions"),
        ({"decimal": ","} | {"thousands": ","}, "decimal and thousands are both ','"),
        ({"thousands": "."}, "decimal and thousands are both '.'"),
        ({"thousands": "x"}, "thousands is a point, a comma, a blank or an apostrophe; got 'x'"),
        ({"dates": "DD.MM.YYYY"}, "dates are written as in strptime, such as %d.%m.%Y"),
        ({"dates": ["%d.%m.%Y", "%m.%Y"]}, "got '%m.%Y'"),
    ],
)
def test_formats_that_cannot_be_are_refused(said, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        FormatSettings(**said)


def test_rows_in_order_of_dates_in_a_format():
    """Split by time: the last days are tested on, whatever the order of digits."""
    days = [f"{day:02}/{month:02}/2025" for month in (1, 2, 3) for day in range(1, 29)]
    table = polars.DataFrame(
        {"who": ["a", "b"] * 42, "day": days, "x": range(84), "y": [i % 7 + 0.5 for i in range(84)]}
    )
    federation = kinfed.from_frame(table, client="who", target="y", time="day", dates="%d/%m/%Y")
    assert all(
        federation.x[rows, 0].min() > federation.x[federation.rows["train"][i], 0].max()
        for i, rows in enumerate(federation.rows["test"])
    )
    with pytest.raises(UsageError, match=re.escape("row 1, column 'day': '01/01/2025' is not a number or a date such")):
        kinfed.from_frame(table, client="who", target="y", time="day")


def test_several_zones_are_one_clock_and_said():
    cells = ["2025-01-31 10:00+01:00", "2025-06-30T10:00+0200", "2025-01-31 10:00Z"]
    with pytest.warns(UserWarning, match=r"times of 3 time zones \(\+01:00, \+02:00, UTC\); all are taken in UTC"):
        hours = read_seconds(frame(cells)["x"])
    assert hours.tolist() == [moment(2025, 1, 31, 9), moment(2025, 6, 30, 8), moment(2025, 1, 31, 10)]


def described(cells, **formats):
    """What rows of two shops, whose column x is written so, say of it; each row is there ten times."""
    count = len(cells) * 10
    rows = {"x": cells * 10, "shop": ["A", "B"] * (count // 2), "sold": [i % 7 + 0.5 for i in range(count)]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = kinfed.from_frame(polars.DataFrame(rows), client="shop", target="sold", **formats).columns
    return Description.from_dict(json.loads(json.dumps(found.to_dict())))


WAYS = {  # formats, training cells, a new cell, and the same as a number or an ISO date
    "day first": ({"dates": "%d/%m/%Y"}, ["31/01/2025", "05/02/2025"], "03/04/2025", "2025-04-03"),
    "month first": ({"dates": "%m/%d/%Y"}, ["01/31/2025", "02/05/2025"], "03/04/2025", "2025-03-04"),
    "comma": ({"decimal": ",", "thousands": ".", "units": "€"}, ["1.200,50 €", "12 €"], "1.500 €", 1500.0),
    "thousands": ({"thousands": ","}, ["1,200", "12"], "1,500", 1500.0),
    "percent": ({"units": ["%"], "decimal": ","}, ["12 %", "7,5 %"], "1,250 %", 1.25),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_new_cell_is_read_as_training_was_told(way):
    said, cells, new, wanted = WAYS[way]
    found = described(cells, **said)
    typed = datetime.fromisoformat(wanted) if isinstance(wanted, str) else wanted
    x, same = (found.encode(frame([cell]), "A") for cell in (new, typed))
    np.testing.assert_array_equal(x, same)
    assert found.encode(frame([*cells, new]), "A")[2].equal(x[0])


OTHER = {  # formats, training cells, a new cell that is none in these, what is said of it
    "month first": ({"dates": "%d/%m/%Y"}, ["31/01/2025", "05/02/2025"], "03/14/2025", "is not a date such as 2012-03"),
    "a unit": ({}, ["12", "7"], "12 %", "'12 %' is not a number; units="),
    "another unit": ({"units": "€"}, ["12 €", "7 €"], "$ 12", "'$ 12' is not a number"),
    "thousands": ({}, ["1200", "7"], "1,200", "'1,200' is not a number"),
    "a fraction": ({"decimal": ","}, ["1,5", "7"], "1.5", "'1.5' is not a number"),
    "true among numbers": ({}, ["1", "0"], "true", "'true' is not a number"),
    "no truth": ({}, ["true", "False"], "yes", "'yes' is neither true nor false, as all were in training"),
    "no zone": ({}, ["2025-01-31 10:00Z", "2025-02-05 11:30Z"], "2025-02-05 11:30", "has no time zone, but in train"),
    "a zone": ({}, ["2025-01-31 10:00", "2025-02-05 11:30"], "2025-02-05 11:30+02:00", "has a time zone, but in train"),
}


@pytest.mark.parametrize("way", OTHER)
def test_a_new_cell_that_is_written_otherwise_is_refused_with_its_place(way):
    said, cells, new, told = OTHER[way]
    with pytest.raises(UsageError, match=re.escape(f"row 3, column 'x': '{new}'")) as problem:
        described(cells, **said).encode(frame([cells[0], None, new]), "A")
    assert told in str(problem.value)


def test_truth_values_stay_what_they_were_in_training_beside_numbers():
    found = described(["true", "False"])
    x = found.encode(frame(["TRUE", "0", "false", "1"]), "A")
    torch.testing.assert_close(x, found.encode(frame(["true", "false", "false", "true"]), "A"))


NAIVE = [datetime(2025, 1, 31, 10), datetime(2025, 2, 5, 11, 30)]
AWARE = [one.replace(tzinfo=UTC) for one in NAIVE]
CLOCKS = {  # training cells and a new cell without a time zone, and a new one with it
    "text": (["2025-01-31 10:00", "2025-02-05 11:30"], "2025-02-05 11:30", "2025-02-05 13:30+02:00"),
    "typed": (NAIVE, NAIVE[1], AWARE[1].astimezone(timezone(timedelta(hours=2)))),
    "dates": (["2025-01-31", "2025-02-05"], "2025-02-05 11:30", AWARE[1]),
}


@pytest.mark.parametrize("trained", CLOCKS)
@pytest.mark.parametrize("new", ["text", "typed"])
def test_times_of_new_rows_are_of_the_clock_of_training_of_whatever_type(trained, new):
    plain, zoned = CLOCKS[new][1:]
    known = described(CLOCKS[trained][0])
    known.encode(frame([plain]), "A")
    with pytest.raises(UsageError, match=r"row 1, column 'x': .* has a time zone, but in training times had no"):
        known.encode(frame([zoned]), "A")
    if trained in ("text", "typed"):
        known = described(AWARE if trained == "typed" else [f"{one}Z" for one in CLOCKS["text"][0]])
        found = known.encode(frame([zoned]), "A")
        assert torch.equal(found, known.encode(frame([AWARE[1]]), "A"))
        with pytest.raises(UsageError, match=r"row 1, column 'x': .* has no time zone, but in training times had a"):
            known.encode(frame([plain]), "A")


def test_moments_of_two_clocks_in_one_column_are_refused():
    with pytest.raises(UsageError, match="column 'x' holds values of another kind"):
        read_seconds(frame_of(pandas.DataFrame({"x": [NAIVE[0], AWARE[0]]}))["x"])


def test_times_and_readings_of_series_are_read_as_training_was_told():
    days = [f"{day:02d}/{month:02d}/2025" for month in (1, 2, 3) for day in range(1, 29)]
    rows = {"shop": ["A"] * 84, "day": days, "level": [f"1.{200 + i},5" for i in range(84)]}
    said = {"dates": "%d/%m/%Y", "decimal": ",", "thousands": "."}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = kinfed.from_frame(polars.DataFrame(rows), client="shop", target="level", time="day", past=2, **said)
    scale = json.loads(json.dumps(found.scale))
    series = Series.from_dict(scale["series"], scale["inputs"]["reading"])
    new = frame_of(polars.DataFrame({"day": ["01/02/2025", "02/02/2025"], "level": ["1.300", "1.400"]}))
    ahead = series.windows(new, Owners(["A"], np.array([0, 0]), None))
    known = ahead.x[ahead.at][0, :, 0].double() * series.deviation + series.mean
    np.testing.assert_allclose(known, [1300, 1400], rtol=1e-4)
