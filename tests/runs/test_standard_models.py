"""Standard models against scikit-learn, and against a choice that they beat or do not."""

import numpy as np
import polars
import pytest
import torch
from sklearn.linear_model import PoissonRegressor, Ridge

import kinfed
from kinfed import Counts, Federation, choose, fit
from kinfed.methods.solved.standard import Standard
from kinfed.models.changes import changes
from kinfed.runs import standard_models as made
from kinfed.runs.baselines import rows as lines_of
from kinfed.runs.standard_models import standard_models
from kinfed.runs.test_scores import of_examples


def rows(own=2.0, level=0.0, seed=0, clients=8, n=40):
    """x: [n, 3], y: [n] by a line of each client's own, and whose they are."""
    draw = torch.Generator().manual_seed(seed)
    client = torch.arange(clients * n) % clients
    x = torch.randn(clients * n, 3, generator=draw, dtype=torch.float64)
    slopes = torch.tensor([1.0, -1.0, 0.5]) + own * torch.randn(clients, 3, generator=draw)
    levels = level * torch.randn(clients, generator=draw)
    return x, (x * slopes[client]).sum(1) + levels[client] + 0.3 * torch.randn(clients * n, generator=draw), client


def score(federation, one):
    truth = federation.y[torch.cat(list(federation.rows["test"]))]
    outputs = torch.from_numpy(one.answers["test"]).to(federation.x.dtype)
    return float(of_examples(federation.task, outputs, truth).mean())


def test_ridges_are_those_of_scikit_learn(monkeypatch):
    data = Federation.from_arrays(*rows())
    monkeypatch.setattr(made, "PENALTIES", (2.5,))
    found = {one.name: one for one in standard_models(data)[0]}
    each = found["a ridge for each client"].answers["test"]
    expected = [
        Ridge(2.5).fit(data.x[train].numpy(), data.y[train].numpy()).predict(data.x[test].numpy())
        for train, test in zip(data.rows["train"], data.rows["test"], strict=True)
    ]
    np.testing.assert_allclose(each[:, 0], np.concatenate(expected), rtol=1e-8, atol=1e-10)


def test_a_ridge_of_changes_is_that_of_scikit_learn_and_of_the_model_that_holds_it(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(120, 5, 2, generator=draw).cumsum(1)  # readings, and a number beside each
    y = x[:, -1:, 0] + torch.randn(120, 2, generator=draw)
    data = Federation.from_arrays(x, y, torch.arange(120) % 2, task=kinfed.Forecasting(0.0, 1.0))
    monkeypatch.setattr(made, "PENALTIES", (2.5,))
    ridge = next(item for item in standard_models(data)[0] if item.name == "a ridge of changes for each client")
    assert ridge.form == ("changes", 2.5)
    run = fit(Standard(penalty=2.5), data, changes((5, 2), 2), rounds=1)
    last = x[:, -1:, 0]
    inputs = torch.cat([x[..., 0] - last, x[..., 1]], 1).double().numpy()  # [n, 10]
    answers = np.split(ridge.answers["test"], [len(data.rows["test"][0])])
    for i, name in enumerate(data.names):
        train, test = data.rows["train"][i], data.rows["test"][i]
        expected = Ridge(2.5).fit(inputs[train], (y - last)[train].double().numpy()).predict(inputs[test])
        np.testing.assert_allclose(answers[i], expected + last[test].numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(run.model(name)(x[test]).detach().numpy(), answers[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", [0.0, 3.0])
def test_a_ridge_of_all_rows_knows_the_client_where_validation_rows_say_so(monkeypatch, level):
    data = Federation.from_arrays(*rows(level=level))
    monkeypatch.setattr(made, "PENALTIES", (2.5,))
    (answers,) = [m.answers["test"][:, 0] for m in standard_models(data)[0] if m.name == "a ridge of all rows"]
    parts = {split: torch.cat(list(data.rows[split])) for split in ("train", "validation", "test")}
    who = {split: np.repeat(np.eye(8), [len(at) for at in data.rows[split]], 0) for split in parts}
    middle, target = data.x[parts["train"]].numpy().mean(0), data.y[parts["train"]].numpy()

    def fit(knows):
        """Its answers to validation and test rows."""
        wide = {split: np.hstack([data.x[at].numpy() - middle, who[split] * knows]) for split, at in parts.items()}
        model = Ridge(2.5, fit_intercept=False).fit(wide["train"], target - target.mean())
        return [model.predict(wide[split]) + target.mean() for split in ("validation", "test")]

    truth = data.y[parts["validation"]].numpy()
    losses = {knows: np.square(fit(knows)[0] - truth).mean() for knows in (False, True)}
    assert (losses[True] < losses[False]) == (level > 0)
    np.testing.assert_allclose(answers, fit(level > 0)[1], rtol=1e-8, atol=1e-9)


def test_who_wins_is_who_should():
    apart, alike = (Federation.from_arrays(*rows(own, 3.0)) for own in (3.0, 0.0))
    for data, best in ((apart, "a ridge for each client"), (alike, "a ridge of all rows")):
        errors = {one.name: score(data, one) for one in standard_models(data)[0]}
        assert min(errors, key=errors.get) == best
        assert errors["the client's own mean"] == max(errors.values())


@pytest.mark.parametrize("labels", [2, 3])
def test_labels_and_counts_have_theirs(labels):
    x, y, client = rows(0.0, 2.0)
    cuts = torch.quantile(y, torch.linspace(0, 1, labels + 1, dtype=y.dtype)[1:-1])
    data = Federation.from_arrays(x, torch.bucketize(y, cuts), client)
    right = {one.name: score(data, one) for one in standard_models(data)[0]}
    alone = {one.name for one in standard_models(data, pool=False)[0]}
    assert alone == {one.name for one in standard_models(data)[0] if not one.pools} < set(right)
    assert set(right) == {
        "the client's commonest label",
        "a logistic regression for each client",
        "a logistic regression of all rows",
        "boosting of all rows",
    }
    assert all(share > 1 / labels for share in right.values())
    assert min(right, key=right.get) == "the client's commonest label"
    draw = torch.Generator().manual_seed(0)
    drawn = torch.poisson((y / 2).clamp(max=4).exp(), generator=draw)
    counts = Federation.from_arrays(x, drawn, client, task=Counts(1.5))
    deviance = {item.name: score(counts, item) for item in standard_models(counts)[0]}
    assert deviance["boosting of all rows"] < deviance["the client's own mean"]
    assert min(deviance, key=deviance.get) == "a Poisson regression of all rows"  # of which counts were made


def test_poisson_regressions_are_those_of_scikit_learn(monkeypatch):
    x, y, client = rows(0.5, 1.0)
    drawn = torch.poisson((y / 2).clamp(max=3).exp(), generator=torch.Generator().manual_seed(0))
    data = Federation.from_arrays(x, drawn, client, task=Counts(1.5))
    monkeypatch.setattr(made, "STRENGTHS", (0.5,))
    answers = {item.name: item.answers["test"][:, 0] for item in standard_models(data)[0]}
    train, test = (torch.cat(list(data.rows[split])) for split in ("train", "test"))
    wide = [np.hstack([x[at].numpy(), np.eye(8)[client[at]]]) for at in (train, test)]
    model = PoissonRegressor(alpha=2 / len(train), solver="newton-cholesky", tol=1e-9).fit(wide[0], drawn[train])
    np.testing.assert_allclose(
        np.exp(answers["a Poisson regression of all rows"]) * 1.5, model.predict(wide[1]), rtol=1e-5
    )
    own, at = data.rows["train"][3], client[test] == 3
    model = PoissonRegressor(alpha=2 / len(own), tol=1e-9, max_iter=1000).fit(x[own].numpy(), drawn[own])
    np.testing.assert_allclose(
        np.exp(answers["a Poisson regression for each client"][at]) * 1.5, model.predict(x[test][at].numpy()), rtol=1e-5
    )


@pytest.mark.parametrize("targets", ["a class of one row", "one class", "no count"])
def test_rare_targets_leave_no_model_out_and_no_answer_without_a_number(targets):
    x, y, client = rows()
    labels = (y > 0).long()
    if targets == "a class of one row":
        labels[5] = 2
    else:
        labels[:] = 0
    counts = targets == "no count"
    data = Federation.from_arrays(x, labels.double() if counts else labels, client, task=Counts() if counts else None)
    found, problems = standard_models(data)
    assert not problems
    assert len(found) > 1 or targets == "no count"
    for item in found:
        assert all(np.isfinite(answers).all() for answers in item.answers.values())


def test_a_choice_races_models_says_what_a_ridge_does_and_gets_all_rows():
    x, y, client = rows(0.3, 1.0, n=12)
    frame = polars.DataFrame({f"x{i}": x[:, i].numpy() for i in range(3)} | {"y": y.numpy()})
    frame = frame.with_columns(shop=polars.Series([f"s{i}" for i in client.tolist()]))
    choice = choose(frame, client="shop", target="y", rounds=4, budget=60, methods=["fedper"], refit=True)
    names = {one.candidate.name for one in choice.standings}
    assert {"partial-pooling,linear", "partial-pooling,additive", "partial-pooling,linear,kin=1"} <= names
    assert choice.winner.candidate.method_name == "partial-pooling"
    lines = lines_of([choice.standard], False)
    assert lines[-1]["name"] == "the client's own mean"
    assert choice.verdict.baselines["alone"] in [line["name"] for line in lines if line["needs"] == "no other client"]
    assert choice.verdict.baselines["alone"] in choice.verdict.sentence
    again = choice.refits["kin"]
    assert [len(a) for a in again.federation.rows["train"]] == [12] * 8
    scored, kept = choice.run.theta("s1"), again.theta("s1")
    assert not torch.equal(scored, kept)
    new = torch.zeros(1, 3)
    assert torch.equal(choice.load_model("s1")(new), again.model("s1")(new))
    with pytest.raises(kinfed.UsageError, match="a frame with client= and target="):
        choose(frame)


def test_an_answer_behind_the_clients_own_mean_is_judged_against_it():
    """Nothing can be learned of inputs: what was chosen of five rows each is behind each client's mean."""
    draw = torch.Generator().manual_seed(3)
    client = torch.arange(60) % 10
    y = 10 * torch.randn(10, generator=draw)[client] + torch.randn(60, generator=draw)
    data = Federation.from_arrays(torch.randn(60, 2, generator=draw), y, client)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)  # two rounds then leave it far from every client's mean
    torch.nn.init.zeros_(model.bias)
    choice = choose(data, model, rounds=2, budget=20, methods=["fedper"])
    assert choice.verdict.baselines["alone"] == "the client's own mean"
    assert choice.verdict.over["alone"].mean < 0


def test_what_fails_or_takes_too_long_is_left_out_and_said(monkeypatch):
    data = Federation.from_arrays(*rows())
    monkeypatch.setattr(made, "fit_line", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(made, "ROWS", 100)
    found, problems = standard_models(data)
    assert {one.name for one in found} == {"the client's own mean"}
    assert problems[0] == "baseline left out: a ridge for each client, which takes too long with 224 training rows"
    monkeypatch.setattr(made, "ROWS", 1000)
    found, problems = standard_models(data)
    assert "a ridge for each client" not in {one.name for one in found}
    assert problems[0].startswith("baseline left out: a ridge for each client: unexpected ZeroDivisionError")


def test_images_have_the_commonest_label(monkeypatch):
    data = Federation.from_arrays(torch.randn(60, 3, 20, 20), torch.arange(60) % 2, torch.arange(60) % 3)
    assert [one.name for one in standard_models(data)[0]] == ["the client's commonest label"]


def test_fit_has_a_model_by_default():
    data = Federation.from_arrays(*rows())
    run = kinfed.fit(kinfed.FedAvg(), data, rounds=1)
    assert [tuple(one.shape) for one in run.model(position=0).parameters()] == [(64, 3), (64,), (1, 64), (1,)]


def test_series_have_their_last_value_and_their_last_season():
    """Two features a step, of which the reading is the first: of period 3, with a drift that only lags can follow."""
    t = np.arange(60)
    readings = np.stack([np.array([0.0, 5.0, 10.0])[t % 3] + 0.01 * t + level for level in (0.0, 3.0, 6.0)])
    x = np.stack([readings[:, i : i + 6] for i in range(50)], 1).reshape(150, 6)
    y = np.stack([readings[:, i + 6 : i + 8] for i in range(50)], 1).reshape(150, 2)
    clock = np.broadcast_to(np.linspace(0, 1, 6), x.shape)
    pool = torch.from_numpy(np.stack([x, clock], 2))
    data = Federation.from_arrays(pool, torch.from_numpy(y), torch.arange(150) // 50, task=kinfed.Forecasting())
    found = {one.name: one.answers["test"] for one in standard_models(data)[0]}
    test = torch.cat(list(data.rows["test"])).numpy()
    np.testing.assert_allclose(found["the last value"], np.repeat(x[test, 5:], 2, 1))
    np.testing.assert_allclose(found["the last season"], x[test, 3:5])
    assert np.abs(found["the last season"] - y[test]).max() < 0.04 < np.abs(found["the last value"] - y[test]).max()
    assert found["boosting of all rows"].shape == (len(test), 2)
    assert np.abs(found["a ridge for each client"] - y[test]).max() < 0.04


@pytest.mark.parametrize("quantiles", [(), (0.25, 0.75)])
def test_models_of_changes_of_a_series_that_is_higher_answer_as_much_higher(quantiles):
    """Numbers are binary fractions, so that a level is added without rounding."""

    def answer(level):
        steps = torch.randint(-3, 4, (3, 60), generator=torch.Generator().manual_seed(0)).cumsum(1) / 8 + level
        x = torch.stack([steps[:, i : i + 6] for i in range(50)], 1).reshape(150, 6, 1)
        y = torch.stack([steps[:, i + 6 : i + 8] for i in range(50)], 1).reshape(150, 2)
        task = kinfed.Quantiles(quantiles=quantiles) if quantiles else kinfed.Forecasting()
        data = Federation.from_arrays(x, y, torch.arange(150) // 50, task=task)
        of_changes = ("boosting", "of changes")
        return {
            model.name: model.answers["test"]
            for model in standard_models(data)[0]
            if any(part in model.name for part in of_changes)
        }

    low, high = answer(0.0), answer(512.0)
    assert len(low) >= 3
    for name, forecasts in low.items():
        np.testing.assert_allclose(high[name], forecasts + 512, atol=1e-9)


def test_series_have_the_mean_at_their_time_of_day():
    """Days of four steps, noise about a level for each client and time: its mean is best, and is a mean by hand."""
    draw = np.random.default_rng(2)
    t = np.arange(200)
    level = np.array([[0.0, 4.0, 8.0, 2.0], [5.0, 1.0, 0.0, 3.0]])
    readings = level[:, t % 4] + draw.normal(size=(2, 200))
    x = np.stack([readings[:, i : i + 6] for i in range(190)], 1)  # [2, 190, 6]
    y = np.stack([readings[:, i + 6 : i + 8] for i in range(190)], 1)
    clock = np.stack([t[i : i + 6] % 4 / 4 for i in range(190)])
    pool = np.stack([x, np.broadcast_to(clock, x.shape)], 3).reshape(380, 6, 2)
    target = torch.from_numpy(y.reshape(380, 2))
    data = Federation.from_arrays(
        torch.from_numpy(pool), target, torch.arange(380) // 190, task=kinfed.Forecasting(0.0, 1.0)
    )
    found = {one.name: one.answers["test"] for one in standard_models(data)[0] if not one.pools}
    train, test = (data.rows[split][1] for split in ("train", "test"))
    last = pool[:, -1, 1]
    expected = [y.reshape(380, 2)[train.numpy()][last[train] == last[row]].mean(0) for row in test.numpy()]
    mean = found["the client's mean by the calendar"]
    np.testing.assert_allclose(mean[-len(test) :], expected)
    errors = {
        name: np.abs(answer - target[torch.cat(list(data.rows["test"]))].numpy()).mean()
        for name, answer in found.items()
    }
    assert errors["the client's mean by the calendar"] < min(errors["the last season"], errors["the last value"])


def test_quantiles_are_forecasts_with_the_quantiles_of_each_clients_errors():
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(300, 5, 1, generator=draw, dtype=torch.float64), torch.arange(300) % 3
    y = x[:, -1] + torch.randn(300, 2, generator=draw) * (1 + client[:, None])
    levels = (0.2, 0.5, 0.8)
    data = {
        task: Federation.from_arrays(x, y, client, task=task)
        for task in (kinfed.Forecasting(), kinfed.Quantiles(quantiles=levels))
    }
    forecasts, quantiles = ({item.name: item for item in standard_models(part)[0]} for part in data.values())
    assert forecasts.keys() == quantiles.keys()
    federation = data[kinfed.Forecasting()]
    truth = torch.cat([federation.y[rows] for rows in federation.rows["test"]])
    inside = 0.0
    for name, item in quantiles.items():
        answers = item.answers["test"].reshape(len(truth), 2, 3)
        assert (np.diff(answers, axis=2) >= 0).all() or name == "boosting of all rows"
        inside = ((answers[..., 0] <= truth.numpy()) & (truth.numpy() <= answers[..., 2])).mean()
        assert 0.3 < inside < 0.75, name
    last = quantiles["the last value"].answers["test"].reshape(len(truth), 2, 3)
    train = federation.rows["train"][1]
    errors = (y - x[:, -1])[train].numpy()
    at = slice(len(federation.rows["test"][0]), len(federation.rows["test"][0]) + len(federation.rows["test"][1]))
    ranks = [0.5 + (level - 0.5) * (1 + 1 / len(train)) for level in levels]
    expected = x[federation.rows["test"][1], -1].numpy()[..., None] + np.quantile(errors, ranks, axis=0).T
    np.testing.assert_allclose(last[at], expected, rtol=1e-6)
