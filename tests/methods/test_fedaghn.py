from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st
from small import close, random
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kinfed.core.engine import run
from kinfed.core.history import History, Recorder
from kinfed.core.model import Model
from kinfed.core.optimiser import SGD
from kinfed.core.tasks import Regression
from kinfed.core.training import Training
from kinfed.data.federation import Federation
from kinfed.methods import FedAGHN, FedAvg, Local
from kinfed.methods.fedaghn import Server, Upload
from kinfed.ops.similarity import cosine
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed_papers.fedaghn.ablations import Printed

float64 = torch.float64
paper = partial(FedAGHN, feedback="held-out")  # whose gradient the tests choose
printed = partial(Printed, feedback="held-out")
SIGNS = {paper: 1, printed: -1}


def two_layers():
    """Layers of 4 + 2 and 2 + 1 entries."""
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def state(theta, change, home=0.03, sharpness=1.0, layers=1):
    """A server whose clients have all taken part."""
    ones = torch.ones(len(theta), layers, dtype=float64)
    return Server(theta, change, torch.ones(len(theta), dtype=torch.bool), home * ones, sharpness * ones, ())


def anything(known, seed=0):
    """A server with random models, updates, p and q."""
    count, layers, d = len(known), len(known.layout.layers), known.layout.size
    server = state(random(count, d, seed=seed), random(count, d, seed=seed + 1), layers=layers)
    home = 0.1 + random(count, layers, seed=seed + 2).abs()
    return server._replace(home=home, sharpness=random(count, layers, seed=seed + 3))


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
    assert all(torch.isfinite(t).all() for t in tree_leaves(after))


def test_only_participants_move_and_newcomers_listen_to_all(roster):
    known, method, cohort = roster(4, two_layers()), paper(lr=0.1), torch.tensor([0, 2])
    server = anything(known)._replace(seen=torch.tensor([True, True, True, False]))
    graph = method.graph(known, server, known.everyone)
    third = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0], dtype=float64)
    close(graph[:, 3], third.expand(2, 4), atol=1e-14)  # no term of its own either
    assert (graph[:, :3, 3] == 0).all()
    after = method.aggregate(known, server, cohort, Upload(random(2, 9, seed=6), random(2, 9, seed=7)))
    for name, before, now in zip(Server._fields[:-1], server[:-1], after[:-1], strict=True):
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
    assert trial.history.cost.bytes_up == 2 * trial.history.cost.bytes_down == 2 * 3 * both * 8
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


NORMED = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Tanh(), nn.Linear(3, 1)).double()
ABLATIONS = {
    "full": paper,
    "shared": partial(printed, sign="descent", shared=True),
    **{f"without-{w}": partial(printed, sign="descent", without=w) for w in ("p", "q", "p-q", "self")},
}


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
    assert still.history.cost.bytes_up == 3 * 3 * 2 * 8


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


@pytest.mark.parametrize(("ablation", "feedback"), [("shared", "held-out"), ("without-p", "train")])
def test_executors_agree_on_ablations(examples, noisy, perceptron, ablation, feedback):
    x, y = noisy(4, 2, sizes=[7, 2, 9, 4])
    found = []
    for executor in ("loop", "vmap"):
        method = ABLATIONS[ablation](feedback=feedback, home=0.3, sharpness=2.0, lr=0.5)
        trial = examples(perceptron(norm=True), x, y, method, training=Training(2, 3, SGD(0.1)), executor=executor)
        found.append((trial.run(4, participation=0.5), trial.headline))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
    close(found[0][1], found[1][1], atol=1e-11)


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
    known, method, cohort = roster(3000, size=8), paper(neighbours=6), torch.arange(0, 3000, 300)
    server = method.aggregate(known, method.start(known), cohort, Upload(random(10, 8), random(10, 8, seed=1)))
    made = Sizes()
    with made:
        sent = method.send(known, server, cohort)
        method.aggregate(known, server, cohort, Upload(sent.theta + 1, sent.theta))
    assert 3000 * 8 * 8 <= made.largest < 3 * 3000 * 8 * 8


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
    server = run(fleet.method, fleet.roster(), fleet, Recorder(History(data.names, data.task)), rounds=3)
    still = (server.home == 0.03).all() and (server.sharpness == 0.5).all()
    assert still == (validation == 0)
    assert torch.isfinite(server.theta).all()


def test_a_round_attends_once_for_training_evaluation_and_the_next_rounds_cohort(roster, monkeypatch):
    calls, real = [], FedAGHN._attend
    monkeypatch.setattr(FedAGHN, "_attend", lambda *a: calls.append(a) or real(*a))
    known, method = roster(4, two_layers()), paper()
    server = anything(known)
    for _ in range(2):
        method.send(known, server, known.everyone)
        method.relation(known, server, known.everyone)
    after = method.aggregate(known, server, known.everyone, Upload(random(4, 9, seed=6), random(4, 9, seed=7)))
    assert len(calls) == 1
    method.send(known, after, known.everyone)
    assert len(calls) == 2
