import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from small import lists
from torch import nn
from torch.nn.functional import cross_entropy

import kinfed
from kinfed import SGD, Training
from kinfed.core.engine import sample
from kinfed.core.tasks import Classification, Regression
from kinfed.methods import FedPAC
from kinfed.methods.parts.classes import moments
from kinfed.ops.quadratic import smallest_mixture

float64 = torch.float64
MOMENTS = torch.tensor([[[1, 0], [0, 1]], [[0.8, 0], [0, 0.6]], [[0, 0], [0, 2]]], dtype=float64)
VARIANCES = torch.tensor([0.1, 0.2, 0.4], dtype=float64)


def close(found, expected, atol=1e-6):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=atol)


def test_combined_heads_by_hand():
    alpha = FedPAC().combine(MOMENTS, VARIANCES)
    close(alpha[0], [0.741935, 0.209677, 0.048387])
    alike = FedPAC().combine(MOMENTS[:1].expand(3, -1, -1), VARIANCES)
    close(alike, [[0.571429, 0.285714, 0.142857]] * 3)  # in inverse proportion to the variances
    close(FedPAC(least=0.05).combine(MOMENTS, VARIANCES)[0], [0.741935 / 0.951612, 0.209677 / 0.951612, 0.0])


def test_twins_combine_alike_and_who_is_far_from_all_keeps_its_head():
    twins = MOMENTS[[0, 0, 2]], VARIANCES[[0, 0, 2]]
    alpha = FedPAC().combine(*twins)
    close(alpha[0], alpha[1])
    far = MOMENTS.clone()
    far[2] += 1e4
    close(FedPAC().combine(far, VARIANCES)[2], [0.0, 0.0, 1.0])


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_mixture_is_that_of_every_set_of_clients(seed):
    """Against the equations of each set whose weights may be positive."""
    draw = torch.Generator().manual_seed(seed)
    root = torch.randn(4, 3, generator=draw, dtype=float64)
    form = root @ root.T + torch.diag(torch.rand(4, generator=draw, dtype=float64) / 10)
    best, least = None, np.inf
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(4), k) for k in range(1, 5)):
        part = form.numpy()[np.ix_(chosen, chosen)]
        x = np.linalg.solve(part, np.ones(len(chosen)))
        x = x / x.sum()
        if (x >= 0).all() and x @ part @ x < least:
            best, least = np.zeros(4), x @ part @ x
            best[list(chosen)] = x
    found = smallest_mixture(form)
    close(found, best)
    close(smallest_mixture(1e-12 * form), found)
    close(smallest_mixture(0 * form), [0.25] * 4)


def test_more_clients_than_moments_are_combined():
    """The form is then singular but for variances, beside which the rounding of inner products in float32 is large."""
    draw = torch.Generator().manual_seed(2)
    moment, variance = 10 + torch.randn(30, 2, 8, generator=draw), 1e-6 * torch.rand(30, generator=draw)
    variance[0] = -1e-9  # of a client whose examples have equal features, by rounding
    alpha = FedPAC().combine(moment, variance)
    assert alpha.dtype == torch.float32
    assert (alpha >= 0).all()
    close(alpha.sum(1), [1.0] * 30)


def test_moments_by_hand():
    # Class 0: (1, 0) and (3, 0); class 1: (0, 2); class 2 has none; the last row only fills up.
    z = torch.tensor([[1.0, 0], [3, 0], [0, 2], [9, 9]], dtype=float64)
    chosen = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=float64)
    found = moments(chosen, z)
    close(found.sizes, [2.0, 1, 0])
    close(found.mean, [[2.0, 0], [0, 2], [0, 0]])
    close(found.moment, [[4 / 3, 0], [0, 2 / 3], [0, 0]])
    # (2/3 * 5 + 1/3 * 4 - 16/9 - 4/9) / 3
    close(found.variance, (14 / 3 - 20 / 9) / 3)


SIZES = (5, 8, 12)


DATA = lists(SIZES)  # x: [n_i, 3] and y: [n_i] of three clients


def net(norm=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        middle = [nn.BatchNorm1d(4)] if norm else []
        return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 3)).double()


def naive(method, cohorts):
    """Rounds by plain modules and autograd; batches are whole, and 2 epochs train the base."""
    shared = net()
    heads, centroid, own = [None] * 3, {}, {}
    for t, cohort in enumerate(cohorts):
        sent = {}
        for i in cohort:
            x, y = DATA[0][i], DATA[1][i]
            mine = net()
            mine.load_state_dict(shared.state_dict())
            if heads[i] is not None:
                mine[-1].load_state_dict(heads[i])
            z = mine[:-1](x).detach()
            has = sorted(set(y.tolist()))
            mean = {c: z[y == c].mean(0) for c in has}
            share = {c: float((y == c).double().mean()) for c in has}
            h = torch.stack([share[c] * mean[c] if c in has else torch.zeros(4, dtype=float64) for c in range(3)])
            v = sum(share[c] * z[y == c].square().sum(1).mean() - (share[c] * mean[c]).square().sum() for c in has)
            v = float(v) / len(y)
            goal = torch.stack([centroid.get(int(c), mean[int(c)]) for c in y])
            for part, epochs in ((mine[-1], method.head_epochs), (mine[:-1], 2)):
                for _ in range(epochs):
                    z = mine[:-1](x)
                    loss = cross_entropy(mine[-1](z), y)
                    if part is not mine[-1] and t:
                        loss = loss + method.pull * (z - goal).square().mean()
                    grads = torch.autograd.grad(loss, list(part.parameters()))
                    rate = method.head_lr if part is mine[-1] and method.head_lr else 0.1
                    with torch.no_grad():
                        for p, g in zip(part.parameters(), grads, strict=True):
                            p -= rate * g
            z = mine[:-1](x).detach()
            own[i] = mine
            sent[i] = h, v, {c: (int((y == c).sum()), z[y == c].mean(0)) for c in has}
        total = sum(SIZES[i] for i in cohort)
        state = {k: sum(SIZES[i] / total * own[i].state_dict()[k] for i in cohort) for k in shared.state_dict()}
        for i in cohort:
            away = [sent[i][0] - sent[j][0] for j in cohort]
            gram = torch.tensor([[float((a * b).sum()) for a in away] for b in away], dtype=float64)
            alpha = smallest_mixture(gram + torch.diag(torch.tensor([sent[j][1] for j in cohort], dtype=float64)))
            alpha = torch.where(alpha < 0.001, 0.0, alpha)
            alpha = alpha / alpha.sum()
            theirs = [own[j][-1].state_dict() for j in cohort]
            heads[i] = {k: sum(a * h[k] for a, h in zip(alpha, theirs, strict=True)) for k in ("weight", "bias")}
        for c in range(3):
            seen = [sent[i][2][c] for i in cohort if c in sent[i][2]]
            if seen:
                centroid[c] = sum(n * m for n, m in seen) / sum(n for n, _ in seen)
        shared.load_state_dict(state)
    return shared, heads


@pytest.mark.parametrize("share", [1.0, 0.67])
@pytest.mark.parametrize("method", [FedPAC(), FedPAC(pull=5.0, head_epochs=1, head_lr=0.3)], ids=str)
def test_rounds_are_those_of_the_equations(method, share, examples, executor):
    x, y = DATA
    training = Training(2, 20, SGD(0.1))
    trial = examples(net(), x, y, method, training=training, executor=executor, task=Classification(3))
    server = trial.run(4, participation=share)
    cohorts = [sample(replace(trial.roster, round=t), share).tolist() for t in range(4)]
    shared, heads = naive(method, cohorts)
    flat = torch.cat([p.detach().flatten() for p in shared.parameters()])
    close(server.theta, flat, atol=1e-9)
    for i, head in enumerate(heads):
        mine = flat[16:] if head is None else torch.cat([head["weight"].flatten(), head["bias"]])
        close(trial.headline[i], torch.cat([flat[:16], mine]), atol=1e-9)
    assert len({tuple(c) for c in cohorts}) == (1 if share == 1 else 2)


@pytest.mark.parametrize("norm", [False, True])
def test_heads_only_train_in_their_phase_and_relations_are_layers_rows(norm, examples):
    x, y = DATA
    trial = examples(net(norm), x, y, FedPAC(), training=Training(1, 4, SGD(0.1)), task=Classification(3))
    server = trial.run(3, participation=0.67)
    relation = trial.method.relation(trial.roster, server, torch.tensor([0, 1]))
    assert len(relation) == 2 + norm
    close(relation[0, 2], [5 / 13, 8 / 13, 0.0])
    close(relation[-1].sum(1), [1.0] * 3)


@pytest.mark.parametrize(
    ("module", "task", "settings", "said"),
    [
        (
            nn.Linear(3, 3).double(),
            Classification(3),
            {},
            "so it needs a linear head after other layers",
        ),
        (net(), Classification(3), {"frozen": ("2.*",)}, "neither of them personal or frozen"),
        (
            nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double(),
            Regression(),
            {},
            "fedpac compares classes",
        ),
    ],
)
def test_refuses(module, task, settings, said, examples):
    x, y = DATA
    y = y if task != Regression() else [v[:, None].double() for v in y]
    with pytest.raises(kinfed.UsageError, match=said):
        examples(module, x, y, FedPAC(**settings), training=Training(1, 4, SGD(0.1)), task=task).run(1)
