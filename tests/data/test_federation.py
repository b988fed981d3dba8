"""Federations: what is refused at the door, and how examples are dealt and split."""

import numpy as np
import pandas
import pytest
import torch
from hypothesis import example, given, strategies as st

import kinfed.data.split
from kinfed import Federation, Graph, Split, Training, UsageError
from kinfed.core.model import Model
from kinfed.core.tasks import Classification, Regression
from kinfed.methods import Local
from kinfed.simulation.simulation import Simulation

X, Y = torch.randn(40, 3), torch.arange(40) % 2
CLIENT = np.repeat(["west", "east"], 20)


@given(st.lists(st.integers(3, 30), min_size=1, max_size=5), st.floats(0.05, 0.4), st.floats(0.0, 0.4))
@example([4], 0.375, 0.375)  # both round to half of the examples
@example([3], 0.9, 0.05)
def test_every_example_lies_in_exactly_one_split_of_its_own_client(sizes, test, validation):
    client = np.repeat(np.arange(len(sizes)), sizes)
    x = torch.arange(len(client)).double()[:, None]
    federation = Federation.from_arrays(x, x[:, 0], client, split=Split(test, validation))
    assert sorted(torch.cat([r for rows in federation.rows.values() for r in rows]).tolist()) == list(
        range(len(client))
    )
    for split, rows in federation.rows.items():
        for i, mine in enumerate(rows):
            assert (client[mine.numpy()] == i).all()
            assert len(mine) or (split == "validation" and validation == 0)
    again = Federation.from_arrays(x, x[:, 0], client, split=Split(test, validation))
    assert all(
        torch.equal(a, b) for s in federation.rows for a, b in zip(federation.rows[s], again.rows[s], strict=True)
    )


def test_names_types_and_tasks_come_from_the_arrays():
    federation = Federation.from_arrays(X.numpy(), Y.numpy().astype("int16"), CLIENT, graph=np.eye(2))
    assert federation.names == ("east", "west")
    assert federation.task == Classification(2, by_class=True)
    assert federation.sizes.tolist() == [14, 14]
    assert federation.class_counts().tolist() == [[10, 10], [10, 10]]
    assert federation.graph.origin == "given"
    assert isinstance(Federation.from_arrays(X, Y.float(), CLIENT).task, Regression)
    images = Federation.from_arrays(np.zeros((40, 2, 2), dtype="uint8"), Y, CLIENT)
    assert Federation.from_arrays(X, Y, np.array(["b", "a"] * 20, dtype=object)).names == ("a", "b")
    assert images.x.dtype == torch.float32


def poisoned(value):
    x = X.clone()
    x[25, 1] = value
    return x


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((poisoned(float("nan")), Y, CLIENT), "x holds NaN or infinity in 1 of 40 examples, first in example 25"),
        ((X, poisoned(float("inf"))[:, 1], CLIENT), "y holds NaN or infinity in 1 of 40 examples"),
        ((X, Y[:-1], CLIENT), "must agree on their first axis and not be empty; got 40, 39"),
        ((X[:0], Y[:0], CLIENT[:0]), "not be empty"),
        ((X, Y - 1, CLIENT), r"labels must lie in 0\.\.0 for 1 classes; got -1\.\.0"),
        ((X, Y, np.arange(40)), r"40 of 40 clients have too few .*, \.\.\.; give each of them more"),
        ((np.array([["a"]] * 40), Y, CLIENT), "x must be an array of numbers"),
        (([[1, 2], [3]] * 20, Y, CLIENT), "x must be an array of numbers"),
        ((X + 1j, Y, CLIENT), "x must be an array of real numbers; got torch.complex64"),
        ((3.0, Y, CLIENT), "x must be an array of real numbers; got torch.float64 "),
        ((X, Y * 50, CLIENT), "y holds the label 50, but there are only 40 examples"),
        ((X, Y, np.where(np.arange(40) > 5, np.nan, 1.0)), "client must name the owner of every example"),
        ((X, Y, [None, "a"] * 20), "client must name the owner of every example"),
    ],
)
def test_bad_arrays_are_refused_with_the_place_and_the_reason(arguments, said):
    with pytest.raises(UsageError, match=said):
        Federation.from_arrays(*arguments)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (np.eye(3), r"graph must be \[2, 2\] for 2 clients; got \[3, 3\]"),
        ([[1, -1], [0, 1]], r"entry \[0, 1\] is -1"),
        ([[1, np.nan], [0, 1]], r"entry \[0, 1\] is nan"),
    ],
)
def test_bad_graphs_are_refused(graph, said):
    with pytest.raises(UsageError, match=said):
        Federation.from_arrays(X, Y, CLIENT, graph=graph)


def test_a_class_that_nobody_trains_on_is_refused():
    each = {"train": [0, 2], "validation": [4, 6], "test": [1, 3]}  # odd examples are of class 1
    rows = {split: [torch.tensor([i]) for i in mine] for split, mine in each.items()}
    with pytest.raises(UsageError, match="no client has a training example of class 1"):
        Federation(X, Y, rows, Classification(2))
    with pytest.warns(UserWarning, match="of class 1, though some are tested on it, as it occurs only late"):
        Federation(X, Y, rows, Classification(2), in_order=True)


def test_missing_rows_and_double_names_are_refused():
    one = [torch.arange(2), torch.arange(2, 4)]
    none = [torch.arange(0), torch.arange(0)]
    with pytest.raises(UsageError, match="1 of 2 clients has no test example: b"):
        Federation(X, Y, {"train": one, "validation": none, "test": [one[0], none[0]]}, Classification(2), ["a", "b"])
    with pytest.raises(UsageError, match="2 clients need 2 different names"):
        Federation(X, Y, {"train": one, "validation": none, "test": one}, Classification(2), ["a", "a"])
    with pytest.raises(UsageError, match="needs rows for train, validation, test"):
        Federation(X, Y, {"train": one, "test": one}, Classification(2))


def test_splits_are_checked():
    for test, validation, said in (
        (0.0, 0.1, r"^Split.test must be in \(0, 1\); got 0.0 "),
        (0.6, 0.4, "^split: .* their sum must be below 1; got test=0.6, validation=0.4"),
        (0.2, -0.1, r"^Split.validation must be in \[0, 1\); got -0.1 "),
    ):
        with pytest.raises(UsageError, match=said):
            Split(test, validation)


def test_a_federation_keeps_the_hidden_truth_from_the_roster():
    rows = {"train": [torch.arange(4)], "validation": [torch.arange(0)], "test": [torch.arange(4, 6)]}
    graph = Graph(torch.ones(1, 1), "given")
    federation = Federation(X, Y, rows, Classification(2), graph=graph, groups=torch.zeros(1))
    roster = Simulation(federation, Model(torch.nn.Linear(3, 2)), Local(), Training()).roster(federation.graph)
    assert roster.graph is graph
    assert not hasattr(roster, "groups")


def test_a_client_uses_at_most_so_many_examples_and_they_are_a_draw_of_its_own():
    x = torch.arange(60.0)[:, None]
    client = [0] * 50 + [1] * 10
    found = Federation.from_arrays(x, x[:, 0], client, split=Split(0.2, 0.1, examples=20), seed=3)
    used = [torch.cat([found.rows[s][i] for s in ("train", "validation", "test")]) for i in range(2)]
    assert [len(u.unique()) for u in used] == [20, 10]
    assert used[0].max() >= 20  # not simply the first ones
    assert [len(found.rows[s][0]) for s in ("train", "validation", "test")] == [14, 2, 4]
    with pytest.raises(
        UsageError, match=r"^Split.examples must be zero or more; got -1 \(the most that a client uses; 0: all\)"
    ):
        Split(examples=-1)


def test_a_client_uses_a_share_of_its_examples_but_never_too_few(monkeypatch):
    monkeypatch.setattr(kinfed.data.split, "LEAST", 12)
    x = torch.arange(61.0)[:, None]
    client = [0] * 51 + [1] * 10
    found = Federation.from_arrays(x, x[:, 0], client, split=Split(0.2, 0.1, share=0.25), seed=3)
    used = [torch.cat([found.rows[s][i] for s in ("train", "validation", "test")]) for i in range(2)]
    assert [len(u.unique()) for u in used] == [13, 10]  # a quarter of 51 rounded up; all of 10, which is below 12
    assert used[0].max() >= 13  # not simply the first ones
    few = Federation.from_arrays(x, x[:, 0], client, split=Split(0.2, 0.1, share=0.01), seed=3)
    assert [sum(len(few.rows[s][i]) for s in few.rows) for i in range(2)] == [12, 10]
    for share in (0, 1.5):
        with pytest.raises(
            UsageError, match=rf"^Split.share must be in \(0, 1\]; got {share} \(of a client's examples that it uses\)"
        ):
            Split(share=share)


@pytest.mark.parametrize(("test", "validation", "folds"), [(0.4, 0.2, 3), (0.3, 0.1, 7), (0.2, 0.3, 2)])
def test_folds_by_lot_are_as_many_as_fit_beside_the_test_rows(test, validation, folds):
    """(1 - 0.4) / 0.2 is 3, though computers have it a little below."""
    lots = (torch.arange(1000) + 0.5) / 1000
    cut = [
        Split(test, validation, fold=fold).by_lot(torch.arange(1000), lots, torch.Generator())["validation"]
        for fold in range(folds + 1)
    ]
    assert torch.cat(cut[:folds]).unique().numel() == sum(map(len, cut[:folds])) == round(1000 * validation) * folds
    assert set(cut[folds].tolist()) == set(cut[0].tolist())  # begins anew


def test_arrays_with_a_time_are_split_in_its_order():
    days = np.tile(np.arange(20), 2)
    owner = np.repeat(["a", "b"], 20)
    order = np.random.default_rng(0).permutation(40)
    x, y = days[order, None].astype(np.float32), (days[order] % 2).astype(np.int64)
    found = Federation.from_arrays(x, y, owner[order], time=days[order], split=Split(0.2, 0.1))
    for split, told in (("train", range(14)), ("validation", (14, 15)), ("test", range(16, 20))):
        for rows in found.rows[split]:
            assert sorted(found.x[rows, 0].tolist()) == list(told)
    for wrong in (days[:5], days / 2):
        with pytest.raises(UsageError, match="time must be a whole number for each of 40 examples"):
            Federation.from_arrays(x, y, owner, time=wrong)
    dated = Federation.from_arrays(x, y, owner[order], time=np.datetime64("2024-01-30") + days[order])
    assert torch.equal(
        dated.rows["test"][0], Federation.from_arrays(x, y, owner[order], time=days[order]).rows["test"][0]
    )
    series = [np.datetime64("2024-01-30") + int(day) for day in days[order]]  # as a list, and as a column of pandas
    for dates in (series, pandas.Series(series)):
        again = Federation.from_arrays(x, y, owner[order], time=dates)
        assert torch.equal(again.rows["test"][0], dated.rows["test"][0])
    series[7] = np.datetime64("NaT")
    with pytest.raises(UsageError, match="time must be a date for each example; number 7 is NaT"):
        Federation.from_arrays(x, y, owner[order], time=series)
    with pytest.raises(UsageError, match=r"split must be like kinfed\.Split\(.*; got \{'test': 0\.3\}"):
        Federation.from_arrays(x, y, owner, split={"test": 0.3})
    with pytest.raises(UsageError, match=r"split must be like kinfed\.Split\(.*; got array"):
        Federation.from_arrays(x, y, owner, split=np.ones(3))
    with pytest.raises(
        UsageError, match=r"task must be a task, such as .*; got array\(\[\[1\., 0\.\], \[0\., 1\.\]\]\)"
    ):
        Federation.from_arrays(x, y, owner, task=np.eye(2))  # in one line
    with pytest.raises(UsageError, match=r"task must be a task, such as .*; got 'labels'"):
        Federation.from_arrays(x, y, owner, task="labels")
    with pytest.raises(UsageError, match=r"seed must be a whole number; got 0\.5"):
        Federation.from_arrays(x, y, owner, seed=0.5)
    with pytest.raises(
        UsageError, match="all examples are from 1 time, so splitting in time order leaves none for training"
    ):
        Federation.from_arrays(x, y, owner, time=days * 0)


def test_with_own_times_each_client_is_cut_where_the_shares_of_its_own_steps_end():
    """a ends where b begins: cut at the same steps for both, a would have no row to be tested on."""
    days = np.concatenate([np.arange(20), np.arange(18, 28)])
    owner, x = np.repeat(["a", "b"], [20, 10]), days[:, None].astype(np.float32)
    alike = r"1 of 2 clients has no examples in one of the periods .*: a; to cut each .*split.own_times=true"
    with pytest.raises(UsageError, match=alike):
        Federation.from_arrays(x, days % 2, owner, time=days)
    found = Federation.from_arrays(x, days % 2, owner, time=days, split=Split(0.2, 0.1, own_times=True))
    wanted = {"train": (range(14), range(18, 25)), "validation": ((14, 15), (25,)), "test": (range(16, 20), (26, 27))}
    for split, told in wanted.items():
        assert [sorted(found.x[rows, 0].tolist()) for rows in found.rows[split]] == [list(one) for one in told]
    assert found.in_order
    with pytest.raises(UsageError, match="have one fold"):
        Federation.from_arrays(x, days % 2, owner, time=days, split=Split(own_times=True, fold=1))
    with pytest.raises(UsageError, match="own_times cuts examples by their times, but these have none; name the"):
        Federation.from_arrays(x, days % 2, owner, split=Split(own_times=True))
    with pytest.raises(UsageError, match=r"own_times cuts .* but with shuffle they are split at random"):
        Federation.from_arrays(x, days % 2, owner, time=days, split=Split(own_times=True, shuffle=True))
    few = np.concatenate([np.arange(20), np.zeros(10, int)])
    with pytest.raises(UsageError, match=r"too few examples .* one after the other: b"):
        Federation.from_arrays(x, days % 2, owner, time=few, split=Split(own_times=True))


@pytest.mark.parametrize("kind", ["float32", "int64", "float64"])
def test_targets_are_of_the_type_of_what_a_model_makes_of_the_inputs(kind):
    x = np.arange(40).reshape(20, 2).astype(kind)
    federation = Federation.from_arrays(x, np.linspace(0, 1, 20), np.repeat([0, 1], 10))
    assert federation.x.dtype == federation.y.dtype == (torch.float64 if kind == "float64" else torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y, c: (x[:, ::-1][:, ::-1], y[::-1][::-1], c[::-1][::-1]),
        lambda x, y, c: (x.astype(">f8"), y.astype(">i4"), c.astype(">i8")),
        lambda x, y, c: (x.astype(np.longdouble), y.astype(np.uint16), c),
        lambda x, y, c: (x, y[:, None], c[:, None]),
        lambda x, y, c: (x, np.array(["a", "b"])[y][:, None], c),
        lambda x, y, c: (np.asfortranarray(x), y.astype(bool)[:, None], list(c)),
    ],
)
def test_arrays_of_every_kind_are_the_numbers_that_they_hold(change):
    x, y, client = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 2, np.arange(60) % 3
    expected, found = Federation.from_arrays(x, y, client), Federation.from_arrays(*change(x, y, client))
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.y, expected.y)
    assert all(torch.equal(a, b) for a, b in zip(found.rows["test"], expected.rows["test"], strict=True))
    mirrored = Federation.from_arrays(x[:, ::-1], y, client)
    assert torch.equal(mirrored.x, expected.x.flip(1))


@pytest.mark.filterwarnings("error")
def test_a_mapped_file_is_used_where_it_lies(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    federation = Federation.from_arrays(mapped, Y, CLIENT)
    assert federation.x.data_ptr() == mapped.ctypes.data
    assert torch.equal(federation.x, X)


@pytest.mark.parametrize("shape", [(60, 2), (60, 1, 1)])
def test_labels_are_one_for_each_example(shape):
    x, client = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    with pytest.raises(UsageError, match=r"y must be a label for each example, \[n\]; got \[60, [12](, 1)?\]"):
        Federation.from_arrays(x, np.ones(shape, int), client)
