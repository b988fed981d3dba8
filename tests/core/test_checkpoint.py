"""Checkpoints: what is written is what is read, by that format's own library too, and no more than there is."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from kinfed import SGD, Federation, Rounds, RunError, Training, UsageError, fit
from kinfed.core import checkpoint
from kinfed.core.checkpoint import Progress
from kinfed.core.history import History, KeptModels
from kinfed.core.method import Params, SharedParams
from kinfed.core.model import Model
from kinfed.core.tasks import Classification
from kinfed.methods import FedAvg, Local
from kinfed.runs import checkpoints
from kinfed.simulation import evaluation
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

TRAINING = Training(epochs=1, batch=4, optimiser=SGD(0.1))
arrays = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(list(checkpoint.TYPES)), st.lists(st.integers(0, 4), max_size=3)),
    max_size=6,
)


def federation(clients=6):
    x = torch.randn(clients * 10, 5, generator=torch.Generator().manual_seed(0))
    return Federation.from_arrays(x, (x.sum(1) > 0).long(), torch.arange(clients).repeat_interleave(10))


def module():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Linear(5, 2)


@given(arrays, st.sampled_from([1, 7, 1 << 20]))
def test_the_formats_own_library_reads_what_is_written(tmp_path_factory, shapes, piece):
    path = tmp_path_factory.mktemp("a") / "a"
    draw = torch.Generator().manual_seed(0)
    wanted = {name: torch.randn(shape, generator=draw).to(kind) for name, (kind, shape) in shapes.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kinfed.core.rows.PIECE", piece)
        checkpoint.write(wanted, path, {"said": "ä"})
    found = load_file(path)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def test_rows_of_zeros_are_neither_written_nor_read(monkeypatch):
    monkeypatch.setattr(checkpoint, "LARGE", 32)
    table = torch.zeros(9, 2, 2)
    table[2, 1, 0], table[7] = 3.0, -0.0  # which has a bit that is set
    wanted = {"a": table, "b": torch.ones(9, 2), "c": torch.zeros(4, 2), "d": torch.zeros(9)}
    short, counts = checkpoint.drop_zeros(wanted)
    assert {name: list(rows.shape) for name, rows in short.items()} == {
        "a": [2, 2, 2],
        "a@rows": [2],
        "b": [9, 2],
        "c": [4, 2],
        "d": [9],
    }
    found = checkpoint.fill_zeros({name: rows[:] for name, rows in short.items()}, counts)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].view(torch.int32), rows.view(torch.int32)) for name, rows in wanted.items())


def test_what_all_clients_share_is_written_once_and_shared_again(tmp_path):
    theta = torch.arange(1000.0)
    history = History(("a", "b"), Classification(2), rounds=[0], scores=[{}], diagnostics=[{}])
    history.kept = KeptModels({"theta": theta}, ["theta"])
    history.kept_relations = [torch.tensor([0.25, 0.75])]
    checkpoint.save(tmp_path / "c", Progress(1, SharedParams(theta), (), 0.0), history)
    assert (tmp_path / "c").stat().st_size < 4 * (1000 + 1000) + 2000
    other = History(("a", "b"), Classification(2))
    at = checkpoint.load(tmp_path / "c", SharedParams(theta), (), other)
    assert torch.equal(at.server.theta, theta)
    assert torch.equal(other.models["theta"], torch.stack([theta, theta]))
    assert other.relations[0].tolist() == [[0.25, 0.75], [0.25, 0.75]]


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (None, {}),
        ({"how": "[[1]]"}, {}),
        ({"how": "[" * 9999}, {}),
        ({"history": "{}"}, {}),
        ({"done": "many"}, {}),
        ({}, {"model.theta": torch.full((1000,), torch.nan)}),
    ],
)
def test_a_checkpoint_that_no_run_wrote_is_told_in_one_line(tmp_path, words, change):
    path = tmp_path / "a"
    history = History(
        ("a",),
        Classification(2),
        rounds=[0],
        scores=[{}],
        diagnostics=[{}],
        kept=KeptModels({"theta": torch.ones(1000)}, []),
    )
    checkpoint.save(path, Progress(1, Params(torch.ones(1000)), (), 0.0, {}), history)
    with safe_open(path, "pt") as file:
        said = file.metadata()
    save_file(load_file(path) | change, path, None if words is None else said | words)
    with pytest.raises(RunError, match=r"is not a checkpoint of this run .*; delete it to start over") as found:
        (checkpoint.how(path), checkpoint.load(path, Params(torch.ones(1000)), (), replace(history)))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("piece", [1, 100, 1 << 26])
def test_states_in_files_are_written_and_read_in_pieces(piece, tmp_path, monkeypatch):
    monkeypatch.setattr("kinfed.simulation.state_store.LARGE", 0)
    monkeypatch.setattr("kinfed.core.rows.PIECE", piece)

    def fleet():
        found = Simulation(
            federation(), Model(module()), Local(), TRAINING, execution=Execution("loop"), folder=tmp_path
        )
        found.roster()
        return found

    one, other = fleet(), fleet()
    one.train(0, torch.tensor([4, 1, 2]), ())
    history = History(tuple("abcdef"), Classification(2))
    checkpoint.save(tmp_path / "c", Progress(1, (), one.states.keep(), 0.0), history)
    at = checkpoint.load(tmp_path / "c", (), other.states.keep(), history)
    assert at.state[0].tolist() == [1, 2, 4]
    other.states.restore(at.state)
    assert torch.equal(other.state.theta, one.state.theta)
    assert other.states.joined.tolist() == [False, True, True, False, True, False]


def test_a_shared_model_that_is_not_kept_is_found_again_as_one(monkeypatch):
    class Both(Local):
        def send(self, roster, server, cohort):
            return SharedParams(roster.theta)

        def personalise(self, client, state, received):
            return {"shared": received, "own": state}

    monkeypatch.setattr(evaluation, "KEPT", 0)
    run = fit(Both(), federation(), module(), rounds=1, training=TRAINING, execution=Execution("loop"))
    fleet = Simulation(federation(), Model(module()), Both(), TRAINING, execution=Execution("loop"))
    everyone = torch.arange(6)
    found = fleet.evaluate(0, everyone, Both().send(fleet.roster(), (), everyone))
    assert torch.equal(found.models["shared"].theta, fleet.model.theta)
    assert torch.equal(found.models["own"].theta, fleet.model.theta.expand(6, -1))
    assert set(run.history.named_models) == {"shared", "own"}


def test_checkpoints_leave_most_of_the_time_to_training(tmp_path, monkeypatch):
    now, times = [0.0], []
    monkeypatch.setattr(checkpoints.time, "perf_counter", lambda: now[0])

    def slow(path, progress, history):
        times.append((progress.done, now[0]))
        now[0] += 2

    def train(self, *asked, real=Simulation.train):
        now[0] += 1
        return real(self, *asked)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(Simulation, "train", train)
    how = {"training": TRAINING, "execution": Execution("loop", checkpoint_seconds=3), "folder": tmp_path}
    fit(FedAvg(), federation(), module(), rounds=100, **how)
    assert times == [(3, 3.0), (43, 45.0), (83, 87.0)]  # 2 s each, and 40 s between them


def until_round_3(real):
    """Training as it really is, that fails in round 3."""

    def train(self, round, cohort, sent):
        if round == 2:
            raise RunError("round 3: no more")
        return real(self, round, cohort, sent)

    return train


def test_a_resumed_run_does_not_take_up_rounding_to_bfloat16(tmp_path, monkeypatch):
    real = Simulation.train

    def run():
        how = Execution("loop")
        return fit(FedAvg(), federation(), module(), rounds=3, training=TRAINING, folder=tmp_path, execution=how)

    used = []
    monkeypatch.setattr(Simulation, "train", until_round_3(real))
    with pytest.raises(RunError):
        run()
    found = checkpoint.how(tmp_path / "checkpoint.safetensors")
    monkeypatch.setattr(checkpoint, "how", lambda path: found | {"onednn": True})
    monkeypatch.setattr(checkpoints, "has_amx", lambda: True)
    monkeypatch.setattr(Simulation, "train", lambda self, *asked: used.append(self.how["onednn"]) or real(self, *asked))
    run()
    assert used == [False]


def test_a_run_goes_on_with_the_data_and_the_model_that_it_began_with(tmp_path, monkeypatch):
    real, data = Simulation.train, federation()

    def run(data, net=None):
        how = {"training": TRAINING, "execution": Execution("loop"), "folder": tmp_path}
        return fit(FedAvg(), data, net or module(), rounds=3, **how)

    monkeypatch.setattr(Simulation, "train", until_round_3(real))
    with pytest.raises(RunError, match="no more"):
        run(data)
    monkeypatch.setattr(Simulation, "train", real)
    started = module()
    with torch.no_grad():
        next(started.parameters()).add_(1)
    for net in (started, nn.Sequential(module(), nn.Tanh())):
        with pytest.raises(RunError, match=r"the model differs from the one that the run in .* began with"):
            run(data, net)
    x = data.x.clone()
    x[-1, 0] += 1
    fewer = {split: rows[:-1] for split, rows in data.rows.items()}
    swapped = {**data.rows, "train": data.rows["test"], "test": data.rows["train"]}
    for changes in ({"x": x}, {"y": data.y.flip(0)}, {"rows": fewer, "names": data.names[:-1]}, {"rows": swapped}):
        with pytest.raises(RunError, match=r"the data differ from those that the run in .* began with"):
            run(replace(data, **changes))
    assert run(data).history.cost.done == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rounds": Rounds(3, select_by="loss")}, "began with select_by=''; got select_by='loss'"),
        ({"seed": 1}, "began with seed=0; got seed=1"),
    ],
)
def test_a_run_continues_with_the_seed_and_the_score_of_selection_that_it_began_with(
    changed, said, tmp_path, monkeypatch
):
    real = Simulation.train

    def run(**changed):
        how = {"rounds": 3, "training": TRAINING, "execution": Execution("loop"), "folder": tmp_path}
        return fit(FedAvg(), federation(), module(), **how | changed)

    monkeypatch.setattr(Simulation, "train", until_round_3(real))
    with pytest.raises(RunError, match="no more"):
        run()
    monkeypatch.setattr(Simulation, "train", real)
    with pytest.raises(UsageError, match=said):
        run(**changed)
    assert run().history.cost.done == 3
