import pytest
import torch
from torch import nn

from kinfed.client import Training
from kinfed.errors import UsageError
from kinfed.federation import Federation
from kinfed.fleet import Simulation
from kinfed.layout import Layout
from kinfed.methods import FedAvg
from kinfed.model import Model
from kinfed.models import MODELS
from kinfed.optimiser import SGD
from kinfed.tasks import Classification


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("linear", (3, 32, 32), 10, 3072 * 10 + 10),
        ("mlp", (1, 8, 8), 10, 64 * 64 + 64 + 64 * 10 + 10),
        ("cnn", (3, 32, 32), 10, 62_006),
        ("cnn", (3, 32, 32), 100, 69_656),
        ("cnn", (1, 28, 28), 10, 44_426),
        ("cnn-bn", (3, 32, 32), 10, 878_730),
        ("cnn-bn", (3, 32, 32), 100, 924_900),
    ],
)
def test_parameters(name, shape, classes, count):
    module = MODELS[name](shape, classes)
    assert parameters(module) == count
    assert module(torch.zeros(2, *shape)).shape == (2, classes)


def test_parameters_of_the_mlp_with_two_hidden_layers():
    # 2 inputs, 16 and 16 hidden, 2 outputs: 48 + 272 + 34.
    module = MODELS["mlp"]((2,), 2, hidden=[16, 16])
    assert parameters(module) == 354
    assert module(torch.zeros(3, 2)).shape == (3, 2)


def test_buffers_of_batch_norm():
    module = MODELS["cnn-bn"]((3, 32, 32), 10)
    # Two means and variances of 32 and 64 channels, and two counters, which are no part of theta.
    assert sum(b.numel() for b in module.buffers()) == 194
    assert Layout.of(module).size == 878_730 + 192


@pytest.mark.parametrize("name", MODELS)
def test_the_last_layer_is_the_head(name):
    layout = Layout.of(MODELS[name]((1, 16, 20), 5))
    assert layout.head == {"head.weight", "head.bias"}


@pytest.mark.parametrize("name", ["cnn", "cnn-bn"])
def test_sixteen_pixels_are_the_least(name):
    assert MODELS[name]((1, 16, 16), 2)(torch.zeros(2, 1, 16, 16)).shape == (2, 2)
    for shape in ((1, 15, 16), (1, 16, 15), (16, 16), (64,)):
        with pytest.raises(UsageError, match=rf"{name}: needs images .* at least 16 by 16 .*got shape \[{shape[0]}"):
            MODELS[name](shape, 2)


@pytest.mark.parametrize("shape", [(), (3, 0)])
def test_an_mlp_needs_inputs(shape):
    for name in ("mlp", "linear"):
        with pytest.raises(UsageError, match="an example needs an axis or more, none of them empty"):
            MODELS[name](shape, 2)


def test_an_mlp_needs_hidden_widths():
    with pytest.raises(UsageError, match=r"hidden widths must be at least 1; got \[8, 0\]"):
        MODELS["mlp"]((2,), 2, hidden=(8, 0))


@pytest.mark.parametrize("name", MODELS)
def test_loop_and_vmap_train_alike(name):
    draw = torch.Generator().manual_seed(0)
    sizes, rows, at = [6, 3, 5], {"train": [], "validation": [], "test": []}, 0
    for size in sizes:
        for split, count in (("train", size), ("validation", 1), ("test", 2)):
            rows[split].append(torch.arange(at, at + count))
            at += count
    x = torch.randn(at, 1, 16, 16, generator=draw, dtype=torch.float64)
    federation = Federation(x, torch.arange(at) % 2, rows, Classification(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = MODELS[name]((1, 16, 16), 2).double()
    method, everyone, found = FedAvg(), torch.arange(3), {}
    for executor in ("loop", "vmap"):
        training = Training(epochs=2, batch=4, optimiser=SGD(lr=0.1))
        fleet = Simulation(federation, Model(module), method, training, executor=executor)
        roster = fleet.roster()
        sent = method.send(roster, method.start(roster), everyone)
        found[executor] = fleet.train(0, everyone, sent)[1].theta
    assert (found["loop"] - fleet.model.theta).abs().max() > 1e-3  # something was learned
    torch.testing.assert_close(found["loop"], found["vmap"], rtol=0, atol=1e-12)


def test_the_cnn_is_two_convolutions_and_three_layers():
    module = MODELS["cnn"]((3, 32, 32), 10)
    kinds = [type(part) for part in module if not isinstance(part, nn.ReLU | nn.Flatten | nn.MaxPool2d)]
    assert kinds == [nn.Conv2d, nn.Conv2d, nn.Linear, nn.Linear, nn.Linear]
    assert [p.numel() for p in module.parameters()][::2] == [450, 2_400, 48_000, 10_080, 840]
