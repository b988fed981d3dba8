"""Attention, kinfed's own: weights by hand, and its ten steps of Adam once more."""

import math

import torch
import torch.nn.functional as F
from small import close, random
from torch import float64

from kinfed.methods.attention import Attention, Heads
from kinfed.methods.pfedgat import Upload


def test_weights_by_hand():
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=float64)
    network = Heads(rows[None], -rows[None], -torch.ones(1, 2, dtype=float64))
    features = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=float64)
    weights = Attention().scores(network, features).softmax(-1).mean(0)
    alone = 1 / (1 + math.exp(-1.6))
    close(weights, torch.tensor([[alone, 1 - alone], [1 - alone, alone]], dtype=float64), atol=1e-12)


def mixing(network, theta):
    """R: [N, N], by the page's equations."""
    rows = F.layer_norm(theta, theta.shape[1:])
    rows = F.layer_norm(rows - rows.mean(0), theta.shape[1:])
    heads = []
    for listen, speak, score in zip(*network, strict=True):
        pairs = [[score @ F.leaky_relu(listen @ i + speak @ j, 0.2) for j in rows] for i in rows]
        heads.append(torch.stack([torch.stack(row) for row in pairs]).softmax(1))
    return torch.stack(heads).mean(0)


def test_ten_steps_of_adam_down_the_derivatives_by_weights(roster):
    known, method, uphill = roster(4, size=5), Attention(heads=2, width=3, lr=0.01), random(4, 5, seed=22)
    first, second = random(4, 5, seed=21), random(4, 5, seed=23)
    start = method.start(known)
    mixed = method.aggregate(known, start, known.everyone, Upload(first, uphill))
    close(torch.stack(list(mixed.network[:2])), torch.stack(list(start.network[:2])), atol=0)  # nothing judged yet
    close(mixed.theta, mixing(start.network, first) @ first, atol=1e-12)
    after = method.aggregate(known, mixed, known.everyone, Upload(second, uphill))
    network = Heads(*(numbers.clone().requires_grad_() for numbers in start.network))
    optimiser = torch.optim.Adam([*network], lr=0.01)
    for _ in range(10):
        optimiser.zero_grad()
        (mixing(network, first) * (uphill @ first.T)).sum().backward()
        optimiser.step()
    for numbers, expected in zip(after.network, network, strict=True):
        close(numbers, expected.detach(), atol=1e-9)
    close(after.theta, mixing(after.network, second) @ second, atol=1e-12)


def test_clients_that_are_all_alike_share_evenly(roster):
    known, method = roster(3, size=5), Attention(heads=2, width=3)
    alike = random(1, 5).expand(3, -1)
    server = method.aggregate(known, method.start(known), known.everyone, Upload(alike, random(3, 5, seed=1)))
    close(server.theta, alike, atol=1e-12)
