import torch

from kinfed.core.seeding import generator
from kinfed.core.tasks import Regression
from kinfed.data.dataset import Dataset
from kinfed.data.partitions import IID


def test_the_remainder_is_spread_whatever_the_targets_are():
    dataset = Dataset(torch.zeros(11, 2), torch.zeros(11), Regression())
    owned = IID()(dataset, 3, generator(0, "partition")).owned
    assert [len(rows) for rows in owned] == [4, 4, 3]
