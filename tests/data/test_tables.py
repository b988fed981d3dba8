"""Your own tables: what becomes of rows, and what is refused with its line and column."""

import json
import math
import re
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
import polars
import pytest
import torch
from torch import nn

import kinfed
from kinfed import SGD, Split, Training, UsageError, fit, from_csv
from kinfed.cli import main
from kinfed.core.tasks import Classification, Forecasting, Regression
from kinfed.data.federation import divide
from kinfed.data.partitions import IID, Dirichlet, LabelPermutations
from kinfed.data.steps import calendar, usual_calendar
from kinfed.data.tables.table_reader import TableReader
from kinfed.data.tables.times import seconds_of
from kinfed.data.windows import cut
from kinfed.methods import SFL, FedAvg, Local

HOUSES = "town,rooms,age,price\n" + "".join(
    f"{town},{r},{a},{1000 * r - 10 * a + shift}\n"
    for town, shift in (("Ulm", 0), ("Bonn", 500))
    for r in range(1, 7)
    for a in (1.5, 20, 40)
)


def read(path, **settings):
    return TableReader(**settings).read(path)


def write(folder, text, name="t.csv"):
    path = folder / name
    path.write_text(text)
    return path


def test_rows_become_examples_of_their_client_scaled_on_training_rows(tmp_path):
    federation = from_csv(write(tmp_path, HOUSES), client="town", target="price", split=Split(0.2, 0.1))
    assert federation.names == ("Bonn", "Ulm")
    assert federation.x.shape == (36, 2)
    assert isinstance(federation.task, Regression)
    train = torch.cat(list(federation.rows["train"]))
    torch.testing.assert_close(federation.x[train].mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(federation.x[train].std(0, correction=0), torch.ones(2))
    assert federation.task.mean[0] == pytest.approx(float(federation.y[train].mean()))
    # The first row is Ulm's and keeps its price in its own unit.
    assert federation.y[0].tolist() == [1000 - 15]
    assert 0 in torch.cat([federation.rows[s][1] for s in federation.rows]).tolist()


def test_a_saved_model_reads_new_rows_by_the_scale_in_the_summary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, HOUSES)
    table = 'name="csv"\npath="t.csv"\nclient="town"\ntarget="price"\n'
    config = f'method="local"\nmodel="linear"\n[federation]\npartition="natural"\n[federation.dataset]\n{table}'
    (tmp_path / "mine.toml").write_text(config)
    how = ["rounds=25", "training.batch=4", "training.optimiser.lr=0.1"]
    assert main(["run", "mine.toml", *how, "--out", "r", "--quiet"]) == 0
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert list(summary["data"]["scale"]["inputs"]) == ["rooms", "age"]
    rows = [line.split(",") for line in HOUSES.splitlines()[1:] if line.startswith("Ulm")]
    scale = summary["data"]["scale"]["inputs"].values()
    scaled = [[(float(row[i + 1]) - s["mean"]) / s["deviation"] for i, s in enumerate(scale)] for row in rows]
    told = summary["data"]["scale"]["targets"]["price"]
    prices = kinfed.load_model("r", "Ulm")(torch.tensor(scaled)) * told["deviation"] + told["mean"]
    assert (prices[:, 0] - torch.tensor([float(row[3]) for row in rows])).abs().mean() < 60  # they differ by 1700


def test_a_table_trains_from_python_and_scores_in_its_own_unit(tmp_path):
    federation = from_csv(write(tmp_path, HOUSES), client="town", target="price")
    run = fit(Local(), federation, nn.Linear(2, 1), rounds=25, training=Training(2, 4, SGD(0.1)))
    assert run.summary.metric.name == "mae"
    assert run.summary.scores["own"]["mean"] < 30  # prices differ by 1700


@pytest.mark.parametrize(
    ("column", "kind", "classes"),
    [
        (["yes", "no", "yes", "no"], Classification, ("no", "yes")),
        (["10", "9", "10", "2"], Classification, ("2", "9", "10")),
        (["1.0", "2.5", "3", "4"], Regression, ()),
        (["0", "1", "1.0", "0.0"], Classification, ("0", "1")),  # one site's export has decimals
        (["0", "1", "1.0", "none"], Classification, ("0", "1", "none")),
    ],
)
def test_the_kind_of_target_decides_the_task(tmp_path, column, kind, classes):
    rows = "".join(f"a,{i},{value}\n" for i, value in enumerate(column))
    data = read(write(tmp_path, "who,x,y\n" + rows), client="who", target="y")
    assert isinstance(data.task, kind)
    assert data.classes == classes
    if classes:
        said = [f"{float(value):g}" if value not in classes else value for value in column]
        assert [classes[i] for i in data.y] == said


def test_many_whole_numbers_are_numbers_and_several_targets_are_scaled_each(tmp_path):
    rows = "".join(f"a,{i % 5},{i},{100 * i}\n" for i in range(30))
    path = write(tmp_path, "who,x,y,z\n" + rows)
    assert isinstance(read(path, client="who", target="y").task, Regression)
    data = read(path, client="who", target=["y", "z"])
    assert isinstance(data.task, Regression)
    scaled = data.prepare(data, torch.arange(20))
    assert scaled.y[:, 1].tolist() == [100.0 * i for i in range(30)]
    y = scaled.task.standardise(scaled.y)
    torch.testing.assert_close(y[:, 0], y[:, 1])
    assert y[:20].mean(0).abs().max() < 1e-6
    assert data.x.shape == (30, 1)


def test_rows_with_a_time_are_split_in_its_order(tmp_path):
    rows = "".join(f"{who},2024-01-{day:02d},{day},{day % 2}\n" for day in range(10, 0, -1) for who in "ab")
    path = write(tmp_path, "who,day,x,y\n" + rows)
    federation = from_csv(path, client="who", target="y", time="day", features=["x"], split=Split(0.2, 0.2))
    days = read(path, client="who", target="y", time="day", features=["x"]).x[:, 0]
    for split, told in (("train", range(1, 7)), ("validation", (7, 8)), ("test", (9, 10))):
        for rows in federation.rows[split]:
            assert sorted(days[rows].tolist()) == list(told)


def test_rows_of_one_client_may_have_one_time(tmp_path):
    """Only a series has one reading at a time; a shop sells many things a day."""
    rows = "".join(f"{who},{day},{day + 0.5 * i},{i}\n" for day in range(10) for who in "ab" for i in range(2))
    path = write(tmp_path, "who,day,x,y\n" + rows)
    federation = from_csv(path, client="who", target="y", time="day", features=["x"], split=Split(0.2, 0.2))
    days = read(path, client="who", target="y", time="day", features=["x"]).x[:, 0].floor()
    assert sorted(days[federation.rows["test"][0]].tolist()) == [8, 8, 9, 9]


def test_clients_are_in_the_order_that_people_count_in(tmp_path):
    names = ["10", "9", "shop 10", "shop 2", "Shop", "shop 2b", "a1x10", "a1x9"]
    rows = "".join(f"{name},{i},{i % 2}\n" for name in names for i in range(4))
    found = read(write(tmp_path, "who,x,y\n" + rows), client="who", target="y").owners
    assert found == ("9", "10", "Shop", "a1x9", "a1x10", "shop 2", "shop 2b", "shop 10")


def readings(gap=(), lost=(), shuffle=False):
    rows = [
        (who, f"2024-03-01 {t // 6:02d}:{10 * (t % 6):02d}", "" if (who, t) in lost else 100 * i + t)
        for i, who in enumerate(("north", "south"))
        for t in range(40)
        if t not in gap
    ]
    if shuffle:
        rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    return "sensor,when,level\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows)


@pytest.mark.parametrize("shuffle", [False, True])
def test_readings_become_windows_with_gaps_missing_values_and_time_of_day(tmp_path, shuffle):
    path = write(tmp_path, readings(gap=(20, 21), lost=[("south", 5)], shuffle=shuffle))
    data = read(path, client="sensor", target="level", time="when", past=np.int64(3), horizon=2)
    assert data.owners == ("north", "south")
    assert data.x.shape[1:] == (3, 2)
    # 38 steps in two stretches of 20 and 18: 16 and 14 windows of five.
    assert [int((data.client == i).sum()) for i in range(2)] == [30, 30]
    first = (data.client == 1).nonzero().flatten()[0]
    assert data.y[first].tolist() == [103, 104]
    assert data.y[first + 1][1].isnan()
    torch.testing.assert_close(data.x[first, :, 1] * 144, torch.tensor([0.0, 1, 2]))
    assert data.time[(data.client == 0)].tolist() == [*range(3, 19), *range(25, 39)]  # of the first target


def test_scores_are_told_at_the_steps_ahead_that_are_asked_for(tmp_path):
    path, how = (
        write(tmp_path, readings()),
        {"client": "sensor", "target": "level", "time": "when", "past": 3, "horizon": 2},
    )
    task = read(path, **how, horizons=[2]).task
    scores = task.score(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]), torch.ones(1))
    assert (float(scores["mae"]), float(scores["mae@2"])) == (2.0, 3.0)
    assert "mae@1" not in scores
    for late in (0, 3):
        with pytest.raises(UsageError, match=f"steps ahead, from 1 to horizon, which is 2; got {late}"):
            read(path, **how, horizons=[1, late])


def test_months_count_as_a_step_each_and_tell_their_place_in_the_year(tmp_path):
    rows = "".join(f"a,{2000 + m // 12}-{m % 12 + 1:02d},{m % 7}.5\n" for m in range(40))
    series = {"client": "s", "target": "v", "time": "m", "horizon": 1}
    data = read(write(tmp_path, "s,m,v\n" + rows), past=2, **series)
    assert data.x.shape[1:] == (2, 1 + 12)
    assert int((data.client == 0).sum()) == 38
    assert data.x[3, 0, 1:].tolist() == [0.0] * 3 + [1.0] + [0.0] * 8  # April comes after three months
    data = read(write(tmp_path, "s,m,v\n" + rows), past=12, **series)
    assert data.x[3, :, 1].tolist() == [0.0] * 9 + [1.0] + [0.0] * 2  # of April to March, January is the tenth


@pytest.mark.parametrize(
    ("minutes", "past", "features"),
    [
        (60, 24, ("clock",)),
        (24 * 60, 7, ("week",)),
        (24 * 60, 6, ("weekday",)),
        (7 * 24 * 60, 60, ()),
        (30.44 * 24 * 60, 12, ("year",)),
        (30.44 * 24 * 60, 11, ("month",)),
        (365 * 24 * 60, 3, ()),
    ],
)
def test_the_calendar_suits_the_steps(minutes, past, features):
    assert usual_calendar(60 * minutes, past) == features


def test_a_week_tells_a_linear_layer_what_the_weekday_does():
    monday = np.datetime64("2024-01-01").astype("datetime64[s]").astype(np.float64)
    days = monday + 86400 * np.arange(60.0)
    both = [cut(torch.from_numpy(calendar(days, [name]))[None], 7, 54).flatten(1) for name in ("week", "weekday")]
    ones = torch.ones(54, 1, dtype=torch.float64)
    ranks = [int(torch.linalg.matrix_rank(torch.cat([ones, *parts], 1))) for parts in (both[:1], both[1:], both)]
    assert ranks == [7, 7, 7]


def test_a_damaged_parquet_file_that_its_reader_panics_at(tmp_path, monkeypatch):
    def panic(path):
        raise polars.exceptions.PanicException("assertion failed")  # no Exception

    monkeypatch.setattr(polars, "read_parquet", panic)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"t\.parquet is a damaged Parquet file \(assertion failed\)"):
        read(tmp_path / "t.parquet", client="who", target="y")


def test_parquet_is_read_with_its_types(tmp_path):
    frame = polars.DataFrame(
        {
            "who": [7, 7, 8, 8],
            "x": [1.0, None, 3.0, 4.0],
            "flag": [True, False, True, True],
            "y": ["a", "b", "a", "b"],
        }
    )
    frame.write_parquet(tmp_path / "t.parquet")
    data = read(tmp_path / "t.parquet", client="who", target="y")
    assert data.x[:, 0].isnan().tolist() == [False, True, False, False]
    with pytest.warns(UserWarning, match="1 of 4 rows lack a value and were left out"):
        data = read(tmp_path / "t.parquet", client="who", target="y", drop_missing=True)
    assert data.client.tolist() == [0, 1, 1]
    assert data.owners == ("7", "8")
    assert data.x.tolist() == [[1, 1], [3, 1], [4, 1]]
    polars.DataFrame({"who": [1, 2], "x": [1.0, -np.inf], "y": [0.5, 1.5]}).write_parquet(tmp_path / "i.parquet")
    with pytest.raises(UsageError, match="row 2, column 'x': '-inf' is not a finite number"):
        read(tmp_path / "i.parquet", client="who", target="y")
    odd = frame.drop("x").with_columns(lists=polars.Series([[1]] * 4), took=polars.duration(minutes=1))
    odd.write_parquet(tmp_path / "o.parquet")
    assert read(tmp_path / "o.parquet", client="who", target="y", features=["flag"]).x.shape == (4, 1)
    told = r"o\.parquet: 'lists' holds lists; 'took' holds lengths of time; left out of the inputs"
    with pytest.warns(UserWarning, match=told):
        assert read(tmp_path / "o.parquet", client="who", target="y").x.shape == (4, 1)
    with pytest.raises(UsageError, match="column 'took' holds lengths of time, not numbers, text or dates; convert it"):
        read(tmp_path / "o.parquet", client="who", target="y", features=["took"])
    times = polars.DataFrame({"who": ["a"] * 9, "t": [datetime(2024, 1, 1, h) for h in range(9)], "v": range(9)})
    times.write_parquet(tmp_path / "s.parquet")
    data = read(tmp_path / "s.parquet", client="who", target="v", time="t", past=2)
    torch.testing.assert_close(data.x[0, :, 1] * 24, torch.tensor([0.0, 1]))
    assert from_csv(
        tmp_path / "t.parquet", client="who", target="y", features=["flag"], split=Split(0.4, 0.0), drop_missing=True
    ).names == ("7", "8")


def test_rows_that_were_left_out_are_dealt_to_nobody_and_a_partitions_changes_stay(tmp_path):
    rows = "".join(f"{'abc'[i % 3]},{i},{'' if i % 5 == 0 else i % 4}\n" for i in range(200)) + "d,1000,1\n"
    path, edges = write(tmp_path, "who,x,y\n" + rows), write(tmp_path, "from,to\na,b\nb,c\n", "edges.csv")
    with pytest.warns(UserWarning, match="left out"):
        data = read(path, client="who", target="y", edges=edges, drop_missing=True, least=2)
    assert sorted(data.x[:, 0].tolist()) == [i for i in range(200) if i % 5]
    draw = torch.Generator().manual_seed(0)
    for partition in (IID(), Dirichlet(alpha=1.0), LabelPermutations(groups=2)):
        parts = partition(data, 3, draw)
        federation = divide(parts.dataset, parts.owned, Split(0.2, 0.0), 0, parts.groups)
        assert sum(len(rows) for split in federation.rows.values() for rows in split) == 160
        assert federation.graph is None  # that of owners who are no clients any more
        assert torch.equal(federation.y, parts.dataset.y)
        train = torch.cat(list(federation.rows["train"]))
        assert federation.x[train].mean().abs() < 1e-5
    assert not torch.equal(federation.y, data.y)  # the labels are renamed


def test_edges_relate_the_clients_and_leave_with_them(tmp_path):
    rows = "".join(f"{who},{i},{i % 2}\n" for who, n in (("a", 5), ("b", 1), ("c", 5)) for i in range(n))
    path = write(tmp_path, "who,x,y\n" + rows)
    edges = write(tmp_path, "from,to\na,b\na,c\n", "edges.csv")
    data = read(path, client="who", target="y", edges=edges)
    assert data.graph.weights.tolist() == [[0, 1, 1], [1, 0, 0], [1, 0, 0]]
    with pytest.warns(UserWarning, match=r"1 of 3 clients has fewer than 3 rows and was left out: b \(1\)"):
        data = read(path, client="who", target="y", edges=edges, least=3)
    assert data.owners == ("a", "c")
    assert data.graph.weights.tolist() == [[0, 1], [1, 0]]
    assert data.client.tolist() == [0] * 5 + [1] * 5
    with pytest.raises(UsageError, match=r"edges\.csv: line 2: there is no client 'z'"):
        read(path, client="who", target="y", edges=write(tmp_path, "from,to\na,z\n", "edges.csv"))


@pytest.mark.parametrize(
    ("text", "how", "said"),
    [
        ("who,x,y\na,1,2\nb,1\n", {}, r"t\.csv, line 3: 2 entries, but the header has 3"),
        ('who,x,y\na,1,"2\n', {}, r"t\.csv, line 2: a quotation mark is never closed"),
        ("who,x,y\na,1,2.5\n\nb,old,2.5\n", {}, r"t\.csv, line 4, column 'x': 'old' is not a number"),
        ("who,x,y\na,inf,2.5\nb,-inf,1\n", {}, r"line 2, column 'x': 'inf' is not a finite number \(and 1 more\)"),
        ("who,x,y\na,,2.5\nb,,2\nb,,2\n", {}, r"t\.csv: no column is left for the inputs"),
        ("who,x,y\na,1,\nb,2,\n", {"labels": False}, r"t\.csv: all 2 rows have no y"),
        ("who,x,y\na,1,2.5\nb,2,\n", {}, r"1 of 2 clients has fewer than 1 rows: b \(0\); leave such"),
        ("who,x,y\n,1,2\n ,1,2\n", {}, r"t\.csv: 2 of 2 rows have no who"),
        ("who,x,y\n", {}, "has no rows"),
        ("", {}, "has no rows"),
        ("who,x,x\na,1,2\n", {}, "two columns are named 'x'"),
        ("who,x,yy\na,1,2\n", {}, "has no column 'y'; did you mean 'yy'"),
        ("who,y\na,1\n", {}, "no column is left for the inputs"),
        ("who,x,y\na,1,2\n", {"features": ["y"]}, "column 'y' is named twice"),
        (
            "who,x,y\na,1,2\nb,1,\n",
            {"drop_missing": True},
            r"1 of 2 clients has fewer than 1 rows: b \(0\); leave such",
        ),
        ("who,x,y\na,1,2\n", {"least": 9}, r"1 of 1 client has fewer than 9 rows: a \(1\)"),
        (
            "who,t,y\na,1,2\na,1,3\n",
            {"time": "t", "past": 1},
            r"line 3, column 't': client 'a' has another row at the time 1, in line 2",
        ),
        (
            "who,x,y\na,1,2\na,2,3\nb,pear,2\n",
            {},
            r"line 4, column 'x': 'pear' is not a number; correct it, leave it empty if it is missing, or leave "
            "the column out with ignore",
        ),
        (
            "who,day,x,y\na,2024-02-28,1,2\na,2024-02-29,1,3\nb,2023-02-29,1,3\n",
            {},
            r"line 4, column 'day': '2023-02-29' is not a date such as 2012-03-01 00:05; correct it, "
            "leave it empty if it is missing, or leave the column out with ignore, or say text=",
        ),
        (
            "who,t,x,y\na,1,1,2\na,soon,1,3\n",
            {"time": "t"},
            "line 3, column 't': 'soon' is not a number, as most times are",
        ),
        ("who,t,x,y\na,soon,1,2\na,late,1,3\n", {"time": "t"}, "line 2, column 't': 'soon' is not a number or a date"),
        (
            "who,t,x,y\na,2024-01-01,1,2\na,2024-01-02,1,3\na,17,1,3\n",
            {"time": "t"},
            "line 4, column 't': '17' is not a date such as 2012-03-01 00:05; correct it",
        ),
        ("who;x;y\na;1;2.5\nb;1\n", {}, r"t\.csv, line 3: 2 entries, but the header has 3"),
        ("who,x,y\na,1,2.5\nb,1e39,3\n", {}, "line 3, column 'x': '1e39' is too large a number"),
        ("who,x,y\na,1,cat\nb,2,cat\nb,2,\n", {}, "'y' is 'cat' in all rows, so there is nothing to learn"),
        (
            readings(lost=[("south", t) for t in range(40)]),
            "series",
            r"fewer than 1 known values of 'level': south \(0\)",
        ),
        (readings(gap=range(4, 40)), "series", "a window covers 3 \\+ 2 steps, but the series have 4"),
        (readings() + "south,2024-03-01 00:01,1\n", "series", r"remove these from the data \(a step is 60 seconds"),
        (
            "who,x,y\n" + "".join(f"a,{i},{i}.5\n" for i in range(9)) + "a,9,1.2.3\n",
            {},
            r"line 11, column 'y': '1\.2\.3' is not a number, as most of this column are; leave it empty",
        ),
        ("who,x,y\na,1,0\na,1,NA\na,2,1\n", {}, "line 3, column 'y': 'NA' is not a number, as most"),
        ("who,x,y\na,1,2\na,1_5,3\n", {}, "line 3, column 'x': '1_5' is not a number"),
        ("who,t,x,y\na,now,1,2\na,today,1,3\n", {"time": "t"}, "line 2, column 't': 'now' is not a number or a date"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_what_cannot_be_used_is_refused_with_its_place(tmp_path, text, how, said):
    path = write(tmp_path, text)
    columns = {"client": "who"} | ({} if "target" in how else {"target": "y"})
    if how == "series":
        columns, how = {"client": "sensor", "target": "level"}, {"time": "when", "past": 3, "horizon": 2}
    with pytest.raises(UsageError, match=said) as found:
        read(path, **columns | how)
    assert "\n" not in str(found.value)
    assert "t.csv" in str(found.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"past": 2}, "need a time column and one target"),
        ({"horizon": 3}, "horizon is for windows of series; set past too"),
        ({"least": -1}, "TableReader.least must be zero or more; got -1 (rows, or known readings"),
        ({"target": []}, "a table needs a target"),
        ({"time": "t", "past": 4.5}, "past must be a whole number; got 4.5"),
        ({"time": "t", "past": 4, "horizons": ["1"]}, "horizons[0] must be a whole number"),
        ({"time": "t", "past": 4, "horizons": 1}, "horizons must be a list; got 1 (steps ahead"),
        ({"time": "t", "past": 4, "horizons": [2]}, "from 1 to horizon, which is 1; got 2"),
        ({"drop_missing": "no"}, "drop_missing must be true or false; got 'no'"),
        ({"target": 3}, "target must be text or a list; got 3"),
        ({"features": ["x", 1.5]}, "features[1] must be text; got 1.5"),
        ({"features": "x"}, "features must be a list; got 'x'"),
        ({"client": None}, "client must be text or a list; got None"),
        ({"edges": 3}, "edges must be text or a path or GraphFile(...); got 3"),
    ],
)
def test_settings_of_a_table_are_checked_before_it_is_read(how, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        TableReader(**{"client": "who", "target": "y"} | how)


@pytest.mark.parametrize("zones", [("Z", "+02:00"), ("-00:30", "+0130"), ("+02", " -08"), (" Z", " +0130")])
def test_times_with_a_zone_are_brought_to_one_clock(tmp_path, zones):
    hours = {"Z": 0, "+02:00": 2, "-00:30": -0.5, "+0130": 1.5, "+02": 2, "-08": -8}
    text = "who,t,y\n"
    for who, zone in zip("ab", zones, strict=True):
        for i in range(8):
            minutes = round(60 * (8 + i + hours[zone.strip()]))
            text += f"{who},2024-01-01T{minutes // 60:02d}:{minutes % 60:02d}:00{zone},{i * 1.5}\n"
    data = read(write(tmp_path, text), client="who", target="y", time="t", past=2)
    assert data.time[data.client == 0].tolist() == data.time[data.client == 1].tolist() == list(range(2, 8))
    torch.testing.assert_close(data.x[0, :, 1] * 24, torch.tensor([8.0, 9.0]))


@pytest.mark.parametrize("way", ["%Y%m%d", "%Y%m%d%H%M", "%Y%m%d%H%M%S"])
def test_dates_without_marks_between_their_parts_are_dates(tmp_path, way):
    days = [datetime(2023, 12, 28) + timedelta(i) for i in range(70)]
    rows = "".join(f"a,{day.strftime(way)},{i % 7}.5\n" for i, day in enumerate(days))
    data = read(write(tmp_path, "who,t,y\n" + rows), client="who", target="y", time="t", past=5, horizon=2)
    assert (data.client >= 0).sum() == 70 - 7 + 1  # no gap at the end of a month


@pytest.mark.parametrize(
    ("cell", "day"),
    [
        ("1998 Q1", "1998-01-01"),
        ("1998q4", "1998-10-01"),
        ("2020-W01", "2019-12-30"),
        ("2020W53", "2020-12-28"),
        ("1998 Jan", "1998-01-01"),
        ("2020-DEC", "2020-12-01"),
    ],
)
def test_quarters_weeks_and_months_are_their_first_day(cell, day):
    assert seconds_of(cell) == datetime.fromisoformat(f"{day}T00:00+00:00").timestamp()
    assert seconds_of("1998 Q5") == seconds_of("2021-W53") == math.inf


def test_quarters_are_steps_of_a_series(tmp_path):
    rows = "".join(f"a,{2000 + i // 4} Q{1 + i % 4},{i % 7}.5\n" for i in range(40))
    data = read(write(tmp_path, "who,t,y\n" + rows), client="who", target="y", time="t", past=4)
    assert (data.client >= 0).sum() == 40 - 5 + 1


def test_whole_numbers_that_only_look_like_dates_are_numbers(tmp_path):
    rows = "".join(f"a,{20000101 + i},{i % 7}.5\n" for i in range(70))
    data = read(write(tmp_path, "who,t,y\n" + rows), client="who", target="y", time="t", past=5, horizon=2)
    assert data.time[:64].tolist() == list(range(5, 69))


def test_numbers_far_from_zero_stay_apart(tmp_path):
    rows = "".join(f"{'ab'[i % 2]},{1.7e12 + 60 * i},{i % 7}.5,{5e8 + i},{i}.5\n" for i in range(60))
    path = write(tmp_path, "who,stamp,x,far,near\n" + rows)
    found = from_csv(path, client="who", target="near")
    assert found.x.dtype == found.y.dtype == torch.float32
    assert [len(column.unique()) for column in found.x.T] == [60, 7, 60]
    for target in ("far", ["near", "far"]):
        with pytest.raises(
            UsageError, match=r"'far' with a mean of 5e\+08 and .* float32 cannot distinguish them; subtract a constant"
        ):
            from_csv(path, client="who", target=target)
    with pytest.raises(UsageError, match="cannot distinguish them"):
        from_csv(path, client="who", target="far", time="stamp", past=3)


@pytest.mark.parametrize("drop", [False, True])
def test_rows_without_a_client_are_left_out(tmp_path, drop):
    """Such as the totals below a table."""
    path = write(tmp_path, HOUSES + ",1,2,3\n,,,\n  ,\t,,\n")
    with pytest.warns(
        UserWarning, match=r"t\.csv: 1 of 37 rows has no town, left out \(the first: .*t\.csv, line 38\)"
    ):
        data = read(path, client="town", target="price", drop_missing=drop)
    assert len(data.x) == 36


def test_truth_values_are_numbers(tmp_path):
    data = read(write(tmp_path, "who,x,y\na,True,1\na,false,2\nb,TRUE,1\n"), client="who", target="y")
    assert data.x.flatten().tolist() == [1, 0, 1]


def test_inexact_clocks_are_told_of(tmp_path):
    text = "".join(
        f"{who},{60 * i + (7 * i) % 5 + late},{i % 3}.5\n" for who, late in (("a", 0), ("b", 20)) for i in range(9)
    )
    with pytest.warns(
        UserWarning, match=r"each of 18 different times is a step, and a client has rows at 50 % of these"
    ):
        read(write(tmp_path, "who,t,y\n" + text), client="who", target="y", time="t", past=2)


def test_files_that_are_not_tables(tmp_path):
    with pytest.raises(UsageError, match=r"is a folder, not a table, and holds no \.csv or \.parquet"):
        read(tmp_path, client="a", target="b")
    with pytest.raises(UsageError, match="there is no file"):
        read(tmp_path / "no.csv", client="a", target="b")
    with pytest.raises(UsageError, match=r"t\.xlsx: tables are read from \.csv, \.tsv and \.parquet; save it"):
        read(write(tmp_path, "", "t.xlsx"), client="a", target="b")
    with pytest.raises(UsageError, match=r"t\.parquet cannot be read: "):
        read(write(tmp_path, "no", "t.parquet"), client="a", target="b")


def test_numbers_to_predict_may_be_missing_in_words(tmp_path):
    text = "who,x,y\n" + "".join(
        f"{'ab'[i % 2]},{i},{'-' if i == 3 else '#N/A' if i == 5 else i + 0.5}\n" for i in range(30)
    )
    with pytest.warns(UserWarning, match=r"2 of 30 rows have no y and were left out \(the first: .*line 5\)"):
        data = read(write(tmp_path, text), client="who", target="y")
    assert 3.5 not in data.y.tolist()
    assert len(data.y) == 28


def test_a_second_reading_of_the_hour_in_which_clocks_go_back(tmp_path):
    text = "".join(f"a,2024-10-27 {hour:02}:00,{hour}\n" for hour in (0, 1, 2, 2, 3, 4))
    with pytest.raises(
        UsageError, match=r"line 5, .* in line 4; where clocks went back, write times with a zone, such"
    ):
        read(write(tmp_path, "who,t,y\n" + text), client="who", target="y", time="t", past=2)


def test_a_client_left_without_a_part_is_named(tmp_path):
    path = write(tmp_path, HOUSES + "Trier,3,4,3000\n")
    with pytest.raises(UsageError, match=r"1 of 3 clients has too few examples for .*: Trier \(1\)"):
        from_csv(path, client="town", target="price", least=0)
    told = r"1 of 3 clients has fewer than 3 rows and was left out: Trier \(1\)"
    makers = (from_csv, path), (kinfed.from_frame, polars.read_csv(path))  # as the command does
    for make, source in makers:
        with pytest.warns(UserWarning, match=told):
            assert make(source, client="town", target="price").names == ("Bonn", "Ulm")


def test_a_target_that_never_differs_in_training_has_no_scale(tmp_path):
    rows = "".join(f"a,{i},{0.5 if i < 20 else i}\n" for i in range(30))
    data = read(write(tmp_path, "who,x,y\n" + rows), client="who", target="y")
    with pytest.raises(UsageError, match="the same in all training rows, so there is nothing to learn"):
        data.prepare(data, torch.arange(10))


def test_a_table_runs_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, readings(), "levels.csv")
    write(tmp_path, "from,to\nnorth,south\n", "rivers.csv")
    write(
        tmp_path,
        """
        rounds = 2
        model = { name = "rnn", hidden = 4 }
        method = "sfl"
        [federation]
        partition = "natural"
        split = { validation = 0.2 }
        [federation.dataset]
        name = "csv"
        path = "levels.csv"
        client = "sensor"
        target = "level"
        time = "when"
        past = 3
        horizon = 2
        edges = "rivers.csv"
        """,
        "mine.toml",
    )
    assert main(["run", "mine.toml", "--out", "out"]) == 0
    assert "sfl on levels: 2 clients" in capsys.readouterr().err
    assert main(["list", "mine.toml"]) == 0
    assert "1 link between different clients" in " ".join(capsys.readouterr().out.split())
    assert main(["run", "mine.toml", "federation.dataset.target=levl", "--out", "other"]) == 2
    assert "levels.csv has no column 'levl'; did you mean 'level'?" in capsys.readouterr().err


@pytest.mark.pictures
@pytest.mark.parametrize("time", ["", "age"])
def test_a_table_of_rows_with_one_number_as_target_can_be_looked_at(tmp_path, capsys, monkeypatch, time):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "town,rooms,age,price\n" + "".join(f"Ulm,{i % 7},{i},{i}.5\n" for i in range(40)), "houses.csv")
    asked = ["datasets", "csv", "path=houses.csv", "client=town", "target=price"] + [f"time={time}"] * bool(time)
    assert main(["list", *asked, "--out", "houses.png"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "examples 40" in told
    assert "steps" not in told[told.index("examples 40") :]
    assert (tmp_path / "houses.png").stat().st_size > 5000


@pytest.mark.parametrize("method", [Local(), FedAvg(), SFL()])
def test_methods_train_on_a_table_with_edges(tmp_path, method):
    edges = write(tmp_path, "from,to\nUlm,Bonn\n", "e.csv")
    federation = from_csv(write(tmp_path, HOUSES), client="town", target="price", edges=edges)
    run = fit(method, federation, nn.Linear(2, 1), rounds=2)
    assert all(np.isfinite(score["mean"]) for score in run.summary.scores.values())


UNITS = [("A", 1.0, 0.0), ("B", 1.0, 0.3), ("C", 100.0, 0.0), ("D", 1.0, 900.0)]


def units(folder, clients=UNITS, rows=40):
    """Inputs a, in a unit of each client's own, b, in one unit, and c, a flag that few clients have often."""
    draw, lines = np.random.default_rng(0), []
    for k, (who, gain, offset) in enumerate(clients):
        for i, (a, b) in enumerate(draw.normal(size=(rows, 2))):
            lines.append(f"{who},{a * gain + offset:.6g},{b:.6g},{int(i % 40 == k or (k == 0 and i % 2))},{a - b:.6g}")
    return write(folder, "who,a,b,c,y\n" + "\n".join(lines))


@pytest.mark.parametrize("clients", [UNITS, UNITS[:3], [UNITS[0], UNITS[1], UNITS[3]]])
def test_columns_in_units_of_their_own_are_scaled_client_by_client(tmp_path, clients):
    federation = from_csv(units(tmp_path, clients), client="who", target="y", scale="auto")
    assert list(federation.scale["inputs"]) == ["a", "b", "c"]
    assert {tuple(columns) for columns in federation.scale["clients"].values()} == {("a",)}
    for rows in federation.rows["train"]:
        torch.testing.assert_close(federation.x[rows, 0].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
        torch.testing.assert_close(federation.x[rows, 0].std(correction=0), torch.tensor(1.0))
    train = torch.cat(list(federation.rows["train"]))
    torch.testing.assert_close(federation.x[train].mean(0), torch.zeros(3), atol=1e-5, rtol=0)


def test_one_unit_is_scaled_for_all_unless_each_client_is_asked_for(tmp_path):
    path = units(tmp_path, UNITS[:2])
    auto, every, own = (from_csv(path, client="who", target="y", scale=s) for s in ("auto", "federation", "client"))
    assert torch.equal(auto.x, every.x)
    assert torch.equal(from_csv(path, client="who", target="y").x, every.x)
    assert auto.scale == every.scale
    assert "clients" not in every.scale
    rows = own.rows["train"][1]
    scale = own.scale["clients"]["B"]["b"]
    raw = every.x[:, 1].double() * every.scale["inputs"]["b"]["deviation"] + every.scale["inputs"]["b"]["mean"]
    assert scale["mean"] == pytest.approx(float(raw[rows].mean()), abs=1e-6)
    assert scale["deviation"] == pytest.approx(float(raw[rows].std(correction=0)), abs=1e-6)


@pytest.mark.parametrize(("scale", "named"), [("federation", True), ("client", False), ("auto", False)])
def test_columns_that_may_be_in_units_of_their_own_are_named_where_none_are_guessed(tmp_path, capsys, scale, named):
    path = units(tmp_path, UNITS)
    table = ["run", str(path), "--client", "who", "--target", "y", "--method", "local", "--beside", "none"]
    main([*table, "rounds=1", f"federation.dataset.scale={scale}", "--out", str(tmp_path / "run")])
    shown = " ".join("".join(capsys.readouterr()).split())
    assert ("; a differs much between clients: federation.dataset.scale=auto, if" in shown) == named


def test_what_is_constant_at_a_client_has_the_scale_of_all(tmp_path):
    rows = [f"{who},{level + (who == 'A') * i},{i % 2}" for who, level in (("A", 0.1), ("B", 0.7)) for i in range(20)]
    path = write(tmp_path, "who,x,y\n" + "\n".join(rows))
    federation = from_csv(path, client="who", target="y", scale="client")
    assert federation.scale["clients"]["B"]["x"]["deviation"] == federation.scale["inputs"]["x"]["deviation"]
    assert federation.x[torch.cat([parts[1] for parts in federation.rows.values()])].abs().max() < 1e-6


def test_labels_may_be_asked_for_or_declined(tmp_path):
    path = write(tmp_path, "who,x,y\n" + "\n".join(f"{'AB'[i % 2]},{i},{i % 7}" for i in range(60)))
    assert from_csv(path, client="who", target="y").task.classes == 7
    assert isinstance(from_csv(path, client="who", target="y", labels=False).task, Regression)
    path = write(tmp_path, "who,x,y\n" + "\n".join(f"{'AB'[i % 2]},{i},{i % 3 + 0.5}" for i in range(60)))
    assert isinstance(from_csv(path, client="who", target="y").task, Regression)
    assert from_csv(path, client="who", target="y", labels=True).classes == ("0.5", "1.5", "2.5")


@pytest.mark.parametrize("seed", range(6))
def test_the_only_row_of_a_class_is_trained_on(tmp_path, seed):
    rows = [f"{who},{i},{'xy'[i % 2]}" for who in "AB" for i in range(10)]
    path = write(tmp_path, "who,x,y\n" + "\n".join([*rows, "A,3,z"]))
    federation = from_csv(path, client="who", target="y", seed=seed)
    assert federation.class_counts(["train"])[0, 2] == 1
    owned = torch.cat([rows for parts in federation.rows.values() for rows in parts])
    assert sorted(owned.tolist()) == list(range(21))
    assert [len(federation.rows[split][0]) for split in ("train", "validation", "test")] == [8, 1, 2]


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path, "who,x,y\na,1,2", "houses.csv")
    with pytest.raises(UsageError, match=r"there is no file .*hoses.csv \(in .*\); did you mean 'houses.csv'\?"):
        from_csv(tmp_path / "hoses.csv", client="who", target="y")
    with pytest.raises(UsageError, match=r"there is no file .*x.csv \(in [^;]*\)$"):
        from_csv(tmp_path / "none" / "x.csv", client="who", target="y")


def test_ignored_columns_are_no_inputs(tmp_path):
    path = write(tmp_path, "who,a,b,y\n" + "\n".join(f"{'AB'[i % 2]},{i},text,{i % 3 + 0.5}" for i in range(60)))
    assert list(from_csv(path, client="who", target="y", ignore=["b"]).scale["inputs"]) == ["a"]
    with pytest.raises(UsageError, match="column 'b' is in features and in ignore"):
        from_csv(path, client="who", target="y", ignore=["b"], features=["a", "b"])
    with pytest.raises(UsageError, match=r"has no column 'c'"):
        from_csv(path, client="who", target="y", ignore=["c"])


def test_rows_without_a_target_are_left_out_and_counted(tmp_path):
    path = write(tmp_path, "who,x,y\na,1,0.5\na,2,nan\na,3,1.5\nb,4,\nb,5,3.5\n")
    said = r"t\.csv: 2 of 5 rows have no y and were left out \(the first: \S+t\.csv, line 3\)"
    with pytest.warns(UserWarning, match=said):
        data = read(path, client="who", target="y")
    assert data.y.flatten().tolist() == [0.5, 1.5, 3.5]
    assert data.x.flatten().tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    ("clients", "digest"),
    [
        (UNITS, "42d6d2a95fb2a99693229797914f7f14a3be6db0"),
        (UNITS[:2], "3370963783de3bbebec1b3ff0ed975c381e23e36"),
    ],
)
def test_tables_of_numbers_give_the_bits_that_they_always_gave(tmp_path, clients, digest):
    """Inputs, targets, names and splits, as hashed before text and holes were taken."""
    federation = from_csv(units(tmp_path, clients), client="who", target="y", scale="auto")
    [mean], [deviation] = federation.task.mean, federation.task.deviation
    assert replace(federation, task=Forecasting(mean, deviation, "squared", ())).digest() == digest
