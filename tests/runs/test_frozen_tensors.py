"""Frozen tensors are stored once, in memory and in files, whatever the method."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils._pytree import tree_leaves

import kinfed
from kinfed.core.engine import Rounds
from kinfed.methods import METHODS

CLIENTS, STILL = 6, 4 * 30 + 30  # clients, and frozen numbers
NAMED = {"frozen": ("still.*",)}
METHODS_HERE = ("local", "fedavg", "ditto", "fedrep", "fedamp", "knn-per", "pfedbayes")


class Net(nn.Module):
    """A frozen layer that is larger than all that is trained."""

    def __init__(self, still=False):
        super().__init__()
        self.still, self.body, self.head = nn.Linear(4, 30), nn.Linear(30, 3), nn.Linear(3, 2)
        self.still.requires_grad_(not still)

    def forward(self, x):
        return self.head(self.body(self.still(x).tanh()).tanh())


def net(still=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net(still)


def federation():
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(20 * CLIENTS, 4, generator=draw)
    return kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(len(x)) % CLIENTS)


def fit(name, rounds=2, still=False, **how):
    method = METHODS[name](**({} if still else NAMED))
    training = kinfed.Training(epochs=1)
    how = {"execution": kinfed.Execution("loop", workers=1), **how}
    return kinfed.fit(method, federation(), net(still), rounds=rounds, training=training, **how)


def width(t):
    return t.shape[-1] if t.ndim else 1


@pytest.mark.parametrize("still", [False, True], ids=["by name", "without gradient"])
@pytest.mark.parametrize("name", METHODS_HERE)
def test_no_table_over_clients_holds_what_is_frozen(name, still, tmp_path):
    fit(name, Rounds(4, until=2), still, folder=tmp_path / "part")
    with safe_open(tmp_path / "part" / "checkpoint.safetensors", "pt") as file:
        sizes = {key: file.get_tensor(key).numel() / CLIENTS for key in file.keys() if "score" not in key}  # noqa: SIM118
    trained = 101  # numbers
    assert max(sizes.values()) <= 2 * trained  # of pfedbayes, which has two of each
    run = fit(name, still=still)
    assert width(run.history.models["theta"]) == run.architecture.layout.size
    assert run.final is not None
    assert all(
        width(t) != run.architecture.layout.whole.size for t in tree_leaves(tuple(run.final)[:1]) if hasattr(t, "shape")
    )
    kinfed.save(run, tmp_path / "run")
    found = load_file(tmp_path / "run" / "models.safetensors")
    still_named = [key for key in found if key.partition("/")[2].startswith("still.") and not key.endswith("rho")]
    assert sorted(still_named) == ["*/still.bias", "*/still.weight"]
    begun = net().still.state_dict()
    assert all(torch.equal(found[f"*/still.{key}"], value) for key, value in begun.items())
    state = load_file(tmp_path / "run" / "state.safetensors")
    assert state["roster.theta"].numel() == run.architecture.layout.size
    for client in "05":
        loaded = kinfed.load_model(tmp_path / "run", client, net(still), run.method)
        x = federation().x
        assert torch.equal(loaded(x), run.model(client)(x))


def test_modules_that_are_loaded_share_nothing_and_those_of_a_predictor_what_is_frozen(tmp_path):
    run = fit("local")
    kinfed.save(run, tmp_path / "run")
    saved = kinfed.Run.open(tmp_path / "run", net(), run.method)
    for load in (run.model, saved.model):
        first, second = load("0"), load("1")
        before = second.still.weight.clone()
        with torch.no_grad():
            first.still.weight.add_(1)
        assert torch.equal(second.still.weight, before)
        assert torch.equal(load("2").still.weight, before)
    one, other = (saved.predictor().module(name) for name in "01")
    assert one.still.weight is other.still.weight
    assert not torch.equal(one.head.weight, other.head.weight)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep"])
def test_executors_agree_on_layers_of_which_a_part_is_frozen(name):
    """A bias without its weight, and the layer in the middle: also in fused form, which reads them beside theta."""
    for frozen in (("0.bias",), ("1.*",), ("1.weight", "2.bias")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            module = nn.Sequential(
                nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)
            ).double()
        data = federation()
        data = kinfed.Federation.from_arrays(data.x.double(), data.y, torch.arange(len(data.x)) % CLIENTS)
        found = [
            kinfed.fit(METHODS[name](frozen=frozen), data, module, rounds=2, execution=kinfed.Execution(executor))
            for executor in ("loop", "vmap", "fused")
        ]
        for other in found[1:]:
            torch.testing.assert_close(other.history.models["theta"], found[0].history.models["theta"])
        layout = found[0].architecture.layout
        assert layout.frozen == layout.match(frozen)
        assert set(found[0].architecture.frozen) == layout.frozen
