import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kinfed import UsageError
from kinfed.core.engine import sample
from kinfed.core.optimiser import SGD, Adam
from kinfed.core.training import Training
from kinfed.methods import PFedLA
from kinfed_papers.fedaghn.ablations import Ascent

float64 = torch.float64
SMALL = {"embedding": 2, "hidden": 3}


def test_the_worked_slope_and_its_sign(roster):
    """Models 0 and 4, half of each: a client that goes from 2 to 1.9 has slopes of 0 and 4 (2 - 1.9) by its weights."""
    known = roster(2)
    change, theta = torch.tensor([[-0.1]], dtype=float64), torch.tensor([[0.0], [4.0]], dtype=float64)
    slopes = PFedLA().slopes(change, theta, known.layout)
    assert slopes[0, 0].tolist() == pytest.approx([0.0, 0.4])
    assert (0.5 - 0.1 * slopes[0, 0])[1].item() == pytest.approx(0.46)
    printed = Ascent().slopes(change, theta, known.layout)
    assert (0.5 - 0.1 * printed[0, 0])[1].item() == pytest.approx(0.54)


def test_the_weight_of_the_other_falls_where_training_leads_away_from_it(bowls):
    known = bowls(PFedLA(**SMALL), [0.0, 4.0]).roster
    for method, falls in ((PFedLA(**SMALL, optimiser=SGD(0.1)), True), (Ascent(**SMALL, optimiser=SGD(0.1)), False)):
        server = method.start(known)._replace(
            theta=torch.tensor([[0.0], [4.0]], dtype=float64), seen=torch.tensor([True, True])
        )
        cohort = torch.tensor([0])
        sent = method.send(known, server, cohort)
        assert sent.theta.item() == 2.0
        after = method.aggregate(known, server, cohort, sent._replace(theta=torch.tensor([[1.9]], dtype=float64)))
        weight = method.graph(known, after, cohort)[0, 0, 1]
        assert (weight < 0.5) == falls
        # The slope by the score is 1/4 of that by the weight, for both: -0.1 and 0.1; the offset moves by a tenth.
        way = -0.01 if falls else 0.01
        assert after.network.offset[0, 0].tolist() == pytest.approx([-way, way])
        assert after.theta[:, 0].tolist() == [1.9, 4.0]


def naive(weights, biases, last, offset, v, seen):
    """[L, N] weights of one client, in loops; and what the hidden layers said, for the slopes."""
    xs = [v]
    for w, b in zip(weights, biases, strict=True):
        xs.append(np.maximum(w @ xs[-1] + b, 0))
    rows = []
    for layer in range(last.shape[0]):
        scores = [dot(last[layer, :, j], xs[-1]) + offset[layer, j] if seen[j] else -math.inf for j in range(len(seen))]
        powers = [math.exp(s - max(scores)) for s in scores]
        rows.append([p / sum(powers) for p in powers])
    return np.array(rows), xs


def dot(a, b):
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["plain", "norm"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_steps_of_the_server_are_those_of_the_equations(kind, share, roster, perceptron):
    """On random tensors: backward by hand, client by client, layer by layer."""
    rate, draw = 0.3, torch.Generator().manual_seed(2)
    method, known = PFedLA(**SMALL, layers=2, optimiser=SGD(rate)), roster(4, perceptron(kind == "norm"))
    random = lambda like: torch.randn(like.shape, generator=draw, dtype=float64)  # noqa: E731
    start = method.start(known)
    network = type(start.network)(
        *(tuple(map(random, t)) if isinstance(t, tuple) else random(t) for t in start.network)
    )
    seen = torch.tensor([True, True, False, True])
    server = start._replace(theta=random(start.theta), seen=seen, network=network)
    cohort = torch.tensor([0, 2] if share < 1 else [0, 1, 2, 3])
    theta, learned = server.theta.numpy(), known.layout.trainable.numpy()
    sent = method.send(known, server, cohort).theta.numpy()
    uploads = torch.randn(len(cohort), theta.shape[1], generator=draw, dtype=float64)
    after = method.aggregate(known, server, cohort, type("Uploads", (), {"theta": uploads}))
    for k, i in enumerate(cohort.tolist()):
        ws, bs = [w[i].numpy() for w in network.weights], [b[i].numpy() for b in network.biases]
        last, offset = network.last[:, :, i].numpy(), network.offset[:, i].numpy()
        alpha, xs = naive(ws, bs, last, offset, network.embedding[i].numpy(), seen)
        wanted = np.concatenate(
            [sum(alpha[r, j] * theta[j][part.at] for j in range(4)) for r, part in enumerate(known.layout.layers)]
        )
        np.testing.assert_allclose(sent[k], wanted, atol=1e-12)
        by_last, by_offset, by_x = np.zeros_like(last), np.zeros_like(offset), np.zeros(3)
        for r, part in enumerate(known.layout.layers):
            at = [n for n in range(part.at.start, part.at.stop) if learned[n]]
            by_alpha = [dot(sent[k][at] - uploads[k].numpy()[at], theta[j][at]) for j in range(4)]
            mean = dot(alpha[r], by_alpha)
            for j in range(4):
                by_score = alpha[r, j] * (by_alpha[j] - mean)
                by_offset[r, j] = by_score
                by_last[r, :, j] = by_score * xs[-1]
                by_x += by_score * last[r, :, j]
        steps = []
        for w, x, out in zip(reversed(ws), reversed(xs[:-1]), reversed(xs[1:]), strict=True):
            by_x = by_x * (out > 0)
            steps.insert(0, (np.outer(by_x, x), by_x))
            by_x = w.T @ by_x
        found = after.network
        np.testing.assert_allclose(found.embedding[i], network.embedding[i].numpy() - rate * by_x, atol=1e-11)
        np.testing.assert_allclose(found.last[:, :, i], last - rate * by_last, atol=1e-11)
        np.testing.assert_allclose(found.offset[:, i], offset - rate * by_offset, atol=1e-11)
        for (by_w, by_b), w, b, new, shift in zip(steps, ws, bs, found.weights, found.biases, strict=True):
            np.testing.assert_allclose(new[i], w - rate * by_w, atol=1e-11)
            np.testing.assert_allclose(shift[i], b - rate * by_b, atol=1e-11)
    for i in set(range(4)) - set(cohort.tolist()):
        for old, new in zip(network.weights, after.network.weights, strict=True):
            assert torch.equal(old[i], new[i])
        assert torch.equal(network.last[:, :, i], after.network.last[:, :, i])
    assert after.seen.tolist() == [bool(s) or i in cohort.tolist() for i, s in enumerate(seen)]


def test_an_absent_clients_network_stands_still_under_adam_too(examples, noisy, perceptron):
    x, y = noisy(4, 2)
    trial = examples(perceptron(), x, y, PFedLA(**SMALL, optimiser=Adam(0.1)), training=Training(1, 3, SGD(0.1)))
    server = trial.run(3)
    roster = replace(trial.roster, round=3)
    cohort = sample(roster, 0.5)
    uploads = trial.method.send(roster, server, cohort)
    after = trial.method.aggregate(roster, server, cohort, uploads._replace(theta=uploads.theta + 1))
    absent = roster.others(cohort)
    for old, new in ((server.network, after.network), (server.opt_state.first, after.opt_state.first)):
        old, new = list(old), list(new)
        assert torch.equal(old[-1][..., absent, :], new[-1][..., absent, :])
        assert not torch.equal(old[-1][..., cohort, :], new[-1][..., cohort, :])
        assert torch.equal(old[0][absent], new[0][absent])


def test_weights_of_a_layer_sum_to_one_and_differ_by_layer(examples, noisy, perceptron):
    x, y = noisy(3, 2)
    trial = examples(perceptron(), x, y, PFedLA(**SMALL, optimiser=SGD(50.0)), training=Training(1, 3, SGD(0.1)))
    trial.run(4)
    relation = trial.history.relations[-1]
    assert relation.shape == (2, 3, 3)
    torch.testing.assert_close(relation.sum(-1), torch.ones(2, 3))
    assert (relation[0] - relation[1]).abs().max() > 1e-3


def test_networks_that_are_too_large_are_refused_before_they_are_drawn(bowls):
    with pytest.raises(UsageError, match=r"pfedla: hypernetworks of .* for 3 clients, .* more than memory=1e-06"):
        bowls(PFedLA(memory=1e-6), [1.0, 2.0, 3.0]).run(1)
