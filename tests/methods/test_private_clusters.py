"""Private clusters: sums over clients as in IFCA, and answers that are made at home."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score
from torch import nn
from torch.nn.functional import cross_entropy

import kinfed
from kinfed import SGD, Training, UsageError
from kinfed.core import trees
from kinfed.core.tasks import Classification
from kinfed.core.trees import Axis
from kinfed.methods import IFCA, PrivateClusters, ifca
from kinfed.methods.private_clusters import sum_losses

float64 = torch.float64


def line():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Linear(2, 3).double()


def rows(count, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, generator=draw, dtype=float64), torch.randint(3, (count,), generator=draw)


def test_models_begin_near_the_first_and_no_two_alike(roster, perceptron):
    known = roster(3, perceptron(norm=True))
    method = PrivateClusters(clusters=200)
    models = method.start(known).theta
    assert torch.equal(models, method.start(known).theta)
    assert not torch.equal(models, method.start(replace(known, seed=known.seed + 1)).theta)
    for entry in known.layout.entries:
        away = models[:, entry.at] - known.theta[entry.at]
        if not entry.trainable:
            assert torch.equal(away, torch.zeros_like(away))
            continue
        deviation = known.theta[entry.at].std(correction=0)
        wanted = 0.1 * (deviation if deviation > 0 else 1.0)
        assert float(away.std() / wanted) == pytest.approx(1, abs=0.1)


def test_a_run_is_that_of_a_plain_program(examples, executor):
    """Whole-batch steps in NumPy: the cluster's model, one tuned for two steps, and one of the client's alone."""
    x, y = map(list, zip(*(rows(count, seed) for seed, count in enumerate((5, 4, 6))), strict=True))
    training, rate = Training(1, 8, SGD(0.5)), 0.5
    trial = examples(
        line(),
        x,
        y,
        PrivateClusters(clusters=2, length=2),
        training=training,
        task=Classification(3),
        executor=executor,
    )
    models = trial.method.start(trial.roster).theta.numpy().copy()
    first = trial.roster.theta.numpy()

    def chances(theta, x):
        scores = x @ theta[:6].reshape(3, 2).T + theta[6:]
        odds = np.exp(scores - scores.max(1, keepdims=True))
        return odds / odds.sum(1, keepdims=True)

    def losses(theta, i):
        return -np.log(chances(theta, x[i].numpy())[np.arange(len(y[i])), y[i]])

    def step(theta, i):
        away = (chances(theta, x[i].numpy()) - np.eye(3)[y[i]]) / len(y[i])
        return theta - rate * np.concatenate([(away.T @ x[i].numpy()).ravel(), away.sum(0)])

    def choose(i):
        return int(np.argmin([losses(theta, i).mean() for theta in models]))

    alone = [first] * 3
    for _ in range(4):
        label = [choose(i) for i in range(3)]
        ends = [step(models[c], i) for i, c in enumerate(label)]
        alone = [step(theta, i) for i, theta in enumerate(alone)]
        for c in set(label):
            models[c] = np.mean([end for end, at in zip(ends, label, strict=True) if at == c], axis=0)
    server = trial.run(4)
    np.testing.assert_allclose(server.theta, models, rtol=0, atol=1e-12)
    np.testing.assert_allclose(trial.fleet.state.theta, alone, rtol=0, atol=1e-12)
    assert trial.fleet.state.share.argmax(1).tolist() == label
    made = trial.fleet.evaluate(4, trial.roster.everyone, trial.method.send(trial.roster, server, None))
    mixture = made.models["mixture"]
    for i in range(3):
        theta = models[choose(i)]
        wanted = [theta, step(step(theta, i), i), alone[i]]
        np.testing.assert_allclose(mixture.theta[i], wanted[0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(mixture.others[i], wanted[1:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("validation", "training", "wanted"),
    [
        ([2.0, 1.0, 1.0], 9.0, np.exp([-1.0, -0.5, -0.5])),
        ([2.0, 1.0, 1.0], 13.0, np.exp([-2.0, -1.5, -0.5])),  # 2 above that of the same chances, 11
        ([0.0, 0.0, 0.0], 9.0, np.ones(3)),  # no validation examples
        ([np.nan, 1.0, 1.0], 9.0, np.exp([-np.inf, -0.5, -0.5])),
    ],
)
def test_the_weights_of_the_three_models_by_hand(validation, training, wanted, examples, monkeypatch):
    """Half of the sums of losses, to which that by which a cluster's model is worse than a guess is added."""
    module = __import__("kinfed.methods.private_clusters", fromlist=["sum_losses"])
    x, y = rows(4, 0)
    trial = examples(line(), [x], [y], PrivateClusters(length=1), training=Training(1, 8), task=Classification(3))
    server = trial.method.start(trial.roster)

    def told(client, models, examples):
        of = [training] if len(models) == 1 else validation
        return torch.tensor(of, dtype=float64), torch.tensor(11.0, dtype=float64)

    monkeypatch.setattr(module, "sum_losses", told)
    made = trial.fleet.evaluate(0, trial.roster.everyone, trial.method.send(trial.roster, server, None))
    np.testing.assert_allclose(made.models["mixture"].share[0], wanted / wanted.sum(), atol=1e-12)


def test_losses_are_sums_over_real_rows(examples):
    x, y = rows(4, 0)
    trial = examples(line(), [x], [y], PrivateClusters(), training=Training(1, 8), task=Classification(3))
    client = trial.fleet.clients.get_client(
        0, 0, trial.fleet.model, trial.fleet.training, trial.fleet._run.trainers, None
    )
    theta = trial.roster.theta
    padded = client.data._replace(weight=torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=float64))
    losses, guess = sum_losses(client, [theta, theta + 1], padded)
    model = line()
    assert float(losses[0]) == pytest.approx(float(cross_entropy(model(x[:2]), y[:2], reduction="sum")))
    assert float(guess) == pytest.approx(2 * np.log(3))


@pytest.mark.parametrize("method", [IFCA(clusters=3), PrivateClusters(clusters=3)], ids=str)
def test_noise_moves_no_cluster_by_more_than_that_of_a_fifth_of_its_share(method, roster):
    """Of 12 members three clusters have 4 on average, so the sums of few are divided by 0.8 at least."""
    known = roster(12)
    server = method.start(known)
    uploads = ifca.Upload(torch.ones_like(server.theta), torch.tensor([12.5, 0.1, -0.6], dtype=float64))
    noised = replace(known, training=replace(known.training, privacy=kinfed.Privacy(8.0, unit="client")))
    moved = method.aggregate(noised, server, known.everyone, uploads).theta - server.theta
    torch.testing.assert_close(moved[:, 0], 1 / torch.tensor([12.5, 0.8, 0.8], dtype=float64))


def test_the_server_holds_nothing_of_single_clients(examples):
    x, y = map(list, zip(*(rows(5, seed) for seed in range(3)), strict=True))
    trial = examples(line(), x, y, PrivateClusters(), training=Training(1, 8), task=Classification(3))
    server = trial.run(2)
    assert {*trees.pack(trees.axes(server)).values()} == {Axis.SHARED}
    sent = trial.method.send(trial.roster, server, trial.roster.everyone)
    assert {*trees.pack(trees.axes(sent)).values()} == {Axis.SHARED}
    assert trial.method.relation(trial.roster, server, trial.roster.everyone) is None


def test_numbers_are_refused_in_a_line(bowls):
    with pytest.raises(UsageError, match="private-clusters mixes probabilities of classes"):
        bowls(PrivateClusters(), [1.0, 2.0]).run(1)


def digits():
    """Sixty clients of 29 digits, of whom every second names them the other way round."""
    data = load_digits()
    client = np.arange(len(data.target)) % 60
    y = np.where(client % 2, 9 - data.target, data.target)
    x = torch.from_numpy((data.data / 16).astype(np.float32))
    return kinfed.Federation.from_arrays(x, torch.from_numpy(y.astype(np.int64)), torch.from_numpy(client))


def learn(method, epsilon, rounds=10):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    privacy = None if epsilon is None else kinfed.Privacy(epsilon=epsilon, unit="client")
    training = Training(epochs=2, batch=8, optimiser=SGD(0.2), privacy=privacy)
    last = kinfed.Rounds(rounds, evaluate_every=rounds)
    run = kinfed.fit(method, digits(), net, rounds=last, training=training)
    return run, float(run.history.scores[-1][run.history.headline, "test", "accuracy"].mean())


def test_clients_who_name_digits_differently_part_on_real_data():
    run, score = learn(PrivateClusters(clusters=2), None)
    groups = [int(name) % 2 for name in run.history.names]
    assert adjusted_rand_score(groups, run.final.progress.state[1].share[:].argmax(1)) == 1
    assert score > max(learn(kinfed.FedAvg(), None)[1], learn(kinfed.Local(), None)[1]) + 0.1
    relation = run.history.relations[-1]
    same = torch.tensor(groups)[:, None] == torch.tensor(groups)
    torch.testing.assert_close(relation, same / same.sum(1, keepdim=True), atol=1e-6, rtol=0)


def test_where_all_that_is_shared_is_noise_a_client_leans_on_itself():
    pytest.importorskip("dp_accounting")
    run, score = learn(PrivateClusters(clusters=2), 0.5)
    assert float(run.history.models["share"][:, 2].mean()) > 0.9
    assert score > learn(kinfed.Local(), None)[1] - 0.03
