import itertools

import torch

from kinfed.core.seeding import generator
from kinfed.core.tasks import Classification
from kinfed.data.dataset import Dataset
from kinfed.data.partitions import IID, LabelPermutations


def test_groups_rename_the_classes_and_disagree_about_all_of_them():
    y = torch.arange(600) % 6
    data = Dataset(torch.zeros(600, 1), y, Classification(6), tuple("abcdef"))
    parts = LabelPermutations(groups=6)(data, 6, generator(0, "partition"))
    assert parts.groups.tolist() == list(range(6))
    renamed = []
    for rows in parts.owned:
        pairs = set(zip(y[rows].tolist(), parts.dataset.y[rows].tolist(), strict=True))
        assert len(pairs) == 6  # each label has one new name ...
        renamed.append([new for _, new in sorted(pairs)])
        assert sorted(renamed[-1]) == list(range(6))  # ... and no two the same
    assert renamed[0] == list(range(6))
    for first, second in itertools.combinations(renamed, 2):
        assert all(a != b for a, b in zip(first, second, strict=True))
    assert parts.dataset.classes == ()  # "a" is no longer the name of every 0


def test_clients_of_a_group_agree():
    y = torch.arange(900) % 3
    data = Dataset(torch.zeros(900, 1), y, Classification(3))
    parts = LabelPermutations(groups=2)(data, 5, generator(1, "partition"))
    assert parts.groups.tolist() == [0, 0, 0, 1, 1]
    names = [dict(zip(y[r].tolist(), parts.dataset.y[r].tolist(), strict=True)) for r in parts.owned]
    assert names[0] == names[1] == names[2] == {0: 0, 1: 1, 2: 2}
    assert names[3] == names[4]
    plain = IID()(data, 5, generator(1, "partition"))
    assert all(torch.equal(a, b) for a, b in zip(parts.owned, plain.owned, strict=True))
