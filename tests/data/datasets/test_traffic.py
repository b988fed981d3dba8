"""Traffic and climate series: their files, and each real set trained with three methods."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kinfed import SGD, Split, Training, UsageError, fit
from kinfed.core.engine import Rounds
from kinfed.data.datasets import DATASETS
from kinfed.data.datasets.files import TRAFFIC
from kinfed.data.federation import divide
from kinfed.data.partitions import Natural
from kinfed.methods import SFL, FedAvg, Local
from kinfed.models import MODELS


def write(folder, name="metr_la", **changed):
    """Forty steps at three sensors, from 23:30; a change to None leaves an array out."""
    values = 50 + 10 * np.sin(np.arange(120).reshape(40, 3)).astype(np.float32)
    arrays = {
        "values": values,
        "adjacency": np.array([[1, 0.5, 0], [0, 1, 0], [0.2, 0, 1]]),
        "start": np.array("2012-03-01T23:30"),
        "sensor_ids": np.array(["773869", "767541", "767542"]),
    } | changed
    np.savez(folder / f"{name}.npz", **{key: value for key, value in arrays.items() if value is not None})
    return values


def dealt(dataset, split=None):
    parts = Natural()(dataset, 0, torch.Generator())
    return divide(parts.dataset, parts.owned, split or Split(), 0)


def test_sensors_become_clients_with_their_names_clock_and_graph(tmp_path):
    values = write(tmp_path)
    federation = dealt(DATASETS["metr_la"](tmp_path, past=4, horizon=2), Split(0.2, 0.2))
    assert federation.names == ("773869", "767541", "767542")
    assert torch.equal(federation.graph.weights, torch.tensor([[1, 0.5, 0], [0, 1, 0], [0.2, 0, 1]]))
    assert federation.graph.origin == "given"
    row = int(federation.rows["train"][1][3])  # the fourth window of the second sensor
    told = federation.x[row, :, 0] * federation.task.deviation + federation.task.mean
    np.testing.assert_allclose(told, values[3:7, 1], rtol=1e-6)
    np.testing.assert_allclose(federation.y[row], values[7:9, 1], rtol=1e-6)
    # Steps 3 to 6 lie at 23:45, 23:50, 23:55 and 00:00.
    torch.testing.assert_close(federation.x[row, :, 1] * 1440, torch.tensor([1425.0, 1430, 1435, 0]))
    assert DATASETS["metr_la"](tmp_path, past=4, horizon=2, time_of_day=False).x.shape[1:] == (4, 1)


def test_zeros_are_missing_speeds_but_true_flows(tmp_path):
    values = np.full((40, 3), 9.0, np.float32)
    values[10, 0] = 0
    for name, missing in (("metr_la", 1), ("pems_bay", 1), ("pems04", 0), ("pems08", 0)):
        write(tmp_path, name, values=values)
        data = DATASETS[name](tmp_path, past=1, horizon=1)
        assert int(data.y.isnan().sum()) == missing


def test_steps_left_out_are_gaps(tmp_path):
    index = np.r_[0:20, 120:140]
    for key, told in (("time_index", index), ("minutes_from_start", 5 * index)):
        write(tmp_path, "pems08", **{key: told})
        data = DATASETS["pems08"](tmp_path, past=4, horizon=2)
        assert (data.client == 0).sum() == 2 * 15
        assert data.time[data.client == 0].tolist() == [*range(15), *range(120, 135)]


def test_the_first_of_several_features_is_forecast_and_sensors_without_names_are_numbered(tmp_path):
    values = np.stack([np.arange(120.0).reshape(40, 3), np.zeros((40, 3))], -1)
    write(tmp_path, "pems04", values=values, sensor_ids=None)
    data = DATASETS["pems04"](tmp_path, past=1, horizon=1)
    assert data.owners == ("0", "1", "2")
    assert data.y[0].tolist() == [3]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"values": np.zeros((40, 3), np.int64)}, r"values must be floats \[T, N\]"),
        ({"adjacency": None}, "lacks the array adjacency"),
        ({"adjacency": np.ones((3, 2))}, r"weights must be real numbers \[N, N\]"),
        ({"adjacency": -np.ones((3, 3))}, "graph weights must be finite and not negative"),
        ({"start": np.array("last spring")}, "start must be the one date of step 0, .*; got last spring"),
        ({"start": np.array(["a", "b"])}, r"start must be the one date of step 0, .*; got \['a', 'b'\]"),
        ({"adjacency": np.full((3, 3), "x")}, r"weights must be numbers \[N, N\]; got <U1 \[3, 3\]"),
        ({"time_index": np.zeros(40, int)}, "must increase from row to row; row 1 does not"),
        ({"values": np.zeros((40, 3), np.float32)}, "3 of 3 series have no window .* 773869, 767541, 767542"),
        ({"sensor_ids": np.array(["a", "b"])}, "a column for each of 2 clients"),
    ],
)
def test_a_file_in_another_form_is_an_error(tmp_path, changed, said):
    write(tmp_path, **changed)
    with pytest.raises(UsageError, match=rf"metr_la\.npz:? .*{said}") as found:
        DATASETS["metr_la"](tmp_path)
    assert "\n" not in str(found.value)


def test_tpt48_is_read_without_a_clock(tmp_path):
    values = np.arange(60.0, dtype=np.float32).reshape(30, 2)
    arrays = {"values": values, "sensor_ids": np.array(["Ohio", "Utah"]), "adjacency": np.eye(2)}
    np.savez(tmp_path / "tpt48.npz", **arrays)
    data = DATASETS["tpt48"](tmp_path)
    assert data.x.shape[1:] == (6, 1)
    assert data.y[0].tolist() == [12, 14, 16, 18, 20, 22]
    assert data.owners == ("Ohio", "Utah")
    assert data.task.error == "squared"


# What each real file holds: clients, links between different ones, and how to make it small.
REAL = {
    "metr_la_subset": (29, 152, {"stride": 720}),
    "metr_la_week": (207, 1515, {"stride": 48}),
    "pems_bay_subset": (67, 129, {"stride": 1200}),
    "pems08_partial": (170, 277, {"stride": 192}),
    "pems04_head": (307, 340, {"stride": 20}),
    "tpt48": (48, 210, {}),
}


def real(name):
    """The clients of a real file, related."""
    folder = os.environ.get("KINFED_DATA")
    if not folder or not (Path(folder) / f"{name}.npz").is_file():
        pytest.skip(f"needs {name}.npz in the folder named by KINFED_DATA")
    return dealt(DATASETS[name](**REAL[name][2]))


@pytest.mark.parametrize("name", REAL)
def test_the_real_series_have_their_clients_and_links(name):
    federation, (clients, links, _) = real(name), REAL[name]
    assert len(federation) == clients
    assert int((federation.graph.weights.clone().fill_diagonal_(0) > 0).sum()) == links


@pytest.mark.parametrize("name", ["metr_la_subset", "tpt48"])
def test_the_real_series_train_with_three_methods(name):
    federation = real(name)
    torch.manual_seed(0)
    kind, width = ("rnn", 8) if name in TRAFFIC else ("mlp", (16, 16))
    module = MODELS[kind](tuple(federation.x.shape[1:]), federation.outputs, hidden=width)

    def train(method, lr):
        how = Training(2, 16, SGD(lr, momentum=0.9))
        history = fit(method, federation, module, rounds=Rounds(2, evaluate_every=2), training=how).history
        model = history.headline
        for (_, _, metric), values in history.scores[-1].items():
            assert "mape" in metric or torch.isfinite(values).all()
        assert (model, "test", "rmse@3") in history.scores[-1]
        return float(history.scores[-1][model, "test", "mae"].mean())

    untrained = train(FedAvg(), 1e-9)
    for method in (Local(), FedAvg(), SFL()):
        assert train(method, 0.1) < untrained, method
