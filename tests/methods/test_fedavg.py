from dataclasses import replace

import pytest
import torch
from torch import nn

from kinfed.core.method import AveragedParams
from kinfed.core.mixins import reduce_uploads
from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import FedAvg, FedAvgFT, FedProx

float64 = torch.float64


def test_weights_by_training_examples(bowls, executor):
    # One step of rate 1 on curvature 1 lands on each client's optimum: (100 (1, 2) + 300 (5, 6)) / 400 = (4, 5).
    trial = bowls(FedAvg(), [[1.0, 2.0], [5.0, 6.0]], lr=1.0, copies=[50, 150], executor=executor)
    server = trial.run(1)
    assert trial.roster.sizes.tolist() == [100, 300]
    torch.testing.assert_close(server.theta, torch.tensor([4.0, 5.0], dtype=float64), rtol=0, atol=1e-13)


def test_weights_are_shares_of_the_cohort(bowls):
    trial = bowls(FedAvg(), [1.0, 5.0, 100.0], lr=1.0, copies=[1, 3, 6])
    cohort = torch.tensor([0, 1])
    server = trial.method.start(trial.roster)
    _, uploads = trial.fleet.train(0, cohort, trial.method.send(trial.roster, server, cohort))
    uploads = reduce_uploads(trial.method, trial.roster, cohort, uploads)
    server = trial.method.aggregate(trial.roster, server, cohort, uploads)
    assert float(server.theta) == pytest.approx(4.0, abs=1e-13)
    relation = trial.method.relation(trial.roster, server, cohort)
    torch.testing.assert_close(relation, torch.tensor([0.25, 0.75, 0.0], dtype=float64))


def test_everyone_counts_the_same_if_asked(bowls, executor):
    trial = bowls(FedAvg(uniform=True), [[1.0, 2.0], [5.0, 6.0]], lr=1.0, copies=[50, 150], executor=executor)
    server = trial.run(1)
    torch.testing.assert_close(server.theta, torch.tensor([3.0, 4.0], dtype=float64), rtol=0, atol=1e-13)
    assert torch.equal(trial.history.relations[0], torch.full((2, 2), 0.5))


@pytest.mark.parametrize("method", [FedAvg(noise=0.01), FedProx(noise=0.01, mu=0.1)])
def test_noise_on_what_is_learned(examples, noisy, method, executor):
    x, y = noisy(3, 40)
    module = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 1)).double()
    training, found = Training(1, 4, SGD(0.01)), []
    for noise in (0.01, 0.01, 0.0):
        trial = examples(module, x, y, replace(method, noise=noise), training=training, executor=executor)
        server = trial.run(1)
        found.append((server.theta, trial.run(2, begin=1, server=server).theta))
    learned = trial.roster.layout.trainable
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    added = found[0][0] - found[2][0]
    assert torch.equal(added[~learned], torch.zeros(100, dtype=float64))
    assert float(added[learned].std()) == pytest.approx(0.01, rel=0.08)  # 2,201 numbers: deviation 1.5 %
    assert abs(float(added.mean())) < 1e-3
    again = method.aggregate(replace(trial.roster, round=1), (), torch.arange(3), AveragedParams(found[2][0]))
    assert (again.theta - found[2][0] - added).abs().max() > 0.01  # every round's is another


@pytest.mark.parametrize("method", [FedAvg(), FedProx(mu=0.1), FedAvgFT(epochs=0)])
def test_running_statistics_stay_at_their_client_if_asked(examples, noisy, perceptron, method, executor):
    x, y = noisy(3, 2)
    training = Training(1, 4, SGD(0.1))
    both = []
    for bn in ("averaged", "local"):
        trial = examples(perceptron(norm=True), x, y, replace(method, bn=bn), training=training, executor=executor)
        both.append((trial, trial.run(2)))
    (common, mean), (trial, server) = both
    learned = trial.roster.layout.trainable
    # Training normalises by the batch, so what is learned is the same.
    torch.testing.assert_close(server.theta, mean.theta[learned], rtol=0, atol=1e-13)
    torch.testing.assert_close(trial.headline[:, learned], server.theta.expand(3, -1), rtol=0, atol=0)
    own = trial.headline[:, ~learned]
    assert torch.equal(own, trial.fleet.state.personal)
    assert (own[0] != own[1]).all()
    assert torch.equal(common.headline[0], common.headline[1])
    assert trial.history.cost.bytes_up == 2 * 3 * int(learned.sum()) * 8
    plain = examples(perceptron(), x, y, replace(method, bn="local"), training=training, executor=executor)
    plain.run(1)
    assert torch.equal(plain.headline[0], plain.headline[1])
    with pytest.raises(UsageError, match="bn must be one of 'averaged', 'local', 'personal'; got 'mine'"):
        replace(method, bn="mine")


def test_one_client_is_central_training(examples, noisy, perceptron):
    x, y = noisy(1, 2)
    trial = examples(perceptron(), x, y, FedAvg(), training=Training(3, 100, SGD(0.1, momentum=0.9)))
    server = trial.run(2)
    module = perceptron()
    for _ in range(2):  # momentum starts anew each round
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimiser.zero_grad()
            nn.functional.mse_loss(module(x[0]), y[0]).backward()
            optimiser.step()
    found = trial.fleet.model.layout.tensors(server.theta)
    for name, expected in module.named_parameters():
        torch.testing.assert_close(found[name], expected.detach(), rtol=0, atol=1e-13)


def test_five_local_steps_bias_the_limit(bowls, executor):
    # x = (0.9^5 x + 0.8^5 x + 4 (1 - 0.8^5)) / 2 has the solution 2.4858619, not the optimum 8/3.
    trial = bowls(FedAvg(), [0.0, 4.0], h=[1.0, 2.0], start=1.0, epochs=5, executor=executor, every=40)
    assert float(trial.run(40).theta) == pytest.approx(2.4858619, abs=5e-8)
