"""Example weights: a row of weight 2 answers as that row written twice, wherever training is exact."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import kinfed
from kinfed import UsageError
from kinfed.core.batches import Batch
from kinfed.core.graph import Graph
from kinfed.core.tasks import Classification, Counts, Regression
from kinfed.data.federation import Federation
from kinfed.methods import METHODS
from kinfed.methods.solved import KNOWN
from kinfed.models.linear import linear
from kinfed.models.trees import trees
from kinfed.runs.config.parts import take
from kinfed.runs.fit import fit
from kinfed.runs.standard_models import standard_models
from kinfed.simulation.execution import Execution

WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


def federation(task, clients=4, rows=60, seed=0):
    """Clients whose coefficients differ, and a weight of 1, 2 or 3 for each row."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(clients * rows, 3, generator=draw)
    own = torch.randn(clients, 3, generator=draw) * 0.3 + torch.tensor([1.0, -1.0, 0.5])
    line = (x * own.repeat_interleave(rows, 0)).sum(1)
    noise = torch.randn(len(x), generator=draw)
    if isinstance(task, Classification):
        y = (line + noise > 0).long()
        y = y + (task.classes - 2) * (x[:, 1] + noise > 1)
    elif isinstance(task, Counts):
        y = torch.poisson((0.5 * line).exp(), generator=draw)[:, None]
    else:
        y = (line + noise)[:, None]
    places = torch.arange(len(x)).view(clients, rows)
    splits = {"train": list(places[:, :40]), "validation": list(places[:, 40:50]), "test": list(places[:, 50:])}
    weights = WEIGHTS[torch.randint(3, (len(x),), generator=draw)]
    return Federation(x, y, splits, task, graph=Graph(torch.ones(clients, clients), "given"), weights=weights)


def repeated(data):
    """The same with each row as often as its weight says, and no weights."""
    rows = {split: [r.repeat_interleave(data.weights[r].long()) for r in parts] for split, parts in data.rows.items()}
    return replace(data, rows=rows, weights=None)


def series_federation(tmp_path):
    """Four series of sixty days whose days weigh 1, 2 or 3, from a file."""
    draw = np.random.default_rng(0)
    rows = [
        f"{name},{np.datetime64('2024-01-01') + t},{np.sin((t + i) / 3) + draw.normal() / 2:.4f},{draw.integers(1, 4)}"
        for i, name in enumerate("abcd")
        for t in range(60)
    ]
    (tmp_path / "sales.csv").write_text("\n".join(["shop,day,sold,count", *rows]))
    columns = {"client": "shop", "target": "sold", "time": "day", "weight": "count"}
    return kinfed.from_csv(tmp_path / "sales.csv", **columns, past=4)


@pytest.mark.parametrize("method", ["partial-pooling", "personal-boosting"])
def test_windows_of_series_take_a_weight_of_two_for_two_windows(method, tmp_path):
    data = series_federation(tmp_path)
    assert set(data.weights.tolist()) == {1, 2, 3}

    def answers(of):
        module = (trees if method == "personal-boosting" else linear)(of.x.shape[1:], of.outputs)
        run = fit(take(KNOWN, method, "method")(), of, module, rounds=12, execution=Execution("loop"))
        return torch.stack([run.model(name)(of.x[:50]) for name in of.names]), run.history.test(run.history.chosen)

    for mine, theirs in zip(answers(data), answers(repeated(data)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert (answers(data)[0] - answers(replace(data, weights=None))[0]).abs().max() > 1e-3


def test_standard_models_of_series_take_a_weight_of_two_for_two_windows(tmp_path):
    data = series_federation(tmp_path)
    of_rows = {model.name: model for model in standard_models(repeated(data))[0]}
    for model in standard_models(data)[0]:
        if "boosting" not in model.name:  # it finds its bins, and holds rows out, by rows
            times = torch.cat([data.weights[rows].long() for rows in data.rows["test"]]).numpy()
            wanted = of_rows[model.name].answers["test"]
            np.testing.assert_allclose(np.repeat(model.answers["test"], times, 0), wanted, rtol=1e-9, atol=1e-9)


TASKS = {"numbers": Regression(), "labels": Classification(2), "counts": Counts()}


@pytest.mark.parametrize(
    ("method", "task"),
    [
        *itertools.product(["partial-pooling", "personal-boosting", "mixed-model", "private-pooling"], TASKS),
        ("private-pooling", "three classes"),
    ],
)
def test_solved_methods_take_a_weight_of_two_for_two_rows(method, task):
    data = federation(TASKS.get(task) or Classification(3))

    def answers(of):
        module = trees((3,), of.outputs) if method == "personal-boosting" else linear((3,), of.outputs)
        run = fit(take(KNOWN, method, "method")(), of, module, rounds=12, execution=Execution("loop"))
        outputs = torch.stack([run.model(name)(of.x[:50]) for name in of.names])
        return outputs, run.history.test(run.history.chosen)

    for mine, theirs in zip(answers(data), answers(repeated(data)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    plain = answers(replace(data, weights=None))[0]
    assert (answers(data)[0] - plain).abs().max() > 1e-3  # or the weights would not count


EVERY = kinfed.Training(epochs=3, batch=1000, optimiser=kinfed.SGD(0.1))  # a step takes all rows of a client
# Without what rows decide, whatever they weigh: which are set aside, and how sure a client is of its own movement.
SETTINGS = {name: {"feedback": "train"} for name in ("dpfl", "fedfomo", "pfedgat")} | {
    "kin": {"credit": 0.0},
    "hedge": {"credit": 0.0},
}
DRAWN = {"fedcp", "knn-per"}  # by rows: random numbers in training, and how many neighbours answer


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_step_over_all_rows_takes_a_weight_of_two_for_two_rows(name):
    """So nothing of a method averages its examples without weights, and all executors agree."""
    data = federation(Classification(2))

    def answers(of, executor="loop"):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        method = METHODS[name](**SETTINGS.get(name, {}))
        run = fit(method, of, module, rounds=3, training=EVERY, execution=Execution(executor))
        return torch.stack([run.model(client)(of.x[:50]).softmax(1) for client in of.names])

    weighted, plain = answers(data), answers(replace(data, weights=None))
    if name not in DRAWN:
        torch.testing.assert_close(weighted, answers(repeated(data)), rtol=1e-5, atol=1e-5)
    assert (weighted - plain).abs().max() > 1e-4
    for executor in ("vmap", "auto"):
        torch.testing.assert_close(answers(data, executor), weighted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_standard_models_and_their_scores_take_a_weight_of_two_for_two_rows(task):
    data = federation(TASKS[task])
    models, of_rows = standard_models(data)[0], standard_models(repeated(data))[0]
    assert [model.name for model in models] == [model.name for model in of_rows]
    for model, other in zip(models, of_rows, strict=True):
        if "boosting" in model.name:  # it finds its bins, and holds rows out, by rows
            continue
        for split in ("validation", "test"):
            times = torch.cat([data.weights[rows].long() for rows in data.rows[split]]).numpy()
            tolerance = 2e-3 if "logistic" in model.name else 1e-9  # it ends before it has converged to the last digit
            np.testing.assert_allclose(
                np.repeat(model.answers[split], times, 0), other.answers[split], rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize(
    "task",
    [Classification(2, by_class=True), Classification(3, by_class=True), Regression((1.0,), (2.0,)), Counts(2.0)],
)
def test_every_score_takes_a_weight_of_two_for_two_examples(task):
    draw = torch.Generator().manual_seed(1)
    classes = getattr(task, "classes", 0)
    outputs = torch.randn(50, classes or 1, generator=draw, dtype=torch.float64).round(decimals=1)  # with ties
    y = torch.randint(classes or 5, (50,), generator=draw)
    y = y if classes else y.double()[:, None]
    times = torch.randint(4, (50,), generator=draw)
    scores = task.score(outputs, y, times.double())
    rows = times.nonzero().flatten().repeat_interleave(times[times > 0])
    expected = task.score(outputs[rows], y[rows], torch.ones(len(rows), dtype=torch.float64))
    assert scores.keys() == expected.keys()
    for name, value in scores.items():
        torch.testing.assert_close(value, expected[name], equal_nan=True, msg=name)
    scaled = task.score(outputs, y, times.double() / 1000)  # the unit of weights says nothing
    for name, value in scores.items():
        torch.testing.assert_close(scaled[name], value, equal_nan=True, msg=name)


def test_the_mean_over_a_pass_of_batches_is_the_mean_by_weight():
    """So gradients of small batches are unbiased: weights of 1 and 3, in batches of one row and of two."""
    values, weights = torch.tensor([5.0, 1.0, 7.0, 3.0]), torch.tensor([3.0, 1.0, 1.0, 3.0])
    importance = weights / weights.mean()
    wanted = float((values * weights).sum() / weights.sum())
    for size in (1, 2, 4):
        parts = zip(values.split(size), importance.split(size), strict=True)
        means = [Batch(part, part, None, None, part[0], share).mean(part) for part, share in parts]
        assert float(torch.stack(means).mean()) == pytest.approx(wanted)
    padded = Batch(values, values, torch.tensor([1.0, 1.0, 0.0, 0.0]), None, values[0], importance)
    assert float(padded.mean(values)) == pytest.approx((5 * 1.5 + 1 * 0.5) / 2)


def test_a_verdict_counts_rows_by_weight_and_clients_alike():
    data = federation(Regression())

    def train(method, of):
        torch.manual_seed(0)
        return fit(METHODS[method](), of, linear((3,), 1), rounds=2, training=EVERY)

    run, same = train("fedavg", data), train("fedavg", repeated(data))
    assert run.by_client.means == pytest.approx(same.by_client.means, rel=1e-5)
    for name, values in zip(data.names, run.score_examples(), strict=True):
        assert float(values.mean()) == pytest.approx(run.by_client.means[name], rel=1e-5)
    pooled, expected = (each.summary.scores[each.history.chosen]["pooled"] for each in (run, same))
    assert pooled == pytest.approx(expected, rel=1e-5)
    verdict, wanted = (each.verdict(train("local", of)) for each, of in ((run, data), (same, repeated(data))))
    assert verdict.over["alone"].mean == pytest.approx(wanted.over["alone"].mean, abs=1e-5)
    assert verdict.over["alone"].per_row.mean == pytest.approx(wanted.over["alone"].per_row.mean, abs=1e-5)


def table(path, weights):
    lines = [f"{'ab'[i % 2]},{i % 7},{(i % 7) * 2 + i % 3},{weight}" for i, weight in enumerate(weights)]
    path.write_text("\n".join(["who,x,y,w", *lines]) + "\n")
    return path


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([1] * 9 + [-1] + [1] * 30, "line 11, column 'w': '-1' is no weight, a finite number from 0"),
        ([1] * 9 + [""] + [1] * 30, "line 11, column 'w': there is no weight"),
        ([1] * 9 + ["inf"] + [1] * 30, "line 11, column 'w': 'inf' is no weight"),
        ([1] * 9 + ["many"] + ["much"] * 30, r"'many' is no weight, a finite number from 0 \(30 more"),
        ([0] * 40, "'w' is 0 in all rows"),
        ([1, 0] * 20, "line 3: all rows of 'b' have weight 0"),
    ],
)
def test_what_is_no_weight_is_refused_with_its_line(tmp_path, weights, problem):
    with pytest.raises(UsageError, match=problem):
        kinfed.from_csv(table(tmp_path / "t.csv", weights), client="who", target="y", weight="w", labels=False)


@pytest.mark.parametrize(("column", "role"), [("y", "the target"), ("who", "the client"), ("x", "an input")])
def test_a_weight_is_nothing_else(tmp_path, column, role):
    path = table(tmp_path / "t.csv", [1] * 40)
    with pytest.raises(UsageError, match=f"column '{column}' is {role}, so it cannot be the weight too"):
        kinfed.from_csv(path, client="who", target="y", features=["x"], weight=column)


def test_a_row_of_weight_zero_is_as_if_it_were_not_there(tmp_path):
    draw = np.random.default_rng(0)
    weights = draw.integers(0, 3, 60)
    settings = {"client": "who", "target": "y", "weight": "w", "labels": False}
    data = kinfed.from_csv(table(tmp_path / "t.csv", weights), **settings)
    lines = (tmp_path / "t.csv").read_text().splitlines()
    (tmp_path / "less.csv").write_text("\n".join(line for line in lines if not line.endswith(",0")) + "\n")
    less = kinfed.from_csv(tmp_path / "less.csv", **settings)
    assert data.digest() == less.digest()
    assert "w" not in data.columns.names
    x, y, client = np.arange(40.0)[:, None], np.arange(40.0), np.tile(["a", "b"], 20)
    zeros = kinfed.Federation.from_arrays(x, y, client, weights=[1.0, 0.0] + [2.0] * 38)
    assert 1 not in torch.cat([torch.cat(list(parts)) for parts in zeros.rows.values()])
    with pytest.raises(UsageError, match="weights: example 3 has -1"):
        kinfed.Federation.from_arrays(x, y, client, weights=[1.0] * 3 + [-1.0] + [1.0] * 36)


def test_weights_that_can_hardly_count_rows_are_doubted(tmp_path):
    with pytest.warns(UserWarning, match="a row counts as 2000 rows on average, by 'w'.*divide them by their mean"):
        kinfed.from_csv(table(tmp_path / "t.csv", [2000] * 40), client="who", target="y", weight="w", labels=False)
