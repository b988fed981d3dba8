"""What methods write down of a round, against numbers worked out by hand or read off the server's state."""

import csv
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from kinfed import Training
from kinfed.core.graph import Graph
from kinfed.core.optimiser import SGD
from kinfed.methods import SFL, FedAvg, FedCedar, Local, Panacea, PFedGAT
from kinfed.runs.round_tables import write_diagnostics
from kinfed_papers.fedaghn.ablations import Printed
from kinfed_papers.pfedgat.graphs import Projected

float64 = torch.float64
B = [[3.0, 4.0], [0.0, 2.0], [-6.0, 8.0]]


def close(found, expected, atol=1e-9):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=atol, equal_nan=True)


def related(trial, weights):
    trial.roster = replace(trial.roster, graph=Graph(torch.tensor(weights, dtype=torch.float32), "given"))
    return trial


def diagnostics(trial, name):
    return [at[name] for at in trial.history.diagnostics]


def test_length_of_updates(bowls, executor):
    # One step of rate 0.1 from the shared model w towards b moves it by 0.1 |b - w|.
    trial = bowls(FedAvg(), B, executor=executor)
    server = trial.run(1)
    trial.run(2, begin=1, server=server)
    first, second = diagnostics(trial, "update")
    close(first, [0.5, 0.2, 1.0])
    w = server.theta
    close(second, [0.1 * math.dist(b, w.tolist()) for b in B])


def test_who_was_absent_is_left_out(bowls, tmp_path):
    trial = bowls(FedAvg(), B, every=2)
    trial.run(3, participation=1 / 3)
    assert trial.history.rounds == [1, 2]
    for at in diagnostics(trial, "update"):
        assert torch.isnan(at).sum() == 2
    write_diagnostics(trial.history, tmp_path / "diagnostics.csv")
    rows = list(csv.DictReader((tmp_path / "diagnostics.csv").open()))
    assert [row["round"] for row in rows] == ["2", "3"]
    for row, at in zip(rows, diagnostics(trial, "update"), strict=True):
        assert row["note"] == "update"
        assert float(row["value"]) == pytest.approx(float(at[int(row["client"])]), rel=1e-6)


def test_running_statistics_are_no_part_of_an_update(examples, noisy, perceptron):
    x, y = noisy(3, 2)
    still = Training(1, 7, SGD(1e-300))  # only running statistics move
    trial = examples(perceptron(norm=True), x, y, FedAvg(), training=still)
    server = trial.run(1)
    assert (server.theta - trial.roster.theta).abs().max() > 0.01
    close(diagnostics(trial, "update")[0], torch.zeros(3), atol=1e-12)


def test_a_method_that_sends_nothing_has_nothing_to_say(bowls):
    trial = bowls(Local(), B)
    trial.run(2)
    assert trial.history.diagnostics == [{}, {}]


def test_sfl_tells_its_pull_and_the_distance_from_the_neighbourhood(bowls, executor):
    trial = related(bowls(SFL(), B, executor=executor), [[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    server = trial.run(1)
    sent = trial.method.send(trial.roster, server, trial.roster.everyone)
    after = trial.run(2, begin=1, server=server)
    close(torch.stack(diagnostics(trial, "pull")), [0.0, 0.3])
    close(diagnostics(trial, "update")[0], [0.5, 0.2, 1.0])
    close(diagnostics(trial, "update")[1], (after.theta - sent.mixed).norm(dim=1))


@pytest.mark.parametrize("shared", [False, True])
def test_fedaghn_tells_p_and_q_by_layer(examples, noisy, perceptron, shared):
    x, y = noisy(3, 2)
    method = Printed(lr=0.5, sign="descent", shared=shared)
    trial = examples(perceptron(), x, y, method, training=Training(1, 4, SGD(0.1)))
    server = trial.run(3)
    found = trial.history.diagnostics[-1]
    names = ["p", "q"] if shared else ["p 0", "q 0", "p 2", "q 2"]
    assert [name for name in found if name[0] in "pq"] == names
    for layer, (p, q) in enumerate(zip(names[::2], names[1::2], strict=True)):
        close(found[p], server.home[:, layer], atol=0)
        close(found[q], server.sharpness[:, layer], atol=0)
    assert any((found[p] - method.home).abs().max() > 1e-4 for p in names[::2])


def test_fedcedar_tells_what_mixing_leaves(bowls, executor):
    method = FedCedar(clusters=3, steps=1)
    trial = bowls(method, B, lr=1.0, executor=executor)  # one step of rate 1 ends at b
    trial.run(1)
    found, v = trial.history.diagnostics[0], torch.tensor(B, dtype=float64)
    unit = v / v.norm(dim=1, keepdim=True)
    alike = (unit @ unit.T).clamp(min=0)
    mixed = alike / alike.sum(1, keepdim=True) @ v
    left = (mixed - mixed.mean(0)).norm() / (v - v.mean(0)).norm()
    close(found["spread"], left)
    assert int(found["clusters"]) == 3
    close(found["objective"], 0.0)
    trial = bowls(replace(method, clusters=1), B, lr=1.0, executor=executor)
    trial.run(1)
    close(trial.history.diagnostics[0]["objective"], (v - v.mean(0)).norm(dim=1).sum())


def test_pfedgat_tells_how_uneven_its_graph_is_and_how_far_the_network_went(bowls, executor):
    method = PFedGAT(heads=2, width=3, lr=0.5, feedback="train")
    trial = bowls(method, B, executor=executor)
    servers, server = [], None
    for round in range(3):
        server = trial.run(round + 1, begin=round, server=server)
        servers.append(server)
    for at, now, relation in zip(trial.history.diagnostics, servers, trial.history.relations, strict=True):
        weights = relation.double()
        close(at["entropy"], -(weights * weights.log()).sum(1), atol=1e-6)
        close(at["from uniform"], (weights - 1 / 3).clamp(min=0).sum(1), atol=1e-6)
        assert now is servers[0] or at["network step"] > 0
    before, after = (torch.cat([t.flatten() for t in s.network]) for s in servers[1:])
    close(trial.history.diagnostics[2]["network step"], (after - before).norm())
    close(trial.history.diagnostics[0]["network step"], 0.0)


def test_pfedgat_without_attention_begins_uniform(bowls):
    trial = bowls(Projected(feedback="train"), B)
    trial.run(1)
    close(trial.history.diagnostics[0]["entropy"], [math.log(3)] * 3)
    close(trial.history.diagnostics[0]["from uniform"], [0.0] * 3)


def test_panacea_tells_how_near_it_comes(bowls, executor):
    method = Panacea(embedding=4, steps=2, reconstruction=0.5)
    trial = related(bowls(method, B, executor=executor), [[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    server = trial.run(1)
    found, trained = trial.history.diagnostics[0], trial.fleet.state.theta
    theta = method.send(trial.roster, server, trial.roster.everyone).theta
    close(found["distance"], (trained - theta).square().sum(1) / 2)
    z = method.encode(trial.roster, server.network)
    scores = (z @ z.T)[~torch.eye(3, dtype=bool)]
    links = trial.roster.graph.weights.double()[~torch.eye(3, dtype=bool)]
    close(found["reconstruction"], nn.functional.binary_cross_entropy(scores.sigmoid(), links))
    trial = related(bowls(replace(method, reconstruction=0.0), B), [[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    trial.run(1)
    assert set(trial.history.diagnostics[0]) == {"update", "distance"}
