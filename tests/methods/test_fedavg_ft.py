import pytest
import torch

from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.methods import FedAvg, FedAvgFT


def test_tunes_the_shared_model_by_a_round_of_training(bowls, executor):
    # Shared: (0.9^2 + 4 - 3 * 0.8^2) / 2 = 1.445; two more steps on each client's own loss.
    trial = bowls(FedAvgFT(length=1), [0.0, 4.0], h=[1.0, 2.0], start=1.0, epochs=2, executor=executor)
    server = trial.run(1)
    assert float(server.theta) == pytest.approx(1.445, abs=1e-14)
    expected = torch.tensor([[1.445 * 0.81], [4 - 2.555 * 0.64]], dtype=torch.float64)
    torch.testing.assert_close(trial.headline, expected, rtol=0, atol=1e-14)
    expected = torch.tensor([0.5 * 1.445**2, 2.555**2], dtype=torch.float64)
    torch.testing.assert_close(trial.loss("shared"), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("method", "steps"), [(FedAvgFT(epochs=1), 1), (FedAvgFT(length=3), 6), (FedAvgFT(2, 3), 3)])
def test_tunes_for_several_rounds_or_by_the_epoch(bowls, method, steps):
    trial = bowls(method, [0.0, 4.0], h=[1.0, 2.0], start=1.0, epochs=2)
    trial.run(1)
    expected = torch.tensor([[1.445 * 0.9**steps], [4 - 2.555 * 0.8**steps]], dtype=torch.float64)
    torch.testing.assert_close(trial.headline, expected, rtol=0, atol=1e-14)


def test_a_round_may_be_counted_in_steps():
    assert Training(epochs=4).span(3) == {"epochs": 12}
    assert Training(steps=5).span(3) == {"steps": 15}


def test_tuning_never_feeds_back(examples, noisy, perceptron, executor):
    x, y = noisy(3, 2)
    training = Training(epochs=2, batch=3, optimiser=SGD(0.1))
    often = examples(perceptron(), x, y, FedAvgFT(), training=training, executor=executor, every=1)
    never = examples(perceptron(), x, y, FedAvg(), training=training, executor=executor, every=100)
    assert torch.equal(often.run(3).theta, never.run(3).theta)
    assert not torch.equal(often.loss("tuned"), often.loss("shared"))


def test_head_alone(examples, noisy, perceptron):
    x, y = noisy(2, 2)
    trial = examples(perceptron(), x, y, FedAvgFT(scope="head"), training=Training(2, 3, SGD(0.1)))
    server = trial.run(2)
    layout = trial.fleet.model.layout
    base, head = layout.index(layout.base), layout.index(layout.head)
    for tuned in trial.headline:
        assert torch.equal(tuned[base], server.theta[base])
        assert (tuned[head] != server.theta[head]).all()
