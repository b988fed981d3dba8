"""Fused training against plain autograd, client by client, in float64."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.func import functional_call

import kinfed.ops.fused.descent
import kinfed.ops.fused.step
from kinfed import SGD, Federation, Training
from kinfed.core.client import Alignment, Quadratic
from kinfed.core.layout import Layout
from kinfed.core.model import Model
from kinfed.core.tasks import Classification, Counts, Forecasting, Quantiles, Regression
from kinfed.methods import Local, towards
from kinfed.methods.fedrod import TwoHeads
from kinfed.models import MODELS
from kinfed.models.additive import additive
from kinfed.ops.fused import LOSSES, Batches, Descent, Fused, Unfused, parts
from kinfed.ops.fused.dense import Span
from kinfed.simulation import executors
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

SIZES = (17, 3, 9, 8)  # the batch is 8: short batches, full ones, a client smaller than a batch; in no order
N = sum(SIZES)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def windows():
    return torch.rand(N, 6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def labels():
    return torch.arange(N) % 4


def readings():
    return torch.where(draw(N, 4) < -1, torch.nan, 3 * draw(N, 4) + 1)


def dense(widths, activation=nn.ReLU, bias=True):
    layers = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after, bias), activation()]
    return nn.Sequential(*layers[:-1])


def recurrent(name, features=2, **how):
    return MODELS[name]((6, features), 4, hidden=7, **how)


def at_zero(*rest):
    nn.init.zeros_((first := nn.Linear(9, 8, False)).weight)
    return nn.Sequential(first, *rest)


CASES = {  # name: module, pooled examples, task, targets
    "relu": lambda: (dense((10, 7, 6, 4)), draw(N, 2, 5), Classification(4), labels()),
    "wide": lambda: (dense((40, 6, 4), nn.Tanh), draw(N, 40), Classification(4), labels()),
    "no bias": lambda: (dense((30, 5, 4), nn.Sigmoid, False), draw(N, 5, 6), Regression(), draw(N, 4)),
    "linear": lambda: (nn.Linear(9, 1), draw(N, 9), Regression(), draw(N)),
    "cut": lambda: (at_zero(nn.Hardtanh(0, 1), nn.Linear(8, 1)), draw(N, 9), Regression(), draw(N)),
    "above": lambda: (nn.Sequential(dense((9, 8)), additive((8,), 4)), draw(N, 9), Classification(4), labels()),
    "nested": lambda: (nn.Sequential(dense((9, 8)), nn.Tanh(), dense((8, 4))), draw(N, 9), Classification(4), labels()),
    "rnn": lambda: (recurrent("rnn"), windows(), Regression(), draw(N, 4)),
    "rnn of relu": lambda: (
        celled(nn.RNN(2, 7, batch_first=True, nonlinearity="relu")),
        windows(),
        Regression(),
        draw(N, 4),
    ),
    "rnn of gru": lambda: (recurrent("rnn", cell="gru"), windows(), Classification(4), labels()),
    "gru": lambda: (recurrent("gru"), windows(), Forecasting(1.0, 2.0), readings()),
    "gru, squared": lambda: (recurrent("gru"), windows(), Forecasting(1.0, 2.0, "squared"), readings()),
    "changes": lambda: (MODELS["changes"]((6, 2), 4), windows(), Forecasting(1.0, 2.0), readings()),
    "changes-mlp": lambda: (
        MODELS["changes-mlp"]((6, 2), 4, hidden=(5, 3)),
        windows(),
        Forecasting(1.0, 2.0, "squared"),
        readings(),
    ),
    "gru, one feature": lambda: (recurrent("gru", 1), windows()[..., :1], Regression(), draw(N, 4)),
}


def celled(cell):
    model = recurrent("rnn")
    model.cell = cell
    return model


def batches(sizes, batch, epochs):
    """Shuffled passes over clients whose examples lie one after another in the pool; other rows are filled up."""
    generator = torch.Generator().manual_seed(3)
    steps = max(epochs * -(-n // batch) for n in sizes)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    rows = torch.stack([e - n + torch.arange(max(sizes)) % n for n, e in zip(sizes, ends, strict=True)])
    place, valid = torch.zeros(len(sizes), steps, batch, dtype=torch.int64), torch.zeros(len(sizes), steps) > 0
    weight = torch.zeros(len(sizes), steps, batch, dtype=torch.float64)
    for i, n in enumerate(sizes):
        epoch = (torch.randperm(n, generator=generator) for _ in range(epochs))
        for t, part in enumerate(part for order in epoch for part in order.split(batch)):
            place[i, t, : len(part)], weight[i, t, : len(part)], valid[i, t] = part, 1, True
    return Batches(rows, place, weight, valid)


def naive(module, layout, theta, x, y, task, batches, descent, only=None):
    """What `Client.descend` says, with autograd on one client after another."""
    moves = torch.zeros(layout.size, dtype=theta.dtype)
    for entry in layout.entries:
        moves[entry.at] = entry.trainable and (only is None or entry.name in only)
    trained = []
    for i, mine in enumerate(theta):
        mine = mine.clone()
        for place, weight in zip(batches.place[i][batches.valid[i]], batches.weight[i], strict=False):
            at = batches.rows[i][place[weight > 0]]
            leaf = mine.clone().requires_grad_()
            loss = task.loss(functional_call(module, layout.tensors(leaf), (x[at],)), y[at]).mean()
            gradient = moves * torch.autograd.grad(loss, leaf)[0]
            gradient *= min(1.0, descent.clip / float(gradient.norm().clamp(min=1e-12)))
            gradient += descent.pull * moves * mine
            if descent.aligned:
                gradient += torch.autograd.grad(descent.slope[i] @ (moves * leaf) / (moves * leaf).norm(), leaf)[0]
            elif descent.slope is not None:
                gradient += moves * descent.slope[i]
            mine -= descent.lr * gradient
        trained.append(mine)
    return torch.stack(trained)


def fused(name, sizes=SIZES, spread=0.4):
    module, x, task, y = CASES[name]()
    module = module.double()
    layout = Layout.from_module(module)
    theta = spread * draw(len(sizes), layout.size)
    return module, layout, theta, x, y, task, Fused.build(module, layout, task, x.shape[1:])


def agree(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


DENSE = ["relu", "cut", "wide", "no bias", "linear", "nested"]


@pytest.fixture(params=[(name, how) for name in CASES for how in (0.0, 2 / 3, 1e9) if name in DENSE or how == 2 / 3])
def name(request, monkeypatch):
    """Every case; dense ones with the first layer moved in the span of its inputs never, where it pays, and always."""
    monkeypatch.setattr(kinfed.ops.fused.descent, "SAVED", request.param[1])
    return request.param[0]


def test_fused_steps_are_those_of_autograd(name):
    module, layout, theta, x, y, task, form = fused(name)
    slope, before = draw(*theta.shape), theta.clone()
    aligned = Descent(0.1, 0.7, slope, aligned=True), Descent(0.1, 0.0, 3 * slope, aligned=True)
    for descent in (*aligned, Descent(0.1), Descent(0.1, 0.7), Descent(0.1, 0.7, slope), Descent(0.1, 0.0, slope)):
        found = form.descend(theta, x, y, batches(SIZES, 8, 2), descent)
        agree(found, naive(module, layout, theta, x, y, task, batches(SIZES, 8, 2), descent))
    assert (found - theta).abs().max() > 0.01
    assert torch.equal(theta, before)
    for clip in () if form.repeats else (0.3, 3.0):  # of most steps, and of some
        descent = Descent(0.1, 0.7, clip=clip)
        found = form.descend(theta, x, y, batches(SIZES, 8, 2), descent)
        agree(found, naive(module, layout, theta, x, y, task, batches(SIZES, 8, 2), descent))


def test_only_what_may_move_moves(name):
    module, layout, theta, x, y, task, form = fused(name)
    names = [e.name for e in layout.entries]
    descent = Descent(0.1, 0.3, draw(*theta.shape))
    for only in ([], names[:1], names[:2], names[1:2], names[-1:], names[-2:], names[1:3], names[2:]):
        found = form.descend(theta, x, y, batches(SIZES, 8, 1), descent, frozenset(only))
        agree(found, naive(module, layout, theta, x, y, task, batches(SIZES, 8, 1), descent, only))
    dict(module.named_parameters())[names[0]].requires_grad_(False)
    if len(names) > 1:
        frozen = Layout.from_module(module)
        found = Fused.build(module, frozen, task, x.shape[1:]).descend(theta, x, y, batches(SIZES, 8, 1), descent)
        agree(found, naive(module, frozen, theta, x, y, task, batches(SIZES, 8, 1), descent))


@pytest.mark.parametrize("name", ["wide", "gru"])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_results_do_not_depend_on_who_is_trained_together(name, most, monkeypatch):
    _, layout, theta, x, y, _, form = fused(name)
    whole = form.descend(theta, x, y, batches(SIZES, 8, 2), Descent(0.1, 0.2))
    monkeypatch.setattr(kinfed.ops.fused.descent, "MOST", most)
    agree(form.descend(theta, x, y, batches(SIZES, 8, 2), Descent(0.1, 0.2)), whole)
    monkeypatch.setattr(kinfed.ops.fused.descent, "CACHE", 1)
    agree(form.descend(theta, x, y, batches(SIZES, 8, 2), Descent(0.1, 0.2)), whole)
    for only in (None, layout.head, frozenset[str]()):
        once = form.descend(theta[0], x, y, batches(SIZES, 8, 2), Descent(0.1), only)  # one model for all
        each = form.descend(theta[:1].repeat(len(SIZES), 1), x, y, batches(SIZES, 8, 2), Descent(0.1), only)
        agree(once, each)


def test_the_first_layer_moves_in_the_span_of_its_inputs_where_that_is_less_work(monkeypatch):
    chosen = []
    monkeypatch.setattr(kinfed.ops.fused.descent, "Span", lambda *args: chosen.append(True) or Span(*args))
    module, x, task, y = (
        nn.Sequential(nn.Linear(400, 50), nn.ReLU(), nn.Linear(50, 4)),
        draw(N, 400),
        *CASES["relu"]()[2:],
    )
    layout = Layout.from_module(module)
    form = Fused.build(module.double(), layout, task, x.shape[1:])
    theta = draw(len(SIZES), layout.size)
    form.descend(theta, x, y, batches(SIZES, 8, 1), Descent(0.1))
    assert not chosen  # one pass over the examples reads and writes the weight about as often
    form.descend(theta, x, y, batches(SIZES, 8, 5), Descent(0.1))
    assert chosen
    del chosen[:]
    form.descend(theta, x, y, batches(SIZES, 8, 5), Descent(0.1), layout.head)
    assert not chosen


def test_each_losses_gradient_is_that_of_its_task():
    outputs = draw(3, 5, 4).requires_grad_()
    y = torch.where(draw(3, 5, 4) > 1, torch.nan, draw(3, 5, 4))
    cases = [
        (Classification(4), torch.arange(15).view(3, 5) % 4, outputs),
        (Regression(), draw(3, 5, 2, 2), outputs),
        (Regression(), draw(3, 5), outputs[..., :1]),
        (Forecasting(0.3, 2.0), y, outputs),
        (Forecasting(0.3, 2.0, "squared"), y, outputs),
        (Regression((0.1, 0.2, 0.3, 0.4), (1.0, 2.0, 3.0, 4.0)), draw(3, 5, 4), outputs),
        (Counts(0.5), torch.arange(15.0).view(3, 5, 1), outputs[..., :1]),
        (Counts(3.0), torch.arange(15.0).view(3, 5), outputs[..., :1]),
        (Counts(0.5, high=1.0), torch.arange(15.0).view(3, 5, 1), outputs[..., :1]),
        (Quantiles(0.3, 2.0, quantiles=(0.2, 0.7)), y[..., :2], outputs),
    ]
    for task, y, says in cases:
        loss = task.loss(says.flatten(0, 1), y.flatten(0, 1)).sum()
        agree(LOSSES[type(task)](task, says.detach(), y), torch.autograd.grad(loss, says, retain_graph=True)[0])


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def hooked(kind):
    layer = nn.Linear(4, 2)
    getattr(layer, f"register_{kind}")(lambda *args: None)
    return layer


def with_own_forward():
    layer = nn.Linear(4, 2)
    layer.forward = lambda x: x[:, :2]
    return layer


def tied():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


@pytest.mark.parametrize(
    ("module", "shape", "why"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), (1, 4, 4), "Conv2d has no fused form"),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (4,), "BatchNorm1d has no fused form"),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout()), (4,), "Dropout has no fused form"),
        (Halved(4, 2), (4,), "Halved has no fused form"),
        (nn.Sequential(hooked("forward_hook")), (4,), "Linear has hooks"),
        (hooked("forward_pre_hook"), (4,), "Linear has hooks"),
        (hooked("full_backward_hook"), (4,), "Linear has hooks"),
        (with_own_forward(), (4,), "or its own forward"),
        (tied(), (4,), "share tensors"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), (4,), "ParametrizedLinear has no fused form"),
        (nn.Linear(4, 2), (3, 4), "examples with one axis"),
        (nn.Sequential(nn.Flatten(2), nn.Linear(4, 2)), (3, 2, 2), "Flatten has a fused form only if"),
        (celled(nn.LSTM(2, 7)), (6, 2), "LSTM has no fused form"),
        (
            nn.Sequential(nn.Flatten(), recurrent("rnn")),
            (6, 2),
            "layer of windows has a fused form only where it comes",
        ),
    ],
)
def test_what_has_no_fused_form_is_named(module, shape, why):
    with pytest.raises(Unfused, match=why):
        Fused.build(module, Layout.from_module(module), Classification(2), torch.Size(shape))


@pytest.mark.parametrize("name", ["changes", "changes-mlp"])
def test_a_network_of_changes_whose_head_is_another_has_no_fused_form(name):
    module = MODELS[name]((6, 2), 4)
    module.head = TwoHeads(module.head)
    with pytest.raises(Unfused, match="TwoHeads in place of a head has no fused form"):
        parts(module)


@pytest.mark.parametrize(
    "setting", [{"num_layers": 2}, {"bidirectional": True}, {"batch_first": False}, {"bias": False}]
)
def test_unusual_recurrent_layers_have_no_fused_form(setting):
    model = recurrent("gru")
    model.encoder = nn.GRU(2, 7, **{"batch_first": True, **setting})
    with pytest.raises(Unfused, match=f"a recurrent layer with {next(iter(setting))}="):
        Fused.build(model, Layout.from_module(model), Regression(), torch.Size((6, 2)))


def test_a_task_of_ones_own_has_no_fused_form():
    class Cubed(Regression):
        def loss(self, outputs, y):
            return super().loss(outputs, y) ** 1.5

    module = nn.Linear(4, 2)
    with pytest.raises(Unfused, match="the loss of Cubed has no fused form"):
        Fused.build(module, Layout.from_module(module), Cubed(), torch.Size((4,)))


@pytest.mark.parametrize("name", ["wide", "rnn", "gru"])
def test_in_float32_it_is_as_near_to_float64_as_autograd_is(name):
    module, layout, theta, x, y, task, form = fused(name)
    exact = form.descend(theta, x, y, batches(SIZES, 8, 5), Descent(0.1)) - theta
    module, few = module.float(), [t.float() for t in (theta, x, y if y.is_floating_point() else y.double())]
    few[2] = few[2] if y.is_floating_point() else y
    single = batches(SIZES, 8, 5)
    single = single._replace(weight=single.weight.float())
    far = [
        (found.double() - theta.float().double() - exact).norm() / exact.norm()
        for found in (
            form.descend(few[0], few[1], few[2], single, Descent(0.1)),
            naive(module, layout, few[0], few[1], few[2], task, single, Descent(0.1)),
        )
    ]
    assert far[0] < 4 * far[1] + 1e-6
    assert far[0] > 0


def test_a_step_of_many_rows_is_rounded_once():
    draw = torch.Generator().manual_seed(0)
    g, x = (torch.rand(1, 1024, width, generator=draw) - 0.5 for width in (1, 200))
    weight = torch.ones(1, 1, 200)
    kinfed.ops.fused.step.Step({"w": weight}, frozenset({"w"}), Descent(1e-3), {}).descend_product("w", g, x)
    exact = 1 - 1e-3 * (g.double().mT @ x.double())
    assert (weight - exact).abs().max() < 2**-23  # what lies between 1 and the next number


def test_an_aligned_step_has_the_same_bits_whatever_the_order_of_a_set():
    draw = torch.Generator().manual_seed(0)
    tensors, slopes = ({name: torch.randn(3, 50, generator=draw) for name in "abcdef"} for _ in range(2))
    descent = Descent(0.1, pull=0.5, slope=torch.zeros(3, 300), aligned=True)
    orders = [dict.fromkeys(order).keys() for order in ("abcdef", "fedcba", "cafebd")]
    lengths = [kinfed.ops.fused.step.Step(tensors, order, descent, slopes)._lengths for order in orders]
    assert torch.equal(lengths[0], lengths[1])
    assert torch.equal(lengths[0], lengths[2])


class Programmed(Local):
    """A method whose clients run this program."""

    def __init__(self, program):
        self.program = program

    def train(self, client, state, received):
        return state, self.program(client)


def uploads(program, executor, name="relu", **how):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module, x, task, y = CASES[name]()
    owned = torch.arange(N).split(SIZES)
    rows = {"train": list(owned), "validation": [o[:0] for o in owned], "test": [o[:1] for o in owned]}
    fleet = Simulation(
        Federation(x, y, rows, task),
        Model(module.double()),
        Programmed(program),
        Training(2, 8, SGD(0.1, weight_decay=0.01)),
        execution=Execution(executor, **how),
    )
    fleet.client_statistics()
    return fleet.train(0, torch.arange(len(SIZES)), ())[1]


def anchor(client):
    return client.noise(client.model.theta)


def aligned(client):
    trainable = client.model.layout.trainable_on("cpu")
    return Alignment(2.0, trainable * anchor(client), trainable)


PROGRAMS = {  # a client's program, and how many times it trains in fused form
    "plain": (lambda c: c.descend(c.model.theta), 1),
    "from its own": (lambda c: c.descend(anchor(c)), 1),
    "towards": (lambda c: c.descend(c.model.theta, penalty=towards(anchor(c), 0.5)), 1),
    "towards two": (
        lambda c: c.descend(c.model.theta, penalty=towards(anchor(c), 0.5) + towards(c.model.theta, 0.2)),
        1,
    ),
    "along": (lambda c: c.descend(c.model.theta, penalty=Quadratic(0.0, anchor(c))), 1),
    "aligned": (lambda c: c.descend(c.model.theta, penalty=aligned(c)), 1),
    "a part aligned": (lambda c: c.descend(c.model.theta, penalty=aligned(c), only=c.model.layout.head), 0),
    "twice": (lambda c: c.descend(c.descend(c.model.theta, only=c.model.layout.head), only=c.model.layout.base), 2),
    "steps": (lambda c: c.descend(c.model.theta, steps=3), 1),
    "epochs": (lambda c: c.descend(c.model.theta, epochs=1, optimiser=SGD(0.3)), 1),
    "own penalty": (lambda c: c.descend(c.model.theta, penalty=lambda theta: (theta**4).sum()), 0),
    "momentum": (lambda c: c.descend(c.model.theta, optimiser=SGD(0.1, momentum=0.5)), 0),
    "both": (lambda c: c.descend(c.descend(c.model.theta, optimiser=SGD(0.1, momentum=0.5))), 1),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_clients_train_in_fused_form_where_it_says_the_same(program, monkeypatch):
    run, times = PROGRAMS[program]
    loop, vmap = (uploads(run, executor) for executor in ("loop", "vmap"))
    calls, real = [], Fused.descend
    monkeypatch.setattr(Fused, "descend", lambda *args: calls.append(len(args[4].rows)) or real(*args))
    monkeypatch.setattr(executors, "GRAIN", 1)  # work for every worker
    for how in ({"workers": 1}, {"workers": 2}, {"workers": 7}, {"workers": 1, "chunk": 3}):
        del calls[:]
        found = uploads(run, "fused", **how)
        agree(found, loop)
        agree(found, vmap)
        assert sum(calls) == times * len(SIZES)
    assert len(calls) == 2 * times  # four clients, at most three at a time


@pytest.mark.parametrize(("grain", "blocks"), [(1, 2), (1 << 62, 1)])
def test_a_little_work_is_left_to_one_worker(grain, blocks, monkeypatch):
    calls, real = [], Fused.descend
    monkeypatch.setattr(Fused, "descend", lambda *args: calls.append(len(args[4].rows)) or real(*args))
    monkeypatch.setattr(executors, "GRAIN", grain)
    uploads(PROGRAMS["steps"][0], "fused", workers=4)
    assert sum(calls) == len(SIZES)
    assert len(calls) == blocks


@pytest.mark.parametrize("name", ["rnn", "gru"])
def test_recurrent_models_train_alike_under_every_executor(name, monkeypatch):
    monkeypatch.setattr(executors, "GRAIN", 1)
    program, _ = PROGRAMS["towards"]
    agree(uploads(program, "fused", name, workers=4), uploads(program, "loop", name))


def test_one_client_can_be_trained_without_vmap():
    *_, theta, x, y, _, form = fused("relu")
    mine = Batches(*(t[0] for t in batches(SIZES, 8, 2)[:4]))
    alone = form.descend_alone(theta[0], x, y, mine, Descent(0.1, 0.2, theta[1]))
    agree(alone, form.descend(theta, x, y, batches(SIZES, 8, 2), Descent(0.1, 0.2, theta[1].expand_as(theta)))[0])


GRADIENTS = {
    "of all examples": lambda c: c.gradient(anchor(c), c.data),
    "at the model that all have": lambda c: c.gradient(c.model.theta, c.data),
    "of a batch": lambda c: c.gradient(anchor(c), next(iter(c.batches()))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("program", GRADIENTS)
def test_the_fused_gradient_is_that_of_autograd(name, program, monkeypatch):
    calls, real = [], Fused.gradient
    monkeypatch.setattr(Fused, "gradient", lambda *args: calls.append(args) or real(*args))
    agree(uploads(GRADIENTS[program], "fused", name), uploads(GRADIENTS[program], "loop", name))
    assert len(calls) == 1  # once for all clients


def test_in_a_transform_of_the_methods_own_the_gradient_can_be_transformed():
    def several(client):
        thetas = torch.stack([anchor(client), 2 * client.model.theta])
        return torch.func.vmap(lambda theta: client.gradient(theta, client.data))(thetas)

    def second(client):
        return torch.func.grad(lambda theta: client.gradient(theta, client.data).square().sum())(anchor(client))

    points = [uploads(lambda c, k=k: c.gradient((anchor(c), 2 * c.model.theta)[k], c.data), "loop") for k in (0, 1)]
    agree(uploads(several, "fused"), torch.stack(points, 1))
    agree(uploads(second, "fused"), uploads(second, "vmap"))
    assert uploads(second, "fused").abs().max() > 0


def test_class_weights_count_in_the_fused_gradient():
    *_, theta, x, y, _, form = fused("relu")
    at, weights = torch.arange(8).view(2, 4), torch.rand(2, 4)
    share = torch.tensor([[0.5, 0.5, 0, 0], [0.25] * 4])
    found = form.gradient(theta[:2], x[at], y[at], share, weights)
    single = [
        form.gradient(theta[:2], x[at[:, i : i + 1]], y[at[:, i : i + 1]], share[:, :1] * 0 + 1, None) for i in range(4)
    ]
    by_hand = sum((share[:, i] * weights.gather(1, y[at[:, i : i + 1]])[:, 0])[:, None] * single[i] for i in range(4))
    agree(found, by_hand)


def test_a_quadratic_penalty_pulls_towards_its_anchors():
    theta, one, two = draw(7).requires_grad_(), draw(7) + 1, draw(7) - 2
    slope = torch.autograd.grad((towards(one, 0.5) + towards(two, 0.2))(theta), theta)[0]
    agree(slope, (0.5 * (theta - one) + 0.2 * (theta - two)).detach())
    apart = [(theta - one).square().sum() / 4 - towards(one, 0.5)(theta) for theta in (draw(7), draw(7) * 3)]
    agree(*apart)  # up to a constant
