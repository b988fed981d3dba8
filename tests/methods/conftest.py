"""Clients whose losses are quadratics, so that every number of a run can be worked out by hand."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from kinfed.core.engine import Rounds, run
from kinfed.core.history import History, Recorder
from kinfed.core.method import Roster
from kinfed.core.mixins import model_for
from kinfed.core.model import Model
from kinfed.core.optimiser import SGD
from kinfed.core.seeding import tags
from kinfed.core.sharing import State
from kinfed.core.tasks import Regression
from kinfed.core.training import Training
from kinfed.data.federation import Federation
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation


class Trial:
    """A method on a federation, run by the real engine."""

    def __init__(self, method, federation, module, training, executor="loop", seed=0, every=1):
        self.fleet = Simulation(
            federation, model_for(method, module), method, training, seed=seed, execution=Execution(executor)
        )
        self.method, self.module = self.fleet.method, module
        self.roster = self.fleet.roster()
        self.history = History(federation.names, federation.task)
        self.recorder, self.every = Recorder(self.history), every

    def run(self, rounds, participation=1.0, **resume):
        """The server's state after so many rounds."""
        return run(
            self.method,
            self.roster,
            self.fleet,
            self.recorder,
            rounds=Rounds(rounds, self.every),
            participation=participation,
            **resume,
        )

    @property
    def headline(self):
        """[N, d] the first model that the method names, at the last round."""
        return self.history.models["theta"]

    @property
    def own(self):
        """[N, d] the models that clients keep, of which a part may be personal."""
        state = self.fleet.state
        if not isinstance(state, State):
            return state.theta
        return self.method.sharing.compose(state.inner.theta, state.personal)

    def loss(self, model):
        """[N] test loss of a named model at the last round."""
        return self.history.scores[-1][model, "test", "loss"]


def bowl(h, b):
    """d examples of a bias-free linear model whose mean squared error is h/2 ||w - b||^2; b: [d]."""
    side = math.sqrt(h * len(b) / 2)
    return side * torch.eye(len(b), dtype=torch.float64), side * b[:, None]


def bowls(
    method,
    b,
    *,
    h=1.0,
    start=0.0,
    held=None,
    copies=1,
    lr=0.1,
    epochs=1,
    batch=10_000,
    optimiser=None,
    executor="loop",
    seed=0,
    every=1,
):
    """A trial in which client i has training loss h_i/2 ||w - b_i||^2 and test loss h_i/2 ||w - held_i||^2.

    b: [N] or [N, d]; h and copies (how often each training example is repeated): one number, or one a client.
    """
    b = torch.as_tensor(b, dtype=torch.float64)
    b = b[:, None] if b.ndim == 1 else b
    count, d = b.shape
    held = b if held is None else torch.as_tensor(held, dtype=torch.float64).view(count, d)
    h = [h] * count if isinstance(h, int | float) else list(h)
    copies = [copies] * count if isinstance(copies, int) else list(copies)
    xs, ys, rows, at = [], [], {"train": [], "validation": [], "test": []}, 0
    for i in range(count):
        for split, optimum, times in (("train", b[i], copies[i]), ("test", held[i], 1)):
            x, y = bowl(h[i], optimum)
            xs.append(x.repeat(times, 1))
            ys.append(y.repeat(times, 1))
            rows[split].append(torch.arange(at, at + times * d))
            at += times * d
        rows["validation"].append(torch.zeros(0, dtype=torch.int64))
    module = nn.Linear(d, 1, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(torch.as_tensor(start, dtype=torch.float64))
    federation = Federation(torch.cat(xs), torch.cat(ys), rows, Regression())
    training = Training(epochs, batch, optimiser or SGD(lr))
    return Trial(method, federation, module, training, executor, seed, every)


def examples(module, x, y, method, *, training, executor="loop", seed=0, every=1, task=None):
    """A trial on given examples: x[i] and y[i] are client i's training examples, and its test examples too."""
    at, rows = 0, {"train": [], "validation": [], "test": []}
    for part in x:
        for split in ("train", "test"):
            rows[split].append(torch.arange(at, at + len(part)))
        rows["validation"].append(torch.zeros(0, dtype=torch.int64))
        at += len(part)
    federation = Federation(torch.cat(x), torch.cat(y), rows, task or Regression())
    return Trial(method, federation, module, training, executor, seed, every)


def roster(count, module=None, sizes=None, size=1):
    """What a server knows of `count` clients of a module (default: one linear layer with `size` weights)."""
    model = Model(module or nn.Linear(size, 1, bias=False).double())
    sizes = torch.ones(count, dtype=torch.int64) if sizes is None else torch.tensor(sizes)
    names = tags([str(i) for i in range(count)])
    return Roster(theta=model.theta, layout=model.layout, sizes=sizes, training=Training(), seed=0, tags=names)


def noisy(count, width, seed=0, sizes=None):
    """Lists of x: [n_i, width] and y: [n_i, 1], different in every client."""
    draw = torch.Generator().manual_seed(seed)
    sizes = sizes or [7] * count
    x = [torch.randn(n, width, generator=draw, dtype=torch.float64) for n in sizes]
    y = [torch.randn(n, 1, generator=draw, dtype=torch.float64) for n in sizes]
    return x, y


@pytest.fixture(scope="session", name="bowls")
def _bowls():
    return bowls


@pytest.fixture(scope="session", name="examples")
def _examples():
    return examples


@pytest.fixture(scope="session", name="roster")
def _roster():
    return roster


@pytest.fixture(scope="session", name="noisy")
def _noisy():
    return noisy


@pytest.fixture
def executor():
    """Of numbers by hand; that the others give the same is in test_contract and test_variants."""
    return "vmap"


@pytest.fixture(scope="session")
def perceptron():
    """A seeded net with a base and a head: 2 inputs, 3 tanh features, 1 output."""

    def make(norm=False, seed=0):
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(3)] if norm else []
        return nn.Sequential(nn.Linear(2, 3), *middle, nn.Tanh(), nn.Linear(3, 1)).double()

    return make


@pytest.fixture(scope="session")
def worked():
    """Numbers worked out by hand, as float64 tensors by method and name."""

    def read(value):
        return (
            {k: read(v) for k, v in value.items()}
            if isinstance(value, dict)
            else torch.tensor(value, dtype=torch.float64)
        )

    text = Path(__file__).with_name("worked_examples.json").read_text()
    return read(json.loads(text))
