import pytest
import torch
from torch.func import grad, vjp

from kinfed.core.optimiser import SGD, Adam
from kinfed.core.training import Training
from kinfed.methods import PerFedAvg

float64 = torch.float64


def test_first_order_by_hand(bowls, executor):
    # F = (w - 3)^2 at w = 1: w~ = 1.4, where the gradient is -3.2.
    method = PerFedAvg(alpha=0.1, beta=1.0, hessian_free=False, steps=1)
    trial = bowls(method, [3.0], h=2.0, start=1.0, executor=executor)
    assert float(trial.run(1).theta) == pytest.approx(4.2, abs=1e-13)


@pytest.mark.parametrize("delta", [1e-3, 0.1, 10.0])
def test_hessian_free_is_exact_on_quadratics(bowls, executor, delta):
    # (1 - alpha h)^2 h (w - b) = 0.64 * -4 = -2.56, for any delta.
    method = PerFedAvg(alpha=0.1, beta=1.0, delta=delta, steps=1)
    trial = bowls(method, [3.0], h=2.0, start=1.0, executor=executor)
    assert float(trial.run(1).theta) == pytest.approx(3.56, abs=1e-12)


def test_several_local_steps_and_a_uniform_mean(bowls, executor):
    # The distance to b shrinks by 1 - beta (1 - alpha h)^2 h a step, whatever the sizes.
    method = PerFedAvg(alpha=0.1, beta=0.05, steps=4)
    trial = bowls(method, [0.0, 4.0], h=[1.0, 2.0], start=1.0, copies=[1, 5], executor=executor)
    one, two = (1 - 0.05 * 0.81) ** 4, 4 - 3 * (1 - 0.05 * 0.64 * 2) ** 4
    assert float(trial.run(1).theta) == pytest.approx((one + two) / 2, abs=1e-12)


@pytest.mark.parametrize("optimiser", [SGD(0.1), Adam(0.001), SGD(0.01, momentum=0.9)])
def test_the_rate_of_training_is_that_of_plain_sgd_or_else_a_tenth(bowls, executor, optimiser):
    # F = (w - 3)^2 at w = 1: two steps w -> w - 0.1 * 2 * 0.98^2 (w - 3), and then the one that personalises.
    trial = bowls(PerFedAvg(), [3.0], h=2.0, start=1.0, epochs=2, optimiser=optimiser, executor=executor)
    left = 2 * (1 - 0.2 * 0.98**2) ** 2
    assert float(trial.run(1).theta) == pytest.approx(3 - left, abs=1e-12)
    assert float(trial.headline) == pytest.approx(3 - left * 0.98, abs=1e-12)


def test_the_optimiser_is_left_aside_only_where_the_rate_of_training_is_given():
    assert PerFedAvg().rates == PerFedAvg(alpha=0.1).rates == ()
    assert PerFedAvg(beta=0.2).rates == ("alpha", "beta")


def test_error_against_the_exact_hessian_is_of_second_order(examples, noisy, perceptron):
    x, y = noisy(1, 2)
    alpha = 0.3

    def moved(delta):
        method = PerFedAvg(alpha=alpha, beta=1.0, delta=delta, steps=1)
        trial = examples(perceptron(), x, y, method, training=Training(1, 100, SGD(0.1)))
        return trial, trial.run(1).theta

    trial, coarse = moved(0.04)
    fine = moved(0.02)[1]
    model, w = trial.fleet.model, trial.roster.theta
    slope = grad(lambda theta: (model(theta, x[0]) - y[0]).square().mean())
    ahead = slope(w - alpha * slope(w))
    product = vjp(slope, w)[1](ahead)[0]  # Hessian at w times the gradient at w~
    exact = w - (ahead - alpha * product)
    ratio = float((coarse - exact).norm() / (fine - exact).norm())
    assert ratio == pytest.approx(4, rel=0.02)
    assert float((fine - exact).norm()) < 1e-3 * float((exact - w).norm())


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_is_scored_after_steps_on_training_examples(bowls, executor, steps):
    # Training optimum 3, test optimum 0: adaptation must follow the former.
    method = PerFedAvg(alpha=0.1, beta=1.0, steps=1, adapt_steps=steps)
    trial = bowls(method, [3.0], h=2.0, start=1.0, held=[0.0], executor=executor)
    trial.run(1)
    adapted = 3 + 0.56 * 0.8**steps
    assert float(trial.headline) == pytest.approx(adapted, abs=1e-12)
    assert float(trial.loss("adapted")) == pytest.approx(adapted**2, abs=1e-11)
    assert float(trial.loss("shared")) == pytest.approx(3.56**2, abs=1e-11)


def test_the_three_batches_of_a_step_are_drawn_apart(bowls, executor):
    # Batches of one of three examples, each the only one to see its coordinate, with curvature 3: the example of D'
    # moves its coordinate by 3 b, times 1 - 0.1 * 3 if D drew it too, times the same if D'' did.
    trial = bowls(PerFedAvg(alpha=0.1, beta=1.0, steps=1, batch=1), [[1.0, 2.0, 4.0]], executor=executor)
    sent = trial.method.send(trial.roster, trial.method.start(trial.roster), trial.roster.everyone)
    shares = set()
    for round in range(40):
        _, uploads = trial.fleet.train(round, trial.roster.everyone, sent)
        moved = uploads.theta.squeeze(0) / torch.tensor([3.0, 6.0, 12.0])
        assert (moved != 0).sum() == 1
        shares.add(float(moved.sum().round(decimals=9)))
    assert shares == {1.0, 0.7, 0.49}


def test_running_statistics_follow_training_but_not_adaptation(examples, noisy, perceptron, executor):
    x, y = noisy(2, 2)
    method = PerFedAvg(alpha=0.1, beta=0.1, steps=5)
    trial = examples(perceptron(norm=True), x, y, method, training=Training(1, 4, SGD(0.1)), executor=executor)
    server = trial.run(1)
    learned = trial.roster.layout.trainable
    assert (server.theta[~learned] != trial.roster.theta[~learned]).all()
    assert torch.equal(trial.headline[:, ~learned], server.theta[~learned].expand(2, -1))
    assert (trial.headline[:, learned] != server.theta[learned]).any(1).all()
