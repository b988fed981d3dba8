import pytest
import torch
from torch import nn

from kinfed.core.layout import Layout
from kinfed.methods.parts.granularity import Groups


@pytest.fixture(scope="module")
def layout():
    """Children `base` (a linear layer with frozen bias, a norm) and `head`."""
    linear = nn.Linear(2, 3)
    linear.bias.requires_grad_(False)
    model = nn.Sequential()
    model.add_module("base", nn.Sequential(linear, nn.BatchNorm1d(3)))
    model.add_module("head", nn.Linear(3, 1))
    return Layout.of(model)


@pytest.mark.parametrize(
    ("granularity", "names"),
    [
        ("module", ("base.0", "base.1", "head")),
        ("model", ("",)),
        ("tensor", ("base.0.weight", "base.1.weight", "base.1.bias", "head.weight", "head.bias")),
    ],
)
def test_groups(layout, granularity, names):
    groups = Groups.of(layout, granularity)
    assert groups.names == names
    assert len(groups) == len(names)


@pytest.mark.parametrize("granularity", ["module", "tensor", "model"])
def test_pieces_cover_the_model_once_and_see_what_is_learned(layout, granularity):
    covered, learned = torch.zeros(layout.size), torch.zeros(layout.size)
    for piece in Groups.of(layout, granularity).layout.layers:
        covered[piece.at] += 1
        learned[piece.trainable] += 1
    assert (covered == 1).all()
    assert torch.equal(learned.bool(), layout.trainable)
    assert learned.max() == 1


def test_sums_by_group(layout):
    table = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    assert Groups.of(layout, "module").sum(table).tolist() == table.tolist()
    assert Groups.of(layout, "model").sum(table).tolist() == [[111, 222]]


def test_relation_of_a_layer_is_the_mean_over_its_entries(layout):
    groups = Groups.of(layout, "tensor")
    relation = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])[:, None, None]
    # Sizes 6; 3 and 3; 3 and 1.
    assert groups.by_layer(relation, layout.layers).flatten().tolist() == [1, 3, 10]
    assert torch.equal(Groups.of(layout, "module").by_layer(relation[:3], layout.layers), relation[:3])
