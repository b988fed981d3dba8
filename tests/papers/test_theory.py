import pytest
import torch
from hypothesis import given, strategies as st

from kinfed.errors import UsageError
from kinfed_papers.panacea.theory import (
    best_rank,
    mean_aggregation,
    measure_residual,
    risk_with_graph,
    risk_without_graph,
    simulate,
)

float64 = torch.float64


def path(n):
    ones = torch.ones(n - 1)
    return torch.diag(ones, 1) + torch.diag(ones, -1)


def star(n):
    a = torch.zeros(n, n)
    a[0, 1:] = a[1:, 0] = 1
    return a


def cycle(n):
    a = path(n)
    a[0, -1] = a[-1, 0] = 1
    return a


def clique(n):
    return 1 - torch.eye(n)


def empty(n):
    return torch.zeros(n, n)


@st.composite
def graphs(draw, least=2, most=7):
    n = draw(st.integers(least, most))
    upper = torch.tensor(draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))).view(n, n).triu(1)
    return (upper | upper.T).double()


R = {  # r(G, m) for m = 1 and 2
    (path, 4, 1): (0.083333, 0.416667),
    (path, 4, 2): (0.002660, 0.052974),
    (path, 4, 3): (0.000078, 0.002510),
    (star, 7, 1): (0.072886, 0.366497),
    (star, 7, 2): (0.015059, 0.091914),
    (star, 7, 3): (0.001636, 0.020798),
    (cycle, 5, 1): (0.090909, 0.305556),
    (cycle, 5, 2): (0.004405, 0.022877),
    (cycle, 5, 3): (0.000191, 0.001085),
    (clique, 5, 1): (0, 0),
    (clique, 5, 2): (0, 0),
    (clique, 5, 3): (0, 0),
    (empty, 5, 1): (1, 2),
    (empty, 5, 3): (1, 2),
}


@pytest.mark.parametrize(("case", "expected"), R.items())
def test_r_by_hand(case, expected):
    graph, n, layers = case
    g = mean_aggregation(graph(n), layers)
    assert [measure_residual(g, m) for m in (1, 2)] == pytest.approx(expected, abs=6e-7)
    assert measure_residual(g, 0) == 0


def test_aggregation_by_hand():
    expected = [[1 / 2, 1 / 3, 0, 0], [1 / 2, 1 / 3, 1 / 3, 0], [0, 1 / 3, 1 / 3, 1 / 2], [0, 0, 1 / 3, 1 / 2]]
    g = mean_aggregation(path(4))
    torch.testing.assert_close(g, torch.tensor(expected, dtype=float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(mean_aggregation(path(4), 3), g @ g @ g, rtol=0, atol=1e-15)
    # With clients in columns it takes means of embeddings.
    v = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=float64)
    torch.testing.assert_close((v @ g)[:, 1], v[:, :3].mean(1), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("n", "hub", "r"), [(7, 1.520408, 0.342466), (12, 2.756944, 0.531915)])
def test_the_printed_orientation_breaks_its_own_properties(n, hub, r):
    printed, ours = mean_aggregation(star(n), printed=True), mean_aggregation(star(n))
    assert float(printed[:, 0].square().sum()) == pytest.approx(hub, abs=1e-6)  # more than one: Property III.3 fails
    assert measure_residual(printed, 1) == pytest.approx(r, abs=1e-6)
    assert float(ours[:, 0].square().sum()) == pytest.approx(1 / n, abs=1e-15)
    if n == 7:
        sums = torch.tensor([3.142857] + [0.642857] * 6, dtype=float64)
        torch.testing.assert_close(printed.sum(0), sums, rtol=0, atol=1e-6)


@given(graphs(), st.integers(1, 3), st.data())
def test_lemma(adjacency, layers, data):
    n = len(adjacency)
    g, m = mean_aggregation(adjacency, layers), data.draw(st.integers(1, n - 1))
    assert (g >= 0).all()
    assert (g <= 1 + 1e-12).all()
    torch.testing.assert_close(g.sum(0), torch.ones(n, dtype=float64), rtol=0, atol=1e-12)
    norms = g.square().sum(0)
    assert (norms >= 1 / n - 1e-12).all()
    assert (norms <= 1 + 1e-12).all()
    r, lost, rest = measure_residual(g, m), g[:, :m], g[:, m:]
    assert -1e-12 <= r <= m + 1e-12
    # The distance from a span does not need a pseudo-inverse.
    found = torch.linalg.lstsq(rest, lost, driver="gelsd").solution
    assert r == pytest.approx(float((lost - rest @ found).square().sum()), abs=1e-10)
    alone = not adjacency[:m].any()
    assert (abs(r - m) < 1e-9) == alone
    if not alone:
        assert r < m - 1e-3
    assert risk_with_graph(g, 0, n + 1, 1) == 0


@given(graphs(3, 7), st.integers(1, 3), st.data())
def test_a_graph_never_raises_the_risk(adjacency, layers, data):
    n = len(adjacency)
    k = data.draw(st.integers(1, n - 1))
    m = data.draw(st.integers(0, n - k))
    g = mean_aggregation(adjacency, layers)
    for consistent in (False, True):
        assert risk_with_graph(g, m, n + 2, k, consistent) <= risk_without_graph(n, m, n + 2, k) + 1e-9


@pytest.mark.parametrize(
    ("layers", "printed", "corrected"), [(1, 3.388889, 3.138889), (2, 0.466049, 0.261574), (3, 0.026384, 0.013379)]
)
def test_risks_by_hand(layers, printed, corrected):
    g = mean_aggregation(path(6), layers)
    assert risk_with_graph(g, 2, 8, 3) == pytest.approx(printed, abs=6e-7)
    assert risk_with_graph(g, 2, 8, 3, consistent=True) == pytest.approx(corrected, abs=6e-7)
    assert risk_without_graph(6, 2, 8, 3) == 16


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("graph", [path, star, cycle, clique, empty])
def test_closed_forms_agree_with_simulation(graph, consistent):
    g = mean_aggregation(graph(6))
    found = simulate(g, 2, 8, 3, draws=4000, seed=1, consistent=consistent)
    expected = risk_with_graph(g, 2, 8, 3, consistent)
    assert abs(found.mean - expected) <= 4 * found.error + 1e-12
    if graph is empty:
        assert expected == pytest.approx(risk_without_graph(6, 2, 8, 3), abs=1e-12)
    if graph is clique:
        assert found.mean < 1e-20


def test_a_graph_of_full_rank_has_the_same_optimum():
    draw = torch.Generator().manual_seed(2)
    theta = torch.randn(7, 5, generator=draw, dtype=float64)
    tail = torch.linalg.svdvals(theta)[2:].square().sum()
    for graph in (empty, cycle, star):
        g = mean_aggregation(graph(5))
        w, v = best_rank(theta, g, 2)
        assert (w.shape, v.shape) == ((7, 2), (2, 5))
        torch.testing.assert_close((theta - w @ v @ g).square().sum(), tail, rtol=0, atol=1e-12)
        for _ in range(20):  # and nobody does better
            other = torch.randn(7, 2, generator=draw, dtype=float64)
            best = torch.linalg.lstsq(other, theta).solution  # of V G for this W
            assert (theta - other @ best).square().sum() >= tail
    for graph in (clique, path):  # 1 + 2 cos(4 pi / 6) = 0 is an eigenvalue of the path
        with pytest.raises(UsageError, match="full rank"):
            best_rank(theta, mean_aggregation(graph(5)), 2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: mean_aggregation(torch.ones(2, 3)),
        lambda: mean_aggregation(torch.tensor([[0.0, 1.0], [0.0, 0.0]])),
        lambda: mean_aggregation(0.5 * clique(3)),
        lambda: mean_aggregation(path(3), 0),
        lambda: measure_residual(mean_aggregation(path(3)), 3),
        lambda: measure_residual(mean_aggregation(path(3)), -1),
        lambda: risk_without_graph(6, 4, 8, 3),
        lambda: risk_without_graph(8, 1, 8, 3),
        lambda: risk_with_graph(mean_aggregation(path(4)), 1, 8, 4),
        lambda: simulate(mean_aggregation(path(4)), 1, 4, 2),
    ],
)
def test_refuses(wrong):
    with pytest.raises(UsageError):
        wrong()
