import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kinfed.core.engine import sample
from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.methods import DPFL, Local
from kinfed.methods.fedfomo import Sent, State

float64 = torch.float64


def answered(trial, own, models, there):
    """What a client at `own` uploads when it is sent models: [M]."""
    one = torch.full((1, 1), own, dtype=float64)
    trial.fleet.state = State(one, one)
    sent = Sent(torch.tensor(models, dtype=float64)[None, :, None], torch.tensor([there]))
    return trial.fleet.train(0, torch.tensor([0]), sent)[1]


def test_a_row_is_grown_by_hand(bowls, executor):
    """The optimum is 3 and the own model 0. First 8: mean 4. Then 1, at distance 0; not 3.5, which would be 3.83."""
    trial = bowls(DPFL(models=4, budget=3, feedback="train"), [3.0], executor=executor)
    uploads = answered(trial, 0.0, [1.0, 8.0, 3.5, 6.0], [True, True, True, False])
    third = 1 / 3
    torch.testing.assert_close(uploads.weight[0], torch.tensor([third, third, 0, 0], dtype=float64))
    assert uploads.theta.item() == pytest.approx(3.0)


def test_the_budget_ends_it_and_so_does_no_gain(bowls):
    one = bowls(DPFL(models=3, budget=1, feedback="train"), [3.0])
    assert answered(one, 0.0, [1.0, 8.0, 3.5], [True] * 3).weight[0].tolist() == [0.0, 0.5, 0.0]
    alone = bowls(DPFL(models=3, feedback="train"), [3.0])
    assert answered(alone, 3.0, [1.0, 8.0, 3.0], [True] * 3).weight[0].tolist() == [0.0] * 3  # an equal one is no gain
    assert answered(alone, 0.0, [1.0, 8.0, 3.5], [False] * 3).weight[0].tolist() == [0.0] * 3


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.67])
def test_rounds_are_those_of_the_equations(norm, share, examples, noisy, perceptron, executor):
    """Sets grown in NumPy, with the model's own loss; every client is sent all others."""
    x, y = noisy(4, 2, sizes=[7, 5, 9, 8])
    y = [v + 3 * (-1) ** i * u[:, :1] for i, (u, v) in enumerate(zip(x, y, strict=True))]
    method, training = DPFL(models=3, budget=2, explore=0.0, feedback="train"), Training(2, 20, SGD(0.05))
    trial = examples(perceptron(norm), x, y, method, training=training, executor=executor)
    server = trial.run(4, participation=share)
    own, seen, relation = [trial.roster.theta.numpy() for _ in x], set(), np.eye(4)
    taken = 0

    def loss(i, theta):
        return float((trial.fleet.model(torch.from_numpy(theta), x[i]) - y[i]).square().mean())

    for t in range(4):
        cohort, begin = sample(replace(trial.roster, round=t), share).tolist(), {}
        for i in cohort:
            chosen, best = [i], loss(i, own[i])
            while len(chosen) <= method.budget:
                tried = {j: loss(i, sum(own[k] for k in [*chosen, j]) / (len(chosen) + 1)) for j in seen - set(chosen)}
                j = min(tried, key=tried.get, default=None)
                if j is None or tried[j] >= best:
                    break
                chosen, best, taken = [*chosen, j], tried[j], taken + 1
            relation[i] = [(j in chosen) / len(chosen) for j in range(4)]
            begin[i] = sum(own[k] for k in chosen) / len(chosen)
        for i, start in begin.items():
            alone = examples(perceptron(norm), [x[i]], [y[i]], Local(), training=training)
            alone.fleet.state = alone.fleet.state._replace(theta=torch.from_numpy(start)[None])
            alone.fleet.train(t, torch.tensor([0]), ())
            own[i] = alone.fleet.state.theta[0].numpy()
        seen |= set(cohort)
    assert taken > 2
    np.testing.assert_allclose(server.theta, np.stack(own), rtol=0, atol=1e-9)
    found = trial.method.relation(trial.roster, server, None)
    np.testing.assert_allclose(found, relation, rtol=0, atol=1e-12)
    assert math.isclose(float(found.sum()), 4)
