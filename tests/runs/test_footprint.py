"""What a server needs is known before the first round; here it is counted, tensor by tensor."""

import resource
import weakref

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import kinfed
from kinfed.cli import main
from kinfed.core import checkpoint as module_of_checkpoints, engine
from kinfed.core.engine import Rounds
from kinfed.core.fleet import Evaluation
from kinfed.core.graph import Graph
from kinfed.core.history import History, Recorder
from kinfed.core.layout import Layout
from kinfed.core.mixins import model_for
from kinfed.core.sharing import Sharing
from kinfed.methods import METHODS
from kinfed.methods.sfl import Similarity
from kinfed.runs import footprint as module
from kinfed.runs.footprint import check, footprint
from kinfed.simulation import devices
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

CPU = torch.device("cpu")
NETWORKS = {"pfedhn", "panacea", "pfedla"}  # have a limit of their own for the network that writes models
SPLITTING = {"cfl": {"eps1": 1e9, "eps2": 0.0}}  # updates are compared where a cluster may split
CASES = [(name, SPLITTING.get(name, {})) for name in METHODS if name not in NETWORKS]
CASES += [("pfedgat", {"sketch": 64})]
CASES += [("kin", {"by_layer": False})]
CASES += [("sfl", {"structure": Similarity()})]


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are made while it is on, as long as they live."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0

    def add(self, t):
        if t.layout is not torch.strided:  # a frame around others
            return
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.live or not size:
            return

        def end(_):
            del self.live[key]
            self.now -= size

        self.now += size
        self.peak = max(self.peak, self.now)
        self.live[key] = weakref.ref(storage, end)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.add(t)
        return out


class Fleet:
    """The real one for training, which does not count; nothing is scored."""

    def __init__(self, fleet, live):
        self.fleet, self.live = fleet, live

    def train(self, round, cohort, sent):
        with _disable_current_modes():
            found = self.fleet.train(round, cohort, sent)
        for t in tree_leaves(found):
            self.live.add(t)
        return found

    def evaluate(self, round, cohort, sent):
        return Evaluation({}, {})


class Unscored(Recorder):
    def keep(self, *what):
        pass


def counted(method, clients, width, share):
    """Bytes at the peak of two rounds, and what is said of them beforehand."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    draw = torch.Generator().manual_seed(0)
    x, who = torch.randn(4 * clients, width, generator=draw), torch.arange(4 * clients) % clients
    y = torch.arange(4 * clients) // clients % 2
    data = kinfed.Federation.from_arrays(x, y, who, split=kinfed.Split(0.25, 0.25))
    model, how = model_for(method, net), Execution("vmap", chunk=100)
    fleet = Simulation(data, model, method, kinfed.Training(epochs=1), execution=how, share=share)
    weights = torch.rand(clients, clients, generator=draw)
    roster, live = fleet.roster(Graph(weights + torch.eye(clients), "given")), Live()
    recorder = Unscored(History(tuple(data.names), data.task))
    with live:
        engine.run(fleet.method, roster, Fleet(fleet, live), recorder, rounds=2, participation=share)
    shared = Sharing.from_method(method, model.layout).shared_layout
    parts = footprint(method, shared, clients, share, Rounds(1))
    return live.peak, sum(part.bytes for part in parts[:3])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_what_is_said_of_a_method_is_what_its_server_takes(name, settings, monkeypatch):
    """At most a tenth more than it takes, and at least 60 % of it, whichever of clients and numbers are many."""
    monkeypatch.setattr(engine, "RELATED", 0)  # as with many clients
    method = METHODS[name](**settings)
    few = 80 if name == "fedpac" else 260  # for which it solves a problem each
    for clients, width, share in ((few, 3, 1.0), (260, 3, 0.1), (12, 60, 1.0), (24, 60, 0.25)):
        peak, said = counted(method, clients, width, share)
        small = 250_000  # bytes that grow neither with pairs of clients nor with models
        assert said <= 1.1 * peak + small / 10, (clients, width, share)
        if clients > 100 or name not in ("pfedgat", "attention"):  # whose network has rows as long as a model
            assert said + small >= 0.6 * peak, (clients, width, share)


def test_the_parts_by_hand():
    layout = Layout.from_module(nn.Linear(9, 1))  # 10 numbers, 1 layer
    models, uploads, pairs, relations = footprint(METHODS["fedamp"](), layout, 1000, 0.25, Rounds(20, evaluate_every=5))
    assert [models.bytes, uploads.bytes] == [int(4 * 10 * 3.6 * 1000), int(4 * 10 * 0.6 * 250)]
    assert [pairs.bytes, relations.bytes] == [4 * 9 * 1000**2, 4 * 4 * 1000**2]
    evidence = footprint(METHODS["hedge"](neighbours=20), layout, 1000, 0.25, Rounds(20))
    assert evidence[2].bytes > 3 * 4 * 1000**2  # lists do not shorten what it knows of pairs
    listed = footprint(METHODS["fedamp"](neighbours=20), layout, 1000, 0.25, Rounds(20))
    assert listed[2].bytes == 4 * 9 * 1000 * 21
    large = Layout.from_module(nn.Linear(62_005, 1))
    models = footprint(METHODS["kin"](neighbours=20), large, 100_000, 0.001, Rounds(20))[0]
    assert models.bytes == int(4.2 * 20 * 100 * 4 * 62_006) + engine.SENT  # of those that ever take part
    assert footprint(METHODS["kin"](), large, 100_000, 0.001, Rounds(20))[0].bytes == int(4.2 * 100_000 * 4 * 62_006)
    assert footprint(METHODS["fedamp"](), layout, 9000, 0.25, Rounds(20))[3].bytes == 0  # then none is kept
    three = Layout.from_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)))
    of_each, of_all = (footprint(METHODS[name](), three, 100, 1.0, Rounds(1)) for name in ("fedaghn", "fedamp"))
    assert of_each[3].bytes == 3 * of_all[3].bytes

    class Mine(METHODS["fedamp"]):
        """A method of one's own holds what the one does that it is made from."""

    assert footprint(Mine(), layout, 1000, 0.25, Rounds(20, evaluate_every=5))[2] == pairs


@pytest.mark.parametrize(
    ("name", "settings", "clients", "width", "said"),
    [
        ("fedamp", {}, 30_000, 900, "set method.neighbours=20"),
        ("fedaghn", {}, 30_000, 900, "set method.neighbours=20"),
        ("sfl", {}, 100_000, 900, "a method that compares no clients with each other"),
        ("pfedgat", {}, 100_000, 900, "have fewer clients take part in a round, such as participation=0.05"),
        ("fedaghn", {}, 20, 50_000_000, "freeze a part of the model or keep it personal"),
        ("fedavg", {}, 1000, 50_000_000, "have fewer clients take part in a round, such as participation=0.1"),
        ("local", {}, 8000, 900, "set evaluate_every=10 or higher"),
    ],
)
def test_what_will_not_fit_is_refused_with_the_setting_that_helps(name, settings, clients, width, said, monkeypatch):
    monkeypatch.setattr(module, "free_memory", lambda device: 16_000_000_000)
    parts = footprint(METHODS[name](**settings), Layout.from_module(nn.Linear(width, 1)), clients, 1.0, Rounds(100))
    with pytest.raises(
        kinfed.UsageError, match=rf"for {clients:,} clients the server needs .* 16 GB are free; .*{said}"
    ):
        check(parts, clients, CPU)
    monkeypatch.setattr(module, "free_memory", lambda device: None)
    check(parts, clients, CPU)


def test_fit_and_a_dry_run_refuse_by_the_same_number_before_anything_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(module, "free_memory", lambda device: 100_000)
    x = torch.randn(300, 4)
    data = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(300) % 60)
    with pytest.raises(kinfed.UsageError, match=r"for 60 clients the server needs .* tables over pairs of clients"):
        kinfed.fit(kinfed.methods.FedAMP(), data, nn.Linear(4, 2), rounds=1, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    kinfed.fit(kinfed.FedAvg(), data, nn.Linear(4, 2), rounds=1)
    monkeypatch.setattr(module, "free_memory", lambda device: 30_000)
    asked = ["fedamp", "federation.clients=20", "federation.partition.groups=2", "model=linear", "rounds=2"]
    assert main(["run", *asked, "--dry-run"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert main(["run", *asked, "--beside", "none", "--out", str(tmp_path / "other")]) == 2
    again = " ".join(capsys.readouterr().err.split())
    reason = told[told.index("for 20 clients") : told.index("are free")]
    assert reason in again


def test_free_memory_is_the_least_of_what_machine_process_and_group_leave(monkeypatch, tmp_path):
    (tmp_path / "machine").write_text("MemTotal: 900 kB\nMemAvailable:     500 kB\nSwapFree:  100 kB\n")
    (tmp_path / "process").write_text("Name:\tpython\nVmSize:\t  40 kB\n")
    group = tmp_path / "group"
    for name, path in (("MACHINE", "machine"), ("PROCESS", "process"), ("GROUP", "group")):
        monkeypatch.setattr(devices, name, tmp_path / path)
    monkeypatch.setattr(devices.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert devices.free_memory(CPU) == 600 * 1024
    monkeypatch.setattr(devices.resource, "getrlimit", lambda which: (100 * 1024, 0))
    assert devices.free_memory(CPU) == 60 * 1024
    group.mkdir()
    for name, text in (("max", "50000"), ("current", "45000"), ("stat", "anon 7\ninactive_file 1000\n")):
        (group / f"memory.{name}").write_text(text)
    assert devices.free_memory(CPU) == 6000
    (group / "memory.max").write_text("max\n")
    assert devices.free_memory(CPU) == 60 * 1024


FULL = [
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "40000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    MemoryError("Unable to allocate 40.0 GiB for an array"),
]


def few():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    return kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), torch.arange(60) % 3)


def layer():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Linear(4, 2)


@pytest.mark.parametrize("full", FULL, ids=["torch", "numpy"])
def test_memory_that_runs_out_in_a_round_is_one_line_and_loses_no_finished_round(full, monkeypatch, tmp_path):
    real, held = kinfed.methods.FedAMP.aggregate, []

    def aggregate(self, roster, server, cohort, uploads):
        if roster.round == 2:
            large = torch.zeros(1000)
            held.append(weakref.ref(large))
            raise full
        return real(self, roster, server, cohort, uploads)

    def save(path, *what):
        assert all(one() is None for one in held)  # what took the memory is let go before files are written
        return written(path, *what)

    written = module_of_checkpoints.save
    whole = kinfed.fit(kinfed.methods.FedAMP(), few(), layer(), rounds=4)
    with monkeypatch.context() as now:
        now.setattr(kinfed.methods.FedAMP, "aggregate", aggregate)
        now.setattr(module_of_checkpoints, "save", save)
        with pytest.raises(kinfed.RunError, match=r"^round 3: out of memory.*; the rounds before are kept in ") as told:
            kinfed.fit(kinfed.methods.FedAMP(), few(), layer(), rounds=4, folder=tmp_path)
    assert "\n" not in str(told.value)
    assert ("40 GB more" in str(told.value)) == (full is FULL[0])
    with safe_open(tmp_path / "checkpoint.safetensors", "pt") as file:
        assert file.metadata()["done"] == "2"
    again = kinfed.fit(kinfed.methods.FedAMP(), few(), layer(), rounds=4, folder=tmp_path)
    assert torch.equal(again.history.models["theta"], whole.history.models["theta"])


@pytest.mark.parametrize("full", FULL, ids=["torch", "numpy"])
@pytest.mark.parametrize(("executor", "whom"), [("loop", "a single client, [0-2];"), ("vmap", "3 clients at once;")])
def test_memory_that_runs_out_in_training_is_one_line(full, executor, whom, monkeypatch):
    def train(self, client, state, received):
        raise full

    monkeypatch.setattr(kinfed.FedAvg, "train", train)
    with pytest.raises(kinfed.RunError, match=rf"^round 1: the device's memory is too small to train {whom}"):
        kinfed.fit(kinfed.FedAvg(), few(), layer(), rounds=1, execution=Execution(executor))
