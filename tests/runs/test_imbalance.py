"""Imbalanced labels: class weights, splits by label, selection by other scores, models that always say one thing."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from kinfed import SGD, Federation, Split, Training, UsageError, fit, from_csv
from kinfed.cli import main
from kinfed.core.engine import Rounds
from kinfed.core.fleet import Evaluation
from kinfed.core.history import History, Recorder
from kinfed.core.round_selection import Selection
from kinfed.core.summary import score_models
from kinfed.core.tasks import Classification, Regression
from kinfed.methods import FedAGHN, FedAvg, Local, PerFedAvg
from kinfed.runs.config import experiment
from kinfed.simulation.execution import Execution
from kinfed.verdict.class_counts import recall_by_class

SIZES = (24, 13, 20, 17)


def federation(classes=3, dtype=torch.float64, **how):
    """Clients of different sizes, with ever fewer examples of the later classes; the last has none of class 0."""
    draw = torch.Generator().manual_seed(3)
    owner = torch.cat([torch.full((n,), i) for i, n in enumerate(SIZES)])
    y = torch.multinomial(torch.tensor([12.0, 4.0, 2.0])[:classes], sum(SIZES), replacement=True, generator=draw)
    y[owner == 3] = y[owner == 3].clamp(min=1)
    x = torch.randn(sum(SIZES), 5, generator=draw, dtype=dtype) + 0.8 * nn.functional.one_hot(y, 5)
    return Federation.from_arrays(x, y, owner, **how)


def module(dtype=torch.float64, classes=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, classes)).to(dtype)


@pytest.mark.parametrize("weights", ["balanced", (0.5, 2.0, 5.0)])
@pytest.mark.parametrize("method", [Local(), FedAGHN(), PerFedAvg(alpha=0.1, beta=0.2), FedAvg()])
def test_class_weights_are_the_same_for_every_executor(method, weights):
    def run(executor, weights=weights):
        training = Training(epochs=1, batch=8, optimiser=SGD(0.2), class_weights=weights)
        return fit(
            method, federation(), module(), rounds=1, training=training, execution=Execution(executor, workers=1)
        )

    loop, vmap, fused, plain = run("loop"), run("vmap"), run("fused"), run("loop", None)
    for other in (vmap, fused):
        assert other.history.chosen == loop.history.chosen
        assert torch.allclose(other.history.models["theta"], loop.history.models["theta"], atol=1e-9)
    assert not torch.allclose(plain.history.models["theta"], loop.history.models["theta"], atol=1e-3)


def one_step(weights, executor):
    """A client with three examples of class 0 and one of class 1, a linear model at zero, one full batch."""
    x = torch.tensor([[1.0], [2.0], [3.0], [-4.0], [0.0], [0.0]], dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 1, 0, 1])
    rows = {"train": [torch.arange(4)], "validation": [torch.tensor([4])], "test": [torch.tensor([5])]}
    net = nn.Linear(1, 2, bias=False).double()
    nn.init.zeros_(net.weight)
    training = Training(epochs=1, batch=4, optimiser=SGD(1.0), class_weights=weights)
    data = Federation(x, y, rows, Classification(2))
    run = fit(Local(), data, net, rounds=1, training=training, execution=Execution(executor))
    return run.model(position=0).weight[:, 0].tolist()


@pytest.mark.parametrize("executor", ["loop", "vmap", "fused"])
def test_weights_by_hand(executor):
    # At zero both probabilities are 1/2: an example of class 0 pulls its row up by x/2, and one of class 1 down by it.
    assert one_step(None, executor) == pytest.approx([(1 + 2 + 3 + 4) / 8, -10 / 8])
    # 4 / (2 * 3) for each of three examples, 4 / (2 * 1) for the one.
    assert one_step("balanced", executor) == pytest.approx([(6 * 2 / 3 + 4 * 2) / 8, -12 / 8])
    assert one_step((1.0, 5.0), executor) == pytest.approx([(6 + 4 * 5) / 8, -26 / 8])


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (
            "even",
            r"must be a list or 'balanced' or left out; got 'even' \(\"balanced\", or a positive number for every",
        ),
        ((1.0, 0.0, 1.0), r"class_weights\[1\] must be positive; got 0.0"),
        ((1.0, float("inf"), 1.0), r"class_weights\[1\] must be finite; got inf"),
        ((1.0, "x", 1.0), r"class_weights\[1\] must be a number; got 'x'"),
        ((10**400, 1.0, 1.0), r"class_weights\[0\] must be at most 3.4e\+38"),
        (7, "got 7"),
        ((1.0, 2.0), "class_weights must be 3 numbers, one per class; got 2"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weights, said):
    with pytest.raises(UsageError, match=said):
        fit(Local(), federation(), module(), rounds=1, training=Training(class_weights=weights))


def test_numbers_have_no_classes_to_weigh_or_to_split_by():
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    numbers = Federation.from_arrays(x, x[:, 0], torch.arange(30) % 2)
    with pytest.raises(UsageError, match="class_weights need labels, and this data has none"):
        fit(Local(), numbers, nn.Linear(5, 1), rounds=1, training=Training(class_weights="balanced"))
    with pytest.raises(UsageError, match="stratify deals examples by their label, but these have none"):
        Federation.from_arrays(x, x[:, 0], torch.arange(30) % 2, split=Split(stratify=True))
    labels = (x[:, 0] > 0).long()
    with pytest.raises(UsageError, match="split in time order; leave it out or set shuffle"):
        Federation.from_arrays(x, labels, torch.arange(30) % 2, time=torch.arange(30), split=Split(stratify=True))


def counts(data, split, client):
    return torch.bincount(data.y[data.rows[split][client]], minlength=data.task.classes).tolist()


@pytest.mark.parametrize("held", [(90, 10), (94, 6), (37, 3), (7, 3), (9, 1), (20, 0)])
@pytest.mark.parametrize("split", [Split(), Split(0.2, 0.0), Split(0.3, 0.2)])
def test_each_class_has_its_share_rounded_up_or_down(held, split):
    y = torch.repeat_interleave(torch.arange(2), torch.tensor(held))
    y = torch.cat([y, torch.tensor([0, 1] * 5)])  # another client, who has both
    owner = torch.arange(len(y)) >= sum(held)
    data = Federation.from_arrays(torch.zeros(len(y), 1), y, owner, split=split)
    test, validation, train = (counts(data, name, 0) for name in ("test", "validation", "train"))
    for part, share, rest in ((test, split.test, held), (validation, split.validation, np.subtract(held, test))):
        size = max(round(share * sum(held)), int(share > 0))
        assert sum(part) == size
        for number, of_class in zip(part, rest, strict=True):
            assert abs(number - size * of_class / max(sum(rest), 1)) < 1
    assert [*map(sum, zip(test, validation, train, strict=True))] == [*held]
    assert sorted(torch.cat([data.rows[name][0] for name in data.rows]).tolist()) == list(range(sum(held)))


def test_no_class_has_more_than_its_share_of_clients_with_few_rows():
    draw = np.random.default_rng(0)
    labels = torch.from_numpy((draw.random((4000, 15)) < draw.beta(1, 4, (4000, 1))).astype(int)).flatten()
    owned = list(torch.arange(len(labels)).split(15))
    parts = Split()(owned, [torch.Generator().manual_seed(i) for i in range(4000)], labels)
    expected = float(labels.double().mean())
    for name, size in (("test", 3), ("validation", 2), ("train", 10)):
        rows = torch.cat([part[name] for part in parts])
        assert len(rows) == 4000 * size
        # Four deviations of a share of independent rows, of which a systematic sample has less
        assert abs(float(labels[rows].double().mean()) - expected) < 4 * math.sqrt(expected / len(rows))


@given(st.lists(st.integers(0, 6), min_size=2, max_size=6), st.integers(0, 99), st.floats(0.05, 0.5))
def test_whoever_can_be_split_is(held, seed, test):
    split = Split(test, 0.1, stratify=True)
    labels = torch.repeat_interleave(torch.arange(len(held)), torch.tensor(held))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    rows = torch.arange(len(labels))
    [found] = split([rows], [torch.Generator().manual_seed(seed)], labels)
    [again] = split([rows], [torch.Generator().manual_seed(seed)], labels)
    assert found.keys() == again.keys()
    assert all(torch.equal(found[name], again[name]) for name in found)
    if len(labels) < 3:
        assert found == {}
        return
    assert sorted(torch.cat(list(found.values())).tolist()) == rows.tolist()
    assert all(len(part) for part in found.values())


def by_itself(split, rows, labels, draw):
    """What one client gets of a split, by lists: a systematic sample of rows sorted by label, test then validation."""
    rows = rows[torch.randperm(len(rows), generator=draw)][: split.examples or None].tolist()
    starts = torch.rand(2, generator=draw).tolist() if labels is not None else None
    test = min(max(1, round(split.test * len(rows))), len(rows) - 1 - (split.validation > 0))
    size = min(max(1, round(split.validation * len(rows))), len(rows) - 1 - test) if split.validation else 0
    part, left = {}, rows if labels is None else sorted(rows, key=lambda row: int(labels[row]))
    for i, (name, number) in enumerate((("test", test), ("validation", size))):
        begin = int(starts[i] * len(left)) if starts else None
        for place, row in enumerate(left):
            passed = [(at * number + begin) // len(left) for at in (place, place + 1)] if starts else None
            if passed[0] < passed[1] if starts else place < number:
                part[row] = name
        left = [row for row in left if row not in part]
    return {name: [row for row in rows if part.get(row, "train") == name] for name in ("test", "validation", "train")}


@pytest.mark.parametrize("split", [Split(), Split(0.3, 0.0), Split(0.55, 0.3), Split(0.2, 0.2, examples=9)])
@pytest.mark.parametrize("by_class", [True, False])
def test_many_clients_are_split_at_once_as_each_alone(split, by_class):
    draw = np.random.default_rng(len(repr(split)))
    owner = draw.permutation(np.repeat(np.arange(12), draw.integers(3, 40, 12)))
    labels = torch.from_numpy(draw.choice(5, len(owner), p=[0.5, 0.3, 0.1, 0.06, 0.04]))
    owned = [torch.from_numpy(np.flatnonzero(owner == i)) for i in range(12)]
    draws = [torch.Generator().manual_seed(i) for i in range(12)]
    together = split(owned, draws, labels if by_class else None)
    for i, found in enumerate(together):
        mine = by_itself(split, owned[i], labels if by_class else None, draws[i].manual_seed(i))
        assert {name: rows.tolist() for name, rows in found.items()} == mine


def test_only_your_own_labels_are_split_by_class_unless_that_is_asked_for(tmp_path):
    def dealt(*overrides):
        return experiment.resolve(experiment.read("local", list(overrides))).federation(None, 0)

    plain, off, on = dealt(), dealt("federation.split.stratify=false"), dealt("federation.split.stratify=true")
    assert all(map(torch.equal, plain.rows["test"], off.rows["test"]))
    assert not all(map(torch.equal, plain.rows["test"], on.rows["test"]))
    x, y, owner = torch.zeros(60, 1), torch.arange(60) % 10 // 9, torch.arange(60) // 30
    mine = Federation.from_arrays(x, y, owner)
    assert [counts(mine, "test", i) for i in range(2)] == [[5, 1], [5, 1]]
    path = tmp_path / "t.csv"
    path.write_text(
        "who,x,y\n" + "".join(f"{o},{i},{label}\n" for i, (o, label) in enumerate(zip(owner, y, strict=True)))
    )
    table = from_csv(path, client="who", target="y")
    assert [counts(table, "test", i) for i in range(2)] == [[5, 1], [5, 1]]
    without = Federation.from_arrays(x, y, owner, split=Split(stratify=False))
    assert sorted(len(rows) for rows in without.rows["test"]) == [6, 6]
    assert [len(rows) for rows in mine.rows["train"]] == [len(rows) for rows in without.rows["train"]]


def told(values, metric="auc"):
    """A history of two rounds with these validation scores of two clients, [2, 2], and accuracies that fall."""
    history = History(("a", "b"), Classification(2, by_class=True))
    history.selector.selection = Selection(metric)
    for round, (score, accuracy) in enumerate(zip(values, ([0.9, 0.9], [0.8, 0.8]), strict=True)):
        scores = {("own", split, "accuracy"): torch.tensor(accuracy) for split in ("validation", "test")}
        scores[("own", "validation", metric)] = torch.tensor(score)
        Recorder(history).add(round, 0, 0, Evaluation(scores, {}))
    return history


def test_the_score_that_is_asked_for_selects_among_the_clients_that_have_it():
    nan = float("nan")
    assert told([[0.6, nan], [0.7, nan]]).select("own") == 1
    assert score_models(told([[0.6, nan], [0.7, nan]]))["own"]["validation"] == pytest.approx(0.7)
    assert told([[0.7, nan], [0.6, nan]]).select("own") == 0
    assert told([[0.7, 0.9], [0.6, 0.6]], "loss").select("own") == 1  # the less the better
    assert told([[0.7, 0.9], [0.6, 0.6]], "").select("own") == 0  # accuracy
    with pytest.raises(
        UsageError, match="select_by=auc cannot select: no client's validation examples have two classes"
    ):
        told([[nan, nan], [nan, nan]])


def test_a_run_is_selected_by_the_score_that_is_asked_for():
    runs = {
        by: fit(
            FedAGHN(),
            federation(),
            module(),
            rounds=Rounds(4, select_by=by),
            training=Training(epochs=1, optimiser=SGD(0.2)),
            execution=Execution("loop", workers=1),
        )
        for by in ("", "accuracy", "balanced_accuracy", "auc", "loss")
    }
    for by, run in runs.items():
        found = run.summary
        assert found.selection.by == (by or "accuracy")
        name = by or "accuracy"
        best = {m: run.history.curve(m, "validation", name).nanmean(1) for m in run.history.named_models}
        sign = -1 if by == "loss" else 1
        for model, score in found.scores.items():
            losses = run.history.curve(model, "validation", "loss").nanmean(1)
            first = losses.masked_fill((sign * best[model]) < (sign * best[model]).max(), torch.inf)
            assert score["round"] == int(first.argmin()) + 1
            assert score["validation"] == pytest.approx(float(best[model][score["round"] - 1]))
        assert max(found.scores, key=lambda m: sign * found.scores[m]["validation"]) == found.selection.chosen
    assert torch.equal(runs[""].history.models["theta"], runs["accuracy"].history.models["theta"])
    even = Federation.from_arrays(torch.randn(90, 5).double(), torch.arange(90) % 3, torch.arange(90) // 30)
    assert not even.task.by_class
    assert ("own", "test", "auc") not in fit(Local(), even, module(), rounds=1).history.scores[0]
    run = fit(Local(), even, module(), rounds=Rounds(1, select_by="auc"))
    assert ("own", "test", "auc") in run.history.scores[0]
    told = run.summary  # `kinfed compare` ranks by it
    known = [score for score in told.clients.selecting["own"] if score is not None]
    assert sum(known) / len(known) == pytest.approx(told.scores["own"]["auc"])


def test_scores_that_cannot_select_are_refused_in_one_line():
    run = {"training": Training(epochs=1)}
    with pytest.raises(UsageError, match="'balanced_acuracy' can select rounds; did you mean 'balanced_accuracy'"):
        fit(Local(), federation(), module(), rounds=Rounds(select_by="balanced_acuracy"), **run)
    with pytest.raises(UsageError, match="did you mean 'accuracy'"):
        experiment.resolve(experiment.read("local", ["select_by=acuracy"]))
    with pytest.raises(
        UsageError, match="classification has no 'mae'; choose one of accuracy, balanced_accuracy, auc,"
    ):
        fit(Local(), federation(), module(), rounds=Rounds(select_by="mae"), **run)
    numbers = Federation.from_arrays(torch.randn(30, 5), torch.randn(30), torch.arange(30) % 2)
    with pytest.raises(UsageError, match="regression has no 'auc'; choose one of mae, rmse, mse, r2, loss"):
        fit(Local(), numbers, nn.Linear(5, 1), rounds=Rounds(select_by="auc"), **run)
    with pytest.raises(UsageError, match="select_by=auc needs validation examples"):
        fit(Local(), federation(split=Split(0.2, 0.0)), module(), rounds=Rounds(select_by="auc"), **run)
    one_each = Federation.from_arrays(torch.randn(40, 5).double(), torch.arange(40) // 20, torch.arange(40) // 20)
    with pytest.raises(
        UsageError, match="no client's validation examples have two classes; select by accuracy or loss"
    ):
        fit(Local(), one_each, module(), rounds=Rounds(select_by="balanced_accuracy"), **run)


def summary_of(always, names=("no", "yes")):
    """What is told of clients with 9 and 1, 8 and 2, and 5 and 0 test examples, whose models answer `always`."""
    nan = float("nan")
    scores = {
        ("own", "test", "accuracy"): torch.tensor([0.9, 0.8, 1.0]),
        ("own", "test", "balanced_accuracy"): torch.tensor([0.5, 0.5, nan]),
        ("own", "test", "auc"): torch.tensor([0.7, 0.5, nan]),
        ("own", "test", "always"): torch.tensor(always),
        ("own", "test", "recall@0"): torch.tensor([1.0, 0.5, 1.0]),
        ("own", "test", "recall@1"): torch.tensor([0.0, 0.5, nan]),
    }
    history = History(("a", "b", "c"), Classification(2, by_class=True))
    Recorder(history).add(0, 0, 0, Evaluation(scores, {}))
    return recall_by_class(history, names, torch.tensor([[9, 1], [8, 2], [5, 0]])), score_models(history)["own"]


def test_what_is_told_by_class():
    nan = float("nan")
    found, score = summary_of([0.0, nan, nan])
    assert found["by_class"] == [
        {"class": "no", "clients": 3, "recall": pytest.approx(2.5 / 3), "examples": 22, "pooled": (9 + 4 + 5) / 22},
        {"class": "yes", "clients": 2, "recall": 0.25, "examples": 3, "pooled": pytest.approx(1 / 3)},
    ]
    assert found["by_client"] == [[1.0, 0.0], [0.5, 0.5], [1.0, None]]
    assert found["always"] == {"no": ["a"]}
    assert found["warnings"] == ["the models of 1 of 2 clients that are tested on several classes always answer 'no'"]
    assert (score["auc"], score["auc_clients"]) == (pytest.approx(0.6), 2)
    assert (score["balanced_accuracy"], score["balanced_accuracy_clients"]) == (0.5, 2)
    assert "always" not in score
    several = " that are tested on several classes always give one answer: 'yes' (1), 'no' (1)"
    assert summary_of([1.0, 0.0, nan])[0]["warnings"] == [f"the models of all 2 clients{several}"]
    assert summary_of([nan, nan, nan])[0]["warnings"] == []


@pytest.mark.pictures
def test_the_pages_example_warns_of_majority_models(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "imbalance.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    Path("config.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    asked = ["config.toml", "rounds=4", "evaluate_every=4", "method.name=fedavg"]
    assert main(["run", *asked, "--out", "a", "how.executor=loop"]) == 0
    said = capsys.readouterr().err
    assert "! the models of all 8 clients always answer 'alive'" in said
    assert max(map(len, said.splitlines())) <= 80
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["recall"]["always"] == {"alive": [f"H{i}" for i in range(8)]}
    assert [row["class"] for row in summary["recall"]["by_class"]] == ["alive", "dead"]
    assert [row["pooled"] for row in summary["recall"]["by_class"]] == [1.0, 0.0]
    assert summary["scores"]["shared"]["balanced_accuracy"] == 0.5
    assert (tmp_path / "a" / "recall.png").stat().st_size > 1000
    history = pd.read_csv(tmp_path / "a" / "history.csv")
    last = history[(history["round"] == 4) & (history.split == "test")].groupby("metric").value.mean()
    assert (last["recall@0"], last["recall@1"], last["always"]) == (1.0, 0.0, 0.0)
    settings = ["training.class_weights=balanced", "select_by=balanced_accuracy"]
    assert main(["run", *asked, *settings, "--out", "b", "how.executor=fused"]) == 0
    capsys.readouterr()
    table = experiment.resolve(experiment.read("b/config.toml", [])).table
    assert (table["select_by"], table["training"]["class_weights"]) == ("balanced_accuracy", "balanced")
    assert main(["compare", "a", "b"]) == 0
    said = capsys.readouterr().out
    assert "! 1: the models of all 8 clients always answer 'alive'" in said
    assert "balanced" in said
    assert "AUC" in said
    assert max(len(line) for line in said.splitlines()) <= 80
    assert main(["compare", "a", "b", "--json"]) == 0
    first, second = sorted(json.loads(capsys.readouterr().out)["runs"], key=lambda row: row["folder"])
    assert first["balanced_accuracy"] == 0.5
    assert first["auc"] == summary["scores"]["shared"]["auc"]
    assert second["warnings"] == json.loads((tmp_path / "b" / "summary.json").read_text())["warnings"]


def test_a_verdict_compares_log_losses_where_accuracy_says_nothing(tmp_path, capsys):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(600, 2)).round(3)
    rare = draw.random(600) < 1 / (1 + np.exp(4 - 1.5 * x[:, 0]))
    rows = [f"s{i % 6},{a},{b},{'yes' if hit else 'no'}" for i, ((a, b), hit) in enumerate(zip(x, rare, strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(["site,a,b,y", *rows]) + "\n")
    asked = ["run", str(tmp_path / "t.csv"), "--client", "site", "--method", "partial-pooling", "--beside", "local"]
    assert main([*asked, "--target", "y", "federation.scored=log_loss", "--out", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"(log loss [\d.]+( %)? (lower|higher) than the best baseline without others)", said), said
    assert "mixed: accuracy 0." in said
    assert "accuracy says little" not in said
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["metric"]["name"] == "log_loss"
    for setting, why in (
        ("log_loss", "=log_loss is a score of classes, but this data has none"),
        ("loss", " is accuracy or"),
    ):
        assert main([*asked, "--target", "a", f"federation.scored={setting}", "--out", str(tmp_path / "no")]) == 2
        assert f"federation.scored{why}" in capsys.readouterr().err


def test_root_mean_squared_errors_select_by_the_clients_mean_squared_error():
    history = History(("a", "b"), Regression())
    history.selector.selection = Selection("rmse")
    for round, errors in enumerate(([1.0, 5.0], [3.2, 3.2])):  # means 3 and 3.2; roots of mean squares 3.6 and 3.2
        scores = {("own", split, "rmse"): torch.tensor(errors) for split in ("validation", "test")}
        scores |= {("own", split, "mae"): torch.tensor(errors) for split in ("validation", "test")}
        Recorder(history).add(round, 0, 0, Evaluation(scores, {}))
    assert history.select("own") == 1
    assert score_models(history)["own"]["validation"] == pytest.approx(3.2)


def test_probabilities_of_all_clients_are_judged_together():
    """By hand, of models that give every row the same probability, of which three in four are right."""
    x, client, y = torch.zeros(80, 1), torch.arange(80) % 10, (torch.arange(80) // 10 % 4 < 3).long()
    data = Federation.from_arrays(x, y, client)
    run = fit(FedAvg(), data, nn.Linear(1, 2), rounds=1)
    truth = [data.y[rows] for rows in data.rows["test"]]
    with torch.no_grad():
        chances = [run.model(position=i)(x[:1]).softmax(1)[0] for i in range(10)]
    confidence, label = zip(*((float(chance.max()), int(chance.argmax())) for chance in chances), strict=True)
    shares = [float((labels == predicted).double().mean()) for labels, predicted in zip(truth, label, strict=True)]
    scores = run.summary.scores[run.history.chosen]
    assert len(set(label)) == 1
    assert scores["ece"] == pytest.approx(np.mean(np.abs(np.subtract(shares, confidence))), abs=1e-6)
    assert scores["ece_pooled"] == pytest.approx(abs(np.mean(shares) - np.mean(confidence)), abs=1e-6)
    assert scores["ece_pooled"] < scores["ece"]
