"""Of very many sketches each is compared with those of near cells alone: as good, and never all pairs."""

import pytest
import torch
from small import random

from kinfed.core.seeding import key, tags
from kinfed.ops import inverted_file, sketch
from kinfed.ops.inverted_file import Cells, gather_pools, renew_cells, start_cells
from kinfed.ops.sketch import draw_others, nearest

EVERYONE = torch.ones(3000, dtype=torch.bool)


@pytest.fixture
def many(monkeypatch):
    """Cells are used from 500 vectors on."""
    monkeypatch.setattr(inverted_file, "MANY", 500)
    monkeypatch.setattr(inverted_file, "POOL", 250)


def families(count, size, noise=1.0):
    """[count, 509] vectors in families of `size`, and [count] which."""
    label = torch.arange(count) % (count // size)
    return random(count // size, 509).float()[label] + noise * random(count, 509, seed=1).float(), label


def test_no_more_than_a_pool_is_looked_at_for_each():
    keys = families(10_000, 100)[0][:, :16]
    parts = [(rows, at) for rows, at, _ in gather_pools(keys, keys, torch.arange(10_000), 42, 1 << 24)]
    looked = sum(len(rows) * len(at) for rows, at in parts)
    assert 10_000 * inverted_file.POOL <= looked < 10_000 * 2 * inverted_file.POOL
    assert torch.equal(torch.cat([rows for rows, _ in parts]).sort().values, torch.arange(10_000))
    assert (
        max(len(rows) * len(at) for rows, at, _ in gather_pools(keys, keys, torch.arange(10_000), 42, 1 << 16))
        <= 1 << 16
    )


def test_members_of_a_family_are_found(many):
    vectors, label = families(3000, 30)
    near = nearest(vectors, torch.arange(0, 3000, 7), 20, EVERYONE)
    assert (label[near] == label[near[:, :1]]).float().mean() > 0.99


def test_identical_vectors_do_not_fill_a_pool_that_is_larger(many):
    vectors = torch.zeros(3000, 8)
    near = nearest(vectors, torch.arange(3000), 20, EVERYONE)
    assert all(len(row.unique()) == 21 for row in near)
    assert (
        max(len(at) for _, at, _ in gather_pools(vectors, vectors, torch.arange(3000), 22, 1 << 24))
        <= 2 * inverted_file.POOL
    )


def test_a_list_does_not_depend_on_who_else_is_asked(many):
    vectors, some = families(3000, 30)[0], torch.arange(5, 3000, 11)
    assert torch.equal(nearest(vectors, torch.arange(3000), 20, EVERYONE)[some], nearest(vectors, some, 20, EVERYONE))


def test_a_round_renews_the_cells_of_its_cohort_until_as_many_have_been_renewed_as_were_sorted(monkeypatch):
    monkeypatch.setattr(inverted_file, "MANY", 40)
    keys, cells, begins = torch.zeros(60, 4), start_cells(torch.zeros(60, 4)), []
    for t in range(25):
        ids, before = (torch.arange(10) + 10 * t) % 60, cells
        keys = keys.index_copy(0, ids, random(10, 4, seed=t).float())
        cells = renew_cells(cells, keys, ids)
        if cells.centres is not before.centres:
            begins.append((t, int(cells.due)))
            ids = (cells.home >= 0).nonzero().squeeze(1)
            assert len(cells.centres) in range(int(len(ids) ** 0.5), 2 * int(len(ids) ** 0.5))
        squares = torch.cdist(keys[ids], cells.centres, compute_mode="donot_use_mm_for_euclid_dist")
        assert torch.equal(cells.home[ids], squares.argmin(1))
        others = torch.ones(60, dtype=torch.bool).index_fill(0, ids, False)
        assert torch.equal(cells.home[others], before.home[others])
    # 50 have come after five rounds, all 60 five rounds of ten later, then every sixth round
    assert begins == [(4, 50), (9, 60), (15, 60), (21, 60)]


def test_lengths_do_not_count_by_cosine():
    keys = random(50, 5).float()
    near, far = (
        renew_cells(start_cells(table), table, torch.arange(50), by_cosine=True)
        for table in (keys, keys * torch.linspace(1, 9, 50)[:, None])
    )
    assert torch.equal(near.home, far.home)


def renewed_cells(vectors, every=200):
    """Kept cells, of which only every `every`-th vector was renewed since the centres were found for others."""
    former = vectors + random(*vectors.shape, seed=7).float() / 2
    cells, ids = renew_cells(start_cells(former), former, torch.arange(len(vectors))), torch.arange(0, 3000, every)
    return renew_cells(cells, former.index_copy(0, ids, vectors[ids]), ids)


def test_members_of_a_family_are_found_in_cells_that_are_kept(many):
    vectors, label = families(3000, 30)
    near = nearest(vectors, torch.arange(0, 3000, 7), 20, EVERYONE, renewed_cells(vectors))
    assert (label[near] == label[near[:, :1]]).float().mean() > 0.95


def test_cells_that_are_kept_are_not_sorted_again(many, monkeypatch):
    vectors, cohort = families(3000, 30)[0], torch.arange(0, 3000, 7)
    cells, expected = renewed_cells(vectors), nearest(vectors, cohort, 20, EVERYONE)
    lacking = Cells(cells.centres, cells.home.index_fill(0, torch.tensor([5]), -1), cells.due)
    assert torch.equal(nearest(vectors, cohort, 20, EVERYONE, lacking), expected)  # as if there were none
    monkeypatch.delattr(inverted_file, "sort_keys")
    assert nearest(vectors, cohort, 20, EVERYONE, cells).shape == expected.shape
    with pytest.raises(NameError, match="sort_keys"):
        nearest(vectors, cohort, 20, EVERYONE)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("size", [30, 1000])
def test_sums_over_those_that_are_drawn_have_no_bias(many, size, kept):
    """Over many turns the mean of the sums of weights comes near that over all keys, which no pool holds."""
    vectors = torch.nn.functional.normalize(families(1000, size)[0])
    cells = renew_cells(start_cells(vectors), vectors, torch.arange(1000), by_cosine=True) if kept else None
    names, base = tags([str(i) for i in range(1000)]), torch.linspace(-1, 1, 1000)
    queries, whole = vectors[:8], (vectors[:8] @ vectors.T / 0.3 + base).exp()
    sums = []
    for t in range(400):
        lots, turn = key(t, "test") + torch.arange(8), torch.tensor(t)
        drawn, often = draw_others(queries, vectors, base, 20, lots, names, turn, 0.3, None, cells)
        weights = whole.gather(1, drawn) * often.exp()
        sums.append(torch.stack([weights.sum(1), (weights * base[drawn]).sum(1)]))
    mean, expected = torch.stack(sums).mean(0), torch.stack([whole.sum(1), whole @ base])
    torch.testing.assert_close(mean[0], expected[0], rtol=0.06, atol=0)
    torch.testing.assert_close(mean[1] / expected[0], expected[1] / expected[0], rtol=0, atol=0.06)
    assert sketch.REST < 1000 - 2 * inverted_file.POOL
