"""Tasks: losses and scores worked out by hand, with missing readings and rows that only fill a batch up."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from sklearn.metrics import brier_score_loss, mean_poisson_deviance, r2_score, recall_score, roc_auc_score
from torch.func import grad, vmap

from kinfed import UsageError
from kinfed.core.tasks import (
    Classification,
    Counts,
    Forecasting,
    Quantiles,
    Regression,
    find_bounds,
    is_higher_better,
    outputs_of,
    selected_task,
    unit_of,
)

NAN = math.nan
Y = torch.tensor([[10.0, 20.0, NAN], [0.0, 40.0, 50.0]])
# In deviations of 10 from a mean of 20: forecasts 12, 15, 99 and 5, 40, 20.
OUTPUTS = torch.tensor([[-0.8, -0.5, 7.9], [-1.5, 2.0, 0.0]])


def test_regression_is_the_mean_squared_error_over_an_examples_targets():
    y = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    outputs = torch.tensor([[2.0, 4.0], [9.0, 9.0]])
    assert Regression().loss(outputs, y).tolist() == [2.5, 81.0]
    assert Regression().loss(outputs[:, :1], y[:, 0]).tolist() == [1.0, 81.0]  # one target: [B, 1] for [B]
    assert Regression().score(outputs, y, torch.tensor([1.0, 0.0]))["mse"] == 2.5
    with pytest.raises(UsageError, match="regression needs float targets"):
        Regression().check(torch.zeros(3, dtype=torch.int64))


def test_forecasts_are_scored_in_the_readings_own_unit_and_missing_ones_left_out():
    task = Forecasting(20.0, 10.0, horizons=(1, 3, 12))
    scores = task.score(OUTPUTS, Y, torch.ones(2))
    # Errors 2, 5, - and 5, 0, 30; the readings 10, 20, - and 0 (no MAPE), 40, 50.
    expected = {
        "mae": 42 / 5,
        "rmse": math.sqrt((4 + 25 + 25 + 0 + 900) / 5),
        "mape": 100 * (0.2 + 0.25 + 0 + 0.6) / 4,
        "mae@1": 3.5,
        "rmse@1": math.sqrt(29 / 2),
        "mape@1": 20.0,
        "mae@3": 30.0,
        "rmse@3": 30.0,
        "mape@3": 60.0,
        "loss": ((0.2 + 0.5) / 3 + (0.5 + 0 + 3) / 3) / 2,
        "nmse": (0.04 + 0.25 + 0.25 + 0 + 9) / 5,
    }
    assert {k: float(v) for k, v in scores.items()} == pytest.approx(expected, rel=1e-5)


def test_rows_of_weight_zero_do_not_count():
    task = Forecasting(20.0, 10.0, horizons=(2,))
    alone = task.score(OUTPUTS[:1], Y[:1], torch.ones(1))
    padded = task.score(OUTPUTS, Y, torch.tensor([1.0, 0.0]))
    assert padded == alone
    assert float(alone["mae"]) == pytest.approx(3.5)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_the_score_of_classification_has_the_loss_that_it_is_trained_with(kind):
    task, outputs = Classification(5), (7 * torch.randn(3, 40, 5)).to(kind)
    y, weight = torch.randint(5, (3, 40)), torch.ones(3, 40, dtype=kind)
    found = vmap(task.score)(outputs, y, weight)["loss"]
    assert torch.equal(found, vmap(lambda *a: task.loss(*a).sum() / 40)(outputs, y))


def test_scores_run_batched_over_clients():
    task = Forecasting(20.0, 10.0, horizons=(1, 2))
    outputs, y = torch.stack([OUTPUTS, OUTPUTS + 1]), torch.stack([Y, Y.flip(1)])
    weight = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    together = vmap(task.score)(outputs, y, weight)
    for i in range(2):
        alone = task.score(outputs[i], y[i], weight[i])
        for name, value in alone.items():
            torch.testing.assert_close(together[name][i], value, equal_nan=True)


def test_a_horizon_without_a_reading_has_no_score_and_a_broken_forecast_is_not_hidden():
    task = Forecasting(horizons=(2,))
    scores = task.score(torch.zeros(1, 2), torch.tensor([[1.0, NAN]]), torch.ones(1))
    assert float(scores["mae"]) == 1
    assert math.isnan(scores["mae@2"])
    scores = task.score(torch.tensor([[NAN, 0.0]]), torch.tensor([[1.0, 2.0]]), torch.ones(1))
    assert math.isnan(scores["mae"])
    assert float(scores["mae@2"]) == 2


@pytest.mark.parametrize("error", ["absolute", "squared"])
def test_missing_readings_pull_at_nothing(error):
    task = Forecasting(20.0, 10.0, error)
    slope = grad(lambda outputs: task.loss(outputs, Y).sum())(OUTPUTS)
    # Differences in deviations: 0.2, -0.5, - and 0.5, 0, -3.
    difference = torch.tensor([[0.2, -0.5, 0.0], [0.5, 0.0, -3.0]])
    expected = difference.sign() / 3 if error == "absolute" else 2 * difference / 3
    torch.testing.assert_close(slope, expected)
    per_example = (difference.abs() if error == "absolute" else difference.square()).mean(1)
    torch.testing.assert_close(task.loss(OUTPUTS, Y), per_example)


def test_wrong_forecasting_settings_and_targets_are_refused():
    for settings, said in (
        ({"deviation": 0.0}, "Forecasting.deviation must be positive; got 0.0"),
        ({"mean": NAN}, "mean must be finite"),
        ({"error": "cubic"}, "Forecasting.error must be one of 'absolute', 'squared'; got 'cubic'"),
        ({"horizons": (0, 3)}, r"Forecasting.horizons\[0\] must be at least 1; got 0"),
    ):
        with pytest.raises(UsageError, match=said):
            Forecasting(**settings)
    for y, said in (
        (torch.zeros(3), r"needs float targets \[n, H\].*got torch.float32 \[3\]"),
        (torch.zeros(3, 2, dtype=torch.int64), "got torch.int64"),
        (torch.tensor([[1.0, math.inf]]), "holds infinity; a missing reading must be NaN"),
    ):
        with pytest.raises(UsageError, match=said):
            Forecasting().check(y)
    Forecasting().check(Y)


def by_class(outputs, y, weight=None):
    weight = torch.ones(len(y)) if weight is None else weight
    scores = Classification(outputs.shape[-1], by_class=True).score(outputs, y, weight)
    return {name: float(value) for name, value in scores.items()}


def auc(outputs, y):
    return by_class(outputs, y)["auc"]


def test_auc_by_hand():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.6, 0.2], [0.5, 0.3, 0.2], [0.5, 0.4, 0.1]])
    y = torch.tensor([0, 0, 1, 1])
    # Class 0: 0.7 beats 0.5 and 0.5, 0.2 beats none: 2 of 4. Class 1: 0.3 and 0.4 against 0.2 and 0.6: 2 of 4.
    assert auc(p.log(), y) == pytest.approx(0.5)
    p[1] = torch.tensor([0.5, 0.3, 0.2])
    # Class 0: 0.5 is equal to both: 3 of 4. Class 1: 0.3 beats 0.2 and equals 0.3, 0.4 beats both: 3.5 of 4.
    assert auc(p.log(), y) == pytest.approx((3 / 4 + 3.5 / 4) / 2)
    assert math.isnan(auc(p.log(), torch.tensor([2, 2, 2, 2])))  # one class only: no pairs
    assert math.isnan(auc(torch.full((4, 3), NAN), y))
    # Both probabilities of class 1 are rounded to 1, but one is surer.
    assert auc(torch.tensor([[0.0, 30.0], [0.0, 40.0]]), torch.tensor([0, 1])) == 1.0


def test_scores_by_class_by_hand():
    """Answers 0 0 0 1 1 0 to labels 0 0 1 1 1 1, and a row that only fills up; nobody has class 2."""
    outputs = torch.eye(3)[torch.tensor([0, 0, 0, 1, 1, 0, 2])]
    y = torch.tensor([0, 0, 1, 1, 1, 1, 2])
    found = by_class(outputs, y, torch.tensor([1.0] * 6 + [0.0]))
    assert (found["recall@0"], found["recall@1"], found["balanced_accuracy"]) == (1.0, 0.5, 0.75)
    assert math.isnan(found["recall@2"])
    assert math.isnan(found["always"])
    constant = torch.eye(3)[torch.tensor([1, 1, 1, 1])]
    told = by_class(constant, torch.tensor([0, 1, 1, 1]))
    assert (told["always"], told["accuracy"], told["balanced_accuracy"], told["auc"]) == (1.0, 0.75, 0.5, 0.5)
    alone = by_class(constant, torch.tensor([1, 1, 1, 1]))  # of one class nothing of this can be known but its recall
    assert alone["recall@1"] == 1.0
    assert [name for name, value in alone.items() if math.isnan(value)] == [
        "balanced_accuracy",
        "auc",
        "always",
        "recall@0",
        "recall@2",
    ]
    assert set(Classification(3).score(outputs, y, torch.ones(7))) == {"accuracy", "loss"}


@given(st.integers(2, 40), st.integers(2, 6), st.integers(0, 10**6), st.booleans())
def test_scores_by_class_are_scikit_learns_for_the_classes_that_are_there(n, classes, seed, ties):
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(n, classes, generator=draw, dtype=torch.float64)
    outputs = outputs.round() if ties else outputs
    y = torch.randint(classes, (n,), generator=draw)
    p, answer = outputs.softmax(1).numpy(), outputs.argmax(1).numpy()
    there = [c for c in range(classes) if 0 < int((y == c).sum()) < n]
    found = by_class(outputs, y)
    ranked = [1] if classes == 2 else there
    expected = {
        "auc": sum(roc_auc_score((y == c).numpy(), p[:, c]) for c in ranked) / len(ranked) if there else NAN,
        "balanced_accuracy": sum(recall_score(y, answer, labels=there, average=None)) / len(there) if there else NAN,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12, nan_ok=True)
    filled = by_class(torch.cat([outputs, outputs]), torch.cat([y, y.flip(0)]), (torch.arange(2 * n) < n).double())
    assert filled == pytest.approx(found, abs=1e-12, nan_ok=True)  # rows that only fill up do not count
    together = vmap(Classification(classes, by_class=True).score)(
        torch.stack([outputs, -outputs]), y.expand(2, -1), torch.ones(2, n, dtype=torch.float64)
    )
    for i, alone in enumerate((found, by_class(-outputs, y))):
        assert {name: float(v[i]) for name, v in together.items()} == pytest.approx(alone, abs=1e-12, nan_ok=True)


def test_two_classes_or_uneven_ones_are_scored_by_class():
    def labels(*counts):
        return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))

    assert Classification(2).is_uneven(labels(5, 5))
    assert not Classification(3).is_uneven(labels(30, 15, 15))  # 30 of 60 is 1.5 even shares, and no more
    assert Classification(3).is_uneven(labels(31, 15, 14))
    assert Classification(3).is_uneven(labels(22, 22, 10))
    assert not Classification(3).is_uneven(labels(22, 22, 11))
    assert Classification(4).is_uneven(labels(20, 20, 10, 0))  # 20 of 50 is 1.6 even shares


def floats(scores):
    return {name: float(value) for name, value in scores.items()}


def test_a_number_is_scored_in_its_own_unit():
    """Predictions 12, 18, 30 for 10, 20, 30, and a row that only fills up; in deviations of 5 from a mean of 20."""
    task = Regression((20.0,), (5.0,))
    outputs = torch.tensor([[-1.6], [-0.4], [2.0], [7.0]])
    y = torch.tensor([[10.0], [20.0], [30.0], [0.0]])
    found = floats(task.score(outputs, y, torch.tensor([1.0, 1.0, 1.0, 0.0])))
    expected = {"mae": 4 / 3, "rmse": math.sqrt(8 / 3), "mse": 8 / 3, "r2": 1 - 8 / 200, "loss": 8 / 3 / 25}
    assert found == pytest.approx(expected, rel=1e-5)
    assert task.loss(outputs, y)[:3].tolist() == pytest.approx([0.16, 0.16, 0.0], abs=1e-6)
    assert found["r2"] == pytest.approx(r2_score([10, 20, 30], [12, 18, 30]))
    assert task.metric == "mae"
    assert is_higher_better(task, "r2")
    assert not is_higher_better(task, "rmse")


def test_several_numbers_are_scored_each_in_a_unit_of_its_own():
    """Errors of 1 and 3 in metres, of 100 and 0 in grams."""
    task = Regression((0.0, 500.0), (2.0, 100.0), ("length", "weight"))
    outputs = torch.tensor([[0.5, 1.0], [-1.5, 0.0]])
    y = torch.tensor([[0.0, 500.0], [0.0, 500.0]])
    found = floats(task.score(outputs, y, torch.ones(2)))
    assert (found["mae@length"], found["mae@weight"]) == (2.0, 50.0)
    assert (found["rmse@length"], found["rmse@weight"]) == pytest.approx((math.sqrt(5), math.sqrt(5000)))
    assert found["nmae"] == pytest.approx((2 / 2 + 50 / 100) / 2)
    assert found["loss"] == pytest.approx((0.25 + 1.0 + 2.25 + 0.0) / 4)
    assert math.isnan(found["r2@length"])
    assert math.isnan(found["r2"])
    y = torch.tensor([[0.0, 500.0], [1.0, 500.0]])  # a length of 0 and of 1: 1 and -3 predicted
    found = floats(task.score(outputs, y, torch.ones(2)))
    assert found["r2@length"] == found["r2"] == pytest.approx(1 - (1 + 16) / 0.5)
    assert task.metric == "nmae"
    assert selected_task(task, "r2") is task
    with pytest.raises(UsageError, match="select_by: regression has no 'mae'; choose one of nmae, r2, loss"):
        selected_task(task, "mae")
    with pytest.raises(UsageError, match=r"regression of 2 targets needs y \[n, 2\]; got \[3, 1\]"):
        task.check(torch.zeros(3, 1))


def test_r2_of_constant_targets_is_undefined_whatever_rounding_does():
    y = torch.full((7, 1), 0.1)
    assert math.isnan(Regression().score(y + 1, y, torch.ones(7))["r2"])
    assert math.isnan(Regression().score(y[:1], y[:1], torch.ones(1))["r2"])


def test_counts_by_hand():
    """Rates 2, 4 and 6 are expected where 2, 8 and 0 were counted."""
    task, y = Counts(2.0), torch.tensor([[2.0], [8.0], [0.0]])
    outputs = torch.tensor([[0.0], [math.log(2)], [math.log(3)]])
    deviances = [0.0, 2 * (8 * math.log(2) - 4), 12.0]
    found = floats(task.score(outputs, y, torch.ones(3)))
    assert found == pytest.approx(
        {"deviance": sum(deviances) / 3, "mae": 10 / 3, "rmse": math.sqrt(52 / 3), "loss": sum(deviances) / 12},
        rel=1e-5,
    )
    assert found["deviance"] == pytest.approx(mean_poisson_deviance([2, 8, 0], [2, 4, 6]), rel=1e-5)
    assert task.loss(outputs, y).tolist() == pytest.approx([one / 4 for one in deviances], abs=1e-5)
    slope = grad(lambda o: task.loss(o, y).sum())(outputs).flatten()
    assert slope.tolist() == pytest.approx([0.0, -2.0, 3.0], abs=1e-5)  # (rate - count) / mean


def test_the_loss_of_counts_goes_on_as_a_line_beyond_the_largest_answer():
    """Up to 8, four times the mean, it is Poisson's, and beyond its slope stays (8 - count) / 2."""
    task, y, at = Counts(2.0, high=8.0), torch.tensor([[3.0], [3.0]]), math.log(4)
    outputs = torch.tensor([[at - 0.1], [at + 90.0]])  # of which the exponential is infinite in float32
    edge = float(Counts(2.0).loss(torch.tensor([[at]]), y[:1]))
    inside = float(Counts(2.0).loss(outputs[:1], y[:1]))
    assert task.loss(outputs, y).tolist() == pytest.approx([inside, edge + 90 * 2.5], rel=1e-5)
    slope = grad(lambda o: task.loss(o, y).sum())(outputs).flatten()
    assert slope.tolist() == pytest.approx([(8 * math.exp(-0.1) - 3) / 2, 2.5], rel=1e-5)


@pytest.mark.parametrize(("values", "said"), [([1.0, -2.0], "example 1 has -2"), ([0.5, 2.0], "example 0 has 0.5")])
def test_counts_that_are_none_are_refused(values, said):
    with pytest.raises(UsageError, match=f"counts must be whole numbers from 0; {said}"):
        Counts().check(torch.tensor(values))


def test_targets_with_names_alone_are_in_standard_deviations_already():
    task, y = Regression(names=("a", "b")), torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    found = floats(task.score(torch.zeros(2, 2), y, torch.ones(2)))
    assert (found["mae@a"], found["mae@b"], found["nmae"]) == (2.0, 2.0, 2.0)
    with pytest.raises(UsageError, match=r"regression of 2 targets needs y \[n, 2\]; got \[2, 3\]"):
        task.check(torch.zeros(2, 3))
    with pytest.raises(UsageError, match=r"as many names as means; got 2 \(a, b\) and 3"):
        Regression((0.0,) * 3, (1.0,) * 3, ("a", "b"))


def test_the_deviance_of_large_counts_is_not_lost_in_rounding():
    """Forecasts half a percent off, of counts around a million, in float32."""
    task, counts = Counts(1e6), [900_000.0, 1_000_000.0, 1_200_000.0]
    outputs = torch.tensor([math.log(1.005 * one / 1e6) for one in counts])
    found = floats(task.score(outputs, torch.tensor(counts), torch.ones(3)))
    assert found["deviance"] == pytest.approx(mean_poisson_deviance(counts, [1.005 * one for one in counts]), rel=1e-3)
    assert task.score(torch.log(torch.tensor([0.9])), torch.tensor([9e5]), torch.ones(1))["deviance"] >= 0


def test_quantiles_by_hand():
    """Quantiles 0.1, 0.5, 0.9 are 8, 10, 12 for 11, and 5, 6, 7 for 9; a third reading is missing."""
    task = Quantiles(10.0, 2.0, horizons=(2,), quantiles=(0.1, 0.5, 0.9))
    y = torch.tensor([[11.0, 9.0, NAN]])
    outputs = (torch.tensor([[8.0, 10.0, 12.0, 5.0, 6.0, 7.0, 1.0, 2.0, 3.0]]) - 10) / 2
    first, second = (0.1 * 3 + 0.5 * 1 + 0.1 * 1) / 3, (0.1 * 4 + 0.5 * 3 + 0.9 * 2) / 3
    found = floats(task.score(outputs, y, torch.ones(1)))
    assert found["pinball"] == pytest.approx((first + second) / 2)
    assert (found["pinball@2"], found["coverage@2"], found["width@2"]) == pytest.approx((second, 0.0, 2.0))
    assert (found["coverage"], found["width"]) == pytest.approx((0.5, 3.0))
    assert (found["mae"], found["rmse"]) == pytest.approx((2.0, math.sqrt(5)))  # of the medians, 10 and 6
    assert task.loss(outputs, y).tolist() == pytest.approx([(first + second) / 2 / 3], abs=1e-6)
    assert found["loss"] == pytest.approx((first + second) / 6)
    assert outputs_of(task, y) == 9
    assert "mae" not in Quantiles(quantiles=(0.2, 0.8)).score(torch.zeros(1, 6), y, torch.ones(1))


@pytest.mark.parametrize("wrong", [(), (0.0, 0.5), (0.5, 1.0), (0.9, 0.1), (0.5, 0.5), (NAN,)])
def test_quantiles_that_are_none_are_refused(wrong):
    with pytest.raises(UsageError, match="quantiles must be numbers above 0 and below 1 in increasing order, such as"):
        Quantiles(quantiles=wrong)


def test_calibration_by_hand():
    """Class 1 has probability 0.9, 0.9, 0.6 and 0.2; the labels are 1, 0, 1, 0."""
    p, y = torch.tensor([0.9, 0.9, 0.6, 0.2]), torch.tensor([1, 0, 1, 0])
    outputs = torch.stack([1 - p, p], 1).log()
    found = by_class(outputs, y)
    assert found["brier"] == pytest.approx((0.01 + 0.81 + 0.16 + 0.04) / 4)
    assert found["brier"] == pytest.approx(brier_score_loss(y, p))
    # Confidences 0.9, 0.9, 0.6, 0.8: one of the two at 0.9 is right, those at 0.6 and 0.8 are.
    assert found["ece"] == pytest.approx((abs(1 - 1.8) + 0.4 + 0.2) / 4)
    assert found["log_loss"] == pytest.approx(-sum(map(math.log, (0.9, 0.1, 0.6, 0.8))) / 4) == found["loss"]
    padded = by_class(torch.cat([outputs, outputs]), y.repeat(2), torch.tensor([1.0] * 4 + [0.0] * 4))
    assert {name: padded[name] for name in ("brier", "ece", "log_loss")} == pytest.approx(
        {name: found[name] for name in ("brier", "ece", "log_loss")}
    )
    three = torch.tensor([[0.5, 0.3, 0.2]])
    assert by_class(three.log(), torch.tensor([1]))["brier"] == pytest.approx(0.25 + 0.49 + 0.04)
    task = selected_task(Classification(2), "ece")
    assert task.by_class
    assert not is_higher_better(task, "ece")
    assert is_higher_better(task, "auc")
    assert (unit_of(task), unit_of(Regression())) == ("%", "")


@pytest.mark.parametrize(
    ("task", "outputs", "y"),
    [
        (Regression((1.0, 2.0), (2.0, 3.0), ("a", "b")), (2,), (2,)),
        (Regression((1.0,), (2.0,)), (1,), (1,)),
        (Counts(3.0), (1,), (1,)),
        (Quantiles(1.0, 2.0, horizons=(1,)), (6,), (2,)),
    ],
)
def test_every_task_of_numbers_scores_the_same_batched_over_clients(task, outputs, y):
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 5, *outputs, generator=draw)
    y = torch.poisson(torch.full((3, 5, *y), 2.0), draw)
    weight = torch.tensor([[1.0] * 5, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    together = vmap(task.score)(outputs, y, weight)
    for i in range(3):
        real = int(weight[i].sum())
        alone = task.score(outputs[i, :real], y[i, :real], torch.ones(real))
        for name, value in alone.items():
            torch.testing.assert_close(together[name][i], value, equal_nan=True)


def test_answers_are_scored_within_what_training_saw():
    low, high = find_bounds(torch.tensor([[0.0, -10.0], [20.0, 10.0]]))
    assert (low, high) == ((0.0, -12.0), (22.0, 12.0))  # a tenth of the range beyond it, and not below 0
    task = Regression((10.0,), (5.0,), low=(0.0,), high=(22.0,))
    outputs, y, real = torch.tensor([[100.0], [-100.0], [0.0]]), torch.tensor([20.0, 0.0, 10.0]), torch.ones(3)
    assert float(task.score(outputs, y, real)["mae"]) == pytest.approx(2 / 3)
    counts = Counts(2.0, high=8.0).score(torch.tensor([50.0]), torch.tensor([8.0]), torch.ones(1))
    assert float(counts["mae"]) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("by_class", [True, False])
def test_log_loss_may_be_the_metric_of_labels(by_class):
    plain, task = Classification(2, by_class=by_class), Classification(2, by_class=by_class, scored="log_loss")
    outputs, y, weight = torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([1, 1]), torch.tensor([3.0, 1.0])
    scores = task.score(outputs, y, weight)
    assert scores["log_loss"].item() == pytest.approx((3 * math.log1p(math.exp(-2)) + math.log1p(math.exp(1))) / 4)
    assert (task.metric, task.higher_is_better, task.unit) == ("log_loss", False, "")
    lower = ("loss", "log_loss", "brier", "ece")
    for name in scores:
        if name != "always":
            assert is_higher_better(task, name) == is_higher_better(plain, name) == (name not in lower)
