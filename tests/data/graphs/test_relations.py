import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kinfed.cli import main
from kinfed.core.graph import Graph
from kinfed.core.tasks import Classification, Regression
from kinfed.data.federation import Federation
from kinfed.data.graph_files import adjacency, distance, read
from kinfed.data.graphs import GRAPHS, label_overlap
from kinfed.errors import UsageError
from kinfed.methods import METHODS

INF = math.inf


def federation(count=6, graph=None, groups=None, names=(), labels=None):
    """Clients with one example a split; labels[i] are client i's training labels."""
    labels = [[0]] * count if labels is None else labels
    y, rows = [], {"train": [], "validation": [], "test": []}
    for mine in labels:
        for split, part in (("train", mine), ("validation", mine[:1]), ("test", mine[:1])):
            rows[split].append(torch.arange(len(y), len(y) + len(part)))
            y += part
    known = None if graph is None else Graph(torch.as_tensor(graph, dtype=torch.float32), "given")
    task = Classification(max(y) + 1)
    return Federation(torch.zeros(len(y), 1), torch.tensor(y), rows, task, names, known, groups)


def anything(count, seed):
    """A weighted, one-sided graph with some self-links."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(count, count, generator=draw) * (torch.rand(count, count, generator=draw) > 0.5)


def renamed(weights, order):
    return weights[order][:, order]


def test_gaussian_kernel_by_hand():
    found = distance([[0, 1, 2], [1, 0, INF], [2, INF, 0]], sigma=2.0)
    e = torch.tensor([0.0, -0.25, -1.0]).exp()
    expected = torch.tensor([[e[0], e[1], e[2]], [e[1], e[0], 0], [e[2], 0, e[0]]])
    torch.testing.assert_close(found.weights, expected)
    assert found.origin == "given"
    cut = distance([[0, 1, 2], [1, 0, INF], [2, INF, 0]], sigma=2.0, threshold=0.5).weights
    torch.testing.assert_close(cut, torch.where(expected >= 0.5, expected, 0.0))
    assert (cut != expected).sum() == 2


def test_scale_is_the_spread_of_the_finite_distances_between_clients():
    table = np.array([[0, 1, 4.0], [2, 0, INF], [4, 3, 0]])
    sigma = np.std([1, 4, 2, 4, 3])
    torch.testing.assert_close(distance(table).weights, distance(table, sigma=sigma).weights)
    # The unit of length does not matter.
    torch.testing.assert_close(distance(1000 * table).weights, distance(table).weights)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=3, max_size=6, unique=True), st.floats(0, 1))
def test_kernel_falls_with_distance(points, threshold):
    points = torch.tensor(points, dtype=torch.float64)
    apart = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    weights = distance(apart, sigma=5.0, threshold=threshold).weights
    assert torch.equal(weights, weights.T)
    assert (weights.diagonal() == 1).all()
    assert ((weights == 0) | (weights >= threshold - 1e-6)).all()
    order = apart.flatten().argsort()
    assert (weights.flatten()[order].diff() <= 0).all()


def test_links_are_kept_as_they_are():
    weights = np.array([[0, 1, 0.5], [2, 0, 0], [0, 0, 3]])
    found = adjacency(weights)
    assert (found.weights.numpy() == weights).all()
    assert found.origin == "given"
    assert adjacency(np.array([[0, 1], [1, 0]])).weights.dtype == torch.float32


def test_label_overlap_by_hand():
    labels = [[0, 0, 0, 1, 1, 2], [1, 1, 2], [2], [3, 0, 3]]
    expected = {
        1: [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
        2: [[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]],
        5: [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 1]],
    }
    for most, weights in expected.items():
        found = label_overlap(federation(labels=labels), 0, most=most)
        assert found.weights.tolist() == weights
        assert found.origin == "oracle"


def test_label_overlap_does_not_look_at_test_labels():
    known = federation(labels=[[0, 1], [2, 1], [3]])
    swapped = known.y.clone()
    swapped[torch.cat([*known.rows["test"], *known.rows["validation"]])] = 1
    other = Federation(known.x, swapped, known.rows, known.task)
    assert torch.equal(label_overlap(other, 0).weights, label_overlap(known, 0).weights)


def test_oracle_links_groups():
    found = GRAPHS["oracle"](federation(groups=torch.tensor([2, 0, 2, 1, 0, 2])), 0)
    for i, a in enumerate([2, 0, 2, 1, 0, 2]):
        for j, b in enumerate([2, 0, 2, 1, 0, 2]):
            assert found.weights[i, j] == (a == b)
    assert found.origin == "oracle"


def test_ends_of_the_scale_and_the_given():
    graph = anything(6, 1)
    known = federation(graph=graph)
    assert torch.equal(GRAPHS["given"](known, 0).weights, graph)
    assert GRAPHS["given"](federation(), 0) is None
    assert GRAPHS["none"](known, 0) is None
    assert torch.equal(GRAPHS["identity"](known, 0).weights, torch.eye(6))
    assert torch.equal(GRAPHS["complete"](known, 0).weights, torch.ones(6, 6))
    assert {GRAPHS[name](known, 0).origin for name in ("given", "identity", "complete")} == {"given"}


def test_shuffled_interchanges_clients():
    graph = anything(6, 2)
    known = federation(graph=graph)
    orders = [list(order) for order in itertools.permutations(range(6))]
    found = [GRAPHS["shuffled"](known, seed).weights for seed in range(12)]
    places = [[order for order in orders if torch.equal(renamed(graph, order), weights)] for weights in found]
    assert all(len(place) == 1 for place in places)
    assert len({tuple(place[0]) for place in places}) > 8
    assert torch.equal(found[3], GRAPHS["shuffled"](known, 3).weights)


def test_shared_labels_can_be_shuffled_too():
    dealt = federation(labels=[[0, 1], [0, 2], [3, 4], [5, 4]])
    links = GRAPHS["shuffled"](dealt, 1, of="label_overlap")
    known = label_overlap(dealt, 0).weights
    assert links.origin == "oracle"
    orders = [list(order) for order in itertools.permutations(range(4))]
    assert any(torch.equal(renamed(known, order), links.weights) for order in orders)


@given(st.integers(2, 8), st.integers(0, 10_000))
def test_random_keeps_the_number_of_links(count, seed):
    upper = anything(count, seed).triu(1)
    known = federation(count, graph=upper + upper.T)
    weights = GRAPHS["random"](known, seed).weights
    assert torch.equal(weights, weights.T)
    assert (weights.diagonal() == 0).all()
    assert weights.unique().tolist() in ([0.0], [1.0], [0.0, 1.0])
    assert (weights != 0).sum() == 2 * (upper != 0).sum()


def test_random_links_every_pair_alike():
    upper = torch.zeros(5, 5)
    upper[0, 1] = upper[0, 2] = upper[0, 3] = 1
    known = federation(5, graph=upper + upper.T)
    share = torch.stack([GRAPHS["random"](known, seed).weights for seed in range(2000)]).mean(0)
    off = ~torch.eye(5, dtype=torch.bool)
    # 3 of 10 pairs; the deviation is 0.0102, and 20 entries stay within 4.4 of it.
    assert (share[off] - 0.3).abs().max() < 0.045


@pytest.mark.parametrize("name", ["shuffled", "random"])
def test_controls_take_the_graph_or_else_the_groups(name):
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    graph = torch.zeros(6, 6)
    graph[0, 1] = graph[1, 0] = 1
    pairs = {"given": 2, "oracle": 14}
    both, hidden, open_ = federation(graph=graph, groups=groups), federation(groups=groups), federation(graph=graph)
    for known, of, expected in [
        (both, None, "given"), (both, "given", "given"), (both, "oracle", "oracle"),
        (hidden, None, "oracle"), (hidden, "oracle", "oracle"), (open_, None, "given"),
    ]:  # fmt: skip
        found = GRAPHS[name](known, 0, of=of)
        assert (found.origin, int((found.weights * (1 - torch.eye(6))).sum())) == (expected, pairs[expected])
    with pytest.raises(UsageError, match=r"no graph of its own; choose of = 'oracle'"):
        GRAPHS[name](hidden, 0, of="given")
    with pytest.raises(UsageError, match="no hidden groups"):
        GRAPHS[name](federation(), 0)


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "none"])
def test_listing_clients_in_another_order_only_reorders_the_graph(name):
    order, names = [3, 0, 5, 1, 4, 2], ("a", "b", "c", "d", "e", "f")
    labels, groups, graph = [[0, 1], [1], [2, 3], [3], [0], [4]], torch.tensor([0, 1, 0, 2, 2, 1]), anything(6, 4)
    one = federation(graph=graph, groups=groups, names=names, labels=labels)
    other = federation(
        graph=renamed(graph, order),
        groups=groups[order],
        names=[names[i] for i in order],
        labels=[labels[i] for i in order],
    )
    for seed in range(5):
        assert torch.equal(GRAPHS[name](other, seed).weights, renamed(GRAPHS[name](one, seed).weights, order))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: adjacency([[0, -1], [1, 0]]), r"entry \[0, 1\] is -1"),
        (lambda: adjacency([[0, math.nan], [1, 0]]), r"entry \[0, 1\] is nan"),
        (lambda: adjacency([[0, 1, 2], [1, 0, 2]]), r"one row per client; got \[2, 3\]"),
        (lambda: adjacency([["a", "b"], ["c", "d"]]), r"weights must be numbers \[N, N\]"),
        (lambda: adjacency([]), "one row per client"),
        (lambda: distance([[0, -1], [1, 0]]), r"entry \[0, 1\] is -1"),
        (lambda: distance([[0, 1], [math.nan, 0]]), r"entry \[1, 0\] is nan"),
        (lambda: distance([[0, 1], [1, 0]]), "set sigma"),
        (lambda: distance([[0, INF], [INF, 0]]), "set sigma"),
        (lambda: distance([[0, 1], [2, 0]], sigma=0.0), "sigma is a distance"),
        (lambda: distance([[0, 1], [2, 0]], threshold=1.5), "threshold"),
        (lambda: label_overlap(federation(), 0, most=0), "at least 1"),
        (lambda: GRAPHS["oracle"](federation(), 0), "no hidden groups"),
    ],
)
def test_refuses(make, said):
    with pytest.raises(UsageError, match=said):
        make()


def test_label_overlap_needs_labels():
    rows = {split: [torch.tensor([0]), torch.tensor([1])] for split in ("train", "validation", "test")}
    with pytest.raises(UsageError, match="class labels"):
        label_overlap(Federation(torch.zeros(2, 1), torch.zeros(2, 1), rows, Regression()), 0)


SMALL = ["rounds=2", "federation.clients=8", "federation.partition.groups=4"]


def run(tmp_path, capsys, *settings):
    folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    code = main(["run", "sfl", "method.structure=known", *SMALL, *settings, "--out", str(folder), "--json", "--quiet"])
    out, err = capsys.readouterr()
    return (json.loads(out) if code == 0 else err), folder


def test_graphs_are_chosen_in_a_config_and_their_origin_is_told(tmp_path, capsys):
    summary, folder = run(tmp_path, capsys, "federation.graph=oracle")
    assert summary["relation"] == {"origin": "oracle", "auroc": 1.0, "itself": 0.5, "within": 0.5, "between": 0.0}
    relations = np.load(folder / "relations.npz")
    assert str(relations["origin"]) == "oracle"
    assert (relations["relation"][0] == np.kron(np.eye(4), np.full((2, 2), 0.5))).all()
    summary, _ = run(tmp_path, capsys, "federation.graph.name=random", "federation.graph.of=oracle")
    assert summary["relation"]["auroc"] < 1
    summary, _ = run(tmp_path, capsys, "federation.graph=identity")
    assert summary["relation"] == {"origin": "given", "auroc": 0.5, "itself": 1.0, "within": 0.0, "between": 0.0}
    summary, _ = run(tmp_path, capsys, "method.structure=similarity")
    assert summary["relation"]["origin"] == "learned"
    assert {METHODS[name]().origin for name in ("local", "fedavg", "pfedbayes")} == {"fixed"}  # nobody gave it to them
    # What a graph is worth is seen by comparing runs that differ in nothing else.
    assert main(["compare", *map(str, tmp_path.iterdir()), "--json"]) == 0
    assert {row["set"] for row in json.loads(capsys.readouterr().out)["runs"]} == {1}
    assert run(tmp_path, capsys)[0]["relation"]["origin"] == "learned"  # where there is no graph
    assert "did you mean 'shuffled'" in run(tmp_path, capsys, "federation.graph=shufled")[0]


def test_graphs_are_listed(capsys):
    assert main(["list", "graphs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(listed) == set(GRAPHS)
    assert [(one["name"], one["default"]) for one in listed["label_overlap"]["settings"]] == [("most", 5)]
    assert all(entry["what"].endswith(".") for entry in listed.values())


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.filterwarnings("ignore:.*every link has the weight 1")
def test_edges_from_csv(tmp_path):
    path = write(tmp_path / "edges.csv", "to,from,note\nb,a,x\n c ,a,y\n")
    links = torch.tensor([[0.0, 1, 1], [1, 0, 0], [1, 0, 0]])
    assert torch.equal(read(path, ["a", "b", "c"]).weights, links)
    assert torch.equal(read(path, ["a", "b", "c"], directed=True).weights, links.triu())
    assert torch.equal(read(path, ["c", "b", "a", "lonely"]).weights[:3, :3], links.flip(0, 1))
    assert read(path, ["a", "b", "c", "lonely"]).weights[3].sum() == 0
    path = write(tmp_path / "edges.csv", "from,to,weight\na,b,0.5\nb,a,0.5\nb,b,2\n")
    assert read(path, ["a", "b"]).weights.tolist() == [[0, 0.5], [0.5, 2]]
    assert read(path, ["a", "b"]).origin == "given"


def test_distances_from_csv_go_through_the_kernel(tmp_path):
    path = write(tmp_path / "roads.csv", "from,to,distance\na,b,1\nb,c,4\n")
    table = [[0, 1, INF], [1, 0, 4], [INF, 4, 0]]
    names = ["a", "b", "c"]
    assert torch.equal(read(path, names).weights, distance(table).weights)
    again = read(path, names, sigma=2.0, threshold=0.5).weights
    assert torch.equal(again, distance(table, sigma=2.0, threshold=0.5).weights)
    one_way = read(path, names, directed=True, sigma=4.0).weights
    assert torch.equal(one_way, distance([[0, 1, INF], [INF, 0, 4], [INF, INF, 0]], sigma=4.0).weights)


def test_distances_that_leave_no_link_are_refused_or_have_their_mean_for_sigma(tmp_path):
    path = write(tmp_path / "e.csv", "from,to,distance\na,b,100\nb,c,90\n")  # their deviation is 5
    with pytest.raises(
        UsageError, match=r"e\.csv: all distances are so long .* below threshold=0\.1; set a larger sigma"
    ):
        read(path, ["a", "b", "c"], sigma=5.0)
    assert float(read(path, ["a", "b", "c"]).weights[0, 1]) == pytest.approx(math.exp(-((100 / 95) ** 2)))
    weights = read(path, ["a", "b", "c"], sigma=100.0).weights
    assert float(weights[0, 1]) == pytest.approx(math.exp(-1))
    assert weights[0, 2] == 0


def test_edges_from_graphml(tmp_path):
    import networkx

    graph = networkx.DiGraph()
    graph.add_node("0", label="a")
    graph.add_node("1", label="b")
    graph.add_edge("0", "1", weight=0.25)
    networkx.write_graphml(graph, tmp_path / "g.graphml")
    assert read(tmp_path / "g.graphml", ["a", "b", "c"]).weights.tolist() == [[0, 0.25, 0], [0, 0, 0], [0, 0, 0]]
    assert read(tmp_path / "g.graphml", ["0", "1"]).weights.tolist() == [[0, 0.25], [0, 0]]
    networkx.write_graphml(networkx.Graph([("a", "b")]), tmp_path / "g.graphml")
    assert read(tmp_path / "g.graphml", ["a", "b"]).weights.tolist() == [[0, 1], [1, 0]]


def test_adjacency_from_arrays(tmp_path):
    table = np.array([[0, 1.0, 2], [3, 0, 4], [5, 6, 0]])
    np.savez(tmp_path / "g.npz", adjacency=table)
    np.save(tmp_path / "g.npy", table)
    for path in ("g.npz", "g.npy"):
        assert read(tmp_path / path, ["a", "b", "c"]).weights.tolist() == table.tolist()
    np.savez(tmp_path / "g.npz", adjacency=table, names=np.array(["c", "a", "b"]))
    kept = read(tmp_path / "g.npz", ["a", "b"], strangers=True).weights
    assert torch.equal(kept, read(tmp_path / "g.npz", ["a", "b", "c"]).weights[:2, :2])
    found = read(tmp_path / "g.npz", ["a", "b", "lonely", "c"]).weights
    assert found.tolist() == [[0, 4, 0, 3], [6, 0, 0, 5], [0, 0, 0, 0], [1, 2, 0, 0]]
    for names, said in ((["a", "b"], "has 2 names, 2 of"), (["a", "b", "b"], "has 3 names, 2 of them different")):
        np.savez(tmp_path / "g.npz", adjacency=table, names=np.array(names))
        with pytest.raises(UsageError, match=f"the client of each of the 3 rows of adjacency; it {said}"):
            read(tmp_path / "g.npz", ["a", "b"])


def test_columns_of_weights_and_distances_may_have_any_name(tmp_path):
    path = write(tmp_path / "roads.csv", "from,to,distance_km\na,b,1\nb,c,4\n")
    with pytest.raises(UsageError, match=r"did you mean 'distance'\? Rename it, or set distances='distance_km'"):
        read(path, ["a", "b", "c"])
    found = read(path, ["a", "b", "c"], distances="distance_km", sigma=2.0)
    usual = write(tmp_path / "usual.csv", path.read_text().replace("_km", ""))
    assert torch.equal(found.weights, read(usual, ["a", "b", "c"], sigma=2.0).weights)
    assert read(path, ["a", "b", "c"], weights="distance_km").weights.tolist() == [[0, 1, 0], [1, 0, 4], [0, 4, 0]]
    with pytest.raises(UsageError, match="there is no column 'km', as distances says; known: distance_km"):
        read(path, ["a", "b", "c"], distances="km")


def test_a_column_that_is_no_weight_is_told_of(tmp_path):
    path = write(tmp_path / "e.csv", "from, to, w\na, b, 7\n")
    with pytest.warns(UserWarning, match=r"e\.csv: every link has the weight 1, .* and w is ignored"):
        assert read(path, ["a", "b"]).weights.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("e.csv", "from,to\na,b\na,x\n", "line 3: there is no client 'x'; the 2 clients are named 'a' to 'b'"),
        ("e.csv", "source,to\na,b\n", "the header must have the columns from and to; got source, to"),
        ("e.csv", "", "the header must have the columns from and to; got nothing"),
        ("e.csv", "from,to,weight\na,b,much\n", "line 2: 'much' is not a number"),
        ("e.csv", "from,to,weight\na,b,-1\n", "line 2: a weight or distance must be finite and not negative; got -1"),
        ("e.csv", "from,to,weight\na,b\n", "line 2 must have 3 entries, as the header has"),
        ("e.csv", "from,to\na,b,c\n", "line 2 must have 2 entries, as the header has"),
        (
            "e.csv",
            "from,to,weight\na,b,1\nb,a,2\n",
            "line 3 gives 'b' - 'a' the value 2, but line 2 gave 1; set directed",
        ),
        ("e.csv", "from,to,wieght\na,b,1\n", "unknown column 'wieght'; did you mean 'weight'"),
        ("e.csv", "from,to,weight,distance\na,b,1,1\n", "a weight or a distance, not both"),
        ("e.csv", "from,to,weight,weight \na,b,1,2\n", "two columns are named 'weight'"),
        ("e.csv", "from,to,weight\na,b,1_5\n", "line 2: '1_5' is not a number"),
        ("e.graphml", "<not xml", "cannot be read as a graph"),
        ("e.npz", "no zip", "cannot be read as a graph"),
        ("e.txt", "", r"a graph is read from \.csv, \.graphml, \.npz, \.npy; got '\.txt'"),
    ],
)
def test_bad_graph_files_are_refused_with_the_place(tmp_path, name, text, said):
    with pytest.raises(UsageError, match=rf"{name}.*{said}") as found:
        read(write(tmp_path / name, text), ["a", "b"])
    assert "\n" not in str(found.value)


def test_graph_files_that_are_missing_or_hold_something_else(tmp_path):
    with pytest.raises(UsageError, match="there is no graph file"):
        read(tmp_path / "none.csv", ["a"])
    (tmp_path / "g.npz").write_text("from,to")
    with pytest.raises(UsageError, match=r"g\.npz cannot be read as a graph: it is not a \.npz file of plain numbers"):
        read(tmp_path / "g.npz", ["a"])
    np.savez(tmp_path / "g.npz", links=np.eye(2))
    with pytest.raises(UsageError, match=r"g\.npz: it must hold the array adjacency; it holds links"):
        read(tmp_path / "g.npz", ["a", "b"])
    np.savez(tmp_path / "g.npz", adjacency=np.eye(2), names=np.array(["a", "q"]))
    with pytest.raises(UsageError, match="names: there is no client 'q'"):
        read(tmp_path / "g.npz", ["a", "b"])
