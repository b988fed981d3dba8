"""Kin: its numbers by hand, its equations once more in NumPy, and what it does with clients it knows little of."""

from dataclasses import replace
from math import e

import numpy as np
import pytest
import torch
from small import random
from torch import nn

from kinfed.core.method import Params
from kinfed.core.trees import reorder
from kinfed.methods import Kin, kin
from kinfed.relations import Drawn
from kinfed.relations.neighbourhoods import Sketches, sketch_rows

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
    method = Kin(tau=0.5)
    server = method.aggregate(known, method.start(known), known.everyone, Params(known.theta + moved))
    graph = method.graph(known, server, known.everyone)
    assert graph.shape == (1, 4, 4)  # of one layer
    # exp(cos / 0.5): the square of e where they moved alike, 1 at a right angle. The middle of their lengths, 1, 3, 2,
    # 1, is 3 by these weights, as the second client has more than half; of clients 2 and 3 it is 2.
    first = torch.tensor([e**2, 2 * e**2, 3, e**-2], dtype=float64)
    close(graph[0, 0], first / first.sum())
    close(graph[0, 1], first / first.sum())
    # The nearest of client 2 is at a right angle, which it may be by chance, after a first training; 3 has none.
    third, fourth = torch.tensor([[1, 2 * 2 / 3, 3, 1], [e**-2, 2 * e**-2 * 2 / 3, 3, 1]], dtype=float64)
    close(graph[0, 2:], torch.stack([third / third.sum(), fourth / fourth.sum()]))
    close(method.send(known, server, torch.tensor([2])).theta[0], known.theta + third @ moved / third.sum())
    # Client 2 trains 3 examples again: 3 / (3 + 3) of what is left counts as its own, so its cosine is 0.5.
    again = replace(method, credit=3.0).graph(
        known, server._replace(trained=torch.tensor([1, 1, 2, 1])), known.everyone
    )
    third[2] *= e
    close(again[0, 2], third / third.sum())


def test_one_that_moves_nine_times_as_far_counts_for_a_ninth(roster):
    known = roster(5, size=2, sizes=[1] * 5)
    moved = torch.tensor([[1, 0], [1, 0], [1, 0], [1, 0], [9, 0]], dtype=float64)
    server = Kin().aggregate(known, Kin().start(known), known.everyone, Params(known.theta + moved))
    row = torch.tensor([9, 9, 9, 9, 1], dtype=float64)
    close(Kin().graph(known, server, known.everyone)[0], (row / row.sum()).expand(5, 5))
    close(Kin(clip=torch.inf).graph(known, server, known.everyone)[0], torch.full((5, 5), 0.2, dtype=float64))


def test_an_absent_client_moves_with_its_kin(roster):
    # Clients 0 and 1 moved alike and client 2 the other way; then only 1 and 2 take part.
    known, method = roster(3, size=2, sizes=[1, 1, 1]), Kin(tau=0.5)
    moved = torch.tensor([[1, 0], [1, 0], [-1, 0]], dtype=float64)
    server = method.aggregate(known, method.start(known), known.everyone, Params(known.theta + moved))
    cohort = torch.tensor([1, 2])
    change = torch.tensor([[0, 0.5], [0, -0.5]], dtype=float64)
    sent = method.send(known, server, cohort).theta
    after = method.aggregate(known, server, cohort, Params(sent + change))
    close(after.theta[cohort], sent + change)
    cosines = (after.theta[cohort] - known.theta) @ moved[0] / (after.theta[cohort] - known.theta).norm(dim=1)
    weights = torch.cat([((cosines - 1) / 0.5).exp(), torch.tensor([2 / 3], dtype=float64)])  # two of three take part
    close(after.theta[0], server.theta[0] + (weights / weights.sum())[:2] @ change)
    assert after.trained.tolist() == [1, 2, 2]


def twin(method, known, cohorts):
    """The relation: [L, N, N] and all mixtures: [N, d], from the equations on docs/methods/own.md."""
    first, count = known.theta.numpy(), len(known)
    theta, trained, sizes, layers = (
        np.tile(first, (count, 1)),
        np.zeros(count),
        known.sizes.numpy(),
        known.layout.layers,
    )
    parts = (
        [[layer.trainable] for layer in layers] if method.by_layer else [[x.trainable for x in layers]] * len(layers)
    )

    def piece(slices, table):
        return np.concatenate([table[:, at] for at in slices], 1)

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    def mixtures():
        """Each client's weights in each layer, and mixtures."""
        relation, mixed = np.zeros((len(layers), count, count)), np.zeros_like(theta)
        heard = [i for i in range(count) if trained[i]] or list(range(count))
        for k, (layer, slices) in enumerate(zip(layers, parts, strict=True)):
            m = piece(slices, theta - first)
            length = np.linalg.norm(m, axis=1)
            for i in range(count):
                weight = {j: sizes[j] for j in heard}
                if trained[i]:
                    c = {j: cosine(m[i], m[j]) for j in heard}
                    nearest = max([0, *(c[j] for j in heard if j != i)])
                    again = (trained[i] - 1) * sizes[i]
                    c[i] = nearest + (1 - nearest) * again / (again + method.credit)
                    weight = {j: sizes[j] * np.exp(c[j] / method.tau) for j in heard}
                    total, below = sum(weight.values()), 0
                    for j in sorted(heard, key=lambda j: length[j]):
                        below += weight[j]
                        if below >= total / 2:
                            limit = method.clip * length[j]
                            break
                    weight = {j: weight[j] * min(1, limit / length[j]) for j in heard}
                for j in heard:
                    relation[k, i, j] = weight[j] / sum(weight.values())
                mixed[i, layer.at] = relation[k, i] @ theta[:, layer.at]
        return relation, mixed

    for t, cohort in enumerate(cohorts):
        models = first + random(count, len(first), seed=t).numpy()
        _, sent = mixtures()
        absent = [j for j in range(count) if trained[j] and j not in cohort]
        theta[cohort] = models[cohort]
        trained[cohort] += 1
        moved = theta.copy()
        for layer, slices in zip(layers, parts, strict=True):
            change = models[cohort] - sent[cohort]
            m, step = piece(slices, theta - first), np.linalg.norm(piece(slices, change), axis=1)
            for j in absent:
                e = np.array([sizes[k] * np.exp((cosine(m[j], m[k]) - 1) / method.tau) for k in cohort])
                v = e / (e.sum() + sizes[j] * len(cohort) / count)
                limit = method.clip * min(np.linalg.norm(m[j]), sorted(step)[(len(step) - 1) // 2])
                v *= np.minimum(1, limit / step)
                moved[j, layer.trainable] += v @ change[:, layer.trainable]
                kept = slice(layer.trainable.stop, layer.at.stop)  # running statistics
                moved[j, kept] += v @ (models[cohort][:, kept] - theta[j, kept])
        theta = moved
    return mixtures()


@pytest.mark.parametrize("settings", [{}, {"tau": 0.3, "credit": 2.0}, {"by_layer": False, "clip": 0.7}], ids=str)
@pytest.mark.parametrize("cohorts", [COHORTS, COHORTS[:1], [list(range(6))] * 3], ids=len)
def test_the_equations_once_more(roster, settings, cohorts):
    known, method = roster(6, module(), SIZES), Kin(**settings)
    relation, mixed = twin(method, known, cohorts)
    server = trained(method, known, cohorts)
    close(method.relation(known, server, known.everyone), relation if method.by_layer else relation[0])
    close(method.send(known, server, known.everyone).theta, mixed)
    close(method.send(known, server, torch.tensor([5, 1])).theta, mixed[[5, 1]])


def test_lists_are_drawn_so_that_on_average_everybody_counts(roster):
    # In each client's list are itself and 3 of 11 others; means of what is left out would not be those of all.
    known = roster(12, size=40)
    everyone, total, runs = Kin(tau=1.0, by_layer=False, clip=torch.inf), 0, 3000
    server = trained(everyone, known, [list(range(12))] * 2)
    moved = server.theta - known.theta
    sketch = Sketches(moved, None)
    cosines = torch.nn.functional.cosine_similarity(moved[:, None], moved[None], dim=2)
    expected = torch.exp(cosines) * known.sizes
    for seed in range(runs):
        of_seed, mass = replace(known, seed=seed), known.sizes.double()
        near, often = Drawn(3, 1.0).find(of_seed, sketch, mass, server.trained, known.everyone, known.everyone)
        assert near.shape == (12, 4)
        assert (near[:, 0] == known.everyone).all()
        assert (often >= 0).all()
        total += torch.zeros(12, 12, dtype=float64).scatter_add(1, near, often.exp() * expected.gather(1, near))
    apart = ~torch.eye(12, dtype=torch.bool)
    close((total / runs)[apart] / expected[apart], torch.ones(132, dtype=float64), atol=0.15)
    close((total / runs).fill_diagonal_(0).sum(1) / (expected * apart).sum(1), torch.ones(12, dtype=float64), atol=0.02)


@pytest.mark.parametrize("neighbours", [5, 30])
def test_more_neighbours_than_there_are_is_everyone(roster, neighbours):
    known = roster(6, module(), SIZES)
    server = trained(Kin(), known)
    found, everyone = (Kin(neighbours=n).relation(known, server, known.everyone) for n in (neighbours, 0))
    assert torch.equal(found, everyone)


@pytest.mark.parametrize("settings", [{}, {"neighbours": 2}], ids=str)
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


@pytest.mark.parametrize("settings", [{}, {"neighbours": 3}], ids=str)
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
    moved = method.relation(known.part(order), reorder(server, order), known.everyone)
    graph = method.relation(known, server, known.everyone)
    close(moved, graph[:, order][:, :, order])
    for scale in (1e-9, 1e9):
        far = server._replace(theta=known.theta + scale * (server.theta - known.theta))
        close(method.relation(known, far, known.everyone), graph, atol=1e-6)


@pytest.mark.parametrize("neighbours", [0, 2, 99])
def test_with_hardly_any_temperature_who_moved_most_alike_is_all(roster, neighbours):
    known = roster(4, size=2, sizes=[1, 2, 3, 1])
    moved = torch.tensor([[1, 0], [3, 0], [0, 2], [-1, 0]], dtype=torch.float32)
    known = replace(known, theta=known.theta.float())
    method = Kin(tau=1e-30, credit=0.0, clip=torch.inf, neighbours=neighbours)
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
    weights = (10 * cosines).softmax(0) * torch.tensor([1, 1 / ways[1].norm(), 1])  # the middle one is as long as 1
    weights = weights / weights.sum()
    told = method.similarity(known, joined)  # which says what the weights are made of
    close(told.values[3, :3], cosines)
    close(told.values[:3, :3], method.similarity(few, before).values)
    assert told.what.startswith(method.similarity(few, before).what + "; of a newcomer")
    close(method.relation(known, joined, known.everyone)[0, 3], torch.cat([weights, torch.zeros(1)]))
    assert weights[2] > 0.999
    close(method.send(known, joined, new).theta[0], weights @ before.theta)
    close(method.send(known, joined, known.everyone).theta[:3], method.send(few, before, few.everyone).theta)
    # With neighbours the same, among those that it lists; one that stays at the mean is sent that.
    listed = joined._replace(sketch=Sketches(sketch_rows(known, joined.theta - known.theta), None))
    assert Kin(tau=0.1, neighbours=1).relation(known, listed, new)[0, 3, 2] > 0.999
    stayed = method.join(known, wide, new, Params(known.theta[None]))
    close(method.send(known, stayed, new).theta[0], before.theta.mean(0))


def test_what_a_round_needs_is_computed_once(roster, monkeypatch):
    known, method, asked = roster(6, module(), SIZES), Kin(), []
    server = trained(method, known)
    compared = kin.compare_movements
    monkeypatch.setattr(kin, "compare_movements", lambda *of: asked.append(1) or compared(*of))
    sent = method.send(known, server, known.everyone)
    method.relation(known, server, known.everyone[:2])
    method.diagnostics(known, server, known.everyone, sent, Params(sent.theta))
    assert method.send(replace(known, round=known.round + 1), server, known.everyone) is sent
    assert asked == [1]
    few = torch.tensor([1, 2])
    close(method.send(known, server, few).theta, sent.theta[few])
