import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kinfed.data.datasets import DATASETS
from kinfed.errors import UsageError


def write(folder, **changed):
    arrays = {
        "x": np.arange(8.0).reshape(4, 2),
        "y": np.array([0, 1, 1, 0]),
        "client": np.array([1, 0, 1, 0]),
        "adjacency": np.array([[0, 1], [1, 0]]),
    } | changed
    np.savez(folder / "dg60.npz", **arrays)


def test_owners_and_graph_come_along(tmp_path):
    write(tmp_path)
    found = DATASETS["dg60"](tmp_path)
    assert found.x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found.x.dtype == found.graph.weights.dtype == torch.float32
    assert found.y.tolist() == [0, 1, 1, 0]
    assert found.client.tolist() == [1, 0, 1, 0]
    assert found.graph.weights.tolist() == [[0, 1], [1, 0]]
    assert found.graph.origin == "given"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": np.zeros((4, 3))}, r"x must be finite floats \[n, 2\]; got float64 \[4, 3\]"),
        ({"x": np.full((4, 2), np.nan)}, r"x must be finite floats"),
        ({"y": np.array([0, 1, 2, 0])}, r"y must lie in 0\.\.1; 1 of 4 do not, first entry 2, which is 2"),
        ({"client": np.array([1, 0, 2, 0])}, r"client must lie in 0\.\.1; 1 of 4 do not, first entry 2"),
        ({"client": np.array([1, 0])}, r"client must be integers \[4\]"),
        ({"adjacency": np.zeros((2, 3))}, r"the graph must be \[2, 2\] for 2 clients; got \[2, 3\]"),
        ({"adjacency": np.array([[0, -1], [-1, 0]])}, r"graph weights must be finite and not negative; entry \[0, 1\]"),
        ({"adjacency": np.array(["a"])}, r"adjacency must be numbers \[N, N\]"),
    ],
)
def test_a_file_in_another_form_is_an_error(tmp_path, changed, message):
    write(tmp_path, **changed)
    with pytest.raises(UsageError, match=r"dg60\.npz: " + message):
        DATASETS["dg60"](tmp_path)


def test_the_real_domains():
    folder = os.environ.get("KINFED_DATA")
    if not folder or not (Path(folder) / "dg60.npz").is_file():
        pytest.skip("needs dg60.npz in the folder named by KINFED_DATA")
    found = DATASETS["dg60"]()
    assert torch.bincount(found.client).tolist() == [100] * 60
    assert torch.bincount(found.client[found.y == 1]).tolist() == [50] * 60
    weights = found.graph.weights
    torch.testing.assert_close(weights, weights.T)
    assert float(weights.sum()) == 2 * 545
    assert float(weights.trace()) == 0
