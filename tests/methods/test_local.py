import torch

from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.methods import Local


def test_follows_each_clients_own_descent(bowls, executor):
    # One step multiplies the distance to the optimum by 1 - lr h: 0.9 and 0.8; 3 rounds of 2 epochs are 6 steps.
    trial = bowls(Local(), [0.0, 4.0], h=[1.0, 2.0], start=1.0, epochs=2, executor=executor)
    trial.run(3)
    expected = torch.tensor([[0.9**6], [4 - 3 * 0.8**6]], dtype=torch.float64)
    torch.testing.assert_close(trial.headline, expected, rtol=0, atol=1e-14)


def test_does_not_depend_on_the_other_clients(examples, noisy, perceptron):
    x, y = noisy(3, 2, sizes=[7, 5, 9])
    training = Training(epochs=2, batch=2, optimiser=SGD(0.1))
    alone = examples(perceptron(), x[:1], y[:1], Local(), training=training)
    among = examples(perceptron(), x, y, Local(), training=training)
    alone.run(3)
    among.run(3)
    assert torch.equal(alone.headline[0], among.headline[0])
    assert not torch.equal(among.headline[0], among.headline[1])
