"""Estimators of the user as baselines: against scikit-learn, from a config, and where they fail."""

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.svm import SVC

from kinfed import Counts, Federation, Forecasting, Quantiles, UsageError, choose
from kinfed.runs import standard_models as made
from kinfed.runs.config.experiment import resolve
from kinfed.runs.config.named_baselines import read_baselines
from kinfed.runs.standard_models import standard_models

NEIGHBOURS = "sklearn.neighbors:KNeighborsRegressor"


def draw_rows(clients=4, n=30):
    """x: [n, 2], y: [n] and whose they are."""
    draw = torch.Generator().manual_seed(0)
    client = torch.arange(clients * n) % clients
    x = torch.randn(clients * n, 2, generator=draw, dtype=torch.float64)
    return x, x[:, 0] * (client + 1) + 0.1 * torch.randn(clients * n, generator=draw), client


def score(data, model):
    """The mean over clients of a model's mean absolute error."""
    sizes = [len(rows) for rows in data.rows["test"]]
    errors = np.abs(model.answers["test"][:, 0] - np.concatenate([data.y[rows] for rows in data.rows["test"]]))
    return np.mean([part.mean() for part in np.split(errors, np.cumsum(sizes)[:-1])])


def fit_named(data, *wanted, **how):
    """The models that are named, by their names, and what was left out."""
    models, problems = standard_models(data, named=read_baselines(wanted)[0], **how)
    names = [item.name for item in standard_models(data, **how)[0]]
    return {item.name: item for item in models if item.name not in names}, problems


def test_each_is_fitted_for_each_client_and_to_all_rows_with_the_clients_mean():
    data = Federation.from_arrays(*draw_rows())
    models, problems = fit_named(data, {"name": NEIGHBOURS, "n_neighbors": 3})
    assert not problems
    alone, pooled = (models[f"KNeighborsRegressor {which}"] for which in ("for each client", "of all rows"))
    assert (alone.pools, pooled.pools) == (False, True)
    train, test = data.rows["train"], data.rows["test"]
    expected = [
        KNeighborsRegressor(3).fit(data.x[fitted], data.y[fitted]).predict(data.x[asked])
        for fitted, asked in zip(train, test, strict=True)
    ]
    np.testing.assert_allclose(alone.answers["test"][:, 0], np.concatenate(expected))

    every = data.y[torch.cat(list(train))].numpy()
    means = [(data.y[own].numpy().sum() + 5 * every.mean()) / (len(own) + 5) for own in train]
    wide = {
        split: np.vstack([np.hstack([data.x[own], np.full((len(own), 1), mean)]) for own, mean in members])
        for split, parts in (("train", train), ("test", test))
        for members in [list(zip(parts, means, strict=True))]
    }
    np.testing.assert_allclose(
        pooled.answers["test"][:, 0], KNeighborsRegressor(3).fit(wide["train"], every).predict(wide["test"])
    )
    assert fit_named(data, NEIGHBOURS, pool=False)[0].keys() == {"KNeighborsRegressor for each client"}


@pytest.mark.parametrize("task", ["labels", "counts", "forecasts", "quantiles"])
def test_every_task_has_them(task):
    x, y, client = draw_rows()
    if task == "labels":
        labels = (y > 0).long()
        labels[client == 2] = 1  # a client of one class
        data, name = Federation.from_arrays(x, labels, client), "sklearn.neighbors:KNeighborsClassifier"
    elif task == "counts":
        data, name = Federation.from_arrays(x, y.abs().round(), client, task=Counts()), NEIGHBOURS
    else:
        kind = Forecasting() if task == "forecasts" else Quantiles(quantiles=(0.1, 0.9))
        series = torch.stack([y, 2 * y], 1)
        series[::9, 0] = torch.nan
        data, name = Federation.from_arrays(x[..., None], series, client, task=kind), NEIGHBOURS
    models, problems = fit_named(data, name)
    assert not problems
    assert len(models) == 2
    outputs = {"labels": 2, "counts": 1, "forecasts": 2, "quantiles": 4}[task]
    for item in models.values():
        assert item.answers["test"].shape == (sum(map(len, data.rows["test"])), outputs)
        assert np.isfinite(item.answers["test"]).all()
    if task == "labels":
        own = KNeighborsClassifier().fit(data.x[data.rows["train"][0]], data.y[data.rows["train"][0]])
        chances = np.exp(models["KNeighborsClassifier for each client"].answers["test"][: len(data.rows["test"][0])])
        expected = np.maximum(own.predict_proba(data.x[data.rows["test"][0]]), 1e-6)
        np.testing.assert_allclose(chances, expected)


def test_one_that_fails_or_takes_too_long_is_left_out_in_a_line(monkeypatch):
    x, y, client = draw_rows()
    models, problems = fit_named(Federation.from_arrays(x, (y > 0).long(), client), SVC())
    assert not models
    assert problems[0].startswith("baseline left out: SVC for each client: AttributeError: ")
    assert problems[1].startswith("baseline left out: SVC of all rows: AttributeError: ")
    monkeypatch.setattr(made, "LIMIT", -1)
    models, problems = fit_named(Federation.from_arrays(x, y, client), NEIGHBOURS)
    assert not models
    assert all(problem.endswith("its -1 seconds are over") for problem in problems), problems


def test_examples_that_are_no_rows_leave_them_out_and_say_so():
    x, y, client = draw_rows()
    wide = Federation.from_arrays(x.repeat(1, 300), y, client)
    models, problems = fit_named(wide, NEIGHBOURS)
    assert not models
    assert problems == [
        "baseline left out: KNeighborsRegressor, which takes rows of at most 500 numbers, at most 1,000,000 of them"
    ]


def test_a_choice_is_judged_against_them_and_draws_of_theirs_are_fixed():
    data = Federation.from_arrays(*draw_rows(8, 40))
    scores = []
    for _ in range(2):
        choice = choose(data, rounds=2, methods=["kin"], baselines=[RandomForestRegressor(5)], budget=6)
        means = {item.name: item.mean for item in choice.standard}
        scores.append([means[f"RandomForestRegressor {which}"] for which in ("for each client", "of all rows")])
    assert scores[0] == scores[1]
    forests, problems = fit_named(data, {"name": "sklearn.ensemble:RandomForestRegressor", "n_estimators": 5})
    assert not problems
    assert scores[0] == pytest.approx([score(data, forest) for forest in forests.values()])


def test_a_config_names_them_and_records_what_a_file_of_ones_own_contains(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from sklearn.linear_model import Ridge\ndef flat(alpha=1e9):\n    return Ridge(alpha)\n")
    raw = {"method": "local", "model": "mlp", "federation": {"dataset": "digits", "partition": "iid", "clients": 4}}
    raw |= {"baselines": [{"name": f"{file}:flat", "alpha": 3.0}, NEIGHBOURS]}
    experiment = resolve(raw)
    assert [item.name for item in experiment.baselines] == ["flat", "KNeighborsRegressor"]
    assert experiment.baselines[0].make().alpha == 3.0
    assert experiment.table["baselines"] == [{"name": f"{file}:flat", "alpha": 3.0}, {"name": NEIGHBOURS}]
    assert list(experiment.table["code"]) == [str(file)]
    assert resolve(experiment.table).table == experiment.table
    file.write_text(file.read_text() + "\n")
    with pytest.raises(UsageError, match="is not what this config was written with"):
        resolve(experiment.table)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("ridge", "are estimators such as lightgbm:LGBMRegressor or mine.py:Model"),
        ("sklearn.linear_model:Rigde", "there is no 'Rigde' in sklearn.linear_model; did you mean 'Ridge'"),
        ("nosuchpackage:Model", "nosuchpackage"),
        ([{"name": "sklearn.linear_model:Ridge", "alfa": 1}], "cannot be made: TypeError"),
        ("sklearn.linear_model:ridge_regression", "cannot be made"),
        ("math:pi", "is not a class or function that makes an estimator"),
        (f"{NEIGHBOURS},{NEIGHBOURS}", "has two that are called 'KNeighborsRegressor'"),
        ([Ridge(), Ridge(2.0)], "has two that are called 'Ridge'"),
        (["collections:OrderedDict"], "has no fit"),
        ([3], "got 3"),
        (3, "must be a list of estimators; got 3"),
    ],
)
def test_what_names_no_estimator_is_refused_in_one_line(wanted, why):
    with pytest.raises(UsageError, match=why) as problem:
        read_baselines(wanted)
    assert "\n" not in str(problem.value)
