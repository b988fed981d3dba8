"""pFedBayes by hand, and beside an implementation in NumPy that is written from the equations alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from kinfed import FedAvg, Local, UsageError
from kinfed.core.engine import sample
from kinfed.core.method import AveragedParams
from kinfed.core.mixins import model_for, reduce_uploads
from kinfed.core.optimiser import SGD
from kinfed.core.seeding import fold, key, normal, tags
from kinfed.core.training import Training
from kinfed.methods import PFedBayes
from kinfed.methods.pfedbayes import RHO, pulls

float64 = torch.float64


def gaussian(mean, std):
    """Means and rho."""
    mean, std = (torch.tensor([v], dtype=float64) for v in (mean, std))
    return mean, std.expm1().log()


def divergence(q, w):
    r"""[] $KL(q \| w)$ of independent Gaussians, each given by means and rho: ([m], [m])."""
    (mean, rho), (other, other_rho) = q, w
    std, other_std = nn.functional.softplus(rho), nn.functional.softplus(other_rho)
    apart = std.square() + (mean - other).square()
    return ((other_std / std).log() + apart / (2 * other_std.square()) - 0.5).sum()


def test_the_divergence_and_its_derivatives_by_hand():
    """N(0.1, 0.05^2) from N(0, 0.1^2), and the other way round; by standard deviations -15 and -2.5."""
    q, w = gaussian(0.1, 0.05), gaussian(0.0, 0.1)
    assert float(divergence(q, w)) == pytest.approx(0.8181472, abs=1e-7)
    assert float(divergence(w, q)) == pytest.approx(2.8068528, abs=1e-7)
    assert float(divergence(q, q)) == 0
    (mean, rho), (other, other_rho) = pulls(q, w)
    assert float(mean) == pytest.approx(10, abs=1e-9)
    assert float(rho / q[1].sigmoid()) == pytest.approx(-15, abs=1e-9)
    assert float(other) == pytest.approx(-10, abs=1e-9)
    assert float(other_rho / w[1].sigmoid()) == pytest.approx(-2.5, abs=1e-9)
    assert all(float(slope) == 0 for part in pulls(q, q) for slope in part)


def test_its_derivatives_are_those_that_autograd_finds():
    draw = torch.Generator().manual_seed(0)
    q, w = (tuple(torch.randn(2, 9, generator=draw, dtype=float64)) for _ in range(2))
    found = torch.func.grad(divergence, argnums=(0, 1))(q, w)
    for one, other in zip(pulls(q, w), found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def softplus(rho):
    return np.log1p(np.exp(rho))


def divergence_of(q, w):
    """Of [2, d] each: means and rho."""
    std, other = softplus(q[1]), softplus(w[1])
    return np.sum(np.log(other) - np.log(std) + (std**2 + (q[0] - w[0]) ** 2) / (2 * other**2) - 0.5)


def slopes_of(f, at, h=1e-30):
    """Derivatives of an analytic f at an array, by steps along the imaginary axis: exact to rounding."""
    result = np.zeros_like(at)
    for i in np.ndindex(*at.shape):
        step = at.astype(complex)
        step[i] += 1j * h
        result[i] = f(step).imag / h
    return result


class Adam:
    """Kingma and Ba (2015), Algorithm 1."""

    def __init__(self, lr):
        self.lr, self.t, self.m, self.v = lr, 0, 0.0, 0.0

    def __call__(self, at, slope):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * slope
        self.v = 0.999 * self.v + 0.001 * slope**2
        return at - self.lr * (self.m / (1 - 0.9**self.t)) / (np.sqrt(self.v / (1 - 0.999**self.t)) + 1e-8)


def naive(x, y, start, method, rounds, epochs, cohorts, off):
    """Linear regressions y = x v with a mean squared error, in batches of all of a client's examples.

    start: [2, d]; off(t, i, step, number): [d] is the standard normal sample of a step. Returns w and each q.
    """
    w, own = start.copy(), [start.copy() for _ in x]
    for t in range(rounds):
        copies = {}
        for i in cohorts[t]:
            n, q, common = len(x[i]), own[i], w.copy()
            adam, shared = Adam(method.lr), Adam(method.lr)
            for step in range(epochs):
                for number in range(method.steps):
                    eps = method.jitter * off(t, i, step, number)

                    def total(q, i=i, n=n, eps=eps, common=common):
                        loss = np.mean((x[i] @ (q[0] + eps * softplus(q[1])) - y[i]) ** 2)
                        return loss + method.zeta / n * divergence_of(q, common)

                    q = adam(q, slopes_of(total, q))
                common = shared(common, slopes_of(lambda c, q=q: divergence_of(q, c), common))
            own[i], copies[i] = q, common
        sizes = sum(len(x[i]) for i in copies)
        w = (1 - method.beta) * w + method.beta * sum(len(x[i]) / sizes * c for i, c in copies.items())
    return w, np.stack(own)


@pytest.mark.parametrize("share", [1.0, 0.67])
@pytest.mark.parametrize(
    "method",
    [
        PFedBayes(),
        PFedBayes(zeta=0.3, steps=2, sigma=0.3, lr=0.05, beta=0.5),
        PFedBayes(jitter=0.5),
    ],
    ids=str,
)
def test_rounds_are_those_of_the_equations(method, share, examples, noisy, executor):
    """With the library's own random numbers, whose counters are the batch and the step on it."""
    rounds, epochs = 3, 2
    x, y = noisy(3, 2, sizes=[7, 5, 9])
    module = nn.Linear(2, 1, bias=False).double()
    trial = examples(module, x, y, method, training=Training(epochs, 20, SGD(0.1)), executor=executor)
    names = tags([str(i) for i in range(3)])
    start = trial.roster.theta.view(2, 2).numpy()
    assert np.allclose(softplus(start[1]), method.sigma)

    def off(t, i, step, number):
        batch = fold(fold(key(0, "batches", t, 0), names[i]), ~step)
        return normal(fold(batch, -3 - number), torch.zeros(2, dtype=float64)).numpy()

    server = trial.run(rounds, participation=share)
    cohorts = [sample(replace(trial.roster, round=t), share).tolist() for t in range(rounds)]
    w, own = naive([v.numpy() for v in x], [v[:, 0].numpy() for v in y], start, method, rounds, epochs, cohorts, off)
    np.testing.assert_allclose(server.theta.view(2, 2).numpy(), w, rtol=0, atol=1e-11)
    np.testing.assert_allclose(trial.own.view(3, 2, 2).numpy(), own, rtol=0, atol=1e-11)


def test_the_server_averages_means_and_rho_by_examples(roster):
    known = roster(3, sizes=[2, 3, 5], size=4)
    theta = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=float64)
    for beta in (1.0, 0.25):
        method = PFedBayes(beta=beta)
        server = method.start(known)
        cohort = torch.tensor([0, 2])
        uploads = reduce_uploads(method, known, cohort, AveragedParams(theta[cohort]))
        after = method.aggregate(known, server, cohort, uploads).theta
        wanted = (1 - beta) * known.theta.numpy() + beta * (2 / 7 * theta[0].numpy() + 5 / 7 * theta[2].numpy())
        np.testing.assert_allclose(after.numpy(), wanted, rtol=0, atol=1e-14)


def test_without_the_divergence_clients_know_nothing_of_each_other(examples, noisy, perceptron):
    """The own models are those that each client would have if it were alone."""
    x, y = noisy(3, 2)
    training = Training(2, 3, SGD(0.1))

    def own(kept):
        trial = examples(
            perceptron(), [x[i] for i in kept], [y[i] for i in kept], PFedBayes(zeta=0.0), training=training
        )
        trial.run(3)
        return trial.own

    torch.testing.assert_close(own([0, 1, 2])[:1], own([0]), rtol=0, atol=0)


def test_without_samples_and_divergence_it_is_adam_on_each_batch(bowls):
    trial = bowls(PFedBayes(jitter=0.0, zeta=0.0, steps=3, lr=0.1), [3.0, 1.0], h=2.0, epochs=2)
    trial.run(1)
    for found, goal in zip(trial.own, (3.0, 1.0), strict=True):
        theta = torch.zeros(1, dtype=float64, requires_grad=True)
        adam = torch.optim.Adam([theta], 0.1)
        for _ in range(6):
            adam.zero_grad()
            (theta - goal).square().sum().backward()
            adam.step()
        assert float(found[0]) == pytest.approx(float(theta.detach()), abs=1e-12)


def test_every_trained_tensor_has_a_spread_and_what_is_frozen_has_none():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.GroupNorm(1, 2 * 36), nn.Linear(72, 3), nn.Linear(3, 3))
    module[3].bias.requires_grad_(False)
    model = model_for(PFedBayes(sigma=0.2), module)
    tensors = model.layout.tensors(model.theta)
    spread = {name.removesuffix(RHO): t for name, t in tensors.items() if name.endswith(RHO)}
    assert spread.keys() == {name for name, p in module.named_parameters() if p.requires_grad}
    for name, rho in spread.items():
        assert rho.shape == tensors[name].shape
        torch.testing.assert_close(nn.functional.softplus(rho), torch.full_like(rho, 0.2))
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(model(model.theta, x), module(x))  # its means answer


@pytest.mark.parametrize("method", [FedAvg, Local, PFedBayes])
def test_a_model_with_lazy_layers_is_refused_by_name(method, examples, noisy):
    x, y = noisy(1, 2)
    with pytest.raises(UsageError, match="the model has lazy layers"):
        examples(nn.Sequential(nn.LazyLinear(1)), x, y, method(), training=Training())
