"""Clients compared by what their models answer to random inputs: by hand, in two ways, and with every method."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from kinfed import METHODS, Federation, Training, UsageError, fit
from kinfed.core.engine import Rounds
from kinfed.core.model import Model
from kinfed.core.optimiser import SGD
from kinfed.core.probe import Probe
from kinfed.core.seeding import key, normal
from kinfed.core.tasks import Classification, Regression
from kinfed.experiments import parts
from kinfed.methods import FedAMP, HeurFedAMP, PFedGAT, PFedGraph
from kinfed.methods.parts.answers import Answers
from kinfed.methods.parts.attention import Attention
from kinfed.methods.parts.heuristic_attention import Heuristic
from kinfed.methods.parts.model_attention import Cosine, compared
from kinfed.simulation.execution import Execution

float64 = torch.float64
FEW = Answers(inputs=5)
EVERY = {
    "fedamp": FedAMP(attention=Cosine(compare=FEW)),
    "fedamp, nearest": FedAMP(attention=Cosine(compare=FEW), neighbours=1),
    "heurfedamp": HeurFedAMP(attention=Heuristic(compare=Answers(5, pooled=True, moved=False))),
    "pfedgraph": PFedGraph(compare=FEW),
    "pfedgat": PFedGAT(graph=Attention(heads=2, width=3, features=FEW)),
}


def federation(shape=(3,), classes=2, task=None):
    """Four clients with 6 training examples each; two and two see opposite labels."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, *shape, generator=draw, dtype=float64)
    y = (x.flatten(1)[:, 0] > 0).long()
    y = torch.where(torch.arange(40) < 20, y, 1 - y)
    owned = torch.arange(40).split(10)
    rows = {"train": [o[4:] for o in owned], "validation": [o[:2] for o in owned], "test": [o[2:4] for o in owned]}
    return Federation(x, x.flatten(1)[:, :classes] if task else y, rows, task or Classification(classes))


def net(norm=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 2)).double()


def go(method, module=None, data=None, rounds=3, executor="loop", **how):
    training = Training(1, 3, SGD(0.5))
    how = {"participation": 0.75, "seed": 5, "execution": Execution(executor), **how}
    return fit(method, data or federation(), module or net(), rounds=rounds, training=training, **how)


def probe(module, shape=(3,), task=None):
    model = Model(module)
    return model, Probe(model, shape, task or Classification(2), 5)


def test_by_hand(roster):
    """One weight a class: of the inputs x, model v answers the sigmoid of 2 v x; the initial one, 0, answers 1/2."""
    line = nn.Linear(1, 2, bias=False).double()
    nn.init.zeros_(line.weight)
    known, ask = roster(2, line), Probe(Model(line), (1,), Classification(2), 5)
    theta = torch.tensor([[1.0, -1.0], [-0.5, 0.5]], dtype=float64)
    x = normal(key(5, "probe"), torch.empty(3, 1, dtype=float64))[:, 0].tolist()
    known = replace(known, probe=ask)
    sure = [[1 / (1 + np.exp(-2 * v * one)) for one in x] for v in (1.0, -0.5)]
    wanted = np.array([[[p, 1 - p] for p in row] for row in sure])  # [2, 3, 2]
    np.testing.assert_allclose(Answers(3, moved=False).describe(known, theta), wanted.reshape(2, 6), rtol=1e-12)
    np.testing.assert_allclose(Answers(3).describe(known, theta), (wanted - 0.5).reshape(2, 6), rtol=1e-12)
    pooled = Answers(3, pooled=True, moved=False).describe(known, theta)
    np.testing.assert_allclose(pooled, wanted.mean(1), rtol=1e-12)
    one, other = wanted.mean(1)
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    alike, layout = compared(Answers(3, pooled=True, moved=False), known, theta)
    assert float(alike[0] @ alike[1]) == pytest.approx(cosine, abs=1e-12)
    assert (layout.size, layout.parameters) == (2, 2)


def test_a_model_that_has_not_moved_keeps_its_answers_so_that_it_has_a_direction(roster):
    known = replace(roster(2, net()), probe=probe(net())[1])
    theta = torch.stack([known.theta, known.theta + 0.1])
    still, moved = FEW.describe(known, theta)
    torch.testing.assert_close(still.view(5, 2).sum(1), torch.ones(5, dtype=float64))
    torch.testing.assert_close(moved.view(5, 2).sum(1), torch.zeros(5, dtype=float64))


def images():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))


class Series(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


@pytest.mark.parametrize(
    ("make", "shape", "task"),
    [
        (lambda: net(norm=True), (3,), Classification(2)),
        (images, (1, 6, 6), Classification(2)),
        (Series, (4, 2), Classification(2)),
        (Series, (4, 2), Regression()),
    ],
    ids=["table", "image", "series", "regression"],
)
def test_answers_are_those_of_the_plain_module(make, shape, task):
    """Each model loaded into a module of its own, on inputs of the shape of the data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model, ask = probe(make().double(), shape, task)
    theta = (
        model.theta + 0.1 * torch.randn(3, len(model.theta), generator=torch.Generator().manual_seed(3)).double().abs()
    )
    found = ask(theta, 4)
    x = normal(key(5, "probe"), torch.empty(4, *shape, dtype=float64))
    assert found.shape == (3, 4, 2)
    for one, answers in zip(theta, found, strict=True):
        with torch.no_grad():
            outputs = model.export(one)(x)
        wanted = outputs.softmax(1) if isinstance(task, Classification) else outputs
        torch.testing.assert_close(answers, wanted, rtol=1e-12, atol=1e-12)


def test_inputs_are_the_same_in_every_round_and_other_with_another_seed():
    model, ask = probe(net())
    theta = model.theta[None]
    assert torch.equal(ask(theta, 4), ask(theta, 4))
    assert not torch.equal(ask(theta, 4), replace(ask, seed=6)(theta, 4))


@pytest.mark.parametrize("name", EVERY)
def test_executors_agree_and_a_resumed_run_ends_with_the_same_bits(name, tmp_path):
    """With BatchNorm, whose running statistics are part of what answers."""
    method = EVERY[name]
    whole = go(method, net(norm=True))
    other = go(method, net(norm=True), executor="vmap")
    torch.testing.assert_close(whole.history.models["theta"], other.history.models["theta"], rtol=1e-9, atol=1e-10)
    go(method, net(norm=True), rounds=Rounds(3, until=2), folder=tmp_path / "run")
    again = go(method, net(norm=True), folder=tmp_path / "run")
    assert torch.equal(whole.history.models["theta"], again.history.models["theta"])
    for one, two in zip(whole.history.relations, again.history.relations, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", EVERY)
def test_with_a_personal_head_the_server_asks_with_the_initial_one(name):
    found = go(replace(EVERY[name], personal=("head.*",)))
    assert found.sharing.count("personal")[0] == 2
    assert all(torch.isfinite(relation).all() for relation in found.history.relations)


def test_groups_with_opposite_answers_are_told_apart():
    relation = go(FedAMP(attention=Cosine(compare=Answers())), rounds=4, participation=1.0).history.relations[-1]
    within = relation[:2, :2].sum() + relation[2:, 2:].sum()
    assert float(within) / 4 > 0.9


def test_inputs_that_a_model_cannot_take_are_refused_in_one_line():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(7, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.out(self.table(x.long()).mean(1))

    data = federation()  # of numbers of words, once their signs are gone
    with pytest.raises(UsageError, match=r"cannot answer random numbers of shape \[5, 3\]") as caught:
        go(EVERY["pfedgraph"], Words().double(), replace(data, x=data.x.abs()))
    assert "\n" not in str(caught.value)


def test_a_config_names_answers_where_it_names_other_ways_to_compare():
    made, table = parts.make(METHODS, {"name": "pfedgraph", "compare": "answers"}, "method")
    assert made == PFedGraph(compare=Answers())
    assert table["compare"] == {"name": "answers", "inputs": 100, "pooled": False, "moved": True}
    assert parts.make(METHODS, {"name": "pfedgraph", "compare": "moved"}, "method")[0] == PFedGraph()
    with pytest.raises(UsageError, match=r"method.compare must be 'moved' or 'answers'; got 'answer'"):
        parts.make(METHODS, {"name": "pfedgraph", "compare": "answer"}, "method")
