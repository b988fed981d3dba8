"""Kin: its numbers by hand, its equations once more in NumPy, and what it does with clients it knows little of."""

from dataclasses import replace
from math import e

import numpy as np
import pytest
import torch
from small import random
from torch import nn

from kinfed.core.method import Params
from kinfed.methods import Kin, kin

float64 = torch.float64
SIZES = [3, 7, 5, 9, 4, 6]
COHORTS = [[0, 1, 2, 3], [1, 4], [0, 2, 4], [3, 4]]  # client 5 never takes part


def close(found, expected, atol=1e-12):
    found, expected = (torch.as_tensor(value).to(float64) for value in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def module():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def trained(method, known, cohorts=COHORTS):
    """The server after rounds in which cohorts sent random models."""
    server = method.start(known)
    for t, cohort in enumerate(cohorts):
        ids = torch.tensor(cohort)
        models = known.theta + random(len(known), known.layout.size, seed=t)[ids]
        server = method.aggregate(replace(known, round=t), server, ids, Params(models))
    return server


def test_weights_by_hand(roster):
    # Clients 0 and 1 moved the same way, client 2 at a right angle, client 3 the other way; they have 1, 2, 3, 1 rows.
    known = roster(4, size=2, sizes=[1, 2, 3, 1])
    moved = torch.tensor([[1, 0], [3, 0], [0, 2], [-1, 0]], dtype=float64)
    method = Kin(tau=0.5, memory=0.0)
    server = method.aggregate(known, method.start(known), known.everyone, Params(known.theta + moved))
    graph = method.graph(known, server, known.everyone)
    assert graph.shape == (1, 4, 4)  # of one layer
    # exp(cos / 0.5): the square of e where they moved alike, 1 at a right angle.
    first = torch.tensor([e**2, 2 * e**2, 3, e**-2], dtype=float64)
    third = torch.tensor([1, 2, 3 * e**2, 1], dtype=float64)
    close(graph[0, 0], first / first.sum())
    close(graph[0, 1], first / first.sum())
    close(graph[0, 2], third / third.sum())
    close(method.send(known, server, torch.tensor([2])).theta[0], known.theta + third @ moved / third.sum())
    # With a weight of its own of 0.3, client 0 deals 0.7 to the others by the same rule.
    dealt = torch.cat([torch.tensor([0.3], dtype=float64), 0.7 * first[1:] / first[1:].sum()])
    close(replace(method, own=0.3).graph(known, server, torch.tensor([0]))[0, 0], dealt)
    # With two neighbours, client 0 mixes those that are most like it.
    near = replace(method, neighbours=2).graph(known, server, torch.tensor([0]))[0, 0]
    close(near[:3], first[:3] / first[:3].sum())
    assert near[3] == 0


def test_a_movement_counts_half_a_round_later(roster):
    known, method = roster(2, size=2), Kin(memory=0.5)
    steps = torch.tensor([[[4, 0], [0, 1]], [[0, 1], [0, 1]]], dtype=float64)
    server = method.start(known)
    for step in steps:
        server = method.aggregate(known, server, known.everyone, Params(known.theta + step))
    close(server.moved, [[2.0, 1.0], [0.0, 1.5]])
    cosine = 1 / np.sqrt(5)
    expected = 1 / (1 + np.exp((cosine - 1) / method.tau))
    close(method.graph(known, server, known.everyone)[0], [[expected, 1 - expected], [1 - expected, expected]])


def twin(method, known, cohorts):
    """The relation: [L, N, N] and all mixtures: [N, d], from the equations on docs/methods/own.md."""
    first, count = known.theta.numpy(), len(known)
    theta, moved = np.tile(first, (count, 1)), np.zeros((count, len(first)))
    for t, cohort in enumerate(cohorts):
        models = first + random(count, len(first), seed=t).numpy()
        for i in cohort:
            theta[i] = models[i]
            moved[i] = method.memory * moved[i] + theta[i] - first
    heard = sorted({i for cohort in cohorts for i in cohort})
    sizes, layers = known.sizes.numpy(), known.layout.layers
    parts = (
        [[layer.trainable] for layer in layers] if method.by_layer else [[x.trainable for x in layers]] * len(layers)
    )
    relation, mixed = np.zeros((len(layers), count, count)), np.zeros_like(theta)
    for k, (layer, slices) in enumerate(zip(layers, parts, strict=True)):
        m = np.concatenate([moved[:, at] for at in slices], 1)
        for i in range(count):
            if i in heard:
                cosine = {j: m[i] @ m[j] / np.linalg.norm(m[i]) / np.linalg.norm(m[j]) for j in heard}
                weight = {j: sizes[j] * np.exp(cosine[j] / method.tau) for j in heard}
                if method.own is not None:
                    rest = sum(w for j, w in weight.items() if j != i)
                    weight = {j: method.own if j == i else (1 - method.own) * w / rest for j, w in weight.items()}
            else:
                weight = {j: sizes[j] for j in heard}
            for j in heard:
                relation[k, i, j] = weight[j] / sum(weight.values())
            mixed[i, layer.at] = relation[k, i] @ theta[:, layer.at]
    return relation, mixed


@pytest.mark.parametrize(
    "settings", [{}, {"tau": 0.1, "memory": 0.0}, {"by_layer": False, "own": 0.3}, {"own": 0.6, "memory": 0.9}], ids=str
)
@pytest.mark.parametrize("cohorts", [COHORTS, COHORTS[:1], [list(range(6))] * 3], ids=len)
def test_the_equations_once_more(roster, settings, cohorts):
    known, method = roster(6, module(), SIZES), Kin(**settings)
    relation, mixed = twin(method, known, cohorts)
    server = trained(method, known, cohorts)
    close(method.relation(known, server, known.everyone), relation if method.by_layer else relation[0])
    close(method.send(known, server, known.everyone).theta, mixed)
    close(method.send(known, server, torch.tensor([5, 1])).theta, mixed[[5, 1]])


def test_neighbours_are_those_of_largest_cosines(roster):
    known, method = roster(6, module(), SIZES), Kin(neighbours=2, by_layer=False)
    server = trained(method, known, [list(range(6))] * 2)
    moved = server.moved[:, known.layout.trainable]
    cosines = torch.nn.functional.cosine_similarity(moved[:, None], moved[None], dim=2)
    kept = cosines.topk(3).indices  # itself and two
    logits = torch.full((6, 6), -torch.inf, dtype=float64).scatter(1, kept, 0.0) + cosines / method.tau
    expected = (logits + known.sizes.double().log()).softmax(1)
    close(method.relation(known, server, known.everyone), expected)
    close(method.send(known, server, known.everyone).theta, expected @ server.theta)


@pytest.mark.parametrize("neighbours", [5, 30])
def test_more_neighbours_than_there_are_is_everyone(roster, neighbours):
    known = roster(6, module(), SIZES)
    server = trained(Kin(), known)
    found, everyone = (Kin(neighbours=n).relation(known, server, known.everyone) for n in (neighbours, 0))
    assert torch.equal(found, everyone)


@pytest.mark.parametrize("settings", [{}, {"neighbours": 2}, {"own": 0.3}], ids=str)
def test_who_has_no_movement_is_sent_the_mean_and_nobody_a_nan(roster, settings):
    known, method = roster(6, module(), SIZES), Kin(**settings)
    server, sizes = trained(method, known), known.sizes.double()
    sizes[5] = 0  # has never taken part
    mean = sizes / sizes.sum()
    close(method.send(known, server, torch.tensor([5])).theta[0], mean @ server.theta)
    close(method.relation(known, server, known.everyone)[:, 5], mean.expand(3, 6))
    assert (method.relation(known, server, known.everyone)[:, :5, 5] == 0).all()
    # Nobody has taken part; and all have, but nothing moved.
    still = method.aggregate(known, method.start(known), known.everyone, Params(known.copies()))
    for begun in (method.start(known), still):
        assert torch.isfinite(method.relation(known, begun, known.everyone)).all()
        close(
            method.relation(known, begun, known.everyone)[:, 0], (known.sizes.double() / known.sizes.sum()).expand(3, 6)
        )
        close(method.send(known, begun, known.everyone).theta, known.copies())


@pytest.mark.parametrize("settings", [{}, {"own": 0.3}, {"neighbours": 3}], ids=str)
def test_one_client_keeps_its_model(bowls, executor, settings):
    trial = bowls(Kin(**settings), [[1.0, 2.0]], copies=2, executor=executor)
    server = trial.run(3)
    assert torch.equal(trial.method.send(trial.roster, server, torch.tensor([0])).theta, server.theta)
    assert torch.equal(trial.history.relations[-1], torch.ones(1, 1, 1))


@pytest.mark.parametrize("neighbours", [0, 2])
def test_it_depends_neither_on_the_order_of_clients_nor_on_the_scale_of_movements(roster, neighbours):
    known, method = roster(6, module(), SIZES), Kin(neighbours=neighbours)
    server = trained(method, known, [list(range(6))] * 2)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    moved = method.relation(known.part(order), type(server)(*(table[order] for table in server)), known.everyone)
    graph = method.relation(known, server, known.everyone)
    close(moved, graph[:, order][:, :, order])
    for scale in (1e-9, 1e9):
        close(method.relation(known, server._replace(moved=scale * server.moved), known.everyone), graph)


@pytest.mark.parametrize("neighbours", [0, 2, 99])
def test_with_hardly_any_temperature_who_moved_most_alike_is_all(roster, neighbours):
    known = roster(4, size=2, sizes=[1, 2, 3, 1])
    moved = torch.tensor([[1, 0], [3, 0], [0, 2], [-1, 0]], dtype=torch.float32)
    known = replace(known, theta=known.theta.float())
    method = Kin(tau=1e-320, neighbours=neighbours)
    server = method.aggregate(known, method.start(known), known.everyone, Params(known.theta + moved))
    graph = method.graph(known, server, known.everyone)[0]
    close(graph.sum(1), torch.ones(4), atol=1e-6)
    close(graph[:2, 2:], torch.zeros(2, 2))
    close(graph[2:, 2:], torch.eye(2))


def test_newcomers_are_sent_the_mean_and_after_training_the_models_of_their_kin(roster):
    known, method = roster(4, size=2, sizes=[1, 1, 1, 5]), Kin(tau=0.1)
    few = known.part(torch.arange(3))
    ways = torch.tensor([[1, 0], [1, 0.1], [0, 1]], dtype=float64)
    before = method.aggregate(few, method.start(few), few.everyone, Params(known.theta + ways))
    new = torch.tensor([3])
    wide = method.add_clients(known, before, new)
    close(method.send(known, wide, new).theta[0], before.theta.mean(0))
    step = torch.tensor([-0.2, 0.3], dtype=float64)  # from the mean, after which it is still nearest to the first two
    joined = method.join(known, wide, new, Params((before.theta.mean(0) + step)[None]))
    close(joined.theta[:3], before.theta)
    apart = ways - ways.mean(0)
    cosines = apart @ step / apart.norm(dim=1) / step.norm()
    weights = (10 * cosines).softmax(0)
    told = method.similarity(known, joined)  # which says what the weights are made of
    close(told.values[3, :3], cosines)
    close(told.values[:3, :3], method.similarity(few, before).values)
    assert told.what.startswith(method.similarity(few, before).what + "; of a newcomer")
    close(method.relation(known, joined, known.everyone)[0, 3], torch.cat([weights, torch.zeros(1)]))
    assert weights[2] > 0.999
    close(method.send(known, joined, new).theta[0], weights @ before.theta)
    close(method.send(known, joined, known.everyone).theta[:3], method.send(few, before, few.everyone).theta)
    # With neighbours the same, among those that it lists; one that stays at the mean is sent that.
    assert Kin(tau=0.1, neighbours=1).relation(known, joined, new)[0, 3, 2] > 0.999
    stayed = method.join(known, wide, new, Params(known.theta[None]))
    close(method.send(known, stayed, new).theta[0], before.theta.mean(0))


def test_what_a_round_needs_is_computed_once(roster, monkeypatch):
    known, method, asked = roster(6, module(), SIZES), Kin(), []
    server = trained(method, known)
    monkeypatch.setattr(kin, "inner_by_layer", lambda *of, made=kin.inner_by_layer: asked.append(1) or made(*of))
    sent = method.send(known, server, known.everyone)
    method.relation(known, server, known.everyone[:2])
    method.diagnostics(known, server, known.everyone, sent, Params(sent.theta))
    assert method.send(replace(known, round=known.round + 1), server, known.everyone) is sent
    assert asked == [1]
    few = torch.tensor([1, 2])
    close(method.send(known, server, few).theta, sent.theta[few])
