"""Trees as words and arrays: what goes in comes out, and nothing else can be made of a message."""

import collections

import pytest
import torch
from hypothesis import given, strategies as st

from kinfed import UsageError
from kinfed.core import trees as named
from kinfed.core.layout import Layout
from kinfed.core.method import Params
from kinfed.methods.fedaghn import Upload
from kinfed_flower.wire import messages
from kinfed_flower.wire.messages import Message

leaves = st.builds(lambda n: torch.arange(n, dtype=torch.float32), st.integers(0, 4))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Params, inner),
        st.builds(Upload, inner, inner),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
    ),
    max_leaves=5,
)


@given(trees)
def test_a_tree_comes_back_with_its_classes(tree):
    message = Message({}, {})
    messages.put(tree, message, "upload")
    back = messages.take(message, "upload")
    assert messages.describe(back) == messages.describe(tree)
    assert type(back) is type(tree)
    before, after = named.pack(tree), named.pack(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "described",
    [
        ["collections:OrderedDict", None],
        ["os:system", None],
        ["urllib.parse:SplitResult", None, None, None, None, None],
        ["kinfed_flower.site.site:Site", None],
        ["kinfed.core.method:Params", None, None],
        ["kinfed.nowhere:Params", None],
        ["kinfed.__main__:main", None],  # which would run a command
        ["kinfedx:Params", None],
        [7, None],
        "theta",
        3,
    ],
)
def test_only_named_tuples_of_kinfed_are_made(described):
    with pytest.raises(UsageError, match="structure that this version of kinfed does not know"):
        messages.skeleton(described)


def test_what_is_missing_is_named():
    message = Message({}, {})
    with pytest.raises(UsageError, match="the message has no train"):
        messages.take(message, "train")
    messages.put(Params(torch.ones(2)), message, "train")
    message.arrays.clear()
    with pytest.raises(UsageError, match="lacks the array 'train/theta'"):
        messages.take(message, "train")


def test_a_digest_tells_every_word_name_type_shape_and_number():
    base = Message({"round": 1}, {"a": torch.zeros(2, 3)})
    others = [
        Message({"round": 2}, {"a": torch.zeros(2, 3)}),
        Message({"round": 1}, {"b": torch.zeros(2, 3)}),
        Message({"round": 1}, {"a": torch.zeros(3, 2)}),
        Message({"round": 1}, {"a": torch.zeros(2, 3, dtype=torch.int32)}),
        Message({"round": 1}, {"a": torch.zeros(2, 3).index_fill(0, torch.tensor(1), 1e-30)}),
        Message({"round": 1}, {}),
    ]
    digests = [messages.digest(m) for m in (base, *others)]
    assert len(set(digests)) == len(digests)
    assert messages.digest(Message({"round": 1}, {"a": torch.zeros(3, 2).T.contiguous()})) == digests[0]


def test_a_layout_is_told_by_names_shapes_and_order():
    linear = torch.nn.Linear(2, 3)
    same = messages.layout_digest(Layout.from_module(torch.nn.Linear(2, 3)))
    assert messages.layout_digest(Layout.from_module(linear)) == same
    assert messages.layout_digest(Layout.from_module(torch.nn.Linear(3, 2))) != same
    named = torch.nn.Sequential(collections.OrderedDict(head=torch.nn.Linear(2, 3)))
    assert messages.layout_digest(Layout.from_module(named)) != same


def test_arrays_are_compared_with_what_they_should_be():
    like = {"theta": ("torch.float32", (2,)), "count": ("torch.int64", ())}
    good = {"theta": torch.ones(2), "count": torch.tensor(3)}
    assert messages.problem_with(good, like) == ""
    cases = {
        "it lacks count": {"theta": torch.ones(2)},
        "it also has more": {**good, "more": torch.ones(1)},
        "it lacks count and also has more": {"theta": torch.ones(2), "more": torch.ones(1)},
        "theta is torch.float32 [3], not torch.float32 [2]": {**good, "theta": torch.ones(3)},
        "count is torch.int32 [], not torch.int64 []": {**good, "count": torch.tensor(3, dtype=torch.int32)},
        "theta holds NaN or infinity": {**good, "theta": torch.tensor([1.0, torch.inf])},
    }
    for said, arrays in cases.items():
        assert messages.problem_with(arrays, like) == said


def test_a_message_is_as_large_as_its_arrays_and_words():
    assert messages.size(Message({"a": 1}, {"x": torch.zeros(10)})) == 40 + len('{"a": 1}')
