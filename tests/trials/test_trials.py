"""Methods written outside the package: each runs under every executor, and saves what was scored."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import kinfed
from kinfed import SGD, Federation, Params, Training, fit
from kinfed.core.tasks import Classification
from kinfed.methods import METHODS, Averaging
from kinfed.simulation.execution import Execution

sys.path.insert(0, str(Path(__file__).parent))
from ditto import Ditto
from fedrod import FedRoD


@dataclass(frozen=True)
class Centroids(Averaging):
    """FedPAC's way with features: those of a class are drawn to the client's own mean of before training."""

    weight: float = 1.0

    def train(self, client, state, received):
        x, y, real = client.data
        z = client.model.features(received.theta, x)
        chosen = one_hot(y, client.task.classes).to(z.dtype) * real[:, None]
        means = chosen.T @ z / chosen.sum(0).clamp(min=1)[:, None]

        def objective(outputs, batch, features):
            apart = (features() - means[batch.y]).square().mean(1)
            return batch.mean(cross_entropy(outputs, batch.y, reduction="none") + self.weight * apart)

        return state, Params(client.descend(received.theta, objective=objective))

    def personalise(self, client, state, received):
        return {"shared": Params(received.theta)}


def federation():
    draw = torch.Generator().manual_seed(2)
    sizes = (9, 24, 15, 31)
    x = torch.randn(sum(sizes), 6, generator=draw, dtype=torch.float64)
    y = (x @ torch.randn(6, 3, generator=draw, dtype=torch.float64)).argmax(1)
    owner = torch.arange(4).repeat_interleave(torch.tensor(sizes)).numpy()
    return Federation.from_arrays(x, y, owner, split=kinfed.Split(0.25, 0.25), seed=1)


def module(norm=True):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        between = nn.BatchNorm1d(5) if norm else nn.Linear(5, 5)
        return nn.Sequential(nn.Linear(6, 5), between, nn.Tanh(), nn.Linear(5, 3)).double()


def run(method, executor="loop", norm=True, **how):
    execution = kinfed.Execution(executor, **how)
    return fit(
        method, federation(), module(norm), rounds=3, training=Training(2, 4, SGD(0.2)), seed=7, execution=execution
    )


def same(one, other, exact=False):
    rtol, atol = (0, 0) if exact else (1e-9, 1e-10)
    torch.testing.assert_close(one.history.models, other.history.models, rtol=rtol, atol=atol)
    for a, b in zip(one.history.scores, other.history.scores, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("method", [Ditto(0.5), FedRoD(), Centroids()], ids=lambda method: type(method).__name__)
def test_executors_agree_and_the_saved_model_is_the_scored_one(method, tmp_path):
    loop, vmap = run(method), run(method, "vmap", chunk=3)
    same(loop, vmap)
    kinfed.save(loop, tmp_path / "run")
    data = loop.federation
    rounds = loop.history.rounds.index(loop.history.select(loop.history.chosen))
    scored = loop.history.scores[rounds][loop.history.chosen, "test", "accuracy"]
    for i, rows in enumerate(data.rows["test"]):
        for loaded in (
            loop.model(position=i),
            kinfed.load_model(tmp_path / "run", module=module(), method=method, position=i),
        ):
            right = loaded(data.x[rows]).argmax(1) == data.y[rows]
            assert right.double().mean() == scored[i]


def test_ditto_without_a_pull_is_local_and_the_shared_model_is_not_touched_by_it():
    free, pulled, local = (run(method).history.scores[-1] for method in (Ditto(0.0), Ditto(0.9), METHODS["local"]()))
    assert torch.equal(free["own", "test", "loss"], local["own", "test", "loss"])
    assert torch.equal(free["shared", "test", "loss"], pulled["shared", "test", "loss"])
    assert not torch.equal(free["own", "test", "loss"], pulled["own", "test", "loss"])


def test_fused_trains_what_it_can_of_ditto():
    fused = run(Ditto(0.5), "fused", norm=False)
    same(fused, run(Ditto(0.5), norm=False))
    assert fused.reason == "as requested"


def test_balanced_softmax_and_the_personal_head_by_hand():
    """One step of one client on all its examples: the personal head moves alone, and moves nothing else."""
    x, y = torch.tensor([[1.0], [2.0], [-1.0], [0.5]] * 3, dtype=torch.float64), torch.tensor([0, 0, 1, 0] * 3)
    rows = {"train": [torch.arange(4)], "validation": [torch.arange(4, 8)], "test": [torch.arange(8, 12)]}
    data = Federation(x, y, rows, Classification(2))
    net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 2)).double()
    found = fit(FedRoD(), data, net, rounds=1, training=Training(1, 4, SGD(0.1)), execution=Execution("loop")).model(
        position=0
    )

    base, head = nn.Linear(1, 2).double(), nn.Linear(2, 2).double()
    base.load_state_dict(net[0].state_dict())
    head.load_state_dict(net[1].state_dict())
    own = nn.Linear(2, 2).double()
    own.load_state_dict(net[1].state_dict())
    z = base(x[:4])
    generic = head(z)
    chances = torch.tensor([3.0, 1.0], dtype=torch.float64) * generic.exp()
    balanced = -(chances[torch.arange(4), y[:4]] / chances.sum(1)).log().mean()
    personal = cross_entropy(generic.detach() + own(z.detach()), y[:4])
    (balanced + personal).backward()
    for part, other in ((base, found[0]), (head, found[1].generic), (own, found[1].personal_head)):
        for p, q in zip(part.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.data - 0.1 * p.grad, q.data)


def test_a_model_that_is_nothing_but_its_head_is_told():
    with pytest.raises(kinfed.UsageError, match="the model needs a head after other layers"):
        fit(FedRoD(), federation(), nn.Linear(6, 3).double(), rounds=1)
