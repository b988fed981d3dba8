"""Estimators of scikit-learn: fit(X, y, groups), predict(X, groups)."""

import pickle
import re
from dataclasses import replace

import numpy as np
import pandas
import polars
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import kinfed
from kinfed.runs import estimators
from kinfed.runs.prediction_intervals import find_half_widths

FEW = {"rounds": 4, "epochs": 5}  # enough for scikit-learn's own examples, in little time


@pytest.fixture(scope="module")
def opposed():
    """Four groups of which two label the opposite way."""
    draw = np.random.default_rng(0)
    X, groups = draw.normal(size=(200, 4)), np.repeat(["ann", "bob", "cid", "dan"], 50)
    sign = np.where(np.isin(groups, ["ann", "bob"]), 1, -1)
    return X, sign * X[:, 0], groups


@pytest.mark.filterwarnings("ignore:fit got no groups")
@pytest.mark.parametrize("estimator", [kinfed.Classifier(**FEW), kinfed.Regressor(**FEW)], ids=["classes", "numbers"])
def test_scikit_learns_own_checks_hold(estimator):
    """All of them: groups may be left out, so nothing that scikit-learn asks of an estimator fails for want of them."""
    drawn = "batches are drawn by rows, so a row of weight 2 is not drawn twice"
    inexact = {"check_sample_weight_equivalence_on_dense_data": drawn}
    results = check_estimator(estimator, on_fail=None, expected_failed_checks=inexact)
    failed = {one["check_name"]: one["exception"] for one in results if one["status"] == "failed"}
    assert not failed
    assert sum(one["status"] == "passed" for one in results) >= 45


def test_each_group_has_its_own_model_and_others_the_mean(opposed):
    X, y, groups = opposed
    model = kinfed.Regressor(rounds=10).fit(X, y, groups)
    assert model.groups_ == ["ann", "bob", "cid", "dan"]
    assert model.score(X, y, groups) > 0.9
    with pytest.warns(UserWarning, match="without groups"):
        assert model.score(X, y) < 0.5  # there is no knowing which way
    model.set_params(unknown="mean")
    other = model.predict(X[:5], ["eve"] * 5)
    each = [model.predict(X[:5], [name] * 5) for name in model.groups_]
    np.testing.assert_allclose(other, np.mean(each, 0), rtol=1e-6)
    np.testing.assert_allclose(model.predict(X[:5]), other)
    np.testing.assert_allclose(model.predict(X[:5], [None, np.nan, "eve", pandas.NA, pandas.NaT]), other)
    mixed = model.predict(X[:3], ["ann", "eve", "dan"])
    np.testing.assert_allclose(mixed, [each[0][0], other[1], each[3][2]], rtol=1e-6)
    kin = kinfed.Regressor("kin", rounds=10).fit(X, y, groups)
    assert kin.score(X, y, groups) > 0.9
    assert kin.run_.relation.shape[-2:] == (4, 4)


@pytest.mark.parametrize("estimator", [kinfed.Classifier, kinfed.Regressor])
def test_an_unknown_group_is_an_error_unless_it_is_skipped(opposed, estimator):
    X, y, groups = opposed
    y = y if estimator is kinfed.Regressor else np.where(y > 0, 7, 8)
    model = estimator(rounds=1).fit(X, y, groups)
    asked = groups[:60].astype(object)
    asked[[2, 51]] = "bbo", None
    for strange, why in (
        (asked, "row 3, column 'group': there is no client 'bbo'; did you mean 'bob'"),
        ([1] * 60, "'1'"),
    ):
        for ask in (model.predict, getattr(model, "predict_proba", model.predict)):
            with pytest.raises(ValueError, match=why):
                ask(X[:60], strange)
    with pytest.raises(ValueError, match="without groups"):
        model.set_params(unknown="error").predict(X)
    model.set_params(unknown="skip")
    with pytest.warns(UserWarning, match=r"skipped 2 of 60 rows.* 1 without one, bbo \(1\)"):
        answers = model.predict(X[:60], asked)
    assert np.flatnonzero(polars.Series(answers.tolist()).fill_nan(None).is_null()).tolist() == [2, 51]
    rest = np.delete(np.arange(60), [2, 51])
    np.testing.assert_array_equal(answers[rest].astype(float), model.predict(X[rest], groups[rest]))
    with pytest.warns(UserWarning, match="skipped"):
        assert model.score(X[:60], y[:60], asked) == model.score(X[rest], y[rest], groups[rest])


def test_a_group_has_one_name_whatever_its_type():
    draw = np.random.default_rng(0)
    X, groups = draw.normal(size=(60, 2)), np.arange(60) % 3
    model = kinfed.Regressor(rounds=1).fit(X, X[:, 0] * (groups + 1), groups)
    answers = model.predict(X, groups)
    series = (pandas.Series(groups, dtype="Int64"), pandas.Series(groups).astype("category"), polars.Series(groups))
    for same in (groups.astype(float), groups.astype(str), groups.tolist(), *series):
        np.testing.assert_array_equal(model.predict(X, same), answers)
    for wrong in (groups > 0, np.char.add("0", groups.astype(str)), groups + 0.5):
        with pytest.raises(ValueError, match="there is no client"):
            model.predict(X, wrong)
    with pytest.raises(ValueError, match="row 2 of X has none"):
        kinfed.Regressor(rounds=1).fit(X[:3], X[:3, 0], ["a", None, "a"])


def test_no_group_answers_for_all_whatever_it_is_called(opposed):
    X, y, groups = opposed
    for name in ("all", "mean", ""):
        named = np.where(groups == "ann", name or "None", groups)
        model = kinfed.Regressor("local", rounds=1, unknown="mean").fit(X, y, named)
        each = [model.predict(X[:5], [one] * 5) for one in model.groups_]
        np.testing.assert_allclose(model.predict(X[:5]), np.mean(each, 0), rtol=1e-6)
    with pytest.warns(UserWarning, match="fit got no groups"):
        one = kinfed.Regressor(rounds=1).fit(X, y)
    assert one.groups_ == []
    assert one.predict(X[:2]).shape == (2,)
    with pytest.raises(ValueError, match="fit got no groups"):
        one.predict(X[:2], ["all", "all"])


@pytest.mark.parametrize("kind", ["pandas", "polars", "numbers", "objects"])
def test_groups_are_a_column_of_X_so_that_searches_need_no_routing(opposed, kind):
    X, y, groups = opposed
    codes = np.unique(groups, return_inverse=True)[1]
    library = {"pandas": pandas, "polars": polars}.get(kind)
    if library:
        column, data = "who", library.DataFrame({"a": X[:, 0], "who": groups, "b": X[:, 1]})
    else:
        column, data = 2, np.column_stack([X[:, :2], codes if kind == "numbers" else groups.astype(object)])
    model = kinfed.Classifier("local", rounds=8, groups=column)
    beside = kinfed.Classifier("local", rounds=8).fit(X[:, :2], y > 0, codes if kind == "numbers" else groups)
    expected = beside.predict_proba(X[:, :2], codes if kind == "numbers" else groups)
    np.testing.assert_allclose(model.fit(data, y > 0).predict_proba(data), expected, atol=1e-6)
    folds = KFold(2, shuffle=True, random_state=0)
    assert cross_val_score(model, data, y > 0, scoring="roc_auc", cv=folds).mean() > 0.9
    assert GridSearchCV(model, {"rounds": [1, 8]}, cv=folds).fit(data, y > 0).best_score_ > 0.8
    with pytest.raises(ValueError, match="give no others beside"):
        model.predict(data, groups)
    with pytest.raises(ValueError, match="groups: X has no column"):
        clone(model).set_params(groups="whom" if library else 3).fit(data, y > 0)


@pytest.mark.parametrize("library", [pandas, polars])
def test_groups_are_several_columns_of_X(opposed, library):
    X, y, groups = opposed
    part = np.where(np.arange(len(groups)) % 2, "odd", "even")
    data = library.DataFrame({"a": X[:, 0], "who": groups, "part": part, "b": X[:, 1]})
    model = kinfed.Regressor(groups=["who", "part"]).fit(data, y)
    lines = [f"{name},{half}" for name, half in zip(groups, part, strict=True)]
    beside = kinfed.Regressor().fit(X[:, :2], y, lines)
    assert set(model.groups_) == set(beside.groups_) == set(lines)
    np.testing.assert_allclose(model.predict(data), beside.predict(X[:, :2], lines), atol=1e-9)
    with pytest.raises(ValueError, match="groups: X has no column 'half'"):
        clone(model).set_params(groups=["who", "half"]).fit(data, y)
    with pytest.raises(ValueError, match=r"groups=\['who', 'part'\] names a column, which needs a frame"):
        clone(model).fit(X, y)


def waves(count=240):
    """X: [n, 2] of age and dose, y: [n] that waves up with the age, and the group of each, which shifts the wave."""
    draw = np.random.default_rng(3)
    X, groups = draw.uniform(-2, 2, (count, 2)), np.repeat(["a", "b", "c"], count // 3)
    shift = np.unique(groups, return_inverse=True)[1]
    return X, X[:, 0] + np.sin(4 * X[:, 0] + shift) - X[:, 1] + 0.1 * draw.normal(size=count), groups


def falls(model):
    """Whether an answer of some group falls somewhere as the first input rises, for a few values of the second."""
    ages = np.linspace(-2, 2, 60)
    for name in model.groups_:
        for other in (-1.5, 0.0, 1.5):
            rows = np.column_stack([ages, np.full(len(ages), other)])
            answer = model.predict_proba if hasattr(model, "classes_") else model.predict
            answers = answer(rows, [name] * len(rows)).reshape(len(rows), -1)[:, -1]
            if (np.diff(answers) < 0).any():
                return True
    return False


def test_answers_rise_with_a_column_where_the_model_is_monotone():
    X, y, groups = waves()
    small = {"validation": 0.0, "rounds": 24}
    free = kinfed.Regressor("personal-boosting", **small).fit(X, y, groups)
    assert falls(free)
    rising = kinfed.Regressor(model={"monotone": ["x0:+"]}, **small).fit(X, y, groups)
    assert not falls(rising)
    assert rising.run_.model("a").monotone.tolist() == [1, 0]
    assert rising.score(X, y, groups) > 0.6
    named = kinfed.Regressor("personal-boosting", model={"name": "trees", "monotone": "x0:+"}, **small).fit(
        X, y, groups
    )
    np.testing.assert_array_equal(named.predict(X, groups), rising.predict(X, groups))
    alone = kinfed.Regressor("standard", model={"monotone": ["x0:+"]}, **small).fit(X, y, groups)
    assert not falls(alone)
    chance = kinfed.Classifier(model={"monotone": ["x0:+"]}, **small).fit(X, y > 0, groups)
    assert not falls(chance)
    assert falls(kinfed.Classifier("personal-boosting", **small).fit(X, y > 0, groups))


@pytest.mark.parametrize(
    ("settings", "model", "said"),
    [
        ({"method": "kin"}, {"monotone": ["x0:+"]}, "Kin does not keep answers monotone; take personal-boosting or"),
        ({}, {"monotone": ["x3:-"]}, "model.monotone: there is no input 'x3'; known: x0, x1"),
        ({}, {"monotone": ["x1"]}, "model.monotone: write COLUMN:+ or COLUMN:-, such as age:+; got 'x1'"),
        ({}, {"monotone": [1]}, "monotone[0] must be text; got 1"),
        ({}, {"name": "linear", "monotone": ["x0:+"]}, "unknown key 'model.monotone'; known: none"),
        ({}, {"leaves": 3}, "unknown key 'model.leaves'; known: none"),
    ],
)
def test_constraints_that_cannot_be_kept_are_refused(settings, model, said):
    X, y, groups = waves(60)
    with pytest.raises(ValueError, match=re.escape(said)):
        kinfed.Regressor(**settings, model=model).fit(X, y, groups)


def test_more_classes_than_two_have_no_order():
    X, y, groups = waves(60)
    with pytest.raises(ValueError, match="of 3 classes none is the one whose probability is to rise"):
        kinfed.Classifier(model={"monotone": ["x0:+"]}, rounds=1).fit(X, np.digitize(y, [-1, 1]), groups)


def test_boosting_grows_all_its_trees_unless_rounds_are_set(monkeypatch):
    assert estimators.GROWING.count == 207  # 200 trees of depth 4
    monkeypatch.setattr(estimators, "GROWING", replace(estimators.GROWING, count=9))
    X, y, groups = waves(60)
    for share in (0.0, 0.1):  # without validation rows nothing says when to stop
        run = kinfed.Regressor("personal-boosting", validation=share).fit(X, y, groups).run_
        assert run.history.rounds[-1] == 8
    run = kinfed.Regressor("personal-boosting", rounds=4).fit(X, y, groups).run_
    assert run.history.rounds[-1] == 3


def test_it_is_the_run_that_fit_makes(opposed):
    """The predictions are those of the run's own predictor, for a method given as an object, too."""
    X, y, groups = opposed
    model = kinfed.Classifier(kinfed.FedAvg(), rounds=2, random_state=3).fit(X, y > 0, groups)
    frame = polars.DataFrame({f"x{i}": column for i, column in enumerate(X.T)} | {"group": groups})
    chances = model.run_.predictor()(frame).select("P(0)", "P(1)").to_numpy()
    np.testing.assert_allclose(model.predict_proba(X, groups), chances, atol=1e-6)
    assert (model.predict(X, groups) == model.classes_[chances.argmax(1)]).all()
    again = clone(model).fit(X, y > 0, groups)
    np.testing.assert_array_equal(again.predict_proba(X, groups), model.predict_proba(X, groups))
    other = clone(model).set_params(random_state=4).fit(X, y > 0, groups)
    assert not np.array_equal(other.predict_proba(X, groups), model.predict_proba(X, groups))
    loaded = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(loaded.predict_proba(X, groups), model.predict_proba(X, groups))


@pytest.mark.parametrize("library", [pandas, polars])
def test_frames_keep_their_text_dates_and_holes(library, opposed):
    X, y, groups = opposed
    words = ["red" if value > 0 else "blue" for value in y]
    frame = library.DataFrame({"size": X[:, 1], "colour": words, "group": np.where(X[:, 2] > 0, X[:, 2], np.nan)})
    model = kinfed.Classifier(**FEW).fit(frame, np.where(y > 0, "yes", "no"), groups)
    assert model.score(frame, np.where(y > 0, "yes", "no"), groups) == 1
    assert list(model.feature_names_in_) == ["size", "colour", "group"]
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["colour", "size", "group"]], groups)


@pytest.mark.parametrize(
    ("settings", "groups", "why"),
    [
        ({"method": "kinn"}, None, "method: there is no 'kinn'; did you mean 'kin'?"),
        ({}, ["a"] * 7, "X has 200 rows, groups 7"),
        ({"rounds": 0}, None, "rounds must be a whole number, at least 1"),
        ({"validation": 2}, None, r"validation must be in \[0, 1\); got 2"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(opposed, settings, groups, why):
    X, y, _ = opposed
    with pytest.raises(ValueError, match=why) as problem:
        kinfed.Regressor(**settings).fit(X, y, groups)
    assert "\n" not in str(problem.value)


def test_a_regressors_intervals_are_those_of_errors_on_rows_that_fit_held_back():
    """Computed again from the run's module and its validation rows, and as many new rows inside as were asked for."""
    draw, inside = np.random.default_rng(0), []
    for _ in range(6):
        groups = np.repeat([f"s{i}" for i in range(10)], 240)
        X, noise = draw.normal(size=(len(groups), 3)), np.repeat(np.exp(draw.normal(size=10) / 2), 240)
        y, old = 20 + X[:, 0] + noise * draw.normal(size=len(groups)), np.arange(len(groups)) % 240 < 40
        model = kinfed.Regressor(rounds=2).fit(X[old], y[old], groups[old])
        answers, bounds = model.predict(X[~old], groups[~old], interval=90)
        inside.append(((bounds[:, 0] <= y[~old]) & (y[~old] <= bounds[:, 1])).mean())
    assert 0.87 < np.mean(inside) < 0.95
    np.testing.assert_array_equal(answers, model.predict(X[~old], groups[~old]))
    federation, errors = model.run_.federation, []
    meaning = model.run_.predictor().answers
    for name, rows in zip(federation.names, federation.rows["validation"], strict=True):
        outputs = model.run_.model(name).double()(federation.x[rows].double()).detach()
        errors.append((meaning.in_units(outputs) - federation.y[rows].reshape(-1, 1)).numpy())
    assert [len(table) for table in errors] == [4] * 10
    half = dict(zip(federation.names, find_half_widths(errors, 0.9)[:, 0], strict=False))
    expected = np.array([half[name] for name in groups[~old]])
    np.testing.assert_allclose(bounds[:, 1] - answers, expected, rtol=1e-4)
    np.testing.assert_allclose(answers - bounds[:, 0], expected, rtol=1e-4)


def test_intervals_pass_through_a_pipeline_and_skipped_rows_have_none(opposed):
    X, y, groups = opposed
    model = kinfed.Regressor(rounds=1, groups=4, unknown="skip")
    data = np.column_stack([X, np.unique(groups, return_inverse=True)[1]])
    strange = data[:3].copy()
    strange[1, 4] = 9
    with pytest.warns(UserWarning, match="skipped 1 of 3 rows"):
        answers, bounds = make_pipeline(FunctionTransformer(), model).fit(data, y).predict(strange, interval=50)
    assert np.isnan(answers).tolist() == np.isnan(bounds).all(1).tolist() == [False, True, False]
    assert (bounds[[0, 2], 0] < answers[[0, 2]]).all()
    assert (answers[[0, 2]] < bounds[[0, 2], 1]).all()


@pytest.mark.parametrize(
    ("settings", "interval", "why"),
    [
        ({}, 0.9, "interval is in per cent, from 1 to below 100, such as 90; got 0.9"),
        ({}, 100, "got 100"),
        ({}, "90", "got '90'"),
        ({}, 99, "need at least 99 rows .* held out; got 20, so hold out more"),
        ({"validation": 0}, 90, "intervals need rows that fit held back, and with validation=0 some group is too"),
        ({"validation": 0.01}, 90, "with validation=0.01 some group is too small for one; raise validation"),
    ],
)
def test_intervals_that_nothing_vouches_for_are_refused_in_one_line(opposed, settings, interval, why):
    X, y, groups = opposed
    model = kinfed.Regressor(rounds=1, **settings).fit(X, y, groups)
    with pytest.raises(ValueError, match=why) as caught:
        model.predict(X, groups, interval=interval)
    assert "\n" not in str(caught.value)
