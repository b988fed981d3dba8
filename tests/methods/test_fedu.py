import pytest
import torch

from kinfed.core.graph import Graph
from kinfed.methods import FedU
from kinfed.methods.fedu import links


def trial(bowls, method, weights, b, **how):
    found = bowls(method, b, **how)
    graph = None if weights is None else Graph(torch.tensor(weights, dtype=torch.float64), "given")
    found.roster = found.fleet.roster(graph)
    return found


def test_one_round_by_hand(bowls, executor):
    """From 0 a step of 0.1 on (w - b)^2 / 2 gives 0.1 b; then each goes 0.1 * 1 * 0.5 a of the way to the other's."""
    found = trial(bowls, FedU(pull=0.5), [[9, 2], [2, 9]], [1.0, 3.0], executor=executor)
    server = found.run(1)
    torch.testing.assert_close(found.own.flatten(), torch.tensor([0.1, 0.3], dtype=torch.float64))
    torch.testing.assert_close(server.theta.flatten(), torch.tensor([0.12, 0.28], dtype=torch.float64))


def test_it_reaches_a_fixed_point_near_the_optimum_of_the_objective(bowls):
    """Of sum_k (w_k - b_k)^2 / 2 + eta (w_1 - w_2)^2 / 2: the w have the sum of the b, and 1 / (1 + 2 eta) = 1 / 2 of
    their difference, 2. Steps l on the two terms alternate: d = (1 - 2 l eta) ((1 - l) d + l 2), so d = 0.18 / 0.19.
    """
    server = trial(bowls, FedU(pull=0.5), [[0, 1], [1, 0]], [1.0, 3.0], every=200).run(200)
    low, high = server.theta.flatten().tolist()
    assert (low + high, high - low) == pytest.approx((4, 0.18 / 0.19), abs=1e-8)


def test_only_neighbours_of_the_round_pull(bowls):
    """Two of three clients a round: who is absent keeps its model, and pulls nobody."""
    chain = [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    found = trial(bowls, FedU(pull=0.5), chain, [1.0, 3.0, 5.0])
    server = found.run(1, participation=0.67)
    cohort = server.present.nonzero().flatten().tolist()
    assert len(cohort) == 2
    a, b = cohort
    moved = {0: 0.1, 1: 0.3, 2: 0.5}
    way = 0.05 * chain[a][b] * (moved[b] - moved[a])
    expected = torch.zeros(3, dtype=torch.float64)
    expected[a], expected[b] = moved[a] + way, moved[b] - way
    torch.testing.assert_close(server.theta.flatten(), expected)


def test_without_a_graph_all_are_linked_and_without_a_pull_it_is_local(bowls, roster):
    assert links(roster(3)).tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    alone = trial(bowls, FedU(pull=0.0), None, [1.0, 3.0])
    server = alone.run(2)
    assert torch.equal(server.theta, server.uploads)
    assert alone.method.origin_of(alone.roster) == "fixed"


def test_a_pull_past_the_neighbours_is_warned_of(bowls):
    found = trial(bowls, FedU(pull=30.0), [[0, 1], [1, 0]], [1.0, 3.0])
    with pytest.warns(UserWarning, match="fedu: a step of the pull is 3 times the way"):
        found.run(1)
