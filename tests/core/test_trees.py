"""What a field of a state or message declares about its axes, and what is refused."""

from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

from kinfed.core.optimiser import SGD, Adam, OptState
from kinfed.core.trees import (
    Axis,
    Derived,
    Like,
    ModelOf,
    Pairwise,
    PerClient,
    Shared,
    Tree,
    axes,
    model_field,
    pack,
    pick,
    unpack,
)
from kinfed.errors import UsageError

T = torch.zeros(2)


class Network(NamedTuple):
    """As a hypernetwork's: a table over clients, and layers."""

    embedding: PerClient
    weights: tuple[Shared, ...]


class State(NamedTuple):
    """Whatever a state may be made of."""

    network: Network
    memory: Annotated[OptState, Like("network")]
    theta: ModelOf[PerClient]
    links: Pairwise | None
    by_name: dict[str, Shared]
    anything: Annotated[Tree, Axis.PER_CLIENT]


class Half(NamedTuple):
    """A field says nothing."""

    theta: PerClient
    extra: Tensor


class Outer(NamedTuple):
    """Holds others, whatever they are."""

    inner: Tree


class Both(NamedTuple):
    """Two answers for one field."""

    pair: tuple[PerClient, Shared]


def state(optimiser):
    network = Network(T, (T, T))
    return State(network, optimiser.init([T, T, T]), T, T, {"a": T}, (T, {"b": T}))


def test_axes_are_those_that_the_fields_declare_and_an_optimisers_state_follows_its_parameters():
    n, _, pairs = Axis.PER_CLIENT, Axis.SHARED, Axis.PAIRWISE
    network = Network(n, (_, _))
    moments = (n, _, _)
    found = axes(state(Adam()))
    assert found == State(network, OptState(_, moments, moments), n, pairs, {"a": _}, (n, {"b": n}))
    assert axes(state(SGD(momentum=0.9))).memory == OptState(_, moments, ())
    assert axes(state(SGD())).memory == OptState(_, (), ())
    assert axes(()) == ()


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        (Half(T, T), "Half.extra"),
        (Outer(Half(T, T)), "Outer.inner.extra"),
        (Outer((T,)), "Outer.inner[0]"),
        (Outer({"a": T}), "Outer.inner['a']"),
        (T, "Tensor"),
        (Both((T, T)), "Both.pair"),
    ],
)
def test_a_tensor_that_nothing_or_more_than_one_thing_is_said_of_is_refused_by_name(tree, where):
    with pytest.raises(UsageError) as problem:
        axes(tree)
    assert str(problem.value).startswith(f"{where} ")


def test_of_a_message_each_client_gets_its_rows_and_what_is_shared_as_it_is():
    class Sent(NamedTuple):
        mixed: PerClient
        mean: Shared

    table, mean = torch.arange(6).view(3, 2), torch.arange(3)
    found = pick(Sent(table, mean), torch.tensor([2, 0]))
    assert found.mixed.tolist() == [[4, 5], [0, 1]]
    assert found.mean is mean
    one = pick(Sent(table, mean), 1)
    assert one.mixed.tolist() == [2, 3]
    assert one.mean is mean


def test_which_field_is_the_model():
    assert model_field(state(SGD())) == "theta"
    assert model_field(Half(T, T)) == model_field(()) == model_field(T) == ""


class Former(NamedTuple):
    """Had other names for both fields in earlier versions."""

    seen: PerClient
    inner: Half


class Found(NamedTuple):
    """What is found again where a file lacks it."""

    centres: Derived[Shared]
    home: Derived[PerClient]


class Kept(NamedTuple):
    """Was one table in earlier versions."""

    rows: PerClient
    found: Found


def test_a_file_of_an_earlier_version_is_read_under_the_names_of_now():
    like = Former(T, Half(T, T))
    earlier = {"server.known": T + 1, "server.own.theta": T + 2, "server.own.extra": T + 3}
    read = unpack(earlier, like, "server.")
    assert [t[0].item() for t in (read.seen, *read.inner)] == [1, 2, 3]
    assert unpack(pack(read, "server."), like, "server.").seen is read.seen
    rows = Kept(T, Found(T + 4, T + 5))
    assert unpack({"server": T + 1}, rows, "server.").rows[0].item() == 1
    some = unpack({"server": T + 1, "server.found.centres": T}, rows, "server.")
    assert [t[0].item() for t in some.found] == [0, 5]  # what is derived and missing is as at first
    with pytest.raises(KeyError, match=r"server\.seen"):
        unpack({"server.unknown": T} | pack(read.inner, "server.inner."), like, "server.")
