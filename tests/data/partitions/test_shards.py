import pytest
import torch

from kinfed.core.seeding import generator
from kinfed.core.tasks import Classification
from kinfed.data.dataset import Dataset
from kinfed.data.federation import divide
from kinfed.data.partitions import Shards
from kinfed.data.split import Split
from kinfed.errors import UsageError


def test_two_pure_shards_each(deal):
    # 50,000 examples of 10 classes and 100 clients: 200 shards of 250, 20 of each class, two for a client.
    counts = deal(Shards(), torch.arange(50_000) % 10, 100)
    assert set(counts.flatten().tolist()) == {0, 250, 500}
    assert (counts.sum(1) == 500).all()
    assert (counts.sum(0) == 5_000).all()


def test_nothing_is_lost_where_shards_do_not_come_out_even(deal):
    # 11 examples in 4 shards: 3, 3, 3, 2. Sorted labels 00000 111111 are cut into 000, 001, 111 and 11.
    counts = deal(Shards(1), torch.tensor([0] * 5 + [1] * 6), 4)
    assert sorted(counts.tolist()) == [[0, 2], [0, 3], [2, 1], [3, 0]]


def test_shards_are_dealt_at_random(deal):
    hands = {tuple(deal(Shards(), [0, 0, 1, 1, 2, 2, 3, 3], 2, seed)[0].tolist()) for seed in range(10)}
    assert len(hands) > 1


def test_within_classes_nobody_knows_more_of_them_than_it_has_shards(deal):
    # 20 classes of 55 in 5 clients' 8 shards each: two a class, of 28 and 27.
    labels = torch.arange(1100) % 20
    assert int((deal(Shards(8), labels, 5) > 0).sum(1).max()) > 8  # 27 and 28 in turn drift over the ends of classes
    counts = deal(Shards(8, within_class=True), labels, 5)
    assert int((counts > 0).sum(1).max()) <= 8
    assert set(counts.flatten().tolist()) <= {0, 27, 28, 55}
    assert (counts.sum(0) == 55).all()
    with pytest.raises(UsageError, match=r"clients \* per_client must be a multiple of 20"):
        deal(Shards(3, within_class=True), labels, 5)


def test_clients_share_examples_but_not_across_splits(deal):
    # 10 classes of 100 and 20 clients: 40 shards of 25, four of each class, two for a client.
    y = torch.arange(1000) % 10
    assert torch.equal(deal(Shards(overlap=True), y, 20), deal(Shards(), y, 20))  # as many of each class as without
    dataset = Dataset(torch.zeros(1000, 1), y, Classification(10))
    parts = Shards(overlap=True)(dataset, 20, generator(0, "partition"))
    seen = torch.bincount(torch.cat(parts.owned), minlength=1000)
    assert all(len(mine.unique()) == len(mine) == 50 for mine in parts.owned)
    assert set(seen.tolist()) == {0, 1, 2, 3, 4}  # each of four shards takes a quarter of the class, drawn by itself
    federation = divide(parts.dataset, parts.owned, Split(test=0.2, validation=0.12), 0, parts.groups, parts.lots)
    together = [set(torch.cat(list(federation.rows[split])).tolist()) for split in ("train", "validation", "test")]
    assert sum(map(len, together)) == len(set.union(*together)) == int((seen > 0).sum())
    for i, mine in enumerate(parts.owned):
        rows = [federation.rows[split][i] for split in ("train", "validation", "test")]
        assert [len(part) for part in rows] == [34, 6, 10]  # of 25 of a class: 17, 3 and 5
        assert torch.equal(torch.cat(rows).sort().values, mine.sort().values)


def test_a_shard_names_its_first_class_alone_where_they_overlap(deal):
    # Sorted labels 0000 1111 11 in shards of 3, 3, 2 and 2: 000, 011, 11 and 11 name the classes 0, 0, 1 and 1.
    counts = deal(Shards(1, overlap=True), [0] * 4 + [1] * 6, 4)
    assert sorted(counts.tolist()) == [[0, 2], [0, 2], [3, 0], [3, 0]]
    assert deal(Shards(4, overlap=True), [0] * 4 + [1] * 6, 1).tolist() == [[4, 4]]  # 6 of class 0 cannot be had


def test_an_overlapping_client_without_a_test_example_is_named():
    dataset = Dataset(torch.zeros(8, 1), torch.arange(8) % 2, Classification(2))
    parts = Shards(1, overlap=True)(dataset, 8, generator(0, "partition"))  # one example each
    with pytest.raises(UsageError, match="of 8 clients have too few examples"):
        divide(parts.dataset, parts.owned, Split(), 0, parts.groups, parts.lots)
