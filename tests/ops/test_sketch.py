import pytest
import torch
from hypothesis import given, strategies as st
from small import random
from torch import nn

from kinfed.core.layout import Layout
from kinfed.core.seeding import key
from kinfed.ops import similarity, sketch
from kinfed.ops.mixing import mix, spread_lists
from kinfed.ops.similarity import inner_by_layer, inner_listed
from kinfed.ops.sketch import candidates, nearest, sketch_models

float64 = torch.float64


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def lists(rows, count, length, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(count, generator=draw)[:length] for _ in range(rows)])


@pytest.fixture(scope="module")
def layout():
    """Layers of 30 + 6 + 12 learned + 12 running and 14 entries."""
    return Layout.from_module(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))


@pytest.mark.parametrize("panel", [1, 40, 1 << 19])  # one list and 256 columns at a time, some, all
@pytest.mark.parametrize("layers", [0, 3])
def test_listed_mixtures_are_those_of_the_spread_relation(layout, monkeypatch, panel, layers):
    monkeypatch.setattr(similarity, "PANEL", panel)
    near, theta = lists(4, 7, 3), random(7, layout.size)
    weights = random(*([layers] if layers else []), 4, 3, seed=1)
    dense = spread_lists(weights, near, 7)
    assert dense.shape == (*weights.shape[:-1], 7)
    close(mix(weights, theta, layout, near), mix(dense, theta, layout))


@pytest.mark.parametrize("panel", [1, 40, 1 << 19])
def test_listed_products_are_the_dense_ones(layout, monkeypatch, panel):
    monkeypatch.setattr(similarity, "PANEL", panel)
    near, a, b = lists(4, 7, 3), random(4, layout.size, seed=1), random(7, layout.size)
    before = b.clone()
    inner, square = inner_listed(a, b, near, layout)
    close(inner, inner_by_layer(a, b, layout).gather(2, near.expand(3, -1, -1)))
    close(square, inner_by_layer(b, b, layout).diagonal(dim1=1, dim2=2)[:, near])
    assert torch.equal(b, before)


def test_columns_of_a_long_model_are_taken_in_turn(monkeypatch):
    monkeypatch.setattr(similarity, "PANEL", 300)
    layout = Layout.from_module(nn.Linear(999, 1))
    near, a, b = lists(2, 4, 2), random(2, 1000, seed=1), random(4, 1000)
    close(mix(random(2, 2), b, layout, near), mix(spread_lists(random(2, 2), near, 4), b, layout))
    close(inner_listed(a, b, near, layout)[0][0], (a @ b.T).gather(1, near), atol=1e-11)


@given(st.integers(2, 12), st.integers(1, 14), st.integers(1, 5), st.integers(0, 10_000))
def test_candidates_are_the_best_others(count, most, size, seed):
    keys, cohort = random(count, size, seed=seed), torch.randperm(count)[: 1 + count // 2]
    known = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.7
    found = candidates(keys[cohort], keys, cohort, most, known)
    assert found.shape == (len(cohort), min(most, count - 1))
    for own, row in zip(cohort.tolist(), found.tolist(), strict=True):
        others = [j for j in range(count) if j != own]
        best = sorted(others, key=lambda j, own=own: (bool(known[j]), float(keys[own] @ keys[j])), reverse=True)
        heard = [j for j in best[: len(row)] if known[j]]
        assert row[: len(heard)] == heard
        assert own not in row
        assert len(set(row)) == len(row)


def test_candidates_block_by_block(monkeypatch):
    keys, cohort = random(30, 4), torch.arange(30)
    everyone = torch.ones(30, dtype=torch.bool)
    whole = candidates(keys, keys, cohort, 5, everyone)
    monkeypatch.setattr(sketch, "BLOCK", 60)  # two clients at a time
    assert torch.equal(candidates(keys, keys, cohort, 5, everyone), whole)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 10_000))
def test_nearest_sketches_are_exact(count, most, seed):
    table, cohort = 1e3 + random(count, 5, seed=seed), torch.arange(count).flip(0)[: 1 + count // 2]
    near = nearest(table, cohort, most, torch.ones(count, dtype=torch.bool))
    assert near.shape == (len(cohort), min(most, count - 1) + 1)
    assert torch.equal(near[:, 0], cohort)
    squares = torch.cdist(table[cohort], table, compute_mode="donot_use_mm_for_euclid_dist").square()
    close(squares.gather(1, near), squares.sort(1).values[:, : near.shape[1]], atol=1e-9)


def test_sketches_look_at_learned_entries_alone(layout):
    theta, draw = random(3, layout.size), key(1, "test")
    learned = layout.trainable
    moved = torch.where(learned, theta, theta + 1)
    assert torch.equal(sketch_models(moved, draw, layout), sketch_models(theta, draw, layout))
    assert layout.size < sketch.SIZE  # then nothing is lost
    found = sketch_models(theta, draw, layout)
    close(found @ found.T, theta[:, learned] @ theta[:, learned].T)
