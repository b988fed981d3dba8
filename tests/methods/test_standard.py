"""Standard models of each client's own against scikit-learn, in a run's models, its folder and its files."""

import json
from dataclasses import replace

import numpy as np
import onnxruntime
import polars
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

from kinfed import Classification, Counts, Execution, Federation, Forecasting, Quantiles, Regression, UsageError, fit
from kinfed.cli import main
from kinfed.cli.predict import open_predictor
from kinfed.methods.solved.standard import (
    FEWEST,
    Standard,
    fit_forest,
    round_down,
)
from kinfed.models.linear import linear
from kinfed.models.repeat import repeat
from kinfed.models.trees import trees
from kinfed.runs.run import Run
from kinfed.serving import joining_clients
from kinfed.serving.onboarding import SHARED, FrozenServer, onboard
from kinfed.serving.requests import answer

PENALTY, STEPS = 3.0, 20
BOUND = {"max_iter": STEPS, "max_depth": 8, "early_stopping": False, "random_state": 0}
TASKS = {
    "a number": Regression(),
    "two numbers": Regression(),
    "two classes": Classification(2),
    "three classes": Classification(3),
    "counts": Counts(1.5),
}


def federation(task):
    """Four clients, whose targets bend in their own ways; client 2 has 30 training rows, fewer than trees split."""
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(600, 4, generator=draw), torch.arange(600) % 4
    line = x[:, 0] * (client - 1) + (3 * x[:, 1]).sin() + 0.1 * torch.randn(600, generator=draw)
    y = {
        "a number": line[:, None],
        "two numbers": torch.stack([line, x[:, 2] * line], 1),
        "two classes": (line > 0).long(),
        "three classes": (line > 0).long() + (line > 1),
        "counts": torch.poisson(line.clamp(max=2).exp(), generator=draw)[:, None],
    }[task]
    places = [(client == i).nonzero().squeeze(1) for i in range(4)]
    rows = {
        "train": [at[: 30 if i == 2 else 120] for i, at in enumerate(places)],
        "validation": [at[120:130] for at in places],
    }
    return Federation(x, y, rows | {"test": [at[130:] for at in places]}, TASKS[task])


def fit_each(data, module, **settings):
    return fit(Standard(**settings), data, module, rounds=1)


def grown(task, outputs):
    """Trees for so many steps of boosting."""
    return trees(
        (4,), outputs, trees=STEPS * (1 if task in ("two classes", "counts", "a number") else outputs), depth=8
    )


@pytest.mark.parametrize("kind", ["linear", "trees"])
@pytest.mark.parametrize("task", TASKS)
def test_models_are_those_that_scikit_learn_fits(task, kind):
    data = federation(task)
    run = fit_each(data, linear((4,), data.outputs) if kind == "linear" else grown(task, data.outputs), penalty=PENALTY)
    for i, name in enumerate(data.names):
        train, test = data.rows["train"][i], data.rows["test"][i]
        x, new, y = data.x[train].double().numpy(), data.x[test].double().numpy(), data.y[train]
        found = run.model(name)(data.x[test]).double()
        if kind == "trees" and len(train) < FEWEST:
            assert found.std(0).max() < 1e-6
            continue
        if isinstance(data.task, Classification):
            logistic = LogisticRegression(C=1 / PENALTY, max_iter=50)
            model = logistic if kind == "linear" else HistGradientBoostingClassifier(**BOUND)
            found, expected = found.softmax(1), model.fit(x, y.numpy()).predict_proba(new)
        elif isinstance(data.task, Counts):
            poisson = PoissonRegressor(alpha=PENALTY / len(y), tol=1e-10, max_iter=1000)  # another solver than ours
            model = poisson if kind == "linear" else HistGradientBoostingRegressor(loss="poisson", **BOUND)
            found, expected = found.exp() * data.task.mean, model.fit(x, y[:, 0].numpy()).predict(new)[:, None]
        else:
            y = data.task.standardise(y.double()).numpy()
            models = [Ridge(PENALTY) if kind == "linear" else HistGradientBoostingRegressor(**BOUND) for _ in y.T]
            expected = np.stack(
                [model.fit(x, column).predict(new) for model, column in zip(models, y.T, strict=True)], 1
            )
        np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_the_naive_forecast_is_the_last_season_once_more():
    windows = torch.arange(40.0).view(8, 5, 1)  # of one client, or of two
    data = Federation.from_arrays(windows, torch.zeros(8, 3), torch.arange(8) // 4, task=Forecasting())
    module = repeat((5, 1), 3, season=2)
    torch.nn.init.ones_(module.head.weight)  # of what is not fitted nothing is left
    run = fit(Standard(), data, module, rounds=1)
    torch.testing.assert_close(run.model("1")(windows[:1] + 100), torch.tensor([[103.0, 104.0, 103.0]]))


def test_what_a_client_cannot_be_fitted_to_gets_a_constant():
    """One row, one class, a constant target, and a penalty without end."""
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 0, 0, 0, 1, 0, 2, 1, 1])
    rows = [torch.tensor([0]), torch.tensor([1, 2, 3]), torch.arange(4, 9)]
    data = Federation(x, y, {split: rows for split in ("train", "validation", "test")}, Classification(3))
    for module in (linear((2,), 3), trees((2,), 3, trees=6)):
        run = fit_each(data, module)
        for name, labels in (("0", 1), ("1", 3)):
            shares = run.model(name)(x).softmax(1)
            share = (labels + 0.1 / 3) / (labels + 0.1)
            np.testing.assert_allclose(
                shares.detach(), np.tile([share, (1 - share) / 2, (1 - share) / 2], (9, 1)), rtol=1e-5
            )
    flat = Federation(x, torch.full((9, 1), 7.0), data.rows, Regression())
    for module, penalty in ((linear((2,), 1), 1.0), (linear((2,), 1), float("inf")), (trees((2,), 1), 1.0)):
        model = fit_each(flat, module, penalty=penalty).model("2")
        np.testing.assert_allclose(model(x).detach(), np.full((9, 1), 7.0))


def test_a_class_that_a_client_has_not_seen_is_unlikely():
    data = federation("three classes")
    first, *others = data.rows["train"]
    data = replace(data, rows={**data.rows, "train": [first[data.y[first] < 2], *others]})
    for module in (linear((4,), 3), grown("three classes", 3)):
        chances = fit_each(data, module).model("0")(data.x).softmax(1).detach()
        assert 0 < chances[:, 2].max() <= 1e-6


@pytest.mark.parametrize("task", [Regression(), Counts(1.5), Classification(2)], ids=lambda task: type(task).__name__)
def test_a_column_without_a_value_at_a_client_counts_for_nothing(task):
    x = np.random.default_rng(0).normal(size=(80, 3))
    x[:, 1] = np.nan
    y = (x[:, 0] > 0).astype(int)
    y = y if isinstance(task, Classification) else y[:, None].astype(float)
    full, kept = (fit_forest(task, rows, y, trees=5, depth=3) for rows in (x, x[:, [0, 2]]))
    new = np.random.default_rng(1).normal(size=(20, 3))
    for ours, theirs in zip(full.models, kept.models, strict=True):
        np.testing.assert_array_equal(ours.predict(new), theirs.predict(new[:, [0, 2]]))


def test_rows_on_a_threshold_go_where_scikit_learn_sends_them():
    values = np.array([0.1, -0.1, 1 / 3, 2.0**-30, 1e30])
    down = round_down(values, torch.float32)
    assert (down <= values).all()
    assert (np.nextafter(down.astype(np.float32), np.float32(np.inf)).astype(float) >= values).all()
    assert round_down(values, torch.float64) is values


def test_it_runs_client_by_client_alone_and_says_what_it_cannot():
    data = federation("a number")
    assert fit_each(data, linear((4,), 1)).cost.executor == "loop"
    for executor in ("vmap", "fused"):
        with pytest.raises(UsageError, match=f"not by '{executor}'; use executor 'loop'"):
            fit(Standard(), data, linear((4,), 1), execution=Execution(executor))
    with pytest.raises(UsageError, match="a last layer that is linear, has a bias and travels"):
        fit_each(data, torch.nn.Linear(4, 1, bias=False))
    with pytest.raises(UsageError, match="penalty"):
        Standard(penalty=0.0)
    series = Federation(data.x[..., None], data.y, data.rows, Quantiles(quantiles=(0.1, 0.9)))
    with pytest.raises(UsageError, match="standard knows numbers, counts, labels and forecasts, not Quantiles"):
        fit_each(series, linear((4, 1), 2))


def plants(names, seed=0, rows=120):
    """Plants whose yield jumps at places of their own; every tenth cell of `heat` is missing, which matters."""
    parts = []
    for name in names:
        draw = np.random.default_rng([seed, ord(name)])
        x, cuts, levels = draw.normal(size=(rows, 3)), draw.normal(0, 0.5, 3), draw.normal(0, 4, 8)
        heat = np.where(np.arange(rows) % 10 == 7, np.nan, x[:, 0])
        cell = np.where(np.isnan(heat), 3, (x > cuts) @ [1, 2, 4])
        columns = {"heat": heat, "load": x[:, 1], "age": x[:, 2]}
        amount = (levels[cell] + 0.2 * draw.normal(size=rows)).round(3)
        parts.append(
            polars.DataFrame(columns | {"yield": amount}).select(polars.lit(name).alias("plant"), polars.all())
        )
    return polars.concat(parts).with_columns(polars.col("heat").fill_nan(None))


def inputs(frame):
    return frame.select("heat", "load", "age").to_numpy()


def boost(frame):
    return HistGradientBoostingRegressor(**BOUND | {"max_iter": 50}).fit(inputs(frame), frame["yield"].to_numpy())


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    """A choice on a table on which boosting for each client is best, and that table."""
    folder, frame = tmp_path_factory.mktemp("plants"), plants("abcdef")
    frame.write_csv(folder / "plants.csv")
    how = [
        "--client",
        "plant",
        "--target",
        "yield",
        "rounds=4",
        "--budget",
        "60",
        "--quiet",
        "--out",
        str(folder / "run"),
    ]
    assert main(["run", str(folder / "plants.csv"), *how]) == 0
    return folder, frame


def test_a_choice_keeps_what_needs_nobody_else_if_that_is_best(chosen):
    folder, frame = chosen
    choice = json.loads((folder / "run" / "choice.json").read_text())
    row = next(row for row in choice["ranking"] if row.get("chosen"))
    assert choice["candidate"] == row["candidate"] == "standard,trees"
    assert row["rounds"] == 1
    assert choice["verdict"]["baselines"]["alone"] == "boosting for each client"
    assert choice["verdict"]["over"]["alone"]["mean"] == pytest.approx(0, abs=1e-5)
    assert choice["verdict"]["sentence"].startswith(
        "Learning from others is not worth it here: no way was clearly better on validation rows than boosting for "
        "each client, which needs nobody else. "
    )
    run, new = Run.open(folder / "run"), plants("abcdef", seed=1).drop("yield")
    for name in "abcdef":
        rows = new.filter(plant=name)
        expected = boost(frame.filter(plant=name)).predict(inputs(rows))  # which has all rows
        np.testing.assert_allclose(run.predict(name, rows)["yield"], expected, rtol=1e-4, atol=1e-4)


def test_its_models_are_exported_served_and_explained_as_any_other(chosen, tmp_path, capsys):
    folder, _ = chosen
    new = plants("b", seed=1).drop("yield", "plant")
    expected = Run.open(folder / "run").predict("b", new)["yield"].to_numpy()
    assert main(["export", str(folder / "run"), "--client", "b", "--out", str(tmp_path)]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "b.onnx")
    found = session.run(None, {name: new[name].fill_null(float("nan")).to_numpy() for name in new.columns})[0]
    np.testing.assert_allclose(found.reshape(-1), expected, rtol=1e-5, atol=1e-5)
    served = answer(
        open_predictor(folder / "run")[0], new.with_columns(plant=polars.lit("b")).write_csv().encode(), "text/csv"
    )
    np.testing.assert_allclose(served[0]["yield"], expected, rtol=1e-6, atol=1e-6)
    capsys.readouterr()
    assert main(["explain", str(folder / "run"), "b"]) == 0
    assert f"which columns move answers in {folder / 'run'} (standard)" in capsys.readouterr().out
    assert main(["report", str(folder / "run"), "-o", str(tmp_path / "page.html")]) == 0
    assert "Learning from others is not worth it here" in (tmp_path / "page.html").read_text()


def test_a_newcomer_fits_its_own_and_fedavg_beside_has_its_own_model(chosen, tmp_path):
    folder, _ = chosen
    frame = plants("n")
    frame.write_csv(tmp_path / "new.csv")
    saved = Run.open(folder / "run")
    (newcomer,) = joining_clients.of_table(saved, tmp_path / "new.csv", None)
    outcome = onboard(FrozenServer(saved, saved.task), newcomer, len(newcomer.rows))
    beside = Run.open(folder / "run" / "beside" / "fedavg").model(position=0)
    with torch.no_grad():
        found, truth = beside(newcomer.x[newcomer.test]), newcomer.y[newcomer.test]
    error = (torch.tensor(saved.task.mean) + torch.tensor(saved.task.deviation) * found - truth).abs().mean()
    assert outcome.scores[SHARED] == pytest.approx(float(error), rel=1e-5)
    assert outcome.scores["standard"] < outcome.scores[SHARED]


def test_repeating_the_winner_gives_the_same_models(chosen, tmp_path):
    folder, _ = chosen
    assert main(["run", str(folder / "run" / "best.toml"), "--quiet", "--out", str(tmp_path / "again")]) == 0
    again, first = Run.open(tmp_path / "again"), Run.open(folder / "run")
    assert again.summary.scores == first.summary.scores
    assert again.summary.verdict is None
