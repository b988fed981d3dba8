"""Partial pooling against a mixed model by hand, against the ends it lies between, and from a choice to predictions."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import polars
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from kinfed import (
    Classification,
    Counts,
    Execution,
    Federation,
    Forecasting,
    Participation,
    Quantiles,
    Split,
    UsageError,
    fit,
    from_frame,
)
from kinfed.methods.solved import partial_pooling
from kinfed.methods.solved.partial_pooling import (
    PartialPooling,
    Server,
    Sums,
    bound_curvature,
    choose_posterior,
    step,
    sums,
)
from kinfed.models.additive import additive
from kinfed.models.changes import changes
from kinfed.models.repeat import repeat
from kinfed.runs.config.experiment import default_model
from kinfed.search.choose import candidate_models, usual_season

ROUNDS = 12


def federation(spread, intercepts=0.0, n=40, clients=12, seed=0, noise=0.5):
    """Clients whose coefficients differ by `spread`, and their intercepts by `intercepts`."""
    draw = torch.Generator().manual_seed(seed)
    client = torch.arange(n * clients) % clients
    x = torch.randn(n * clients, 3, generator=draw, dtype=torch.float64)
    own = torch.tensor([1.0, -1.0, 0.5]) + spread * torch.randn(clients, 3, generator=draw)
    level = intercepts * torch.randn(clients, generator=draw)
    y = (x * own[client]).sum(1) + level[client] + noise * torch.randn(n * clients, generator=draw)
    return Federation.from_arrays(x, y, client), own, level


def linear(inputs=3, outputs=1):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs).double()


def solved(data, module=None, rounds=ROUNDS, **settings):
    return fit(PartialPooling(**settings), data, module or linear(), rounds=rounds)


def coefficients(run):
    """[N, 4] each client's, at the last round."""
    return torch.stack([run.theta(position=i) for i in range(len(run.federation))])


def _alone(data):
    """[N, 4] least squares of each client's rows."""
    found = []
    for rows in data.rows["train"]:
        x = torch.cat([data.x[rows], torch.ones(len(rows), 1)], 1)
        found.append(torch.linalg.lstsq(x, data.y[rows].double()).solution)
    return torch.stack(found)


def test_it_is_the_best_prediction_of_a_mixed_model_at_its_variances():
    """Henderson's equations, written out with rows and dummies, have the coefficients that sums give."""
    data, _, _ = federation(0.7, 0.5)
    method, module = PartialPooling(steps=1), linear()
    fleet_run = fit(method, data, module, rounds=1)
    rows = data.rows["train"]
    d, s, n = 0.1, 1.0, len(rows)
    x = [torch.cat([data.x[one], torch.ones(len(one), 1)], 1).numpy() for one in rows]
    y = [data.y[one].double().numpy() for one in rows]
    scale = sum((one**2).sum(0) for one in x) / sum(map(len, x))
    fixed = np.concatenate(x)
    random = np.zeros((len(fixed), 4 * n))
    at = 0
    for i, one in enumerate(x):
        random[at : at + len(one), 4 * i : 4 * i + 4] = one
        at += len(one)
    both = np.hstack([fixed, random])
    left = both.T @ both / s + np.diag(np.concatenate([scale, np.full(4 * n, 1 / d)]))
    found = np.linalg.solve(left, both.T @ np.concatenate(y) / s)
    expected = found[:4] + found[4:].reshape(n, 4)
    np.testing.assert_allclose(coefficients(fleet_run).numpy(), expected, rtol=1e-8, atol=1e-10)


def test_clients_that_are_alike_share_one_model_and_those_that_are_not_keep_their_own():
    alike, own, _ = federation(0.0)
    theta = coefficients(solved(alike))
    scatter = [float((one - one.mean(0)).square().mean().sqrt()) for one in (theta, _alone(alike))]
    assert scatter[0] < scatter[1] / 3
    pooled = torch.cat(list(alike.rows["train"]))
    x = torch.cat([alike.x[pooled], torch.ones(len(pooled), 1)], 1)
    torch.testing.assert_close(
        theta.mean(0), torch.linalg.lstsq(x, alike.y[pooled].double()).solution, atol=0.02, rtol=0.02
    )
    apart, own, _ = federation(3.0, noise=0.01)
    torch.testing.assert_close(coefficients(solved(apart))[:, :3], own.double(), atol=0.02, rtol=0.02)


def test_columns_are_pooled_one_by_one():
    """Only intercepts differ: slopes are pooled, intercepts are not."""
    data, _, level = federation(0.0, 3.0)
    theta = coefficients(solved(data, rounds=20))
    assert float(theta[:, :3].std(0).mean()) < float(_alone(data)[:, :3].std(0).mean()) / 2
    torch.testing.assert_close(theta[:, 3], level.double(), atol=0.5, rtol=0.0)


def test_the_weight_of_own_rows_is_how_far_an_answer_follows_them():
    """By hand for two columns that are orthogonal, and by the equations of the posterior mean for any columns."""
    curvature, spread, noise = torch.tensor([[[8.0, 0.0], [0.0, 2.0]]]), torch.tensor([0.5, 1e-8]), torch.ones(1)
    server = Server((), spread[:, None], spread[:, None], noise[:, None], noise, *7 * [()])
    server = server._replace(sums=Sums(curvature[:, None], torch.zeros(1, 2, 1), noise[:, None], noise[:, None], ()))
    weights = PartialPooling().own_weights(None, server)
    torch.testing.assert_close(weights, torch.tensor([[8 / (8 + 1 / 0.5), 0.0]]), atol=1e-6, rtol=0)
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    server = server._replace(spread=torch.tensor([[0.5], [2.0]]), noise=torch.tensor([[3.0]]))
    server = server._replace(sums=server.sums._replace(curvature=(x.T @ x)[None, None]))
    hat = np.linalg.inv(x.T @ x / 3 + np.diag([1 / 0.5, 1 / 2.0])) @ (x.T @ x / 3).numpy()
    np.testing.assert_allclose(PartialPooling().own_weights(None, server)[0], np.diag(hat), rtol=1e-5)


def test_units_of_clients_are_those_of_their_own_rows_and_nobody_elses():
    """As if each client had scaled its rows itself; and a change of units at one client changes its answers alone."""
    data, _, _ = federation(0.7, 1.0)
    own = {"units": "client", "common": 0.0}
    x, y = data.x.clone(), data.y.clone()
    ours, theta = coefficients(solved(data, **own)), []
    for i, rows in enumerate(data.rows["train"]):
        every = torch.cat([data.rows[split][i] for split in ("train", "validation", "test")])
        mean, size, level, spread = x[rows].mean(0), x[rows].std(0, False), y[rows].mean(), y[rows].std(0, False)
        x[every], y[every] = (x[every] - mean) / size, (y[every] - level) / spread
        theta.append((mean, size, level, spread))
    scaled = coefficients(solved(replace(data, x=x, y=y, task=type(data.task)()), **own))
    for (mean, size, level, spread), their, one in zip(theta, scaled, ours, strict=True):
        slopes = spread * their[:3] / size
        expected = torch.cat([slopes, (level + spread * their[3] - slopes @ mean)[None]])
        torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-3)
    first = torch.cat([data.rows[split][0] for split in ("train", "validation", "test")])
    y = data.y.clone()
    y[first] = 1000 * y[first] + 5
    other = coefficients(solved(replace(data, y=y), **own))
    torch.testing.assert_close(other[1:], ours[1:], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(other[0, :3], 1000 * ours[0, :3], rtol=1e-6, atol=1e-6)
    with pytest.raises(UsageError, match="has none; use units=all"):
        solved(data, nn.Linear(3, 1, bias=False).double(), **own)


def test_a_client_unlike_all_others_leans_on_ridges_of_its_own():
    """The one whose targets are a hundred times as large; with clients that are alike next to nothing changes."""

    def errors(factor, **settings):
        data, _, _ = federation(0.3, n=20)
        client, y = torch.empty(len(data.y), dtype=torch.int64), data.y.clone()
        for position, rows in enumerate(zip(*data.rows.values(), strict=True)):
            client[torch.cat(rows)] = position
        y[client == 0] *= factor
        run = solved(Federation.from_arrays(data.x, y, client), rounds=30, **settings)
        return torch.tensor(run.summary.clients.scores["mixed"])

    drawn, leaning = (errors(100.0, alone=alone) for alone in (0, 1))
    assert leaning[0] < 0.3 * drawn[0]
    torch.testing.assert_close(leaning[1:], drawn[1:], rtol=0.1, atol=0.02)
    drawn, leaning = (errors(1.0, alone=alone) for alone in (0, 1))
    torch.testing.assert_close(leaning, drawn, rtol=0.1, atol=0.02)


@pytest.mark.parametrize(
    ("settings", "module", "why"),
    [
        ({"alone": 1}, nn.Linear(3, 1, bias=False), "alone needs a last layer with a bias"),
        ({"alone": 1, "units": "client"}, nn.Linear(3, 1), "alone is of numbers, with units=all; use alone=0"),
    ],
)
def test_ridges_of_ones_own_are_refused_in_one_line_where_there_are_none(settings, module, why):
    with pytest.raises(UsageError, match=why):
        solved(federation(0.3)[0], module.double(), **settings)
    labels = Federation.from_arrays(torch.randn(60, 3), torch.arange(60) % 2, torch.arange(60) % 3)
    with pytest.raises(UsageError, match="alone is of numbers"):
        solved(labels, nn.Linear(3, 2), alone=1)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_every_executor_and_participation_give_the_same(executor):
    data, _, _ = federation(0.7)
    runs = [fit(PartialPooling(), data, linear(), rounds=3, execution=Execution(one)) for one in ("loop", executor)]
    torch.testing.assert_close(coefficients(runs[0]), coefficients(runs[1]), rtol=1e-9, atol=1e-10)
    part = fit(PartialPooling(), data, linear(), rounds=40, participation=0.5)
    torch.testing.assert_close(coefficients(part), coefficients(solved(data, rounds=40)), rtol=0.05, atol=0.05)


def test_kin_help_where_there_are_groups():
    draw = torch.Generator().manual_seed(1)
    client = torch.arange(30 * 24) % 24
    x = torch.randn(len(client), 5, generator=draw, dtype=torch.float64)
    groups = torch.randn(3, 5, generator=draw)[torch.arange(24) % 3]
    y = (x * groups[client]).sum(1) + 2 * torch.randn(len(client), generator=draw)
    data = Federation.from_arrays(x, y, client)
    plain, kin = (solved(data, linear(5), kin=one) for one in (0.0, 1.0))
    away = [float((coefficients(run)[:, :5] - groups.double()).square().mean()) for run in (plain, kin)]
    assert away[1] < away[0]
    weights = kin.relation
    torch.testing.assert_close(weights.sum(1), torch.ones(24), atol=1e-4, rtol=0)
    same = (torch.arange(24) % 3)[:, None] == (torch.arange(24) % 3)
    assert float(weights[same & ~torch.eye(24, dtype=bool)].mean()) > 2 * float(weights[~same].mean())
    assert plain.relation is None


@pytest.mark.parametrize("task", [Classification(3), Classification(2), Counts(2.0), Forecasting(0.5, 2.0)])
def test_sums_are_the_derivatives_of_the_loss(task):
    """curvature c - slope is the gradient at c, and of Newton's losses the curvature bounds the second derivative."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=draw, dtype=torch.float64)
    outputs = {Classification: getattr(task, "classes", 0), Counts: 1, Forecasting: 2}[type(task)]
    at = 0.3 * torch.randn(4, outputs, generator=draw, dtype=torch.float64)
    if isinstance(task, Classification):
        y = torch.randint(task.classes, (30,), generator=draw)
    else:
        y = torch.randint(5, (30, outputs), generator=draw).double()
    real = (torch.arange(30) < 25).double()

    def loss(c):
        if isinstance(task, Counts):
            mean = (x @ c).exp() * task.mean
            return ((mean - y * (x @ c)).squeeze(1) * real).sum()
        if isinstance(task, Forecasting):
            return 0.5 * ((x @ c - (y - task.mean) / task.deviation).square().sum(1) * real).sum()
        return (task.loss(x @ c, y) * real).sum()

    found = sums(task, x, y, real, at)
    gradient = torch.func.grad(loss)(at)
    each = torch.einsum("hfg,gh->fh", found.curvature.expand(outputs, 4, 4), at)
    torch.testing.assert_close(each - found.slope, gradient)
    second = torch.func.hessian(loss)(at).permute(1, 0, 3, 2).reshape(4 * outputs, 4 * outputs)
    bound = torch.block_diag(*found.curvature.expand(outputs, 4, 4))
    assert float(torch.linalg.eigvalsh(bound - second).min()) > -1e-8


def test_labels_and_counts_are_learned():
    draw = torch.Generator().manual_seed(0)
    client, x = torch.arange(600) % 10, torch.randn(600, 3, generator=draw, dtype=torch.float64)
    level = torch.randn(10, generator=draw)[client]
    y = (x[:, 0] + level + 0.1 * torch.randn(600, generator=draw) > 0).long()
    labels = solved(Federation.from_arrays(x, y, client), linear(outputs=2)).summary.scores["mixed"]["mean"]
    assert labels > 0.9
    counts = torch.poisson((0.5 * x[:, 0] + 0.5 * level + 1).exp(), generator=draw)
    data = Federation.from_arrays(x, counts, client, task=Counts(float(counts.mean())))
    found = solved(data).history.curve("mixed", "test", "deviance").mean(1)
    assert float(found[-1]) < 1.3  # of Poisson counts it is about 1


def test_the_curvature_of_a_softmax_is_bounded_as_tightly_as_a_diagonal_can():
    """By hand, and by eigenvalues: with less for any class the bound would not hold."""
    shares = torch.tensor([[0.8, 0.1, 0.1], [0.5, 0.3, 0.2]], dtype=torch.float64)
    expected = torch.tensor([[0.32, 0.16, 0.16], [0.5, 0.3, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(bound_curvature(shares), expected)
    two = torch.tensor([[0.7, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(bound_curvature(two), torch.full_like(two, 2 * 0.7 * 0.3))
    draw = torch.Generator().manual_seed(0)
    shares = (4 * torch.randn(500, 5, generator=draw, dtype=torch.float64)).softmax(1)
    curvature = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None]
    bound = torch.diag_embed(bound_curvature(shares))
    assert torch.linalg.eigvalsh(bound - curvature).min() > -1e-12
    for c in range(5):
        less = bound.clone()
        less[:, c, c] *= 0.99
        assert (torch.linalg.eigvalsh(less - curvature)[:, 0] < 0).all()


@pytest.mark.parametrize("classes", [2, 4])
def test_the_variance_of_clients_logits_is_found(classes):
    """Intercepts drawn with a known deviation, and enough rows that each client's are nearly known."""
    clients, n, deviation = 300, 80, 1.0
    draw = torch.Generator().manual_seed(1)
    logits = deviation * torch.randn(clients, classes, generator=draw, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), n, replacement=True, generator=draw)  # [N, n]
    one, real = torch.ones(n, 1, dtype=torch.float64), torch.ones(n, dtype=torch.float64)
    none = torch.zeros(clients, 1, classes, dtype=torch.float64)
    first = torch.ones(classes, dtype=torch.float64)
    server = Server(none, none[0], none[0] + 0.1, none[:, 0] + 1, first, none, (), none, (), none, none[0], first[0])
    for _ in range(40):
        found = [sums(Classification(classes), one, y[i], real, server.coefficients[i]) for i in range(clients)]
        server = server._replace(sums=Sums(*map(torch.stack, zip(*found, strict=True))))
        for _ in range(3):
            server = step(server, False, 5.0, choose_posterior(server.sums), identified=1 - 1 / classes)
    # The difference of two logits has twice their variance, and so has that of two outputs.
    assert server.spread.mean() == pytest.approx(deviation**2, rel=0.15)


def test_wider_variances_make_up_for_labels_that_say_too_little_of_them():
    """With few rows a client, coefficients are drawn less to their mean, and held-out labels are likelier."""
    clients, n, draw = 100, 8, torch.Generator().manual_seed(2)
    slopes = torch.tensor([1.0, -0.5]) + torch.randn(clients, 1, 2, generator=draw)
    x = torch.randn(clients, 200 + n, 2, generator=draw)
    y = (torch.rand(x.shape[:2], generator=draw) < (x * slopes).sum(-1).sigmoid()).long()
    client = torch.arange(clients).repeat_interleave(n)
    data = Federation.from_arrays(x[:, :n].flatten(0, 1).double(), y[:, :n].flatten(), client)
    losses, scatter = [], []
    for widen in (1.0, 1.25):
        run = solved(data, linear(inputs=2, outputs=2), rounds=20, widen=widen)
        answers = torch.stack([run.model(position=i)(x[i, n:].double()) for i in range(clients)])
        losses.append(float(torch.nn.functional.cross_entropy(answers.flatten(0, 1), y[:, n:].flatten())))
        theta = coefficients(run)
        scatter.append(float((theta - theta.mean(0)).square().mean()))
    assert losses[1] < losses[0] - 0.005
    assert scatter[1] > scatter[0]


def test_curves_bend_lines_and_what_cannot_be_solved_is_one_line():
    draw = torch.Generator().manual_seed(0)
    client, x = torch.arange(900) % 9, torch.rand(900, 2, generator=draw) * 4 - 2
    data = Federation.from_arrays(x, (2 * x[:, 0]).sin() + x[:, 1].square(), client)
    straight, bent = (solved(data, default_model(data, name)) for name in ("linear", "additive"))
    errors = [run.summary.scores["mixed"]["mean"] for run in (straight, bent)]
    assert errors[1] < errors[0] / 3
    far = torch.tensor([[30.0, 0.0], [60.0, 0.0], [90.0, 0.0]])
    answers = bent.model(position=0)(far).flatten()
    torch.testing.assert_close(answers[2] - answers[1], answers[1] - answers[0], rtol=1e-3, atol=1e-3)
    with pytest.raises(UsageError, match="none of them empty"):
        additive((3, 0), 1, columns=None)
    series = Federation.from_arrays(x, torch.rand(900, 1), client, task=Quantiles(quantiles=(0.5,)))
    with pytest.raises(UsageError, match="forecasts quantiles by a last layer with a bias; this model's has none"):
        solved(series, nn.Linear(2, 1, bias=False))


@pytest.mark.parametrize("outputs", [1, 2])
def test_clients_with_few_rows_are_solved_by_roots_of_their_sums_alike(outputs):
    draw = torch.Generator().manual_seed(3)
    n, rows, f = 4, 7, 20
    x = torch.randn(n, rows, f, generator=draw, dtype=torch.float64)
    x[1, 3:] = 0  # a client with fewer rows than the others
    curvature = (x.mT @ x)[:, None].expand(n, outputs, f, f)
    blank = torch.zeros(n, outputs, dtype=torch.float64)
    given = partial_pooling.Sums(
        *(
            blank + rows if name == "rows" else curvature if name == "curvature" else blank
            for name in partial_pooling.Sums._fields
        )
    )
    spread = torch.rand(f, generator=draw, dtype=torch.float64) * 10.0 ** torch.arange(-6, 4, 0.5)
    noise = torch.tensor([0.1, 1e-4, 3.0, 20.0], dtype=torch.float64)
    vectors = torch.randn(n, f, generator=draw, dtype=torch.float64)
    few = choose_posterior(given)(spread, noise, outputs - 1)
    many = choose_posterior(given._replace(rows=blank + f))(spread, noise, outputs - 1)
    for ours, theirs in (
        (few.times(vectors), many.times(vectors)),
        (few.information, many.information),
        (few.learned, many.learned),
    ):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9 * scale)


def test_hardly_any_rows_give_numbers():
    """Two rows of each of ten clients, more columns than rows, and one column twice."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 8, generator=draw)
    x = torch.cat([x, x[:, :1], torch.ones(60, 1)], 1)
    data = Federation.from_arrays(x, torch.randn(60, generator=draw) * 1e3, torch.arange(60) % 15)
    run = solved(data, nn.Linear(10, 1), kin=1.0)
    assert torch.isfinite(coefficients(run)).all()


def test_who_joins_late_begins_with_the_mean_of_all():
    data, _, _ = federation(0.7, 0.5)
    late = fit(PartialPooling(kin=1.0), data, linear(), rounds=2, participation=Participation(1.0, late=0.4, joins=2))
    theta = coefficients(late)
    same = (theta[:, None] - theta).abs().sum(2) < 1e-9
    assert sorted(same.sum(1).tolist())[-5:] == [5] * 5  # two fifths of twelve, who have sent nothing
    joined = fit(PartialPooling(), data, linear(), rounds=30, participation=Participation(1.0, late=0.4, joins=2))
    torch.testing.assert_close(coefficients(joined), coefficients(solved(data, rounds=30)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mean", [2, 50, 500])
def test_counts_of_any_size_are_solved_in_a_few_rounds(mean):
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(360, 3, generator=draw), torch.arange(360) % 12
    y = torch.poisson(mean * (x @ torch.tensor([0.5, -0.4, 0.2])).exp(), generator=draw)
    data = Federation.from_arrays(x, y, client, task=Counts(float(y.mean())))
    few, many = (solved(data, nn.Linear(3, 1), rounds).history.test("mixed").mean() for rounds in (6, 40))
    assert float(few) < 1.1 * float(many) + 0.05 < 3.0  # the deviance, about 1 where the mean is known


def test_columns_that_are_sums_of_others_or_the_same_in_all_of_a_clients_rows_are_solved():
    draw, client = torch.Generator().manual_seed(0), torch.arange(48 * 16) // 16
    level, year = torch.randn(48, generator=draw)[client], (torch.arange(48 * 16) % 16).float()
    year = (year - year.mean()) / year.std()
    x = torch.stack([level, year, (year > 0).float(), year + level, 2 * level], 1)
    y = 3 * level + year + 0.3 * torch.randn(len(client), generator=draw)
    run = solved(Federation.from_arrays(x, y, client), additive((5,), 1), rounds=6)
    assert float(run.history.test("mixed").mean()) < 0.4  # 0.24 is the mean size of the noise


def test_a_solver_ends_when_it_has_solved_and_no_round_is_selected_on_validation():
    data, _, _ = federation(0.7, 0.5)
    run = solved(data, rounds=20)
    assert 1 < run.history.cost.done < 20
    assert run.history.select("mixed") == run.history.rounds[-1] == run.history.cost.done - 1
    assert [row["round"] for row in run.summary.scores.values()] == [run.history.cost.done]
    torch.testing.assert_close(coefficients(run), coefficients(solved(data, rounds=60)))
    labels = Federation.from_arrays(data.x, (data.y > 0).long(), torch.arange(len(data.x)) % 12)
    chances = solved(labels, linear(outputs=2), rounds=20)
    best = chances.history.curve("mixed", "validation", "accuracy").mean(1).argmax()
    assert chances.history.select("mixed") == chances.history.cost.done - 1 >= int(best)


@pytest.mark.parametrize("taken_back", [True, False])
def test_a_step_of_newtons_method_never_raises_the_penalised_loss(taken_back, monkeypatch):
    """At fixed variances, of labels of few rows, some far out: without the way back the loss rises on the way.

    With it forty rounds end within two per cent of the least that L-BFGS finds.
    """
    draw = torch.Generator().manual_seed(1)
    client, x = torch.arange(48) % 6, torch.randn(48, 2, generator=draw).double()
    x = x * (2.5 * torch.randn(48, 1, generator=draw)).exp()
    y = (x[:, 0] + torch.randn(48, generator=draw) > 0).long()
    data = Federation.from_arrays(x, y, client, split=Split(stratify=False))

    def held(server, **settings):
        return step(server, **settings)._replace(spread=server.spread, noise=server.noise, penalty=server.penalty)

    monkeypatch.setattr(partial_pooling, "step", held)
    if not taken_back:
        monkeypatch.setattr(partial_pooling, "step_length", lambda *pair: 1.0)
    losses, last, rows = [], [], data.rows["train"]
    inputs = [torch.cat([data.x[i], torch.ones(len(i), 1)], 1) for i in rows]
    scale = torch.cat(inputs).square().mean(0)[:, None]

    def penalised_loss(at, centre, server):
        penalty = (server.penalty * scale * centre.square()).sum() + ((at - centre).square() / server.spread).sum()
        fit_to = [cross_entropy(x @ c, data.y[i], reduction="sum") for x, c, i in zip(inputs, at, rows, strict=True)]
        return sum(fit_to) + penalty / 2

    class Loose(PartialPooling):
        def start(self, roster):
            server = super().start(roster)
            return server._replace(spread=server.spread + 1e3, penalty=server.penalty * 1e-4)

        def is_solved(self, server):
            return False

        def aggregate(self, roster, server, cohort, uploads):
            server = super().aggregate(roster, server, cohort, uploads)
            losses.append(float(penalised_loss(server.at, server.centre_at, server)))
            last[:] = [server]
            return server

    fit(Loose(), data, linear(2, 2), rounds=40)
    rise = max(after - before for before, after in pairwise(losses))
    assert (rise < 1e-6) == taken_back
    if taken_back:
        free = [torch.zeros_like(t).requires_grad_() for t in (last[0].at, last[0].centre_at)]
        solver = torch.optim.LBFGS(free, max_iter=2000, tolerance_change=1e-14, line_search_fn="strong_wolfe")

        def closure():
            solver.zero_grad()
            loss = penalised_loss(*free, last[0])
            loss.backward()
            return loss

        solver.step(closure)
        assert losses[-1] == pytest.approx(closure().item(), rel=0.02)


def test_a_step_of_newtons_method_moves_no_output_much_farther_than_it_had_come(monkeypatch):
    """Steps that leap to a million end ten beyond where outputs were, for inputs of root mean square."""
    x, client = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)).double(), torch.arange(60) % 3
    data = Federation.from_arrays(x, (x[:, 0] > 0).long(), client)
    train = torch.cat(list(data.rows["train"]))
    scale = torch.cat([x[train].square().mean(0), torch.ones(1)])[:, None]  # [f, 1]

    def leap(server, *how, **settings):
        return server._replace(coefficients=server.coefficients + 1e6, centre=server.centre - 1e6)

    monkeypatch.setattr(partial_pooling, "step", leap)
    monkeypatch.setattr(partial_pooling, "step_length", lambda *pair: 1.0)
    sizes = []

    class Watched(PartialPooling):
        def aggregate(self, roster, server, cohort, uploads):
            server = super().aggregate(roster, server, cohort, uploads)
            sizes.append([(part.square() * scale).sum(-2).sqrt() for part in (server.coefficients, server.centre)])
            return server

    fit(Watched(), data, linear(2, 2), rounds=2)
    for size, expected in zip(sizes, (10.0, 30.0), strict=True):
        for part in size:
            torch.testing.assert_close(part, torch.full_like(part, expected))


def test_noise_of_few_rows_is_estimated_by_those_that_a_clients_own_mean_leaves():
    """Four rows of each client and three inputs fit them exactly: noise does not shrink to 0, nor do slopes run off."""
    draw = torch.Generator().manual_seed(0)
    client, x = torch.arange(140 * 7) // 7, torch.randn(140 * 7, 3, generator=draw)
    level = 3 * torch.randn(140, generator=draw)[client]
    y = level + x @ torch.tensor([1.0, -1.0, 0.5]) + torch.randn(140 * 7, generator=draw)
    data = Federation.from_arrays(x, y, client)
    run = solved(data, linear(), rounds=20, units="client")
    assert float(coefficients(run)[:, :3].std(0).max()) < 0.5
    first = solved(data, linear(), rounds=1, units="client")
    assert float(run.history.test("mixed").mean()) < 1.02 * float(first.history.test("mixed").mean())


def test_units_of_labels_are_of_all_rows_alike_in_each_round():
    """Scaled inputs of one client have its answers and all others' as they were, and it is solved in a few rounds."""
    data, _, _ = federation(0.7, 1.0)
    labels = replace(data, y=(data.y > 0).long(), task=Classification(2))
    x = data.x.clone()
    first = torch.cat([data.rows[split][0] for split in ("train", "validation", "test")])
    x[first] = 50 * x[first] + 7
    runs = [solved(replace(labels, x=one), linear(outputs=2), 20, units="client", common=0.0) for one in (data.x, x)]
    one, other = map(coefficients, runs)
    assert runs[0].history.cost.done < 20
    torch.testing.assert_close(one[1:], other[1:], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(one[0, :6], 50 * other[0, :6], rtol=1e-3, atol=1e-3)


def test_changes_are_solved_by_each_client_wherever_its_series_has_gone():
    """Of y_t = y_(t-1) + phi_i (y_(t-1) - y_(t-2)) + noise with a drift, a client's head has its own phi_i."""
    draw, phi = np.random.default_rng(0), np.array([-0.6, 0.0, 0.6])
    values = np.zeros((400, 3))
    for t in range(2, 400):
        values[t] = values[t - 1] + phi * (values[t - 1] - values[t - 2]) + 1 + 0.5 * draw.normal(size=3)
    rows = {"who": np.repeat(["a", "b", "c"], 400), "at": np.tile(np.arange(400), 3), "level": values.T.ravel()}
    data = from_frame(polars.DataFrame(rows), client="who", target="level", time="at", past=2, horizon=1)
    run = solved(data, changes((2, 1), 1), rounds=4)
    for i in range(3):
        head = run.model(position=i).head
        assert -float(head.weight[0, 0]) == pytest.approx(phi[i], abs=0.1)
        assert float(head.bias[0]) * data.task.deviation == pytest.approx(1, abs=0.15)
    # Test readings lie above all of training, where a model of levels has seen nothing.
    errors = {
        name: model_of.summary.scores["mixed"]["mean"]
        for name, model_of in (("changes", run), ("linear", solved(data, default_model(data, "linear"), rounds=4)))
    }
    assert errors["changes"] < 0.45  # 0.4 by the noise alone
    assert errors["changes"] <= errors["linear"]


def test_a_repeated_season_is_solved_with_the_gain_and_the_way_back_of_each_client():
    """Seasons of three, whose level moves by a share of its distance from the window's mean, and by a gain."""
    draw, back, gain = np.random.default_rng(0), np.array([0.0, 0.5]), np.array([1.0, 0.0])
    x = np.repeat(draw.normal(size=(400, 2)), 3, 1) + np.tile([0.0, 5.0, 2.0], 2)  # two seasons, each at its level
    who = np.arange(400) % 2
    away = x.mean(1) - x[:, 3:].mean(1)
    y = np.tile(x[:, 3:], 2)[:, :4] + (back[who] * away + gain[who])[:, None]
    data = Federation.from_arrays(*map(torch.from_numpy, (x[..., None], y, who)), task=Forecasting())
    assert usual_season(data) == 3
    assert candidate_models(data)[:2] == ("repeat", "repeat,season=3")
    run = solved(data, default_model(data, "repeat", {"season": 3}), rounds=6)
    for i in range(2):
        head = run.model(position=i).head
        np.testing.assert_allclose(head.weight.detach(), np.full((4, 1), back[i]), atol=0.02)
        np.testing.assert_allclose(head.bias.detach(), np.full(4, gain[i]), atol=0.02)


def test_a_repeated_season_begins_as_the_naive_forecast():
    module, x = repeat((5, 2), 4, season=3), torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(1))
    torch.nn.init.zeros_(module.head.weight)
    torch.nn.init.zeros_(module.head.bias)
    assert torch.equal(module(x), x[:, [2, 3, 4, 2], 0])
    for shape, season, why in (((5,), 1, "must be a window"), ((5, 2), 6, "from 1 to 5 steps"), ((5, 2), 0, "got 0")):
        with pytest.raises(UsageError, match=why):
            repeat(shape, 1, season=season)


def test_a_forecast_of_changes_rises_with_its_window():
    module, x = changes((3, 2), 2), torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(1))
    rise = torch.tensor([7.0, 0.0])
    torch.testing.assert_close(module(x + rise), module(x) + 7)
    torch.nn.init.zeros_(module.head.weight)
    torch.nn.init.zeros_(module.head.bias)
    assert torch.equal(module(x), x[:, -1, :1].expand(-1, 2))
    with pytest.raises(UsageError, match=r"must be a window of readings \[past, features\]; got shape \[4\]"):
        changes((4,), 1)


@pytest.mark.parametrize("settings", [{}, {"units": "client"}, {"alone": 1.0}], ids=str)
@pytest.mark.parametrize("model", ["linear", "changes"])
def test_quantiles_are_a_forecast_and_those_of_the_clients_own_errors(model, settings):
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(240, 4, 2, generator=draw), torch.arange(240) % 4
    y = x[:, -1:, 0] + torch.tensor([0.0, 1.0]) + 0.3 * torch.randn(240, 2, generator=draw) * (1 + client[:, None])
    y[::7, 1] = torch.nan
    levels = (0.12, 0.5, 0.88)
    parts = [
        Federation.from_arrays(x, y, client, task=task)
        for task in (Forecasting(1.0, 2.0), Quantiles(1.0, 2.0, quantiles=levels))
    ]
    forecasts, quantiles = (fit(PartialPooling(**settings), part, default_model(part, model)) for part in parts)
    for i, name in enumerate(quantiles.federation.names):
        train = quantiles.federation.rows["train"][i]
        with torch.no_grad():
            forecast, answers = forecasts.model(name)(x).double(), quantiles.model(name)(x).double().view(-1, 2, 3)
        errors = ((y - 1.0) / 2.0 - forecast)[train].numpy()
        for ahead in range(2):
            present = errors[~np.isnan(errors[:, ahead]), ahead]
            expected = forecast[:, ahead, None].numpy() + np.quantile(
                present, ranks(levels, len(present)), method="inverted_cdf"
            )
            np.testing.assert_allclose(answers[:, ahead].numpy(), expected, atol=1e-5)


def ranks(levels, count):
    """Those by which a new value lies between two of so many as often as the levels say."""
    return np.clip([0.5 + (level - 0.5) * (count + 1) / count for level in levels], 0, 1)


def test_weighted_quantiles_are_those_of_repeated_rows():
    draw = np.random.default_rng(0)
    values, weights = draw.normal(size=(30, 2)), draw.integers(0, 4, (30, 2)).astype(float)
    levels = torch.tensor([0.05, 0.5, 0.75, 1.0], dtype=torch.float64)
    every = levels[:, None].expand(-1, 2)
    quantiles = partial_pooling.weighted_quantiles(torch.from_numpy(values), torch.from_numpy(weights), every)
    for ahead in range(2):
        rows = values[:, ahead].repeat(weights[:, ahead].astype(int))
        np.testing.assert_array_equal(quantiles[:, ahead], np.quantile(rows, levels.numpy(), method="inverted_cdf"))
    assert (partial_pooling.weighted_quantiles(torch.ones(3, 2), torch.zeros(3, 2), every) == 0).all()


def test_a_matrix_without_an_inverse_has_that_of_its_other_directions():
    """As a client's has where an exact answer leaves no noise; worked out by hand, beside one that has an inverse."""
    regular = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    singular = torch.diag(torch.tensor([0.0, 4.0], dtype=torch.float64))
    first, second = partial_pooling.inverse(torch.stack([regular, singular]))
    assert first.flatten().tolist() == pytest.approx([4 / 7, -2 / 7, -2 / 7, 8 / 7])
    assert second.tolist() == [[0, 0], [0, 0.25]]
