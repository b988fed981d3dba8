import pytest
import torch

from kinfed_papers.references import GraphWaveNet
from kinfed_papers.references.graph_wavenet import transitions


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("nodes", "count"), [(207, 309_400), (325, 311_760)])
def test_parameters_are_those_of_the_published_code(nodes, count):
    assert parameters(GraphWaveNet().network(torch.ones(nodes, nodes), 12, 12, 2)) == count


def test_walks_go_along_the_links_and_back():
    along, back = transitions(torch.tensor([[1.0, 3], [0, 0]]))
    assert along.tolist() == [[0.25, 0.75], [0, 0]]
    assert back.tolist() == [[1, 0], [1, 0]]


def reference(network, x):
    """The forward pass written out: skips are cropped and added layer by layer, diffusion by matrix powers."""
    h = torch.nn.functional.pad(x.permute(0, 3, 1, 2), (13 - x.shape[2], 0))
    h = network.start(h)
    learned = torch.softmax(torch.relu(network.source @ network.target), 1)
    skip = 0
    for i, layer in enumerate(network.layers):
        dilation = (1, 2)[i % 2]
        old, new = h[..., :-dilation], h[..., dilation:]

        def both(part, old=old, new=new):
            w = part.weight[:, :, 0]
            mixed = torch.einsum("oc,bcnt->bont", w[..., 0], old) + torch.einsum("oc,bcnt->bont", w[..., 1], new)
            return mixed + part.bias[:, None, None]

        gated = torch.tanh(both(layer.value)) * torch.sigmoid(both(layer.gate))
        said = layer.skip(gated)
        skip = said if i == 0 else skip[..., -said.shape[3] :] + said
        around = [gated]
        for walk in (*network.walks, learned):
            for power in (1, 2):
                around.append(torch.einsum("bcvt,vw->bcwt", gated, torch.linalg.matrix_power(walk, power)))
        h = layer.norm(layer.mix(torch.cat(around, 1)) + h[..., -gated.shape[3] :])
    out = network.end[3](torch.relu(network.end[1](torch.relu(skip))))
    assert out.shape[3] == 1
    return out[..., 0].transpose(1, 2)


def test_the_network_is_the_published_one():
    torch.manual_seed(0)
    network = GraphWaveNet().network(torch.rand(5, 5), 12, 12, 2).double().eval()
    x = torch.randn(3, 5, 12, 2, dtype=torch.float64)
    assert network(x).shape == (3, 5, 12)
    torch.testing.assert_close(network(x), reference(network, x))


def test_every_past_step_counts():
    network = GraphWaveNet().network(torch.rand(3, 3), 12, 4, 1).double().eval()
    x = torch.randn(1, 3, 12, 1, dtype=torch.float64, requires_grad=True)
    network(x)[0, 0].sum().backward()
    assert (x.grad.abs().sum((0, 1, 3)) > 0).all()


def test_training_is_as_published():
    network = torch.nn.Linear(1, 1)
    optimiser, schedule = GraphWaveNet().optimiser(network)
    optimiser.step()
    schedule.step()
    held = optimiser.param_groups[0]
    assert (held["lr"], held["weight_decay"]) == (0.001, 0.0001)
    assert isinstance(optimiser, torch.optim.Adam)
