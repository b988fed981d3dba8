"""What a module is refused for before it trains, or run one client at a time for, and what it is not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kinfed import SGD, Adam, Execution, FedAvg, Federation, Local, Training, UsageError, fit, load_model, save
from kinfed.core.copies import check_tensors, duplicate
from kinfed.core.model import Model
from kinfed.core.seeding import key
from kinfed.core.trial import Trial, differ, run_trial

SIZES = (9, 20, 14, 11, 17)  # so that batches of four are filled up where clients are batched
X = torch.randn(sum(SIZES), 4, generator=torch.Generator().manual_seed(0))
OWNER = torch.cat([torch.full((size,), i) for i, size in enumerate(SIZES)])


class Of(nn.Module):
    """A dense network whose hidden numbers go through a function of it."""

    def __init__(self, between):
        super().__init__()
        self.between, self.calls = between, 0
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 2)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        return self.two(self.between(self, self.one(x)))


def module(between):
    torch.manual_seed(0)
    return Of(between)


def centred(m, h):
    return h - h.mean(0) if m.training else h


def average(m, h):
    if m.training:
        m.mean = 0.8 * m.mean + 0.2 * h.detach().mean(0)
    return h - m.mean


def clamped(m, h):
    with torch.no_grad():
        m.two.weight.clamp_(-0.2, 0.2)
    return h


def noisy(m, h):
    return F.dropout(h, 0.3, m.training)


def federation():
    return Federation.from_arrays(X, (X.sum(1) > 0).long(), OWNER)


def trained(net, executor="auto", workers=1):
    training = Training(epochs=1, batch=4, optimiser=Adam(0.01))
    how = {"rounds": 2, "training": training, "execution": Execution(executor, workers=workers)}
    return fit(Local(), federation(), net, **how)


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (centred, "mixes the examples of a batch"),
        (average, "mixes the examples of a batch"),
        (lambda m, h: h * len(h) if m.training else h, "mixes the examples of a batch"),
        (noisy, "draws random numbers of its own"),
        (clamped, "changes parameters by itself"),
    ],
)
def test_what_cannot_be_batched_runs_client_by_client_and_ends_as_it_does_there(between, reason):
    auto, alone = trained(module(between)), trained(module(between), "loop", workers=2)
    assert auto.cost.executor == "loop"
    assert reason in auto.cost.reason
    for i in range(len(SIZES)):
        assert torch.equal(auto.theta(i), alone.theta(i))
    with pytest.raises(UsageError, match=rf"cannot run under executor 'vmap' \(its training pass .*{reason[:12]}"):
        trained(module(between), "vmap")


def test_gradients_alone_may_mix_examples():
    net = module(lambda m, h: h.tanh())
    net.two.register_full_backward_hook(lambda layer, given, got: (given[0] - given[0].mean(0),))
    assert "mixes the examples of a batch" in trained(net).cost.reason


def test_what_no_other_example_changes_is_batched():
    auto, alone = trained(module(lambda m, h: F.layer_norm(h, (5,)).tanh())), None
    assert auto.cost.executor == "vmap"
    alone = trained(module(lambda m, h: F.layer_norm(h, (5,)).tanh()), "loop")
    torch.testing.assert_close(auto.theta(0), alone.theta(0))


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (lambda m, h: h - h.mean(0), "change with the other examples of its batch"),
        (lambda m, h: h.cumsum(0), "change with the other examples of its batch"),
        (lambda m, h: h / len(h), "change with the other examples of its batch"),
        (lambda m, h: F.dropout(h), "gives other outputs when the same examples are asked again"),
        (lambda m, h: (setattr(m, "calls", m.calls + 1), h + m.calls)[1], "gives other outputs when the same"),
    ],
)
def test_predictions_must_be_of_one_example(between, said):
    with pytest.raises(UsageError, match=said) as raised:
        trained(module(between))
    assert "\n" not in str(raised.value)


def test_what_is_remembered_between_passes_is_refused():
    def counting(m, h):
        m.calls += m.training
        return h / max(m.calls, 1) if m.training else h

    def last(m, h):
        before, m.calls = m.calls, float(h.mean().detach()) if m.training else m.calls
        return h + before if m.training else h

    for between in (counting, last):
        with pytest.raises(UsageError, match="remembers something from one pass to the next"):
            trained(module(between))

    def harmless(m, h):
        m.calls += 1
        return h

    assert trained(module(harmless)).cost.executor == "vmap"


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (lambda y: {"logits": y}, "returns a dict with 'logits', and must return one tensor"),
        (lambda y: (y, y), "returns a tuple of 2"),
        (lambda y: None, "returns a NoneType"),
        (lambda y: y.argmax(1), "a row of numbers for each example; for . it returns int64"),
        (lambda y: y.flatten(), "for . it returns float32"),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_outputs_are_one_tensor_with_a_row_for_each_example(outputs, said, training):
    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return outputs(y) if self.training or not training else y

    with pytest.raises(UsageError, match=said):
        trained(Net(4, 2))


def test_parameters_are_read_where_layers_hold_them():
    class Listed(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
            self.held = [nn.Linear(4, 5)] if hidden else [self.layer]
            self.weights = [self.layer.weight]

        def forward(self, x):
            return self.head(self.held[0](x) + F.linear(x, self.weights[0]))

    with pytest.raises(UsageError, match="must read them from its layers"):
        trained(Listed(hidden=False))
    elsewhere = Listed(hidden=True)
    elsewhere.weights = [torch.zeros(5, 4)]
    with pytest.raises(UsageError, match=r"computes with a parameter \[5(, 4)?\] that is none of its own"):
        trained(elsewhere)


def test_a_model_that_evaluation_changes_is_trained_on_as_it_was_before():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(9, 3, max_norm=0.5), nn.Linear(12, 2)

        def forward(self, x):
            return self.head(self.words((x.abs() * 3).long().clamp(max=8)).flatten(1))

    torch.manual_seed(0)
    net = Words()
    run = trained(net, "loop")
    assert run.architecture.writes
    assert float(run.architecture.theta[:27].view(9, 3).norm(dim=1).max()) > 0.6  # no pass of a trial has changed it
    torch.manual_seed(0)
    assert torch.equal(net.words.weight, Words().words.weight)


def test_inputs_that_are_changed_in_place_are_those_of_one_pass():
    def halved(m, x):
        return x.mul_(0.5)

    net = nn.Sequential(type("Half", (nn.Module,), {"forward": halved})(), nn.Linear(4, 2))
    run = trained(net, "loop")
    assert run.architecture.writes
    x = X[:3].clone()
    assert torch.equal(run.architecture(run.theta(0), x), run.architecture(run.theta(0), x))
    assert torch.equal(x, X[:3])


def test_modules_that_share_memory_outside_of_them_work_one_after_the_other():
    held = {}

    class Shared(nn.Linear):
        def forward(self, x):
            held["x"] = x
            y = super().forward(x)
            return y + self.last(held["x"])

    net = Shared(4, 2)
    net.last = nn.Linear(4, 2)
    runs = [trained(net, "loop", workers) for workers in (1, 3)]
    assert all("one after the other" in run.cost.reason for run in runs)
    assert torch.equal(runs[0].theta(1), runs[1].theta(1))
    hooked = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    seen = {}  # in a copy of the module's hooks it is another one
    hooked[1].register_forward_hook(lambda layer, given, out: seen.update(h=out))
    hooked.register_forward_hook(lambda layer, given, out: out + seen["h"].mean(1, keepdim=True))
    assert "one after the other" not in trained(hooked, "loop", 3).cost.reason
    assert not seen


@pytest.mark.parametrize("buffer", [False, True])
def test_a_pass_that_fails_in_training_is_one_line(buffer):
    class Failing(nn.Linear):
        def forward(self, x):
            if self.training:
                raise IndexError("no\nmore")
            return super().forward(x)

    net = Failing(4, 2)
    if buffer:
        net.register_buffer("count", torch.tensor(0))
    with pytest.raises(UsageError, match=r"^the model fails on \d examples in training mode: IndexError: no more$"):
        trained(net, "loop")


def test_what_has_no_gradient_is_refused():
    class Still(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(UsageError, match="no trainable parameter has a gradient"):
        trained(Still(4, 2), "loop")


def test_layers_are_still_what_they_were_to_those_who_ask():
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.GRU(5, 2))
    kinds = nn.Linear, nn.BatchNorm1d, nn.Dropout, nn.GRU
    assert all(isinstance(part, kind) for part, kind in zip(Model(net).module, kinds, strict=True))


def test_a_trial_draws_none_of_the_callers_random_numbers():
    model = Model(module(noisy))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    run_trial(model, X, Trial.check_predictions)
    assert run_trial(model, X, Trial.check_training).draws
    assert torch.equal(torch.rand(2), expected)


def test_random_numbers_of_a_module_begin_at_the_steps_key():
    model = Model(module(noisy))
    model.draws = True
    tensors = model.layout.tensors(model.theta)
    one, two, other = (model.run(tensors, X[:8], None, key(0, word)).outputs for word in ("a", "a", "b"))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_rounding_is_no_difference_where_double_precision_shows_none():
    """Of two examples BatchNorm makes plus and minus one: the sign of rounding errors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 2))
    x = X[:6] * 1e-4 + 1
    run_trial(Model(net), x, Trial.check_filling)
    assert not differ(torch.ones(3), torch.ones(3) + 1e-4)
    assert differ(torch.ones(3), torch.ones(3) + 1e-4, rounded=False)
    assert differ(torch.ones(3), torch.ones(3) + 0.1)
    assert not differ(torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf]))


def test_a_copy_computes_with_its_own_tensors():
    torch.manual_seed(0)
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2))
    net[1].register_forward_hook(lambda layer, given, out: out + net[0].bias[:2])
    net[1].forward = lambda x: F.linear(x, net[1].weight)
    net(X)
    copy = duplicate(net)
    before = copy(X)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert torch.equal(copy(X), before)
    assert not before.eq(0).any()


def test_parameters_that_a_copy_would_not_have_are_refused():
    def tied(one, two):
        two.weight.data = one.weight.data

    def sliced(one, two):
        two.weight = nn.Parameter(one.weight.detach()[:3])

    for tie in (tied, sliced):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tie(*net)
        with pytest.raises(UsageError, match=r"'0\.weight' and '1\.weight' of the model are two tensors in one place"):
            check_tensors(net)
    whole = torch.randn(4, 8)
    side_by_side = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for i, layer in enumerate(side_by_side):
        layer.weight = nn.Parameter(whole[:, i::2])
    check_tensors(side_by_side)
    side_by_side[0].weight.register_hook(lambda g: 0 * g)
    with pytest.raises(UsageError, match=r"the parameter '0\.weight' has a hook on its gradient"):
        check_tensors(side_by_side)


def test_sparse_gradients_are_those_of_dense_ones():
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Unflatten(1, (4,)), nn.Embedding(9, 3, sparse=sparse), nn.Flatten(), nn.Linear(12, 2))
        data = Federation.from_arrays((X.abs() * 3).floor().clamp(max=8), (X.sum(1) > 0).long(), OWNER)
        net[0] = type("Whole", (nn.Module,), {"forward": lambda self, x: x.long()})()
        training = Training(batch=4, optimiser=SGD(0.1, momentum=0.9))
        found.append(fit(Local(), data, net, rounds=1, training=training, execution=Execution("loop")).theta(0))
    assert torch.equal(*found)


class Packed(nn.Module):
    """A recurrent layer over texts of unlike length."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        lengths = (x.abs().sum(-1) > 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.layer(packed)[1][0][-1])


def test_packed_sequences_train_client_by_client(tmp_path):
    x = torch.randn(48, 9, 6, generator=torch.Generator().manual_seed(0))
    x[::2, 6:] = 0
    federation = Federation.from_arrays(x, (x[:, 0, 0] > 0).long(), torch.arange(48) % 3)
    run = fit(FedAvg(), federation, Packed(), rounds=2)
    assert run.cost.executor == "loop"
    assert not torch.equal(run.theta("0"), run.architecture.theta)
    save(run, tmp_path / "run")
    outputs = load_model(tmp_path / "run", "0", Packed())(x[:5])
    torch.testing.assert_close(outputs, run.model("0")(x[:5]))
    assert outputs.shape == (5, 2)


def test_tokens_that_have_become_floats_are_named(tmp_path):
    federation = Federation.from_arrays(torch.zeros(12, 3), torch.arange(12) % 2, torch.arange(12) % 3)
    with pytest.raises(UsageError, match=r"call x\.long\(\)"):
        fit(Local(), federation, nn.Sequential(nn.Embedding(4, 2), nn.Flatten(), nn.Linear(6, 2)), rounds=1)
