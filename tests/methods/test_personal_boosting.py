"""Personal boosting by hand, against a second implementation with rows at hand, and at the ends it lies between."""

import itertools
import math

import numpy as np
import polars
import pytest
import torch
from torch import nn

import kinfed
from kinfed import Classification, Counts, Execution, Federation, Forecasting, Quantiles, Regression, UsageError, fit
from kinfed.cli import main
from kinfed.core.engine import Rounds, run
from kinfed.core.history import History, Recorder
from kinfed.core.mixins import model_for, reduce_uploads
from kinfed.core.training import Training
from kinfed.methods.solved import personal_boosting
from kinfed.methods.solved.personal_boosting import (
    REFINED,
    PersonalBoosting,
    best_splits,
    bins,
    difference,
    finer,
    leaf_sums,
)
from kinfed.models.trees import NOWHERE, Nodes, Trees, split_variances, trees, values
from kinfed.simulation.simulation import Simulation
from kinfed_flower import plan


def federation(x, y, client, task):
    """All rows of each client are for training; they are also what validation and the test are of."""
    rows = [np.flatnonzero(client == i) for i in np.unique(client)]
    every = [torch.from_numpy(one) for one in rows]
    splits = {split: every for split in ("train", "validation", "test")}
    return Federation(torch.from_numpy(x), torch.from_numpy(y), splits, task)


def module(inputs, outputs, count=4, depth=2, holes=()):
    return Trees(inputs, outputs, count, depth, list(holes)).double()


def boosted(data, made, rounds, executor="loop", **settings):
    """[N, d] the clients' models after all rounds, and what was recorded."""
    method = PersonalBoosting(**settings)
    fleet = Simulation(data, model_for(method, made), method, Training(), execution=Execution(executor))
    history = History(data.names, data.task)
    run(fleet.method, fleet.roster(), fleet, Recorder(history), rounds=Rounds(rounds, rounds))
    return history.models["theta"], history


def answers(made, thetas, x, client):
    """[n, k] each row's answer by its client's model."""
    model = kinfed.Model(made)
    return torch.cat([model(thetas[i], torch.from_numpy(x[j : j + 1])) for j, i in enumerate(client)]).numpy()


def test_a_tree_of_one_split_by_hand():
    """Two clients, whose targets differ above 0 by 4 and by 8."""
    x = np.array([[-1.0], [-1.0], [1.0], [1.0], [-1.0], [-1.0], [1.0], [1.0]])
    y = np.array([0.0, 0.0, 4.0, 4.0, 0.0, 0.0, 8.0, 8.0])
    client = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    made = module(1, 1, 1, 1)
    how = {"rate": 0.5, "ridge": 0.0, "least": 1.0}
    thetas, _ = boosted(federation(x, y, client, Regression()), made, REFINED + 3, penalty=2.0, **how)
    # The mean is 3, so slopes sum to -12 at left and to 12 at right: both leaves are 3 in size.
    # At right client 0 has 2 rows of slope 1, so d = (2 - 2 * 3) / (2 + 2) = -1; client 1 has 5, and d = 1.
    found = answers(made, thetas, x, client)[:, 0]
    np.testing.assert_allclose(found, [1.5, 1.5, 4.0, 4.0, 1.5, 1.5, 5.0, 5.0], atol=1e-6)
    pooled, _ = boosted(federation(x, y, client, Regression()), made, REFINED + 3, penalty=math.inf, **how)
    np.testing.assert_allclose(answers(made, pooled, x, client)[:, 0], 1.5 + 3 * (x[:, 0] > 0), atol=1e-6)
    alone, _ = boosted(federation(x, y, client, Regression()), made, REFINED + 3, penalty=0.0, **how)
    np.testing.assert_allclose(answers(made, alone, x, client)[:, 0], 3 + (y - 3) / 2, atol=1e-6)


def slopes(task, f, y):
    """[n, k] first and second derivatives, as a second implementation has them."""
    if isinstance(task, Classification):
        share = np.exp(f - f.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        return np.eye(task.classes)[y] - share, np.maximum(2 * share * (1 - share), 1e-3)
    if isinstance(task, Counts):
        mean = np.exp(f)
        return y[:, None] / task.mean - mean, np.maximum(mean, 1e-3)
    return y.reshape(f.shape) - f, np.ones_like(f)


def twin(x, y, client, task, f, *, count, depth, rate, ridge, least, penalty):
    """[n, k] outputs of boosting with rows at hand: trees as nested lists, splits tried value by value.

    One tree ends in a round, as `PersonalBoosting` says: tree t has its level l in round t + l.
    """
    growing, pending = [], None
    for step in range(count + depth + 1):
        if pending is not None:
            f = f + pending
        pending = None
        g, h = slopes(task, f, y)
        if step >= depth and step - depth < count:
            tree = growing[step - depth]
            leaf = np.array([walk(tree, row) for row in x])
            pending = np.zeros_like(f)
            for one in np.unique(leaf):
                here = leaf == one
                v = g[here].sum(0) / (h[here].sum(0) + ridge)
                if isinstance(task, Counts):
                    v = v.clip(-0.7, 0.7)
                for i in np.unique(client[here]):
                    own = here & (client == i)
                    d = (g[own].sum(0) - h[own].sum(0) * v) / (h[own].sum(0) + penalty)
                    if isinstance(task, Counts):
                        d = (v + d).clip(-0.7, 0.7) - v
                    pending[own] = rate * (v + d)
        growing.append({})
        for t, tree in enumerate(growing[:count]):
            level = step - t
            if not 0 <= level < depth:
                continue
            at = np.array([walk(tree, row, level) for row in x])
            for node in range(2**level):
                here = at == node
                best = (1e-9, None)
                for column in range(x.shape[1]):
                    for value in np.unique(x[:, column][~np.isnan(x[:, column])]):
                        for lost in (False, True):
                            right = here & ((x[:, column] > value) | (np.isnan(x[:, column]) & lost))
                            left = here & ~right
                            if min(h[left].sum(0).mean(), h[right].sum(0).mean()) < least:
                                continue
                            gain = worth(g, h, left, ridge) + worth(g, h, right, ridge) - worth(g, h, here, ridge)
                            if gain > best[0] + 1e-7:
                                best = (gain, (column, value, lost))
                tree[level, node] = best[1]
    return f


def worth(g, h, here, ridge):
    return (g[here].sum(0) ** 2 / (h[here].sum(0) + ridge)).sum()


def walk(tree, row, levels=None):
    """The node that a row reaches at a level, at first the deepest that the tree has."""
    node, level = 0, 0
    while (level, node) in tree and level != levels:
        split = tree[level, node]
        right = split is not None and (row[split[0]] > split[1] or (np.isnan(row[split[0]]) and split[2]))
        node, level = 2 * node + int(right), level + 1
    return node


@pytest.mark.parametrize("kind", ["numbers", "two classes", "three classes", "counts"])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_it_gives_what_a_second_implementation_gives(kind, executor):
    draw = np.random.default_rng(4)
    n, client = 90, np.arange(90) % 6
    x = draw.integers(0, 7, (n, 3)).astype(float)
    x[:, 1] += 0.37 * draw.integers(0, 3, n)
    signal = (x[:, 0] > 3) * (client - 2.5) + 0.3 * x[:, 1]
    lost = draw.random(n) < 0.2
    signal = signal + 2 * lost
    seen, given = x.copy(), np.concatenate([x, lost[:, None]], 1).astype(float)
    seen[lost, 2], given[lost, 2] = np.nan, 1.0
    seen = np.concatenate([seen, lost[:, None]], 1).astype(float)
    how = {"rate": 0.3, "ridge": 1.0, "least": 2.0, "penalty": 3.0}
    if kind == "numbers":
        task, y = Regression(), signal + 0.1 * draw.normal(size=n)
        base = np.full((n, 1), y.mean())
    elif kind == "counts":
        y = draw.poisson(np.exp(0.5 * signal)).astype(float)
        task, base = Counts(mean=2.0), np.full((n, 1), np.log(y.mean() / 2))
    else:
        classes = 2 if kind == "two classes" else 3
        y = np.digitize(signal + 0.1 * draw.normal(size=n), np.quantile(signal, np.arange(1, classes) / classes))
        task, base = Classification(classes), np.tile(np.log(np.bincount(y) / n), (n, 1))
    made = module(4, base.shape[1], 5, 2, [(2, 3)])
    data = federation(given, y, client, task)
    thetas, _ = boosted(data, made, REFINED + 5 + 3, executor, **how)
    expected = twin(seen, y, client, task, base, count=5, depth=2, **how)
    assert float((made.flat(thetas)[:, : 5 * 4] != 0).double().mean()) > 0.1  # trees have grown
    np.testing.assert_allclose(answers(made, thetas, given, client), expected, atol=1e-5)


def test_without_personal_leaves_it_is_boosting_on_all_rows():
    """To the bit, wherever the rows lie; with them and no shrinkage a client's leaves are of its rows alone."""
    draw = np.random.default_rng(0)
    x, client = draw.normal(size=(120, 3)), np.arange(120) % 8
    y = x[:, 0] * (client - 3.5) + draw.normal(size=120)
    made = module(3, 1, 8, 3)
    divided, _ = boosted(federation(x, y, client, Regression()), made, 14, penalty=math.inf)
    pooled, _ = boosted(federation(x, y, 0 * client, Regression()), made, 14, penalty=math.inf)
    assert torch.equal(divided, pooled.expand(8, -1))
    some, _ = boosted(federation(x, y, client, Regression()), made, 14, penalty=3.0)
    assert not torch.equal(some[0], some[1])
    reordered, _ = boosted(federation(x, y, 7 - client, Regression()), made, 14, penalty=3.0)
    torch.testing.assert_close(reordered.flip(0), some, rtol=1e-12, atol=1e-12)


def test_how_clients_differ_is_estimated_from_sums():
    """DerSimonian and Laird's formula, written out for one leaf, and what it finds where the truth is known."""
    draw = np.random.default_rng(1)
    sizes = draw.integers(2, 30, 400)
    client = np.repeat(np.arange(400), sizes)
    for spread, noise in ((0.0, 1.0), (0.5, 1.0), (2.0, 0.5)):
        slope = spread * draw.normal(size=400)[client] + noise * draw.normal(size=len(client))
        parts = [torch.from_numpy(slope[client == i])[:, None] for i in range(400)]
        ones = [torch.ones_like(part) for part in parts]
        leaves = [torch.zeros(len(part), dtype=torch.int64) for part in parts]
        sums = torch.stack([leaf_sums(g, h, h[:, 0], at, 2) for g, h, at in zip(parts, ones, leaves, strict=True)])
        found = difference(sums.sum(0))
        means = np.array([float(part.mean()) for part in parts])
        within = sum(float((part - part.mean()).square().sum()) for part in parts) / (len(client) - 400)
        grand = (means * sizes).sum() / sizes.sum()
        excess = (sizes * (means - grand) ** 2).sum() - 399 * within
        expected = max(0.0, excess / (sizes.sum() - (sizes**2).sum() / sizes.sum())) / within
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert found == pytest.approx((spread / noise) ** 2, rel=0.2, abs=0.01)
    lone = leaf_sums(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1), torch.zeros(1, dtype=torch.int64), 2)
    assert math.isnan(difference(lone))


def test_missing_numbers_go_where_the_gain_is_larger():
    histograms = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    histograms[0, 0, :, 0] = torch.tensor([-6.0, 5.0, 5.0, 6.0])  # the last bin is what is missing
    histograms[0, 0, :, 1] = 5.0
    allowed = torch.ones(1, 1, dtype=torch.bool)
    assert [int(one) for one in best_splits(histograms, 1, 0.0, 1.0, allowed)] == [0, 0, 1]
    histograms[0, 0, 3, 0] = -6.0
    assert [int(one) for one in best_splits(histograms, 1, 0.0, 1.0, allowed)] == [0, 0, 0]
    histograms[0, 0, :3, 0] = 0.0  # only that it is missing says anything
    assert [int(one) for one in best_splits(histograms, 1, 0.0, 1.0, allowed)] == [0, 2, 1]
    assert int(best_splits(histograms, 1, 0.0, 1.0, ~allowed)[0]) == -1
    assert int(best_splits(histograms, 1, 0.0, 6.0, allowed)[0]) == 0
    assert int(best_splits(histograms, 1, 0.0, 16.0, allowed)[0]) == -1


@pytest.mark.parametrize("counts", [[3, 2, 4], [3, 70, 2, 9], [60, 40]])
def test_histograms_of_narrow_and_wide_columns_are_sums_row_by_row(counts):
    draw = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, *counts]).cumsum(0)
    place = torch.stack(
        [begin + torch.randint(count, (50,), generator=draw) for begin, count in zip(starts, counts, strict=False)]
    )
    at = torch.stack([torch.randint(3, 7, (50,), generator=draw), torch.randint(1, 3, (50,), generator=draw)])
    rows = torch.randint(-999, 999, (2, 50), generator=draw).double() * personal_boosting.UNIT
    wanted = torch.zeros(2, 7, sum(counts), dtype=torch.float64)
    for i, nodes in enumerate(at.T.tolist()):
        for node in nodes:
            wanted[:, node, place[:, i]] += rows[:, i, None]
    assert torch.equal(personal_boosting._histograms(at, place, rows, starts, 7), wanted)


@pytest.mark.parametrize("heavy", [False, True])
def test_bins_come_from_counts_and_are_about_as_full(heavy):
    draw = np.random.default_rng(3)
    rows = torch.from_numpy(np.exp(2.5 * draw.normal(size=5000)) if heavy else draw.normal(size=5000))
    rows = (rows - rows.mean()) / rows.std()
    edges = 0.05 * torch.linspace(-11, 11, 255, dtype=torch.float64).sinh()
    count = lambda edges: torch.bincount(torch.searchsorted(edges, rows), minlength=len(edges) + 1)  # noqa: E731
    for _ in range(REFINED - 1):
        edges = finer(edges, count(edges), 255)
        assert len(edges) <= 255
    chosen = bins(edges, count(edges), 63)
    full = count(chosen).double() * 64 / len(rows)
    assert len(chosen) > 55
    assert float(full.min()) > 0.3
    assert float(full.max()) < 2.0
    rare = torch.tensor([0.0] * 4999 + [1.0], dtype=torch.float64)  # a category of one row is parted from the others
    edges = 0.05 * torch.linspace(-11, 11, 255, dtype=torch.float64).sinh()
    for _ in range(REFINED - 1):
        edges = finer(edges, torch.bincount(torch.searchsorted(edges, rare), minlength=len(edges) + 1), 255)
    parted = bins(edges, torch.bincount(torch.searchsorted(edges, rare), minlength=len(edges) + 1), 63)
    assert len(parted) == 1
    assert 0 < float(parted) < 1


def test_a_newcomer_needs_its_own_rows_and_the_trees_alone():
    """Who never took part corrects all leaves at once, and has what it would have had."""
    draw = np.random.default_rng(2)
    x, client = draw.normal(size=(200, 3)), np.arange(200) % 5
    y = x[:, 0] * (client - 2) + 0.3 * draw.normal(size=200)
    data, method, made = federation(x, y, client, Regression()), PersonalBoosting(penalty=2.0), module(3, 1, 20, 3)
    fleet = Simulation(data, model_for(method, made), method, Training(), execution=Execution("loop"))
    roster = fleet.roster()
    server = method.start(roster)
    everyone = roster.everyone
    for step in range(26):
        sent = method.send(roster, server, everyone)
        _, uploads = fleet.train(step, everyone, sent)
        server = method.aggregate(roster, server, everyone, reduce_uploads(method, roster, everyone, uploads))
    there = fleet.evaluate(26, everyone, method.send(roster, server, everyone)).models["mixed"].theta
    other = Simulation(data, model_for(method, made), method, Training(), execution=Execution("vmap"))
    sent = method.send(roster, server._replace(corrected=torch.zeros(5, dtype=torch.int64)), everyone)
    new = other.evaluate(0, everyone, sent).models["mixed"].theta
    assert not torch.equal(there[0], there[1])
    torch.testing.assert_close(new, there, rtol=1e-9, atol=1e-9)


def test_a_tree_reads_what_its_nodes_say():
    nodes = Nodes(
        torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[0.5, -1.0, NOWHERE]]), torch.tensor([[1.0, 0.0, 0.0]])
    )
    x = torch.tensor([[0.0, 0.0, 1.0, math.nan], [0.0, -2.0, 9.0, 0.0]])
    assert nodes.find_leaf(x, 2).tolist() == [[1, 0, 2, 2]]


def test_counts_with_heavy_tails_stay_finite_and_quantiles_cover():
    draw = np.random.default_rng(5)
    client, x = np.arange(600) % 30, draw.normal(size=(600, 2))
    y = np.floor(np.exp(1.5 * draw.standard_t(2, 600).clip(-6, 6) + x[:, 0]))
    made = module(2, 1, 60, 3)
    thetas, _ = boosted(federation(x, y, client, Counts(mean=float(y.mean()))), made, 70)
    assert float(np.abs(answers(made, thetas, x, client)).max()) < 12
    level = client[:, None] / 10 + draw.normal(size=(600, 2))
    level[::7, 1] = np.nan
    task = Quantiles(quantiles=(0.1, 0.9))
    made = module(2, 4, 100, 2)
    _, history = boosted(federation(x, level, client, task), made, 110)
    assert 0.72 < float(history.scores[-1]["mixed", "test", "coverage"].mean()) < 0.92
    for error in ("squared", "absolute"):
        made = module(2, 2, 40, 2)
        few, many = (boosted(federation(x, level, client, Forecasting(error=error)), made, one)[1] for one in (3, 50))
        first, last = (one.scores[-1]["mixed", "test", "mae"].mean() for one in (few, many))
        assert float(last) < 0.9 * float(first)


def test_what_it_cannot_do_is_told_in_one_line():
    x, y, client = np.ones((20, 2)), np.ones(20), np.arange(20) % 2
    data = federation(x, y, client, Regression())
    with pytest.raises(UsageError, match=r"grows the model 'trees', all of which travels; set model.name=trees"):
        fit(PersonalBoosting(), data, nn.Linear(2, 1).double(), rounds=1)
    with pytest.raises(UsageError, match=r"set model.name=trees"):
        fit(PersonalBoosting(personal=("leaf",)), data, module(2, 1), rounds=1)
    with pytest.raises(UsageError, match="1 to 8 levels; got trees=200, depth=9"):
        trees((2,), 1, depth=9)
    thetas, _ = boosted(data, module(2, 1), 9)  # columns and targets that are all one value: nothing to split
    np.testing.assert_allclose(answers(module(2, 1), thetas, x, client), 1.0)


def test_from_a_table_with_missing_cells_to_predictions_exports_and_newcomers(tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    draw = np.random.default_rng(0)
    n = 240
    who, weight = np.arange(n) % 6, draw.normal(50, 10, n)
    kind = np.where(draw.random(n) < 0.5, "old", "new")
    size = np.where(kind == "new", 5.0 * who, 0.0) + 0.2 * np.abs(weight - 50) + 0.1 * draw.normal(size=n)
    holes = np.where(draw.random(n) < 0.1, None, weight.round(3))
    frame = polars.DataFrame({"who": [f"w{i}" for i in who], "weight": list(holes), "kind": kind, "size": size})
    frame.filter(polars.col("who") != "w5").write_csv(tmp_path / "t.csv")
    frame.filter(polars.col("who") == "w5").write_csv(tmp_path / "new.csv")
    run = tmp_path / "run"
    asked = ["run", str(tmp_path / "t.csv"), "--client", "who", "--target", "size", "--method", "personal-boosting"]
    asked += ["model.name=trees", "model.trees=60", "model.depth=3", "rounds=66", "evaluate_every=11", "--beside"]
    assert main([*asked, "none", "--quiet", "--out", str(run)]) == 0
    opened = kinfed.Run.open(run)
    ask = frame.filter(polars.col("who") == "w4").drop("size")
    expected = opened.predictor("w4")(ask)["size"].to_list()
    truth = frame.filter(polars.col("who") == "w4")["size"].to_numpy()
    assert np.abs(np.array(expected) - truth).mean() < 0.25 * np.abs(truth - truth.mean()).mean()
    assert main(["export", str(run), "--client", "w4", "--out", str(tmp_path / "onnx")]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "w4.onnx")
    given = {"weight": ask["weight"].to_numpy().astype(np.float64), "kind": ask["kind"].to_numpy().astype(object)}
    types = {one.name: one.type for one in session.get_inputs()}
    given["weight"] = given["weight"].astype(np.float32 if "float" in types["weight"] else np.float64)
    found = session.run(None, given)[0].reshape(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    capsys.readouterr()
    onboarded = tmp_path / "onboarded"
    assert main(["onboard", str(run), "--data", str(tmp_path / "new.csv"), "--out", str(onboarded)]) == 0
    assert "1 newcomer to" in capsys.readouterr().err
    new = frame.filter(polars.col("who") == "w5")
    found, truth = (
        kinfed.Run.open(onboarded).predictor("w5")(new.drop("size"))["size"].to_numpy(),
        new["size"].to_numpy(),
    )
    assert np.abs(found - truth).mean() < 0.1 * np.abs(truth - truth.mean()).mean()


def test_sites_give_sums_of_single_rows_to_nobody():
    asked = {"method": "personal-boosting", "model": "trees"}
    with pytest.raises(UsageError, match=r"a server of sites could read them; set privacy\.masked=true"):
        plan.resolve(asked)
    assert plan.resolve(asked | {"privacy": {"masked": True}}).learning.training.masks is not None


def test_what_splits_do_to_answers_adds_up_to_their_variance():
    """By hand: the root parts (1, 3) from 10, which does not split, so 16 of 16.5 are the root's."""
    threshold = torch.tensor([[0.0, 0.0, NOWHERE]])
    shares = split_variances(threshold, torch.tensor([[[1.0], [3.0], [10.0], [99.0]]]))
    torch.testing.assert_close(shares, torch.tensor([[16.0, 0.5, 0.0]]))
    draw = torch.Generator().manual_seed(0)
    full, leaf = torch.zeros(5, 15), torch.randn(5, 16, 2, generator=draw)
    torch.testing.assert_close(split_variances(full, leaf).sum(1), leaf.var(1, correction=0).sum(1))
    assert split_variances(torch.full((1, 3), NOWHERE), leaf[:1, :4]).sum() == 0


def shapley(answer, row, background):
    """[f] exact Shapley values of the answer to a row, over all subsets of inputs taken from it."""
    inputs, worth = range(len(row)), {}
    for size in range(len(row) + 1):
        for taken in itertools.combinations(inputs, size):
            mixed = background.clone()
            mixed[:, list(taken)] = row[list(taken)]
            worth[frozenset(taken)] = answer(mixed).mean()
    values = torch.zeros(len(row), dtype=row.dtype)
    for taken, without in worth.items():
        for i in {*inputs} - taken:
            times = math.factorial(len(taken)) * math.factorial(len(row) - len(taken) - 1) / math.factorial(len(row))
            values[i] += times * (worth[taken | {i}] - without)
    return values


def test_shap_values_of_a_clients_trees_are_shapley_values_by_enumeration():
    """Missing numbers, nodes that do not split and splits on what is missing among them."""
    shap = pytest.importorskip("shap")
    draw = np.random.default_rng(6)
    x, client = draw.normal(size=(240, 4)), np.arange(240) % 6
    x[:, 1], x[:, 2] = draw.integers(0, 3, 240), draw.random(240) < 0.3
    x[x[:, 2] > 0, 0] = 0.0
    y = np.abs(x[:, 0]) * (client - 2) + 2 * x[:, 2] + (x[:, 1] > 1) * x[:, 3] + 0.1 * draw.normal(size=240)
    made = module(4, 1, 25, 3, [(0, 2)])
    thetas, _ = boosted(federation(x, y, client, Regression()), made, REFINED + 3 + 25, penalty=2.0)
    made.load_state_dict(kinfed.Model(made).layout.tensors(thetas[4]))
    assert 0 < float((made.threshold >= NOWHERE).double().mean()) < 1
    rows, nodes = made.with_holes(torch.from_numpy(x)), Nodes(made.column, made.threshold, made.lost)
    with torch.no_grad():
        answers_of = made(torch.from_numpy(x))[:, 0]
        answer = lambda z: values(made.leaf, nodes.find_leaf(z.T, 3)).sum(0)[:, 0]  # noqa: E731
        explainer = shap.TreeExplainer(made.to_shap(), rows[:40].numpy(), feature_perturbation="interventional")
        found = explainer.shap_values(rows.numpy())
        for i in (0, 7, int(np.flatnonzero(x[:, 2])[0])):
            expected = shapley(answer, rows[i], rows[:40])
            np.testing.assert_allclose(found[i], expected.numpy(), atol=1e-6)
        np.testing.assert_allclose(found.sum(1) + answers_of[:40].mean().item(), answers_of.numpy(), atol=1e-5)
        halves = shap.TreeExplainer(made.to_shap())
        total = halves.shap_values(rows.numpy()).sum(1) + halves.expected_value
    np.testing.assert_allclose(total, answers_of.numpy(), atol=1e-5)
    shares = torch.zeros(4).index_add_(
        0, made.column.long().flatten(), split_variances(made.threshold, made.leaf.detach()).float().flatten()
    )
    assert ((np.abs(found).max(0) > 0) == (shares.numpy() > 0)).all()  # as `kinfed explain` has it
    with pytest.raises(UsageError, match="this model has a linear layer that is not constant"):
        Trees(2, 1, 1, 1, []).requires_grad_(False).apply(lambda m: [p.fill_(1.0) for p in m.parameters()]).to_shap()
