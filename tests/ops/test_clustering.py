import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st
from small import random

from kinfed.ops import clustering
from kinfed.ops.clustering import _seeds, count_distinct, distances, kmeans
from kinfed.ops.similarity import gram

float64 = torch.float64


def lots(restarts, count, size, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(restarts, count, size, generator=draw, dtype=float64).clamp(min=1e-9)


def found(points, count, seed=0):
    return kmeans(distances(gram(points)), count, lots(10, count, len(points), seed))


def best(points, count, cost):
    """The least total cost over all partitions into `count` clusters."""
    least = math.inf
    for labels in itertools.product(range(count), repeat=len(points)):
        if len(set(labels)) == count:
            parts = [points[torch.tensor(labels) == c] for c in range(count)]
            least = min(least, sum(map(cost, parts)))
    return least


def squares(part):
    return float((part - part.mean(0)).square().sum())


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 1000))
def test_distances_add_up_over_parts(count, parts, seed):
    pieces = [random(count, 2 + i, seed=seed + i) for i in range(parts)]
    whole = torch.cdist(torch.cat(pieces, 1), torch.cat(pieces, 1)).square()
    torch.testing.assert_close(distances(gram(iter(pieces))), whole, rtol=1e-9, atol=1e-12)


def test_distances_keep_their_digits_far_from_the_origin():
    points = random(6, 50)
    moved = (points + 1e4).float()  # the models of a round resemble each other more than zero
    expected = torch.cdist(moved.double(), moved.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    torch.testing.assert_close(distances(gram(moved, float64)), expected, rtol=1e-9, atol=1e-9)


def test_points_closer_than_rounding_are_identical():
    apart = distances(gram(torch.tensor([[0.0], [1e-8], [1e-3], [1.0]], dtype=float64)))
    assert count_distinct(apart) == 3
    assert apart[0, 1] == 0
    assert apart[0, 2] == pytest.approx(1e-6)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 1000))
def test_identical_points_are_counted_once(which, seed):
    points = random(5, 3000, seed=seed)[which].float()
    apart = distances(gram(points, float64))
    same = torch.tensor(which)[:, None] == torch.tensor(which)
    assert torch.equal(apart == 0, same)
    assert count_distinct(apart) == len(set(which))


@pytest.mark.parametrize("seed", range(6))
def test_small_problems_are_solved(seed):
    points, count = random(3 + seed % 5, 2, seed=seed), 1 + seed % 3
    clusters = kmeans(distances(gram(points)), count, lots(30, count, len(points), seed))
    assert float(clusters.distance.square().sum()) == pytest.approx(best(points, count, squares), abs=1e-12)


@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 10_000))
def test_clusters_are_whole_and_centres_in_their_middle(size, count, seed):
    points, count = random(size, 3, seed=seed), min(count, size)
    clusters = found(points, count, seed)
    assert sorted(set(clusters.label.tolist())) == list(range(count))
    inside = torch.nn.functional.one_hot(clusters.label, count).T
    assert (clusters.weights >= 0).all()
    assert (clusters.weights[inside == 0] == 0).all()
    torch.testing.assert_close(clusters.weights.sum(1), torch.ones(count, dtype=float64))
    centre = clusters.weights @ points
    torch.testing.assert_close(clusters.distance, (points - centre[clusters.label]).norm(dim=1), rtol=1e-6, atol=1e-7)
    for k in range(count):
        part = points[clusters.label == k]
        torch.testing.assert_close(centre[k], part.mean(0), rtol=0, atol=1e-12)


def test_an_empty_cluster_takes_the_farthest_point_that_is_not_alone():
    # All are nearest to centre 0 but one, alone at centre 1 and farther from it than any other from centre 0.
    square = torch.tensor([[[1.0, 4.0, 2.0, 50.0], [70.0, 70.0, 70.0, 9.0], [80.0, 80.0, 80.0, 80.0]]])
    assert clustering._assign(square).tolist() == [[0, 2, 0, 1]]
    square = torch.tensor([[[1.0, 4.0, 2.0]], [[5.0, 4.0, 3.0]]]).expand(2, 3, 3) + torch.tensor([0.0, 10, 10])[:, None]
    assert clustering._assign(square).tolist() == [[0, 1, 2], [1, 2, 0]]


def test_seeds_are_drawn_in_proportion_to_squared_distance():
    points = torch.tensor([[0.0], [1.0], [3.0]], dtype=float64)
    many = 60_000
    square = _seeds(distances(gram(points)), lots(many, 2, 3))
    first, second = ((square[:, k] == 0).int().argmax(1) for k in range(2))
    share = torch.zeros(3, 3, dtype=float64).index_put((first, second), torch.tensor(1 / many, dtype=float64), True)
    expected = torch.tensor([[0, 1 / 10, 9 / 10], [1 / 5, 0, 4 / 5], [9 / 13, 4 / 13, 0]], dtype=float64) / 3
    torch.testing.assert_close(share, expected, rtol=0, atol=0.008)  # four deviations


def test_seeds_never_repeat_an_identical_point():
    points = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1e-4]], dtype=float64)
    square = _seeds(distances(gram(points)), lots(200, 2, 5))
    assert (square.amax(2).gt(0)).all()
    assert (square[:, 0] != square[:, 1]).all()


@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_order_means_nothing_if_the_lots_move_along(size, count, seed, shuffle):
    points, count = random(size, 3, seed=seed), min(count, size)
    order = list(range(size))
    shuffle.shuffle(order)
    drawn = lots(10, count, size, seed)
    plain = kmeans(distances(gram(points)), count, drawn)
    moved = kmeans(distances(gram(points[order])), count, drawn[:, :, order])
    assert torch.equal(plain.label[order], moved.label)
    torch.testing.assert_close(plain.weights[:, order], moved.weights)
