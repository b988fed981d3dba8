"""The mixed model against its likelihood, and predictions against Henderson's equations, both written out densely."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import polars
import pytest
import torch
from scipy.optimize import minimize

import kinfed
from kinfed import Execution, Federation, Participation, Split, UsageError, fit
from kinfed.cli import main
from kinfed.core.trees import Axis, axes
from kinfed.data.tables.columns import Category, Number
from kinfed.data.tables.schema import Description
from kinfed.methods.solved.mixed_model import MixedModel
from kinfed.models.linear import linear
from kinfed.report.page.html_page import page


def drawn(clients=12, rows=9, seed=0, covariance=((0.6, 0.2), (0.2, 0.3)), noise=0.7):
    """[N, n, f + 1] inputs, their 1 and targets: the slope of the first of two inputs differs, and the intercept."""
    draw = np.random.default_rng(seed)
    own = draw.multivariate_normal(np.zeros(2), covariance, clients)
    x = draw.normal(size=(clients, rows, 2)) + draw.normal(size=(clients, 1, 2))
    y = 1 + x @ [0.5, -1] + own[:, :1] + own[:, 1:] * x[..., 0] + noise * draw.normal(size=(clients, rows))
    return np.concatenate([x, np.ones((clients, rows, 1)), y[..., None]], 2)


PLAIN = Description("client", tuple(Number(name, 0.0, 1.0, 0.0, 0) for name in ("dose", "age")))


def solve(table, rounds=200, columns=None, **settings):
    """A run on all rows of a table [N, n, f + 1], whose columns may have names."""
    clients, rows = table.shape[:2]
    flat = torch.from_numpy(table.reshape(-1, table.shape[2]))
    who = torch.arange(clients).repeat_interleave(rows)
    federation = Federation.from_arrays(flat[:, :-2], flat[:, -1], who, split=Split(validation=0))
    every = [torch.arange(rows) + rows * i for i in range(clients)]
    federation.rows["train"] = every
    federation = replace(federation, columns=columns)
    return fit(MixedModel(**settings), federation, linear((table.shape[2] - 2,), 1).double(), rounds=rounds)


def minus_two_log(table, at, covariance, noise, reml):
    """By the density of all targets, with the best fixed effects; without the constants."""
    value, precision, slope, square = 0.0, 0.0, 0.0, 0.0
    for client in table:
        x, y = client[:, :-1], client[:, -1]
        v = x[:, at] @ covariance @ x[:, at].T + noise * np.eye(len(x))
        value += np.linalg.slogdet(v)[1]
        inverse = np.linalg.inv(v)
        precision, slope, square = precision + x.T @ inverse @ x, slope + x.T @ inverse @ y, square + y @ inverse @ y
    value += square - slope @ np.linalg.solve(precision, slope)
    return value + (np.linalg.slogdet(precision)[1] if reml else 0.0)


def best(table, at, reml, diagonal=False):
    """The least of it, by scipy, over factors of covariances."""
    q = len(at)
    first, second = np.tril_indices(q)

    def unpack(values):
        factor = np.zeros((q, q))
        if diagonal:
            np.fill_diagonal(factor, values[:-1])
        else:
            factor[first, second] = values[:-1]
        return factor @ factor.T, math.exp(values[-1])

    count = q if diagonal else len(first)
    start = np.append(np.full(count, 0.5), -1.0)
    found = minimize(lambda v: minus_two_log(table, at, *unpack(v), reml), start, method="BFGS", tol=1e-9)
    return found.fun, *unpack(found.x)


@pytest.mark.parametrize("estimate", ["reml", "ml"])
@pytest.mark.parametrize(("random", "covariance"), [("intercept", "full"), ("all", "full"), ("all", "diagonal")])
def test_the_estimates_have_the_largest_likelihood(random, covariance, estimate):
    table = drawn(covariance=((0.6, 0.2), (0.2, 0.3)), clients=30, rows=8)
    at = np.array([2]) if random == "intercept" else np.arange(3)
    run = solve(table, random=random, covariance=covariance, estimate=estimate)
    server = run.final.progress.server
    least, theirs, noise = best(table, at, estimate == "reml", covariance == "diagonal")
    assert float(server.deviance) == pytest.approx(least, abs=1e-5)
    assert server.covariance.numpy() == pytest.approx(theirs, abs=5e-3)
    assert float(server.noise) == pytest.approx(noise, rel=1e-3)
    assert run.history.cost.done < 60


@pytest.mark.parametrize(
    ("random", "at"),
    [("dose intercept", [0, 2]), ("age", [1]), (("age", "dose"), [0, 1]), ("dose age intercept", [0, 1, 2])],
)
def test_named_columns_alone_differ_between_clients(random, at):
    """In the order of inputs, whatever the order of names; clients' coefficients of others are those of all."""
    table = drawn(clients=30, rows=8)
    run = solve(table, random=random, columns=PLAIN)
    server = run.final.progress.server
    assert server.at.tolist() == at
    least, theirs, noise = best(table, np.array(at), reml=True)
    assert float(server.deviance) == pytest.approx(least, abs=1e-5)
    assert server.covariance.numpy() == pytest.approx(theirs, abs=5e-3)
    assert float(server.noise) == pytest.approx(noise, rel=1e-3)
    theta = torch.stack([run.theta(name) for name in run.names])
    assert [i for i in range(3) if float(theta[:, i].std()) > 1e-3] == at


def test_a_category_has_a_random_effect_for_each_of_its_inputs():
    table = drawn(clients=5, rows=8)
    kinds = Description("client", (Category("ward", ("a", "b"), 2, 0, 0),))
    assert solve(table, rounds=1, random="ward", columns=kinds).final.progress.server.at.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("random", "columns", "module", "why"),
    [
        ("doze intercept", PLAIN, linear((2,), 1), "'doze' is no column of the inputs; did you mean 'dose'"),
        ("dose all", PLAIN, linear((2,), 1), "'all' is no column of the inputs; known: age, dose, intercept"),
        ("dose dose", PLAIN, linear((2,), 1), "must name columns once each, or 'intercept' or 'all'; got 'dose dose'"),
        ("", PLAIN, linear((2,), 1), "must name columns once each, or 'intercept' or 'all'; got ''"),
        ("dose", None, linear((2,), 1), "inputs are no columns of a table; use 'intercept' or 'all'; got 'dose'"),
        (
            "dose",
            PLAIN,
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)),
            "only the inputs of a linear model are columns; use model.name=linear",
        ),
    ],
)
def test_random_effects_of_no_column_are_refused_in_one_line(random, columns, module, why):
    federation = Federation.from_arrays(torch.randn(60, 2), torch.rand(60), torch.arange(60) % 4)
    with pytest.raises(UsageError, match=why):
        fit(MixedModel(random=random), replace(federation, columns=columns), module, rounds=1)


def test_predictions_and_their_errors_are_those_of_hendersons_equations():
    """One system of all effects (Henderson 1975): its solution are the estimates, its inverse their covariances."""
    table = drawn()
    run = solve(table, random="all")
    server, f, n = run.final.progress.server, 3, len(table)
    system, right = np.zeros((f * (n + 1),) * 2), np.zeros(f * (n + 1))
    for i, client in enumerate(table):
        x, y, own = client[:, :-1], client[:, -1], slice(f * (i + 1), f * (i + 2))
        for a in (slice(0, f), own):
            right[a] += x.T @ y
            for b in (slice(0, f), own):
                system[a, b] += x.T @ x
        system[own, own] += float(server.noise) * np.linalg.inv(server.covariance.numpy())
    effects, inverse = np.linalg.solve(system, right), float(server.noise) * np.linalg.inv(system)
    assert server.fixed.numpy() == pytest.approx(effects[:f], abs=1e-8)
    assert server.uncertainty.numpy() == pytest.approx(inverse[:f, :f], rel=1e-6)
    for i, name in enumerate(run.names):
        own = slice(f * (i + 1), f * (i + 2))
        assert run.theta(name).numpy() == pytest.approx(effects[:f] + effects[own], abs=1e-8)
        both = inverse[:f, :f] + inverse[:f, own] + inverse[own, :f] + inverse[own, own]
        assert run.personal(name).covariance.numpy() == pytest.approx(both, rel=1e-6)


@pytest.mark.parametrize("estimate", ["reml", "ml"])
def test_a_singular_covariance_is_found(estimate):
    """A single random number moves intercept and slope together, so that their correlation is 1."""
    table = drawn(clients=40, covariance=((0.5, 0.5), (0.5, 0.5)), seed=3)[..., [0, 2, 3]]
    run = solve(table, random="all", estimate=estimate)
    server = run.final.progress.server
    least, theirs, _ = best(table, np.arange(2), estimate == "reml")
    assert float(server.deviance) == pytest.approx(least, abs=1e-4)
    assert server.covariance.numpy() == pytest.approx(theirs, abs=1e-2)


def test_clients_that_do_not_differ_share_a_regression():
    table = drawn(covariance=((0, 0), (0, 0)), clients=15, seed=1)
    run = solve(table, random="all", covariance="diagonal", estimate="ml")
    rows = table.reshape(-1, 4)
    plain = np.linalg.lstsq(rows[:, :-1], rows[:, -1], rcond=None)[0]
    assert run.theta(position=0).numpy() == pytest.approx(plain, abs=0.2)
    assert run.final.progress.server.covariance.numpy() == pytest.approx(np.zeros((3, 3)), abs=0.05)


def test_the_server_has_nothing_of_single_clients():
    server = solve(drawn(), rounds=2).final.progress.server
    assert {*axes(server)} == {Axis.SHARED}


def test_a_few_clients_a_round_and_a_newcomer_get_models():
    table = drawn(clients=20)
    run = fit(
        MixedModel(),
        Federation.from_arrays(
            table[..., :2].reshape(-1, 2),
            table[..., -1].ravel(),
            np.repeat(np.arange(20), 9),
            split=Split(validation=0.2),
        ),
        linear((2,), 1),
        rounds=10,
        participation=Participation(share=0.5),
        execution=Execution("loop"),
    )
    assert run.history.test("mixed").isfinite().all()


def test_columns_that_say_the_same_do_no_harm():
    table = drawn()
    doubled = np.concatenate([table[..., :1], table], 2)  # a column that stands twice
    once, twice = solve(table), solve(doubled)
    x = torch.from_numpy(table[0, :, :2])
    answers = twice.model(position=0)(torch.from_numpy(doubled[0, :, :3]))
    assert answers.detach() == pytest.approx(once.model(position=0)(x).detach(), abs=1e-6)


@pytest.fixture(scope="module", params=["all", "intercept age", "age"])
def study(tmp_path_factory, request):
    folder, table = tmp_path_factory.mktemp("study"), drawn(clients=15, rows=20)
    lines = ["site,dose,age,effect"]
    for i, client in enumerate(table):
        lines += [f"s{i},{100 + 20 * a},{50 + 9 * b},{30 + 4 * y}" for a, b, _, y in client]
    (folder / "study.csv").write_text("\n".join(lines) + "\n")
    how = ["run", str(folder / "study.csv"), "--client", "site", "--target", "effect", "--method", "mixed-model"]
    how += ["model.name=linear", f"method.random={request.param}", "rounds=60", "--beside", "none", "--quiet"]
    assert main([*how, "--out", str(folder / "run")]) == 0
    return folder


def test_explain_prints_estimates_in_the_units_of_the_table(study, capsys):
    """They are those of a run on the rows as they are, and errors and likelihood move with the units."""
    assert main(["explain", str(study / "run"), "s3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["explain", str(study / "run"), "s3"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("fixed effects", "restricted maximum likelihood", "-2 log-likelihood", "dose"))
    frame = polars.read_csv(study / "study.csv")
    federation = kinfed.from_csv(study / "study.csv", client="site", target="effect")
    at = [rows.numpy() for rows in federation.rows["train"]]
    tables = [frame[rows].with_columns(one=1.0).select("dose", "age", "one", "effect").to_numpy() for rows in at]
    covariance, noise = np.array(told["covariance"]), told["noise"]
    determinant = precision = slope = square = 0.0
    for t in tables:
        x, y = t[:, :3], t[:, 3]
        z = x[:, [("dose", "age", "constant").index(name) for name in told["random"]]]
        v = z @ covariance @ z.T + noise * np.eye(len(t))
        determinant += np.linalg.slogdet(v)[1]
        precision, slope = precision + x.T @ np.linalg.solve(v, x), slope + x.T @ np.linalg.solve(v, y)
        square += y @ np.linalg.solve(v, y)
    fixed, errors = np.linalg.solve(precision, slope), np.sqrt(np.diagonal(np.linalg.inv(precision)))
    value = determinant + square - slope @ fixed + np.linalg.slogdet(precision)[1]
    value += (sum(map(len, tables)) - 3) * math.log(2 * math.pi)
    assert told["deviance"] == pytest.approx(value, abs=1e-4)
    assert [told["fixed"][name][1] for name in ("dose", "age", "constant")] == pytest.approx(errors, rel=1e-5)
    assert [told["fixed"][name][0] for name in ("dose", "age", "constant")] == pytest.approx(fixed, rel=1e-5)
    assert (told["clients"], told["rows"]) == (15, sum(map(len, tables)))


def test_the_report_has_the_tables_that_explain_prints(study, capsys):
    assert main(["explain", str(study / "run"), "s3"]) == 0
    lines = capsys.readouterr().out.partition("coefficients of 's3'")[0].splitlines()
    text = re.sub(r"(<[^>]*>|\s)+", " ", page([study / "run"]))
    for line in filter(None, lines):
        assert re.sub(r"\s+", " ", line).strip() in text


@pytest.mark.parametrize(
    ("settings", "model", "target", "why"),
    [
        (
            {"random": "all"},
            linear((40,), 1),
            torch.rand(60),
            "of at most 32 inputs, with their 1; by method.random it has 41; name fewer",
        ),
        ({}, torch.nn.Linear(40, 1, bias=False), torch.rand(60), "needs a last layer with a bias"),
        ({}, linear((40,), 2), torch.rand(60, 2), "solves one number for each row, and this model gives 2 outputs"),
    ],
)
def test_what_it_does_not_solve_is_told_in_one_line(settings, model, target, why):
    federation = Federation.from_arrays(torch.randn(60, 40), target, torch.arange(60) % 4)
    with pytest.raises(UsageError, match=why):
        fit(MixedModel(**settings), federation, model, rounds=1)


def test_a_body_before_the_last_layer_is_no_table(study, tmp_path, capsys):
    how = ["run", str(study / "study.csv"), "--client", "site", "--target", "effect", "--method", "mixed-model"]
    assert (
        main([*how, "model.name=mlp", "rounds=3", "--beside", "none", "--quiet", "--out", str(tmp_path / "run")]) == 0
    )
    assert main(["explain", str(tmp_path / "run"), "s3"]) == 2
    why = "only a linear model has coefficients by column; run with model.name=linear"
    assert why in capsys.readouterr().err
    assert f"mixed-model is shown without its estimates: {tmp_path / 'run'}: {why}" in page([tmp_path / "run"])
