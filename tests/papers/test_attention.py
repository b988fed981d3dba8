"""What attention can learn about groups of clients: Equation 5 of pFedGAT ranks senders alike for all receivers."""

import math

import pytest
import torch
import torch.nn.functional as F

from kinfed.methods.attention import Dynamic, Heads as DynamicHeads
from kinfed.methods.pfedgat import Heads, PFedGAT

MOST = 0.6535  # max over D of (sigmoid(D) + sigmoid(-0.2 D)) / 2, for two equal groups


def drawn(attention, generator, size):
    """A network with weights of any size: from nearly none to far beyond what training reaches."""
    times = 10 ** (4 * torch.rand(1, generator=generator) - 2)
    shapes = {"project": (8, 8, size), "listen": (8, 8), "speak": (8, 8)}
    if isinstance(attention, Dynamic):
        shapes = {"listen": (8, 8, size), "speak": (8, 8, size), "score": (8, 8)}
    made = {key: times * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return DynamicHeads(**made) if isinstance(attention, Dynamic) else Heads(**made)


def test_the_bound_for_two_groups_is_the_largest_of_its_formula():
    at = [(1 / (1 + math.exp(-d)) + 1 / (1 + math.exp(0.2 * d))) / 2 for d in (x / 100 for x in range(1000))]
    assert abs(max(at) - MOST) < 5e-5


def test_no_network_of_equation_5_gives_two_groups_more_than_the_bound_and_a_dynamic_one_does():
    generator, of, most = torch.Generator().manual_seed(0), torch.tensor([0, 0, 0, 1, 1, 1]), {}
    for attention in (PFedGAT(), Dynamic()):
        for _ in range(300):
            features = torch.randn(2, 16, generator=generator)[of]  # [N, m] all of a group are alike
            weights = attention.scores(drawn(attention, generator, 16), features).softmax(-1).mean(0)
            own = (weights * (of[:, None] == of)).sum(1).mean().item()
            most[type(attention)] = max(most.get(type(attention), 0.0), own)
    assert most[PFedGAT] <= MOST + 1e-4
    assert most[Dynamic] > MOST + 0.01


def test_a_head_ranks_senders_alike_for_all_receivers():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(6, 16, generator=generator)
    for attention, alike in ((PFedGAT(), True), (Dynamic(), False)):
        order = attention.scores(drawn(attention, generator, 16), features).double().argsort(-1)  # [H, K, K]
        assert bool((order == order[:, :1]).all()) is alike


def most_of_static(logits, slope):
    """1 + the total variation between the softmax of scores of senders: [N] and that of `slope` times them."""
    return 1 + (logits.softmax(0) - (slope * logits).softmax(0)).abs().sum() / 2


@pytest.mark.parametrize("slope", [0.0, 0.2, 0.5, 1.0])
def test_what_a_head_gives_clients_of_themselves_is_less_than_two_and_than_the_harmonic_number(slope):
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        count = int(torch.randint(1, 30, (), generator=generator))
        times = 10 ** (3 * torch.rand(2, 1, generator=generator, dtype=torch.float64) - 1)
        listen, speak = times * torch.randn(2, count, generator=generator, dtype=torch.float64)
        rows = F.leaky_relu(listen[:, None] + speak, slope).softmax(1)  # Equations 5 and 6
        trace, most = float(rows.trace()), float(most_of_static(speak, slope))
        assert trace <= most + 1e-12
        assert most < 2
        assert trace <= sum(1 / place for place in range(1, count + 1)) + 1e-12


def test_the_bound_is_reached_by_receivers_at_the_two_ends():
    speak = torch.tensor([5.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    listen = torch.tensor([100.0, -100.0, -100.0, -100.0, -100.0], dtype=torch.float64)
    rows = F.leaky_relu(listen[:, None] + speak, 0.2).softmax(1)
    assert float(rows.trace()) == pytest.approx(float(most_of_static(speak, 0.2)), abs=1e-12)
    assert float(rows.trace()) / 5 == pytest.approx(0.3138, abs=5e-5)


def test_a_uniform_slope_gives_everybody_the_same_row():
    assert float(most_of_static(torch.randn(7, generator=torch.Generator().manual_seed(3)), 1.0)) == pytest.approx(1)
