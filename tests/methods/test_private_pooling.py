"""Private pooling: EM of a mixed model by bounded steps, and what noise does to it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax
from scipy.stats import cauchy, multivariate_normal
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import mean_poisson_deviance

import kinfed
from kinfed import Federation, Privacy, Split, Training, UsageError, fit
from kinfed.core.tasks import Counts
from kinfed.methods.solved import private_pooling
from kinfed.methods.solved.laplace import Labels, Rows, contrast_classes
from kinfed.methods.solved.mixed_model import MixedModel, Products
from kinfed.methods.solved.own_ridge import solve_ridges
from kinfed.methods.solved.personal_boosting import PersonalBoosting
from kinfed.methods.solved.private_pooling import PrivatePooling, Sent, _regress_alone, find_noises, place_client
from kinfed.models.linear import linear
from kinfed.models.trees import trees


def drawn(clients, rows, seed=0, noise=0.7):
    """A federation of clients whose coefficients differ; all rows train."""
    draw = np.random.default_rng(seed)
    own = np.array([0.5, -1.0, 1.0]) + draw.normal(size=(clients, 3)) * [0.6, 0.5, 0.8]
    x = draw.normal(size=(clients, rows, 2))
    y = np.einsum("nrf,nf->nr", x, own[:, :2]) + own[:, 2:] + noise * draw.normal(size=(clients, rows))
    who = np.repeat([f"c{i:03}" for i in range(clients)], rows)
    federation = Federation.from_arrays(x.reshape(-1, 2), y.ravel(), who, split=Split(validation=0))
    federation.rows["train"] = [torch.arange(rows) + rows * i for i in range(clients)]
    return federation, own


def solve(data, method=None, rounds=8, seed=0, **privacy):
    training = Training(privacy=Privacy(unit="client", **privacy) if privacy else None)
    return fit(method or PrivatePooling(), data, linear((2,), 1).double(), rounds=rounds, training=training, seed=seed)


def coefficients(run):
    return torch.stack([run.theta(position=i) for i in range(len(run.names))]).numpy()


def test_it_ends_where_the_likelihood_of_the_mixed_model_is_largest():
    """With as many rows at each client, EM has the estimates of maximum likelihood with a diagonal covariance."""
    data, _ = drawn(40, 12)
    mine = solve(data, rounds=400)
    theirs = solve(data, MixedModel(random="all", covariance="diagonal", estimate="ml"), rounds=100)
    server, other = mine.final.progress.server, theirs.final.progress.server
    assert server.centre.numpy() == pytest.approx(other.fixed.numpy(), abs=1e-3)
    assert server.spread.numpy() == pytest.approx(other.covariance.diagonal().numpy(), rel=0.01)
    assert float(server.noise) == pytest.approx(float(other.noise), rel=1e-3)
    for i, at in enumerate(data.rows["train"]):
        rows = torch.cat([data.x[at], torch.ones(len(at), 1), data.y[at][:, None]], 1).double()
        moments = Products(rows.T @ rows, torch.tensor(float(len(at))).double())
        own = server.centre + place_client(moments, server.centres, server.spread, server.noise).away
        assert own[0].numpy() == pytest.approx(theirs.theta(position=i).numpy(), abs=5e-3)


def test_under_a_budget_no_client_moves_the_others_far():
    """Outliers of one client move the centre by no more than two cut steps over the number of clients."""
    data, _ = drawn(100, 6)
    before = solve(data, rounds=1, epsilon=8.0).final.progress.server
    data.y[:6] = 1e6
    after = solve(data, rounds=1, epsilon=8.0).final.progress.server
    assert 0 < float((after.centre - before.centre).norm()) <= 2 * 1.5 * 3**0.5 / 100 + 1e-6


def test_an_epsilon_costs_little_with_many_clients():
    data, own = drawn(300, 6)

    def error(run):
        return float(np.sqrt(np.square(coefficients(run) - own).mean()))

    plain = error(solve(data))
    private = np.mean([error(solve(data, seed=i, epsilon=4.0)) for i in range(3)])
    alone = error(solve(data, kinfed.Local(), rounds=60))
    assert plain < private < 1.1 * plain < alone
    run = solve(data, epsilon=4.0)
    assert run.privacy["unit"] == "client"
    assert max(run.privacy["spent"]) == pytest.approx(4.0, rel=0.01)
    assert not np.allclose(coefficients(run), coefficients(solve(data, seed=1, epsilon=4.0)))


def test_a_client_falls_back_on_a_ridge_of_its_own_where_what_all_share_is_wrong():
    """With a centre far away and narrow, its rows are likelier by themselves; with a good one they are not."""
    data, own = drawn(1, 60, seed=3)
    rows = torch.cat([data.x, torch.ones(60, 1), data.y[:, None]], 1).double()
    moments, method = Products(rows.T @ rows, torch.tensor(60.0).double()), PrivatePooling()
    spread, noise, shares = torch.full((3,), 0.01).double(), torch.tensor(0.5).double(), torch.ones(1).double()

    def choose(centre):
        return method.choose_coefficients(moments, Sent(None, centre[None], shares, spread, noise, shares[0]))

    wrong = choose(torch.tensor([30.0, 30, -30]).double())
    alone = torch.linalg.lstsq(rows[:, :3], rows[:, 3:]).solution[:, 0]
    assert wrong.numpy() == pytest.approx(alone.numpy(), abs=0.05)
    centre = torch.from_numpy(own[0])
    away = place_client(moments, centre[None], spread, noise).away[0]
    assert choose(centre).numpy() == pytest.approx((centre + away).numpy(), abs=0.02)


@pytest.mark.parametrize("method", [MixedModel(), PersonalBoosting()])
def test_exact_sums_over_rows_are_refused_under_a_budget(method):
    data, _ = drawn(20, 6)
    module = trees((2,), 1) if isinstance(method, PersonalBoosting) else linear((2,), 1)
    training = Training(privacy=Privacy(epsilon=8.0, unit="client"))
    with pytest.raises(UsageError, match=r"uploads exact sums over rows, .* use 'private-pooling'"):
        fit(method, data, module, rounds=2, training=training)


@pytest.mark.parametrize(
    ("target", "module", "why"),
    [
        (torch.arange(60) % 3, linear((4,), 4), "solves 3 outputs, one for each class, and this model gives 4"),
        (
            torch.arange(60) % 30,
            torch.nn.Sequential(torch.nn.Linear(4, 20), torch.nn.Linear(20, 30)),
            "of 30 classes solves 21 inputs, with their 1, times 29 coefficients, and takes at most 600; use fewer",
        ),
        (torch.rand(60), torch.nn.Linear(4, 1, bias=False), "needs a last layer with a bias"),
        (torch.rand(60, 2), linear((4,), 2), "solves one number for each row, and this model gives 2 outputs"),
    ],
)
def test_what_it_does_not_solve_is_told_in_one_line(target, module, why):
    federation = Federation.from_arrays(torch.randn(60, 4), target, torch.arange(60) % 4)
    with pytest.raises(UsageError, match=why):
        fit(PrivatePooling(), federation, module, rounds=1)


def drawn_labels(clients, rows, counts=False, seed=0, noise=(0.6, 0.5, 0.8)):
    """A federation of clients whose labels or counts follow coefficients of their own; all rows train."""
    draw = np.random.default_rng(seed)
    own = np.array([0.5, -0.6, 0.4]) + draw.normal(size=(clients, 3)) * noise
    x = draw.normal(size=(clients, rows, 2))
    eta = np.einsum("nrf,nf->nr", x, own[:, :2]) + own[:, 2:]
    y = draw.poisson(np.exp(eta)) if counts else draw.random(eta.shape) < 1 / (1 + np.exp(-eta))
    who = np.repeat([f"c{i:03}" for i in range(clients)], rows)
    target = torch.from_numpy(y.ravel()).double() if counts else torch.from_numpy(y.ravel()).long()
    kind = {"task": Counts()} if counts else {}
    federation = Federation.from_arrays(x.reshape(-1, 2), target, who, split=Split(validation=0), **kind)
    federation.rows["train"] = [torch.arange(rows) + rows * i for i in range(clients)]
    return federation, own


def solve_labels(data, method=None, rounds=8, seed=0, **privacy):
    training = Training(privacy=Privacy(unit="client", **privacy) if privacy else None)
    module = linear((2,), 1 if isinstance(data.task, Counts) else 2).double()
    run = fit(method or PrivatePooling(), data, module, rounds=rounds, training=training, seed=seed)
    theta = coefficients(run)
    return run, theta if isinstance(data.task, Counts) else theta[:, [2, 3, 5]] - theta[:, [0, 1, 4]]


@pytest.mark.parametrize("counts", [False, True])
def test_of_labels_and_counts_it_ends_where_its_conditions_hold(counts):
    """The centre is the mean of modes, and variances are those of modes with their uncertainty, written out densely."""
    data, _ = drawn_labels(30, 25, counts)
    server = solve_labels(data, rounds=150)[0].final.progress.server
    modes, uncertain = [], []
    centre, spread = server.centre.numpy(), server.spread.numpy()
    noise = float(server.noise)
    for at in data.rows["train"]:
        x = np.column_stack([data.x[at].numpy(), np.ones(len(at))])
        y = data.y[at].numpy().astype(float)

        def loss(c, x=x, y=y):
            eta = x @ c
            cumulant = np.exp(eta) if counts else np.logaddexp(0, eta)
            return (cumulant - y * eta).sum() / noise + ((c - centre) ** 2 / spread).sum() / 2

        mode = minimize(loss, centre, method="BFGS", options={"gtol": 1e-8}).x
        mean = np.exp(x @ mode) if counts else 1 / (1 + np.exp(-x @ mode))
        weight = mean if counts else mean * (1 - mean)
        modes.append(mode)
        uncertain.append(np.diag(np.linalg.inv(x.T @ (weight[:, None] * x) / noise + np.diag(1 / spread))))
    away = np.stack(modes) - centre
    assert away.mean(0) == pytest.approx(np.zeros(3), abs=2e-3)
    assert (away**2 + uncertain).mean(0) == pytest.approx(spread, rel=0.02)


@pytest.mark.parametrize("counts", [False, True])
def test_an_epsilon_costs_labels_and_counts_little_with_many_clients(counts):
    data, own = drawn_labels(200, 40, counts)

    def error(answer):
        return float(np.sqrt(np.square(answer[1] - own).mean()))

    plain = error(solve_labels(data))
    private = np.mean([error(solve_labels(data, seed=i, epsilon=4.0)) for i in range(2)])
    assert private < 1.15 * plain
    assert plain < 0.8 * np.sqrt(np.square(own - own.mean(0)).mean())  # one for all is farther off


def test_a_client_of_labels_falls_back_on_its_own_where_what_all_share_is_wrong():
    data, own = drawn_labels(1, 200, seed=3)
    rows = Rows(torch.cat([data.x, torch.ones(200, 1)], 1).double(), data.y.double(), torch.ones(200).double(), 0.0)
    spread, ones = torch.full((3,), 0.01).double(), torch.ones(1).double()
    centre = torch.tensor([[9.0, 9, -9]]).double()
    wrong = PrivatePooling().choose_coefficients(rows, Sent(None, centre, ones, spread, ones[0], ones[0]))
    assert wrong.numpy() == pytest.approx(own[0], abs=0.7)
    right = torch.from_numpy(own)
    kept = PrivatePooling().choose_coefficients(rows, Sent(None, right, ones, spread, ones[0], ones[0]))
    assert np.abs(kept.numpy() - own[0]).max() < 0.15


@pytest.mark.parametrize("mean", [0.0, 1.7], ids=["labels", "counts"])
def test_regressions_of_a_clients_own_are_modes_under_penalties_with_their_likelihoods(mean):
    """Modes and curvatures by scipy, and by differences of gradients."""
    draw = np.random.default_rng(4)
    x = np.concatenate([draw.normal(size=(7, 2)), np.ones((7, 1))], 1)
    y = draw.integers(0, 2, 7).astype(float) if not mean else draw.poisson(2.0, 7).astype(float)
    noise, modes, densities = 0.8, [], []
    for constant in (1.0, 3.0):
        for slope in (0.03, 0.1, 0.3, 1.0):
            precision = np.diag([slope**-2, slope**-2, constant**-2])

            def lose(c, precision=precision):
                cumulant = mean * np.exp(x @ c) if mean else np.logaddexp(0, x @ c)
                return -np.sum(y * (x @ c) - cumulant) / noise + c @ precision @ c / 2

            mode = minimize(lose, np.zeros(3), method="BFGS", options={"gtol": 1e-9}).x
            curves = mean * np.exp(x @ mode) if mean else 1 / (2 + 2 * np.cosh(x @ mode))
            curvature = x.T @ (curves[:, None] * x) / noise + precision
            densities.append(-lose(mode) + np.linalg.slogdet(precision)[1] / 2 - np.linalg.slogdet(curvature)[1] / 2)
            modes.append(mode)
    rows = Rows(torch.from_numpy(x), torch.from_numpy(y), torch.ones(7).double(), mean)
    coefficients, density = _regress_alone(rows, torch.zeros(1, 3).double(), torch.tensor(noise).double())
    np.testing.assert_allclose(density, np.array(densities) - np.log(8), rtol=1e-4)
    np.testing.assert_allclose(coefficients, modes, atol=2e-4)


def test_noises_of_counts_are_as_likely_as_their_deviance_by_scikit_learn():
    """With each, the log-density becomes that of the extended quasi-likelihood, but for what all noises share."""
    draw = np.random.default_rng(5)
    expected, y = np.exp(draw.normal(size=9)), draw.poisson(3.0, 9).astype(float)
    x, usual, mean = np.log(expected / 1.7)[:, None], 0.6, 1.7
    rows = Rows(torch.from_numpy(x), torch.from_numpy(y), torch.ones(9).double(), mean)
    noises, added = find_noises(rows, torch.tensor(usual, dtype=torch.float64))
    np.testing.assert_allclose(noises, usual * np.sqrt(10) ** np.arange(5))
    ours, noises = rows.log_density(torch.from_numpy(x[:, 0])) / noises + added, noises.numpy()
    deviance = 9 * mean_poisson_deviance(y, expected)
    before = -((np.log(noises / usual) / 2) ** 2) / 2
    theirs = before - (deviance / noises + 9 * np.log(noises / usual)) / 2
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    zero, nothing = find_noises(rows._replace(mean=0.0), torch.tensor(1.0))  # labels
    assert (zero.tolist(), nothing.tolist()) == ([1.0], [0.0])


def test_a_client_whose_counts_vary_far_more_than_those_of_others_trusts_them_less(monkeypatch):
    """Its error beside that with the noise of all, over draws; counts that vary as others' change little."""
    draw = np.random.default_rng(6)
    centre, usual = torch.tensor([[0.5, -0.5, 3.0]]).double(), torch.tensor(1.0).double()
    sent = Sent(None, centre, usual[None], torch.full((3,), 0.04).double(), usual, usual)

    def measure(varied):
        errors = []
        for _ in range(8):
            x = np.concatenate([draw.normal(size=(12, 2)), np.ones((12, 1))], 1)
            expected = np.exp(x @ centre[0].numpy()) * (draw.gamma(0.3, 1 / 0.3, 12) if varied else 1.0)
            y = draw.poisson(expected).astype(float)
            rows = Rows(torch.from_numpy(x), torch.from_numpy(y), torch.ones(12).double(), 1.0)
            with monkeypatch.context() as patch:
                ours = PrivatePooling().choose_coefficients(rows, sent)
                patch.setattr(private_pooling, "EXCESS", (0, 0, 1))
                by_usual = PrivatePooling().choose_coefficients(rows, sent)
            errors.append([float((chosen - centre).norm()) for chosen in (ours, by_usual)])
        return np.mean(errors, 0)

    ours, by_usual = measure(varied=True)
    assert ours < 0.7 * by_usual
    ours, by_usual = measure(varied=False)
    assert ours == pytest.approx(by_usual, rel=0.1)


def test_a_ridge_of_a_clients_own_is_about_its_own_mean_in_deviations_of_its_columns():
    """By scikit-learn, and densities of the targets by scipy; the third column is the same in all rows."""
    draw = np.random.default_rng(7)
    x = np.concatenate([draw.normal(3, [0.1, 40.0], (9, 2)), np.full((9, 1), 5.0)], 1)
    y = 12 + 6 * x[:, 0] + draw.normal(size=9)
    centred = y - y.mean()
    z = (x - x.mean(0)) / np.where(x.std(0), x.std(0), 1)
    densities, slopes = [], []
    for penalty in np.logspace(-2, 3, 16):
        fitted = Ridge(alpha=penalty).fit(z, y)
        of_targets = np.eye(9) + z @ z.T / penalty
        density = multivariate_normal(np.zeros(9), 0.8 * of_targets).logpdf(centred) + 9 * np.log(2 * np.pi) / 2
        densities.append(density + np.log(2 * np.pi * 0.8 / 9) / 2 + cauchy.logpdf(y.mean()) - np.log(16))
        slopes.append(fitted.coef_ / np.where(x.std(0), x.std(0), 1))
    rows = torch.from_numpy(np.concatenate([x, np.ones((9, 1)), y[:, None]], 1))
    noises = torch.tensor([2.0, 0.8], dtype=torch.float64)
    coefficients, density = solve_ridges(rows.T @ rows, torch.tensor(9.0).double(), noises)
    np.testing.assert_allclose(density[1], densities, rtol=1e-9)
    constants = y.mean() - np.array(slopes) @ x.mean(0)
    np.testing.assert_allclose(coefficients, np.column_stack([slopes, constants]), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_client_of_very_few_rows_has_a_finite_ridge_of_its_own(rows):
    cells = torch.tensor([[0.5, 1.0, 3.0], [0.5, 1.0, 3.0]]).double()[:rows]
    coefficients, density = solve_ridges(cells.T @ cells, torch.tensor(float(rows)).double(), cells[0, :1])
    assert torch.isfinite(density).all()
    np.testing.assert_allclose(coefficients, [[0, 3]] * 16)


@pytest.mark.parametrize("noise", [0.05, 1.0])
def test_a_client_with_little_noise_of_its_own_trusts_its_rows_more(noise):
    """By sums over noises, of which those that its residuals speak for have most of the weight."""
    draw = np.random.default_rng(2)
    x = np.concatenate([draw.normal(size=(12, 2)), np.ones((12, 1))], 1)
    y = x @ [0.6, -0.4, 0.3] + noise * draw.normal(size=12)
    rows = torch.from_numpy(np.concatenate([x, y[:, None]], 1))
    moments, spread = Products(rows.T @ rows, torch.tensor(12.0).double()), torch.full((3,), 0.04).double()
    centre, shared = torch.zeros(1, 3).double(), torch.tensor(1.0).double()
    by_shared = place_client(moments, centre, spread, shared).away[0]
    sent = Sent(None, centre, shared[None], spread, shared, shared)
    chosen = PrivatePooling().choose_coefficients(moments, sent)
    solved = torch.from_numpy(np.linalg.lstsq(x, y, rcond=None)[0])
    ratio = float((chosen - solved).norm() / (by_shared - solved).norm())
    assert ratio < 0.3 if noise < 0.1 else 0.5 < ratio < 1.5


def test_a_client_without_rows_has_what_all_share():
    none = Products(torch.zeros(4, 4).double(), torch.zeros(()).double())
    centre, noise = torch.tensor([[0.5, -1.0, 2.0]]).double(), torch.tensor(0.7).double()
    sent = Sent(None, centre, torch.ones(1).double(), 0 * centre[0] + 0.1, noise, noise)
    np.testing.assert_allclose(PrivatePooling().choose_coefficients(none, sent), centre[0])


def drawn_classes(clients, rows, classes=3, seed=0):
    """A federation of clients whose labels follow a softmax of coefficients [f, C] of their own; all rows train."""
    draw = np.random.default_rng(seed)
    own = draw.normal(size=(3, classes)) + 0.5 * draw.normal(size=(clients, 3, classes))
    x = draw.normal(size=(clients, rows, 2))
    scores = np.einsum("nrf,nfc->nrc", np.concatenate([x, np.ones((clients, rows, 1))], 2), own)
    y = (scores + draw.gumbel(size=scores.shape)).argmax(2)
    who = np.repeat([f"c{i:03}" for i in range(clients)], rows)
    federation = Federation.from_arrays(x.reshape(-1, 2), y.ravel(), who, split=Split(validation=0))
    federation.rows["train"] = [torch.arange(rows) + rows * i for i in range(clients)]
    return federation, own


def solve_classes(data, rounds=8, seed=0, method=None, **privacy):
    """A run, and the outputs [N, f, C] of its models by input, less their mean over classes."""
    training = Training(privacy=Privacy(unit="client", **privacy) if privacy else None)
    module = linear((2,), data.task.classes).double()
    run = fit(method or PrivatePooling(), data, module, rounds=rounds, training=training, seed=seed)
    theta, classes = coefficients(run), data.task.classes
    weight = np.moveaxis(theta[:, : 2 * classes].reshape(-1, classes, 2), 1, 2)
    own = np.concatenate([weight, theta[:, None, 2 * classes :]], 1)
    return run, own - own.mean(2, keepdims=True)


def labelled(x, y, classes):
    rows = torch.from_numpy(np.column_stack([x, np.ones(len(x))]))
    labels = torch.nn.functional.one_hot(torch.as_tensor(y), classes).double()
    return Labels(rows, labels, torch.ones(len(x)).double(), contrast_classes(classes))


def test_contrasts_of_classes_are_orthogonal_and_those_of_two_are_halves():
    np.testing.assert_allclose(contrast_classes(2), [[-0.5], [0.5]])
    for classes in (3, 7):
        b = contrast_classes(classes).numpy()
        np.testing.assert_allclose(b.T @ b, np.eye(classes - 1) / 2, atol=1e-15)
        np.testing.assert_allclose(b.sum(0), 0, atol=1e-15)


def test_two_classes_by_a_softmax_are_placed_as_by_a_logistic_regression():
    data, _ = drawn_labels(1, 30, seed=5)
    x, y = data.x.numpy(), data.y.numpy()
    by_softmax = labelled(x, y, 2)
    plain = Rows(by_softmax.x, torch.from_numpy(y).double(), by_softmax.real, 0.0)
    centres, spread = torch.tensor([[0.3, -1.0, 0.2], [0, 2.0, 1]]).double(), torch.tensor([0.5, 0.1, 2.0]).double()
    noise = torch.ones(()).double()
    for mine, theirs in zip(*(place_client(rows, centres, spread, noise) for rows in (by_softmax, plain)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-7)


@pytest.mark.parametrize("classes", [3, 5])
def test_a_client_of_several_classes_is_at_the_mode_of_scikit_learn(classes):
    """Of coefficients whose log odds have the variance D the penalty is C = D / 2; classes that it lacks have theirs.

    The covariance of log odds over the first class is by the dense Hessian in these, and the density by Laplace.
    """
    draw = np.random.default_rng(classes)
    x, y = draw.normal(size=(40, 2)), draw.integers(0, classes, 40)
    variance, b = 0.8, contrast_classes(classes).numpy()
    spread, none = torch.full((3,), variance).double(), torch.zeros(1, 3 * (classes - 1)).double()
    away, covariance, density = place_client(labelled(x, y, classes), none, spread, torch.ones(()).double())
    table = np.column_stack([x, np.ones(40)])
    fitted = LogisticRegression(C=variance / 2, fit_intercept=False, tol=1e-10, max_iter=5000).fit(table, y)
    np.testing.assert_allclose(away[0].view(3, -1).numpy() @ b.T, fitted.coef_.T, atol=2e-5)

    odds = b[1:] - b[:1]  # [c, c] of coefficients to log odds over the first class
    turn = np.kron(np.eye(3), odds)
    chance = fitted.predict_proba(table)[:, 1:]
    weight = np.einsum("nc,cd->ncd", chance, np.eye(classes - 1)) - np.einsum("nc,nd->ncd", chance, chance)
    prior = np.kron(np.eye(3), np.linalg.inv(variance * (np.eye(classes - 1) + 1) / 2))
    hessian = np.einsum("ncd,nf,ng->fcgd", weight, table, table).reshape(prior.shape) + prior
    np.testing.assert_allclose(turn @ covariance[0].numpy() @ turn.T, np.linalg.inv(hessian), atol=1e-5)

    scores = table @ fitted.coef_.T
    mode = ((fitted.coef_[1:] - fitted.coef_[:1]).T).ravel()
    likely = log_softmax(scores, 1)[np.arange(40), y].sum() - mode @ prior @ mode / 2
    likely += (np.linalg.slogdet(prior)[1] - np.linalg.slogdet(hessian)[1]) / 2
    assert float(density) == pytest.approx(likely, abs=1e-6)


def test_of_three_classes_it_ends_where_its_conditions_hold():
    """Of log odds of every two classes the centre is the mean of modes, and variances those with their uncertainty."""
    data, _ = drawn_classes(12, 25)
    server = solve_classes(data, rounds=150)[0].final.progress.server
    b, pairs = contrast_classes(3).numpy(), [(0, 1), (0, 2), (1, 2)]
    away, squares = [], []
    for at in data.rows["train"]:
        rows = labelled(data.x[at].numpy(), data.y[at], 3)
        placed = place_client(rows, server.centres, server.spread, server.noise)
        outputs = placed.away[0].view(3, 2).numpy() @ b.T  # [f, C]
        uncertain = np.einsum("cu,fugv,dv->fcgd", b, placed.covariance[0].view(3, 2, 3, 2).numpy(), b)
        at_pairs = [uncertain[:, i, :, i] - 2 * uncertain[:, i, :, j] + uncertain[:, j, :, j] for i, j in pairs]
        variances = [np.diagonal(matrix) for matrix in at_pairs]
        odds = np.stack([outputs[:, i] - outputs[:, j] for i, j in pairs])
        away.append(odds)
        squares.append((odds**2 + variances).mean(0))
    assert np.mean(away, 0) == pytest.approx(np.zeros((3, 3)), abs=2e-3)
    assert np.mean(squares, 0) == pytest.approx(server.spread.numpy(), rel=0.02)


def test_the_order_of_classes_changes_nothing_but_their_order():
    data, _ = drawn_classes(12, 20, classes=4)
    order = torch.tensor([2, 0, 3, 1])
    mine, theirs = (solve_classes(table)[1] for table in (data, replace(data, y=order[data.y])))
    np.testing.assert_allclose(theirs[:, :, order], mine, atol=1e-6)


def test_a_class_that_clients_lack_and_one_of_a_single_row_are_solved():
    """Others' rows say what such a class is like, so nobody gives it a chance of 0."""
    data, _ = drawn_classes(20, 30)
    y = data.y.clone()
    y[:300][y[:300] == 2] = 0  # half of the clients have no row of it
    y[y == 1] = 0
    y[599] = 1
    run, own = solve_classes(replace(data, y=y))
    assert np.isfinite(own).all()
    chances = torch.cat([run.model(position=i)(data.x).softmax(1) for i in range(20)]).detach()
    assert float(chances.min()) > 1e-6
    assert float(chances[:, 1].mean()) < 0.02


def test_an_epsilon_costs_several_classes_little_with_many_clients():
    data, own = drawn_classes(120, 25)
    own = own - own.mean(2, keepdims=True)

    def error(answer):
        return float(np.sqrt(np.square(answer[1] - own).mean()))

    plain = error(solve_classes(data))
    private = error(solve_classes(data, epsilon=8.0))
    assert private < 1.15 * plain
    assert plain < 0.8 * np.sqrt(np.square(own - own.mean(0)).mean())  # one for all is farther off
