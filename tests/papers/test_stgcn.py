import math

import pytest
import torch
from torch.nn.functional import layer_norm

from kinfed_papers.references import STGCN
from kinfed_papers.references.stgcn import chebyshev


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("nodes", "count"), [(207, 320_143), (325, 395_781), (228, 333_604), (307, 384_243), (170, 296_426)]
)
def test_parameters_are_those_of_the_published_code(nodes, count):
    assert parameters(STGCN().network(torch.ones(nodes, nodes), 12, 12, 2)) == count


def test_polynomials_of_a_path_by_hand():
    # Two nodes joined by one road: L = [[1, -1], [-1, 1]] with greatest eigenvalue 2, scaled [[0, -1], [-1, 0]].
    first, second, third = chebyshev(torch.tensor([[5.0, 0.7], [0.0, 0.0]]))
    assert first.tolist() == [[1, 0], [0, 1]]
    torch.testing.assert_close(second, torch.tensor([[0.0, -1], [-1, 0]]))
    torch.testing.assert_close(third, torch.eye(2))  # 2 T1 T1 - I
    # A node without a road has no Laplacian of its own: it only sees itself.
    lonely = chebyshev(torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 0]]))
    assert lonely[:, 2].tolist() == [[0, 0, 1], [0, 0, -1], [0, 0, 1]]


def test_polynomials_are_cosines_of_the_spectrum():
    draw = torch.Generator().manual_seed(0)
    _, second, third = chebyshev(torch.rand(6, 6, generator=draw)).double()
    values = torch.linalg.eigvalsh(second)
    assert values.min() >= -1 - 1e-6
    assert float(values.max()) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(
        torch.linalg.eigvalsh(third).sort()[0], torch.cos(2 * values.clamp(max=1).acos()).sort()[0], atol=1e-5, rtol=0
    )


def test_later_steps_are_forecast_from_forecasts():
    torch.manual_seed(0)
    network = STGCN().network(torch.ones(3, 3), 12, 3, 2).eval()
    x = torch.randn(2, 3, 12, 2)
    said = network(x)
    assert said.shape == (2, 3, 3)
    x[:, :, :, 1] = 7  # the clock is not read
    for step in range(3):
        alone = network.train()(x)
        assert alone.shape == (2, 3, 1)
        torch.testing.assert_close(alone[..., 0], said[..., step])
        x = torch.cat([x[:, :, 1:], torch.stack([alone, alone], -1)], 2)


def test_a_gated_convolution_by_hand():
    torch.manual_seed(1)
    part = STGCN().network(torch.ones(2, 2), 12, 1, 1).blocks[1].first  # 64 to 32 channels, gated
    x = torch.randn(1, 64, 4, 2)
    weight, bias = part.convolution.weight[..., 0], part.convolution.bias
    both = (
        sum(torch.einsum("oc,bctn->botn", weight[:, :, k], x[:, :, k : k + 2]) for k in range(3)) + bias[:, None, None]
    )
    kept = torch.einsum("oc,bctn->botn", part.shrink.weight[..., 0, 0], x[:, :, 2:])
    expected = (both[:, :32] + kept) * torch.sigmoid(both[:, 32:])
    torch.testing.assert_close(part(x), expected, atol=1e-5, rtol=1e-5)
    first = STGCN().network(torch.ones(2, 2), 12, 1, 1).blocks[0].first  # 1 to 32: the residual is padded with zeros
    x = torch.randn(1, 1, 3, 2)
    value, gate = first.convolution(x).chunk(2, 1)
    value = torch.cat([value[:, :1] + x[:, :, 2:], value[:, 1:]], 1)
    torch.testing.assert_close(first(x), value * torch.sigmoid(gate))


def test_layers_are_normalised_over_nodes_and_channels():
    torch.manual_seed(2)
    block = STGCN().network(torch.ones(4, 4), 12, 1, 1).blocks[0]
    x = torch.randn(2, 1, 12, 4)
    before = block.second(block.graph(block.first(x)))
    expected = layer_norm(before.permute(0, 2, 3, 1).flatten(2), [4 * 64], eps=1e-6)
    torch.testing.assert_close(block(x).permute(0, 2, 3, 1).flatten(2), expected)


def test_the_rate_falls_every_five_epochs():
    network = torch.nn.Linear(1, 1)
    optimiser, schedule = STGCN(lr=0.5).optimiser(network)
    for _ in range(11):
        optimiser.step()
        schedule.step()
    assert optimiser.param_groups[0]["lr"] == pytest.approx(0.5 * 0.7**2)
    assert STGCN().clip == math.inf
