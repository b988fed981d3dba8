"""Windows of series: what they show, what they never reach across, and that they are views."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import nn

import kinfed.data.split
from kinfed import SGD, Split, Training, UsageError, fit
from kinfed.data.federation import _to, divide
from kinfed.data.partitions import PARTITIONS, Natural
from kinfed.data.steps import calendar
from kinfed.data.windows import Windows
from kinfed.methods import FedAvg, Local
from kinfed.simulation.execution import Execution

NAN = math.nan
GAPPY = np.array([[1.0, 10], [2, 20], [NAN, 30], [4, 40], [5, NAN], [6, 60]])


def dealt(dataset, split=None, seed=0):
    parts = Natural()(dataset, 0, torch.Generator())
    return divide(parts.dataset, parts.owned, split or Split(), seed)


def counting(length=60, count=3, **how):
    """Windows of series whose readings say where they stand: 1000 i + t."""
    values = 1000.0 * np.arange(count) + np.arange(length)[:, None]
    return Windows(**how)(values, np.arange(length), [f"s{i}" for i in range(count)])


def test_windows_by_hand():
    data = Windows(2, 1)(GAPPY, np.arange(6), ["a", "b"])
    # Windows begin at steps 0 to 3 of each series; the one before a missing reading is nobody's.
    assert data.client.tolist() == [-1, 0, 0, 0, -1, -1, 1, 1, -1, 1]
    assert data.time.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert data.y[[1, 2, 3, 6, 7, 9], 0].tolist() == [4, 5, 6, 30, 40, 60]
    assert data.owners == ("a", "b")
    # Row 1 covers the readings 2, missing and 4, row 6 covers 10, 20 and 30: their mean is 13.2.
    scaled = data.prepare(data, torch.tensor([1, 6]))
    assert (scaled.task.mean, scaled.task.deviation) == pytest.approx((13.2, math.sqrt(109.76)))
    told = scaled.x[..., 0] * scaled.task.deviation + scaled.task.mean
    # What is missing is told as the last reading known before it.
    torch.testing.assert_close(told[[1, 2, 3, 9]], torch.tensor([[2.0, 2], [2, 4], [4, 5], [40, 40]]))
    assert torch.equal(scaled.y[[1, 6]], data.y[[1, 6]])


def test_weights_of_windows_by_hand():
    """A window weighs as the known readings that it forecasts; one of weight 0 is an input, and never forecast."""
    values, counts = np.arange(1.0, 7)[:, None], np.array([[5.0], [0], [1], [0], [0], [4]])
    values[2] = NAN
    data = Windows(1, 2)(values, np.arange(6), ["a"], weights=counts)
    # From steps 0 to 3 these would forecast (2, missing), (missing, 4), (4, 5) and (5, 6): only the last weighs.
    assert data.client.tolist() == [-1, -1, -1, 0]
    assert data.weights.tolist() == [1, 1, 1, 4]
    torch.testing.assert_close(data.y[3], torch.tensor([NAN, 6.0]), equal_nan=True)
    data = Windows(1, 2)(values, np.arange(6), ["a"], weights=counts + 2)
    assert data.client.tolist() == [0, 0, -1, 0]
    assert data.weights.tolist() == [2, 2, 2, 4]  # of readings 2, 4, both, and 5 and 6
    scaled = data.prepare(data, torch.tensor([0, 3]))
    assert (scaled.x[3, 0, 0] * scaled.task.deviation + scaled.task.mean).item() == pytest.approx(4)


def test_a_gap_is_never_reached_across_nor_filled_over():
    values = np.array([[1.0], [2], [3], [NAN], [5], [6], [7]])
    data = Windows(2, 1)(values, np.array([0, 1, 2, 5, 6, 7, 8]), ["a"])
    assert (data.client >= 0).nonzero().flatten().tolist() == [0, 3, 4]
    assert data.time[[0, 3, 4]].tolist() == [0, 5, 6]
    scaled = data.prepare(data, torch.tensor([0, 4]))
    assert scaled.x[3, 0, 0] == 0  # unknown since the gap: the mean


def test_the_clock_is_an_input_beside_the_readings():
    begin = np.datetime64("2012-03-01T23:50:00").astype(np.float64)
    day = calendar(begin + 300 * np.array([0, 1, 2, 300]), ["clock"])
    assert (day[:, 0] * 1440).tolist() == pytest.approx([1430, 1435, 0, 50])
    data = Windows(1, 1)(np.array([[1.0, 5], [2, 6], [3, 7]]), np.arange(3), ["a", "b"], calendar=day[:3])
    assert data.x.shape == (5, 1, 2)
    torch.testing.assert_close(data.x[[0, 1, 3], 0, 1], torch.tensor([1430, 1435, 1430]) / 1440)


def test_windows_are_views_that_stay_views():
    data = counting(500, 4, past=12, horizon=12)
    federation = dealt(data, Split(0.2, 0.1))
    assert federation.x.shape == (500 * 4 - 23, 12, 1)
    moved = federation.to(torch.device("cpu"))
    for values in (federation.x, federation.y, moved.x, moved.y):
        assert values.untyped_storage().nbytes() == 4 * 500 * 4
    for view in (federation.x, federation.y):
        moved = _to(view, torch.device("meta"))
        assert (moved.shape, moved.stride()) == (view.shape, view.stride())
        assert moved.storage_offset() == view.storage_offset()
        assert moved.untyped_storage().nbytes() == 4 * 500 * 4
    plain = torch.arange(6.0).view(2, 3)
    assert torch.equal(_to(plain[:, 1:], torch.device("cpu")), plain[:, 1:])


@given(
    length=st.integers(12, 80),
    past=st.integers(1, 6),
    horizon=st.integers(1, 4),
    stride=st.integers(1, 3),
    test=st.floats(0.1, 0.4),
    validation=st.floats(0.0, 0.4),
    gap=st.integers(0, 20),
    holes=st.integers(0, 2**32 - 1),
)
def test_no_reading_is_in_two_splits_and_no_window_reaches_across_a_gap(
    length, past, horizon, stride, test, validation, gap, holes
):
    steps = np.arange(length) + np.where(np.arange(length) >= length // 3, gap, 0)
    values = (1000 * np.arange(2) + steps[:, None]).astype(float)
    values[np.random.default_rng(holes).random(values.shape) < 0.2] = NAN
    try:
        data = Windows(past, horizon, stride)(values, steps, ["a", "b"])
        federation = dealt(data, Split(test, validation))
    except UsageError:
        assume(False)
    covered = {split: set() for split in federation.rows}
    for split, clients in federation.rows.items():
        for i, rows in enumerate(clients):
            begin = data.time[rows]
            for first, y in zip(begin.tolist(), federation.y[rows], strict=True):
                at = list(range(first, first + past + horizon))
                assert set(at) <= set(steps.tolist())
                covered[split] |= set(at)
                truth = torch.tensor([1000.0 * i + t for t in at[past:]])
                assert torch.equal(y[~y.isnan()], truth[~y.isnan()])
                assert not y.isnan().all()
    bounds = [(min(c), max(c)) for s in ("train", "validation", "test") if (c := covered[s])]
    assert len(bounds) == (3 if validation else 2)
    for (_, last), (first, _) in pairwise(bounds):
        assert last < first


def test_the_scale_is_learned_from_training_windows_alone():
    data = counting(60, 1, past=2, horizon=2)
    federation = dealt(data, Split(0.3, 0.1))
    # 57 windows begin at steps 0 to 56: tests at 40 or later, validation at 34 or later, training ends before 34.
    assert federation.rows["train"][0].tolist() == list(range(31))
    assert federation.rows["validation"][0].tolist() == [34, 35, 36]
    assert federation.rows["test"][0].tolist() == list(range(40, 57))
    assert federation.task.mean == 33 / 2
    assert federation.task.deviation == pytest.approx(np.arange(34).std())


def test_a_stride_changes_neither_cuts_nor_what_a_share_must_hold():
    every, few = (dealt(counting(200, 2, past=6, horizon=6, stride=s), Split(0.2, 0.1)) for s in (1, 8))
    # Windows begin at 0, 8, ..., 184: tests at 152 or later, validation at 136 or later, training ends before 136.
    assert [len(few.rows[s][0]) for s in few.rows] == [16, 1, 5]
    assert max(few.rows["train"][0].tolist()) + 12 <= min(few.rows["validation"][0].tolist())
    assert max(few.rows["validation"][0].tolist()) + 12 <= min(few.rows["test"][0].tolist())
    with pytest.raises(UsageError, match="the validation share covers 9 steps, but an example covers 12"):
        dealt(counting(200, 2, past=6, horizon=6), Split(0.2, 0.05))
    assert len(every) == len(few)


def test_split_at_random_as_some_papers_do_is_told():
    data = counting(60, 2, past=2, horizon=2)
    assert dealt(data).caution == ""
    shuffled = dealt(data, Split(shuffle=True))
    assert "share readings with those trained on" in shuffled.caution
    rows = {split: set(parts[0].tolist()) for split, parts in shuffled.rows.items()}
    assert min(rows["test"]) < max(rows["train"])
    assert sum(map(len, rows.values())) == 57
    run = fit(Local(), shuffled, nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), rounds=1)
    assert run.summary.selection.caution
    assert run.summary.selection.caution == shuffled.caution


def test_a_client_uses_at_most_so_many_windows_on_the_right_side_of_the_same_cuts():
    data = counting(200, 2, past=2, horizon=2)
    whole, part = dealt(data), dealt(data, Split(examples=40))
    for split, clients in part.rows.items():
        for some, every in zip(clients, whole.rows[split], strict=True):
            assert set(some.tolist()) < set(every.tolist())
    assert all(sum(len(part.rows[s][i]) for s in part.rows) <= 40 for i in range(2))


def test_a_share_of_the_windows_is_cut_at_the_same_steps(monkeypatch):
    monkeypatch.setattr(kinfed.data.split, "LEAST", 10)
    data = counting(200, 2, past=2, horizon=2)
    whole, part = dealt(data), dealt(data, Split(share=0.25))
    for split, clients in part.rows.items():
        for some, every in zip(clients, whole.rows[split], strict=True):
            assert set(some.tolist()) < set(every.tolist())
    assert all(40 < sum(len(part.rows[s][i]) for s in part.rows) <= 50 for i in range(2))


def test_executors_agree_on_windows_with_missing_readings():
    rng = np.random.default_rng(0)
    values = np.sin(np.arange(120) / 5)[:, None] + 0.1 * rng.standard_normal((120, 5))
    values[rng.random(values.shape) < 0.1] = NAN
    data = Windows(6, 3, horizons=(1, 3))(values, np.arange(120), list("abcde"))
    federation = dealt(data)
    federation = replace(federation, x=federation.x.double(), y=federation.y.double())
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 3)).double()
    loop, vmap = (fit(FedAvg(), federation, module, rounds=2, execution=Execution(e)).history for e in ("loop", "vmap"))
    for key, values in loop.scores[-1].items():
        torch.testing.assert_close(values, vmap.scores[-1][key], rtol=1e-9, atol=1e-12)
    assert ("shared", "test", "mape@3") in loop.scores[-1]


def test_a_linear_model_learns_to_forecast_a_sine():
    values = 50 + 20 * np.sin(np.arange(400)[:, None] / np.array([3.0, 4.0, 5.0, 6.0]))
    data = Windows(8, 4)(values, np.arange(400), list("abcd"))
    module = nn.Sequential(nn.Flatten(), nn.Linear(8, 4))
    run = fit(Local(), dealt(data), module, rounds=30, training=Training(2, 8, SGD(0.1)))
    assert run.summary.metric.name == "mae"
    assert run.summary.scores["own"]["mean"] < 1  # in the unit of the readings, whose deviation is 14


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"natural"}))
def test_windows_are_not_dealt_to_other_clients(name):
    with pytest.raises(
        UsageError, match=r"cannot split time series across clients; use partition 'natural'|not classes"
    ):
        PARTITIONS[name]()(counting(), 3, torch.Generator())


@pytest.mark.parametrize(
    ("values", "steps", "how", "said"),
    [
        (np.full((9, 2), [[1.0, NAN]]), range(9), {}, "1 of 2 series have no window of 2 \\+ 1 steps .* readings: b;"),
        (np.ones((2, 2)), range(2), {}, "covers 2 \\+ 1 steps, but the series have 2; make past or horizon smaller"),
        (np.ones((4, 2)), [0, 1, 1, 2], {}, "must increase from row to row; row 2 does not"),
        (np.ones((4, 2)), [0, 1], {}, "must increase from row to row"),
        (np.array([[1.0, 2]] * 3 + [[1, np.inf]]), range(4), {}, "series 'b' holds infinity, first in row 3"),
        (np.ones((4, 3)), range(4), {}, r"a column for each of 2 clients; got float64 \[4, 3\]"),
        (np.ones((4, 2)), range(4), {"past": 0}, "Windows.past must be at least 1; got 0"),
        (np.ones((4, 2)), [0, 1, 3, 4], {}, "2 of 2 series have no window"),
    ],
)
def test_series_that_cannot_be_cut(values, steps, how, said):
    with pytest.raises(UsageError, match=said):
        Windows(**{"past": 2, "horizon": 1} | how)(values, np.array(steps), ["a", "b"])


def test_constant_series_and_clients_without_a_part_are_refused():
    flat = Windows(2, 1)(np.ones((40, 2)), np.arange(40), ["a", "b"])
    with pytest.raises(UsageError, match="all training readings are 1, so there is no scale"):
        dealt(flat)
    values = np.arange(80.0).reshape(40, 2)
    values[20:, 1] = NAN
    late = Windows(2, 1)(values, np.arange(40), ["a", "b"])
    with pytest.raises(UsageError, match=r"1 of 2 clients has too few .* one after the other: b \(18\)"):
        dealt(late)


def test_a_summary_tells_every_metric_and_the_tenths():
    values = 50 + 20 * np.sin(np.arange(120)[:, None] / np.linspace(3, 6, 30))
    data = Windows(4, 3, horizons=(1, 3))(values, np.arange(120), [f"s{i}" for i in range(30)])
    run = fit(FedAvg(), dealt(data), nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), rounds=2)
    score = run.summary.scores["shared"]
    at = run.history.rounds.index(run.history.select("shared"))
    for metric in ("rmse", "mape", "mae@1", "rmse@3"):
        found = run.history.scores[at]["shared", "test", metric]
        power = 2 if metric.startswith("rmse") else 1  # the root of the mean of clients' squares
        assert score[metric] == pytest.approx(float((found.double() ** power).mean() ** (1 / power)))
    ordered = run.history.test("shared").double().sort(descending=True).values  # large errors are the worst
    assert score["worst5"] == pytest.approx(float(ordered[:2].mean()))
    assert score["worst10"] == pytest.approx(float(ordered[:3].mean()))
    assert score["best10"] == pytest.approx(float(ordered[-3:].mean()))
    assert "pooled" not in score
