"""Models as functions of theta: layout, BatchNorm on real rows only, dropout, export."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from kinfed import UsageError
from kinfed.core.layout import CPU, Layout
from kinfed.core.model import Model
from kinfed.core.seeding import key

KEY = key(0, "test")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).double()


def test_layout_lists_layers_with_their_buffers_behind_their_parameters():
    layout = Layout.from_module(network())
    assert [layer.name for layer in layout.layers] == ["0", "1", "4"]
    assert [(layer.at.start, layer.at.stop) for layer in layout.layers] == [(0, 15), (15, 27), (27, 53)]
    assert [(layer.trainable.start, layer.trainable.stop) for layer in layout.layers] == [(0, 15), (15, 21), (27, 53)]
    assert layout.size == 53
    assert layout.parameters == 47
    assert layout.head == {"4.weight", "4.bias"}
    assert layout.trainable.sum() == 47
    assert layout.index(layout.head).tolist() == list(range(27, 53))


def test_positions_are_worked_out_once_wherever_that_is_asked():
    layout = Layout.from_module(network())
    assert layout.trainable_on(CPU).tolist() == layout.trainable.tolist()
    found = []

    def slope(theta):  # what is first made within these must serve outside
        found.append(layout.index(layout.trainable_names))
        return theta[found[-1]].square().sum()

    theta = torch.randn(2, layout.size)
    vmap(grad(slope))(theta)
    assert layout.index(layout.trainable_names, CPU) is found[0]
    assert torch.equal(layout.index(layout.trainable_names), layout.trainable.nonzero().squeeze(1))
    assert torch.equal(theta[:, layout.index(layout.trainable_names)], theta[:, layout.trainable])
    fewer = replace(layout, entries=layout.entries[:1])
    assert fewer.index(layout.trainable_names).tolist() == list(range(layout.entries[0].shape.numel()))
    assert layout == Layout.from_module(network())


def test_flatten_undoes_tensors():
    model = Model(network())
    theta = torch.randn_like(model.theta)
    assert torch.equal(model.layout.flatten(model.layout.tensors(theta)), theta)


def test_convolutions_lie_channels_last_and_keep_their_numbers():
    net = network()
    model = Model(net)
    views = model.layout.tensors(model.theta)
    assert torch.equal(views["0.weight"], net[0].weight)
    wide = Model(nn.Sequential(nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(3, 2)))
    weight = wide.layout.tensors(wide.theta)["0.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.data_ptr() == wide.theta.data_ptr()
    assert torch.equal(weight, wide.original[0].weight)
    assert torch.equal(wide.theta[:4], wide.original[0].weight[0, :, 0, 0])  # one pixel's channels side by side


def test_a_module_that_keeps_layers_in_evaluation_mode_does_so_from_the_first_pass():
    class Still(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)[1].eval()
            return self

    model = Model(Still(*network()))
    tensors = model.layout.tensors(model.theta)
    buffers = model.run(tensors, torch.randn(6, 1, 3, 3, dtype=torch.float64), None, KEY).buffers
    assert torch.equal(buffers["1.running_mean"], tensors["1.running_mean"])


def test_a_model_is_a_copy_in_the_type_of_its_data():
    module = network().double()
    model = Model(module, dtype=torch.float32)
    assert model.theta.dtype == model.export(model.theta)[0].weight.dtype == torch.float32
    assert module[0].weight.dtype == torch.float64


def test_patterns_choose_tensors_and_name_the_nearest():
    layout = Layout.from_module(network())
    assert layout.match(["4.*", "*.running_mean"]) == {"4.weight", "4.bias", "1.running_mean"}
    with pytest.raises(UsageError, match=r"did you mean '4\.weight'"):
        layout.match(["4.wieght"])
    with pytest.raises(UsageError, match="no layer 'haed'"):
        Layout.from_module(network(), head="haed")
    assert Layout.from_module(nn.Linear(2, 1)).head == {"weight", "bias"}
    with pytest.raises(UsageError, match="no trainable parameter"):
        Layout.from_module(nn.ReLU())
    spectral = network()
    spectral[0].register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(UsageError, match=r"'0\.phase' of the model is complex; keep it as real numbers"):
        Layout.from_module(spectral)


def test_training_pass_is_the_stock_modules_with_its_moved_statistics():
    net = network()
    model = Model(net)
    x = torch.randn(6, 1, 3, 3, dtype=torch.float64)
    tensors = model.layout.tensors(model.theta.clone())
    outputs, buffers = model.run(tensors, x, None, KEY)
    torch.testing.assert_close(outputs, net.train()(x))
    torch.testing.assert_close(buffers["1.running_mean"], net[1].running_mean)
    torch.testing.assert_close(buffers["1.running_var"], net[1].running_var)
    moved = model.layout.flatten(tensors | buffers)
    torch.testing.assert_close(model(moved, x), net.eval()(x))
    assert torch.equal(tensors["1.running_mean"], torch.zeros(3, dtype=torch.float64))  # nothing changed in place


@pytest.mark.parametrize("real", [1, 2, 5])
def test_rows_of_weight_zero_leave_no_trace_in_batch_statistics(real):
    model = Model(network())
    x = torch.randn(7, 1, 3, 3, dtype=torch.float64)
    weight = (torch.arange(7) < real).double()
    tensors = model.layout.tensors(model.theta.clone())
    padded, moved = model.run(tensors, x, weight, KEY)
    alone, expected = model.run(tensors, x[:real], None, KEY)
    torch.testing.assert_close(padded[:real], alone)
    for name, value in expected.items():
        torch.testing.assert_close(moved[name], value)
    nothing, kept = model.run(tensors, x, torch.zeros(7, dtype=torch.float64), KEY)
    assert torch.isfinite(nothing).all()
    assert torch.equal(kept["1.running_mean"], tensors["1.running_mean"])


def test_dropout_is_a_function_of_its_key():
    model = Model(nn.Sequential(nn.Dropout(0.4), nn.Linear(50, 1), nn.Dropout(0.4)))
    x = torch.ones(30, 50)
    tensors = model.layout.tensors(model.theta)
    a, b, c = (model.run(tensors, x, None, k).outputs for k in (KEY, KEY, key(0, "other")))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(model(model.theta, x), nn.functional.linear(x, tensors["1.weight"], tensors["1.bias"]))
    together = vmap(lambda k: model.run(tensors, x, None, k).outputs)(torch.stack([KEY, key(0, "other")]))
    torch.testing.assert_close(together, torch.stack([a, c]))
    drop = Model(nn.Sequential(nn.Dropout(0.25), nn.Linear(1, 1)))
    kept = drop.module[0].train()(torch.ones(20000))
    assert abs(float((kept > 0).float().mean()) - 0.75) < 0.02
    assert float(kept.max()) == pytest.approx(4 / 3)


def test_recurrent_modules_and_shared_layers_work():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.out, self.norm = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2), nn.BatchNorm1d(3)
            self.again = self.norm

        def forward(self, x):
            return self.out(self.again(self.norm(self.gru(x)[0][:, -1])))

    net = Net().double()
    model = Model(net)
    x = torch.randn(5, 4, 2, dtype=torch.float64)
    torch.testing.assert_close(model(model.theta, x), net.eval()(x))
    assert model.layout.parameters == sum(p.numel() for p in net.parameters())
    other = model.theta + 0.1
    exported = model.export(other)
    assert type(exported) is Net
    torch.testing.assert_close(exported(x), model(other, x))
    torch.testing.assert_close(model(model.theta, x), net.eval()(x))  # the original is as it was


def test_batchnorm_that_would_couple_predictions_is_refused():
    for bad in (nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2, momentum=None)):
        with pytest.raises(UsageError, match="BatchNorm needs running statistics and a momentum"):
            Model(nn.Sequential(nn.Linear(2, 2), bad))


def test_layers_without_a_shape_are_refused():
    with pytest.raises(UsageError, match="lazy layers, whose shapes are not known yet; run a batch through it"):
        Model(nn.LazyLinear(2))


def test_a_weight_in_two_places_is_one_tensor():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x).tanh())

    net = Tied().double()
    model = Model(net)
    assert model.layout.parameters == 9 + 3 + 3
    theta = torch.randn_like(model.theta)
    x = torch.randn(4, 3, dtype=torch.float64)
    net.one.weight.data = theta[:9].view(3, 3)
    net.one.bias.data, net.two.bias.data = theta[9:12], theta[12:]
    torch.testing.assert_close(model(theta, x), net(x))
    torch.testing.assert_close(model.twin()(theta, x), net(x))


def test_a_twin_computes_the_same_in_a_module_of_its_own():
    model = Model(network())
    twin = model.twin()
    x = torch.randn(6, 1, 3, 3, dtype=torch.float64)
    other = twin.layout.tensors(model.theta + 0.1)
    with twin.bound(other, training=True):
        assert torch.equal(model(model.theta, x), Model(network())(model.theta, x))
    assert torch.equal(twin(model.theta, x), model(model.theta, x))


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 1, padding=1), nn.MaxPool2d(2, ceil_mode=True)])
def test_pooling_before_relu_gives_the_same_bits(pool):
    net = nn.Sequential(nn.Sequential(nn.ReLU(), pool), nn.Flatten(), nn.LazyLinear(2))
    x = (torch.randn(5, 3, 9, 9, generator=torch.Generator().manual_seed(0)) - 0.7).round(decimals=1)  # with ties
    net(x)
    module, sizes = Model(net).module, []
    observed = nn.ReLU.forward
    found = []
    for whole in (net[0], module[0]):
        leaf = x.clone().requires_grad_()
        with mock.patch.object(nn.ReLU, "forward", lambda self, x: sizes.append(x.numel()) or observed(self, x)):
            y = whole(leaf)
        found.append((y, *torch.autograd.grad((y**2 + y).sum(), leaf)))
    assert sizes == [x.numel(), found[0][0].numel()]  # as it is, and pooled first
    assert (found[0][0] == 0).any()  # windows without a positive number
    assert (found[0][0] > 0).any()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Parts(nn.Module):
    """Calls the layers of a Sequential, which rectifies and pools, in one of many ways."""

    def __init__(self, way, relu=None):
        super().__init__()
        self.way, self.seen = way, None
        self.net = nn.Sequential(nn.Conv2d(1, 3, 3), relu or nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(3, 2)
        if way == "hook":
            self.net[1].register_forward_hook(lambda layer, given, out: setattr(self, "seen", out))

    def forward(self, x):
        match self.way:
            case "slice":
                x = self.net[:2](x)
            case "item":
                x = self.net[1](self.net[0](x))
            case "loop":
                x = sum(((x := layer(x)).mean((2, 3), keepdim=True) for layer in self.net), 0)
            case "hook":
                x = self.net(x).mean((2, 3), keepdim=True) + self.seen.mean((2, 3), keepdim=True)
            case "list":
                x = [x := layer(x) for layer in self.net.children()][1]
            case "own":
                x = self.net[0](x)
                x = x + self.net[1:](x).mean((2, 3), keepdim=True)
            case _:
                x = self.net(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("way", ["whole", "slice", "item", "loop", "hook", "list", "own"])
@pytest.mark.parametrize("relu", [nn.ReLU(), nn.ReLU(inplace=True), type("Mine", (nn.ReLU,), {})()])
def test_layers_that_are_called_one_by_one_give_what_they_always_did(way, relu):
    torch.manual_seed(0)
    net = Parts(way, relu)
    model, x = Model(net), torch.randn(4, 1, 8, 8)
    for training in (False, True):
        net.train(training)
        expected = torch.func.functional_call(net, {}, x)
        tensors = model.layout.tensors(model.theta)
        found = model.run(tensors, x, None, KEY).outputs if training else model(model.theta, x)
        torch.testing.assert_close(found, expected)


def test_hooks_of_every_module_see_the_layers_in_their_order():
    net, seen = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 1)), []
    model = Model(net)
    hook = nn.modules.module.register_module_forward_hook(lambda layer, given, out: seen.append(type(layer)))
    try:
        model(model.theta, torch.randn(2, 1, 4, 4))
    finally:
        hook.remove()
    assert seen[:2] == [nn.ReLU, nn.MaxPool2d]
