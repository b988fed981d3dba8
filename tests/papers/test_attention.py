"""What attention can learn about groups of clients: Equation 5 of pFedGAT ranks senders alike for all receivers."""

import math

import torch

from kinfed.methods.pfedgat import Heads, PFedGAT
from kinfed_papers.pfedgat.graphs import Dynamic, DynamicHeads

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
