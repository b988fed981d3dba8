"""Tables of clients: rows written in place, put back where a round fails, and rows that take no memory."""

import pytest
import torch
from small import of_sizes
from torch import nn
from torch.utils._pytree import tree_leaves

from kinfed.core import rows
from kinfed.core.engine import ServerError, run
from kinfed.core.history import History, Recorder
from kinfed.core.method import Params
from kinfed.core.mixins import model_for
from kinfed.core.rows import Written, put
from kinfed.core.training import Training
from kinfed.methods import Kin
from kinfed.simulation.simulation import Simulation


@pytest.fixture
def small(monkeypatch):
    """Every table is large enough to be written in place."""
    monkeypatch.setattr(rows, "WORTH", 0)


def test_a_table_is_written_in_place_while_that_is_allowed(small):
    table, ids = torch.zeros(4, 2), torch.tensor([2, 0])
    assert put(table, ids, torch.ones(2, 2)) is not table
    assert not table.any()
    written = Written([table])
    with written.allow():
        after = put(table, ids, torch.ones(2, 2))
    assert after is not table  # so that a memo of the former state is not taken for one of this
    assert torch.equal(after, table)
    assert table.sum(1).tolist() == [2, 0, 2, 0]
    put(after, ids, torch.full((2, 2), 5.0))
    assert table.sum(1).tolist() == [2, 0, 2, 0]
    written.undo()
    assert not table.any()


def test_what_else_holds_is_never_written(small):
    table, kept = torch.zeros(4, 2), torch.zeros(4, 2)
    views = [table, table.view(2, 4), kept, torch.zeros(2).expand(4, 2), torch.zeros(4)]
    written = Written(views, [kept])
    assert not any(map(written.holds, views))


def test_only_new_rows_are_looked_at(small):
    table, other = torch.zeros(4, 2), torch.zeros(3, 2)
    written = Written([table, other])
    with written.allow():
        after = put(table, torch.tensor([1]), torch.full((1, 2), torch.nan))
    assert sorted(t.numel() for t in written.changes([after, other])) == [2, 6]


class Failing(Kin):
    """Kin whose server writes some of its rows and then fails, in the second round."""

    def aggregate(self, roster, server, cohort, uploads):
        after = super().aggregate(roster, server, cohort, uploads)
        if roster.round == 1:
            raise ValueError("halfway")
        return after


def test_a_round_that_fails_leaves_the_state_of_the_round_before(small):
    data = of_sizes((3, 7, 5, 9, 4), torch.zeros(5, 5))
    method = Failing(neighbours=2)
    fleet = Simulation(data, model_for(method, nn.Linear(3, 3).double()), method, Training(epochs=1, batch=4))
    states = []

    def keep(round, server):
        states.append((server, [t.clone() for t in tree_leaves(server)]))

    history = History(tuple(data.names), data.task)
    with pytest.raises(ServerError, match="halfway"):
        run(fleet.method, fleet.roster(), fleet, Recorder(history), rounds=3, participation=0.4, after=keep)
    (server, before), *more = states
    assert not more
    assert all(map(torch.equal, tree_leaves(server), before))


def test_zeros_take_no_memory_until_they_are_written():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    table = rows.zeros(100_000, torch.zeros(2_000))
    table[[3, 99_999]] = 1.0
    assert float(table[50_000].sum()) == 0
    assert float(table[99_999].sum()) == 2_000
    assert resident() - before < 20e6  # of 800 MB


def test_a_message_that_is_a_table_itself_is_copied(small):
    table = torch.arange(4.0).view(2, 2)
    (sent,) = rows.copy_shared(Params(table), [table])
    table.zero_()
    assert sent.tolist() == [[0, 1], [2, 3]]
