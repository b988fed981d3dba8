"""What holds for every partition: each example has one owner, nobody is empty, and the generator decides."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kinfed.core.graph import Graph
from kinfed.core.seeding import generator
from kinfed.core.tasks import Classification, Regression
from kinfed.data.dataset import Dataset
from kinfed.data.datasets import DATASETS
from kinfed.data.federation import divide
from kinfed.data.partitions import PARTITIONS
from kinfed.data.split import Split
from kinfed.errors import UsageError


def images(n, classes, seed, clients):
    """Square images with shuffled labels, as many of each class as can be; owners and their graph besides."""
    draw = generator(seed, "images")
    x = torch.randn(n, 1, 3, 3, generator=draw)
    y = (torch.arange(n) % classes)[torch.randperm(n, generator=draw)]
    owner = (torch.arange(n) % clients)[torch.randperm(n, generator=draw)]
    return Dataset(x, y, Classification(classes), ("a",) * classes, owner, Graph(torch.ones(clients, clients), "given"))


@st.composite
def cases(draw):
    """A partition, a data set and a number of clients that go together."""
    name = draw(st.sampled_from(sorted(set(PARTITIONS) - {"topologies"})))  # leaves classes out: has its own tests
    classes, clients = draw(st.integers(2, 6)), draw(st.integers(1, 9))
    n = draw(st.integers(classes * clients, 120))
    setting = {}
    if name == "dirichlet":
        setting = {
            "alpha": draw(st.sampled_from([1e-3, 0.1, 1.0, 1e6])),
            "min_size": draw(st.integers(1, n // clients)),
            "cap": draw(st.booleans()),
        }
    elif name == "pathological":
        setting = {"classes_per_client": draw(st.integers(-(-classes // clients), classes))}
    elif name == "shards":
        setting = {"per_client": draw(st.integers(1, min(4, n // clients)))}
    elif name == "rotations":
        setting = {"groups": draw(st.sampled_from([g for g in (1, 2, 4) if g <= clients]))}
    elif name == "label_permutations":
        setting = {"groups": draw(st.integers(1, min(classes, clients)))}
    elif name == "label_groups":
        # A client's share of the common rest alone is one example or more, so nobody can be empty.
        setting = {"groups": draw(st.integers(1, min(classes, clients))), "share": draw(st.sampled_from([0.0, 0.3]))}
        n = max(n, 4 * clients)
    return name, setting, images(n, classes, draw(st.integers(0, 99)), clients), clients, draw(st.integers(0, 99))


@settings(max_examples=60)
@given(cases())
def test_every_example_has_one_owner_and_the_generator_decides(case):
    name, setting, dataset, clients, seed = case
    x, y = dataset.x.clone(), dataset.y.clone()
    partition = PARTITIONS[name](**setting)
    parts = partition(dataset, clients, generator(seed, "partition"))
    assert len(parts.owned) == clients
    assert torch.equal(torch.cat(list(parts.owned)).sort().values, torch.arange(len(x)))
    assert min(map(len, parts.owned)) >= setting.get("min_size", 1)
    assert torch.equal(dataset.x, x), "the data set it was given has changed"
    assert torch.equal(dataset.y, y), "the data set it was given has changed"
    again = partition(dataset, clients, generator(seed, "partition"))
    assert all(torch.equal(a, b) for a, b in zip(parts.owned, again.owned, strict=True))
    assert torch.equal(parts.dataset.x, again.dataset.x)
    assert torch.equal(parts.dataset.y, again.dataset.y)


@given(cases())
def test_examples_are_changed_only_where_the_partition_says_so(case):
    name, setting, dataset, clients, seed = case
    found = PARTITIONS[name](**setting)(dataset, clients, generator(seed, "partition")).dataset
    assert name == "rotations" or torch.equal(found.x, dataset.x)
    assert name == "label_permutations" or torch.equal(found.y, dataset.y)
    assert torch.equal(found.x.flatten(1).sort().values, dataset.x.flatten(1).sort().values)  # no pixel is lost


@given(cases())
def test_groups_are_cut_from_the_clients_in_order(case):
    name, setting, dataset, clients, seed = case
    found = PARTITIONS[name](**setting)(dataset, clients, generator(seed, "partition")).groups
    if name not in ("rotations", "label_permutations", "label_groups"):
        assert found is None
        return
    groups = setting["groups"]
    assert found.tolist() == [i * groups // clients for i in range(clients)]
    sizes = torch.bincount(found, minlength=groups)
    assert int(sizes.max() - sizes.min()) <= 1


@given(cases())
def test_the_graph_of_natural_owners_is_not_passed_to_others(case):
    name, setting, dataset, clients, seed = case
    found = PARTITIONS[name](**setting)(dataset, clients, generator(seed, "partition")).dataset
    if name == "natural":
        assert found.graph is dataset.graph
    else:
        assert found.graph is None
        assert found.client is None


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"natural", "topologies"}))
def test_another_generator_deals_otherwise(name):
    dataset = images(100, 5, 0, 5)
    first, second = (PARTITIONS[name]()(dataset, 5, generator(seed, "partition")).owned for seed in (0, 1))
    assert any(sorted(a.tolist()) != sorted(b.tolist()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"natural", "topologies"}))
def test_digits_make_a_federation(name):
    parts = PARTITIONS[name]()(DATASETS["digits"](None), 10, generator(0, "partition"))
    federation = divide(parts.dataset, parts.owned, Split(), 0, parts.groups)
    assert len(federation) == 10
    assert int(federation.class_counts().sum()) == 1797


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"natural"}))
def test_more_clients_than_examples(name):
    with pytest.raises(UsageError, match=rf"^{name}: 7 clients need at least .* the data set has 6; use fewer clients"):
        PARTITIONS[name]()(images(6, 2, 0, 2), 7, generator(0, "partition"))


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"natural"}))
def test_no_clients(name):
    with pytest.raises(UsageError, match=rf"^{name}: a federation needs at least 1 client; got 0"):
        PARTITIONS[name]()(images(6, 2, 0, 2), 0, generator(0, "partition"))


@pytest.mark.parametrize("name", ["dirichlet", "pathological", "shards", "label_permutations", "label_groups"])
def test_targets_that_are_no_classes(name):
    dataset = Dataset(torch.zeros(100, 2), torch.zeros(100), Regression())
    with pytest.raises(UsageError, match=rf"^{name}.*not classes"):
        PARTITIONS[name]()(dataset, 5, generator(0, "partition"))


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("dirichlet", {"alpha": 0.0}, "Dirichlet.alpha must be positive; got 0.0"),
        ("dirichlet", {"alpha": float("nan")}, "Dirichlet.alpha must be positive; got nan"),
        ("dirichlet", {"alpha": float("inf")}, "Dirichlet.alpha must be finite; got inf"),
        ("dirichlet", {"min_size": 0}, "Dirichlet.min_size must be at least 1; got 0"),
        (
            "pathological",
            {"classes_per_client": 0},
            r"pathological: .*classes_per_client must lie in 1\.\.5 for 5 classes; got 0",
        ),
        (
            "pathological",
            {"classes_per_client": 6},
            r"pathological: .*classes_per_client must lie in 1\.\.5 for 5 classes; got 6",
        ),
        ("shards", {"per_client": 0}, "Shards.per_client must be at least 1; got 0"),
        ("rotations", {"groups": 3}, "Rotations.groups must be one of 1, 2, 4; got 3 .*only quarter turns"),
        ("label_permutations", {"groups": 0}, "label_permutations: .*0 groups"),
        (
            "label_permutations",
            {"groups": 6},
            "label_permutations: .*5 classes can be renamed for at most 5 groups; got 6",
        ),
        ("label_groups", {"groups": 0}, "LabelGroups.groups must be at least 1; got 0"),
        ("label_groups", {"groups": 6}, "label_groups: .*6 groups need at least as many classes; got 5"),
        ("label_groups", {"share": 1.1}, r"LabelGroups.share must be in \[0, 1\]; got 1.1"),
    ],
)
def test_bad_settings(name, setting, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        PARTITIONS[name](**setting)(images(100, 5, 0, 7), 7, generator(0, "partition"))


@pytest.mark.parametrize("name", ["rotations", "label_permutations", "label_groups"])
def test_more_groups_than_clients(name):
    with pytest.raises(UsageError, match=rf"^{name}: 4 groups need at least 4 clients; got 3"):
        PARTITIONS[name](groups=4)(images(100, 5, 0, 3), 3, generator(0, "partition"))
