"""Mixed models of labels and counts against Laplace's approximation written out densely, and against integrals."""

import json
import math
from dataclasses import replace

import numpy as np
import polars
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit, gammaln

import kinfed
from kinfed import Federation, Participation, Split, UsageError, fit
from kinfed.cli import main
from kinfed.core.tasks import Counts
from kinfed.core.trees import Axis, axes
from kinfed.data.tables.columns import Number
from kinfed.data.tables.schema import Description
from kinfed.methods.solved.laplace import Rows, find_mode, log_marginal
from kinfed.methods.solved.mixed_model import MixedModel
from kinfed.models.linear import linear

MEAN = 2.0  # over which the model's outputs are, of counts


def drawn(counts, clients=25, rows=15, seed=0, factor=((0.8, 0.0), (0.3, 0.4))):
    """[N, n, 3] an input, its 1 and targets: intercepts and slopes differ."""
    draw = np.random.default_rng(seed)
    own = np.array([0.6, 0.3]) + draw.normal(size=(clients, 2)) @ np.array(factor).T
    x = np.stack([draw.normal(size=(clients, rows)), np.ones((clients, rows))], 2)
    eta = np.einsum("nrf,nf->nr", x, own)
    y = draw.poisson(np.exp(eta)) if counts else draw.random(eta.shape) < expit(eta)
    return np.concatenate([x, y[..., None]], 2)


def solve(table, counts, rounds=60, **settings):
    """A run on all rows of a table [N, n, 3]."""
    clients, rows = table.shape[:2]
    flat = torch.from_numpy(table.reshape(-1, 3))
    y, kind = (flat[:, 2], {"task": Counts(mean=MEAN)}) if counts else (flat[:, 2].long(), {})
    who = torch.arange(clients).repeat_interleave(rows)
    federation = Federation.from_arrays(flat[:, :1], y, who, split=Split(validation=0), **kind)
    federation.rows["train"] = [torch.arange(rows) + rows * i for i in range(clients)]
    module = linear((1,), 1 if counts else 2).double()
    federation = replace(federation, columns=Description("client", (Number("x", 0.0, 1.0, 0.0, 0),)))
    return fit(MixedModel(**settings), federation, module, rounds=rounds)


def log_density(counts, eta, y):
    """[] of targets y: [n] at linear predictors eta: [n]."""
    if counts:
        return (y * eta - np.exp(eta) - gammaln(y + 1)).sum()
    return (y * eta - np.logaddexp(0, eta)).sum()


def deviance(table, counts, fixed, factor, at=None):
    """Twice the negative logarithm of Laplace's approximation; at: inputs that differ, the last ones by default."""
    value = 0.0
    for client in table:
        x, y, z = client[:, :2], client[:, 2], client[:, at or range(2 - len(factor), 2)] @ factor

        def loss(u, x=x, y=y, z=z):
            return u @ u / 2 - log_density(counts, x @ fixed + z @ u, y)

        u = minimize(loss, np.zeros(z.shape[1]), method="BFGS", options={"gtol": 1e-8}).x
        eta = x @ fixed + z @ u
        weight = np.exp(eta) if counts else expit(eta) * expit(-eta)
        value += 2 * loss(u) + np.linalg.slogdet(z.T @ (weight[:, None] * z) + np.eye(len(u)))[1]
    return value


def unpack(values, random):
    """The fixed effects, and the factor of the covariance."""
    if random != "all":
        return values[:2], values[2:].reshape(1, 1)
    factor = np.zeros((2, 2))
    factor[np.tril_indices(2)] = values[2:]
    return values[:2], factor


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("random", ["intercept", "x", "all"])
def test_the_estimates_have_the_largest_likelihood(counts, random):
    """By a minimiser that knows no derivatives of theirs, and errors by differences of the same deviance."""
    table, method = drawn(counts), MixedModel(random=random)
    run = solve(table, counts, random=random)
    server = run.final.progress.server
    mine = method.generalise().estimate(server)
    fixed = mine.fixed.numpy() + np.array([0, math.log(MEAN) if counts else 0])
    factor = np.linalg.cholesky(mine.covariance.numpy())
    values = np.concatenate([fixed, factor[np.tril_indices(len(factor))]])

    def at(values):
        return deviance(table, counts, *unpack(values, random), {"intercept": [1], "x": [0], "all": [0, 1]}[random])

    assert float(server.deviance) == pytest.approx(at(values), abs=1e-6)
    theirs = minimize(at, values + 0.05, method="BFGS")
    assert float(server.deviance) < theirs.fun + 1e-6
    step, eye = 1e-3, np.eye(len(values))
    slope = [(at(values + step * i) - at(values - step * i)) / (2 * step) for i in eye]
    assert slope == pytest.approx(np.zeros(len(values)), abs=1e-2)
    curvature = [
        [
            sum(a * b * at(values + step * (a * i + b * j)) for a in (-1, 1) for b in (-1, 1)) / (4 * step**2)
            for j in eye
        ]
        for i in eye
    ]
    inverse = np.linalg.inv(np.array(curvature) / 2)
    assert mine.uncertainty.numpy() == pytest.approx(inverse[:2, :2], rel=1e-2, abs=1e-5)
    assert run.history.cost.done < 20


@pytest.mark.parametrize("counts", [False, True])
def test_the_approximation_is_near_the_integral(counts):
    """Of one random effect, by a grid: the error is that of Laplace's approximation, which shrinks with rows."""
    table = torch.from_numpy(drawn(counts, clients=1, rows=40)[0])
    rows = Rows(table[:, :2], table[:, 2], torch.ones(40).double(), 1.0 if counts else 0.0)
    offset, design = table[:, 0] * 0.5, table[:, 1:2] * 0.8
    mine = log_marginal(rows, offset, design, find_mode(rows, offset, design)) + rows.constant()
    grid = np.linspace(-8, 8, 8001)
    logs = [log_density(counts, offset.numpy() + 0.8 * u, table[:, 2].numpy()) - u * u / 2 for u in grid]
    integral = np.log(np.trapezoid(np.exp(np.array(logs) - max(logs)), grid)) + max(logs) - math.log(2 * math.pi) / 2
    assert float(mine) == pytest.approx(integral, abs=5e-3)


@pytest.mark.parametrize("y", [0.0, 1.0, 5e3])
def test_the_mode_is_found_from_far_away(y):
    """Where a full step of Newton's method overflows, and where all labels are the same."""
    mean = 1.0 if y > 1 else 0.0
    rows = Rows(torch.ones(6, 1).double(), torch.full((6,), y).double(), torch.ones(6).double(), mean)
    design = torch.full((6, 1), 3.0).double()
    u = find_mode(rows, torch.full((6,), -4.0).double(), design)
    slope = design[:, 0] @ (rows.y - rows.expect(-4 + design @ u)[0]) - u[0]
    assert abs(float(slope)) < 1e-6 * max(1.0, y)


def test_a_variance_that_is_none_is_zero():
    table = drawn(counts=True, factor=((0.0, 0.0), (0.0, 0.0)), seed=4)
    run = solve(table, counts=True)
    mine = MixedModel().generalise().estimate(run.final.progress.server)
    fixed = minimize(
        lambda b: -log_density(True, (table[..., :2] @ b).ravel(), table[..., 2].ravel()), np.zeros(2), tol=1e-10
    ).x
    if float(mine.covariance) < 1e-6:
        assert mine.fixed.numpy() + np.array([0, math.log(MEAN)]) == pytest.approx(fixed, abs=1e-4)
    assert float(mine.covariance) < 0.05
    assert run.history.cost.done < 60


def test_the_server_has_nothing_of_single_clients():
    server = solve(drawn(counts=False), counts=False, rounds=2).final.progress.server
    assert {*axes(server)} == {Axis.SHARED}


def test_a_few_clients_a_round_and_clients_of_one_class_get_models():
    table = drawn(counts=False, clients=20)
    table[:5, :, 2] = 1.0
    flat = torch.from_numpy(table.reshape(-1, 3))
    federation = Federation.from_arrays(
        flat[:, :1], flat[:, 2].long(), np.repeat(np.arange(20), 15), split=Split(validation=0.2)
    )
    run = fit(MixedModel(), federation, linear((1,), 2), rounds=8, participation=Participation(share=0.5))
    assert run.history.test("mixed").isfinite().all()


@pytest.fixture(scope="module", params=[False, True], ids=["labels", "counts"])
def wards(request, tmp_path_factory):
    counts, folder = request.param, tmp_path_factory.mktemp("wards")
    lines = ["ward,age,falls"]
    for i, client in enumerate(drawn(counts, clients=20, rows=20)):
        lines += [f"w{i},{50 + 9 * a},{int(y) if counts else 'yes' if y else 'no'}" for a, _, y in client]
    (folder / "wards.csv").write_text("\n".join(lines) + "\n")
    how = ["run", str(folder / "wards.csv"), "--client", "ward", "--target", "falls", "--method", "mixed-model"]
    how += ["model.name=linear", "rounds=60", f"counts={str(counts).lower()}", "--beside", "none", "--quiet"]
    assert main([*how, "--out", str(folder / "run")]) == 0
    return folder, counts


def test_explain_prints_estimates_in_the_units_of_the_table(wards, capsys):
    """Fixed effects of the rows as they are are the best at the covariance that is printed."""
    folder, counts = wards
    assert main(["explain", str(folder / "run"), "w3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["estimate"] == "ml"
    frame = polars.read_csv(folder / "wards.csv")
    target = polars.col("falls") if counts else polars.col("falls") == "yes"
    federation = kinfed.from_csv(folder / "wards.csv", client="ward", target="falls")
    tables = [
        frame[rows.numpy()].select("age", one=1.0, falls=target.cast(float)).to_numpy()
        for rows in federation.rows["train"]
    ]
    factor = np.sqrt(told["covariance"])
    fixed = np.array([told["fixed"][name][0] for name in ("age", "constant")])
    assert told["deviance"] == pytest.approx(deviance(tables, counts, fixed, factor), abs=1e-4)
    for away in ([0.01, 0], [0, 0.2]):
        for sign in (-1, 1):
            assert deviance(tables, counts, fixed + sign * np.array(away), factor) > told["deviance"]
    assert told["client"]["age"][0] == pytest.approx(fixed[0])  # the intercept alone differs


def test_explain_as_people_read_it(wards, capsys):
    folder, counts = wards
    assert main(["explain", str(folder / "run"), "w3"]) == 0
    out = capsys.readouterr().out
    what = "the logarithm of the expected count" if counts else "the log odds of 'yes' over 'no'"
    assert f"fixed effects on {what}" in out
    assert "by maximum likelihood" in out
    assert "restricted" not in out


@pytest.mark.parametrize(
    ("settings", "model", "target", "why"),
    [
        (
            {"random": "all"},
            linear((14,), 2),
            torch.arange(60) % 2,
            "of at most 12 inputs, with their 1; by method.random it has 15",
        ),
        (
            {},
            linear((14,), 3),
            torch.arange(60) % 3,
            "solves labels of two classes; there are 3; use 'partial",
        ),
        ({}, linear((14,), 3), torch.arange(60) % 2, "this model gives 3 outputs"),
        ({}, torch.nn.Linear(14, 2, bias=False), torch.arange(60) % 2, "needs a last layer with a bias"),
    ],
)
def test_what_it_does_not_solve_is_told_in_one_line(settings, model, target, why):
    federation = Federation.from_arrays(torch.randn(60, 14), target, torch.arange(60) % 4)
    with pytest.raises(UsageError, match=why):
        fit(MixedModel(**settings), federation, model, rounds=1)
