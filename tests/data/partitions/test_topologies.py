import pytest
import torch
from hypothesis import given, strategies as st

from kinfed.core.seeding import generator
from kinfed.core.tasks import Classification, Regression
from kinfed.data.dataset import Dataset
from kinfed.data.partitions import Topologies
from kinfed.errors import UsageError

SETS = {
    3: [{0, 1, 2}, {2, 3, 4}, {4, 5, 6}],
    4: [{0, 1, 2}, {2, 3, 4}, {4, 5, 6}, {6, 7, 0}],
    5: [{0, 2, 4, 6, 8}, {0, 1}, {2, 3}, {4, 5}, {6, 7}],
}
LINKS = {3: {(0, 1), (1, 2)}, 4: {(0, 1), (1, 2), (2, 3), (0, 3)}, 5: {(0, 1), (0, 2), (0, 3), (0, 4)}}


def dealt(nodes, clients, labels, classes=10, seed=0):
    y = torch.as_tensor(labels)
    dataset = Dataset(torch.arange(len(y)).float()[:, None], y, Classification(classes))
    return Topologies(nodes)(dataset, clients, generator(seed, "partition"))


@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_the_case_study(nodes):
    # 20 clients a node and 400 examples a class: 20 each if one node knows it, 10 if two do.
    parts = dealt(nodes, 20 * nodes, torch.arange(4000) % 10)
    assert torch.equal(parts.groups, torch.arange(nodes).repeat_interleave(20))
    counts = torch.stack([torch.bincount(parts.dataset.y[rows], minlength=10) for rows in parts.owned])
    for i, group in enumerate(parts.groups.tolist()):
        for label in range(10):
            sharing = sum(label in labels for labels in SETS[nodes])
            assert counts[i, label] == (400 // (20 * sharing) if label in SETS[nodes][group] else 0)
    held = [set(counts[parts.groups == g].sum(0).nonzero().squeeze(1).tolist()) for g in range(nodes)]
    found = {(a, b) for a in range(nodes) for b in range(a + 1, nodes) if held[a] & held[b]}
    assert found == LINKS[nodes]


@given(st.sampled_from([3, 4, 5]), st.integers(5, 23), st.integers(0, 99))
def test_examples_of_known_classes_have_one_owner_each(nodes, clients, seed):
    y = (torch.arange(400) % 10)[torch.randperm(400, generator=generator(seed, "labels"))]
    parts, again = (dealt(nodes, clients, y, seed=seed) for _ in range(2))
    rows = torch.cat(parts.owned)
    known = torch.tensor(sorted(set().union(*SETS[nodes])))
    assert torch.equal(rows.sort().values, torch.isin(y, known).nonzero().squeeze(1))
    assert all(torch.equal(a, b) for a, b in zip(parts.owned, again.owned, strict=True))
    other = dealt(nodes, clients, y, seed=seed + 1)
    assert any(not torch.equal(a, b) for a, b in zip(parts.owned, other.owned, strict=True))
    assert parts.dataset.graph is None


def test_refuses():
    labels = torch.arange(100) % 8
    with pytest.raises(
        UsageError, match=r"^Topologies.nodes must be one of 3, 4, 5; got 6 \(a path of 3, a ring of 4 or a star of 5\)"
    ):
        Topologies(6)
    with pytest.raises(UsageError, match=r"^topologies: 5 nodes need at least 9 classes; got 8"):
        dealt(5, 10, labels, 8)
    assert len(dealt(4, 10, labels, 8).owned) == 10
    with pytest.raises(UsageError, match=r"^topologies: 4 groups need at least 4 clients; got 3"):
        dealt(4, 3, labels)
    with pytest.raises(UsageError, match=r"^topologies: 8 of 9 clients would get no example"):
        dealt(3, 9, torch.full((9,), 7).scatter(0, torch.tensor([0]), 1))
    with pytest.raises(UsageError, match=r"^topologies.*not classes"):
        Topologies()(Dataset(torch.zeros(9, 2), torch.zeros(9), Regression()), 3, generator(0, "partition"))
