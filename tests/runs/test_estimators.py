"""Estimators of scikit-learn: fit(X, y, groups), predict(X, groups)."""

import pickle

import numpy as np
import pandas
import polars
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator

import kinfed

FEW = {"rounds": 4, "epochs": 5}  # enough for scikit-learn's own examples, in little time


@pytest.fixture(scope="module")
def opposed():
    """Four groups of which two label the opposite way."""
    draw = np.random.default_rng(0)
    X, groups = draw.normal(size=(200, 4)), np.repeat(["ann", "bob", "cid", "dan"], 50)
    sign = np.where(np.isin(groups, ["ann", "bob"]), 1, -1)
    return X, sign * X[:, 0], groups


@pytest.mark.parametrize("estimator", [kinfed.Classifier(**FEW), kinfed.Regressor(**FEW)], ids=["classes", "numbers"])
def test_scikit_learns_own_checks_hold(estimator):
    """All of them: groups may be left out, so nothing that scikit-learn asks of an estimator fails for want of them."""
    results = check_estimator(estimator, on_fail=None)
    failed = {one["check_name"]: one["exception"] for one in results if one["status"] == "failed"}
    assert not failed
    assert sum(one["status"] == "passed" for one in results) >= 45


def test_each_group_has_its_own_model_and_others_the_mean(opposed):
    X, y, groups = opposed
    model = kinfed.Regressor(rounds=10).fit(X, y, groups)
    assert model.groups_ == ["ann", "bob", "cid", "dan"]
    assert model.score(X, y, groups) > 0.9
    assert model.score(X, y) < 0.5  # without groups there is no knowing which way
    other = model.predict(X[:5], ["eve"] * 5)
    each = [model.predict(X[:5], [name] * 5) for name in model.groups_]
    np.testing.assert_allclose(other, np.mean(each, 0), rtol=1e-6)  # all have as many rows
    np.testing.assert_allclose(model.predict(X[:5]), other)
    mixed = model.predict(X[:3], ["ann", "eve", "dan"])
    np.testing.assert_allclose(mixed, [each[0][0], other[1], each[3][2]], rtol=1e-6)
    assert model.run_.relation.shape[-2:] == (4, 4)


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
