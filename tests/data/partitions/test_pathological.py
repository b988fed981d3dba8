import pytest
import torch

from kinfed.data.partitions import Pathological
from kinfed.errors import UsageError


def test_two_clients_a_pair_of_classes(deal):
    # pFedGraph's setting: 10 clients, 10 classes, 2 each; clients i and i + 5 hold classes 2 i and 2 i + 1.
    counts = deal(Pathological(), list(range(10)) * 20, 10)
    expected = torch.zeros(10, 10, dtype=torch.int64)
    for i in range(10):
        expected[i, 2 * (i % 5)] = expected[i, 2 * (i % 5) + 1] = 10
    assert torch.equal(counts, expected)


def test_any_number_of_clients(deal):
    # Classes of 4 over 3 clients with 4 of 10 classes: 0-3, 4-7 and 8, 9, 0, 1, so classes 0 and 1 are shared.
    counts = deal(Pathological(4), list(range(10)) * 4, 3)
    assert counts.tolist() == [
        [2, 2, 4, 4, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 4, 4, 4, 4, 0, 0],
        [2, 2, 0, 0, 0, 0, 0, 0, 4, 4],
    ]


def test_one_client_more_than_groups(deal):
    # Class 0 has holders 0, 2 and 4; its 7 examples go 3, 2, 2.
    counts = deal(Pathological(1), [0] * 7 + [1] * 6, 5)
    assert counts.tolist() == [[3, 0], [0, 3], [2, 0], [0, 3], [2, 0]]


def test_a_class_without_holder(deal):
    with pytest.raises(UsageError, match=r"leave 2 of 10 classes to nobody; use at least 5 clients or 3 classes"):
        deal(Pathological(2), list(range(10)) * 4, 4)


def test_a_class_too_small_for_its_holders(deal):
    with pytest.raises(UsageError, match=r"pathological: 1 of 4 clients would get no example: 3; use fewer clients"):
        deal(Pathological(1), [0] * 9 + [1], 4)
