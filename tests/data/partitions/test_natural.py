import pytest
import torch

from kinfed.core.graph import Graph
from kinfed.core.seeding import generator
from kinfed.core.tasks import Regression
from kinfed.data.dataset import Dataset
from kinfed.data.partitions import Natural
from kinfed.errors import UsageError

GRAPH = Graph(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "given")


def dataset(owner):
    n = 5 if owner is None else len(owner)
    client = None if owner is None else torch.tensor(owner)
    return Dataset(torch.zeros(n, 1), torch.zeros(n), Regression(), client=client, graph=GRAPH)


@pytest.mark.parametrize("clients", [0, 2])
def test_everyone_keeps_their_own(clients):
    data = dataset([1, 0, 1, 1, 0])
    parts = Natural()(data, clients, generator(0, "partition"))
    assert [rows.tolist() for rows in parts.owned] == [[1, 4], [0, 2, 3]]
    assert parts.dataset.graph is GRAPH
    assert parts.groups is None


def test_another_number_of_clients():
    with pytest.raises(UsageError, match=r"natural: the examples have 2 owners, so clients must be 2; got 3"):
        Natural()(dataset([1, 0, 1, 1, 0]), 3, generator(0, "partition"))


def test_without_owners():
    with pytest.raises(UsageError, match=r"natural: the examples of this data set have no owners"):
        Natural()(dataset(None), 0, generator(0, "partition"))


def test_an_owner_of_nothing():
    with pytest.raises(UsageError, match=r"natural: owner 1 has no example; number the owners 0\.\.N-1"):
        Natural()(dataset([0, 2]), 0, generator(0, "partition"))
