import pytest
import torch
from torch import nn

from kinfed.core.layout import Layout
from kinfed.core.method import Params
from kinfed.core.model import Model
from kinfed.core.optimiser import SGD
from kinfed.core.tasks import Classification
from kinfed.core.training import Training
from kinfed.data.federation import Federation
from kinfed.data.tables.columns import Category, Number
from kinfed.data.tables.schema import Description, Target
from kinfed.errors import UsageError
from kinfed.methods import FedAvg
from kinfed.models import MODELS
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

SERIES = ("rnn", "gru", "changes", "changes-mlp", "repeat", "holt-winters", "calendar-means")


def shape_for(name):
    """A small example's shape that the model takes."""
    return (5, 2) if name in SERIES else {"text": (7,), "embedded": (4,), "log-linear": (4,)}.get(name, (1, 16, 20))


def made(name, outputs, **settings):
    """A model for examples of that shape."""
    if name in ("embedded", "log-linear"):
        columns = Number("price", 3.0, 2.0, 2.5, 0), Category("town", ("Bonn", "Ulm"), 5, 3, 0)
        settings["columns"] = Description("shop", columns, (Target("sold", (), 2.0, 1.0),))
    return MODELS[name](shape_for(name), outputs, **settings)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "settings", "count"),
    [
        ("linear", (3, 32, 32), 10, {}, 3072 * 10 + 10),
        ("mlp", (1, 8, 8), 10, {}, 64 * 64 + 64 + 64 * 10 + 10),
        ("mlp", (2,), 2, {"hidden": (16, 16)}, 354),
        ("mlp", (6, 1), 6, {"hidden": (16, 16)}, 486),
        ("cnn", (3, 32, 32), 10, {}, 62_006),
        ("cnn", (3, 32, 32), 100, {}, 69_656),
        ("cnn", (1, 28, 28), 10, {}, 44_426),
        ("cnn-bn", (3, 32, 32), 10, {}, 878_730),
        ("cnn-bn", (3, 32, 32), 100, {}, 924_900),
        ("vgg", (1, 28, 28), 10, {}, 130_890),
        ("vgg", (3, 32, 32), 10, {}, 188_810),
        ("vgg", (3, 32, 32), 10, {"widths": (32, 64, 128), "depth": 2, "hidden": 256}, 814_122),
        ("resnet9", (3, 32, 32), 10, {}, 2_440_256),
        ("resnet18", (3, 32, 32), 100, {}, 11_227_812),
        ("resnet18", (3, 32, 32), 10, {"stem": "cifar"}, 11_173_962),
        ("changes", (12, 2), 3, {}, 24 * 3 + 3),
        ("changes-mlp", (12, 2), 3, {"hidden": (8, 4)}, 24 * 8 + 8 + 8 * 4 + 4 + 4 * 3 + 3),
        ("rnn", (12, 2), 12, {}, 5_132),
        ("rnn", (12, 2), 12, {"cell": "gru"}, 13_836),
        ("gru", (12, 2), 12, {}, 62_501),
        ("text", (80,), 80, {}, 80 * 8 + 3 * 64 * (8 + 64 + 2) + 80 * 65),
        ("text", (80,), 2, {"symbols": 90, "embedding": 4, "cell": "rnn", "hidden": 5}, 90 * 4 + 5 * (4 + 5 + 2) + 12),
    ],
)
def test_parameters(name, shape, outputs, settings, count):
    module = MODELS[name](shape, outputs, **settings)
    assert parameters(module) == count
    assert module(torch.zeros(2, *shape)).shape == (2, outputs)


def test_an_mlp_of_changes_forecasts_a_series_that_is_higher_as_much_higher():
    """Whatever stands beside the readings; a readout by hand of one window."""
    torch.manual_seed(0)
    module, x = MODELS["changes-mlp"]((5, 2), 3), torch.randn(4, 5, 2)
    higher = x + torch.tensor([7.0, 0.0])
    assert torch.allclose(module(higher), module(x) + 7, atol=1e-5)
    by_hand = MODELS["changes-mlp"]((2, 1), 1, hidden=(1,))
    for value, parameter in zip(([[2.0, 5.0]], [0.5], [[3.0]], [0.25]), by_hand.parameters(), strict=True):
        parameter.data = torch.tensor(value)
    # The reading before is 1 higher than the last, 4: 2 * 1 + 0.5 = 2.5 after ReLU, and 4 + 3 * 2.5 + 0.25.
    assert by_hand(torch.tensor([[[5.0], [4.0]]])).tolist() == [[11.75]]


def test_buffers_of_batch_norm():
    module = MODELS["cnn-bn"]((3, 32, 32), 10)
    # Two means and variances of 32 and 64 channels, and two counters, which are no part of theta.
    assert sum(b.numel() for b in module.buffers()) == 194
    assert Layout.from_module(module).size == 878_730 + 192
    assert sum(b.numel() for b in MODELS["resnet18"]((3, 32, 32), 10).buffers()) == 9_620


@pytest.mark.parametrize("name", MODELS)
def test_the_last_layer_is_the_head(name):
    layout = Layout.from_module(made(name, 5))
    assert layout.head == ({"head.weight"} if name == "resnet9" else {"head.weight", "head.bias"})


@pytest.mark.parametrize("name", ["cnn", "cnn-bn"])
def test_sixteen_pixels_are_the_least(name):
    assert MODELS[name]((1, 16, 16), 2)(torch.zeros(2, 1, 16, 16)).shape == (2, 2)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "resnet18" else name for name in MODELS],  # a minute
)
def test_loop_and_vmap_train_alike(name):
    draw = torch.Generator().manual_seed(0)
    sizes, rows, at = [6, 3, 5], {"train": [], "validation": [], "test": []}, 0
    for size in sizes:
        for split, count in (("train", size), ("validation", 1), ("test", 2)):
            rows[split].append(torch.arange(at, at + count))
            at += count
    x = torch.randn(at, *shape_for(name), generator=draw, dtype=torch.float64)
    federation = Federation(x, torch.arange(at) % 2, rows, Classification(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # On so small an image the other stem leaves one pixel to normalise, and rounding errors explode.
        settings = {"stem": "cifar"} if name == "resnet18" else {}
        module = made(name, 2, **settings).double()
    method, everyone, found, scores = FedAvg(), torch.arange(3), {}, {}
    for executor in ("loop", "vmap"):
        training = Training(epochs=1, batch=4, optimiser=SGD(lr=0.01))
        fleet = Simulation(federation, Model(module), method, training, execution=Execution(executor))
        roster = fleet.roster()
        sent = method.send(roster, method.start(roster), everyone)
        found[executor] = fleet.train(0, everyone, sent)[1].theta
        scores[executor] = fleet.evaluate(0, everyone, Params(found[executor])).scores
    assert (found["loop"] - fleet.model.theta).abs().max() > 1e-4  # something was learned
    torch.testing.assert_close(found["loop"], found["vmap"], rtol=0, atol=1e-12)
    for key, values in scores["loop"].items():
        torch.testing.assert_close(values, scores["vmap"][key], rtol=1e-9, atol=1e-12, equal_nan=True)


def test_the_cnn_is_two_convolutions_and_three_layers():
    module = MODELS["cnn"]((3, 32, 32), 10)
    kinds = [type(part) for part in module if not isinstance(part, nn.ReLU | nn.Flatten | nn.MaxPool2d)]
    assert kinds == [nn.Conv2d, nn.Conv2d, nn.Linear, nn.Linear, nn.Linear]
    assert [p.numel() for p in module.parameters()][::2] == [450, 2_400, 48_000, 10_080, 840]


def test_residual_blocks_add_what_they_are_given():
    x = torch.randn(2, 3, 32, 32)
    module = MODELS["resnet9"]((3, 32, 32), 10).eval()
    found = {}
    module.layer2.register_forward_hook(lambda part, given, said: found.update(given=given[0], said=said))
    outputs = module(x)
    pooled = module.layer2[1](module.layer2[0](found["given"]))
    inner = module.layer2[2]
    torch.testing.assert_close(found["said"], pooled + inner[1](inner[0](pooled)))
    # Global maximum, no bias, and outputs times 0.2.
    features = module.layer3(found["said"]).flatten(2).max(2).values
    torch.testing.assert_close(outputs, 0.2 * features @ module.head.weight.T)


def test_resnet18_is_the_published_network():
    module = MODELS["resnet18"]((3, 64, 64), 10).eval()
    sizes = []
    for part in module.children():
        part.register_forward_hook(lambda part, given, said: sizes.append(tuple(said.shape[1:])))
    module(torch.zeros(1, 3, 64, 64))
    stages = [(64, 32, 32)] * 3 + [(64, 16, 16)] * 2 + [(128, 8, 8), (256, 4, 4), (512, 2, 2), (512,), (10,)]
    assert sizes == stages
    block, x = module.layer2[0], torch.randn(1, 64, 8, 8)
    main = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x)))))
    torch.testing.assert_close(block(x), torch.relu(main + block.downsample(x)))
    assert MODELS["resnet18"]((3, 32, 32), 10, stem="cifar").conv1(torch.zeros(1, 3, 32, 32)).shape[-1] == 32


def cell_by_hand(x, h, weight_ih, weight_hh, bias_ih, bias_hh):
    """A GRU's step (Cho et al., 2014, as PyTorch writes it): reset, update and new gates, in this order."""
    ri, zi, ni = (x @ weight_ih.T + bias_ih).chunk(3, -1)
    rh, zh, nh = (h @ weight_hh.T + bias_hh).chunk(3, -1)
    r, z = torch.sigmoid(ri + rh), torch.sigmoid(zi + zh)
    return (1 - z) * torch.tanh(ni + r * nh) + z * h


def test_the_gru_reads_the_window_and_feeds_its_own_forecasts_while_the_clock_goes_on():
    module = Model(MODELS["gru"]((4, 2), 3, hidden=5).double())
    x = torch.rand(2, 4, 2, dtype=torch.float64)
    x[..., 1] = torch.tensor([0.7, 0.8, 0.9, 0.0])  # time of day, by tenths of a day
    theta = module.theta + 0.1  # not the numbers that the module was made with
    named = module.layout.tensors(theta)
    encoder = [named[f"encoder.{kind}_l0"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    decoder = [named[f"decoder.{kind}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    h = torch.zeros(2, 5, dtype=torch.float64)
    for t in range(4):
        h = cell_by_hand(x[:, t], h, *encoder)
    # From 0.9 to 0.0 the clock turned over; it goes on by -0.9, which is a tenth forwards on the circle.
    said, value = [], x[:, -1, :1]
    for clock in (0.0, 0.1, 0.2):
        h = cell_by_hand(torch.cat([value, torch.full_like(value, clock)], 1), h, *decoder)
        value = h @ named["head.weight"].T + named["head.bias"]
        said.append(value)
    torch.testing.assert_close(module(theta, x), torch.cat(said, 1))


@pytest.mark.parametrize("cell", ["rnn", "gru"])
def test_the_rnn_forecasts_from_its_last_state_with_the_numbers_it_is_given(cell):
    module = MODELS["rnn"]((4, 2), 3, hidden=5, cell=cell)
    x = torch.rand(2, 4, 2)
    by_hand = module.cell(x)[0][:, -1] @ module.head.weight.T + module.head.bias
    torch.testing.assert_close(module(x), by_hand)
    model = Model(module)
    assert (model(model.theta + 1, x) - by_hand).abs().max() > 0.1
    torch.testing.assert_close(model(model.theta, x), by_hand)


@pytest.mark.parametrize(
    ("name", "shape", "settings", "said"),
    [
        ("gru", (12,), {}, r"needs windows \[steps, features\] of at least 2 steps; got shape \[12\]"),
        ("rnn", (1, 2), {}, r"at least 2 steps; got shape \[1, 2\]"),
        ("gru", (12, 2), {"hidden": 0}, "hidden is the width of the state, so it must be at least 1; got 0"),
        ("rnn", (12, 2), {"cell": "elman"}, "cell must be rnn or gru; got 'elman'"),
        ("vgg", (1, 7, 28), {}, r"at least 8 by 8 pixels for 3 blocks; got shape \[1, 7, 28\]"),
        ("vgg", (1, 28, 28), {"depth": 0}, r"at least 1; got \[32, 64, 64\], 0 and 128"),
        ("resnet9", (3, 4, 4), {}, r"at least 8 by 8 pixels; got shape \[3, 4, 4\]"),
        ("resnet18", (32, 32), {}, r"needs images \[channels, height, width\]; got shape \[32, 32\]"),
        ("resnet18", (3, 32, 32), {"stem": "wide"}, "stem must be imagenet or cifar; got 'wide'"),
        ("mlp", (), {}, "an example needs an axis or more, none of them empty"),
        ("mlp", (2,), {"hidden": (8, 0)}, r"hidden widths must be at least 1; got \[8, 0\]"),
        ("cnn", (1, 15, 16), {}, r"needs images .* at least 16 by 16 .*got shape \[1, 15"),
        ("cnn", (16, 16), {}, r"needs images .* at least 16 by 16 .*got shape \[16"),
        ("cnn-bn", (1, 16, 15), {}, r"needs images .* at least 16 by 16 .*got shape \[1, 16"),
    ],
)
def test_shapes_and_settings_that_a_model_cannot_take(name, shape, settings, said):
    with pytest.raises(UsageError, match=f"{name}: .*{said}"):
        MODELS[name](shape, 10, **settings)


def test_a_log_linear_model_multiplies_and_knows_its_head_s_link():
    """sold = 2 (price / 2.5)^-1.5 where prices are far above a tenth of their median, 0.25."""
    model = made("log-linear", 1).double()
    assert model.skewed == [(0, 8.0, 12.0)]
    with torch.no_grad():
        model.head.weight[:] = torch.tensor([[0.0, 0, 0, 0, -1.5]])
        model.head.bias[:] = 0
        price = torch.tensor([5.0, 10.0, 40.0], dtype=torch.float64)
        x = torch.stack([(price - 3) / 2, *torch.zeros(3, 3, dtype=torch.float64)], 1)
        outputs = model(x)
        torch.testing.assert_close(2 + outputs[:, 0], 2 * (price / 2.5) ** -1.5, rtol=5e-3, atol=0)
        logs = (price / 2.5).log() * -1.5
        torch.testing.assert_close(model.head.link(outputs)[:, 0], logs, rtol=5e-3, atol=5e-3)
        model.head.weight[:] = 1.0
        torch.testing.assert_close(model(1e4 * x).max(), torch.tensor(50.0, dtype=torch.float64))
    with pytest.raises(UsageError, match="one number above zero"):
        MODELS["log-linear"]((4,), 1, columns=None)


def test_an_mlp_sees_a_table_s_inputs_cut():
    columns = Description("shop", (Number("price", 3.0, 2.0, 2.5, 0),))
    torch.manual_seed(0)
    module = MODELS["mlp"]((1,), 1, columns=columns)
    far, three = torch.tensor([[40.0]]), torch.tensor([[3.0]])
    assert torch.equal(module(far), module(three))
    assert not torch.equal(module(three), module(three / 2))
    for uncut in (MODELS["mlp"]((1,), 1), MODELS["mlp"]((1,), 1, columns=columns, cut=float("inf"))):
        assert not torch.equal(uncut(far), uncut(three))
    with pytest.raises(UsageError, match="cut must be above 0"):
        MODELS["mlp"]((1,), 1, cut=0.0)
