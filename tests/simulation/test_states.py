"""Private states in memory and in files: the same rows, made when needed, and put back after a broken round."""

import mmap
import os

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves, tree_map

from kinfed import SGD, Federation, Run, RunError, Training, fit, save
from kinfed.core.history import History
from kinfed.core.method import Params
from kinfed.core.model import Model
from kinfed.methods import FedAvg, FedRep, Kin, Local, Scaffold
from kinfed.runs.final_state import StateFile
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed.simulation.state_store import States

CPU = torch.device("cpu")
TRAINING = Training(epochs=1, batch=4, optimiser=SGD(0.1))


def federation(clients=12):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(clients * 10, 5, generator=draw)
    return Federation.from_arrays(x, (x.sum(1) > 0).long(), torch.arange(clients).repeat_interleave(10))


def module():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def table(asked, count=6):
    """States of [2] numbers and a flag; which clients were asked for their first is noted."""

    def join(ids):
        asked.extend(ids.tolist())
        return Params(torch.stack([ids, 10 * ids], 1).float()), ids == 3

    return States(count, join, CPU, None)


@pytest.mark.parametrize("large", [0, 1 << 30])
def test_rows_are_taken_put_and_put_back(large, monkeypatch):
    monkeypatch.setattr("kinfed.simulation.state_store.LARGE", large)
    asked = []
    kept = table(asked)
    assert asked == ([0] if not large else [0, 0, 1, 2, 3, 4, 5])
    ids = torch.tensor([4, 3])
    before = kept.take(ids)
    assert before[0].theta.tolist() == [[4, 40], [3, 30]]
    assert before[1].tolist() == [False, True]
    kept.put(ids, (Params(torch.tensor([[1.5, 2.5], [-1.0, 7.0]])), torch.tensor([True, True])), before)
    assert kept.take(torch.tensor([3, 5, 4]))[0].theta.tolist() == [[-1, 7], [5, 50], [1.5, 2.5]]
    assert before[0].theta.tolist() == [[4, 40], [3, 30]]  # what was taken is a copy
    kept.undo()
    assert kept.take(ids)[0].theta.tolist() == [[4, 40], [3, 30]]
    kept.put(ids, (Params(torch.zeros(2, 2)), torch.tensor([True, True])), before)
    kept.settle()
    kept.undo()  # that round is over
    assert kept.take(ids)[0].theta.tolist() == [[0, 0], [0, 0]]
    if not large:
        assert asked == [0, 4, 3, 5, 4, 3]  # each whenever it was needed, until it took part
    other = table([])
    other.restore(kept.keep())
    assert other.take(torch.arange(6))[0].theta.tolist() == kept.take(torch.arange(6))[0].theta.tolist()


def test_nobody_is_asked_where_a_method_keeps_nothing(monkeypatch):
    joined = []
    monkeypatch.setattr(FedAvg, "init_client", lambda self, client: joined.append(1) or ())
    fleet = Simulation(federation(), Model(module()), FedAvg(), TRAINING, execution=Execution("loop"))
    assert fleet.state == ()
    assert len(joined) == 1


@pytest.mark.parametrize("method", [Local(), FedRep(), Scaffold()])
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_run_with_states_in_files_ends_with_the_same_bits(method, executor, monkeypatch, tmp_path, failing):
    def run(folder=None):
        how = {"participation": 0.2, "execution": Execution(executor, chunk=2), "folder": folder}
        return fit(method, federation(), module(), rounds=5, training=TRAINING, **how)

    whole = run()
    monkeypatch.setattr("kinfed.simulation.state_store.LARGE", 0)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    filed = run(folder=tmp_path / "a")
    with failing(4, "evaluate"):  # after the states of its cohort were replaced
        run(folder=tmp_path / "b")
    resumed = run(folder=tmp_path / "b")
    for other, same, atol in ((filed, whole, 1e-6), (resumed, filed, 0)):  # strangers are scored together
        assert torch.equal(other.history.models["theta"][:], same.history.models["theta"][:])
        for a, b in zip(other.history.scores, same.history.scores, strict=True):
            for key, values in b.items():
                torch.testing.assert_close(a[key], values, rtol=0, atol=atol, equal_nan=True)


class Twice(Local):
    """A model, and what it was before it was first trained."""

    def init_client(self, client):
        theta = client.model.theta
        return Params(theta), Params(theta)

    def train(self, client, state, received):
        return (Params(client.descend(state[0].theta)), state[1]), Params(client.model.theta)

    def personalise(self, client, state, received):
        return {"own": state[0]}


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("executor", ["loop", "vmap", "fused"])
def test_states_are_nobody_elses_memory(clients, executor):
    fleet = Simulation(federation(clients), Model(module()), Twice(), TRAINING, execution=Execution(executor))
    begin = fleet.model.theta.clone()
    trained, anchor = fleet.state
    fleet.train(0, torch.arange(clients), fleet.method.send(fleet.roster(), (), torch.arange(clients)))
    assert torch.equal(fleet.model.theta, begin)
    assert torch.equal(anchor.theta, begin.expand(clients, -1))
    assert (trained.theta != begin).any(1).all()


def test_a_file_holds_only_the_states_of_those_who_took_part(monkeypatch, tmp_path):
    monkeypatch.setattr("kinfed.simulation.state_store.LARGE", 0)
    fleet = Simulation(federation(), Model(module()), Local(), TRAINING, execution=Execution("loop"), folder=tmp_path)
    fleet.train(0, torch.tensor([2, 7]), ())
    ids, kept = fleet.states.keep()
    assert ids.tolist() == [2, 7]
    assert kept.theta.shape == (2, fleet.model.layout.size)
    assert fleet.state.theta.shape == (12, fleet.model.layout.size)
    assert list(tmp_path.iterdir()) == []  # files without a name leave nothing behind


class Sending(Local):
    """Everyone is sent the first model, and keeps its own."""

    tunes = ""

    def send(self, roster, server, cohort):
        return Params(roster.theta.expand(len(cohort), -1) + 1)

    def personalise(self, client, state, received):
        if self.tunes == "trains":
            state = Params(client.descend(state.theta))
        if self.tunes == "chooses" and int(client.examples("train").y.sum()) % 2:
            return {"own": received, "mixed": state}
        return {"own": state, "mixed": received}


@pytest.mark.parametrize("tunes", ["", "trains", "chooses"])
def test_clients_that_have_never_taken_part_are_scored_at_once(tunes, monkeypatch, tmp_path):
    """Where each hands on the same, they are asked once and not run; scores and models are those of each."""
    asked = []
    personalise = Sending.personalise

    def count(self, client, state, received):
        asked.append(1)
        return personalise(self, client, state, received)

    monkeypatch.setattr(Sending, "personalise", count)
    monkeypatch.setattr(Sending, "tunes", tunes)

    def evaluated(**limits):
        for name, limit in limits.items():
            monkeypatch.setattr(f"kinfed.simulation.{name}", limit)
        fleet = Simulation(
            federation(40), Model(module()), Sending(), TRAINING, execution=Execution("loop"), folder=tmp_path
        )
        everyone = torch.arange(40)
        sent = fleet.method.send(fleet.roster(), (), everyone)
        fleet.train(0, torch.tensor([2, 7]), ())
        asked.clear()
        found = fleet.evaluate(0, everyone, sent)
        return found.scores, {name: model.theta for name, model in found.models.items()}, fleet

    (scores, models, _), times = evaluated(), len(asked)
    assert times == 40
    again, same, fleet = evaluated(**{"state_store.LARGE": 0, "evaluation.KEPT": 0})
    assert torch.equal(fleet.states.joined.nonzero().squeeze(1), torch.tensor([2, 7]))
    assert len(asked) == 40 + 2 * 2 + (3 * 38 if tunes else 0)  # the others also for the models of each name
    for key, values in scores.items():
        torch.testing.assert_close(again[key], values, equal_nan=True)
    for name, theta in models.items():
        torch.testing.assert_close(same[name][:], theta, rtol=0, atol=1e-6)
        assert isinstance(same[name], torch.Tensor) == bool(tunes)
    if not tunes:  # those who have never taken part have one row of a file in common
        rows, places = same["own"].separate()
        assert (rows.shape[0], places.bincount().tolist()) == (3, [38, 1, 1])


def test_files_of_a_run_hold_the_rows_of_those_who_took_part(monkeypatch, tmp_path, failing):
    """Large tables of a checkpoint, of models and of the final state have no row for others, and give it back."""
    method, clients = Kin(neighbours=3), 40

    def train(folder=None):
        how = {"rounds": 3, "participation": 0.05, "execution": Execution("loop"), "folder": folder}
        return fit(method, federation(clients), module(), training=TRAINING, **how)

    whole = train()
    limits = ("simulation.state_store", "LARGE"), ("simulation.evaluation", "KEPT"), ("core.checkpoint", "LARGE")
    for place, limit in limits:
        monkeypatch.setattr(f"kinfed.{place}.{limit}", 0)
    (tmp_path / "begun").mkdir()
    with failing(3):
        train(tmp_path / "begun")
    rows = load_file(tmp_path / "begun" / "checkpoint.safetensors")
    at = rows["server.theta@rows"].tolist()
    assert 2 <= len(at) <= 4
    assert len(rows["server.theta"]) == len(rows["state.1.theta"]) == len(at)
    assert len(rows["model.theta"]) <= len(at) + 1  # and one for all others
    run = train(tmp_path / "begun")
    written = save(run, tmp_path / "end") and Run.open(tmp_path / "end", module())
    wanted = whole.history.models["theta"]
    assert torch.equal(run.history.models["theta"][:], wanted)
    assert all(torch.equal(written.theta(name), wanted[i]) for i, name in enumerate(run.names))
    file, history = StateFile(RunFolder(tmp_path / "end")), History(tuple(run.names), run.federation.task)
    file.restore(history, run.architecture.layout)
    assert torch.equal(history.models["theta"][:], wanted)
    assert len(history.models["theta"].table) == len(wanted.unique(dim=0)) < clients / 2
    same = tree_map(torch.equal, file.server(whole.final.progress.server), whole.final.progress.server)
    assert all(tree_leaves(same))


def test_a_file_takes_room_for_the_rows_that_are_written(monkeypatch, tmp_path):
    monkeypatch.setattr("kinfed.simulation.state_store.LARGE", 0)
    kept = table([], count=1 << 20)
    ids = torch.tensor([5, 1 << 19])
    kept.put(ids, kept.take(ids), kept.take(ids))
    for file in kept._files:
        assert os.fstat(file._file.fileno()).st_blocks * 512 <= 3 * mmap.PAGESIZE
    before, nine = kept.take(torch.tensor([9])), torch.tensor([9])

    def fill(*what):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fill)
    with pytest.raises(RunError, match=r"no room .*No space left on device"):
        kept.put(nine, before, before)
    kept.undo()
    assert kept.joined.nonzero().squeeze(1).tolist() == []  # what was put before is undone, and the full file harmless


def test_a_file_that_cannot_be_made_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr("kinfed.simulation.state_store.LARGE", 0)
    fleet = Simulation(
        federation(), Model(module()), Local(), TRAINING, execution=Execution("loop"), folder=tmp_path / "none"
    )
    with pytest.raises(RunError, match=r"no room for .* GB of clients' states or models in .*none: No such file"):
        fleet.train(0, torch.tensor([2, 7]), ())
