"""Weights of lists and of senders, and how relations of the nearest follow from a comparison."""

from functools import partial

import pytest
import torch
from small import random
from torch import nn

from kinfed.core.layout import Layout
from kinfed.core.rows import take
from kinfed.ops.sketch import SPARE
from kinfed.relations import Cosine, Distance, Everyone, Nearest, Softmax, Weights, relate

float64 = torch.float64


@pytest.fixture
def layout():
    """Two layers, the first with running statistics."""
    return Layout.from_module(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))


@pytest.mark.parametrize("layers", [(), (2,)])
def test_lists_and_the_whole_relation_mix_alike(layout, layers):
    near, theta = torch.tensor([[2, 0], [1, 3], [3, 4]]), random(5, layout.size)
    rows = random(*layers, 3, 2, seed=1).softmax(-1)
    listed = Weights(rows, near)
    whole = Weights(listed.dense(5))
    assert whole.rows.shape == (*layers, 3, 5)
    assert torch.equal(whole.dense(5), whole.rows)
    torch.testing.assert_close(listed.mix(theta, layout), whole.mix(theta, layout), rtol=0, atol=1e-14)
    if not layers:
        by_hand = torch.stack([w[0] * theta[i] + w[1] * theta[j] for w, (i, j) in zip(rows, near, strict=True)])
        torch.testing.assert_close(listed.mix(theta, layout), by_hand, rtol=0, atol=1e-14)


def test_negative_weights_extrapolate_what_is_learned_alone(layout):
    theta = random(2, layout.size).abs()
    mixed = Weights(torch.tensor([[1.5, -0.5]], dtype=float64), torch.tensor([[1, 0]])).mix(theta, layout)
    expected = torch.where(layout.trainable, 1.5 * theta[1] - 0.5 * theta[0], theta[1])  # the nearest weights: 1 and 0
    torch.testing.assert_close(mixed[0], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("layers", [0, 2])
def test_of_senders_alone_the_others_have_no_weight(layout, layers):
    senders, theta = torch.tensor([4, 1]), random(5, layout.size)
    rows = random(*([layers] if layers else []), 3, 2, seed=1).softmax(-1)
    weights = Weights(rows, senders=senders)
    dense = torch.zeros(*rows.shape[:-1], 5, dtype=float64).index_copy(-1, senders, rows)
    assert torch.equal(weights.dense(5), dense)
    torch.testing.assert_close(weights.mix(theta, layout), Weights(dense).mix(theta, layout), rtol=0, atol=1e-14)
    listed = Weights(rows[..., :1], torch.tensor([[1], [0], [1]]), senders)
    assert torch.equal(listed.dense(5).reshape(-1, 3, 5)[0].argmax(1), torch.tensor([1, 4, 1]))


@pytest.mark.parametrize("spread", [0.5, 1.0])
def test_lists_have_the_nearest_where_there_are_families(roster, spread):
    """500 models in 50 families of 10, far from the origin, whose members differ by half as much as families do."""
    known, k = roster(500, size=3000), 9
    families = random(50, 3000, seed=1).repeat(10, 1) if spread < 1 else 0
    vectors = 10 + random(1, 3000) + families + spread * random(500, 3000, seed=2)
    mass = torch.ones(500, dtype=float64)
    near = relate(Distance(), Softmax(), Nearest(k), known, partial(take, vectors), mass, known.everyone).weights.near
    assert torch.equal(near[:, 0], known.everyone)
    true = torch.cdist(vectors, vectors).fill_diagonal_(torch.inf).topk(k, largest=False).indices
    recall = (near[:, 1:, None] == true[:, None]).any(2).double().mean()
    # With families no nearer than anyone else there is nothing to find, and a sketch of 512 numbers finds little.
    assert recall > (0.99 if spread < 1 else 2 * SPARE * k / 499)


def test_what_is_compared_ranks_those_that_sketches_propose(roster):
    known = roster(5, size=1)
    vectors = torch.tensor([[0.0], [1.0], [2.5], [9.0], [8.0]], dtype=float64)
    relation = relate(
        Distance(), Softmax(), Nearest(1), known, partial(take, vectors), vectors[:, 0] * 0 + 1, torch.tensor([0, 3])
    )
    assert relation.weights.near.tolist() == [[0, 1], [3, 4]]
    assert relation.similarity.tolist() == [[[0, -1], [0, -1]]]


@pytest.mark.parametrize("among", [Everyone(), Nearest(3)])
def test_models_of_other_lengths_mix_as_a_table_of_them_would(roster, among):
    known, theta, scale = roster(90, size=12), random(90, 12), random(90, seed=1).exp()
    mass = torch.arange(90, dtype=float64)
    weights = relate(Distance(), Softmax(9.0), among, known, partial(take, theta), mass, known.everyone[::7]).weights
    mixed, layout = weights.mix(theta, known.layout, scale), known.layout
    torch.testing.assert_close(mixed, weights.dense(90) @ (scale[:, None] * theta), rtol=0, atol=1e-13)
    torch.testing.assert_close(mixed, weights.mix(scale[:, None] * theta, layout), rtol=0, atol=1e-13)


@pytest.mark.parametrize("some", [[0, 3, 8, 9], [3, 9], [8]])
def test_lists_of_who_counts_nothing_change_no_other(roster, some):
    known, theta = roster(200, size=12), random(200, 12)
    mass, cohort = 1.0 * (known.everyone % 2 == 0), torch.tensor(some)
    heard = mass[cohort] > 0

    def find(ids):
        return relate(Cosine(), Softmax(), Nearest(3), known, partial(take, theta), mass, ids)

    found, expected = find(cohort), find(cohort[heard])
    assert torch.equal(found.unheard, ~heard)
    assert not found.weights.rows[~heard].any()
    some_of_them = found.weights.rows_of(heard.nonzero().squeeze(1))
    assert torch.equal(some_of_them.near, expected.weights.near)
    assert torch.equal(some_of_them.mix(theta, known.layout), expected.weights.mix(theta, known.layout))
