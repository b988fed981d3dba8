"""Private kin: EM of a mixture of mixed models by bounded steps, against a twin in NumPy, and hidden groups."""

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from kinfed import Federation, Privacy, Split, Training, UsageError, fit
from kinfed.methods.solved.laplace import Rows
from kinfed.methods.solved.mixed_model import Products
from kinfed.methods.solved.private_kin import PrivateKin
from kinfed.methods.solved.private_pooling import PrivatePooling, place_client
from kinfed.models.linear import linear


def drawn(clients, rows, groups, seed=0):
    """A federation whose clients' coefficients are near those of their group; all rows train."""
    draw = np.random.default_rng(seed)
    group = np.arange(clients) % groups
    own = np.eye(3)[group] + 0.1 * draw.normal(size=(clients, 3))
    x = draw.normal(size=(clients, rows, 3))
    y = np.einsum("nrf,nf->nr", x, own) + 0.4 * draw.normal(size=(clients, rows))
    y /= y.std()
    who = np.repeat([f"c{i:03}" for i in range(clients)], rows)
    federation = Federation.from_arrays(x.reshape(-1, 3), y.ravel(), who, split=Split(validation=0))
    federation.rows["train"] = [torch.arange(rows) + rows * i for i in range(clients)]
    return federation, group


def solve(data, method, rounds=8, seed=0, epsilon=None):
    privacy = None if epsilon is None else Privacy(epsilon=epsilon, unit="client")
    module = linear((3,), 1).double()
    return fit(method, data, module, rounds=rounds, training=Training(privacy=privacy), seed=seed)


def find_members(data, run):
    """[N] the centre to which each client belongs, by its own rows."""
    server, members = run.final.progress.server, []
    for at in data.rows["train"]:
        table = torch.cat([data.x[at], torch.ones(len(at), 1), data.y[at][:, None]], 1).double()
        moments = Products(table.T @ table, torch.tensor(float(len(at))).double())
        density = place_client(moments, server.centres, server.spread, server.noise).density
        members.append(int((server.shares.log() + density).argmax()))
    return members


def test_a_round_is_that_of_em_in_numpy():
    """The means over clients of their expectations, about every centre, once likelihoods count in full."""
    data, _ = drawn(7, 9, 2)
    method = PrivateKin(centres=3)
    before, after = (solve(data, method, rounds=rounds).final.progress.server for rounds in (1, 2))
    begin = solve_by_hand(data, before, sharpness=1.0)
    for mine, theirs in zip(begin, (after.centres, after.shares, after.spread, after.noise), strict=True):
        np.testing.assert_allclose(theirs.numpy(), mine, rtol=1e-8)


def solve_by_hand(data, server, sharpness):
    """Centres, shares, variances and noise after a round that starts with those of the server."""
    count, f = server.centres.shape
    centres, shares, spread, noise = (t.numpy() for t in (server.centres, server.shares, server.spread, server.noise))
    numbers, members, wider, errors = np.zeros((count, f)), np.zeros(count), np.zeros(f), []
    for at in data.rows["train"]:
        x = np.column_stack([data.x[at].numpy(), np.ones(len(at))])
        y = data.y[at].numpy()
        away, density, squares = np.zeros((count, f)), np.zeros(count), np.zeros(count)
        covariance = np.linalg.inv(x.T @ x / noise + np.diag(1 / spread))
        for k, centre in enumerate(centres):
            rest = y - x @ centre
            marginal = x @ np.diag(spread) @ x.T + noise * np.eye(len(y))
            density[k] = -(np.linalg.slogdet(marginal)[1] + rest @ np.linalg.solve(marginal, rest)) / 2
            away[k] = np.diag(spread) @ x.T @ np.linalg.solve(marginal, rest)
            squares[k] = np.square(rest - x @ away[k]).sum() + np.trace(x.T @ x @ covariance)
        likely = shares * np.exp(sharpness * (density - density.max()))
        belongs = likely / likely.sum()
        numbers += belongs[:, None] * away
        members += belongs
        wider += belongs @ (np.square(away) + np.diag(covariance))
        errors.append(belongs @ np.clip(squares / len(y) / noise, 0, 4))
    n = len(data.rows["train"])
    least = np.maximum(members / n, 0.2 / count)
    moved = numbers / n / least[:, None]
    grown = np.clip((wider / n - least @ np.square(moved)) / spread, 0.05, 8)
    return centres + moved, least / least.sum(), spread * grown, noise * np.clip(np.mean(errors), 0.2, 4)


def test_hidden_groups_come_to_light_under_an_epsilon_for_clients():
    data, group = drawn(150, 20, 3)
    runs = [solve(data, PrivateKin(), seed=i, epsilon=8.0) for i in range(3)]
    indices = [adjusted_rand_score(group, find_members(data, run)) for run in runs]
    assert np.mean(indices) > 0.9
    assert max(runs[0].privacy["spent"]) == pytest.approx(8.0, rel=0.01)
    assert runs[0].relation is None


def test_variances_about_centres_are_those_within_groups():
    data, _ = drawn(90, 12, 3, seed=2)
    kin, pooled = (solve(data, method).final.progress.server for method in (PrivateKin(centres=4), PrivatePooling()))
    assert kin.spread[:-1].max() < pooled.spread[:-1].min() / 3


def test_one_centre_is_private_pooling():
    with pytest.raises(UsageError, match="centres must be 2 or more; got 1; one is private-pooling"):
        PrivateKin(centres=1)


@pytest.mark.parametrize("epsilon", [None, 8.0])
def test_hidden_groups_of_labels_come_to_light(epsilon):
    draw, clients, rows = np.random.default_rng(1), 150, 40
    group = np.arange(clients) % 3
    own = 2.5 * np.eye(3)[group] + 0.1 * draw.normal(size=(clients, 3))
    x = draw.normal(size=(clients, rows, 3))
    y = draw.random((clients, rows)) < 1 / (1 + np.exp(-np.einsum("nrf,nf->nr", x, own)))
    who = np.repeat([f"c{i:03}" for i in range(clients)], rows)
    data = Federation.from_arrays(x.reshape(-1, 3), y.ravel().astype(int), who, split=Split(validation=0))
    data.rows["train"] = [torch.arange(rows) + rows * i for i in range(clients)]
    privacy = None if epsilon is None else Privacy(epsilon=epsilon, unit="client")
    indices = []
    for seed in range(2):
        module = linear((3,), 2).double()
        run = fit(PrivateKin(), data, module, rounds=10, training=Training(privacy=privacy), seed=seed)
        server, members = run.final.progress.server, []
        for at in data.rows["train"]:
            table = torch.cat([data.x[at], torch.ones(rows, 1)], 1).double()
            mine = Rows(table, data.y[at].double(), torch.ones(rows).double(), 0.0)
            density = place_client(mine, server.centres, server.spread, server.noise).density
            members.append(int((server.shares.log() + density).argmax()))
        indices.append(adjusted_rand_score(group, members))
    assert max(indices) > 0.8
