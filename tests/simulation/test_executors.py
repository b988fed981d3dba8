"""Workers and batches: the same results whoever runs the programs, clear errors, a prompt end."""

import os
import signal
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from kinfed import SGD, Federation, Params, RunError, Training, UsageError
from kinfed.core.model import Model
from kinfed.errors import explain
from kinfed.methods import FedAvg, Local
from kinfed.simulation.execution import Execution
from kinfed.simulation.executors import Batched
from kinfed.simulation.simulation import Simulation
from kinfed.simulation.workers import FEW, group_by_size

SIZES = (5, 30, 12, 21, 8, 17, 26)


def federation(sizes=SIZES):
    draw = torch.Generator().manual_seed(0)
    owner = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])
    x = torch.randn(len(owner), 1, 8, 8, generator=draw)
    return Federation.from_arrays(x, torch.arange(len(owner)) % 2, owner)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 2)
        )


def simulation(method=None, module=None, **how):
    how = {"executor": "loop", "workers": 3} | how
    training = Training(epochs=2, batch=8, optimiser=SGD(0.1, momentum=0.5))
    fleet = Simulation(
        federation(), Model(module or network()), method or FedAvg(), training, execution=Execution(**how)
    )
    fleet.client_statistics()
    return fleet


class Watch(Local):
    """Does with a client what it is told instead of training."""

    def __init__(self, look):
        self.look = look

    def train(self, client, state, received):
        return state, self.look(client)


@pytest.mark.parametrize("cohort", [[0, 1, 2, 3, 4, 5, 6], [6, 2, 4], [5, 1]])
def test_workers_give_the_same_bits_as_one(cohort):
    cohort = torch.tensor(cohort)
    found = []
    for workers in (1, 2, 3):
        fleet = simulation(workers=workers)
        sent = FedAvg().send(fleet.roster(), FedAvg().start(fleet.roster()), cohort)
        _, uploads = fleet.train(0, cohort, sent)
        found.append((uploads.theta, fleet.evaluate(0, cohort, sent).scores))
    assert not torch.equal(found[0][0][0], found[0][0][1])
    for theta, scores in found[1:]:
        assert torch.equal(theta, found[0][0])
        assert all(torch.equal(scores[key].nan_to_num(-1), found[0][1][key].nan_to_num(-1)) for key in scores)


def test_workers_work_at_the_same_time_with_one_thread_each():
    meeting = threading.Barrier(3, timeout=20)

    def meet(client):
        meeting.wait()  # ends only if three programs are under way
        return torch.tensor([threading.get_ident(), torch.get_num_threads()])

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = simulation(Watch(meet)).train(0, torch.tensor([0, 1, 2, 3, 4, 5]), ())[1]
        assert len(set(found[:, 0].tolist())) == 3
        assert found[:, 1].tolist() == [1] * 6
        assert torch.get_num_threads() == 2
        few = simulation(Watch(lambda client: torch.tensor(torch.get_num_threads())), workers=4)
        assert few.train(0, torch.tensor([3, 4]), ())[1].tolist() == [2, 2]
        assert few.train(0, torch.tensor([3]), ())[1].tolist() == [4]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_exception_in_a_client_is_one_line_that_names_it(workers):
    def fail(client):
        if int(client.size) == len(federation().rows["train"][2]):
            raise IndexError("index 9 is out of bounds\nand so on")
        return client.size

    before = torch.get_num_threads()
    with pytest.raises(RunError, match=r"^round 5: client 2: IndexError: index 9 is out of bounds$") as raised:
        simulation(Watch(fail), workers=workers).train(4, torch.arange(7), ())
    assert isinstance(raised.value.__cause__, IndexError)
    assert torch.get_num_threads() == before

    def refuse(client):
        raise UsageError("set feedback")

    with pytest.raises(UsageError, match=r"^set feedback$"):
        simulation(Watch(refuse), workers=workers).train(0, torch.arange(7), ())


@pytest.fixture
def ctrl_c():
    """The terminal's signal is heard: a job that was started in the background is born deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("workers", [1, 3])
def test_ctrl_c_ends_the_clients_at_their_next_batch(workers):
    seen = []

    def train_for_minutes(client):
        for _ in client.batches(steps=3000):
            seen.append(time.perf_counter())
            if len(seen) == 10:
                os.kill(os.getpid(), signal.SIGINT)  # as the terminal does
            time.sleep(0.02)
        return client.size

    started, before = time.perf_counter(), torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        simulation(Watch(train_for_minutes), workers=workers).train(0, torch.arange(7), ())
    ended = time.perf_counter()
    assert ended - started < 20
    time.sleep(0.1)
    assert max(seen) <= ended  # nobody goes on
    assert torch.get_num_threads() == before


FULL = (  # what a GPU without memory says, by who asked for some
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
)


@pytest.mark.parametrize(("limit", "full"), [(1, FULL[0]), (2, FULL[0]), (4, FULL[0]), (2, FULL[1]), (2, FULL[2])])
def test_out_of_memory_halves_the_chunk_until_it_fits(limit, full, monkeypatch):
    cohort = torch.arange(7)
    fleets = [simulation(executor="vmap", chunk=chunk) for chunk in (limit, 6)]
    sent = FedAvg().send(fleets[0].roster(), FedAvg().start(fleets[0].roster()), cohort)
    expected = fleets[0].train(0, cohort, sent)[1].theta
    tried = []
    real = FedAvg.train

    def train(self, client, state, received):
        tried.append(len(client.shuffler.sizes))
        if len(client.shuffler.sizes) > limit:
            raise full
        return real(self, client, state, received)

    monkeypatch.setattr(FedAvg, "train", train)
    found = fleets[1].train(0, cohort, sent)[1].theta
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert tried[0] == 6
    assert sum(k for k in tried if k <= limit) == 7
    assert sum(k > limit for k in tried) <= 3  # 6, 3 and 2 at worst: what did not fit is not tried again
    again = len(tried)
    fleets[1].train(1, cohort, sent)
    assert max(tried[again:]) <= limit  # it is remembered


def test_what_did_not_fit_is_let_go_before_less_is_tried(monkeypatch):
    fleet = simulation(executor="vmap", chunk=6)
    cohort = torch.arange(7)
    sent = FedAvg().send(fleet.roster(), FedAvg().start(fleet.roster()), cohort)
    held = []
    real = FedAvg.train

    def train(self, client, state, received):
        assert not any(kept() is not None for kept in held)
        if len(client.shuffler.sizes) > 2:
            large = nn.Identity()  # stands for the tensors of a step
            held.append(weakref.ref(large))
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(self, client, state, received)

    monkeypatch.setattr(FedAvg, "train", train)
    fleet.train(0, cohort, sent)
    assert held


@pytest.mark.parametrize("full", FULL)
def test_memory_too_small_elsewhere_is_said_in_one_line(full):
    assert explain(full) == (
        1,
        "the GPU's memory is too small for these examples and models; use fewer clients or --device cpu",
    )
    assert "unexpected RuntimeError" in explain(RuntimeError("CUDA error: device-side assert triggered"))[1]


@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("full", FULL)
def test_memory_too_small_for_one_client_is_said(executor, full, monkeypatch):
    def train(self, client, state, received):
        raise full

    fleet = simulation(executor=executor, chunk=4)
    cohort = torch.arange(7)
    sent = FedAvg().send(fleet.roster(), FedAvg().start(fleet.roster()), cohort)
    monkeypatch.setattr(FedAvg, "train", train)
    with pytest.raises(
        RunError, match=r"round 1: the device's memory is too small to train a single client, [01]; use a smaller"
    ):
        fleet.train(0, cohort, sent)


@pytest.mark.parametrize(
    ("threads", "clients", "crew"),
    [
        (1, 9, (1, 1)),
        (2, 9, (1, 2)),
        (3, 9, (1, 3)),
        (5, 20, (2, 2)),
        (16, 20, (8, 2)),
        (16, 1, (1, 16)),
        (16, 5, (5, 2)),
    ],
)
def test_fused_workers_are_pairs_of_threads_and_a_lone_one_has_all(threads, clients, crew):
    batched = Batched(64, "fused", threads, fused=object())
    assert batched._crew(1 << 40, clients) == crew
    assert batched._crew(1, clients) == (1, {1: 1, 3: 3}.get(threads, 2))  # a little work
    assert Batched(64, threads=threads)._crew(1 << 40, clients) == (1, threads)  # vmap has one worker


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60), st.integers(1, 20))
def test_clients_of_a_group_have_about_as_many_examples(sizes, most):
    groups = list(group_by_size(sizes, most))
    assert sorted(place for group in groups for place in group) == list(range(len(sizes)))
    for group in groups:
        own = [sizes[place] for place in group]
        assert len(group) <= most
        assert len(group) * max(own) <= max(FEW, 2 * sum(own))
    assert [max(sizes[p] for p in g) for g in groups] == sorted(max(sizes[p] for p in g) for g in groups)


def test_client_code_that_cannot_be_batched_is_said_with_its_line(monkeypatch):
    def train(self, client, state, received):
        theta = client.descend(received.theta)
        return state, Params(theta if theta.sum() > 0 else -theta)

    fleet = simulation(executor="vmap")
    cohort = torch.arange(7)
    sent = FedAvg().send(fleet.roster(), FedAvg().start(fleet.roster()), cohort)
    monkeypatch.setattr(FedAvg, "train", train)
    with pytest.raises(UsageError, match=r"test_executors.py, line \d+: this cannot be batched .* executor 'loop'"):
        fleet.train(0, cohort, sent)
