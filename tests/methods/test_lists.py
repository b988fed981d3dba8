"""Lists of neighbours: they say what tables of all pairs say, wherever a relation goes, and no such table is made."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from small import of_sizes, random
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kinfed.core import checkpoint, engine, round_records
from kinfed.core.checkpoint import Progress
from kinfed.core.engine import Participation, Rounds, run
from kinfed.core.graph import NeighbourLists
from kinfed.core.history import History, Recorder
from kinfed.core.method import Params
from kinfed.core.mixins import model_for
from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import FedAGHN, FedAMP, HeurFedAMP, Kin, Mixture, PFedGraph, fedaghn
from kinfed.methods.parts import graph_mixing
from kinfed.ops import inverted_file, mixing, sketch
from kinfed.relations import Nearest, neighbourhoods
from kinfed.runs.relations_file import read_relations, write_relations
from kinfed.simulation.simulation import Simulation
from kinfed.verdict.graph_quality import group_weights, group_weights_of_lists

LISTED = [
    Kin(neighbours=3),
    Kin(neighbours=3, by_layer=False),
    FedAMP(alpha=0.1, sigma=20.0, pull=0.0, neighbours=3),
    HeurFedAMP(sharpness=1.0, home=0.5, neighbours=3),
    PFedGraph(neighbours=3),
    FedAGHN(neighbours=3),
    Mixture(among=Nearest(3)),
    Mixture(among=Nearest(3), vectors="models"),
    Mixture(among=Nearest(3), vectors="updates"),
]
each_method = pytest.mark.parametrize("method", LISTED, ids=lambda m: f"{type(m).__name__}-{LISTED.index(m)}")
SIZES = (3, 7, 5, 9, 4, 6, 5, 8, 3)


@pytest.fixture
def listed(monkeypatch):
    """However few clients there are, relations are lists."""
    monkeypatch.setattr(graph_mixing, "TABLE", 0)


def upload(method, theta):
    return fedaghn.Upload(theta, theta[:, :0]) if isinstance(method, FedAGHN) else Params(theta)


def trained(method, known, cohorts):
    """The server after rounds in which these cohorts sent random models."""
    server = method.start(known)
    for t, cohort in enumerate(map(torch.tensor, cohorts)):
        models = known.theta + random(len(known), len(known.theta), seed=t)[cohort].to(known.theta)
        now = replace(known, round=t)
        method.send(now, server, cohort)
        server = method.aggregate(now, server, cohort, upload(method, models))
    return replace(known, round=len(cohorts) - 1), server


@each_method
def test_lists_say_what_tables_say(roster, method, monkeypatch):
    known, server = trained(method, roster(9, nn.Linear(3, 2).double()), [[0, 1, 2, 3, 5], [0, 4, 6], [2, 7]])
    table, compared = method.relation(known, server, known.everyone), method.similarity(known, server)
    monkeypatch.setattr(graph_mixing, "TABLE", 0)
    lists, also = method.relation(known, server, known.everyone), method.similarity(known, server)
    assert isinstance(lists, NeighbourLists)
    assert lists.shape == table.shape
    rows = torch.stack([lists.row(i) for i in range(9)], -2)
    if lists.rest.any():  # of who is not listed a list says how much they weigh together
        mass = (lists.mass * torch.ones(9, 1)).scatter(1, lists.near.long(), 0.0)  # [N, N]
        rest = torch.where(mass > 0, table, 0.0).sum(-1, keepdim=True)
        table = torch.where(mass > 0, rest * mass / mass.sum(1, keepdim=True).clamp(min=1e-9), table)
    torch.testing.assert_close(rows, table, rtol=0, atol=1e-12)
    torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))
    values = torch.stack([also.row(i, 9) for i in range(9)])
    torch.testing.assert_close(values, compared.values, rtol=0, atol=0, equal_nan=True)
    groups = torch.tensor([2, 0, 1, 0, 0, 1, 2, 2, 5])
    expected = group_weights(table, groups)
    np.testing.assert_allclose(group_weights_of_lists(lists, groups), expected, atol=1e-12)


class Sizes(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self.largest = max(self.largest, tensor.numel())
        return result


@each_method
@pytest.mark.filterwarnings("ignore:fedamp", "ignore:heurfedamp")
def test_no_table_of_all_pairs_is_made(roster, method, monkeypatch):
    monkeypatch.setattr(sketch, "BLOCK", 1 << 16)
    known, cohort = roster(2000, nn.Linear(3, 2)), torch.arange(0, 2000, 20)
    known, server = trained(method, known, [list(range(0, 2000, 2)), list(range(0, 2000, 3))])
    made = Sizes()
    with made:
        sent = method.send(known, server, cohort)
        server = method.aggregate(known, server, cohort, upload(method, sent.theta + 1))
        prospect = method.send(known, server, known.everyone)
        relation = method.relation(known, server, known.everyone)
        method.similarity(known, server)
        method.diagnostics(known, server, cohort, sent, upload(method, sent.theta + 1))
        some = method.prospect(known, server, cohort)
        assert float(relation.row(3).sum(-1).mean()) == pytest.approx(1, abs=1e-5)
    for wide, narrow in zip(prospect, some, strict=True):
        torch.testing.assert_close(wide[cohort], narrow)
    assert made.largest < 2000 * 2000 / 7


@pytest.mark.parametrize("method", [PFedGraph(neighbours=3), Kin(neighbours=3)], ids=lambda m: type(m).__name__)
def test_rows_of_clients_that_never_took_part_are_not_read(roster, method, monkeypatch):
    """They are NaN here, as one would enter every mixture and mean."""
    monkeypatch.setattr(mixing, "WORTH", 0)
    known, server = trained(method, roster(400, nn.Linear(3, 2)), [list(range(0, 400, 8)), list(range(0, 400, 10))])
    absent = known.others(torch.cat([torch.arange(0, 400, 8), torch.arange(0, 400, 10)]))  # 80 have taken part
    bare = server._replace(theta=server.theta.index_fill(0, absent, torch.nan))
    if isinstance(method, PFedGraph):  # Kin's are zeros, by which it tells who has trained
        hidden = server.sketch.rows.index_fill(0, absent, torch.nan)
        bare = bare._replace(sketch=server.sketch._replace(rows=hidden))
    cohort = torch.tensor([0, 4, 8, 9])  # two of them are sent the mean
    sent, expected = (method.send(known, state, cohort) for state in (bare, server))
    for mine, other in zip(sent, expected, strict=True):
        assert torch.equal(mine, other)
    after = method.aggregate(known, bare, cohort[::2], upload(method, sent.theta[::2] + 1))
    assert torch.isfinite(method.send(known, after, cohort).theta).all()


def begin(method):
    """A fleet, its roster, and a history, of nine clients."""
    data = of_sizes(SIZES, torch.zeros(9, 9))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = model_for(method, nn.Linear(3, 3).double())
    fleet = Simulation(data, model, method, Training(1, 4, SGD(0.2)), seed=5)
    return fleet, fleet.roster(), History(tuple(data.names), data.task)


def go_on(fleet, roster, history, rounds=6, participation=0.4, **resume):
    """The server's state after so many rounds."""
    how = {"rounds": Rounds(rounds, 2), "participation": participation, **resume}
    return run(fleet.method, roster, fleet, Recorder(history), **how)


def outcome(method, participation=0.4):
    fleet, roster, history = begin(method)
    go_on(fleet, roster, history, participation=participation)
    return history


@pytest.mark.parametrize("method", [m for m in LISTED if not isinstance(m, FedAMP | HeurFedAMP)], ids=repr)
@pytest.mark.filterwarnings("ignore:kernel")
def test_a_run_in_cells_goes_on_from_a_checkpoint_with_the_same_bits_or_from_one_of_before(
    method, monkeypatch, tmp_path
):
    monkeypatch.setattr(inverted_file, "MANY", 5)
    monkeypatch.setattr(inverted_file, "POOL", 5)
    monkeypatch.setattr(neighbourhoods, "SPARE", 1)  # so that a list of three is not of all
    fleet, roster, whole = begin(method)
    last = go_on(fleet, roster, whole)
    assert len(last.sketch.cells.centres) > 1
    fleet, roster, history = begin(method)
    checkpoint.save(tmp_path / "c", Progress(4, go_on(fleet, roster, history, 4), fleet.states.keep(), 0.0), history)
    with safe_open(tmp_path / "c", "pt") as file:
        metadata, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    arrays = {name.replace("sketch.rows", "sketch"): t for name, t in arrays.items() if ".cells." not in name}
    checkpoint.write(arrays, tmp_path / "before", metadata)
    for name in ("c", "before"):
        fleet, roster, history = begin(method)
        at = checkpoint.load(tmp_path / name, fleet.method.start(roster), fleet.states.keep(), history)
        fleet.states.restore(at.state)
        server = go_on(fleet, roster, history, server=at.server, begin=at.done)
        assert (server.sketch.cells.home >= 0).sum() == (last.sketch.cells.home >= 0).sum()
        if name == "c":
            assert all(map(torch.equal, tree_leaves(server), tree_leaves(last)))
            assert torch.equal(history.models["theta"], whole.models["theta"])


@each_method
@pytest.mark.filterwarnings("ignore:fedamp", "ignore:heurfedamp", "ignore:kernel")
def test_what_everyone_would_be_sent_is_the_same_in_pieces(method, listed, monkeypatch):
    at_once = outcome(method)
    monkeypatch.setattr(engine, "SENT", 0)
    pieces = outcome(method)
    assert len(at_once.relations) == len(at_once.rounds) == 3
    assert all(isinstance(relation, NeighbourLists) for relation in at_once.relations)
    for there, here in zip(at_once.scores, pieces.scores, strict=True):
        assert all(torch.allclose(values, here[key], atol=1e-12) for key, values in there.items())
    assert torch.allclose(at_once.models["theta"], pieces.models["theta"], atol=1e-12)


@pytest.mark.filterwarnings("ignore:kernel")
def test_clients_that_join_late_have_lists_too(listed):
    history = outcome(Kin(neighbours=2), Participation(0.4, late=0.3, joins=3))
    assert [lists.near.shape for lists in history.relations] == [(9, 3)] * 3
    rows = torch.stack([history.relations[0].row(i) for i in range(9)], -2)
    torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))


def test_lists_are_written_and_read(listed, tmp_path):
    history = outcome(Kin(neighbours=2))
    again = History(history.names, history.task)
    arrays, text = history.pack()
    again.restore(arrays, text)
    history.origin = "learned"
    write_relations(history, tmp_path / "r.npz", ["a"])
    relations = read_relations(tmp_path / "r.npz", 2)
    assert (relations.rounds.tolist(), relations.layers, relations.origin) == ([2, 4, 6], ["a"], "learned")
    assert (relations.selected, relations.clients) == (0, list(history.names))
    for lists, restored, read in zip(history.relations, again.relations, relations.kept, strict=True):
        for name, tensor in lists.tensors.items():
            assert torch.equal(tensor, restored.tensors[name])
            assert torch.equal(tensor, read.tensors[name])
    assert relations.row(2).shape == (3, 1, 9)
    with pytest.raises(UsageError, match="no table of all pairs"):
        _ = relations.weights


def test_lists_that_are_no_numbers_are_not_kept():
    bad = NeighbourLists(torch.tensor([[torch.nan], [1.0]]), torch.tensor([[0], [1]]), torch.zeros(2), torch.ones(2))
    with pytest.warns(UserWarning, match="NaN"):
        assert round_records.RoundRecords("Mine", 2).check_relation(0, bad) is None
