import pytest
import torch

from kinfed.methods import APFL
from kinfed.methods.apfl import Own


def begin_at_one(trial):
    trial.fleet.state = Own(torch.ones(1, 1, dtype=torch.float64), trial.fleet.state.alpha.clone())


def test_one_step_by_hand(bowls, executor):
    """w: 0 -> 0.1 * 3 = 0.3; v: 1 -> 1 + 0.1 * 0.25 * (3 - 0.25) = 1.06875; mixed 0.25 v + 0.75 w."""
    trial = bowls(APFL(alpha=0.25), [3.0], executor=executor)
    begin_at_one(trial)
    server = trial.run(1)
    assert float(server.theta) == pytest.approx(0.3, abs=1e-14)
    assert float(trial.own) == pytest.approx(1.06875, abs=1e-14)
    assert float(trial.headline) == pytest.approx(0.25 * 1.06875 + 0.75 * 0.3, abs=1e-14)


def test_alpha_follows_its_gradient_once_a_round(bowls, executor):
    """alpha: 0.5 - 0.1 * (v - w) * dF/dv = 0.5 - 0.1 * (1 - 0) * (0.5 - 3) = 0.75, with which v takes its steps."""
    trial = bowls(APFL(adaptive=True), [3.0], executor=executor, epochs=2)
    begin_at_one(trial)
    trial.run(1)
    assert float(trial.fleet.state.alpha) == pytest.approx(0.75, abs=1e-14)
    v, w = 1 + 0.1 * 0.75 * 2.5, 0.3
    v += 0.1 * 0.75 * (3 - 0.75 * v - 0.25 * w)
    assert float(trial.own) == pytest.approx(v, abs=1e-14)


def test_alpha_stays_between_zero_and_one(bowls):
    trial = bowls(APFL(adaptive=True), [300.0], lr=0.5)
    trial.run(2)
    assert float(trial.fleet.state.alpha) in (0.0, 1.0)
