"""A client's batches and local training, against plain PyTorch."""

from copy import deepcopy
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

from kinfed import SGD, Adam, Federation, Training, UsageError
from kinfed.core.model import Model
from kinfed.core.tasks import Classification
from kinfed.methods import Local, towards
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

DRAW = torch.Generator().manual_seed(1)


def federation(sizes):
    n = sum(s + 1 for s in sizes)
    x = torch.randn(n, 4, generator=DRAW, dtype=torch.float64)
    y = torch.arange(n) % 2
    owned = torch.arange(n).split([s + 1 for s in sizes])
    rows = {"train": [o[1:] for o in owned], "validation": [o[:0] for o in owned], "test": [o[:1] for o in owned]}
    return Federation(x, y, rows, Classification(2))


class Watch(Local):
    """Reports what the client's program sees instead of training."""

    def __init__(self, look):
        self.look = look

    def train(self, client, state, received):
        return state, self.look(client)


def look(sizes, what, batch=3, epochs=2, executor="loop", module=None, data=None):
    data = data or federation(sizes)
    module = module or nn.Linear(4, 2).double()
    fleet = Simulation(
        data,
        Model(module),
        Watch(what),
        Training(epochs=epochs, batch=batch, optimiser=SGD(0.1)),
        execution=Execution(executor),
    )
    fleet.client_statistics()
    return data, fleet.train(0, torch.arange(len(sizes)), ())[1]


@given(st.lists(st.integers(2, 11), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 3))
def test_an_epoch_shows_every_example_once_in_both_executors(sizes, batch, epochs):
    def weights(client):
        """[n] how often each pooled example was seen."""
        seen = torch.zeros(len(client.shuffler.pool.x), dtype=torch.float64)
        for b in client.batches():
            same = (b.x[:, None] == client.shuffler.pool.x).all(-1).double()  # [B, n]
            seen = seen + ((torch.ones(len(b.x), dtype=torch.float64) if b.weight is None else b.weight) @ same)
        return seen

    for executor in ("loop", "vmap"):
        data, seen = look(sizes, weights, batch, epochs, executor)
        for mine, rows in zip(seen, data.rows["train"], strict=True):
            expected = torch.zeros(len(data.x), dtype=torch.float64)
            expected[rows] = epochs
            assert torch.equal(mine, expected)


def test_executors_draw_the_same_batches_and_every_call_shuffles_anew():
    def firsts(client):
        return torch.stack([next(iter(client.batches())).x[:2, 0] for _ in range(2)])

    data = federation((5, 9, 7))
    loop, vmap = (look((5, 9, 7), firsts, executor=e, data=data)[1] for e in ("loop", "vmap"))
    assert torch.equal(loop, vmap)
    assert not torch.equal(loop[:, 0], loop[:, 1])


def test_exactly_as_many_steps_as_asked_for():
    for executor in ("loop", "vmap"):
        _, counts = look(
            (2, 7, 11),
            lambda c: sum((torch.ones(()) if b.valid is None else b.valid.float()) for b in c.batches(steps=5)),
            executor=executor,
        )
        assert counts.tolist() == [5, 5, 5]
        _, counts = look((2, 7, 11), lambda c: c.count_steps(), executor=executor)
        assert counts.tolist() == [2, 6, 8]


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_training_may_be_so_many_steps_whatever_a_client_has(executor):
    sizes, data = (2, 7, 11), federation((2, 7, 11))
    module = nn.Linear(4, 2).double()
    found = []
    for training, program in (
        (Training(99, 3, SGD(0.1), steps=5), lambda c: c.descend(c.model.theta)),
        (Training(99, 3, SGD(0.1), steps=5), lambda c: c.count_steps()),
        (Training(99, 3, SGD(0.1), steps=5), lambda c: c.count_steps(epochs=2)),
    ):
        fleet = Simulation(data, Model(module), Watch(program), training, execution=Execution(executor))
        fleet.client_statistics()
        found.append(fleet.train(0, torch.arange(3), ())[1])
    assert found[1].tolist() == [5, 5, 5]
    assert found[2].tolist() == [2, 6, 8]

    def by_hand(client):
        theta = client.model.theta
        for batch in client.batches(steps=5):
            theta = theta - 0.1 * client.gradient(theta, batch)
        return theta

    _, expected = look(sizes, by_hand, module=module, data=data)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-12)
    assert Training(2, 3).count_steps(torch.tensor([2, 7, 11])).tolist() == [2, 6, 8]
    with pytest.raises(UsageError, match=r"^Training.steps must be at least 1; got 0 "):
        Training(steps=0)


@pytest.mark.parametrize("optimiser", [SGD(0.1), SGD(0.1, momentum=0.9, weight_decay=0.01), Adam(0.01)])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_descend_is_what_pytorch_does_on_the_same_batches(optimiser, executor):
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    sizes, epochs = (7, 3), 3
    seen = {}

    def watched(client):
        seen[int(client.size)] = [(b.x, b.y) for b in client.batches(epochs)]
        return client.size

    def trained(client):
        return client.descend(client.model.theta, epochs=epochs, optimiser=optimiser)

    data = federation(sizes)
    look(sizes, watched, module=module, data=data)
    _, theta = look(sizes, trained, module=module, data=data, executor=executor)
    for size, mine in zip(sizes, theta, strict=True):
        copy = deepcopy(module)
        settings = {f.name: getattr(optimiser, f.name) for f in fields(optimiser)}
        if isinstance(optimiser, Adam):
            settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
        stock = {SGD: torch.optim.SGD, Adam: torch.optim.Adam}[type(optimiser)](copy.parameters(), **settings)
        for x, y in seen[size]:
            stock.zero_grad()
            F.cross_entropy(copy(x), y).backward()
            stock.step()
        expected = torch.cat([p.detach().reshape(-1) for p in copy.parameters()])
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def test_frozen_tensors_do_not_move_and_a_penalty_pulls():
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    def head_only(client):
        return client.descend(client.model.theta, only=client.model.layout.head, optimiser=SGD(0.1, weight_decay=0.1))

    _, theta = look((5, 8), head_only, module=module, executor="vmap")
    start = Model(module).theta
    base, head = slice(0, 25), slice(25, None)
    assert torch.equal(theta[:, base], start[base].expand(2, -1))
    assert (theta[:, head] != start[head]).all()

    def pulled(client):
        return client.descend(client.model.theta, penalty=towards(torch.zeros_like(client.model.theta), 9.0))

    _, near = look((5, 8), pulled, module=module, executor="loop")
    assert (near.norm(dim=1) < 0.01 + 0.5 * start.norm()).all()


def test_noise_is_standard_normal_and_the_same_in_both_executors():
    def noise(client):
        return client.noise(torch.empty(2000, dtype=torch.float64))

    loop, vmap = (look((4, 6), noise, executor=e)[1] for e in ("loop", "vmap"))
    assert torch.equal(loop, vmap)
    assert not torch.equal(loop[0], loop[1])
    assert abs(float(loop.mean())) < 0.07
    assert abs(float(loop.std()) - 1) < 0.05


def test_settings_are_checked():
    with pytest.raises(UsageError, match=r"^Training.epochs must be at least 1; got 0 "):
        Training(epochs=0)
    with pytest.raises(UsageError, match="lr must be positive"):
        SGD(lr=0)
    with pytest.raises(UsageError, match="beta2"):
        Adam(beta2=1.0)
