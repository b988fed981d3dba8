import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from small import random

from kinfed.core.seeding import key, tags
from kinfed.methods import PFedGAT
from kinfed.methods.pfedgat import Upload
from kinfed.ops.sketch import count_sketch
from kinfed_papers.pfedgat import channels
from kinfed_papers.pfedgat.channels import Delta, Sketch, Spsa, draw_signs, unbias

float64 = torch.float64
NAMES = tags([str(i) for i in range(64)])


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


class Quadratic:
    """A client whose held-out loss is 1/2 ||theta - c||^2."""

    held_out = None

    def __init__(self, c):
        self.c = c

    def loss(self, theta, examples):
        return (theta - self.c).square().sum() / 2

    def gradient(self, theta, examples):
        return theta - self.c


def mixed(method, known, theta):
    """A server that has just sent everybody the mean of theta: [N, d]."""
    everyone = torch.ones(len(theta), dtype=torch.bool)
    server = method.start(known)
    return server._replace(uploads=theta, theta=theta.mean(0).expand_as(theta), present=everyone, seen=everyone)


def learned(method, known, theta, clients):
    """[N, N] what the server makes of everybody's answers about the mean of theta."""
    server = mixed(method, known, theta)
    sent = method.send(known, server, known.everyone)
    each = [type(sent)(*row) for row in zip(*sent, strict=True)]
    answers = torch.stack([method.answer(c, one) for c, one in zip(clients, each, strict=True)])
    return method.slopes(known, server, known.everyone, known.everyone, Upload(sent.theta, answers))


@pytest.fixture
def example():
    """Three uploads, their equal mixture, the clients' optima and the slopes G by hand."""
    theta = torch.tensor([[1, 0, 2, 1], [0, 1, 1, 2], [2, 1, 0, 1]], dtype=float64)
    optima = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 2], [2, 2, 0, 0]], dtype=float64)
    slope = torch.tensor([[1, 1, 0], [1, -2, 6], [7, 7, -6]], dtype=float64) / 3
    return theta, theta.mean(0).expand(3, 4), [Quadratic(c) for c in optima], slope


def test_gradients_by_hand(roster, example):
    theta, _, clients, slope = example
    close(learned(PFedGAT(), roster(3, size=4), theta, clients), slope)


def test_delta_reads_the_gradient_off_one_step(roster, example):
    theta, sent, clients, slope = example
    known, method = roster(3, size=4), Delta()
    way = known.training.count_steps(known.sizes).to(float64)[:, None] * known.training.optimiser.lr
    change = -way * torch.stack([c.gradient(t, None) for c, t in zip(clients, sent, strict=True)])
    server = mixed(method, known, theta)
    upload = Upload(sent + change, change[:, :0])
    close(method.slopes(known, server, known.everyone, known.everyone, upload), slope)


def all_signs(count):
    """[..., M] those that sum to zero with half their number of each sign and a 0 if M is odd."""
    signs = torch.tensor(list(itertools.product((-1, 0, 1), repeat=count)))
    return signs[(signs.sum(1) == 0) & ((signs == 0).sum(1) == count % 2)]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_two_point_over_all_signs_is_exact_but_for_a_constant_a_row(roster, count, monkeypatch):
    theta, clients = random(count, 4), [Quadratic(random(4, seed=9 + i)) for i in range(count)]
    sent, signs = theta.mean(0).expand(count, 4), all_signs(count)
    monkeypatch.setattr(channels, "draw_signs", lambda draw, a, b: signs[:, None].expand(-1, len(a), -1))
    slope = torch.stack([c.gradient(t, None) for c, t in zip(clients, sent, strict=True)]) @ theta.T
    found = learned(Spsa(probes=len(signs), radius=0.1), roster(count, size=4), theta, clients)
    close(found, slope - slope.mean(1, keepdim=True))


def test_probes_leave_buffers_alone(roster, perceptron):
    known, method = roster(4, perceptron(norm=True)), Spsa(probes=3, radius=0.5)
    steps = method.send(known, mixed(method, known, random(4, known.layout.size)), known.everyone).request
    assert (steps[..., ~known.layout.trainable] == 0).all()
    assert (steps[..., known.layout.trainable] != 0).any()


@given(st.integers(1, 12), st.integers(0, 10_000))
def test_balanced_signs_sum_to_zero(count, seed):
    signs = draw_signs(key(seed, "test"), NAMES[:3], NAMES[:count])
    assert (signs.sum(1) == 0).all()
    assert ((signs == 0).sum(1) == count % 2).all()
    assert signs.abs().max() <= 1


@pytest.mark.parametrize("count", [4, 5])
def test_second_moments_of_signs(count):
    # Estimates have no bias if the mean of sign sign^T, with the correction, is the identity (less its mean).
    keys = torch.stack([key(s, "test") for s in range(4000)])
    signs = draw_signs(keys, NAMES[:2], NAMES[:count]).double()
    rows = signs[:, 0]
    found = rows.T @ rows / len(rows) * unbias(count)
    expected = torch.eye(count, dtype=float64) - 1 / count
    close(found, expected, atol=4 / len(rows) ** 0.5)
    close((signs[:, 0] * signs[:, 1]).mean(0), torch.zeros(count, dtype=float64), atol=4 / len(rows) ** 0.5)


def test_signs_follow_names():
    order, draw = torch.tensor([2, 0, 3, 1]), key(7, "test")
    signs = draw_signs(draw, NAMES[:4], NAMES[:4])
    assert torch.equal(draw_signs(draw, NAMES[order], NAMES[order]), signs[order][:, order])
    assert torch.equal(draw_signs(torch.stack([draw, draw]), NAMES[:4], NAMES[:4])[1], signs)


def test_sketches_have_no_bias_and_the_stated_variance():
    a, b, size = random(30), random(30, seed=1), 8
    products = torch.tensor(
        [float(count_sketch(a, key(s, "test"), size) @ count_sketch(b, key(s, "test"), size)) for s in range(1000)]
    )
    # Var = (|a|^2 |b|^2 + <a, b>^2 - 2 sum a_i^2 b_i^2) / size.
    square = a.square()
    variance = float(square.sum() * b.square().sum() + (a @ b) ** 2 - 2 * (square * b.square()).sum()) / size
    assert float(products.mean()) == pytest.approx(float(a @ b), abs=4 * (variance / 1000) ** 0.5)
    assert float(products.var()) == pytest.approx(variance, rel=0.15)


@pytest.mark.parametrize("panel", [1, 22, 1 << 19])  # one row, two or all of them at a time
def test_sketches_are_linear_and_of_rows(panel, monkeypatch):
    monkeypatch.setattr("kinfed.ops.sketch.PANEL", panel)
    theta, draw = random(3, 11), key(1, "test")
    close(count_sketch(theta, draw, 4), torch.stack([count_sketch(t, draw, 4) for t in theta]), atol=0)
    close(count_sketch(theta.sum(0), draw, 4), count_sketch(theta, draw, 4).sum(0))
    assert (count_sketch(theta, draw, 4) != count_sketch(theta, key(2, "test"), 4)).any()
    one = count_sketch(torch.eye(11, dtype=float64), draw, 4)  # every entry goes to one place, with a sign
    assert ((one.abs() == 1).sum(1) == 1).all()
    assert {-1.0, 1.0} <= set(one.flatten().tolist())


def test_sketch_channel_multiplies_sketches_of_one_key(roster, example):
    theta, sent, clients, slope = example
    known, size = roster(3, size=4), 5
    found = learned(Sketch(size=size), known, theta, clients)
    matrix = count_sketch(torch.eye(4, dtype=float64), key(known.seed, "pfedgat", known.round), size)  # [d, size]
    gradients = torch.stack([c.gradient(t, None) for c, t in zip(clients, sent, strict=True)])
    close(found, gradients @ matrix @ matrix.T @ theta.T)
    rounds = (replace(known, round=t) for t in range(500))
    estimates = torch.stack([learned(Sketch(size=2), now, theta, clients) for now in rounds])
    close(estimates.mean(0), slope, atol=4 * float(estimates.std(0).max()) / 500**0.5)
