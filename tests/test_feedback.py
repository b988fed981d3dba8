import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfed.core.seeding import key, tags
from kinfed.methods.parts import feedback
from kinfed.methods.parts.feedback import (
    Delta,
    Directional,
    Exact,
    Mixtures,
    OnePoint,
    Replies,
    Sketch,
    TwoPoint,
    draw_signs,
)
from kinfed.ops.sketch import count_sketch

float64 = torch.float64
NAMES = tags([str(i) for i in range(64)])


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=float64)


def mixtures(theta, count, seed=0, learned=None):
    """`count` clients are judges of mixtures of theta: [M, d]."""
    learned = torch.ones(theta.shape[1], dtype=torch.bool) if learned is None else learned
    return Mixtures(theta, torch.arange(len(theta)), NAMES[: len(theta)], NAMES[:count], key(seed, "test"), learned)


def replies(answers=None, change=None, rate=None, baseline=None):
    return Replies(answers, change, rate, baseline)


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
    asked = channel.ask(mix)
    if isinstance(asked, tuple):
        asked = [()] * len(clients)
    return torch.stack([channel.answer(c, t, a) for c, t, a in zip(clients, sent, asked, strict=True)])


@pytest.mark.parametrize("channel", [Exact(), Directional()])
def test_exact_channels_by_hand(example, channel):
    theta, sent, clients, slope = example
    mix = mixtures(theta, 3)
    close(channel.slope(mix, replies(answered(channel, mix, sent, clients))), slope)


def test_delta_reads_the_gradient_off_one_step(example):
    theta, sent, clients, slope = example
    change = torch.stack([-0.1 * c.gradient(t, None) for c, t in zip(clients, sent, strict=True)])
    rate = torch.full((3,), 0.1, dtype=float64)
    close(Delta().slope(mixtures(theta, 3), replies(change=change, rate=rate)), slope)
    # Twice the steps, twice the way; and what buffers moved is no gradient.
    learned = torch.tensor([True, True, False, True])
    found = Delta().slope(mixtures(theta, 3, learned=learned), replies(change=2 * change, rate=2 * rate))
    close(found, -(change * learned) @ theta.T / 0.1)


def all_signs(count, balanced=False):
    """[2^M, M], or those that sum to zero with half their number of each sign and a 0 if M is odd."""
    signs = torch.tensor(list(itertools.product((-1, 0, 1), repeat=count)))
    if not balanced:
        return signs[(signs != 0).all(1)]
    return signs[(signs.sum(1) == 0) & ((signs == 0).sum(1) == count % 2)]


def each_client_tries_all(monkeypatch, signs):
    """Let the channels' random signs be every row of signs once, the same for all listeners."""
    monkeypatch.setattr(feedback, "draw_signs", lambda draw, a, b, balanced: signs[:, None].expand(-1, len(a), -1))


def test_two_point_over_all_signs_is_exact(example, monkeypatch):
    theta, sent, clients, slope = example
    each_client_tries_all(monkeypatch, all_signs(3))
    channel, mix = TwoPoint(probes=8, radius=0.1, balanced=False), mixtures(theta, 3)
    assert channel.ask(mix).shape == (3, 8, 4)
    close(channel.slope(mix, replies(answered(channel, mix, sent, clients))), slope)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_balanced_two_point_over_all_signs_is_exact_but_for_a_constant_a_row(count, monkeypatch):
    theta, clients = random(count, 4), [Quadratic(random(4, seed=9 + i)) for i in range(count)]
    sent, signs = 0.2 * theta.sum(0).expand(count, 4), all_signs(count, balanced=True)
    each_client_tries_all(monkeypatch, signs)
    channel, mix = TwoPoint(len(signs), radius=0.1, balanced=True), mixtures(theta, count)
    slope = torch.stack([c.gradient(t, None) for c, t in zip(clients, sent, strict=True)]) @ theta.T
    found = channel.slope(mix, replies(answered(channel, mix, sent, clients)))
    close(found, slope - slope.mean(1, keepdim=True))


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("count", [3, 4])
def test_one_point_over_all_signs_is_exact(count, balanced, monkeypatch):
    theta, clients = random(count, 4), [Quadratic(random(4, seed=9 + i)) for i in range(count)]
    plain, channel, mix = 0.2 * theta.sum(0).expand(count, 4), OnePoint(0.1, balanced), mixtures(theta, count)
    slope = torch.stack([c.gradient(t, None) for c, t in zip(clients, plain, strict=True)]) @ theta.T
    baseline = torch.stack([random(count, seed=3), torch.ones(count, dtype=float64)], 1)
    found = []
    for signs in all_signs(count, balanced):
        monkeypatch.setattr(feedback, "draw_signs", lambda draw, a, b, balanced, s=signs: s.expand(len(a), -1))
        sent = plain + channel.perturb(mix)
        found.append(channel.slope(mix, replies(answered(channel, mix, sent, clients), baseline=baseline)))
    close(torch.stack(found).mean(0), slope - balanced * slope.mean(1, keepdim=True), atol=1e-11)


def test_a_first_loss_says_nothing(example):
    theta, sent, clients, _ = example
    channel, mix = OnePoint(0.1, True), mixtures(theta, 3)
    baseline = torch.tensor([[0.0, 0.0], [0.5, 1.0], [0.0, 0.0]], dtype=float64)
    found = channel.slope(mix, replies(answered(channel, mix, sent, clients), baseline=baseline))
    assert (found[[0, 2]] == 0).all()
    signs = draw_signs(mix.key, NAMES[:3], NAMES[:3], True)
    close(found[1], (clients[1].loss(sent[1], None) - 0.5) / 0.1 * signs[1])


@pytest.mark.parametrize("channel", [TwoPoint(3, 0.5, True), OnePoint(0.5, False)])
def test_probes_leave_buffers_alone(channel):
    learned = torch.tensor([True, False, True, False, True])
    mix = mixtures(random(4, 5), 4, learned=learned)
    steps = channel.perturb(mix) if isinstance(channel, OnePoint) else channel.ask(mix)
    assert (steps[..., ~learned] == 0).all()
    assert (steps[..., learned] != 0).any()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10_000))
def test_balanced_signs_sum_to_zero(count, seed):
    signs = draw_signs(key(seed, "test"), NAMES[:3], NAMES[:count], True)
    assert (signs.sum(1) == 0).all()
    assert ((signs == 0).sum(1) == count % 2).all()
    assert signs.abs().max() <= 1


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("count", [4, 5])
def test_second_moments_of_signs(balanced, count):
    # Estimates have no bias if the mean of sign sign^T, with the correction, is the identity (less its mean).
    keys = torch.stack([key(s, "test") for s in range(4000)])
    signs = draw_signs(keys, NAMES[:2], NAMES[:count], balanced).double()
    rows = signs[:, 0]
    found = rows.T @ rows / len(rows) * feedback._correction(rows, balanced)
    expected = torch.eye(count, dtype=float64) - balanced / count
    close(found, expected, atol=4 / len(rows) ** 0.5)
    close((signs[:, 0] * signs[:, 1]).mean(0), torch.zeros(count, dtype=float64), atol=4 / len(rows) ** 0.5)


def test_signs_follow_names():
    order, draw = torch.tensor([2, 0, 3, 1]), key(7, "test")
    for balanced in (False, True):
        signs = draw_signs(draw, NAMES[:4], NAMES[:4], balanced)
        assert torch.equal(draw_signs(draw, NAMES[order], NAMES[order], balanced), signs[order][:, order])
        assert torch.equal(draw_signs(torch.stack([draw, draw]), NAMES[:4], NAMES[:4], balanced)[1], signs)


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
    found = Sketch(size).slope(mix, replies(answered(Sketch(size), mix, sent, clients)))
    matrix = count_sketch(torch.eye(4, dtype=float64), mix.key, size)  # [d, size]
    gradients = torch.stack([c.gradient(t, None) for c, t in zip(clients, sent, strict=True)])
    close(found, gradients @ matrix @ matrix.T @ theta.T)
    estimates = []
    for seed in range(2000):
        mix = mixtures(theta, 3, seed)
        estimates.append(Sketch(2).slope(mix, replies(answered(Sketch(2), mix, sent, clients))))
    estimates = torch.stack(estimates)
    close(estimates.mean(0), slope, atol=4 * float(estimates.std(0).max()) / 2000**0.5)
