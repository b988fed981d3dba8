"""Monotone constraints: leaves in order, splits that are refused, and answers of every client that never turn."""

import math

import numpy as np
import polars
import pytest
import torch
from scipy.optimize import minimize

import kinfed
from kinfed import Classification, Counts, Execution, Federation, Regression, UsageError
from kinfed.cli import main
from kinfed.core.engine import Rounds, run
from kinfed.core.history import History, Recorder
from kinfed.core.mixins import model_for
from kinfed.core.training import Training
from kinfed.methods.solved.monotone_leaves import find_reached, order_leaves
from kinfed.methods.solved.personal_boosting import PersonalBoosting, best_splits
from kinfed.methods.solved.standard import Standard
from kinfed.models.trees import NOWHERE, Nodes, Trees
from kinfed.runs.config.experiment import default_model
from kinfed.simulation.simulation import Simulation

SPLITS = ("train", "validation", "test")


def nodes_of(columns, thresholds):
    columns = torch.tensor([columns], dtype=torch.float64)
    return Nodes(columns, torch.tensor([thresholds], dtype=torch.float64), torch.zeros_like(columns))


def test_leaves_that_cross_meet_at_their_mean_by_hand():
    """Root on the column: -2 and 5 left of it, 1 and 9 right, so 5 and 1 cross. The other nodes split a free column."""
    nodes = nodes_of([0.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    signs = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    leaf = torch.tensor([[[-2.0], [5.0], [1.0], [9.0]]], dtype=torch.float64)
    weight = torch.tensor([[[1.0], [1.0], [3.0], [1.0]]], dtype=torch.float64)
    found = order_leaves(leaf, weight, nodes, signs)
    assert found.flatten().tolist() == [-2.0, 2.0, 2.0, 9.0]  # (5 + 3 * 1) / 4
    falling = order_leaves(leaf, weight, nodes, -signs).flatten()
    assert falling.tolist() == [3.5, 5.0, 1.0, 3.5]  # -2 and 9 cross, and 5 and 1 are on their sides of (-2 + 9) / 2
    assert order_leaves(leaf, weight, nodes_of([0.0, 1.0, 1.0], [NOWHERE, 0.0, 0.0]), signs).equal(leaf)


@pytest.mark.parametrize("seed", range(20))
def test_ordered_leaves_are_the_nearest_that_a_general_solver_finds(seed):
    draw = np.random.default_rng(seed)
    signs = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)
    columns = draw.integers(0, 3, 7).astype(float)
    thresholds = np.where(draw.random(7) < 0.2, NOWHERE, 0.0)
    leaf, weight = draw.normal(size=8), np.exp(draw.normal(size=8))
    nodes = nodes_of(columns.tolist(), thresholds.tolist())
    found = order_leaves(*(torch.from_numpy(t).reshape(1, 8, 1) for t in (leaf, weight)), nodes, signs).flatten()
    reached = find_reached(nodes)[0].numpy() > 0
    pairs = []
    for node in range(7):
        level = (node + 1).bit_length() - 1
        below = 8 >> level
        first = (node + 1 - (1 << level)) * below
        sign = float(signs[int(columns[node]), 0]) * (thresholds[node] < NOWHERE)
        left, right = range(first, first + below // 2), range(first + below // 2, first + below)
        pairs += [(a, b) if sign > 0 else (b, a) for a in left for b in right if sign and reached[a] and reached[b]]
    rule = [{"type": "ineq", "fun": lambda v, a=a, b=b: v[b] - v[a]} for a, b in pairs]
    cost = lambda v: (weight[reached] * (v[reached] - leaf[reached]) ** 2).sum()  # noqa: E731
    best = minimize(cost, np.zeros(8), constraints=rule, method="SLSQP", options={"ftol": 1e-12, "maxiter": 500}).x
    np.testing.assert_allclose(found.numpy()[reached], best[reached], atol=1e-5)
    assert all(found[a] <= found[b] for a, b in pairs)


def test_a_split_in_the_wrong_order_is_refused_by_hand():
    """Two columns, two bins each: the first gains 6^2/10 a side and falls, the second 2^2/10 a side and rises."""
    histograms = torch.zeros(1, 2, 3, 2, dtype=torch.float64)
    histograms[0, 0, :2, 0], histograms[0, 1, :2, 0] = torch.tensor([6.0, -6.0]), torch.tensor([-2.0, 2.0])
    histograms[0, :, :2, 1] = 10.0
    allowed = torch.ones(1, 2, dtype=torch.bool)
    free, rising, falling = (torch.tensor([[s], [0.0]], dtype=torch.float64) for s in (0.0, 1.0, -1.0))
    assert int(best_splits(histograms, 1, 0.0, 1.0, allowed)[0]) == 0
    assert int(best_splits(histograms, 1, 0.0, 1.0, allowed, free)[0]) == 0
    assert int(best_splits(histograms, 1, 0.0, 1.0, allowed, falling)[0]) == 0
    assert int(best_splits(histograms, 1, 0.0, 1.0, allowed, rising)[0]) == 1
    both = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    assert int(best_splits(histograms, 1, 0.0, 1.0, allowed, both)[0]) == -1
    histograms[0, 0] = torch.tensor([[-3.0, 10.0], [-3.0, 10.0], [6.0, 10.0]])  # what is missing has no order
    assert [int(part) for part in best_splits(histograms, 1, 0.0, 1.0, allowed, falling)] == [0, 1, 1]


def grow(method, task, x, y, client, monotone, count=30, executor="loop", dtype=torch.float64):
    """The clients' models, each as a function of x: [n, f]."""
    rows = [torch.from_numpy(np.flatnonzero(client == i)) for i in np.unique(client)]
    data = Federation(torch.from_numpy(x).to(dtype), torch.from_numpy(y), dict.fromkeys(SPLITS, rows), task)
    outputs = task.classes if isinstance(task, Classification) else 1
    made = Trees(x.shape[1], outputs, count, 3, [(1, 2)], monotone).to(dtype)
    fleet = Simulation(data, model_for(method, made, dtype=dtype), method, Training(), execution=Execution(executor))
    history = History(data.names, data.task)
    rounds = count + 6 if isinstance(method, PersonalBoosting) else 1
    run(fleet.method, fleet.roster(), fleet, Recorder(history), rounds=Rounds(rounds, rounds))
    return fleet.model, history.models["theta"]


def rows_of(draw, n):
    """Inputs: one that is constrained, one with holes, whether that is missing, and one more."""
    x = draw.normal(size=(n, 4))
    x[:, 2] = draw.random(n) < 0.2
    x[x[:, 2] > 0, 1] = 0.0
    return x


@pytest.mark.parametrize("kind", ["numbers", "labels", "counts"])
@pytest.mark.parametrize(
    ("method", "executor"),
    [
        (PersonalBoosting(), "loop"),
        (PersonalBoosting(penalty=0.0, least=2.0), "vmap"),
        (PersonalBoosting(penalty=math.inf), "loop"),
        (Standard(), "loop"),
    ],
    ids=["estimated", "alone", "pooled", "standard"],
)
def test_no_clients_answer_ever_turns(kind, method, executor):
    """Clients whose truth rises, falls and does neither, in single precision; each answer must rise, or stay."""
    draw = np.random.default_rng(0)
    client, x = np.arange(800) % 8, rows_of(draw, 800)
    signal = x[:, 0] * (client - 2) / 4 + x[:, 1] + 2 * np.sin(3 * x[:, 0]) + draw.normal(size=800) / 2
    task, y = Regression(), signal
    if kind == "labels":
        task, y = Classification(2), (signal > 0).astype(np.int64)
    elif kind == "counts":
        task, y = Counts(mean=1.5), draw.poisson(np.exp(signal / 2)).astype(float)
    asked = rows_of(draw, 20)
    grid = np.sort(np.concatenate([asked[:, 0], 4 * draw.normal(size=40)]))
    turns = {}
    for sign in (0, 1, -1):
        model, thetas = grow(method, task, x, y, client, [sign, 0, 0, 0], 20, executor, torch.float32)
        steps = []
        for row in asked:
            lines = np.tile(row, (len(grid), 1))
            lines[:, 0] = grid
            outputs = torch.stack([model(theta, torch.from_numpy(lines).float()) for theta in thetas])
            answer = outputs.diff(dim=2) if kind == "labels" else outputs
            steps.append(answer[..., 0].diff(dim=1))
        turns[sign] = torch.stack(steps, 1)  # [N, rows, grid - 1]
    assert (turns[0] < -0.01).any(2).any(1).sum() >= 6  # clients that fall somewhere if they may
    assert (turns[0] > 0.01).any(2).any(1).sum() >= 6
    assert turns[1].min() >= 0
    assert turns[-1].max() <= 0
    assert (turns[1] > 0.01).any()


def test_what_does_not_bind_changes_nothing():
    """To the bit, where every client has the same inputs, and targets are 0, then 1 or 2 times what is its own."""
    client, x = np.arange(240) % 6, np.zeros((240, 4))
    x[:, 0], x[:, 3] = np.arange(240) // 12 - 9.5, np.arange(240) // 6 % 2
    y = (4 + client) * (x[:, 0] > 0) * (1 + x[:, 3])
    how = PersonalBoosting(penalty=1.0)
    free, rising, falling = (grow(how, Regression(), x, y, client, [sign, 0, 0, 0]) for sign in (0, 1, -1))
    for theirs, mine, none in zip(free[1], rising[1], falling[1], strict=True):
        answers = [made[0](theta, torch.from_numpy(x)) for made, theta in ((free, theirs), (rising, mine))]
        assert torch.equal(*answers)
        assert len(answers[0].unique()) == 3
        level = falling[0](none, torch.from_numpy(x[x[:, 3] > 0]))
        torch.testing.assert_close(level, level[:1].expand_as(level), rtol=1e-12, atol=0)


def test_what_has_no_order_is_refused_in_one_line():
    x, client = rows_of(np.random.default_rng(0), 60), np.arange(60) % 3
    with pytest.raises(UsageError, match="of 3 classes none is the one whose probability is to rise"):
        grow(PersonalBoosting(), Classification(3), x, client, client, [1, 0, 0, 0])
    with pytest.raises(UsageError, match="of 3 classes none"):
        grow(Standard(), Classification(3), x, client, client, [1, 0, 0, 0])
    with pytest.raises(UsageError, match="FedAvg does not keep answers monotone; take personal-boosting or standard"):
        grow(kinfed.FedAvg(), Regression(), x, x[:, 0], client, [1, 0, 0, 0])
    made = Trees(4, 1, 5, 2, [], [1, 0, 0, 0])
    torch.nn.init.constant_(made.head.weight, -0.5)
    data = Federation.from_arrays(x.astype(np.float32), x[:, :1].astype(np.float32), client)
    with pytest.raises(UsageError, match="the linear layer that trees are added to goes the other way"):
        kinfed.fit(PersonalBoosting(), data, made, rounds=1)


@pytest.fixture(scope="module")
def wards(tmp_path_factory):
    """Wards where risk rises with age in most, and falls with dose."""
    draw, n = np.random.default_rng(3), 300
    ward, age, dose = np.arange(n) % 5, draw.uniform(20, 90, n).round(1), draw.uniform(0, 10, n).round(2)
    sex = draw.choice(["f", "m"], n)
    risk = 0.05 * age * (ward - 1) - 0.4 * dose + 2 * (sex == "m") + np.sin(age / 4) + draw.normal(size=n)
    columns = {"ward": [f"w{i}" for i in ward], "patient age": [None, *age[1:]], "dose": dose, "sex": sex}
    frame = polars.DataFrame(columns | {"risk": risk.round(3), "ill": np.where(risk > 2, "yes", "no")})
    path = tmp_path_factory.mktemp("wards") / "t.csv"
    frame.write_csv(path)
    return path


@pytest.mark.parametrize(("target", "ignore"), [("risk", "ill"), ("ill", "risk")])
def test_a_table_names_columns_and_predictions_follow(wards, tmp_path, target, ignore):
    asked = ["run", str(wards), "--client", "ward", "--target", target, "--ignore", ignore, "--quiet", "rounds=40"]
    asked += ["--method", "personal-boosting", "model.name=trees", "model.trees=30", "evaluate_every=40"]
    asked += ['model.monotone=["patient age:+", "dose:-"]', "--beside", "local", "--out", str(tmp_path / "run")]
    assert main(asked) == 0
    opened = kinfed.Run.open(tmp_path / "run")
    grid = {"patient age": np.linspace(10, 100, 91), "dose": np.linspace(-1, 12, 91)}
    for name, sign in (("patient age", 1), ("dose", -1)):
        for ward in opened.names:
            for sex in ("f", "m"):
                frame = polars.DataFrame({"patient age": [50.0] * 91, "dose": [5.0] * 91, "sex": [sex] * 91})
                answers = opened.predict(ward, frame.with_columns(polars.Series(name, grid[name])))
                steps = sign * answers["risk" if target == "risk" else "P(yes)"].diff().drop_nulls()
                assert steps.min() >= 0
        assert steps.max() > 0


@pytest.mark.parametrize(
    ("monotone", "why"),
    [
        ("dose", "write COLUMN:+ or COLUMN:-, such as age:+; got 'dose'"),
        ("dose:up", "write COLUMN:+ or COLUMN:-, such as age:+; got 'dose:up'"),
        ("dise:+", "there is no input 'dise'; did you mean 'dose'?"),
        ("sex:+", "'sex' is a category, and only numbers have an order; leave it out"),
        ("dose:+ dose:-", "'dose' cannot both rise and fall; leave one of them out"),
    ],
)
def test_columns_that_cannot_be_constrained_are_told_in_one_line(wards, tmp_path, capsys, monotone, why):
    asked = ["run", str(wards), "--client", "ward", "--target", "risk", "--method", "personal-boosting", "--quiet"]
    assert main([*asked, "model.name=trees", f"model.monotone={monotone}", "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"model.monotone: {why}" in err
    assert not (tmp_path / "run" / "summary.json").exists()


def test_arrays_have_no_columns_to_constrain():
    data = Federation.from_arrays(np.zeros((20, 3), np.float32), np.arange(20) % 2, np.arange(20) % 4)
    with pytest.raises(UsageError, match="names columns of a table, and there is none; leave it out"):
        default_model(data, "trees", {"monotone": "a:+"})


def test_a_choice_with_a_constraint_is_refused_before_anything_is_read(wards, tmp_path, capsys):
    asked = ["run", str(wards), "--client", "ward", "--target", "risk", "--out", str(tmp_path / "run")]
    assert main([*asked, "model.name=trees", "model.monotone=dose:-"]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("kinfed: choosing compares with Local and FedAvg, which do not keep")
