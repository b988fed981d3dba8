import zlib

import pytest
import torch
from hypothesis import given, strategies as st
from scipy.stats import kstest

from kinfed.core.seeding import fold, fold_numbers, generator, key, normal, number, tags, uniform

MASK = 2**64 - 1
int64 = st.integers(-(2**63), 2**63 - 1)


def splitmix(state):
    """The output function of splitmix64 in whole numbers."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def signed(number):
    return number - 2**64 if number >= 2**63 else number


def as_tensor(number):
    return torch.tensor(number, dtype=torch.int64)


def test_published_outputs_of_splitmix64():
    # Seed 0: the state grows by the golden constant before each output.
    golden = 0x9E3779B97F4A7C15
    for turn, output in enumerate([0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]):
        assert int(fold(as_tensor(signed(turn * golden & MASK)), 0)) == signed(output)


@given(int64, int64)
def test_fold_is_splitmix64(old, value):
    expected = splitmix(((old ^ value) + 0x9E3779B97F4A7C15) & MASK)
    assert int(fold(as_tensor(old), as_tensor(value))) == signed(expected)


@given(int64, st.lists(int64, min_size=1, max_size=3))
def test_plain_numbers_fold_as_tensors_do(old, values):
    expected = as_tensor(old)
    for value in values:
        expected = fold(expected, as_tensor(value))
    assert fold_numbers(old, *values) == int(expected)
    assert number(7, "a", 3) == int(key(7, "a", 3)) == int(fold(fold(as_tensor(zlib.crc32(b"a")), 7), 3))


def test_fold_takes_any_shape():
    keys, values = torch.arange(3)[:, None], torch.arange(4)
    table = fold(keys, values)
    assert table.shape == (3, 4)
    assert all(int(table[i, j]) == int(fold(as_tensor(i), j)) for i in range(3) for j in range(4))


def test_key_is_a_chain_of_folds():
    chain = as_tensor(zlib.crc32(b"batches"))
    for value in (7, 3, 5):
        chain = fold(chain, value)
    assert int(key(7, "batches", 3, 5)) == int(chain)


def test_keys_differ_in_everything():
    found = {
        int(key(seed, purpose, round, client))
        for seed in (0, 1, -1, 2**40)
        for purpose in ("batches", "cohort", "noise")
        for round in range(20)
        for client in range(20)
    }
    assert len(found) == 4 * 3 * 20 * 20
    assert int(key(0, "cohort", 1)) != int(key(0, "cohort", 1, 0))


def test_tags_depend_on_the_name_alone():
    assert tags(["a", "b", "c"]).tolist() == tags(["c", "b", "a"]).tolist()[::-1]
    found = tags([str(i) for i in range(1000)])
    assert found.dtype == torch.int64
    assert len(set(found.tolist())) == 1000
    assert (found >= 0).all()


@pytest.mark.parametrize("draw", [uniform, normal])
def test_entries_depend_on_their_own_place_only(draw):
    k = key(0, "noise")
    long = draw(k, torch.empty(100, dtype=torch.float64))
    assert torch.equal(draw(k, torch.empty(7, dtype=torch.float64)), long[:7])
    assert torch.equal(draw(k, torch.empty(20, 5, dtype=torch.float64)), long.view(20, 5))
    assert not torch.equal(draw(key(1, "noise"), torch.empty(100, dtype=torch.float64)), long)


def test_uniform_is_uniform():
    found = uniform(key(0, "noise"), torch.empty(100_000))
    assert found.dtype == torch.float32
    assert found.min() >= 0
    assert found.max() < 1
    assert kstest(found.double().numpy(), "uniform").pvalue > 0.01
    assert torch.equal(found.double(), uniform(key(0, "noise"), torch.empty(100_000, dtype=torch.float64)))


def test_uniform_of_different_keys_is_uncorrelated():
    rows = torch.stack([uniform(key(0, "noise", i), torch.empty(10_000)) for i in range(10)])
    apart = torch.corrcoef(rows) - torch.eye(10)
    assert apart.abs().max() < 0.05  # five standard deviations


def test_normal_is_normal():
    found = normal(key(0, "noise"), torch.empty(100_000))
    assert torch.isfinite(found).all()
    assert kstest(found.double().numpy(), "norm").pvalue > 0.01


def test_generators_repeat_and_differ():
    one, same, other = (torch.rand(5, generator=generator(3, "cohort", round)) for round in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
