"""Clients that stop replying are ignored by the server's method, and come back with what they had."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from kinfed.core.fleet import Evaluation
from kinfed.core.graph import Graph
from kinfed.core.history import History, Recorder
from kinfed.core.method import AveragedParams, Params, Roster
from kinfed.core.mixins import reduce_uploads
from kinfed.core.model import Model
from kinfed.core.rows import put
from kinfed.core.seeding import tags
from kinfed.core.summary import score_models
from kinfed.core.tasks import Regression
from kinfed.core.training import Training
from kinfed.methods import METHODS, FedAGHN, FedAMP, FedAvg
from kinfed_flower.server.staleness import StalenessState, StalenessWrapper


def roster(count, round=0, seed=3, module=nn.Linear):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(module(2, 1))
    graph = Graph(torch.ones(count, count), "given")
    sizes = torch.arange(1, count + 1)
    return Roster(model.theta, model.layout, sizes, Training(), seed, tags(list("abcdefgh"[:count])), graph, (), round)


def two_layers(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 2), nn.Linear(2, outputs))


def wrapped(method, missed, decay=0.0):
    """The method around, and a state in which clients have missed so many rounds."""
    around = StalenessWrapper(method, decay, lambda: torch.zeros(len(missed), dtype=torch.int64))
    draw = torch.Generator().manual_seed(1)
    inner = method.start(roster(len(missed)))
    for ids in ([0, 1, 2, 3], [1, 3]):  # two rounds, so that the tables are filled
        uploads = Params(torch.randn(len(ids), 3, generator=draw))
        if isinstance(method, FedAGHN):
            from kinfed.methods.fedaghn import Upload

            uploads = Upload(uploads.theta, torch.randn(len(ids), 3, generator=draw))
        inner = method.aggregate(roster(len(missed)), inner, torch.tensor(ids), uploads)
    return around, StalenessState(inner, torch.tensor(missed))


@pytest.mark.parametrize("method", [FedAMP(alpha=0.1, sigma=20.0, pull=0.1), FedAGHN(sharpness=3.0)])
def test_a_stale_client_weighs_nothing_and_the_others_are_as_if_it_did_not_exist(method):
    around, server = wrapped(method, [0, 0, 2, 0])
    everyone = torch.arange(4)
    relation = around.relation(roster(4), server, everyone)
    assert relation[..., [0, 1, 3], 2].abs().max() == 0
    torch.testing.assert_close(relation.sum(-1), torch.ones(relation.shape[:-1]))
    others = torch.tensor([0, 1, 3])
    alone = tree_map(lambda t: t[others], server.inner)
    expected = method.relation(roster(4).part(others), alone, torch.arange(3))
    torch.testing.assert_close(relation[..., others[:, None], others], expected)
    sent = around.send(roster(4), server, everyone)
    assert around.last_stale.tolist() == [False, False, True, False]
    torch.testing.assert_close(sent.theta[others], method.send(roster(4).part(others), alone, torch.arange(3)).theta)
    assert not sent.theta[2].any()


def test_a_stale_client_keeps_its_rows_while_the_others_continue():
    method = FedAMP(alpha=0.1, sigma=20.0, pull=0.1)
    around, server = wrapped(method, [0, 0, 1, 0])
    after = around.aggregate(roster(4), server, torch.tensor([0, 3]), Params(torch.ones(2, 3)))
    assert torch.equal(after.inner.theta, put(server.inner.theta, torch.tensor([0, 3]), torch.ones(2, 3)))
    back = around.relation(roster(4), after, torch.arange(4))  # nobody is missed any more
    assert back[0, 2] > 0


def test_when_everyone_is_stale_nobody_is_ignored():
    around, server = wrapped(FedAMP(), [1, 1, 1, 1])
    assert not around.stale(roster(4), server).any()


def test_with_decay_a_client_is_used_in_a_share_of_the_rounds_that_halves_with_each_round_missed():
    around, _ = wrapped(FedAMP(), [0, 0, 0, 0], decay=0.5)
    rounds = 500
    out = torch.stack(
        [around.stale(roster(4, round), StalenessState((), torch.tensor([0, 1, 2, 3]))) for round in range(rounds)]
    )
    shares = 1 - out.double().mean(0)
    assert shares[0] == 1
    deviation = (0.25 / rounds) ** 0.5
    assert (shares[1:] - torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)).abs().max() < 4 * deviation
    again = around.stale(roster(4, 7), StalenessState((), torch.tensor([0, 1, 2, 3])))
    assert torch.equal(again, out[7])


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("fedcedar", "panacea")])
def test_every_table_over_clients_is_found(name):
    """All but the silent client's rows go in, and what comes out fits back."""
    method = METHODS[name](**({"embedding": 2} if name == "pfedhn" else {}))
    clients = partial(roster, module=two_layers)  # FedRep needs a base
    around = StalenessWrapper(method, 0.0, lambda: torch.zeros(4, dtype=torch.int64))
    first = method.start(clients(4))
    ids, place, inner = around._reduce(
        clients(4), StalenessState(first, torch.zeros(4)), torch.tensor([True, False, True, True])
    )
    assert ids.tolist() == [0, 2, 3]
    assert place.tolist() == [0, -1, 1, 2]
    wanted = method.start(clients(4).part(ids))
    for got, expected in zip(leaves(inner), leaves(wanted), strict=True):
        assert got.shape == expected.shape


def leaves(tree):
    from torch.utils._pytree import tree_leaves

    return tree_leaves(tree)


def test_newcomers_have_not_missed_anything():
    around, server = wrapped(FedAMP(), [0, 0, 2, 0])
    after = around.add_clients(roster(6), server, torch.tensor([4, 5]))
    assert after.missed.tolist() == [0, 0, 2, 0, 0, 0]
    assert torch.equal(after.inner.theta[:4], server.inner.theta)
    assert torch.equal(after.inner.theta[4], roster(6).theta)


def test_without_stale_clients_nothing_is_different():
    method = FedAvg()
    around = StalenessWrapper(method, 0.0, lambda: torch.tensor([0, 1]))
    server = around.start(roster(2))
    uploads = AveragedParams(torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    uploads = reduce_uploads(around, roster(2), torch.arange(2), uploads)
    after = around.aggregate(roster(2), server, torch.arange(2), uploads)
    expected = method.aggregate(roster(2), server.inner, torch.arange(2), uploads)
    assert torch.equal(after.inner.theta, expected.theta)
    assert after.missed.tolist() == [0, 1]


def test_a_history_makes_room_for_newcomers():
    history = History(("a", "b"), Regression())
    scores = {("own", "validation", "mae"): torch.tensor([1.0, 3.0]), ("own", "test", "mae"): torch.tensor([2.0, 4.0])}
    Recorder(history).add(
        0, 0, 0, Evaluation(scores, {}), torch.eye(2), {"note": torch.tensor([1.0, 2.0]), "all": torch.tensor(5.0)}
    )
    history.add_clients(["a", "b", "c"])
    assert history.names == ("a", "b", "c")
    worse = {key: torch.tensor([9.0, 9.0, 0.0]) for key in scores}
    Recorder(history).add(1, 0, 0, Evaluation(worse, {}), torch.eye(3), {})
    assert history.select("own") == 0  # a mean over those who have a score: 2, against 6
    assert history.test("own")[:2].tolist() == [2.0, 4.0]
    summary = score_models(history)["own"]
    assert (summary["mean"], summary["validation"]) == (3.0, 2.0)
    assert torch.stack(history.relations).shape == (2, 3, 3)
    assert history.relations[0][2].tolist() == [0, 0, 0]
    assert history.diagnostics[0]["note"][2].isnan()
    assert history.diagnostics[0]["all"] == 5
