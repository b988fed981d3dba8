"""Which server's state tells single clients' models."""

from typing import NamedTuple

import pytest
import torch

from kinfed.core.trees import Tree
from kinfed.methods import ClusterSizes, PerClient, Shared
from kinfed.runs.final_state import holds_members


class Groups(NamedTuple):
    """A state of a user's method."""

    models: Shared  # [C, d]
    heads: ClusterSizes  # [C]


class Undeclared(NamedTuple):
    """The same without the declaration."""

    models: Shared
    members: Shared


class Labels(NamedTuple):
    """Clusters by their clients' labels."""

    label: PerClient  # [N] int64; below 0: none


class Around(NamedTuple):
    """Holds another state."""

    inner: Tree


@pytest.mark.parametrize("wrap", [lambda state: state, Around, lambda state: Around((state, {"b": state}))])
@pytest.mark.parametrize(("sizes", "alone"), [([3.0, 3.0, 0.0], False), ([4.0, 1.0, 1.0], True)])
def test_a_cluster_of_one_is_a_clients_model_where_sizes_are_declared(wrap, sizes, alone):
    state = Groups(torch.randn(3, 5), torch.tensor(sizes))
    assert holds_members(wrap(state)) is alone
    assert not holds_members(Undeclared(*state))  # a field's name says nothing


def test_a_cluster_of_one_is_a_clients_model_by_its_label():
    assert holds_members(Labels(torch.tensor([0, 0, 1, -1])))
    assert not holds_members(Labels(torch.tensor([0, 0, 1, 1, -1])))


def test_numbers_of_each_client_are_its_own():
    assert holds_members(Labels(torch.randn(4, 2)))
