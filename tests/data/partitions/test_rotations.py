import pytest
import torch

from kinfed.core.seeding import generator
from kinfed.core.tasks import Classification
from kinfed.data.dataset import Dataset
from kinfed.data.partitions import IID, Rotations
from kinfed.errors import UsageError

UPRIGHT = [[1.0, 2.0], [3.0, 4.0]]
QUARTER = [[2.0, 4.0], [1.0, 3.0]]  # counter-clockwise
HALF = [[4.0, 3.0], [2.0, 1.0]]
THREE_QUARTERS = [[3.0, 1.0], [4.0, 2.0]]


def dataset(n, image):
    x = torch.tensor(image).expand(n, 2, -1, -1).clone()  # two channels
    return Dataset(x, torch.arange(n) % 2, Classification(2))


@pytest.mark.parametrize(
    ("groups", "turned"), [(1, [UPRIGHT]), (2, [UPRIGHT, HALF]), (4, [UPRIGHT, QUARTER, HALF, THREE_QUARTERS])]
)
def test_every_group_has_its_angle(groups, turned):
    parts = Rotations(groups)(dataset(25, UPRIGHT), 8, generator(0, "partition"))
    for rows, group in zip(parts.owned, parts.groups.tolist(), strict=True):
        for image in parts.dataset.x[rows]:
            assert image.tolist() == [turned[group]] * 2


def test_rows_are_those_of_iid():
    data = dataset(25, UPRIGHT)
    parts, plain = (p(data, 5, generator(3, "partition")) for p in (Rotations(), IID()))
    assert all(torch.equal(a, b) for a, b in zip(parts.owned, plain.owned, strict=True))
    assert parts.groups.tolist() == [0, 0, 1, 2, 3]


def test_oblong_images_can_be_turned_upside_down_only():
    data = dataset(8, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    parts = Rotations(2)(data, 2, generator(0, "partition"))
    assert parts.dataset.x[parts.owned[1][0], 0].tolist() == [[6, 5, 4], [3, 2, 1]]
    with pytest.raises(UsageError, match="needs square images; these are 2 by 3; use groups = 2"):
        Rotations(4)(data, 4, generator(0, "partition"))


def test_only_images_can_be_turned():
    data = Dataset(torch.zeros(9, 4), torch.zeros(9, dtype=torch.int64), Classification(1))
    with pytest.raises(UsageError, match=r"rotations: only images .* this data set's x is \[9, 4\]"):
        Rotations()(data, 4, generator(0, "partition"))
