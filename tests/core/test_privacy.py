"""Privacy: settings that are refused in a line, and the accountant's noise and epsilon."""

import math
import sys

import pytest

import kinfed
from kinfed.core.private.privacy import (
    NoisedSteps,
    Privacy,
    _import_accountant,
    choose_interval,
    count_epsilon,
    noise_for,
)
from kinfed.errors import UsageError

accounting = pytest.importorskip("dp_accounting")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"epsilon": 0}, "must be positive"),
        ({"epsilon": -1.0}, "must be positive"),
        ({"epsilon": math.nan}, "must be positive"),
        ({"epsilon": math.inf}, "epsilon must be"),
        ({"epsilon": "2"}, "must be a number"),
        ({"epsilon": 2, "delta": 0}, "delta must be in"),
        ({"epsilon": 2, "delta": 1}, "delta must be in"),
        ({"epsilon": 2, "clip": 0}, "clip must be positive"),
        ({"epsilon": 2, "unit": "site"}, "unit must be one of"),
        ({}, "needs an epsilon"),
        ({"masked": True, "unit": "client"}, "needs an epsilon"),
        ({"masked": True, "members": 2}, "members must be"),
        ({"masked": True, "largest": 0}, "largest must be positive"),
    ],
)
def test_settings_that_are_no_promise_are_refused(settings, why):
    with pytest.raises(UsageError, match=why) as problem:
        Privacy(**settings)
    assert "\n" not in str(problem.value)


def test_delta_must_say_something_of_every_client():
    Privacy(1.0, delta=1e-3).check_size("a", 999)
    with pytest.raises(UsageError, match=r"client b has 1,000 rows, so set it below 0\.001"):
        Privacy(1.0, delta=1e-3).check_size("b", 1000)


def test_balanced_class_weights_depend_on_rows():
    with pytest.raises(UsageError, match="no price under privacy"):
        kinfed.Training(class_weights="balanced", privacy=Privacy(1.0))
    kinfed.Training(class_weights=(1.0, 2.0), privacy=Privacy(1.0))


def test_a_gaussian_costs_what_its_closed_form_says():
    """Balle and Wang (2018), theorem 8: delta of a Gaussian with noise multiplier s at epsilon e."""

    def cumulative(t):
        return 0.5 * math.erfc(-t / math.sqrt(2))

    for noise in (0.7, 1.0, 3.0, 20.0):
        epsilon = count_epsilon([NoisedSteps(1.0, noise, 1)], 1e-5, 1e-4)
        a, b = 1 / (2 * noise), epsilon * noise
        assert cumulative(a - b) - math.exp(epsilon) * cumulative(-a - b) == pytest.approx(1e-5, rel=2e-3)
        together = count_epsilon([NoisedSteps(1.0, noise * 10, 100)], 1e-5, 1e-4)  # a hundred steps of a tenth
        assert together == pytest.approx(epsilon, rel=1e-3)


@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(8, 0.13, 320), (2, 1.0, 40), (0.5, 0.02, 900), (60, 0.5, 20)])
def test_noise_costs_the_budget_and_not_more(epsilon, rate, steps):
    noise = noise_for(epsilon, 1e-5, rate, steps)
    spent = count_epsilon([NoisedSteps(rate, noise, steps)], 1e-5, choose_interval(epsilon))
    assert 0.99 * epsilon < spent <= epsilon
    assert count_epsilon([NoisedSteps(rate, noise, steps // 2)], 1e-5, choose_interval(epsilon)) < spent


def test_a_budget_beyond_all_noise_is_refused():
    with pytest.raises(UsageError, match="nothing is learned"):
        noise_for(1e-4, 1e-5, 1.0, 10_000)


def test_steps_of_several_kinds_add_up():
    parts = [NoisedSteps(0.1, 1.1, 100), NoisedSteps(0.4, 3.0, 50), NoisedSteps(1.0, 30.0, 0)]
    event = accounting.ComposedDpEvent(
        [
            accounting.SelfComposedDpEvent(accounting.PoissonSampledDpEvent(0.1, accounting.GaussianDpEvent(1.1)), 100),
            accounting.SelfComposedDpEvent(accounting.PoissonSampledDpEvent(0.4, accounting.GaussianDpEvent(3.0)), 50),
        ]
    )
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    theirs = PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(1e-5)
    assert count_epsilon(parts, 1e-5) == pytest.approx(theirs, rel=1e-9)
    assert count_epsilon([], 1e-5) == 0


def test_without_the_accountant_the_fix_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    _import_accountant.cache_clear()
    with pytest.raises(UsageError, match="pip install 'kinfed\\[privacy\\]'"):
        count_epsilon([NoisedSteps(1.0, 1.0, 1)], 1e-5)
    _import_accountant.cache_clear()
