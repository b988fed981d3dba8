import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.optimize import minimize
from small import random
from torch import nn
from torch.func import vjp

from kinfed.core.layout import Layout
from kinfed.core.rows import blank, put, take
from kinfed.ops import mixing, similarity
from kinfed.ops.mixing import add_rows, mix, weighted_mean
from kinfed.ops.similarity import cosine, gram, inner, inner_by_layer
from kinfed.ops.sparsify import largest, project_simplex, sort_rows

float64 = torch.float64
rows_of_numbers = st.lists(st.floats(-5, 5), min_size=1, max_size=8)


def close(found, expected, atol=1e-13):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def layout():
    """Two linear layers around a norm, which has running statistics beside what it learns."""
    return Layout.from_module(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)))


def test_put_replaces_rows_of_a_copy():
    table, rows = torch.zeros(4, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    after = put(table, torch.tensor([3, 1]), rows)
    assert after.tolist() == [[0, 0], [3, 4], [0, 0], [1, 2]]
    assert (table == 0).all()


def test_put_of_everyone_is_the_rows_and_of_a_permutation_is_not():
    table, rows = torch.zeros(3, 2), torch.arange(6.0).view(3, 2)
    assert put(table, torch.arange(3), rows) is rows
    assert put(table, torch.tensor([2, 0, 1]), rows).tolist() == [[2, 3], [4, 5], [0, 1]]
    assert put(torch.zeros(3), torch.tensor([2]), torch.tensor([7.0])).tolist() == [0, 0, 7]


@pytest.mark.parametrize("width", [2, 1 << 20])  # the wide table is new memory in large pages
def test_put_and_take_of_any_width_leave_the_table_alone(width):
    table = torch.arange(4.0)[:, None].repeat(1, width)
    assert take(table, torch.arange(4)) is table
    cohort = torch.tensor([3, 1])
    assert torch.equal(take(table, cohort), table[cohort])
    after = put(table, cohort, -take(table, cohort))
    assert after[:, 0].tolist() == after[:, -1].tolist() == [0, -1, 2, -3]
    assert table[:, 0].tolist() == [0, 1, 2, 3]
    assert torch.equal(take(torch.tensor([True, False, True]), torch.tensor([2, 1])), torch.tensor([True, False]))


@pytest.mark.parametrize("dtype", [torch.float32, float64, torch.float16])
def test_new_tables_begin_where_products_round_alike(dtype):
    for count in (2, 3 << 20):
        table = blank(count, torch.zeros(5, 2, dtype=dtype))
        assert table.shape == (count, 2)
        assert table.dtype == dtype
        assert table.is_contiguous()
        assert table.data_ptr() % 64 == 0


def test_memory_is_used_again_only_when_nothing_lies_in_it():
    like = torch.zeros(1, 3 << 20)
    table = blank(1, like).fill_(1)
    view, beside = table[:, 5:9], blank(1, like).fill_(2)
    assert table.data_ptr() != beside.data_ptr()
    where = table.data_ptr()
    del table
    assert blank(1, like).fill_(3).data_ptr() != where  # what is seen through a view is not gone
    assert view.tolist() == [[1, 1, 1, 1]]
    del view
    again = [blank(1, like).fill_(value) for value in (4, 5, 6)]
    assert where in [one.data_ptr() for one in again]
    assert [one[0, 0].item() for one in again] == [4, 5, 6]
    assert beside[0, 0] == 2


def test_large_tables_within_a_gradient():
    table, cohort = random(4, 1 << 20), torch.tensor([3, 1])
    rows, pull_back = vjp(lambda weights: weights @ take(table, cohort), torch.eye(2, dtype=float64))
    assert torch.equal(rows, table[cohort])
    close(pull_back(table[cohort])[0], table[cohort] @ table[cohort].T, atol=1e-8)


def test_weighted_mean_by_hand():
    theta = torch.tensor([[1.0, 2.0], [5.0, 6.0]], dtype=float64)
    assert weighted_mean(theta, torch.tensor([100, 300])).tolist() == [4, 5]
    # Counts are integers; thirds must be thirds in the models' own type.
    thirds = weighted_mean(torch.eye(3, dtype=float64), torch.tensor([1, 1, 1]))
    close(thirds, torch.full((3,), 1 / 3, dtype=float64), atol=1e-16)
    assert weighted_mean(torch.eye(3), torch.tensor([1, 1, 1])).dtype == torch.float32


def test_rows_add_up_whichever_are_read(monkeypatch):
    theta, weights = random(30, 5), random(30, seed=1) * (torch.arange(30) % 5 == 0)
    close(add_rows(weights, theta), (weights[:, None] * theta).sum(0))
    monkeypatch.setattr(mixing, "WORTH", 0)
    theta = torch.where(weights[:, None] == 0, torch.nan, theta)  # so that what is read shows
    close(add_rows(weights, theta), (weights[:, None] * theta.nan_to_num()).sum(0))


def test_mix_with_one_relation_is_a_matrix_product(layout):
    weights, theta = random(2, 4), random(4, layout.size)
    expected = torch.stack([sum(weights[k, j] * theta[j] for j in range(4)) for k in range(2)])
    close(mix(weights, theta, layout), expected)


def test_mix_by_layer_is_a_loop_over_tensors(layout):
    weights, theta = random(3, 2, 4), random(4, layout.size)
    found = mix(weights, theta, layout)
    place = {"0": 0, "1": 1, "2": 2}
    for k in range(2):
        for entry in layout.entries:  # every entry, statistics too, goes with its own layer's relation
            row = weights[place[entry.name.split(".")[0]], k]
            close(found[k, entry.at], sum(row[j] * theta[j, entry.at] for j in range(4)))


def test_inner_products_by_layer_are_over_learned_entries(layout):
    a, b = random(2, layout.size), random(4, layout.size, seed=1)
    found = inner_by_layer(a, b, layout)
    assert found.shape == (3, 2, 4)
    for r, name in enumerate("012"):
        entries = [e for e in layout.entries if e.name.split(".")[0] == name and e.trainable]
        for k in range(2):
            for j in range(4):
                expected = sum(float(a[k, e.at] @ b[j, e.at]) for e in entries)
                assert float(found[r, k, j]) == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("shape", [(2, 4), (3, 2, 4)])
def test_mixtures_can_be_differentiated(layout, shape):
    weights, theta = random(*shape).requires_grad_(), random(4, layout.size, seed=1).requires_grad_()
    torch.testing.assert_close(mix(weights, theta, layout).detach(), mix(weights.detach(), theta.detach(), layout))
    torch.autograd.gradcheck(lambda w, t: mix(w, t, layout), (weights, theta))
    _, pull_back = torch.func.vjp(lambda w: mix(w, theta.detach(), layout), weights.detach())
    toward = random(shape[-2], layout.size, seed=2)
    (expected,) = torch.autograd.grad((mix(weights, theta, layout) * toward).sum(), weights)
    close(pull_back(toward)[0], expected)


@pytest.mark.parametrize("count", [1, 5, similarity.BLOCK, similarity.BLOCK + 1, 3 * similarity.BLOCK, 200])
def test_inner_products_of_a_table_with_itself(count):
    table = random(count, 7)
    close(inner(table, table), inner(table, table.clone()))
    assert not torch.equal(inner(table, table.flip(0)), inner(table, table)) or count == 1


def test_cosine_against_torch():
    theta = random(5, 7)
    expected = torch.cosine_similarity(theta[:, None], theta[None], dim=2)
    close(cosine(theta @ theta.T), expected)
    close(cosine((theta @ theta.T).expand(3, 5, 5)), expected.expand(3, 5, 5))


def test_cosine_beside_a_zero_vector_is_zero():
    theta = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-6.0, -8.0], [1e-9, 0.0]], dtype=float64)
    expected = torch.tensor([[1, 0, -1, 0.6], [0, 0, 0, 0], [-1, 0, 1, -0.6], [0.6, 0, -0.6, 1]], dtype=float64)
    close(cosine(theta @ theta.T), expected)  # a short vector is none of zeros


def test_cosine_of_some_rows_against_torch():
    theta, cohort = random(5, 7), torch.tensor([3, 0])
    length = theta.norm(dim=1)
    expected = torch.cosine_similarity(theta[cohort][:, None], theta[None], dim=2)
    close(cosine(theta[cohort] @ theta.T, length[cohort], length), expected)


def test_cosine_stays_in_range():
    theta = torch.rand(50, 3, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    found = cosine(theta @ theta.T)
    assert found.max() <= 1
    assert found.min() >= -1


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 10_000))
def test_gram_against_products_and_cdist(count, size, seed):
    theta = random(count, size, seed=seed)
    found = gram(theta)
    close(found.inner, theta @ theta.T)
    apart = torch.cdist(theta, theta, compute_mode="donot_use_mm_for_euclid_dist").square()
    close(found.distances, apart, atol=1e-12)
    assert (found.distances.diagonal() == 0).all()


@pytest.mark.parametrize("count", [3, 150])
def test_gram_part_by_part(monkeypatch, count):
    monkeypatch.setattr(similarity, "PANEL", 1)  # panels of 4096 numbers a client
    theta = random(count, 9000)
    whole = gram(theta)
    close(whole.inner, theta @ theta.T, atol=1e-9)
    for found, expected in zip(gram(part for part in theta.split([1, 8000, 999], 1)), whole, strict=True):
        close(found, expected, atol=1e-9)
    assert torch.equal(whole.distances, whole.distances.T)
    # Float32 vectors by float64 products are exact.
    single = gram([theta.float()], float64)
    close(single.inner, gram(theta.float().double()).inner, atol=1e-9)
    assert single.centred.dtype == float64
    with pytest.raises(ValueError, match="at least one part"):
        gram(part for part in ())


def test_distances_far_from_the_origin():
    # In float32 a Gram matrix around 1e4 has no digit left for distances of a few units.
    theta = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]]) + 1e4
    expected = np.array([[0, 1, 4], [1, 0, 5], [4, 5, 0]])
    assert gram(theta).distances.tolist() == pytest.approx(expected, abs=1e-5)


def test_simplex_by_hand():
    # A descent step of 0.01 from thirds along [[1, 1, 0], [1, -2, 6], [7, 7, -6]] / 3, then back to the simplex.
    slope = torch.tensor([[1.0, 1.0, 0.0], [1.0, -2.0, 6.0], [7.0, 7.0, -6.0]], dtype=float64) / 3
    expected = [[0.332222, 0.332222, 0.335556], [0.335556, 0.345556, 0.318889], [0.318889, 0.318889, 0.362222]]
    close(project_simplex(1 / 3 - 0.01 * slope), torch.tensor(expected, dtype=float64), atol=1e-6)
    assert project_simplex(torch.tensor([[2.0, 0.0], [0.5, 0.5], [-1.0, -3.0]])).tolist() == [
        [1, 0],
        [0.5, 0.5],
        [1, 0],
    ]


def test_simplex_against_a_quadratic_programme():
    for seed in range(5):
        row = 0.5 * random(6, seed=seed).numpy()
        solved = minimize(
            lambda w, row=row: ((w - row) ** 2).sum(),
            np.full(6, 1 / 6),
            jac=lambda w, row=row: 2 * (w - row),
            bounds=[(0, None)] * 6,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
            options={"ftol": 1e-15},
        )
        assert solved.success
        close(project_simplex(torch.from_numpy(row)), torch.from_numpy(solved.x), atol=1e-7)


@given(rows_of_numbers)
def test_simplex_is_reached_by_one_common_shift(row):
    # The optimality conditions: w = max(row - tau, 0) for one tau, non-negative, summing to one.
    row = torch.tensor(row, dtype=float64)
    found = project_simplex(row)
    assert (found >= 0).all()
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    tau = (row - found)[found > 0]
    close(tau, tau[:1].expand_as(tau), atol=1e-12)
    assert (row[found == 0] <= tau[0] + 1e-12).all()
    close(project_simplex(found), found, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, float64])
def test_simplex_of_huge_numbers(dtype):
    rows = torch.tensor([[1e20, 0.0, -1e20], [1e9, 1e9, 0.0]], dtype=dtype)
    assert project_simplex(rows).tolist() == [[1, 0, 0], [0.5, 0.5, 0]]


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(1, 7))
def test_the_largest_of_a_row_and_of_equals_the_first(rows, count):
    found = largest(torch.tensor(rows, dtype=float64), count)
    for row, kept in zip(rows, found, strict=True):
        best = sorted(range(5), key=lambda j, row=row: (-row[j], j))[:count]
        assert kept.nonzero().flatten().tolist() == sorted(best)


def test_rows_are_sorted_as_by_either_library():
    rows = random(3, 50).masked_fill(random(3, 50, seed=1) < 0, -torch.inf)
    rows[:, ::7] = rows[:, :1]
    with_grad = rows.clone().requires_grad_()
    assert torch.equal(sort_rows(rows), rows.sort(dim=-1, descending=True).values)
    assert torch.equal(sort_rows(rows), sort_rows(with_grad))
    finite = random(3, 50)
    assert torch.equal(project_simplex(finite), project_simplex(finite, torch.ones(3, 50)))
    assert torch.equal(project_simplex(finite), project_simplex(finite.requires_grad_()))
