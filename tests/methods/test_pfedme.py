import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from kinfed.core.engine import sample
from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import PFedMe

float64 = torch.float64


def test_the_proximal_point_by_hand(bowls, executor):
    """f = (theta - 3)^2 and lambda 15 from w = 1: (2 * 3 + 15) / 17; w goes 0.005 * 15 of the way."""
    trial = bowls(PFedMe(steps=400, lr=0.05), [3.0], h=2.0, start=1.0, executor=executor)
    assert float(trial.run(1).theta) == pytest.approx(1.0176470588, abs=1e-9)
    assert float(trial.own) == pytest.approx(21 / 17, abs=1e-12)


def test_five_steps_and_the_personal_model_is_what_is_scored(bowls):
    trial = bowls(PFedMe(lr=0.05), [3.0], h=2.0, start=1.0)
    trial.run(1)
    theta = 1.0
    for _ in range(5):
        theta -= 0.05 * (2 * (theta - 3) + 15 * (theta - 1))
    assert theta == pytest.approx(1.2352763, abs=1e-7)
    assert float(trial.headline) == pytest.approx(theta, abs=1e-14)
    assert float(trial.loss("own")) == pytest.approx((theta - 3) ** 2, abs=1e-13)


def test_the_share_is_the_whole_way_for_averaged_personal_models(bowls):
    trial = bowls(PFedMe(share=1.0, steps=1, lr=1.0, pull=0.1), [1.0, 5.0], copies=[1, 3])
    assert float(trial.run(1).theta) == pytest.approx(4.0, abs=1e-14)


def test_nothing_to_learn_leaves_the_shared_model(bowls):
    assert float(bowls(PFedMe(), [1.0, 1.0], start=1.0).run(3).theta) == 1.0


def naive(x, y, module, method, rounds, cohorts):
    """Equations alone, with autograd for the data's gradient; batches are whole, so their order does not matter."""
    theta0 = torch.cat([p.detach().flatten() for p in module.parameters()])
    w, own = theta0.clone(), [theta0.clone() for _ in x]

    def slope(theta, i):
        leaf = theta.clone().requires_grad_()
        sizes = [p.numel() for p in module.parameters()]
        shaped = [v.view_as(p) for v, p in zip(leaf.split(sizes), module.parameters(), strict=True)]
        outputs = torch.func.functional_call(
            module, dict(zip(dict(module.named_parameters()), shaped, strict=True)), x[i]
        )
        return torch.autograd.grad((outputs - y[i]).square().mean(), leaf)[0]

    for t in range(rounds):
        local = {}
        for i in cohorts[t]:
            mine, theta = w, w
            for _ in range(2):  # epochs of one batch
                for _ in range(method.steps):
                    theta = theta - method.lr * (slope(theta, i) + method.pull * (theta - mine))
                mine = mine - method.share * (mine - theta)
            local[i], own[i] = mine, theta
        total = sum(len(x[i]) for i in local)
        mean = sum(len(x[i]) / total * v for i, v in local.items())
        w = (1 - method.beta) * w + method.beta * mean
    return w, torch.stack(own)


@pytest.mark.parametrize("share", [1.0, 0.67])
@pytest.mark.parametrize("method", [PFedMe(), PFedMe(pull=3.0, steps=3, lr=0.1, share=0.2, beta=1.5)], ids=str)
def test_rounds_are_those_of_the_equations(method, share, examples, noisy, perceptron, executor):
    x, y = noisy(3, 2, sizes=[7, 5, 9])
    trial = examples(perceptron(), x, y, method, training=Training(2, 20, SGD(0.1)), executor=executor)
    server = trial.run(4, participation=share)
    cohorts = [sample(replace(trial.roster, round=t), share).tolist() for t in range(4)]
    w, own = naive(x, y, perceptron(), method, 4, cohorts)
    torch.testing.assert_close(server.theta, w, rtol=0, atol=1e-12)
    torch.testing.assert_close(trial.own, own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_variances_stay_positive_under_decay_and_beyond_the_mean(beta, examples, noisy, perceptron):
    x, y = noisy(2, 2)
    training = Training(2, 3, SGD(0.1, momentum=0.9, weight_decay=0.5))
    trial = examples(perceptron(norm=True), x, y, PFedMe(beta=beta), training=training)
    server = trial.run(5)
    variance = next(e for e in trial.roster.layout.entries if e.name.endswith("running_var"))
    assert (server.theta[variance.at] > 0.05).all()  # which decay does not touch


def test_statistics_are_those_of_passes_over_the_examples(examples):
    """One batch of -1 and 3, twice: the mean goes to 1 by a tenth a pass, and the shared model half of that way."""
    x = [torch.tensor([[-1.0], [3.0]], dtype=float64)]
    module = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1)).double()
    trial = examples(
        module, x, [torch.zeros(2, 1, dtype=float64)], PFedMe(share=0.5), training=Training(2, 2, SGD(0.1))
    )
    server = trial.run(1)
    entry = next(e for e in trial.roster.layout.entries if e.name.endswith("running_mean"))
    assert float(trial.own[0, entry.at]) == pytest.approx(0.19, abs=1e-14)
    assert float(server.theta[entry.at]) == pytest.approx((0.05 + 0.19) / 2, abs=1e-14)


def test_a_pull_that_overshoots_is_refused(bowls):
    with pytest.raises(UsageError, match=r"pfedme: lr \* pull is 2\.7, but from 2 on"):
        bowls(PFedMe(pull=30.0), [1.0]).run(1)


def test_a_shared_model_that_hardly_moves_is_said_once(bowls):
    """0.075 / 15 = 0.005 on each batch, where training goes 0.1."""
    with pytest.warns(UserWarning, match="pfedme: the shared model") as said:
        bowls(PFedMe(), [1.0]).run(3)
    assert len(said) == 1
    assert "share / pull = 0.005 of a gradient on each batch, 20 times less" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bowls(PFedMe(share=1.0), [1.0]).run(1)
