"""Modules of all sorts for evidence/fuzz.py, each trained by kinfed's executors and in a plain PyTorch loop.

A family is a kind of module with a few choices of its own; case n is of family n modulo their number. All executors and
the plain loop must end with the same numbers, and the model that is kept, saved and loaded must answer alike and have
its score. A family whose modules cannot be trained as PyTorch would must be refused in one line, and is marked so.
"""

import copy
import threading
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import kinfed
from kinfed import SGD, Adam, Federation, RunError, Training, UsageError
from kinfed.core.seeding import fold, uniform
from kinfed.methods import FedAvg, Local
from kinfed.simulation.execution import Execution

CLASSES = 3
VECTOR, IMAGE, SERIES, WORDS = (6,), (1, 8, 8), (5, 3), (5,)
WORD = 7  # in the vocabulary
SIZES = (9, 16, 12, 20, 11)  # examples of the clients, of which a few are for tests
FAMILIES = {}  # name: (what makes a module's maker, an example's shape, whether it must be refused)
TOLERANCE = 1e-7  # in double precision, relative to the largest number


class Differs(Exception):
    """Two computations of the same numbers differ."""


class Recorder(Local):
    """Trains nothing, and notes the batches of every client and round: inputs, targets and the step's key."""

    def __init__(self, seen):
        object.__setattr__(self, "seen", seen)

    def train(self, client, state, received):
        self.seen.setdefault(int(client.tag), []).append([(b.x, b.y, int(b.key)) for b in client.batches()])
        return state, ()


def family(shape=VECTOR, refused=False):
    """Registers a kind of module: a function of a draw that returns a function that makes the same module anew."""

    def register(make):
        FAMILIES[make.__name__] = (make, shape, refused)
        return make

    return register


class Of(nn.Module):
    """A module of named parts, whose forward pass is a function of it and its inputs."""

    def __init__(self, forward, **parts):
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self._forward(self, x)


def dense(*between, width=8):
    return nn.Sequential(nn.Linear(6, width), *between, nn.Linear(width, CLASSES))


def make_convolutional(*between, width=4):
    return nn.Sequential(nn.Conv2d(1, width, 3), *between, nn.Flatten(), nn.LazyLinear(CLASSES))


def with_buffers(module, **buffers):
    for name, value in buffers.items():
        module.register_buffer(name, value)
    return module


# --- layers as they are


@family()
def activations(draw):
    kinds = [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Hardswish, nn.PReLU, nn.Mish]
    chosen = [draw.choice(kinds) for _ in range(draw.choice([1, 2, 3]))]
    return lambda: dense(*(part for kind in chosen for part in (kind(), nn.Linear(8, 8))))


@family()
def in_place(draw):
    kind = draw.choice([nn.ReLU, nn.LeakyReLU, nn.ELU])
    return lambda: dense(nn.LayerNorm(8), kind(inplace=True), nn.Linear(8, 8), kind(inplace=True))


@family()
def per_example_norms(draw):
    kind = draw.choice([lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8), lambda: nn.RMSNorm(8)])
    return lambda: dense(kind(), nn.Tanh(), nn.Linear(8, 8), kind())


@family()
def batch_norms(draw):
    how = {"momentum": draw.choice([0.1, 0.5, 1.0]), "affine": draw.random() < 0.7, "eps": draw.choice([1e-5, 0.1])}
    return lambda: dense(nn.BatchNorm1d(8, **how), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))


@family(IMAGE)
def convolutions(draw):
    kinds = {
        "padded": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        "groups": lambda: nn.Conv2d(4, 8, 3, groups=4),
        "back": lambda: nn.ConvTranspose2d(4, 2, 3),
        "dilated": lambda: nn.Conv2d(4, 3, 2, dilation=2, stride=2),
        "point": lambda: nn.Conv2d(4, 5, 1, bias=False),
    }
    kind, norm = draw.choice(sorted(kinds)), draw.random() < 0.5
    return lambda: fill_lazy_layers(
        make_convolutional(nn.BatchNorm2d(4) if norm else nn.Identity(), nn.ReLU(), kinds[kind]()), IMAGE
    )


@family(IMAGE)
def poolings(draw):
    kinds = [
        lambda: nn.MaxPool2d(2),
        lambda: nn.MaxPool2d(3, 1, padding=1),
        lambda: nn.AvgPool2d(2),
        lambda: nn.AdaptiveMaxPool2d(2),
        lambda: nn.LPPool2d(2, 2),
        lambda: nn.Upsample(scale_factor=2),
    ]
    kind, place = draw.choice(kinds), draw.random() < 0.3
    return lambda: fill_lazy_layers(
        make_convolutional(nn.BatchNorm2d(4), nn.ReLU(inplace=place), kind(), nn.ReLU()), IMAGE
    )


@family(IMAGE)
def volumes_and_lines(draw):
    three = draw.random() < 0.5
    if three:
        return lambda: nn.Sequential(
            nn.Unflatten(1, (1, 1)), nn.Conv3d(1, 2, (1, 3, 3)), nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(72, CLASSES)
        )
    return lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.Conv1d(8, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, CLASSES)
    )


@family(SERIES)
def recurrent(draw):
    kind, how = draw.choice([nn.RNN, nn.GRU, nn.LSTM]), {"batch_first": True}
    how |= draw.choice([{}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False}])
    width = 8 if "bidirectional" in how else 4
    return lambda: Of(lambda m, x: m.head(m.cell(x)[0][:, -1]), cell=kind(3, 4, **how), head=nn.Linear(width, CLASSES))


@family(SERIES)
def cells_in_a_loop(draw):
    kind = draw.choice([nn.RNNCell, nn.GRUCell])

    def forward(m, x):
        state = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state)
        return m.head(state)

    return lambda: Of(forward, cell=kind(3, 4), head=nn.Linear(4, CLASSES))


@family(SERIES)
def attention(draw):
    as_encoder = draw.random() < 0.5
    if as_encoder:
        return lambda: nn.Sequential(
            nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Flatten(), nn.Linear(20, 3)
        )
    return lambda: Of(
        lambda m, x: m.head(m.attend(*[m.embed(x)] * 3)[0].mean(1)),
        embed=nn.Linear(3, 4),
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
        head=nn.Linear(4, CLASSES),
    )


@family(WORDS)
def embeddings(draw):
    how = draw.choice([{}, {"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
    bag = draw.random() < 0.3
    kind = partial(nn.EmbeddingBag, mode="mean") if bag and how.keys() <= {"sparse"} else nn.Embedding
    return lambda: Of(
        lambda m, x: m.head(m.words(x.long()).flatten(1)),
        words=kind(WORD, 4, **how),
        head=nn.Linear(4 if kind is not nn.Embedding else 20, CLASSES),
    )


# --- dropout and other random numbers


@family()
def dropout(draw):
    p = draw.choice([0.0, 0.2, 0.5, 1.0])
    again = draw.random() < 0.5
    place = draw.random() < 0.3

    def make():
        drop = nn.Dropout(p, inplace=place)
        return dense(drop, nn.Tanh(), nn.Linear(8, 8), drop if again else nn.Dropout(p))

    return make


@family(IMAGE)
def dropout_of_channels(draw):
    p = draw.choice([0.2, 0.5])
    return lambda: fill_lazy_layers(
        make_convolutional(nn.Dropout2d(p), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(p)), IMAGE
    )


@family()
def random_numbers_of_its_own(draw):
    kinds = [
        lambda: dense(Of(lambda m, h: F.dropout(h, 0.3, m.training)), nn.ReLU()),
        lambda: dense(nn.AlphaDropout(0.2), nn.SELU()),
        lambda: dense(nn.RReLU()),
        lambda: dense(Of(lambda m, h: h + 0.1 * torch.randn_like(h) if m.training else h)),
        lambda: dense(type("Mine", (nn.Dropout,), {"forward": lambda m, h: F.dropout(h, 0.4, m.training)})()),
        lambda: dense(Of(lambda m, h: h * (torch.rand(len(h), 1) < 0.8).to(h) / 0.8 if m.training else h)),
    ]
    return draw.choice(kinds)


@family(SERIES)
def random_numbers_of_layers(draw):
    if draw.random() < 0.5:
        return lambda: Of(
            lambda m, x: m.head(m.cell(x)[0][:, -1]),
            cell=nn.GRU(3, 4, 2, batch_first=True, dropout=0.3),
            head=nn.Linear(4, CLASSES),
        )
    return lambda: nn.Sequential(
        nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True), nn.Flatten(), nn.Linear(20, 3)
    )


@family(refused=True)
def random_predictions(draw):
    kinds = [Of(lambda m, h: F.dropout(h, 0.3)), Of(lambda m, h: h + torch.randn_like(h))]
    part = draw.choice(kinds)
    return lambda: dense(copy.deepcopy(part))


# --- subclasses of PyTorch's layers


def subclass(kind, **members):
    return type(f"My{kind.__name__}", (kind,), members)


@family()
def own_linear(draw):
    forwards = [
        lambda m, x: 0.5 * F.linear(x, m.weight) + 2 * m.bias,
        lambda m, x: F.linear(x, m.weight.tanh(), m.bias),
        lambda m, x: F.linear(F.normalize(x, dim=1), F.normalize(m.weight, dim=1)) + m.bias,
        lambda m, x: nn.Linear.forward(m, x) + x.mean(1, keepdim=True),
    ]
    mine = subclass(nn.Linear, forward=draw.choice(forwards))
    return lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), mine(8, CLASSES))


@family()
def own_activation(draw):
    kind = draw.choice([nn.ReLU, nn.Tanh, nn.Flatten])
    forward = draw.choice([torch.sin, lambda x: 3 * x.abs()])
    mine = subclass(kind, forward=lambda m, x: forward(x))
    return lambda: dense(mine())


@family()
def own_sequential(draw):
    ways = [
        lambda m, x: m[1](m[0](x)) + m[0](x),
        lambda m, x: sum(layer(x) for layer in m),
        lambda m, x: nn.Sequential.forward(m, x) * 2,
        lambda m, x: m[-1](x) - m[0](x),
    ]
    mine = subclass(nn.Sequential, forward=draw.choice(ways))
    return lambda: dense(mine(nn.Linear(8, 8), nn.Linear(8, 8)), nn.ReLU())


@family()
def own_batch_norm(draw):
    ways = [
        {"forward": lambda m, x: 2 * nn.BatchNorm1d.forward(m, x)},
        {"forward": lambda m, x: F.batch_norm(x, m.running_mean, m.running_var, None, None, m.training, 0.2) + m.bias},
        {},
        {"forward": lambda m, x: x * m.weight + m.bias},
        {"forward": lambda m, x: (x - x.mean(0)) * m.weight if m.training else x * m.weight},
    ]
    mine = subclass(nn.BatchNorm1d, **draw.choice(ways))
    return lambda: dense(mine(8), nn.Tanh())


@family(IMAGE)
def own_convolution(draw):
    def standardise_weights(m, x):
        flat = m.weight.view(len(m.weight), -1)  # as it lies in memory
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1e-3)
        return F.conv2d(x, flat.view_as(m.weight), m.bias)

    mine = subclass(nn.Conv2d, forward=draw.choice([standardise_weights, lambda m, x: nn.Conv2d.forward(m, x).abs()]))
    return lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3), mine(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


@family(SERIES)
def own_recurrent(draw):
    def reversed_in_time(m, x):
        return nn.GRU.forward(m, x.flip(1))[0].mean(1)

    mine = subclass(nn.GRU, forward=reversed_in_time)
    return lambda: nn.Sequential(mine(3, 4, batch_first=True), nn.Linear(4, CLASSES))


@family()
def forward_of_the_object(draw):
    def make():
        net = dense(nn.Tanh())
        if way:
            net[0].forward = lambda x: F.linear(x, net[0].weight) * 2  # which refers to the module by a variable
        else:
            net[1].forward = torch.relu
        return net

    way = draw.random() < 0.6
    return make


# --- hooks


@family()
def forward_hooks(draw):
    def make():
        net = dense(layer(), nn.Linear(8, 8))
        match way:
            case "after":
                net[1].register_forward_hook(lambda m, given, out: 2 * out + 1)
            case "before":
                net[1].register_forward_pre_hook(lambda m, given: (given[0] + 0.5,))
            case "variable":
                net[2].register_forward_hook(lambda m, given, out: out + net[0].bias)
            case "kept":
                net[1].register_forward_hook(lambda m, given, out: setattr(net, "seen", out))
                net.register_forward_hook(lambda m, given, out: out + net.seen.mean(1, keepdim=True))
        return net

    way = draw.choice(["after", "before", "variable", "kept"])
    layer = draw.choice([nn.ReLU, nn.Tanh, lambda: nn.BatchNorm1d(8), lambda: nn.Linear(8, 8), lambda: nn.Dropout(0.3)])
    return make


@family(IMAGE)
def hooks_between_relu_and_pooling(draw):
    def make():
        net = Of(
            lambda m, x: m.head(m.body(x).flatten(1)) + m.seen,
            body=nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2)),
            head=nn.Linear(36, CLASSES),
        )
        net.body[1].register_forward_hook(
            lambda m, given, out: setattr(net, "seen", out.mean((1, 2, 3))[:, None] * scale)
        )
        return net

    scale = draw.choice([1.0, 5.0])
    return make


@family()
def backward_hooks(draw):
    def make():
        net = dense(nn.Tanh(), nn.Linear(8, 8))
        if way:
            net[2].register_full_backward_hook(lambda m, given, got: (0.5 * given[0],))
        else:
            net[2].register_full_backward_pre_hook(lambda m, got: (got[0].clamp(-0.01, 0.01),))
        return net

    way = draw.random() < 0.5
    return make


@family()
def gradients_that_couple(draw):
    def make():
        net = dense(nn.Tanh(), nn.Linear(8, 8))
        net[2].register_full_backward_hook(lambda m, given, got: (given[0] - given[0].mean(0),))
        return net

    return make


@family()
def state_hooks(draw):
    def make():
        net = dense(nn.Tanh())
        if way:
            net[0].register_state_dict_post_hook(
                lambda m, state, prefix, rest: state.update({f"{prefix}bias": state[f"{prefix}bias"] + 1})
            )
        else:
            net[0].register_load_state_dict_pre_hook(
                lambda m, state, prefix, *rest: state.update({f"{prefix}bias": state[f"{prefix}bias"] + 1})
            )
        return net

    way = draw.random() < 0.5
    return make


@family(refused=True)
def hooks_of_parameters(draw):
    def make():
        net = dense(nn.Tanh())
        net[0].weight.register_hook(lambda g: g * mask)
        return net

    mask = (torch.rand(8, 6) < 0.5).double()
    return make


# --- tensors in odd places


@family()
def tie_weights(draw):
    def make():
        match way:
            case "parameter":
                net = dense(nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
                net[4].weight = net[2].weight
            case "layer":
                layer = nn.Linear(8, 8)
                net = dense(layer, nn.Tanh(), layer)
            case "transposed":
                net = Of(
                    lambda m, x: m.head(F.linear(m.into(x).tanh(), m.into.weight.T)),
                    into=nn.Linear(6, 8),
                    head=nn.Linear(6, CLASSES),
                )
            case "norm":
                norm = nn.BatchNorm1d(8)
                net = dense(norm, nn.Tanh(), nn.Linear(8, 8), norm)
        return net

    way = draw.choice(["parameter", "layer", "transposed", "norm"])
    return make


@family(refused=True)
def tied_in_memory(draw):
    def make():
        net = dense(nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        if way:
            net[4].weight.data = net[2].weight.data
        else:
            net[4].weight = nn.Parameter(net[2].weight.detach().T)
        return net

    way = draw.random() < 0.5
    return make


@family()
def frozen(draw):
    def make():
        net = dense(nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        for i in which:
            net[i].requires_grad_(False)
        return net

    which = draw.sample([0, 1, 3], draw.choice([1, 2]))
    return make


@family()
def norms_kept_in_evaluation(draw):
    class Still(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    return lambda: Still(*dense(nn.BatchNorm1d(8), nn.Tanh()))


@family()
def low_rank(draw):
    def make():
        net = Of(
            lambda m, x: m.head(torch.tanh(m.base(x) + F.linear(F.linear(x, m.down), m.up))),
            base=nn.Linear(6, 8),
            head=nn.Linear(8, CLASSES),
            down=nn.Parameter(torch.randn(rank, 6)),
            up=nn.Parameter(torch.zeros(8, rank)),
        )
        net.base.requires_grad_(False)
        return net

    rank = draw.choice([1, 2, 4])
    return make


@family()
def lists_of_parameters(draw):
    return lambda: Of(
        lambda m, x: sum(F.linear(x, w) * s for w, s in zip(m.weights, m.scales.values(), strict=True)) * m.one,
        weights=nn.ParameterList(torch.randn(CLASSES, 6) for _ in range(2)),
        scales=nn.ParameterDict({"a": torch.ones(CLASSES), "b": torch.randn(CLASSES)}),
        one=nn.Parameter(torch.tensor(0.7)),
        none=nn.Parameter(torch.zeros(0)),
    )


@family(refused=True)
def parameters_elsewhere(draw):
    def make():
        net = dense(nn.Tanh())
        if way:
            net = Of(lambda m, x: m.body(F.linear(x, m.held[0])), body=dense(), into=nn.Linear(6, 6))
            net.held = [net.into.weight]  # where nobody would replace it
        else:
            net = Of(lambda m, x: m.body(m.held[0](x)), body=dense())
            net.held = [nn.Linear(6, 6).double()]  # where no optimiser finds it
        return net

    way = draw.random() < 0.5
    return make


@family()
def weight_norms(draw):
    kinds = [
        lambda m: nn.utils.weight_norm(m),
        lambda m: nn.utils.parametrizations.weight_norm(m),
        lambda m: nn.utils.parametrizations.orthogonal(m),
        lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Of(lambda m, w: w.triu() + w)),
        lambda m: prune.l1_unstructured(m, "weight", 0.4),
    ]
    kind = draw.choice(kinds)
    return lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), kind(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, CLASSES))


@family()
def spectral_norms(draw):
    kind = draw.choice([nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
    return lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), kind(nn.Linear(8, 8)), nn.Linear(8, CLASSES))


@family(IMAGE)
def parametrised_convolution(draw):
    kind = draw.choice([nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
    return lambda: nn.Sequential(
        kind(nn.Conv2d(1, 4, 3)), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES)
    )


@family()
def changed_in_the_forward_pass(draw):
    def forward(m, x):
        with torch.no_grad():
            m[0].weight.data.clamp_(-0.3, 0.3)
        return nn.Sequential.forward(m, x)

    mine = subclass(nn.Sequential, forward=forward)
    return lambda: mine(*dense(nn.Tanh()))


# --- statistics and memory


@family()
def mixed_in_training(draw):
    ways = [
        lambda m, h: h - h.mean(0) if m.training else h,
        lambda m, h: h + 0.3 * h.flip(0) if m.training else h,
        lambda m, h: h / len(h) * 4 if m.training else h,
        lambda m, h: h * h.std(0).detach() if m.training else h,
        lambda m, h: h.softmax(0) * len(h) if m.training else h.sigmoid(),
    ]
    way = draw.choice(ways)
    return lambda: dense(Of(way), nn.Tanh())


@family(refused=True)
def mixed_in_predictions(draw):
    ways = [lambda m, h: h - h.mean(0), lambda m, h: h.softmax(0), lambda m, h: h + h.sum(), lambda m, h: h / len(h)]
    way = draw.choice(ways)
    if draw.random() < 0.3:
        return lambda: dense(subclass(nn.BatchNorm1d)(8, track_running_stats=False))
    return lambda: dense(Of(way), nn.Tanh())


@family(SERIES, refused=True)
def time_taken_for_the_batch(draw):
    kind = draw.choice([nn.GRU, nn.LSTM])
    return lambda: Of(lambda m, x: m.head(m.cell(x)[0][:, -1]), cell=kind(3, 4), head=nn.Linear(4, CLASSES))


@family()
def statistics_of_its_own(draw):
    def assign_mean(m, h):
        if m.training:
            m.mean = 0.8 * m.mean + 0.2 * h.detach().mean(0)
        return h - m.mean

    def change_mean(m, h):
        if m.training:
            m.mean.mul_(0.8).add_(0.2 * h.detach().mean(0))
        return h - m.mean

    def largest(m, h):
        if m.training:
            m.mean.copy_(torch.maximum(m.mean, h.detach().amax(0)))
        return h / (1 + m.mean)

    way, lasting = draw.choice([assign_mean, change_mean, largest]), draw.random() < 0.6

    def make():
        part = Of(way)
        part.register_buffer("mean", torch.zeros(8), persistent=lasting)
        return dense(part, nn.Tanh())

    return make


@family(IMAGE)
def statistics_of_examples(draw):
    kept = draw.random() < 0.7
    return lambda: fill_lazy_layers(
        make_convolutional(nn.InstanceNorm2d(4, affine=True, track_running_stats=kept), nn.ReLU()), IMAGE
    )


@family()
def count_calls(draw):
    def forward(m, x):
        m.calls += 1
        m.seen.append(len(x))
        del m.seen[:-3]
        return m.body(x)

    return lambda: Of(forward, body=dense(nn.Tanh()), calls=0, seen=[])


@family()
def counters(draw):
    def anneal(m, x):
        if m.training:
            m.steps += 1
        return m.body(x) / (1 + m.steps)

    def once(m, x):
        if m.training and not m.seen:
            m.mean.copy_(x.detach().mean(0))
            m.seen.fill_(True)
        return m.body(x - m.mean)

    def make():
        net = Of(anneal if way else once, body=dense(nn.Tanh()))
        net.register_buffer("steps", torch.tensor(0))
        net.register_buffer("seen", torch.tensor(False))
        net.register_buffer("mean", torch.zeros(6))
        return net

    way = draw.random() < 0.5
    return make


@family(refused=True)
def memory_outside_of_buffers(draw):
    def anneal(m, x):
        m.calls += 1
        return m.body(x) / m.calls

    def remember_mean(m, x):
        before, m.calls = m.calls, x.detach().mean()
        return m.body(x) + (before if m.training else 0)

    def average_calls(m, x):
        if m.training:
            m.calls = 0.5 * m.calls + 0.5 * float(x.detach().mean())
        return m.body(x) + m.calls

    way = draw.choice([anneal, remember_mean, average_calls])
    return lambda: Of(way, body=dense(nn.Tanh()), calls=0)


# --- forward passes


@family(IMAGE)
def parts_of_a_sequential(draw):
    ways = {
        "slice": lambda m, x: m.body[:2](x),
        "item": lambda m, x: m.body[1](m.body[0](x)),
        "rest": lambda m, x: m.body[1:](m.body[0](x)),
        "loop": lambda m, x: [x := layer(x) for layer in m.body][1],
        "skip": lambda m, x: m.body(x).mean((2, 3), keepdim=True) + m.body[:2](x),
        "pop": lambda m, x: nn.Sequential(*list(m.body.children())[:-1])(x),
        "whole": lambda m, x: m.body(x),
    }
    way, place = draw.choice(sorted(ways)), draw.random() < 0.3
    return lambda: Of(
        lambda m, x: m.head(ways[way](m, x).mean((2, 3))),
        body=nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=place), nn.MaxPool2d(2)),
        head=nn.Linear(4, CLASSES),
    )


@family(IMAGE)
def activation_seen_by_others(draw):
    def forward(m, x):
        h = m.first(x)
        return m.head(m.body(h).mean((2, 3)) + h.mean((2, 3)))

    place = draw.random() < 0.7
    return lambda: Of(
        forward,
        first=nn.Conv2d(1, 4, 3),
        body=nn.Sequential(nn.ReLU(inplace=place), nn.MaxPool2d(2)),
        head=nn.Linear(4, CLASSES),
    )


@family()
def branches(draw):
    ways = [
        lambda m, x: m.one(x) if float(x.sum()) > 0 else m.two(x),
        lambda m, x: torch.stack([m.one(row) if row[0] > 0 else m.two(row) for row in x]),
        lambda m, x: torch.where(x[:, :1] > 0, m.one(x), m.two(x)),
        lambda m, x: m.parts["a"](x) + m.listed[0](x),
    ]
    way = ways[draw.choice([1, 2, 3])]
    return lambda: Of(
        way,
        one=dense(nn.Tanh()),
        two=dense(nn.ReLU()),
        parts=nn.ModuleDict({"a": dense()}),
        listed=nn.ModuleList([dense()]),
    )


@family()
def kept_in_a_dictionary(draw):
    def make():
        seen, net = {}, dense(nn.Tanh(), nn.Linear(8, 8))
        net[1].register_forward_hook(lambda m, given, out: seen.update(h=out))
        net.register_forward_hook(lambda m, given, out: out + seen["h"].mean(1, keepdim=True))
        return net

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, CLASSES)

        def forward(self, x):
            shared["x"] = x
            return self.two(self.one(x).tanh()) + shared["x"].mean(1, keepdim=True)

    shared = {}  # of all modules of this class
    return make if draw.random() < 0.5 else Shared


@family()
def told_by_kind(draw):
    def forward(m, x):
        for part in m.parts:
            if isinstance(part, nn.BatchNorm1d):
                x = part(x) * 2
            elif isinstance(part, nn.Dropout):
                x = part(x) - 1
            else:
                x = part(x)
        return x

    norm, p = draw.random() < 0.5, draw.choice([0.0, 0.4])
    parts = (lambda: nn.BatchNorm1d(8)) if norm else (lambda: nn.Dropout(p))
    return lambda: Of(forward, parts=nn.ModuleList(dense(parts(), nn.ReLU())))


@family()
def inputs_changed_in_place(draw):
    ways = [lambda m, x: m.body(x.mul_(0.5)), lambda m, x: m.body(F.relu_(x)), lambda m, x: m.body(x.sub_(1).abs_())]
    way = draw.choice(ways)
    return lambda: Of(way, body=dense(nn.Tanh()))


@family(refused=True)
def nothing_to_learn(draw):
    def skip_gradients(m, x):
        with torch.no_grad():
            return m.body(x)

    way = draw.choice([skip_gradients, lambda m, x: m.body(x).detach(), lambda m, x: x[:, :CLASSES] * 2])
    return lambda: Of(way, body=dense(nn.Tanh()))


@family()
def another_pass_in_training(draw):
    return lambda: Of(lambda m, x: m.body(x) * 0.5 if m.training else m.body(x), body=dense(nn.Tanh()))


@family()
def own_gradient(draw):
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sign()

        @staticmethod
        def backward(ctx, g):
            return g

    class Cubed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return 3 * ctx.saved_tensors[0] ** 2 * g

    kind = draw.choice([Straight, Cubed])
    return lambda: dense(Of(lambda m, h: kind.apply(h)))


@family()
def computed_again_in_the_backward_pass(draw):
    norm = draw.random() < 0.5
    return lambda: Of(
        lambda m, x: m.head(checkpoint(m.body, x, use_reentrant=False)),
        body=nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8) if norm else nn.Identity(), nn.Tanh(), nn.Linear(8, 8)),
        head=nn.Linear(8, CLASSES),
    )


@family(refused=True)
def dropout_computed_again(draw):
    p = draw.choice([0.2, 0.5])
    return lambda: Of(
        lambda m, x: m.head(checkpoint(m.body, x, use_reentrant=False)),
        body=nn.Sequential(nn.Linear(6, 8), nn.Dropout(p), nn.Tanh(), nn.Linear(8, 8)),
        head=nn.Linear(8, CLASSES),
    )


@family(refused=True)
def other_outputs(draw):
    ways = [
        lambda m, x: {"logits": m.body(x)},
        lambda m, x: (m.body(x), x),
        lambda m, x: [m.body(x)],
        lambda m, x: (m.body(x), x) if m.training else m.body(x),
        lambda m, x: m.body(x).argmax(1),
        lambda m, x: m.body(x).flatten(),
        lambda m, x: m.body(x).mean(0, keepdim=True),
        lambda m, x: None,
    ]
    way = draw.choice(ways)
    return lambda: Of(way, body=dense(nn.Tanh()))


@family(refused=True)
def not_copyable(draw):
    def make():
        net = dense(nn.Tanh())
        match way:
            case "lock":
                net[1].guard = threading.Lock()
            case "iterator":
                net.numbers = iter(i for i in range(3))
            case "lazy":
                net = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, CLASSES))
            case "complex":
                net.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
            case "nothing":
                net.requires_grad_(False)
        return net

    way = draw.choice(["lock", "iterator", "lazy", "complex", "nothing"])
    return make


@family()
def overridden(draw):
    members = {
        "train": lambda m, mode=True: nn.Module.train(m, mode),
        "state_dict": lambda m, *a, **k: {"x": torch.zeros(1)},
        "load_state_dict": lambda m, *a, **k: None,
        "__call__": lambda m, x: nn.Module.__call__(m, x + 1),
        "extra_repr": lambda m: "mine\nand more",
        "__len__": lambda m: 3,
    }
    name = draw.choice(sorted(members))
    mine = subclass(Of, **{name: members[name]})
    return lambda: mine(lambda m, x: m.body(x), body=dense(nn.Tanh()))


@family()
def wrap_module(draw):
    kind = draw.choice([nn.DataParallel, torch.jit.script, lambda m: torch.jit.trace(m, torch.zeros(2, 6))])
    return lambda: kind(dense(nn.Tanh()))


# --- what becomes of them


def fill_lazy_layers(module, shape):
    """The module with the sizes of its lazy layers, and as it was before the pass that this takes."""
    with torch.no_grad():
        module.eval()(torch.zeros(2, *shape))
    return module.train()


def examples(shape, draw):
    """A federation of a few clients in double precision."""
    generator = torch.Generator().manual_seed(draw.randrange(1000))
    owner = torch.cat([torch.full((size,), i) for i, size in enumerate(SIZES)])
    if shape == WORDS:
        x = torch.randint(WORD, (len(owner), *shape), generator=generator).double()
    else:
        x = torch.randn(len(owner), *shape, generator=generator, dtype=torch.float64)
    y = (x.flatten(1) @ torch.randn(x[0].numel(), CLASSES, generator=generator).double()).argmax(1)
    y[: 2 * CLASSES] = torch.arange(2 * CLASSES) % CLASSES
    return Federation.from_arrays(x, y, owner, split=kinfed.Split(0.3, 0.0))


class Asked(NamedTuple):
    """How a case is trained."""

    federation: Federation
    averaged: bool
    rounds: int
    training: Training


def draw_request(draw, shape):
    optimiser = draw.choice([SGD(0.1), SGD(0.1), SGD(0.05, momentum=0.9, weight_decay=0.01), Adam(0.01)])
    # No batch has a single row: BatchNorm cannot be trained on one, and kinfed says what it does then.
    return Asked(examples(shape, draw), draw.random() < 0.4, 2, Training(1, 4, optimiser))


def fit(ask, module, executor, workers=1, method=None):
    method = method or (FedAvg() if ask.averaged else Local())
    how = {"rounds": ask.rounds, "training": ask.training, "execution": Execution(executor, workers=workers)}
    return kinfed.fit(method, ask.federation, module, **how, seed=1)


class Masks:
    """kinfed's masks of nn.Dropout, worked out once more, for a module in a plain loop."""

    def __init__(self, module):
        norms = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
        parts = [part for part in module.modules() if type(part) in (*norms, nn.Dropout, nn.Dropout2d)]
        self.calls = {part: 0 for part in parts if type(part) not in norms}
        self.ordinals = {part: i for i, part in enumerate(parts)}
        for part in self.calls:
            part.forward = partial(self.drop, part)

    def begin(self, key):
        self.key, self.calls = torch.tensor(key), dict.fromkeys(self.calls, 0)
        torch.manual_seed(key)  # of all other random numbers

    def drop(self, part, x):
        if not part.training or part.p == 0:
            return x
        key = fold(self.key, self.ordinals[part])
        key = fold(key, self.calls[part]) if self.calls[part] else key
        self.calls[part] += 1
        like = x[:, :, :1, :1] if type(part) is nn.Dropout2d else x
        return x * (uniform(key, like) >= part.p) / max(1 - part.p, 1e-300)


def tensors(module):
    """Parameters and buffers by name, but for counts that BatchNorm with a momentum does not need."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: t.detach().clone() for name, t in held.items() if not name.endswith("num_batches_tracked")}


def plain(ask, make):
    """The clients' modules as a loop in plain PyTorch trains them, on the batches that kinfed draws."""
    seen = {}
    fit(
        ask,
        dense().double()
        if ask.federation.x[0].shape == VECTOR
        else nn.Sequential(nn.Flatten(), nn.Linear(ask.federation.x[0].numel(), CLASSES)),
        "loop",
        method=Recorder(seen),
    )
    batches = list(seen.values())  # the largest client comes first, so by their sizes
    order = ask.federation.sizes.argsort(descending=True, stable=True).tolist()
    batches = [batches[order.index(i)] for i in range(len(order))]
    modules = [make() for _ in batches]
    masks = [Masks(module) for module in modules]
    kind, settings = type(ask.training.optimiser), vars(ask.training.optimiser)
    for round in range(ask.rounds):
        for module, mask, own_batches in zip(modules, masks, batches, strict=True):
            moving = [p for p in module.parameters() if p.requires_grad]
            sgd = {name: settings[name] for name in ("lr", "momentum", "weight_decay") if name in settings}
            optimiser = torch.optim.SGD(moving, **sgd) if kind is SGD else torch.optim.Adam(moving, settings["lr"])
            module.train()
            for x, y, key in own_batches[round]:
                optimiser.zero_grad()
                mask.begin(key)
                F.cross_entropy(module(x), y).backward()
                for p in moving:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                optimiser.step()
        if ask.averaged:
            share = ask.federation.sizes.double() / ask.federation.sizes.sum()
            with torch.no_grad():
                for name, like in tensors(modules[0]).items():
                    if not like.is_floating_point():  # a client's own
                        continue
                    every = [dict([*m.named_parameters(), *m.named_buffers()])[name] for m in modules]
                    mean = sum(s * t.detach() for s, t in zip(share, every, strict=True))
                    for t in every:
                        t.copy_(mean)
    return [module.eval() for module in modules]


def compare(what, first, second):
    if first.shape != second.shape:
        raise Differs(f"{what}: {list(first.shape)} and {list(second.shape)}")
    first, second = first.double(), second.double()
    gap = float((first - second).abs().max()) if first.numel() else 0.0
    size = float(first.abs().max()) if first.numel() else 0.0
    if not gap <= TOLERANCE * max(size, 1):
        raise Differs(f"{what}: off by {gap:.2g} of {size:.2g}")


def check(number, draw):
    """Train case `number` in all ways; returns its family, and why `vmap` cannot train it, if so.

    Raises Differs, or the error by which a module is refused that must be.
    """
    name = list(FAMILIES)[number % len(FAMILIES)]
    choose, shape, refused = FAMILIES[name]
    seed, choices = draw.randrange(1000), draw.randrange(10**6)

    def make():
        torch.manual_seed(seed)
        draw.seed(choices)
        return choose(draw)().double()

    draw.seed(choices)
    ask = draw_request(draw, shape)
    module = make()
    before = tensors(module) if not refused else {}
    try:
        first = fit(ask, module, "loop")
    except (UsageError, RunError) as problem:
        if refused:
            raise type(problem)(f"{name}: {problem}") from None
        raise Differs(f"{name} is refused: {problem}") from None
    if refused:
        raise Differs(f"{name} is not refused")
    for key, t in tensors(module).items():
        compare(f"{name}: the caller's own '{key}'", t, before[key])
    why_not = ""
    x, test = ask.federation.x, ask.federation.rows["test"]
    scores = first.history.test(first.history.chosen, "loss")
    kinfed.save(first, "kept")
    for i, expected in enumerate(plain(ask, make)):
        kept, loaded = first.model(i), kinfed.load_model("kept", i, make())
        with torch.no_grad():
            inputs = x[test[i]]
            outputs = expected(inputs.clone())
            compare(f"{name}: outputs of the kept model and of a plain loop", kept(inputs.clone()), outputs)
            compare(f"{name}: outputs of the loaded model and of a plain loop", loaded(inputs.clone()), outputs)
            loss = F.cross_entropy(outputs, ask.federation.y[test[i]])
            compare(f"{name}: the score of client {i} and of a plain loop", scores[i].double(), loss)
        for key, t in tensors(kept).items():
            compare(f"{name}: '{key}' of client {i} and of a plain loop", t, tensors(expected)[key])
    for executor, workers in (("loop", 2), ("vmap", 1), ("fused", 1), ("auto", 1)):
        try:
            other = fit(ask, make(), executor, workers)
        except (UsageError, RunError) as problem:
            if executor in ("loop", "auto"):
                raise Differs(f"{name} is refused by {executor}: {problem}") from None
            why_not = str(problem) if executor == "vmap" else why_not
            continue
        for i in range(len(SIZES)):
            compare(f"{name}: models of {executor} and loop", other.theta(i), first.theta(i))
    return name, why_not
