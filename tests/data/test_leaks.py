"""Warnings that a table gives its target away, and none where a column is only a good predictor."""

import datetime
import warnings

import numpy as np
import polars
import pytest

import kinfed
from kinfed.data.tables import leaks

ROWS = 400


def table(**columns):
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(2, ROWS)).round(3)
    frame = {"site": [f"s{i % 5}" for i in range(ROWS)], "a": a, "b": b, "kind": draw.choice(["new", "old"], ROWS)}
    y = np.where(a + draw.normal(size=ROWS) > 0, "yes", "no")
    return frame | {"y": y} | {name: make(draw, y == "yes") for name, make in columns.items()}


def warned(frame, target="y", **settings):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        kinfed.from_frame(polars.DataFrame(frame), client="site", target=target, **settings)
    return [str(warning.message) for warning in shown]


def price(draw, yes):
    return [value if known else None for value, known in zip(draw.uniform(5, 50, ROWS).tolist(), yes, strict=True)]


def often_empty(draw, yes):
    """Empty in most rows of one class, and in some of the other."""
    return [draw.random() if (known if draw.random() < 0.95 else not known) else None for known in yes]


def codes(draw, yes):
    return [f"{'PQRST'[i] if known else 'ABCDE'[i]}" for i, known in zip(draw.integers(0, 5, ROWS), yes, strict=True)]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"price": price}, "whether 'price' is empty tells 'y' in 100 % of rows ('no' where it is)"),
        ({"paid": lambda draw, yes: np.where(yes, 100, 20) + draw.uniform(0, 60, ROWS)}, "'paid' alone tells 'y' in"),
        ({"code": codes}, "'code' alone tells 'y' in 100 % of rows"),
    ],
)
def test_a_column_that_tells_the_label_is_named(columns, said):
    (line,) = warned(table(**columns))
    assert said in line
    assert line.endswith("what is not known before 'y' is left out with ignore")


def test_a_column_that_is_empty_wherever_there_is_a_target_is_named_in_plain_words():
    """As a dose is where rows are doses or measurements; statistics of no cell at all are not taken."""
    frame = polars.DataFrame(table(dose=lambda draw, yes: [None] * ROWS))
    dosed = frame.with_columns(y=polars.lit(None, polars.String), dose=polars.lit(2.0))
    lines = warned(polars.concat([frame.with_columns(dose=polars.col("dose").cast(polars.Float64)), dosed[:20]]))
    assert [line for line in lines if "have no y" not in line and "dose" not in line] == []


def test_a_copy_of_the_label_is_named_once_and_named_if_it_is_none_in_a_row_outside_training():
    frame = polars.DataFrame(table(copy=lambda draw, yes: np.where(yes, 1, 0)))
    (line,) = warned(frame)
    assert "column 'copy': '1' tells that 'y' is 'yes', as in all rows" in line
    test = int(kinfed.from_frame(frame, client="site", target="y").rows["test"][0][0])
    (line,) = warned(frame.with_columns(copy=polars.when(polars.int_range(ROWS) == test).then(7).otherwise("copy")))
    assert "'copy' alone tells 'y' in 100 % of rows" in line


def test_two_columns_that_tell_the_label_together_are_named():
    draw = np.random.default_rng(1)
    sent, back = draw.choice(["yes", "no"], (2, ROWS))
    (line,) = warned(table() | {"sent": sent, "back": back, "y": np.where(sent == back, "a", "b")})
    assert "'sent' and 'back' together tell 'y' in 100 % of rows" in line or "'back' and 'sent' together" in line
    due, paid = draw.normal(size=(2, ROWS))
    (line,) = warned(table() | {"due": due, "paid": paid, "y": np.where(paid < due, "a", "b")})
    assert {"'due'", "'paid'"} <= {*line.split()}


def test_copies_sums_and_products_of_a_number_are_named():
    draw = np.random.default_rng(2)
    z, noise, net, tax = draw.normal(size=(4, ROWS))
    (line,) = warned(table() | {"copy": 7 * z + 0.1 * noise, "z": z}, "z")
    assert "'copy' tells 'z' except 1." in line
    (line,) = warned(table() | {"net": net, "tax": tax, "z": net + 2 * tax + 0.01 * noise}, "z")
    assert "'z' is nearly a weighted sum of" in line
    assert {"'net'", "'tax',"} <= {*line.split()} or {"'tax'", "'net',"} <= {*line.split()}
    one, two = np.exp(net), np.exp(tax)
    (line,) = warned(table() | {"price": one, "count": two, "z": one * two}, "z")
    assert "'z' is nearly a weighted product of" in line


def test_functions_products_ratios_and_lines_at_each_client_are_named():
    draw = np.random.default_rng(5)
    z, p = draw.normal(size=ROWS), draw.uniform(1, 5, ROWS) * draw.choice([-1, 1], ROWS)
    site = np.arange(ROWS) % 5
    leaks_of = {
        "'rank' tells 'z' except": {"rank": np.argsort(np.argsort(z))},
        "'curve' tells 'z' except": {"curve": np.exp(z).round(3)},
        "'half' tells 'z' except": {"half": np.where(draw.random(ROWS) < 0.3, np.nan, z**3)},
        "'z' is nearly a product of": {"p": p, "q": z / p},
        "'z' is nearly a ratio of": {"p": p, "q": z * p},
        "'own' tells 'z' at each client except": {"own": (z - site) * (1.0 + site)},
        "'word' tells 'z' except": {"word": [f"w{v:.0f}" for v in 5 * z], "z": (5 * z).round() / 5},
    }
    for start, columns in leaks_of.items():
        (line,) = warned(table() | {"z": z} | columns, "z")
        assert start in line


@pytest.mark.parametrize("text", [False, True])
def test_persons_whose_rows_stand_on_both_sides_of_the_split_are_named(text):
    draw = np.random.default_rng(6)
    person = draw.integers(0, 80, ROWS)
    z = 3 * draw.normal(size=80)[person] + draw.normal(size=ROWS)
    people = {"who": [f"p{i}" for i in person] if text else person}
    (line,) = warned(table() | people | {"z": z}, "z")
    assert "rows with the same 'who' have nearly the same 'z'" in line
    assert line.endswith("group=who keeps such rows in one part of the split")
    (line,) = warned(table() | people | {"y": np.where(z > 0, "yes", "no")})
    assert "rows with the same 'who' have nearly the same 'y'" in line
    assert warned(table() | people | {"z": z}, "z", group="who") == []


@pytest.mark.parametrize("times", [1, 100])
def test_persons_are_named_by_what_their_rows_share(times, monkeypatch):
    monkeypatch.setattr(leaks, "PERSONS", ROWS)  # all rows, or those of a hundredth of the persons
    draw, count = np.random.default_rng(6), ROWS * times
    person = draw.integers(0, count // 4, count)
    frame = {
        "site": [f"s{i % 5}" for i in range(count)],
        "person": [f"p{i}" for i in person],
        "born": draw.integers(1950, 1970, count)[person],
        "sex": draw.choice(["f", "m"], count)[person],
        "visit": draw.integers(0, 3, count),
        "z": draw.normal(size=count),
    }
    (line,) = warned(frame, "z")
    assert "rows with the same 'person' have the same 'born' and 'sex'; if new rows are of others, group=pers" in line
    assert warned(frame, "z", group="person") == []
    assert warned(frame | {"born": draw.integers(1950, 1970, count)}, "z") == []  # one column says too little
    assert not any("group=" in line for line in warned(frame | {"site": frame["person"]}, "z"))  # a client is a person


def test_good_predictors_are_no_leaks():
    strong = {"strong": lambda draw, yes: yes + 0.35 * draw.normal(size=ROWS), "often": often_empty}
    assert warned(table(**strong)) == []
    draw = np.random.default_rng(3)
    z, noise = draw.normal(size=(2, ROWS))
    assert warned(table() | {"near": z + 0.1 * noise, "z": z}, "z") == []
    age = draw.integers(20, 80, ROWS)  # what tells a number in order is no name
    assert warned(table() | {"age": age, "z": np.sin(age / 20) + 0.2 * noise}, "z") == []
    kinds = draw.integers(0, 8, ROWS)  # few kinds are no persons
    assert warned(table() | {"kinds": [f"k{i}" for i in kinds], "z": kinds % 3 + 0.3 * noise}, "z") == []


def test_rows_that_stand_twice_are_counted_where_one_is_in_training():
    frame = table()
    again = np.random.default_rng(4).choice(ROWS, 40, replace=False)
    doubled = {name: [*values, *np.asarray(values)[again]] for name, values in frame.items()}
    (line,) = warned(doubled)
    assert "rows outside of training" in line
    assert 10 <= int(line.split(": ")[1].split()[0]) <= 40
    rounded = [*frame["a"], *np.asarray(frame["a"])[again].astype(np.float32)]
    (line,) = warned(doubled | {"a": rounded})
    assert "rows outside of training" in line
    coarse = {name: values for name, values in frame.items() if name in ("site", "kind", "y")}
    assert warned(coarse | {"age": np.arange(ROWS) % 3}) == []  # where rows are equal by chance
    assert warned(doubled | {"a": np.random.default_rng(5).normal(size=ROWS + 40)}) == []


def months(skip=()):
    rows = [(site, datetime.date(2016 + i // 12, 1 + i % 12, 1)) for site in "abc" for i in range(96)]
    rows = [(site, date) for site, date in rows if date.month not in skip]
    return {"site": [s for s, _ in rows], "t": [d for _, d in rows], "z": [float(i % 7) for i in range(len(rows))]}


def test_windows_that_bridge_a_month_that_nobody_has_are_told():
    settings = {"time": "t", "past": 6, "horizon": 2}
    assert warned(months(), "z", **settings) == []
    (line,) = warned(months(skip=(8,)), "z", **settings)
    assert "8 of 87 steps are longer than the others" in line
    assert "windows bridge these" in line


def test_a_sum_of_one_or_two_columns_is_told_of_columns_that_are_named():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(100, 5))
    assert leaks.is_short_sum(x, 3 * x[:, 2] + 1)
    assert leaks.is_short_sum(x, x[:, 0] - 2 * x[:, 4])
    assert not leaks.is_short_sum(x, x[:, :3].sum(1))
