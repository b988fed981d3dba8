import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.stats import norm

from kinfed.data.datasets import DATASETS
from kinfed.errors import UsageError

synthetic = DATASETS["synthetic"]


def middles(found, clients):
    """[N, 2] half the way between the class means of each client: an estimate of m_i."""
    x = found.x.double().view(clients, 2, -1, 2)
    return (x[:, 0] - x[:, 1]).mean(1) / 2


def scatter(x):
    """Mean squared distance of points x: [..., n, 2] from their group's true centre, without knowing it."""
    return float(x.double().var(-2, correction=1).sum(-1).mean())


def separable(x, y):
    """Whether a line parts the classes: a linear programme asks for w, b with margins of 1."""
    side = np.where(y == 1, 1.0, -1.0)[:, None]
    constraints = -side * np.c_[x, np.ones(len(x))]
    return linprog(np.zeros(3), constraints, -np.ones(len(x)), bounds=(None, None)).status == 0


@pytest.mark.parametrize("mode", ["separable", "printed"])
def test_sizes_owners_and_graph(mode):
    found = synthetic(None, clients=7, per_class=5, mode=mode)
    assert found.x.shape == (70, 2)
    assert found.x.dtype == torch.float32
    assert torch.bincount(found.client).tolist() == [10] * 7
    assert torch.bincount(found.client[found.y == 1]).tolist() == [5] * 7
    weights = found.graph.weights
    assert found.graph.origin == "given"
    assert weights.shape == (7, 7)
    assert set(weights.flatten().tolist()) <= {0.0, 1.0}
    assert torch.equal(weights, weights.T)
    assert float(weights.trace()) == 0


def test_the_seed_decides():
    first, again, other = synthetic(seed=1), synthetic(seed=1), synthetic(seed=2)
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.graph.weights, again.graph.weights)
    assert not torch.equal(first.x, other.x)
    assert not torch.equal(first.graph.weights, other.graph.weights)


def test_every_client_is_linearly_separable():
    found = synthetic()
    x, y = found.x.view(60, 100, 2).numpy(), found.y.view(60, 100).numpy()
    assert all(separable(x[i], y[i]) for i in range(60))


def test_printed_data_are_not_separable():
    found = synthetic(mode="printed")
    x, y = found.x.view(60, 100, 2).numpy(), found.y.view(60, 100).numpy()
    assert not any(separable(x[i], y[i]) for i in range(60))


def test_centres_lie_on_a_spiral():
    found = synthetic(clients=200, per_class=500)
    middle = middles(found, 200)  # known to about 0.48 / sqrt(1000) = 0.015
    angle = torch.atan2(middle[:, 1], middle[:, 0]) % (2 * math.pi)
    away = (angle > 0.1) & (angle < 2 * math.pi - 0.1)  # where an estimate cannot fall on the other side of 0
    assert away.sum() > 180
    torch.testing.assert_close(middle.norm(dim=1)[away], 1 + 3 / math.pi * angle[away], rtol=0, atol=0.1)
    assert 0.5 < float(angle.mean() / math.pi) < 1.5
    # Uniform angles: 200 of them fill 8 equal sectors, each with 25 +- 5 (6 deviations allowed).
    assert torch.histc(angle, 8, 0, 2 * math.pi).sub(25).abs().max() < 28


def test_points_are_normal_within_a_unit_disc():
    found = synthetic(clients=60, per_class=200)
    x = found.x.double().view(60, 2, 200, 2)
    middle = middles(found, 60)
    centre = torch.stack((middle, -middle), 1)[:, :, None]
    reach = (x - centre).norm(dim=-1).max()
    assert 0.98 < float(reach) < 1.15  # 1, with centres known to about 0.024 an axis
    # E r^2 of a standard normal in the plane, given r < 1: 2 - 1 / (e^(1/2) - 1) = 0.4585; uniform would be 0.5.
    assert scatter(x) == pytest.approx(2 - 1 / math.expm1(0.5), abs=0.01)


def test_links_have_probability_cosine_and_end_at_a_fifth():
    found = synthetic(clients=300, per_class=50)
    middle = middles(found, 300)
    unit = middle / middle.norm(dim=1, keepdim=True)
    upper = torch.ones(300, 300).triu(1).bool()
    alike, link = (unit @ unit.T)[upper], found.graph.weights[upper].double()
    assert link[alike < 0.05].sum() == 0  # directions are known to about 0.05
    for low, high in ((0.3, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.0)):
        chosen = (alike > low) & (alike < high)
        assert chosen.sum() > 2000
        assert float(link[chosen].mean()) == pytest.approx(float(alike[chosen].mean()), abs=0.04)


def test_printed_centres_and_links():
    clients = 80
    found = synthetic(clients=clients, per_class=3000, mode="printed")
    middle = middles(found, clients)  # known to about 1 / sqrt(6000) = 0.013
    # m = t (cos pi t, sin pi t) with t in (-1, 1]: |m| = |t|, and the sign of t is that of m_x cos(pi t).
    reach = middle.norm(dim=1)
    assert float(reach.max()) < 1.05
    torch.testing.assert_close(middle[:, 1], reach * (math.pi * reach).sin(), rtol=0, atol=0.2)
    assert scatter(found.x.view(clients, 2, -1, 2)) == pytest.approx(2.0, abs=0.02)
    t = reach * middle[:, 0].sign() * (math.pi * reach).cos().sign()
    alike = (math.pi * (t[:, None] - t)).cos()
    upper = torch.ones(clients, clients).triu(1).bool()
    link = found.graph.weights.double()[upper]
    for part in (alike[upper] > 0.5, alike[upper] < -0.5, alike[upper].abs() < 0.5):
        assert part.sum() > 800
        expected = 0.5 + 0.5 * float(alike[upper][part].mean())
        assert float(link[part].mean()) == pytest.approx(expected, abs=0.06)


def test_printed_data_allow_no_classifier_beyond_a_normal_tail():
    # The best rule projects on m: its accuracy is Phi(|m|) <= Phi(1) = 84.1 %.
    found = synthetic(clients=20, per_class=3000, mode="printed")
    x, middle = found.x.double().view(20, 2, -1, 2), middles(found, 20)
    hits = torch.stack(((x[:, 0] @ middle[..., None] > 0), (x[:, 1] @ middle[..., None] < 0)))
    accuracy = hits.double().mean((0, 2, 3))
    expected = torch.from_numpy(norm.cdf(middle.norm(dim=1).numpy()))
    torch.testing.assert_close(accuracy, expected, rtol=0, atol=0.03)


def test_it_is_like_the_real_domains():
    folder = os.environ.get("KINFED_DATA")
    if not folder or not (Path(folder) / "dg60.npz").is_file():
        pytest.skip("needs dg60.npz in the folder named by KINFED_DATA")
    real = DATASETS["dg60"]()
    order = (real.client * 2 + real.y).argsort(stable=True)
    assert scatter(real.x[order].view(60, 2, 50, 2)) == pytest.approx(2 - 1 / math.expm1(0.5), abs=0.02)
    links = [float(synthetic(seed=s).graph.weights.sum()) / 2 for s in range(20)]
    assert min(links) - 60 < float(real.graph.weights.sum()) / 2 < max(links) + 60


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"mode": "other"}, "mode must be separable or printed; got 'other'"),
        ({"clients": 0}, "clients and per_class must be at least 1; got 0 and 50"),
        ({"per_class": 0}, "clients and per_class must be at least 1; got 60 and 0"),
    ],
)
def test_bad_settings(setting, message):
    with pytest.raises(UsageError, match=message):
        synthetic(**setting)
