import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfed.core.seeding import key, tags
from kinfed.methods.parts import short_feedback
from kinfed.methods.parts.feedback import Delta, Exact, Mixtures, Replies
from kinfed.methods.parts.short_feedback import Sketch, Spsa, draw_signs, unbias
from kinfed.ops.sketch import count_sketch

float64 = torch.float64
NAMES = tags([str(i) for i in range(64)])


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=float64)


def mixtures(theta, count, seed=0, learned=None, rate=1.0):
    """`count` clients are judges of mixtures of theta: [M, d]; they train at `rate`."""
    rate = torch.full((count,), rate, dtype=float64)
    learned = torch.ones(theta.shape[1], dtype=torch.bool) if learned is None else learned
    return Mixtures(
        theta, torch.arange(len(theta)), NAMES[: len(theta)], NAMES[:count], key(seed, "test"), learned, rate
    )


def replies(answers=None, change=None):
    return Replies(answers, change)


class Quadratic:
    """A client whose held-out loss is 1/2 ||theta - c||^2."""

    held_out = None

    def __init__(self, c):
        self.c = c

    def loss(self, theta, examples):
        return (theta - self.c).square().sum() / 2

    def gradient(self, theta, examples):
        return theta - self.c


@pytest.fixture
def example():
    """Three uploads, their equal mixture, the clients' optima and the slopes G by hand."""
    theta = torch.tensor([[1, 0, 2, 1], [0, 1, 1, 2], [2, 1, 0, 1]], dtype=float64)
    optima = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 2], [2, 2, 0, 0]], dtype=float64)
    slope = torch.tensor([[1, 1, 0], [1, -2, 6], [7, 7, -6]], dtype=float64) / 3
    return theta, theta.mean(0).expand(3, 4), [Quadratic(c) for c in optima], slope


def answered(channel, mix, sent, clients):
    """Every client's answer, stacked."""
    requests = channel.ask(mix)
    if isinstance(requests, tuple):
        requests = [()] * len(clients)
    return torch.stack([channel.answer(c, t, a) for c, t, a in zip(clients, sent, requests, strict=True)])


def test_exact_channel_by_hand(example):
    channel = Exact()
    theta, sent, clients, slope = example
    mix = mixtures(theta, 3)
    close(channel.gradient(mix, replies(answered(channel, mix, sent, clients))), slope)


def test_delta_reads_the_gradient_off_one_step(example):
    theta, sent, clients, slope = example
    change = torch.stack([-0.1 * c.gradient(t, None) for c, t in zip(clients, sent, strict=True)])
    close(Delta().gradient(mixtures(theta, 3, rate=0.1), replies(change=change)), slope)
    # Twice the steps, twice the way; and what buffers moved is no gradient.
    learned = torch.tensor([True, True, False, True])
    found = Delta().gradient(mixtures(theta, 3, learned=learned, rate=0.2), replies(change=2 * change))
    close(found, -(change * learned) @ theta.T / 0.1)


def all_signs(count):
    """[..., M] those that sum to zero with half their number of each sign and a 0 if M is odd."""
    signs = torch.tensor(list(itertools.product((-1, 0, 1), repeat=count)))
    return signs[(signs.sum(1) == 0) & ((signs == 0).sum(1) == count % 2)]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_two_point_over_all_signs_is_exact_but_for_a_constant_a_row(count, monkeypatch):
    theta, clients = random(count, 4), [Quadratic(random(4, seed=9 + i)) for i in range(count)]
    sent, signs = 0.2 * theta.sum(0).expand(count, 4), all_signs(count)
    monkeypatch.setattr(short_feedback, "draw_signs", lambda draw, a, b: signs[:, None].expand(-1, len(a), -1))
    channel, mix = Spsa(len(signs), radius=0.1), mixtures(theta, count)
    slope = torch.stack([c.gradient(t, None) for c, t in zip(clients, sent, strict=True)]) @ theta.T
    found = channel.gradient(mix, replies(answered(channel, mix, sent, clients)))
    close(found, slope - slope.mean(1, keepdim=True))


def test_probes_leave_buffers_alone():
    learned = torch.tensor([True, False, True, False, True])
    mix = mixtures(random(4, 5), 4, learned=learned)
    steps = Spsa(3, 0.5).ask(mix)
    assert (steps[..., ~learned] == 0).all()
    assert (steps[..., learned] != 0).any()


@settings(max_examples=50)
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
        [float(count_sketch(a, key(s, "test"), size) @ count_sketch(b, key(s, "test"), size)) for s in range(4000)]
    )
    # Var = (|a|^2 |b|^2 + <a, b>^2 - 2 sum a_i^2 b_i^2) / size.
    square = a.square()
    variance = float(square.sum() * b.square().sum() + (a @ b) ** 2 - 2 * (square * b.square()).sum()) / size
    assert float(products.mean()) == pytest.approx(float(a @ b), abs=4 * (variance / 4000) ** 0.5)
    assert float(products.var()) == pytest.approx(variance, rel=0.15)


def test_sketches_are_linear_and_of_rows():
    theta, draw = random(3, 11), key(1, "test")
    close(count_sketch(theta, draw, 4), torch.stack([count_sketch(t, draw, 4) for t in theta]), atol=0)
    close(count_sketch(theta.sum(0), draw, 4), count_sketch(theta, draw, 4).sum(0))
    assert (count_sketch(theta, draw, 4) != count_sketch(theta, key(2, "test"), 4)).any()
    one = count_sketch(torch.eye(11, dtype=float64), draw, 4)  # every entry goes to one place, with a sign
    assert ((one.abs() == 1).sum(1) == 1).all()
    assert {-1.0, 1.0} <= set(one.flatten().tolist())


def test_sketch_channel_multiplies_sketches_of_one_key(example):
    theta, sent, clients, slope = example
    mix, size = mixtures(theta, 3), 5
    found = Sketch(size).gradient(mix, replies(answered(Sketch(size), mix, sent, clients)))
    matrix = count_sketch(torch.eye(4, dtype=float64), mix.key, size)  # [d, size]
    gradients = torch.stack([c.gradient(t, None) for c, t in zip(clients, sent, strict=True)])
    close(found, gradients @ matrix @ matrix.T @ theta.T)
    estimates = []
    for seed in range(2000):
        mix = mixtures(theta, 3, seed)
        estimates.append(Sketch(2).gradient(mix, replies(answered(Sketch(2), mix, sent, clients))))
    estimates = torch.stack(estimates)
    close(estimates.mean(0), slope, atol=4 * float(estimates.std(0).max()) / 2000**0.5)
