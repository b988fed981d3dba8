"""FedAH and FedALA: weights, one a number, by which a client takes from the shared model."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from kinfed.core.engine import sample
from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import FedAH, FedALA, FedRep
from kinfed.methods.parts.mixed_weights import Mixing

float64 = torch.float64


def mixing(trial, theta, weight):
    """Give all clients of a trial a model and weights, as if they had trained before."""
    count = len(trial.roster)
    one = torch.ones(count, dtype=float64)
    trial.fleet.state = Mixing(theta * one[:, None], weight * one[:, None], one > 0)


@pytest.mark.parametrize(("copies", "share", "wanted"), [(1, 1.0, 0.6), (2, 0.5, 0.6)])
def test_a_step_of_the_weights_by_hand(bowls, executor, copies, share, wanted):
    """Own model 1, shared 3, W = 1, gradient 0.2 there: W = 1 - 0.2 * 2, and the start 1 + 0.6 * 2 = 2.2."""
    method = FedALA(layers=("weight",), rate=1.0, share=share)
    trial = bowls(method, [2.8], start=3.0, copies=copies, batch=1, executor=executor)
    mixing(trial, 1.0, 1.0)
    trial.run(1)
    assert float(trial.fleet.state.weight) == pytest.approx(wanted, abs=1e-14)
    start = 2.2
    for _ in range(copies):
        start -= 0.1 * (start - 2.8)
    assert float(trial.fleet.state.theta) == pytest.approx(start, abs=1e-14)


def test_weights_stay_between_own_and_shared(bowls):
    for optimum, wanted in ((-10.0, 0.0), (10.0, 1.0)):
        trial = bowls(FedALA(layers=("weight",), rate=1.0), [optimum], start=3.0)
        mixing(trial, 1.0, 0.5)
        trial.run(1)
        assert float(trial.fleet.state.weight) == wanted


def descended(theta, x, y, module, epochs, only):
    """[d] full-batch steps of rate 0.1 on the entries `only`, by autograd through the module itself."""
    sizes = [p.numel() for p in module.parameters()]
    for _ in range(epochs):
        theta = theta - 0.1 * only.double() * slope(theta, x, y, module, sizes)
    return theta


def slope(theta, x, y, module, sizes):
    leaf = theta.clone().requires_grad_()
    parts = zip(leaf.split(sizes), module.named_parameters(), strict=True)
    outputs = torch.func.functional_call(module, {name: v.view_as(p) for v, (name, p) in parts}, x)
    return torch.autograd.grad((outputs - y).square().mean(), leaf)[0]


@pytest.mark.parametrize("share", [1.0, 0.67])
@pytest.mark.parametrize(
    "method", [FedAH(rate=2.0, mix_epochs=2, head_epochs=1), FedALA(layers=("head.*",), rate=2.0, mix_epochs=2)]
)
def test_rounds_are_those_of_the_equations(method, share, examples, noisy, perceptron, executor):
    """Batches are whole; the head is the last four numbers of thirteen."""
    x, y = noisy(3, 2, sizes=[7, 5, 9])
    module = perceptron()
    trial = examples(module, x, y, method, training=Training(2, 20, SGD(0.1)), executor=executor)
    server = trial.run(4, participation=share)
    sizes = [p.numel() for p in module.parameters()]
    head = torch.arange(13) >= 9
    w = torch.cat([p.detach().flatten() for p in module.parameters()])
    own, weight, started = [w] * 3, [torch.ones(13, dtype=float64)] * 3, [False] * 3

    def mixed(i, weights):
        return torch.where(head, own[i] + weights * (w - own[i]), w) if started[i] else w

    def learn(i):
        weights = weight[i]
        for _ in range(2 * started[i]):
            grad = slope(mixed(i, weights), x[i], y[i], module, sizes)
            weights = (weights - 2.0 * grad * (w - own[i])).clamp(0, 1)
        return weights

    for t in range(4):
        cohort = sample(replace(trial.roster, round=t), share).tolist()
        ends = {}
        for i in cohort:
            weight[i] = learn(i)
            theta = mixed(i, weight[i])
            if isinstance(method, FedAH):
                theta = descended(theta, x[i], y[i], module, 1, head)
                theta = descended(theta, x[i], y[i], module, 2, ~head)
            else:
                theta = descended(theta, x[i], y[i], module, 2, head | ~head)
            ends[i] = theta
        for i in cohort:
            own[i], started[i] = ends[i], True
        w = sum(len(x[i]) * v for i, v in ends.items()) / sum(len(x[i]) for i in ends)
    torch.testing.assert_close(server.theta, w, rtol=0, atol=1e-12)
    torch.testing.assert_close(trial.fleet.state.theta, torch.stack(own), rtol=0, atol=1e-12)
    for i in range(3):
        torch.testing.assert_close(trial.headline[i], mixed(i, learn(i)), rtol=0, atol=1e-12)
    assert all((v[head] < 1).any() for v in weight) or share < 1
    assert any((v[head] < 1).any() for v in weight)


def test_without_mixing_fedah_is_fedrep_with_the_mean_head(examples, noisy, perceptron, executor):
    """Phases are the same, and in the first round also the heads."""
    x, y = noisy(3, 2, sizes=[7, 5, 9])
    training = Training(2, 3, SGD(0.1))
    fedah, fedrep = (
        examples(perceptron(), x, y, m, training=training, executor=executor)
        for m in (FedAH(rate=0.0, head_epochs=3), FedRep(head_epochs=3, base_epochs=2))
    )
    theta = fedah.run(1).theta
    torch.testing.assert_close(theta[:9], fedrep.run(1).theta, rtol=0, atol=1e-14)
    heads = fedrep.fleet.state.personal
    torch.testing.assert_close(theta[9:], torch.tensor([7.0, 5.0, 9.0], dtype=float64) @ heads / 21)


def test_a_model_without_a_head_is_told(examples):
    x, y = [torch.ones(2, 3, dtype=float64)], [torch.ones(2, 1, dtype=float64)]
    with pytest.raises(UsageError, match="fedah: the model needs a head after other layers"):
        examples(nn.Linear(3, 1).double(), x, y, FedAH(), training=Training()).run(1)
