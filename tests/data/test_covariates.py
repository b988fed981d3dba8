"""Covariates of series: what a window shows of them, by hand, and that nothing of the future or of others leaks."""

import json
import math
import re
import warnings

import numpy as np
import polars
import pytest
import torch

import kinfed
from kinfed import Split, UsageError
from kinfed.data.tables.covariates import leads_of
from kinfed.data.tables.new_readings import Series
from kinfed.data.tables.open_table import frame_of
from kinfed.data.tables.owners import Owners

PAST, HORIZON, LENGTH = 3, 2, 80
OWNERS = ("A", "B", "C")


def rows(length=LENGTH):
    """A row of each client and day, by (client, day); some cells are missing, and one client starts late."""
    draw, table = np.random.default_rng(3), {}
    for i, who in enumerate(OWNERS):
        for day in range(5 if who == "C" else 0, length):
            table[who, day] = {
                "who": who,
                "day": str(np.datetime64("2024-01-29") + day),
                "heat": None if (who, day) in {("A", 4), ("B", 0)} else round(10 * i + draw.normal(), 3),
                "price": round(5 + draw.normal(), 3),
                "sale": "yes" if draw.random() < 0.3 else "no",
                "region": "north" if i < 2 else "south",
                "sold": None if (who, day) == ("A", 7) else round(50 + 9 * draw.normal(), 3),
            }
    return table


def federated(table, horizon=HORIZON, past=PAST, **settings):
    how = {"future": ["price", "sale"], "static": ["region"], "calendar": ["weekday", "month"], "scale": "federation"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        frame = polars.DataFrame(list(table.values()), infer_schema_length=None)
        return kinfed.from_frame(
            frame, client="who", target="sold", time="day", past=past, horizon=horizon, **how | settings
        )


def by_hand(table, who, day, mean_of, past=PAST, lead=HORIZON):
    """[past, F] a window's inputs whose first step is `day`, cell by cell."""

    def last(column, at):
        known = [(who, t) for t in range(at, -1, -1) if (who, t) in table and table[who, t][column] is not None]
        return table[known[0]][column] if known else None

    def number(column, at):
        value = last(column, at)
        mean, deviation = mean_of[column]
        return 0.0 if value is None else (value - mean) / deviation

    window = []
    for at in range(day, day + past):
        date = np.datetime64("2024-01-29") + at  # a Monday
        month = int(str(date)[5:7])
        window.append(
            [
                number("sold", at),
                *(float(at % 7 == i) for i in range(7)),
                *(float(month == i + 1) for i in range(12)),
                number("heat", at),
                number("price", at),
                float(last("sale", at) == "no"),
                float(last("sale", at) == "yes"),
                float(last("region", LENGTH) == "north"),
                float(last("region", LENGTH) == "south"),
                number("price", at + lead),
                float(last("sale", at + lead) == "no"),
                float(last("sale", at + lead) == "yes"),
            ]
        )
    return torch.tensor(window)


def windows_of(federation):
    """The windows of every client by its place and the step at which they begin."""
    length = LENGTH
    found = {}
    for parts in federation.rows.values():
        for i, own in enumerate(parts):
            found |= {(i, row - i * length): row for row in own.tolist()}
    return found


def test_windows_are_those_cut_by_hand():
    table = rows()
    federation = federated(table)
    # Scales are of the cells in all training windows, each once: steps up to the last that a training window covers.
    mean_of = {}
    for column in ("sold", "heat", "price"):
        seen = []
        for i, who in enumerate(OWNERS):
            steps = {
                row - i * LENGTH + k for row in federation.rows["train"][i].tolist() for k in range(PAST + HORIZON)
            }
            seen += [table[who, t][column] for t in sorted(steps) if (who, t) in table]
        seen = [value for value in seen if value is not None]
        mean_of[column] = float(np.mean(seen)), float(np.std(seen))
    assert federation.x.shape[1:] == (PAST, 29)
    found = windows_of(federation)
    assert len(found) > 60
    for (i, day), row in found.items():
        torch.testing.assert_close(federation.x[row], by_hand(table, OWNERS[i], day, mean_of), rtol=1e-5, atol=1e-5)
        told = [table[OWNERS[i], day + PAST + k]["sold"] for k in range(HORIZON)]
        expected = torch.tensor([math.nan if one is None else one for one in told])
        torch.testing.assert_close(federation.y[row], expected, equal_nan=True)


def test_a_horizon_longer_than_the_past_is_read_without_a_gap():
    assert leads_of(3, 2) == [2]
    assert leads_of(2, 5) == [2, 4, 5]
    for past in range(1, 6):
        for horizon in range(1, 13):
            seen = {step + lead for lead in leads_of(past, horizon) for step in range(past)}
            assert {*range(past, past + horizon)} <= seen
            assert max(seen) == past + horizon - 1
    federation = federated(rows(), past=2, horizon=5)
    assert federation.x.shape[1:] == (2, 26 + 3 * 3)


@pytest.mark.parametrize("column", ["heat", "price", "sale", "sold"])
def test_of_the_forecast_hours_only_what_is_known_ahead_changes_the_inputs(column):
    """Each cell in turn is moved: a window's inputs change if the cell is in its past, or known ahead and in reach."""
    table = rows()
    before = federated(table)
    found = windows_of(before)
    known = before.scale, before.scale["covariates"]
    for who, day in (("A", 20), ("B", 31), ("C", 12)):
        moved = {key: dict(row) for key, row in table.items()}
        cell = moved[who, day]
        cell[column] = ("no" if cell[column] == "yes" else "yes") if column == "sale" else cell[column] + 7
        after = federated(moved)
        # On the scale of before, so that what differs is the cell itself.
        changed = {
            key for key, row in found.items() if not torch.equal(*(rescaled(f, known)[row] for f in (before, after)))
        }
        reach = PAST + (HORIZON if column in ("price", "sale") else 0)
        i = OWNERS.index(who)
        assert changed == {(i, start) for start in range(day - reach + 1, day + 1) if (i, start) in found}


def rescaled(federation, known):
    """A federation's inputs on the scale of another."""
    own = {"sold": federation.scale["targets"]["reading"]}
    own |= {one["name"]: one for one in federation.scale["covariates"]["inputs"] if one["kind"] == "number"}
    others = {"sold": known[0]["targets"]["reading"]}
    others |= {one["name"]: one for one in known[1]["inputs"] if one["kind"] == "number"}
    x = federation.x.double().clone()
    for at, name in ((0, "sold"), (20, "heat"), (21, "price"), (26, "price")):
        raw = x[..., at] * own[name]["deviation"] + own[name]["mean"]
        scaled = ((raw - others[name]["mean"]) / others[name]["deviation"] * 1e3).round()
        x[..., at] = torch.where(x[..., at] == 0, 0.0, scaled)  # 0 is unknown on any scale
    return x


def test_a_series_shifted_by_a_step_shifts_what_a_window_shows():
    """Shifted by a step, a covariate moves its own inputs alone; one known ahead moves in the steps ahead, too."""
    table = rows()
    for column, at in (("heat", [20]), ("price", [21, 26])):
        moved = {key: dict(row) for key, row in table.items()}
        for who, day in table:
            moved[who, day][column] = table.get((who, day - 1), {}).get(column)
        before, after = (federated(one) for one in (table, moved))
        known = before.scale, before.scale["covariates"]
        first, second = rescaled(before, known), rescaled(after, known)
        others = [i for i in range(first.shape[-1]) if i not in at]
        for (i, start), row in windows_of(before).items():
            assert torch.equal(first[row][:, others], second[row][:, others])
            if start > 8 and (i, start - 1) in windows_of(before):
                assert torch.equal(second[row][:, at], first[row - 1][:, at])


def ahead_of(series, table):
    """The windows of new rows, by client and the day of the last reading."""
    frame = frame_of(polars.DataFrame(list(table.values()), infer_schema_length=None))
    words = frame["who"].words()
    owners = Owners([*OWNERS], np.array([OWNERS.index(name) for name in words.names])[words.codes], None)
    found = series.windows(frame, owners)
    keys = list(table)
    places = zip(found.at, found.who, found.rows, strict=True)
    return {(int(who), keys[row][1]): found.x[at] for at, who, row in places}


def test_what_new_rows_become_is_what_training_made_of_them():
    table = rows()
    federation = federated(table)
    series = Series.of_scale(federation.scale)
    with pytest.warns(UserWarning, match="got no forecast"):
        made = ahead_of(series, table)
    for (i, start), row in windows_of(federation).items():
        torch.testing.assert_close(made[i, start + PAST - 1], federation.x[row], rtol=1e-5, atol=1e-5)
    assert max(day for _, day in made) == LENGTH - HORIZON - 1
    assert len(series.inputs) == len(series.scales("A")) == federation.x.shape[-1]
    again = Series.of_scale(json.loads(json.dumps(federation.scale)))
    assert again == series


def recent(change=lambda table: None, days=8):
    """New rows: the last days of every client, and rows for the steps to forecast, without a reading."""
    table = {key: dict(row) for key, row in rows(LENGTH + HORIZON).items() if key[1] >= LENGTH - days}
    for (_, day), row in table.items():
        if day >= LENGTH:
            row |= {"sold": None, "heat": None}
    change(table)
    return {key: row for key, row in table.items() if row}


def test_rows_after_the_last_reading_tell_what_is_known_ahead():
    series = Series.of_scale(federated(rows()).scale)
    with pytest.warns(UserWarning, match="6 rows with fewer than 3 steps"):
        made = ahead_of(series, recent())
    assert {day for _, day in made} == {*range(LENGTH - 6, LENGTH)}

    def dearer(table):
        table["A", LENGTH + 1]["price"] += 1

    with pytest.warns(UserWarning, match="got no forecast"):
        other = ahead_of(series, recent(dearer))
    assert [key for key in made if not torch.equal(made[key], other[key])] == [(0, LENGTH - 1)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t["B", LENGTH + 1].update(price=None),
            "row 20, column 'price': there is no value in a step to forecast, where 'price' must be known; fill it in "
            "(1 row got no forecast)",
        ),
        (
            lambda t: t.update({(who, LENGTH + 1): None for who in OWNERS}),
            "row 8, column 'price': there is no row 2 steps after this one, but 'price' must be known in the 2 steps "
            "to forecast; add a row for each, with 'sold' left empty (3 rows got no forecast)",
        ),
        (
            lambda t: [t["A", day].update(heat=None) for day in range(LENGTH - 6, LENGTH)],
            "row 2, column 'heat': this old value stands for later ones, as 4 forecasts have no value in the 3 steps",
        ),
        (
            lambda t: [row.update(heat=None) for (who, _), row in t.items() if who == "C"],
            "row 23, column 'heat': 6 forecasts have no value in the 3 steps before",
        ),
        (
            lambda t: t["B", LENGTH].update(sale="gift"),
            "row 19, column 'sale': 'gift' is in no training row",
        ),
    ],
)
def test_what_new_rows_lack_is_said_with_its_cell(change, said):
    series = Series.of_scale(federated(rows()).scale)
    with pytest.warns(UserWarning, match=re.escape(said)):
        ahead_of(series, recent(change))


def test_no_forecast_at_all_is_an_error():
    series = Series.of_scale(federated(rows()).scale)

    def lose(table):
        for row in table.values():
            row["price"] = None

    with (
        pytest.warns(UserWarning, match="fewer than 3 steps"),
        pytest.raises(UsageError, match=r"row 4, column 'price': there is no value .* \(no row got a forecast\)"),
    ):
        ahead_of(series, recent(lose))


def test_other_clients_rows_change_nothing_but_the_common_scale():
    table = rows()
    other = {
        key: row | ({"price": row["price"] * 3 + 1, "sold": 1.0} if key[0] == "C" else {}) for key, row in table.items()
    }
    before, after = federated(table), federated(other)
    known = before.scale, before.scale["covariates"]
    first, second = rescaled(before, known), rescaled(after, known)
    own = [row for (i, _), row in windows_of(before).items() if i < 2]
    assert torch.equal(first[own], second[own])
    # With scales of each client's own not even these.
    before, after = (federated(one, scale="client") for one in (table, other))
    assert torch.equal(before.x[own][..., 1:], after.x[own][..., 1:])


def test_other_columns_are_known_until_now_unless_said_otherwise():
    table = rows()
    plain = federated(table, future=(), static=(), calendar=())
    assert Series.of_scale(plain.scale).inputs == [
        "sold", "heat", "price", "sale=no", "sale=yes", "region=north", "region=south",
    ]  # fmt: skip
    few = federated(table, future=["price"], static=(), calendar=(), features=["heat"])
    assert Series.of_scale(few.scale).inputs == ["sold", "heat", "price", "price, 2 steps later"]
    none = federated(table, future=(), static=(), calendar=(), ignore=["heat", "price", "sale", "region"])
    assert none.x.shape[1:] == (PAST, 1)
    assert "covariates" not in none.scale


def written(tmp_path, change, name="sales.csv"):
    table = rows()
    change(table)
    path = tmp_path / name
    polars.DataFrame(list(table.values()), infer_schema_length=None).write_csv(path)
    return path


HOW = {"client": "who", "target": "sold", "time": "day", "past": PAST, "horizon": HORIZON}


@pytest.mark.parametrize(
    ("change", "how", "said"),
    [
        (
            lambda t: t["B", 9].update(region="south"),
            {"static": ["region"]},
            "sales.csv, line 91, column 'region': 'south', but 'north' in line 82, though 'region' is static and both "
            "are of client 'B'; correct the cell, or take the column out of static",
        ),
        (lambda t: None, {"future": ["prise"]}, "sales.csv has no column 'prise'; did you mean 'price'?"),
        (lambda t: None, {"future": ["price"], "ignore": ["price"]}, "'price' is in future and in ignore"),
        (lambda t: None, {"future": ["region"], "static": ["region"]}, "'region' is in future and in static"),
        (lambda t: None, {"future": ["sold"]}, "column 'sold' is the target, so it cannot be in future"),
        (lambda t: t["B", 9].update(price="cheap"), {}, "sales.csv, line 91, column 'price': 'cheap' is not a number"),
        (lambda t: None, {"calendar": ["minute"]}, "calendar"),
    ],
)
def test_covariates_that_cannot_be_are_refused_in_one_line(tmp_path, change, how, said):
    path = written(tmp_path, change)
    with pytest.raises(UsageError, match=re.escape(said)):
        kinfed.from_csv(path, **HOW | how)


def ends(table):
    for day in range(20, LENGTH):
        table["B", day]["heat"] = None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ends,
            "sales.csv, line 101, column 'heat': this is the last value of client 'B', 60 steps before its last",
        ),
        (
            lambda t: [row.update(heat=None) for (who, _), row in t.items() if who == "B"],
            "sales.csv: 'heat' has no value in any row of B, and is taken to be as at most rows there",
        ),
        (lambda t: None, "sales.csv, line 162, column 'region': only client 'C' has 'south', so others neither learn"),
        (
            lambda t: [row.update(price=key[1]) for key, row in t.items()],
            "sales.csv, line 2, column 'price': 'price' rises from row to row at every client, as counters do",
        ),
        (
            lambda t: [row.update(price=round(row["sold"] * 2, 3)) for row in t.values() if row["sold"] is not None],
            "line 2, column 'price': '",
        ),
    ],
)
def test_what_is_doubtful_is_said_with_its_cell(tmp_path, change, said):
    path = written(tmp_path, change)
    with pytest.warns(UserWarning, match=re.escape(said)):
        kinfed.from_csv(path, **HOW, future=["price"])


def test_a_covariate_that_is_the_target_at_the_same_time_leaks_only_if_it_is_known_ahead(tmp_path):
    path = written(tmp_path, lambda t: [row.update(price=row["sold"]) for row in t.values()])
    for future, leaks in ((["price"], True), ([], False)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            kinfed.from_csv(path, **HOW, future=future)
        assert leaks == any("tells that 'sold' is" in str(one.message) for one in told)


def test_the_split_says_which_cells_give_scales_and_categories():
    """A category and a price of test steps alone are unknown in training."""
    table = rows()
    federation = federated(table, split=Split(0.3, 0.1))
    last = max(start for (i, start), row in windows_of(federation).items() if row in federation.rows["train"][i])
    later = {key: dict(row) for key, row in table.items()}
    for (_, day), row in later.items():
        if day > last + PAST + HORIZON:
            row |= {"price": 1e4, "sale": "half"}
    assert federated(later, split=Split(0.3, 0.1)).scale["covariates"] == federation.scale["covariates"]


def test_a_forecast_is_of_the_part_of_its_targets_and_reads_what_was_known_before():
    """Ten years of months with a past of two years: no target is in two parts, and test targets begin at the cut."""
    months = [f"{2000 + t // 12}-{t % 12 + 1:02d}-01" for t in range(120)]
    table = {"who": ["a"] * 120 + ["b"] * 120, "month": months * 2, "sold": [float(t) for t in range(240)]}
    federation = kinfed.from_frame(
        polars.DataFrame(table), client="who", target="sold", time="month", past=24, horizon=3
    )
    for i in range(2):
        parts = [federation.y[federation.rows[name][i]] for name in ("train", "validation", "test")]
        targets = [{*part.unique().tolist()} for part in parts]
        assert [max(targets[0]) + 1, max(targets[1]) + 1] == [min(targets[1]), min(targets[2])]
        scale = federation.scale["inputs"]["reading"]
        first = federation.x[federation.rows["test"][i]][..., 0].double() * scale["deviation"] + scale["mean"]
        assert float(first.min()) == pytest.approx(min(targets[2]) - 24, abs=1e-2)
