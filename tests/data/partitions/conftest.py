import pytest
import torch

from kinfed.core.seeding import generator
from kinfed.core.tasks import Classification
from kinfed.data.dataset import Dataset


@pytest.fixture(scope="session")
def deal():
    """[N, C] how many examples of each class a client is dealt, from labels alone."""

    def counts(partition, labels, clients, seed=0):
        y = torch.as_tensor(labels)
        classes = int(y.max()) + 1
        dataset = Dataset(torch.zeros(len(y), 1), y, Classification(classes))
        owned = partition(dataset, clients, generator(seed, "partition")).owned
        return torch.stack([torch.bincount(y[rows], minlength=classes) for rows in owned])

    return counts
