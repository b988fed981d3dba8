"""Buffers of integers and truth values: each client has its own, in training, in files and in what is exported."""

import copy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import kinfed
from kinfed import methods
from kinfed.core.engine import Rounds
from kinfed.core.model import Model, find_counters
from kinfed.runs.run import Run
from kinfed.serving.export import export

SIZES = (5, 8, 11)
MANY = 1 << 17  # numbers of a constant that is too large to be each client's


class Warm(nn.Module):
    """Its outputs grow with the steps that it has taken, and jump once these are four."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ready", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("seen", torch.tensor([-7, 300], dtype=torch.int16), persistent=False)
        self.register_buffer("order", torch.arange(MANY) % 4)

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.seen = self.seen + 1
            self.ready = self.ready | (self.steps > 3)
        grown = self.head(self.norm(self.body(x[:, self.order[:4]])))
        return grown * (1 + self.steps / 10) + self.ready + self.seen[0]


def net(kind=Warm):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return kind().double()


def federation():
    draw = torch.Generator().manual_seed(2)
    client = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES) + 6)
    x = torch.randn(len(client), 4, generator=draw, dtype=torch.float64)
    return kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), client, split=kinfed.Split(0.2, 0.2))


def fit(method, rounds=3, module=None, executor="loop", batch=100, **how):
    training = kinfed.Training(epochs=1, batch=batch, optimiser=kinfed.SGD(0.1))
    module = net() if module is None else module
    how = {"execution": kinfed.Execution(executor, workers=1), **how}
    return kinfed.fit(method, federation(), module, rounds=rounds, training=training, **how)


def by_hand(rounds, averaged):
    """Full batches with torch alone; of what is averaged, integers and truth values stay with their client."""
    data, modules = federation(), [net() for _ in SIZES]
    for _ in range(rounds):
        for rows, module in zip(data.rows["train"], modules, strict=True):
            step = torch.optim.SGD(module.train().parameters(), lr=0.1)
            step.zero_grad()
            F.cross_entropy(module(data.x[rows]), data.y[rows]).backward()
            step.step()
        if averaged:
            sizes = torch.tensor([len(rows) for rows in data.rows["train"]]).double()
            states = [module.state_dict() for module in modules]
            for name, first in states[0].items():
                if first.is_floating_point():
                    mean = sum(w * state[name] for w, state in zip(sizes / sizes.sum(), states, strict=True))
                    for state in states:
                        state[name].copy_(mean)
    return modules


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("method", [kinfed.Local(), kinfed.FedAvg()], ids=["local", "fedavg"])
def test_every_client_has_what_a_loop_of_torch_alone_gives_it(method, executor):
    run = fit(method, rounds=5, executor=executor)
    at = run.history.select(run.history.chosen) + 1
    for i, wanted in enumerate(by_hand(at, isinstance(method, kinfed.FedAvg))):
        found = run.model(i)
        assert int(found.steps) == at
        for name, value in [*wanted.named_parameters(), *wanted.named_buffers()]:
            if "num_batches" not in name:
                torch.testing.assert_close(dict(found.state_dict(), seen=found.seen)[name], value, atol=1e-12, rtol=0)


@pytest.mark.parametrize("method", [kinfed.FedAvg(), methods.Ditto(), methods.FedRep()], ids=lambda m: type(m).__name__)
def test_executors_agree_on_clients_with_other_numbers_of_steps(method):
    one, other = (fit(method, executor=executor, batch=3) for executor in ("loop", "vmap"))
    for i, rows in enumerate(federation().rows["train"]):
        theirs = other.model(i).state_dict()
        for name, value in one.model(i).state_dict().items():
            torch.testing.assert_close(theirs[name], value, atol=1e-9, rtol=1e-9)
        if type(method) is kinfed.FedAvg:
            at = one.history.select(one.history.chosen) + 1
            assert int(one.model(i).steps) == at * -(-len(rows) // 3)


def test_a_resumed_run_ends_with_the_same_bits_and_its_folder_holds_each_clients_own(tmp_path):
    whole = fit(kinfed.FedAvg(), rounds=kinfed.Rounds(4, evaluate_every=2))
    fit(kinfed.FedAvg(), rounds=kinfed.Rounds(4, evaluate_every=2, until=2), folder=tmp_path / "begun")
    again = fit(kinfed.FedAvg(), rounds=kinfed.Rounds(4, evaluate_every=2), folder=tmp_path / "begun")
    assert torch.equal(whole.history.models["theta"], again.history.models["theta"])
    assert whole.history.scores[-1].keys() == again.history.scores[-1].keys()
    kinfed.save(whole, tmp_path / "run")
    export(Run.open(tmp_path / "run", net()), ["0", "1", "2"], "safetensors", tmp_path / "out")
    x = federation().x
    for i in range(3):
        mine = whole.model(i)
        assert int(mine.steps) > 0
        loaded = kinfed.load_model(tmp_path / "run", i, net())
        assert torch.equal(loaded(x), mine(x))
        assert torch.equal(loaded.seen, mine.seen)
        assert load_file(tmp_path / "out" / f"{i}.safetensors")["steps"] == mine.steps
    stored = load_file(tmp_path / "run" / "models.safetensors")
    assert stored["1/steps"].dtype == torch.int64
    assert stored["1/ready"].dtype == torch.bool
    assert not any(key.endswith("order") for key in stored)  # the module has it


class Masked(nn.Module):
    """A constant mask, and flags that change in some mode, or late."""

    def __init__(self, change=lambda self, x: None):
        super().__init__()
        self.head, self.change = nn.Linear(4, 2), change
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("flag", torch.zeros(1, dtype=torch.int32))

    def forward(self, x):
        self.change(self, x)
        return self.head(x * self.mask) + self.flag


def counted_in_evaluation(self, x):
    if not self.training:
        self.flag += 1


def raised_late(self, x):
    if self.training and float(self.head.weight.detach().abs().max()) > 1:
        self.flag.fill_(1)


def longer_with_each_pass(self, x):
    if self.training:
        self.flag = torch.cat([self.flag, self.flag])


def test_constants_leave_the_model_one_for_all_and_evaluation_leaves_no_trace():
    plain = fit(kinfed.FedAvg(), module=net(Masked))
    assert plain.history.kept.shared == ["theta"]
    assert plain.architecture.layout.size == 10
    found = fit(kinfed.FedAvg(), module=net(lambda: Masked(counted_in_evaluation)))
    assert int(found.model(0).flag) == 0
    x = federation().x
    assert torch.equal(found.architecture(found.theta(0), x), found.architecture(found.theta(0), x))


def test_what_cannot_be_kept_is_refused_in_a_line():
    module = net(lambda: Masked(raised_late))
    with pytest.raises(kinfed.UsageError, match=r"buffer 'flag' of the model \(int32 \[1\]\) changes in training, but"):
        fit(kinfed.Local(), rounds=200, module=module)
    with pytest.raises(kinfed.UsageError, match=r"buffer 'flag' .* changes its shape or type .* int32 \[1\] to int32"):
        fit(kinfed.Local(), module=net(lambda: Masked(longer_with_each_pass)))
    with pytest.raises(kinfed.UsageError, match=r"pfedbayes: training moves buffers \(mask, flag\)"):
        fit(kinfed.methods.PFedBayes(), module=net(lambda: Masked(lambda self, x: self.training and self.flag.add_(1))))


def test_frozen_counts_stay_as_they_were():
    run = fit(kinfed.FedAvg(frozen=("steps", "norm.*")), executor="vmap")
    assert all(int(run.model(i).steps) == 0 for i in range(3))
    assert float(run.model(0).norm.running_mean.abs().sum()) == 0
    assert int(run.model(0).seen[0]) > -7


def test_bytes_are_held_exactly_by_every_kind_of_float():
    module = Warm()
    module.steps.fill_(-(2**62) - 12345)
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        model = Model(copy.deepcopy(module), dtype=kind)
        model = model.carry(find_counters(model.module) - {"order"})
        tensors = model.layout.tensors(model.theta)
        assert model.theta.dtype == kind
        assert (int(tensors["steps"]), tensors["seen"].tolist()) == (-(2**62) - 12345, [-7, 300])
        assert torch.equal(model.layout.flatten(tensors), model.theta)


class Doubled(nn.BatchNorm1d):
    """A normalisation of the user's own, which keeps PyTorch's count of batches."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("method", [kinfed.Local(), kinfed.FedAvg()], ids=["local", "fedavg"])
def test_a_subclass_of_batch_norm_counts_its_clients_batches(method):
    module = net(lambda: nn.Sequential(nn.Linear(4, 3), Doubled(3), nn.Linear(3, 2)))
    run = fit(method, rounds=Rounds(3, evaluate_every=3), module=module)  # the last models are kept
    assert [int(run.model(str(i))[1].num_batches_tracked) for i in range(len(SIZES))] == [3, 3, 3]
