"""What a server knows of some of its clients, and what becomes of its tables when others join."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from kinfed.core.graph import Graph
from kinfed.core.method import Params, Roster
from kinfed.core.model import Model
from kinfed.core.seeding import tags
from kinfed.core.training import Training
from kinfed.core.trees import Pairwise, PerClient, Shared
from kinfed.methods.bases import Averaging

NAMES = "abcdef"
JOINED = torch.tensor([1, 4])
OTHERS = torch.tensor([0, 2, 3, 5])


def roster(size=6):
    """Six clients of a model of `size` numbers, with a graph and something that each has said."""
    model = Model(nn.Linear(size, 1, bias=False).double())
    weights = torch.arange(36.0).view(6, 6)
    said = {"mean": torch.arange(12.0).view(6, 2), "count": (torch.arange(6),)}
    sizes = 10 + torch.arange(6)
    return Roster(model.theta, model.layout, sizes, Training(), 3, tags(NAMES), Graph(weights, "oracle"), said, 4)


def test_a_part_of_a_roster_is_as_if_there_were_no_others():
    part = roster().part(OTHERS)
    assert len(part) == 4
    assert part.everyone.tolist() == [0, 1, 2, 3]
    assert part.sizes.tolist() == [10, 12, 13, 15]
    assert torch.equal(part.tags, tags("acdf"))
    assert part.graph.origin == "oracle"
    assert part.graph.weights[1].tolist() == [12, 14, 15, 17]
    assert part.client_statistics["mean"].tolist() == [[0, 1], [4, 5], [6, 7], [10, 11]]
    assert part.client_statistics["count"][0].tolist() == [0, 2, 3, 5]
    assert part.round == 4
    assert torch.equal(part.normal("x", 2), roster().normal("x", 2)[OTHERS])
    layered = replace(roster(), graph=Graph(torch.arange(72.0).view(2, 6, 6), "given")).part(JOINED)
    assert layered.graph.weights.tolist() == [[[7, 10], [25, 28]], [[43, 46], [61, 64]]]
    assert replace(roster(), graph=None).part(JOINED).graph is None


def test_others():
    assert torch.equal(roster().others(JOINED), OTHERS)
    assert len(roster().others(torch.arange(6))) == 0


class Server(NamedTuple):
    """Everything that a server may hold."""

    number: Shared  # []
    shared: Shared  # [d], and d is as large as N
    clusters: Shared  # [C, d], of which there are ever more
    seen: PerClient  # [N] bool
    table: tuple[PerClient, ...]  # [N, 2]
    links: Pairwise  # [N, N]


class Ledger(Averaging):
    """A method whose first rows depend on a client's name, and on the round in which they are drawn."""

    def start(self, roster):
        rows = roster.normal(f"ledger.{roster.round}", 2)
        nobody, links = torch.zeros(len(roster), dtype=torch.bool), torch.full((len(roster),) * 2, 1.0)
        return Server(torch.zeros(()), roster.theta, roster.theta[None], nobody, (rows,), links)

    def train(self, client, state, received):
        return state, received

    def personalise(self, client, state, received):
        return {"shared": Params(received.theta)}


def test_tables_over_clients_get_the_rows_that_start_gives_and_all_else_stays():
    everyone, method = roster(), Ledger()
    first = method.start(replace(everyone, round=0))
    known = method.start(replace(everyone, round=0).part(OTHERS))
    server = Server(
        torch.tensor(7.0),
        known.shared + 1,
        torch.randn(3, 6, dtype=torch.float64),
        torch.tensor([True, False, True, True]),
        (known.table[0] + 1,),
        torch.rand(4, 4),
    )
    kept = [t.clone() for t in (*server[:4], *server.table, server.links)]
    wide = method.add_clients(everyone, server, JOINED)
    assert wide.number is server.number
    assert wide.shared is server.shared
    assert wide.clusters is server.clusters
    assert wide.seen.tolist() == [True, False, False, True, False, True]
    assert torch.equal(wide.table[0][OTHERS], server.table[0])
    assert torch.equal(wide.table[0][JOINED], first.table[0][JOINED])
    assert torch.equal(wide.links[OTHERS][:, OTHERS], server.links)
    assert (wide.links[JOINED] == 1).all()
    assert (wide.links[:, JOINED] == 1).all()
    assert all(torch.equal(a, b) for a, b in zip(kept, (*server[:4], *server.table, server.links), strict=True))
