from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kinfed.core.client import Training
from kinfed.core.engine import run
from kinfed.core.history import History
from kinfed.core.model import Model
from kinfed.core.optimiser import SGD
from kinfed.core.tasks import Regression
from kinfed.data.federation import Federation
from kinfed.errors import UsageError
from kinfed.methods import FedAGHN, FedAvg, Local, fedaghn
from kinfed.methods.fedaghn import Server, Upload
from kinfed.ops.similarity import cosine
from kinfed.ops.sketch import SIZE
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed_papers.fedaghn.ablations import Printed

float64 = torch.float64
paper = partial(FedAGHN, feedback="held-out")  # whose gradient the tests choose
printed = partial(Printed, feedback="held-out")
SIGNS = {paper: 1, printed: -1}


def close(found, expected, atol=1e-6):
    """Equal to the printed digits."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=float64)


def two_layers():
    """Layers of 4 + 2 and 2 + 1 entries."""
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def state(theta, change, home=0.03, sharpness=1.0, layers=1):
    """A server whose clients have all taken part."""
    ones = torch.ones(len(theta), layers, dtype=float64)
    seen, nothing = torch.ones(len(theta), dtype=torch.bool), theta[:, :0]
    return Server(theta, change, seen, home * ones, sharpness * ones, nothing)


def anything(known, seed=0):
    """A server with random models, updates, p and q."""
    count, layers, d = len(known), len(known.layout.layers), known.layout.size
    server = state(random(count, d, seed=seed), random(count, d, seed=seed + 1), layers=layers)
    home = 0.1 + random(count, layers, seed=seed + 2).abs()
    return server._replace(home=home, sharpness=random(count, layers, seed=seed + 3))


def derivatives(known, server, new):
    """Closed forms of g_p, g_q: [N, L], of the mixed models contracted with new: [N, d]."""
    count = len(known)
    slope_home, slope_sharpness = torch.zeros(2, count, len(known.layout.layers), dtype=float64)
    for r, layer in enumerate(known.layout.layers):
        theta, change, towards = (t[:, layer.trainable] for t in (server.theta, server.change, new))
        for i in range(count):
            p, q, others = server.home[i, r], server.sharpness[i, r], [j for j in range(count) if j != i]
            c = torch.stack([torch.cosine_similarity(change[i], change[j], dim=0) for j in others])
            s = (q * c).exp() / (q * c).exp().sum()
            inner = torch.stack([theta[j] @ towards[i] for j in others])
            slope_home[i, r] = (theta[i] @ towards[i] - s @ inner) / (1 + p) ** 2
            slope_sharpness[i, r] = (s * (c - s @ c)) @ inner / (1 + p)
    return slope_home, slope_sharpness


@pytest.fixture
def example(worked, roster):
    numbers = worked["fedaghn"]
    return numbers, roster(3, size=2), state(numbers["Theta"], numbers["Delta"])


def test_graph_by_hand(example):
    numbers, known, server = example
    close(cosine(server.change @ server.change.T), numbers["cos"])
    graph = paper().graph(known, server, known.everyone)[0]
    close(graph, numbers["alpha"])
    assert (graph - numbers["alpha_all_j_reading"]).abs().max() > 0.01  # a softmax over oneself too is another method
    close(paper().send(known, server, known.everyone).theta, numbers["theta_bar"])
    close(paper().graph(known, server._replace(sharpness=0 * server.sharpness), known.everyone)[0], numbers["alpha_q0"])
    close(paper().graph(known, server._replace(home=0 * server.home), known.everyone)[0], numbers["alpha_p0"])


@pytest.mark.parametrize(("made", "called"), [(paper, "descent"), (printed, "printed")], ids=["descent", "printed"])
@pytest.mark.parametrize("feedback", ["train", "held-out"])
def test_step_by_hand(example, made, called, feedback):
    numbers, known, server = example
    method = made(feedback=feedback, lr=float(numbers["eta_hn"]))
    trained = method.send(known, server, known.everyone).theta + numbers["Delta_new"]
    # The gradient on held-out examples takes the place of minus what training changed.
    upload = Upload(trained, -numbers["Delta_new"] if feedback == "held-out" else trained[:, :0])
    after = method.aggregate(known, server, known.everyone, upload)
    close(after.home[:, 0], numbers[f"p_{called}"])
    close(after.sharpness[:, 0], numbers[f"q_{called}"])
    close(SIGNS[made] * (after.home - server.home)[:, 0] / 0.005, numbers["g_p"])
    close(SIGNS[made] * (after.sharpness - server.sharpness)[:, 0] / 0.005, numbers["g_q"])
    assert torch.equal(after.theta, trained)
    close(after.change, numbers["Delta_new"], atol=1e-15)


def test_derivatives_of_the_mixed_models_by_hand(example):
    numbers, known, server = example
    for axis in range(2):  # contract with each unit vector in turn
        unit = torch.eye(2, dtype=float64)[axis].expand(3, 2)
        slope_home, slope_sharpness = derivatives(known, server, unit)
        close(slope_home[:, 0], numbers["dthetabar_dp"][:, axis])
        close(slope_sharpness[:, 0], numbers["dthetabar_dq"][:, axis])


@pytest.mark.parametrize("made", SIGNS, ids=["descent", "printed"])
@pytest.mark.parametrize("feedback", ["train", "test"])
def test_step_follows_the_closed_forms(roster, made, feedback):
    known = roster(5, two_layers())
    server, new = anything(known), random(5, 9, seed=9)
    method = made(feedback=feedback, lr=1e-3)
    trained = method.send(known, server, known.everyone).theta + (new if feedback == "train" else 7.0)
    after = method.aggregate(known, server, known.everyone, Upload(trained, -new))
    slope_home, slope_sharpness = derivatives(known, server, new)
    close(after.home, server.home + SIGNS[made] * 1e-3 * slope_home, atol=1e-15)
    close(after.sharpness, server.sharpness + SIGNS[made] * 1e-3 * slope_sharpness, atol=1e-15)


def test_closed_forms_are_finite_differences(roster):
    known, method, eps = roster(4, two_layers()), paper(), 1e-6
    server, new = anything(known), random(4, 9, seed=9)
    for name, slope in zip(("home", "sharpness"), derivatives(known, server, new), strict=True):
        for i in range(4):
            for r, layer in enumerate(known.layout.layers):
                bump = torch.zeros_like(server.home)
                bump[i, r] = eps
                ahead, behind = (
                    method.send(known, server._replace(**{name: getattr(server, name) + way * bump}), known.everyone)
                    for way in (1, -1)
                )
                moved = (ahead.theta - behind.theta) / (2 * eps)  # [N, d]
                assert float(moved[i] @ new[i]) == pytest.approx(float(slope[i, r]), abs=1e-8)
                moved[i, layer.at] = 0
                assert (moved == 0).all()  # one client's scalar of one layer moves nothing else


@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(0, 10_000))
def test_rows_are_convex_and_keep_p_of_themselves(roster, count, seed):
    known = roster(count, two_layers())
    server = anything(known, seed)
    graph = paper().graph(known, server, known.everyone)
    assert (graph >= 0).all()
    close(graph.sum(-1), torch.ones(2, count, dtype=float64), atol=1e-12)
    close(graph.diagonal(dim1=1, dim2=2), (server.home / (1 + server.home)).T, atol=1e-12)
    sent = paper().send(known, server, known.everyone).theta
    assert (sent <= server.theta.max(0).values + 1e-12).all()
    assert (sent >= server.theta.min(0).values - 1e-12).all()


def test_renaming_clients_renames_everything(roster):
    known, method, order = roster(5, two_layers()), paper(lr=0.1, feedback="train"), torch.tensor([3, 0, 4, 1, 2])
    server, trained = anything(known), random(5, 9, seed=8)
    renamed = Server(*(t[order] for t in server))
    one = method.aggregate(known, server, known.everyone, Upload(trained, trained[:, :0]))
    other = method.aggregate(known, renamed, known.everyone, Upload(trained[order], trained[:, :0]))
    for name, before, after in zip(Server._fields, one, other, strict=True):
        if name == "seen":
            assert torch.equal(before, after)
        else:
            close(after, before[order], atol=1e-13)


def test_length_of_updates_does_not_matter(roster):
    known, method = roster(4, two_layers()), paper()
    server = anything(known)
    scale = torch.tensor([1.0, 1e-3, 50.0, 7.0], dtype=float64)[:, None]
    scaled = server._replace(change=server.change * scale)
    close(method.graph(known, scaled, known.everyone), method.graph(known, server, known.everyone), atol=1e-13)


def test_layers_are_independent(roster):
    known, method = roster(4, two_layers()), paper()
    server, (first, second) = anything(known), known.layout.layers
    change, theta = server.change.clone(), server.theta.clone()
    change[:, second.at] = random(4, 3, seed=11)
    theta[:, second.at] = random(4, 3, seed=12)
    other = server._replace(change=change, theta=theta)
    before, after = (method.send(known, s, known.everyone).theta for s in (server, other))
    assert torch.equal(before[:, first.at], after[:, first.at])
    assert (before[:, second.at] != after[:, second.at]).all()


def test_identical_updates_are_listened_to_alike(roster, worked):
    known, numbers = roster(20, size=2), worked["fedaghn"]["identical_N20"]
    server = state(random(20, 2), torch.tensor([[0.3, -0.4]], dtype=float64).expand(20, 2), sharpness=3.0)
    graph = paper().graph(known, server, known.everyone)[0]
    itself = torch.eye(20, dtype=torch.bool)
    close(graph[itself], numbers["alpha_self"].expand(20))
    close(graph[~itself], numbers["alpha_other"].expand(380))


@pytest.mark.parametrize(("sharpness", "best"), [(1e4, [1, 0, 0]), (-1e4, [2, 2, 1])])
def test_extreme_sharpness_hears_one_client(example, sharpness, best):
    # By cosine: client 0 is nearest to 1 and furthest from 2, 1 from 2, 2 from 1.
    _, known, server = example
    server = state(server.theta, server.change, home=0.0, sharpness=sharpness)
    graph = paper().graph(known, server, known.everyone)[0]
    close(graph, torch.eye(3, dtype=float64)[torch.tensor(best)], atol=1e-12)


def test_large_home_is_local(examples, noisy, perceptron, executor):
    x, y = noisy(3, 2, sizes=[7, 5, 9])
    training = Training(epochs=2, batch=3, optimiser=SGD(0.1))
    method = paper(home=1e15, lr=0.0, feedback="train")
    mixed, own = (examples(perceptron(), x, y, m, training=training, executor=executor) for m in (method, Local()))
    mixed.run(3)
    own.run(3)
    close(mixed.headline, own.headline, atol=1e-12)


def test_no_sharpness_and_equal_home_is_uniform_fedavg(bowls, executor):
    clients = {"b": [0.0, 4.0, 9.0, -2.0], "h": [1.0, 2.0, 0.5, 1.5], "epochs": 2, "executor": executor}
    method = paper(home=1 / 3, sharpness=0.0, lr=0.0, feedback="train")
    trial = bowls(method, copies=[1, 2, 3, 4], **clients)
    server, shared = trial.run(4), bowls(FedAvg(), **clients).run(4)
    sent = method.send(trial.roster, server, trial.roster.everyone).theta
    close(sent, shared.theta.expand(4, 1), atol=1e-13)
    close(trial.history.relations[-1], torch.full((1, 4, 4), 0.25))


def test_equal_models_teach_nothing(roster):
    known, method = roster(4, two_layers()), paper(lr=1.0, feedback="train")
    server = anything(known)._replace(theta=random(9, seed=5).expand(4, 9).clone())
    after = method.aggregate(known, server, known.everyone, Upload(random(4, 9, seed=6), server.theta[:, :0]))
    close(after.home, server.home, atol=1e-13)
    close(after.sharpness, server.sharpness, atol=1e-13)


def test_slopes_do_not_depend_on_the_origin(roster):
    known, method = roster(4, two_layers()), paper(lr=0.1)
    server, uphill, shift = anything(known), random(4, 9, seed=6), random(9, seed=7)
    one, other = (
        method.aggregate(known, s, known.everyone, Upload(s.theta, uphill))
        for s in (server, server._replace(theta=server.theta + shift))
    )
    close(other.home, one.home, atol=1e-13)
    close(other.sharpness, one.sharpness, atol=1e-13)


def test_first_round_is_uniform_and_moves_no_scalar(bowls, executor):
    # All start from one model: only the second aggregation can tell clients apart.
    method = paper(feedback="train")
    trial = bowls(method, [[1.0, 0.0], [1.0, 1.0], [0.0, -1.0]], executor=executor, copies=[1, 2, 3])
    start = method.start(trial.roster)
    graph = method.graph(trial.roster, start, trial.roster.everyone)[0]
    expected = torch.full((3, 3), 1 / 2.06, dtype=float64).fill_diagonal_(0.03 / 1.03)
    close(graph, expected, atol=1e-14)
    server = trial.run(1)
    close(server.home, start.home, atol=1e-15)
    close(server.sharpness, start.sharpness, atol=1e-15)
    server = trial.run(2, begin=1, server=server)
    assert (server.home != start.home).all()
    assert (server.sharpness != start.sharpness).all()


def test_engine_reaches_the_worked_graph(bowls, worked, executor):
    # From 0 one step of rate 1 lands on the optima, so update and model are both the optimum.
    trial = bowls(paper(sharpness=1.0, feedback="train"), worked["fedaghn"]["Delta"], lr=1.0, executor=executor)
    trial.run(1)
    close(trial.history.relations[0][0], worked["fedaghn"]["alpha"].float())


def test_descent_lowers_the_loss_and_the_printed_sign_raises_it(roster):
    known = roster(4, two_layers())
    server, goal = anything(known), random(4, 9, seed=9)

    def loss(server):
        return float((paper().send(known, server, known.everyone).theta - goal).square().sum() / 2)

    uphill = paper().send(known, server, known.everyone).theta - goal
    found = {}
    for made in SIGNS:
        after = made(lr=1e-4).aggregate(known, server, known.everyone, Upload(server.theta, uphill))
        found[made] = loss(server._replace(home=after.home, sharpness=after.sharpness)) - loss(server)
    squares = sum(float(s.square().sum()) for s in derivatives(known, server, -uphill))
    assert found[paper] == pytest.approx(-1e-4 * squares, rel=0.02)
    assert found[printed] == pytest.approx(1e-4 * squares, rel=0.02)


def test_no_rate_freezes_the_scalars(roster):
    known = roster(4, two_layers())
    server, upload = anything(known), Upload(random(4, 9, seed=6), random(4, 9, seed=7))
    up, down = (made(lr=0.0).aggregate(known, server, known.everyone, upload) for made in (printed, paper))
    for one, other in zip(up, down, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(up.home, server.home)
    assert torch.equal(up.sharpness, server.sharpness)


def test_home_is_never_negative(example):
    numbers, known, server = example
    method = printed(feedback="train", lr=100.0)
    trained = method.send(known, server, known.everyone).theta + numbers["Delta_new"]
    after = method.aggregate(known, server, known.everyone, Upload(trained, trained[:, :0]))
    assert (after.home == 0).all()
    assert (paper().graph(known, after, known.everyone)[0].diagonal() == 0).all()


def test_zero_updates_resemble_nobody(roster):
    known, method = roster(3, size=2), paper(feedback="train")
    change = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]], dtype=float64)
    server = state(random(3, 2), change, home=0.0, sharpness=1.0)
    e = torch.tensor(1.0, dtype=float64).exp()
    expected = torch.tensor(
        [[0, 0.5, 0.5], [1 / (1 + e), 0, e / (1 + e)], [1 / (1 + e), e / (1 + e), 0]], dtype=float64
    )
    close(method.graph(known, server, known.everyone)[0], expected, atol=1e-14)
    after = method.aggregate(known, server, known.everyone, Upload(random(3, 2, seed=4), server.theta[:, :0]))
    assert all(torch.isfinite(t).all() for t in after)


def test_only_participants_move_and_newcomers_listen_to_all(roster):
    known, method, cohort = roster(4, two_layers()), paper(lr=0.1), torch.tensor([0, 2])
    server = anything(known)._replace(seen=torch.tensor([True, True, True, False]))
    graph = method.graph(known, server, known.everyone)
    third = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0], dtype=float64)
    close(graph[:, 3], third.expand(2, 4), atol=1e-14)  # no term of its own either
    assert (graph[:, :3, 3] == 0).all()
    after = method.aggregate(known, server, cohort, Upload(random(2, 9, seed=6), random(2, 9, seed=7)))
    for name, before, now in zip(Server._fields, server, after, strict=True):
        assert torch.equal(before[[1, 3]], now[[1, 3]])
        assert name == "seen" or (before[cohort] != now[cohort]).all()


def test_running_statistics_stay_with_the_client(examples, noisy, perceptron, executor):
    x, y = noisy(3, 2)
    trial = examples(perceptron(norm=True), x, y, paper(), training=Training(1, 4, SGD(0.1)), executor=executor)
    server = trial.run(2)
    statistics = ~trial.roster.layout.trainable
    models = trial.method.send(trial.roster, server, trial.roster.everyone)
    program = trial.fleet.evaluate(2, trial.roster.everyone, models)
    own = trial.own
    assert torch.equal(program.models["own"].theta, own)
    assert server.theta.shape == (3, trial.roster.layout.parameters)  # the server never sees a statistic
    both = 2 * trial.roster.layout.parameters  # a model and a gradient
    assert trial.history.bytes_up == 2 * trial.history.bytes_down == 2 * 3 * both * 8
    for i in range(3):
        assert (own[i, statistics] != own[(i + 1) % 3, statistics]).all()
    # A mixture of statistics would score the mixed model differently.
    right, wrong = own.clone(), trial.roster.theta.expand(3, -1).clone()
    for theta in (right, wrong):
        theta[:, ~statistics] = models.theta
    for i in range(3):
        losses = [float((trial.fleet.model(t[i], x[i]) - y[i]).square().mean()) for t in (right, wrong)]
        assert float(program.scores["mixed", "test", "loss"][i]) == pytest.approx(losses[0], abs=1e-12)
        assert losses[0] != pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize(("feedback", "up"), [("train", 1), ("held-out", 2)])
def test_bytes(bowls, feedback, up):
    trial = bowls(paper(feedback=feedback), [[1.0, 0.0], [0.0, 1.0]], copies=2)
    trial.run(3)
    assert (trial.history.bytes_up, trial.history.bytes_down) == (up * 3 * 2 * 2 * 8, 3 * 2 * 2 * 8)


NORMED = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Tanh(), nn.Linear(3, 1)).double()
# theta: 0.0 weight 0:6, bias 6:9, 0.1 weight 9:12, bias 12:15, mean 15:18, variance 18:21, 2 weight 21:24, bias 24:25
PARTS = [  # of each layer: what it mixes, and what its cosines see
    (range(9), range(9)),
    (range(9, 21), range(9, 15)),
    (range(21, 25), range(21, 25)),
]
ABLATIONS = {
    "full": paper,
    "shared": partial(printed, sign="descent", shared=True),
    **{f"without-{w}": partial(printed, sign="descent", without=w) for w in ("p", "q", "p-q", "self")},
}


def slowly(server, cohort, ablation, home, sharpness):
    """[K, N] weights a layer and [K, d] mixed models, client by client; home, sharpness: [N, L] or [N, 1]."""
    count = len(server.theta)
    graphs, mixed = [], [torch.zeros(25, dtype=float64) for _ in cohort]
    for g, (at, seen) in enumerate(PARTS):
        rows = []
        for k, i in enumerate(cohort.tolist()):
            listens = [j for j in range(count) if server.seen[j] and (j != i or ablation.startswith("without-p"))]
            p = torch.zeros((), dtype=float64) if ablation.startswith("without-p") else home[i, g % home.shape[1]]
            q = sharpness[i, g % home.shape[1]]
            if ablation == "without-self":
                p = 0 * p
            if ablation in ("without-q", "without-p-q"):
                q = torch.ones((), dtype=float64)
            if not server.seen[i]:
                p, q = 0 * p, 0 * q
            change = server.change[:, list(seen)]
            scores = {j: (q * torch.cosine_similarity(change[i], change[j], dim=0)).exp() for j in listens}
            row = [scores.get(j, torch.zeros((), dtype=float64)) / sum(scores.values()) for j in range(count)]
            row[i] = row[i] + p
            row = torch.stack(row) / (1 + p)
            mask = torch.zeros(25, dtype=float64)
            mask[list(at)] = 1
            mixed[k] = mixed[k] + mask * (row @ server.theta)
            rows.append(row)
        graphs.append(torch.stack(rows))
    return torch.stack(graphs), torch.stack(mixed)


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_every_variant_against_autograd(roster, ablation):
    # Five clients of which one has not taken part; the cohort has it and two others.
    known, cohort = roster(5, NORMED), torch.tensor([0, 2, 3])
    method = ABLATIONS[ablation](lr=1e-3, home=0.3, sharpness=2.0)
    server = method.start(known)
    assert server.home.shape == (5, 1 if ablation == "shared" else len(PARTS))
    free = [ablation not in ("without-p", "without-p-q", "without-self"), ablation not in ("without-q", "without-p-q")]
    spread = 0.2 * random(*server.home.shape, seed=40)
    server = Server(
        theta=random(5, 25, seed=41),
        change=random(5, 25, seed=42),
        seen=torch.tensor([True, True, True, False, True]),
        home=server.home + spread.abs() * free[0],
        sharpness=server.sharpness + spread * free[1],
        sketch=server.sketch,
    )
    leaves = [t.clone().requires_grad_() for t in (server.home, server.sharpness)]
    graphs, mixed = slowly(server, cohort, ablation, *leaves)
    close(method.graph(known, server, cohort), graphs.detach(), atol=1e-13)
    close(method.send(known, server, cohort).theta, mixed.detach(), atol=1e-13)
    uphill = random(3, 25, seed=43) * known.layout.trainable
    loss = (mixed * uphill).sum() + 0 * sum(leaf.sum() for leaf in leaves)  # some variants use neither
    slopes = torch.autograd.grad(loss, leaves)
    after = method.aggregate(known, server, cohort, Upload(random(3, 25, seed=44), uphill))
    for name, slope, moves in zip(("home", "sharpness"), slopes, free, strict=True):
        moved = getattr(after, name) - getattr(server, name)
        close(moved, -1e-3 * slope * moves, atol=1e-15)
        if moves:
            assert (moved[[0, 2]] != 0).all()
            assert (moved[[1, 3, 4]] == 0).all()


def test_without_p_by_hand(example):
    numbers, known, server = example
    server = server._replace(home=0 * server.home)
    found = ABLATIONS["without-p"]().graph(known, server, known.everyone)[0]
    by_hand = [[0.473041, 0.352937, 0.174022], [0.387084, 0.518809, 0.094107], [0.237454, 0.117081, 0.645466]]
    close(found, torch.tensor(by_hand, dtype=float64))
    close(ABLATIONS["without-p-q"]().graph(known, server, known.everyone)[0], found, atol=0)  # here q is 1
    close(ABLATIONS["without-self"]().graph(known, server, known.everyone)[0], numbers["alpha_p0"])


@pytest.mark.parametrize("frozen", [paper(lr=0.0), printed(lr=0.5, without="p-q")], ids=["rate 0", "without p and q"])
def test_what_does_not_move_asks_for_no_gradient(bowls, executor, frozen):
    clients = {"b": [[1.0, 0.0], [1.0, 1.0], [0.0, -1.0]], "copies": 3, "epochs": 2, "executor": executor}
    still = bowls(frozen, **clients)
    first, last = still.method.start(still.roster), still.run(3)
    assert torch.equal(first.home, last.home)
    assert torch.equal(first.sharpness, last.sharpness)
    assert still.history.bytes_up == 3 * 3 * 2 * 8


def test_shared_scalars_move_by_the_sum_over_layers(roster):
    known, cohort = roster(4, two_layers()), torch.tensor([0, 1, 3])
    server, upload = anything(known), Upload(random(3, 9, seed=6), random(3, 9, seed=7))
    server = server._replace(home=server.home[:, :1].expand(4, 2), sharpness=server.sharpness[:, :1].expand(4, 2))
    shared = server._replace(home=server.home[:, :1], sharpness=server.sharpness[:, :1])
    apart = paper(lr=1e-3).aggregate(known, server, cohort, upload)
    together = ABLATIONS["shared"](lr=1e-3).aggregate(known, shared, cohort, upload)
    for name in ("home", "sharpness"):
        moved = (getattr(apart, name) - getattr(server, name)).sum(1, keepdim=True)
        close(getattr(together, name), getattr(shared, name) + moved, atol=1e-14)
    assert together.home.shape == (4, 1)


@settings(max_examples=30)
@given(st.sampled_from([*ABLATIONS.values()]), st.integers(1, 6), st.integers(0, 10_000))
def test_rows_of_every_variant_are_convex(roster, made, count, seed):
    known, method = roster(count, NORMED), made()
    server = method.start(known)._replace(theta=random(count, 25, seed=seed), change=random(count, 25, seed=seed + 1))
    for seen in (torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.5, server.seen | True):
        graph = method.graph(known, server._replace(seen=seen), known.everyone)
        assert (graph >= 0).all()
        close(graph.sum(-1), torch.ones(graph.shape[:-1], dtype=float64), atol=1e-13)
        relation = method.relation(known, server._replace(seen=seen), known.everyone)
        assert relation.shape == (3, count, count)
        close(relation.sum(-1), torch.ones(relation.shape[:-1], dtype=float64), atol=1e-13)


@pytest.mark.parametrize("made", ABLATIONS.values(), ids=ABLATIONS)
@pytest.mark.parametrize("feedback", ["held-out", "train"])
def test_executors_agree_on_every_variant(examples, noisy, perceptron, made, feedback):
    x, y = noisy(4, 2, sizes=[7, 2, 9, 4])
    found = []
    for executor in ("loop", "vmap"):
        method = made(feedback=feedback, home=0.3, sharpness=2.0, lr=0.5)
        trial = examples(perceptron(norm=True), x, y, method, training=Training(2, 3, SGD(0.1)), executor=executor)
        found.append((trial.run(4, participation=0.5), trial.headline))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
    close(found[0][1], found[1][1], atol=1e-11)


def test_uniform_softmax_over_all_is_fedavg(bowls, executor):
    # Without p the own model is one of the softmax; with q = 0 everyone counts alike.
    clients = {"b": [0.0, 4.0, 9.0, -2.0], "h": [1.0, 2.0, 0.5, 1.5], "epochs": 2, "executor": executor}
    method = printed(without="p", sharpness=0.0, lr=0.0)
    trial = bowls(method, copies=2, **clients)
    server, shared = trial.run(4), bowls(FedAvg(), **clients).run(4)
    close(method.send(trial.roster, server, trial.roster.everyone).theta, shared.theta.expand(4, 1), atol=1e-13)


@pytest.mark.parametrize(
    "wrong",
    [
        {"home": -1.0},
        {"lr": -1.0},
        {"neighbours": -1},
        {"feedback": "none"},
    ],
)
def test_refuses(wrong):
    with pytest.raises(UsageError, match=rf"^FedAGHN\.{next(iter(wrong))} must be "):
        FedAGHN(**wrong)


@pytest.mark.parametrize("wrong", [{"sign": "ascent"}, {"without": "r"}])
def test_an_ablation_refuses(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Printed(**wrong)


@pytest.mark.parametrize("feedback", ["held-out", "train"])
def test_looking_at_all_others_is_looking_at_everyone(roster, feedback):
    known, cohorts = roster(6, NORMED), [[0, 2, 3], [1, 2, 5], [0, 1, 2, 3, 4, 5]]  # client 4 comes late
    found = []
    for neighbours in (0, 5, 50):
        method = paper(neighbours=neighbours, feedback=feedback, lr=0.1, sharpness=3.0)
        server, sent = method.start(known)._replace(theta=random(6, 25, seed=1)), []
        for r, cohort in enumerate(map(torch.tensor, cohorts)):
            now = replace(known, round=r)
            sent.append(method.send(now, server, cohort).theta)
            upload = Upload(random(len(cohort), 25, seed=2 + r), random(len(cohort), 25, seed=12 + r))
            server = method.aggregate(now, server, cohort, upload)
            sent.append(method.relation(now, server, cohort))
        found.append((*sent, *server[:5]))
    for dense, *listed in zip(*found, strict=True):
        for other in listed:
            torch.testing.assert_close(other, dense, rtol=0, atol=1e-12)


@settings(max_examples=25)
@given(st.integers(2, 9), st.integers(1, 4), st.sampled_from([*ABLATIONS.values()]), st.integers(0, 10_000))
def test_few_neighbours_are_still_a_mean(roster, count, neighbours, made, seed):
    known, method = roster(count, NORMED), made(neighbours=neighbours)
    cohort = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: max(1, count // 2)].sort().values
    server = method.start(known)
    for r in range(2):
        upload = Upload(random(len(cohort), 25, seed=seed + r), random(len(cohort), 25, seed=seed + 9))
        server = method.aggregate(replace(known, round=r), server, cohort, upload)
        graph = method.graph(known, server, known.everyone)
        assert (graph >= 0).all()
        close(graph.sum(-1), torch.ones(graph.shape[:-1], dtype=float64), atol=1e-13)
        assert (graph > 0).sum(-1).max() <= neighbours + 1
        assert (graph[:, :, ~server.seen] * ~torch.eye(count, dtype=torch.bool)[:, ~server.seen] == 0).all()
        sent = method.send(known, server, known.everyone).theta
        for layer, rows in zip(known.layout.layers, graph, strict=True):
            close(sent[:, layer.at], rows @ server.theta[:, layer.at], atol=1e-12)


def test_neighbours_are_those_whose_updates_are_most_alike(roster):
    # Two groups whose updates point the same way, up to noise: a sketch of 512 numbers tells them apart.
    known, method = roster(12, nn.Linear(400, 5).double()), paper(neighbours=5)
    group = torch.arange(12) % 2
    change = random(2, 2005)[group] + 0.5 * random(12, 2005, seed=1)
    server = method.aggregate(known, method.start(known), known.everyone, Upload(known.theta + change, change))
    graph = method.graph(known, server, known.everyone)[0]
    assert torch.equal(graph > 0, group[:, None] == group)


def test_a_client_without_an_update_looks_at_anyone_the_same_on_every_call(roster):
    known, method = roster(40, size=3), paper(neighbours=4)
    cohort = torch.arange(30)
    server = method.aggregate(known, method.start(known), cohort, Upload(random(30, 3), random(30, 3, seed=1)))
    late = torch.arange(30, 40)
    graph = method.graph(known, server, late)[0]
    assert torch.equal(graph, method.graph(known, server, late)[0])
    assert ((graph > 0).sum(1) == 4).all()  # all alike, and not itself: its model says nothing
    close(graph[graph > 0], torch.full((40,), 0.25, dtype=float64), atol=1e-14)
    assert len((graph > 0).any(0).nonzero()) > 10  # not the same few for all
    assert not (graph[:, 30:] > 0).any()


def test_no_table_of_all_pairs(roster):
    # Sketches, 512 numbers a client, are the largest table here.
    known, method, cohort = roster(3000, size=8), paper(neighbours=6), torch.arange(0, 3000, 300)
    server = method.aggregate(known, method.start(known), cohort, Upload(random(10, 8), random(10, 8, seed=1)))
    made = Sizes()
    with made:
        sent = method.send(known, server, cohort)
        method.aggregate(known, server, cohort, Upload(sent.theta + 1, sent.theta))
    assert 3000 * SIZE * 8 <= made.largest < 1.01 * 3000 * SIZE * 8


class Sizes(TorchDispatchMode):
    """Remembers how many bytes the largest tensor has that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.nbytes)
        return found


@pytest.mark.parametrize("validation", [0, 2])
def test_without_validation_examples_the_scalars_stay_as_they_are(validation, executor):
    x, y, rows = random(40, 3), random(40, 1, seed=1), torch.arange(40).view(4, 10)
    split = {"train": rows[:, :6], "validation": rows[:, 6 : 6 + validation], "test": rows[:, 8:]}
    data = Federation(x, y, {name: list(part) for name, part in split.items()}, Regression())
    how = {"seed": 0, "execution": Execution(executor)}
    torch.manual_seed(0)
    fleet = Simulation(
        data, Model(nn.Linear(3, 1).double()), FedAGHN(feedback="validation"), Training(2, 3, SGD(0.1)), **how
    )
    server = run(fleet.method, fleet.roster(), fleet, History(data.names, data.task), rounds=3)
    still = (server.home == 0.03).all() and (server.sharpness == 0.5).all()
    assert still == (validation == 0)
    assert torch.isfinite(server.theta).all()


def test_a_round_attends_once_for_training_evaluation_and_the_next_rounds_cohort(roster, monkeypatch):
    calls, real = [], fedaghn.cosines
    monkeypatch.setattr(fedaghn, "cosines", lambda *a: calls.append(a) or real(*a))
    known, method = roster(4, two_layers()), paper()
    server = anything(known)
    for _ in range(2):
        method.send(known, server, known.everyone)
        method.relation(known, server, known.everyone)
    after = method.aggregate(known, server, known.everyone, Upload(random(4, 9, seed=6), random(4, 9, seed=7)))
    assert len(calls) == 1
    method.send(known, after, known.everyone)
    assert len(calls) == 2
