import pytest
import torch

from kinfed.errors import UsageError
from kinfed.partitions import Shards


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
