import torch

from kinfed.federation import Dataset
from kinfed.partitions import IID
from kinfed.seeding import generator
from kinfed.tasks import Regression


def test_the_remainder_is_spread_whatever_the_targets_are():
    dataset = Dataset(torch.zeros(11, 2), torch.zeros(11), Regression())
    owned = IID()(dataset, 3, generator(0, "partition")).owned
    assert [len(rows) for rows in owned] == [4, 4, 3]
