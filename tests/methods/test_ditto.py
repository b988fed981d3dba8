import pytest
import torch

from kinfed.core.optimiser import SGD, Adam
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import Ditto


def test_one_step_by_hand(bowls, executor):
    """F = (v - 3)^2 / 2 at v = 1 beside w = 0: 1 + 0.1 (2 - 1) = 1.1, and 1.2 without a pull."""
    for pull, wanted in ((1.0, 1.1), (0.0, 1.2)):
        trial = bowls(Ditto(pull=pull), [3.0], executor=executor)
        trial.fleet.state = trial.fleet.state._replace(theta=torch.ones(1, 1, dtype=torch.float64))
        trial.run(1)
        assert float(trial.own) == pytest.approx(wanted, abs=1e-14)


def test_many_steps_reach_the_point_between(bowls):
    # Of (v - 3)^2 + (v - 1)^2 / 2 the optimum is (2 * 3 + 1) / 3; the anchor is what was received, 1, not what moves.
    trial = bowls(Ditto(pull=1.0), [3.0], h=2.0, start=1.0, epochs=300)
    trial.run(1)
    assert float(trial.own) == pytest.approx(7 / 3, abs=1e-12)


def test_the_shared_model_never_hears_of_the_personal_one(examples, noisy, perceptron):
    x, y = noisy(3, 2)
    weak, strong = (
        examples(perceptron(), x, y, method, training=Training(2, 2, SGD(0.1)))
        for method in (Ditto(pull=0.1), Ditto(pull=2.0, epochs=3))
    )
    assert torch.equal(weak.run(3).theta, strong.run(3).theta)
    assert (weak.own != strong.own).all()


def test_a_pull_that_overshoots_is_refused(bowls):
    with pytest.raises(UsageError, match=r"ditto: lr \* pull is 2, but from 2 on .* lower method.pull or the learning"):
        bowls(Ditto(pull=20.0), [1.0]).run(1)
    bowls(Ditto(pull=20.0), [1.0], optimiser=Adam(0.1)).run(1)
