import pytest
import torch
from small import random
from torch import nn

from kinfed.core.layout import Layout
from kinfed.ops.neighbours import Weights

float64 = torch.float64


@pytest.fixture
def layout():
    """Two layers, the first with running statistics."""
    return Layout.of(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))


@pytest.mark.parametrize("layers", [(), (2,)])
def test_lists_and_the_whole_relation_mix_alike(layout, layers):
    near, theta = torch.tensor([[2, 0], [1, 3], [3, 4]]), random(5, layout.size)
    rows = random(*layers, 3, 2, seed=1).softmax(-1)
    listed = Weights(rows, near)
    whole = Weights(listed.dense(5))
    assert whole.rows.shape == (*layers, 3, 5)
    assert torch.equal(whole.dense(5), whole.rows)
    torch.testing.assert_close(listed.mix(theta, layout), whole.mix(theta, layout), rtol=0, atol=1e-14)
    if not layers:
        torch.testing.assert_close(listed.mix_freely(theta, layout), whole.mix(theta, layout), rtol=0, atol=1e-14)
        by_hand = torch.stack([w[0] * theta[i] + w[1] * theta[j] for w, (i, j) in zip(rows, near, strict=True)])
        torch.testing.assert_close(listed.mix(theta, layout), by_hand, rtol=0, atol=1e-14)


def test_negative_weights_extrapolate_what_is_learned_alone(layout):
    theta = random(2, layout.size).abs()
    mixed = Weights(torch.tensor([[1.5, -0.5]], dtype=float64), torch.tensor([[1, 0]])).mix_freely(theta, layout)
    expected = torch.where(layout.trainable, 1.5 * theta[1] - 0.5 * theta[0], theta[1])  # the nearest weights: 1 and 0
    torch.testing.assert_close(mixed[0], expected, rtol=0, atol=1e-14)
