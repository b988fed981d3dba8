"""Columns as training rows describe them: text, holes, dates and scales, found at once and merged from clients."""

import json
import math
import re
import tracemalloc
from datetime import date, timedelta

import numpy as np
import polars
import pytest
import torch

import kinfed
from kinfed import Split, UsageError
from kinfed.data.tables import column_statistics, encoder
from kinfed.data.tables.column_statistics import NumberStatistics, WordStatistics, cut, merge_statistics
from kinfed.data.tables.columns import Calendar, Category, Number, Unused
from kinfed.data.tables.encoder import moments, of_column
from kinfed.data.tables.open_table import frame_of, open_table
from kinfed.data.tables.schema import Description, Raw, describe_clients, raw_of

HOW = {"client": "who", "target": "y"}


def mixed(rows=240, seed=0):
    """A table with every kind of column; x2 is in units of each client's own."""
    draw = np.random.default_rng(seed)
    who = [f"C{i % 4}" for i in range(rows)]
    holes = draw.random((3, rows)) < 0.1
    numbers = draw.normal(20, 5, rows).round(2)
    own = [(10.0 ** (i % 4)) * value for i, value in enumerate(draw.normal(1, 0.2, rows))]
    fruit = np.where(np.arange(rows) < 4, "fig", draw.choice(["pear", "plum"], rows, p=[0.6, 0.4]))
    return polars.DataFrame(
        {
            "who": who,
            "x1": [None if hole else value for hole, value in zip(holes[0], numbers.tolist(), strict=True)],
            "x2": [None if hole else value for hole, value in zip(holes[1], own, strict=True)],
            "fruit": [None if hole else value for hole, value in zip(holes[2], fruit.tolist(), strict=True)],
            "day": [date(2023, 1, 1) + timedelta(int(d)) for d in draw.integers(0, 700, rows)],
            "y": draw.normal(size=rows),
        }
    )


def trained_on(federation):
    return torch.cat(list(federation.rows["train"])).numpy()


def test_clients_statistics_merged_describe_a_table_as_all_rows_do():
    table = mixed()
    federation = kinfed.from_frame(table, **HOW, scale="auto")
    whole = federation.columns
    parts = {}
    for name, rows in zip(federation.names, federation.rows["train"], strict=True):
        frame = frame_of(table[rows.tolist()])
        kinds = {column.name: column.kind for column in whole.inputs}
        parts[name] = {one: of_column(raw_of(frame, one, kind), kind) for one, kind in kinds.items()}
    found = describe_clients("who", parts, "auto")
    assert [column.kind for column in found.inputs] == ["number", "number", "category", "date"]
    assert set(found.clients["C0"]) == {"x2"}
    for one, other in zip(found.inputs, whole.inputs, strict=True):
        if isinstance(one, Number | Calendar):
            assert (one.mean, one.deviation) == pytest.approx((other.mean, other.deviation))
            one, other = (dict(vars(each), mean=0, deviation=0) for each in (one, other))
        assert one == other
    for client, own in whole.clients.items():
        assert found.clients[client]["x2"] == pytest.approx(own["x2"])


def test_medians_are_those_of_the_values_to_a_thousandth():
    draw = np.random.default_rng(0)
    for size in (1, 2, 7, 100):
        values = draw.normal(size=size) * 10.0 ** draw.integers(-3, 6)
        known = NumberStatistics.from_values(np.append(values, np.nan))
        assert known.median == pytest.approx(np.median(cut(values)), abs=1e-12)
        assert np.all(np.abs(cut(values) - values) <= np.abs(values) / 1000)
        assert (known.present, known.missing) == (size, 1)
    assert NumberStatistics.from_values(np.array([2012.0, 2011, 2013])).median == 2012
    assert NumberStatistics.from_values(np.array([np.nan])).median == 0


def test_merged_statistics_are_those_of_all_rows():
    values = np.random.default_rng(0).normal(3, 2, 50)
    whole = NumberStatistics.from_values(values)
    found = merge_statistics([NumberStatistics.from_values(part) for part in np.split(values, [1, 1, 30])])
    assert found.median == whole.median
    assert found.near == whole.near
    assert (found.present, found.mean, found.deviation) == pytest.approx((50, whole.mean, whole.deviation))
    words = merge_statistics([WordStatistics({"a": 2}, 1), WordStatistics({"b": 1, "a": 1}, 0)])
    assert words == WordStatistics({"a": 3, "b": 1}, 1)
    flags = [NumberStatistics.from_values(np.array(part, float)) for part in ([0, 1], [1, 1])]
    assert len(merge_statistics(flags).distinct) == 2
    assert len(column_statistics.some_distinct(np.array([0.0, 0.5, 1.0]))) == 3


def test_merging_clients_costs_as_much_as_their_counts():
    asked = []

    class Word(str):
        def __hash__(self):
            asked.append(self)
            return super().__hash__()

    parts = [WordStatistics({Word(f"{i}-{j}"): 1 for j in range(5)}, 0) for i in range(60)]
    asked.clear()
    assert len(merge_statistics(parts).counts) == 300
    assert len(asked) <= 3 * 300


def test_a_constant_of_many_rows_stays_constant():
    # Summed one by one, so many are off by more than the rounding that a constant may have.
    rows = 100_000
    x = torch.full((rows + 3, 1), 0.1, dtype=torch.float64)
    x[-3:, 0] = torch.tensor([1.0, math.nan, 3.0])
    owner = torch.tensor([0] * rows + [2] * 3)
    counts, means, deviations = encoder.moments_by_owner(x, owner, 3)
    assert counts.flatten().tolist() == [rows, 0, 2]
    assert means.flatten().tolist() == [0.1, 0, 2]
    assert deviations.flatten().tolist() == [0, 0, 1]


def test_categories_need_no_matrix_beside_the_inputs():
    rows, words = 20_000, [f"k{i}" for i in range(50)]
    known = Description("who", (Category("c", tuple(words), 50, 0, 0),))
    values = np.arange(rows) % 50.0
    tracemalloc.start()
    x = known.features({"c": Raw(values, words)}, ["A"], np.zeros(rows, np.int64), torch.float32)
    peak = tracemalloc.get_traced_memory()[1]  # of NumPy's arrays
    tracemalloc.stop()
    assert torch.equal(x, torch.eye(50).repeat(rows // 50, 1))
    assert peak < 40 * rows  # a matrix of truth values alone takes 50


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        (
            {"b": [None, 1.5, 2.5] * 20, "b is missing": [float(i) for i in range(60)]},
            "the frame: columns 'b' and 'b is missing' both make an input named 'b is missing'; rename one of them",
        ),
        (
            {"k": ["pear", "plum"] * 30, "k=pear": [float(i) for i in range(60)]},
            "the frame: columns 'k' and 'k=pear' both make an input named 'k=pear'; rename one of them, or leave it",
        ),
    ],
)
def test_two_columns_that_make_inputs_of_one_name_are_refused(columns, told):
    table = table_of([0.5] * 60).with_columns(**{name: polars.Series(cells) for name, cells in columns.items()})
    with pytest.raises(UsageError, match=re.escape(told)):
        kinfed.from_frame(table, **HOW)


@pytest.mark.parametrize(
    ("cells", "names"),
    [
        (["true", "False", "unknown"], ["c=False", "c=True", "c=unknown"]),
        (["TRUE", "false", ""], ["c", "c is missing"]),
    ],
)
def test_truth_values_are_numbers_only_alone(cells, names):
    assert kinfed.from_frame(table_of(cells * 20), **HOW).columns.names == ["x", *names]
    if "unknown" in cells:
        wanted = "row 1, column 'c': 'true' is not a number (and 59 more)"
        with pytest.raises(UsageError, match=re.escape(wanted)):
            frame_of(table_of(cells * 20))["c"].numbers()


def test_only_training_rows_are_described():
    table = mixed()
    federation = kinfed.from_frame(table, **HOW)
    tested = np.setdiff1d(np.arange(len(table)), trained_on(federation))
    others = table.to_dicts()
    for row in tested:
        others[row] |= {"x1": 1e6, "x2": None, "fruit": f"new {row}", "day": date(1990, 1, 1)}
    found = kinfed.from_frame(polars.DataFrame(others, schema=table.schema), **HOW)
    assert found.columns == federation.columns
    assert torch.equal(found.x[trained_on(federation)], federation.x[trained_on(federation)])


def test_inputs_are_scaled_filled_and_marked():
    federation = kinfed.from_frame(mixed(), **HOW, scale="auto")
    names, x = federation.columns.names, federation.x[trained_on(federation)].double()
    assert names[:4] == ["x1", "x1 is missing", "x2", "x2 is missing"]
    assert names[4:9] == ["fruit=pear", "fruit=plum", "fruit is other", "fruit is missing", "day year"]
    assert x.shape[1] == len(names) == 8 + 10
    holes = x[:, 1] == 1
    assert 0 < int(holes.sum()) < 40
    assert float(x[~holes, 0].mean()) == pytest.approx(0, abs=1e-6)
    assert float(x[~holes, 0].std(correction=0)) == pytest.approx(1, abs=1e-6)
    column = federation.columns.inputs[0]
    assert x[holes, 0].unique().tolist() == pytest.approx([(column.median - column.mean) / column.deviation])
    assert x[:, 4:8].sum(1).unique().tolist() == [1]  # one category each
    assert list(federation.scale["inputs"]) == names
    for rows in federation.rows["train"]:  # x2 by each client's own scale, also where it is missing
        own = federation.x[rows, 2][federation.x[rows, 3] == 0]
        assert float(own.mean()) == pytest.approx(0, abs=1e-5)
        assert federation.x[rows, 2][federation.x[rows, 3] == 1].abs().max() < 1


def test_new_rows_get_the_inputs_that_a_model_knows(tmp_path):
    table = mixed()
    federation = kinfed.from_frame(table, **HOW)
    known = Description.from_dict(json.loads(json.dumps(federation.columns.to_dict())))
    assert known == federation.columns
    x, y = known.apply(frame_of(table))
    assert x.dtype == torch.float32
    assert torch.equal(x, federation.x)
    torch.testing.assert_close(y, federation.y)
    mine, none = known.apply(frame_of(table.filter(polars.col("who") == "C2").drop("who", "y")), "C2")
    assert torch.equal(mine, federation.x[table["who"].to_numpy() == "C2"])
    assert none is None
    new = polars.DataFrame({"x1": [None, 20.0], "x2": [1.0, None], "fruit": ["kiwi", None], "day": [None, None]})
    x, _ = known.apply(frame_of(new.cast({"day": polars.Date})), "nobody")
    names = known.names
    assert x[0, names.index("fruit is other")] == 1
    assert x[1, names.index("fruit is missing")] == 1
    assert x[:, names.index("day year") :].abs().max() == 0
    with pytest.raises(UsageError, match="the frame has no column 'x1'"):
        known.apply(frame_of(new.drop("x1").cast({"day": polars.Date})))


def test_new_rows_get_classes_and_several_targets_as_a_model_is_trained_on():
    draw = np.random.default_rng(0)
    table = polars.DataFrame({"who": ["a", "b"] * 30, "x": draw.normal(size=60), "y": ["1.0", "2"] * 30})
    known = kinfed.from_frame(table, **HOW).columns
    assert known.targets[0].classes == ("1", "2")
    assert known.apply(frame_of(table))[1].tolist() == [0, 1] * 30
    with pytest.raises(UsageError, match=r"the frame, row 1, column 'y': '3' is none of the 2 classes that were"):
        known.apply(frame_of(table.with_columns(y=polars.lit("3"))))
    table = table.with_columns(y=draw.normal(5, 2, 60), z=draw.normal(5, 2, 60))
    federation = kinfed.from_frame(table, client="who", target=["y", "z"])
    torch.testing.assert_close(federation.columns.apply(frame_of(table))[1], federation.y)


def test_the_calendar_by_hand():
    column = Calendar("day", 2023.5, 0.5, clock=True, missing=1)
    leap = (date(2024, 2, 29) - date(1970, 1, 1)).days * 86_400.0 + 6 * 3600
    first, hole = column.features(np.array([leap, math.nan]))
    found = dict(zip(column.parts, first.tolist(), strict=True))
    assert found["day year"] == 1
    assert found["day Thursday"] == 1
    assert sum(found[f"day {name}"] for name in ("Monday", "Friday", "Sunday")) == 0
    assert found["day season (sine)"] == pytest.approx(math.sin(2 * math.pi * 59 / 365.25))
    assert (found["day hour (sine)"], found["day hour (cosine)"]) == pytest.approx((1, 0))
    assert hole.tolist() == [0.0] * 12 + [1.0]
    before = Calendar("day", 0, 1, clock=False, missing=0).features(np.array([-1.0]))  # the last second of 1969
    assert before[0, 0] == 1969
    assert before[0, 3 + 2] == 1  # a Wednesday


def test_rare_categories_are_one_and_new_ones_too():
    known = WordStatistics({"a": 9, "b": 7, "c": 7, "d": 4}, 0)
    column = Category.from_statistics("k", known, most=2)
    assert (column.categories, column.other, column.different) == (("a", "b"), 11, 4)
    words = ["c", "a", "new", "b"]
    assert column.ones(np.array([1.0, 3, 0, 2, math.nan]), words).tolist() == [0, 1, 2, 2, -1]
    frequent = Category.from_statistics(
        "k", WordStatistics({"a": 9, "b": 7}, 2), most=9
    )  # nothing is rare: a new one is none
    assert frequent.parts == ["k=a", "k=b", "k is missing"]
    assert frequent.ones(np.array([2.0, math.nan]), words).tolist() == [-1, 2]


def test_a_category_that_no_training_row_had_is_warned_of():
    table = table_of([("pear", "plum")[i // 2 % 2] for i in range(60)])
    known = kinfed.from_frame(table, **HOW).columns
    told = r"the frame, row 3, column 'c': 'kiwi' is in no training row, as in 1 of 3 rows; the model treats it"
    with pytest.warns(UserWarning, match=told):
        x, _ = known.apply(frame_of(polars.DataFrame({"x": [1, 1, 1], "c": ["pear", None, "kiwi"]})))
    assert x[:, 1:].tolist() == [[1, 0], [0, 0], [0, 0]]


def table_of(column, rows=60):
    return polars.DataFrame(
        {"who": [f"{'AB'[i % 2]}" for i in range(rows)], "x": [i % 7 for i in range(rows)], "c": column}
        | {"y": [i % 5 + 0.5 for i in range(rows)]}
    )


def test_ten_thousand_categories_become_a_few():
    draw = np.random.default_rng(0)
    rows = 20_000
    names = [f"k{min(i, 9_999)}" for i in (draw.exponential(1, rows) ** 6 * 3).astype(int)]
    names[:10_000] = [f"k{i}" for i in range(10_000)]
    federation = kinfed.from_frame(table_of(names, rows), **HOW)
    column = federation.columns.inputs[1]
    assert len(column.categories) == 50
    assert column.different > 5_000
    assert re.match(r"50 of [\d,]+ categories \(k0, k1, .*\.\.\.\); [\d,]+ others as one$", str(column))
    assert federation.x.shape[1] == 1 + 51


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ([None] * 60, "the frame: 'c' has no value in any row; left out of the inputs"),
        (["", " "] * 30, "the frame: 'c' has no value in any row; left out of the inputs"),
        ([f"r{i}" for i in range(60)], "the frame: 'c' is different in every row, as identifiers are; left out of"),
    ],
)
def test_columns_that_say_nothing_are_left_out_with_a_word(column, told):
    with pytest.warns(UserWarning, match=re.escape(told)):
        federation = kinfed.from_frame(table_of(column), **HOW)
    assert federation.columns.names == ["x"]
    with pytest.raises(UsageError, match="no column is left"), pytest.warns(UserWarning, match="left out"):
        kinfed.from_frame(table_of(column).drop("x"), **HOW)


def test_a_column_without_a_value_in_training_rows_is_no_input():
    table = table_of([1.5] * 60)
    federation = kinfed.from_frame(table, **HOW, split=Split(0.2, 0.1))
    holes = np.ones(60, bool)
    holes[trained_on(federation)] = False
    table = table.with_columns(c=polars.Series(np.where(holes, 1.5, np.nan)))
    found = kinfed.from_frame(table, **HOW, split=Split(0.2, 0.1)).columns
    assert found.inputs[1] == Unused("c", "no training row has a value")
    assert found.apply(frame_of(table.drop("c")))[0].shape == (60, 1)


def test_words_for_a_missing_number_are_holes_and_others_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    cells = ["NA", "n/a", "null", "?", ".", "", " ", "nan", *(str(i) for i in range(33))]
    path.write_text("who,x,y\n" + "".join(f"{'AB'[i % 2]},{cell},{i % 5}.5\n" for i, cell in enumerate(cells)))
    federation = kinfed.from_csv(path, **HOW)
    assert int(federation.x[:, 1].sum()) == 8
    path.write_text(path.read_text().replace("n/a", "none"))
    with pytest.raises(UsageError, match=r"line 3, column 'x': 'none' is not a number; correct it"):
        kinfed.from_csv(path, **HOW)


@pytest.mark.parametrize("form", ["", " 10:00:00", "T10:00", "T10:00:00", "T10:00:00Z", "T10:00:00.5+02:00"])
def test_every_form_of_an_iso_date_is_a_date(tmp_path, form):
    rows = "".join(f"a,2024-01-{day:02d}{form},{day}\n" for day in range(1, 20))
    (tmp_path / "t.csv").write_text("who,when,y\n" + rows)
    assert open_table(tmp_path / "t.csv").kind("when") == "dates"


def test_a_table_without_numbers_is_read_without_a_warning(recwarn):
    torch.set_warn_always(True)  # PyTorch would warn once in all tests
    try:
        assert list(map(len, moments(torch.zeros(3, 0)))) == [0, 0]
    finally:
        torch.set_warn_always(False)
    assert not recwarn.list


def test_numbers_with_words_in_earnest_are_categories_and_a_few_words_are_an_error():
    cells = ["0", "1", "2", "3+"]
    with pytest.warns(UserWarning, match=r"column 'c' has few different cells, some of them words such as '3\+'"):
        found = kinfed.from_frame(table_of(cells * 15), **HOW)
    assert found.columns.names == ["x", "c=0", "c=1", "c=2", "c=3+"]
    few = ["0", "1", "2", "5"] * 15
    few[7] = "3+"
    with pytest.raises(UsageError, match=r"row 8, column 'c': '3\+' is not a number"):
        kinfed.from_frame(table_of(few), **HOW)
    measured = [f"{i}.5" for i in range(50)] + ["none of it"] * 10
    with pytest.raises(UsageError, match=r"row 51, column 'c': 'none of it' is not a number \(and 9 more\)"):
        kinfed.from_frame(table_of(measured), **HOW)


@pytest.mark.parametrize(
    ("cells", "labels"),
    [(["0", "1", "2"], True), (["1", "2", "3", "4", "5"], True), (["0", "2", "4", "6", "8", "10"], False)],
)
def test_whole_numbers_with_gaps_are_numbers_to_predict_and_codes_without_are_labels(cells, labels):
    found = kinfed.from_frame(table_of(cells * (60 // len(cells))), client="who", target="c")
    assert isinstance(found.task, kinfed.Classification) == labels
