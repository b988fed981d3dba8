import pytest
import torch

from kinfed.core.optimiser import SGD
from kinfed.methods import FedProx


def test_second_step_feels_the_pull(bowls, executor):
    # From w = 1 the first step (gradient -10) goes to 2, where the gradient is 0.5: 2 - 0.1 (0.5 + 0.4 (2 - 1)) = 1.91.
    trial = bowls(FedProx(mu=0.4), [41 / 21], h=10.5, start=1.0, epochs=2, executor=executor)
    assert float(trial.run(1).theta) == pytest.approx(1.91, abs=1e-13)


def test_many_steps_reach_the_proximal_point(bowls):
    # argmin of h/2 (w - b)^2 + mu/2 (w - start)^2 is (h b + mu start) / (h + mu).
    trial = bowls(FedProx(mu=1.0), [3.0], h=2.0, start=1.0, epochs=200)
    assert float(trial.run(1).theta) == pytest.approx(7 / 3, abs=1e-12)


def test_the_pull_enters_the_momentum(bowls):
    trial = bowls(FedProx(mu=0.5), [3.0], h=2.0, start=1.0, epochs=4, optimiser=SGD(0.1, momentum=0.9))
    w = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    for _ in range(4):
        optimiser.zero_grad()
        ((w - 3).square() + 0.25 * (w - 1).square()).sum().backward()
        optimiser.step()
    torch.testing.assert_close(trial.run(1).theta, w.detach(), rtol=0, atol=1e-13)
