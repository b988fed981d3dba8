"""Trainers and what a method may ask of its client: an objective, features and heads, examples it may read."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from kinfed import SGD, Federation, Params, Training, UsageError, fit, load_model
from kinfed.core.mixins import Extends, Predicts, model_for
from kinfed.core.model import Model
from kinfed.core.tasks import Classification
from kinfed.methods import METHODS, Local, towards
from kinfed.models import MODELS
from kinfed.runs.results import save
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

SIZES = (3, 9, 17, 8)
TRAINING = Training(2, 8, SGD(0.1))


def federation(**how):
    draw = torch.Generator().manual_seed(1)
    n = sum(SIZES) + 2 * len(SIZES)
    x = torch.randn(n, 4, generator=draw, dtype=torch.float64)
    owned = torch.arange(n).split([size + 2 for size in SIZES])
    rows = {"train": [o[2:] for o in owned], "validation": [o[:1] for o in owned], "test": [o[1:2] for o in owned]}
    return Federation(x, x[:, :3].argmax(1), rows, Classification(3), **how)


def module(norm=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        middle = [nn.BatchNorm1d(5), nn.Dropout(0.3)] if norm else []
        return nn.Sequential(nn.Linear(4, 5), *middle, nn.Tanh(), nn.Linear(5, 3)).double()


class Programmed(Local):
    """A method whose clients run this program."""

    def __init__(self, program):
        self.program = program

    def train(self, client, state, received):
        return state, self.program(client)


def uploads(program, executor="loop", net=None, training=TRAINING):
    fleet = Simulation(
        federation(), Model(net or module(True)), Programmed(program), training, execution=Execution(executor)
    )
    fleet.client_statistics()
    return fleet.train(0, torch.arange(len(SIZES)), ())[1], fleet


def mean_free(outputs, batch, features):
    return cross_entropy(outputs, batch.y, reduction="none")


def own(outputs, batch, features):
    """A loss of outputs, labels and features, for each example."""
    return outputs.square().sum(1) + features().abs().sum(1) * (1 + batch.y)


def mean(outputs, batch, features):
    """The same for all at once."""
    return batch.mean(own(outputs, batch, features))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_the_task_s_loss_as_an_objective_changes_nothing(executor):
    plain, _ = uploads(lambda c: c.descend(c.model.theta), executor)
    objective, _ = uploads(lambda c: c.descend(c.model.theta, objective=mean_free), executor)
    assert torch.equal(plain, objective)


OBJECTIVES = {
    "each": lambda c: c.descend(c.model.theta, objective=own),
    "mean": lambda c: c.descend(c.model.theta, objective=mean),
    "with all": lambda c: c.descend(
        c.model.theta, objective=own, penalty=towards(c.noise(c.model.theta), 0.3), only=c.model.layout.base, clip=0.5
    ),
    "gradient": lambda c: c.gradient(c.model.theta, next(iter(c.batches())), own),
    "loss": lambda c: c.loss(c.model.theta, c.data, own),
    "held against another": lambda c: c.descend(
        c.model.theta,
        objective=lambda out, batch, features: (
            (features() - c.model.features(c.model.theta, batch.x)).square().sum(1)
            + (features() - features()).sum(1)
            + own(out, batch, features)
        ),
    ),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_executors_agree_on_an_objective_of_a_method_s_own(name):
    loop, vmap = (uploads(OBJECTIVES[name], executor)[0] for executor in ("loop", "vmap"))
    close(loop, vmap)
    net = module()
    close(uploads(OBJECTIVES[name], "loop", net)[0], uploads(OBJECTIVES[name], "fused", net)[0])
    if name == "mean":
        close(loop, uploads(OBJECTIVES["each"])[0])
    assert torch.isfinite(loop).all()


def test_a_step_on_an_objective_by_hand():
    net = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    training = Training(1, 99, SGD(0.1))
    found, fleet = uploads(lambda c: c.descend(c.model.theta, objective=own), "loop", net, training)
    data = fleet.clients.pool
    rows = federation().rows["train"][1]
    z = net[:2](data.x[rows])
    loss = (net[2](z).square().sum(1) + z.abs().sum(1) * (1 + data.y[rows])).mean()
    slopes = torch.autograd.grad(loss, list(net.parameters()))
    moved = [p.detach() - 0.1 * slope for p, slope in zip(net.parameters(), slopes, strict=True)]
    close(torch.cat([p.reshape(-1) for p in moved]), found[1])


def test_class_weights_are_the_task_s_loss_s():
    weighted = Training(2, 8, SGD(0.1), class_weights=(1.0, 5.0, 0.5))
    for executor in ("loop", "vmap"):
        plain, with_weights = (
            uploads(lambda c: c.descend(c.model.theta, objective=own), executor, training=training)[0]
            for training in (TRAINING, weighted)
        )
        assert torch.equal(plain, with_weights)
        by_hand = uploads(
            lambda c: c.descend(c.model.theta, objective=lambda o, b, f: mean_free(o, b, f) * c.class_weights[b.y]),
            executor,
            training=weighted,
        )[0]
        assert torch.equal(by_hand, uploads(lambda c: c.descend(c.model.theta), executor, training=weighted)[0])


@pytest.mark.parametrize(
    ("loss", "got"),
    [(lambda o, b, f: o, r"a tensor \[\d+, 3\]"), (lambda o, b, f: 1.0, "1.0"), (lambda *a: None, "None")],
)
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_an_objective_that_gives_no_loss_is_told(loss, got, executor):
    with pytest.raises(UsageError, match=rf"an objective returns a loss \[\], or one per example, \[\d+\]; got {got}"):
        uploads(lambda c: c.descend(c.model.theta, objective=loss), executor)


REFUSALS = {
    "": lambda c: c.descend(c.model.theta, penalty=towards(c.model.theta, 0.1), optimiser=SGD(0.3, weight_decay=0.1)),
    "an objective of the method's own": lambda c: c.descend(c.model.theta, objective=mean_free),
    "a penalty of the method's own": lambda c: c.descend(c.model.theta, penalty=lambda theta: theta.abs().sum()),
    "an optimiser other than plain SGD": lambda c: c.descend(c.model.theta, optimiser=SGD(0.1, momentum=0.5)),
    "a bound on the gradient of a penalty, or of a recurrent layer": lambda c: c.descend(
        c.model.theta, penalty=towards(c.model.theta, 0.1), clip=1.0
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_has_no_fused_form_is_trained_by_the_next_and_the_run_says_so(refusal):
    program = REFUSALS[refusal]
    found, fleet = uploads(program, "fused", module())
    close(found, uploads(program, "loop", module())[0])
    said = f"; vmap trains what has no fused form: {refusal}" if refusal else ""
    assert fleet.reason == f"as requested{said}"


def test_the_summary_says_who_trained_and_why(tmp_path):
    method = Programmed(lambda c: Params(c.descend(c.model.theta, clip=2.0, optimiser=SGD(0.1, momentum=0.5))))
    found = fit(method, federation(), module(), rounds=1, execution=Execution("fused"))
    summary = save(found, tmp_path / "run")
    assert summary.cost.executor == "fused"
    assert summary.cost.reason == "as requested; vmap trains what has no fused form: an optimiser other than plain SGD"


MODELED = [
    ("linear", (6,), {}),
    ("mlp", (6,), {}),
    ("cnn", (1, 16, 16), {}),
    ("resnet9", (3, 32, 32), {}),
    ("rnn", (5, 2), {"cell": "gru", "hidden": 4}),
]


@pytest.mark.parametrize(("name", "shape", "settings"), MODELED, ids=[name for name, *_ in MODELED])
def test_the_head_of_the_features_is_the_model(name, shape, settings):
    model = Model(MODELS[name](shape, 4, **settings))
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    z = model.features(model.theta, x)
    assert torch.equal(model.head(model.theta, z), model(model.theta, x))
    assert z.shape[1] == model.module.get_submodule(model.head_name).in_features
    assert not model.module.get_submodule(model.head_name)._forward_hooks
    both = torch.stack([model.theta, 2 * model.theta])
    many = torch.func.vmap(model.features, (0, None))(both, x)
    torch.testing.assert_close(many[0], z)
    torch.testing.assert_close(torch.func.vmap(model.head)(both, many)[0], model(model.theta, x))


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.tail = nn.Linear(4, 3), nn.Linear(3, 3), nn.Softmax(1)

    def forward(self, x):
        return self.tail(self.head(self.body(x).tanh()))


class Twice(Squeezed):
    def forward(self, x):
        return self.head(self.head(self.body(x)))


class Named(Squeezed):
    def forward(self, x):
        return self.tail(input=self.head(input=self.body(x)))


def test_a_named_head_must_be_last_and_may_be_the_whole_module():
    x = torch.randn(2, 4)
    model = Model(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), head="0")
    with pytest.raises(UsageError, match="head '0' is not the last layer that its forward pass applies"):
        model.features(model.theta, x)
    whole = Model(nn.Linear(4, 3))
    assert torch.equal(whole.features(whole.theta, x), x)
    assert torch.equal(whole.head(whole.theta, x), whole(whole.theta, x))


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (nn.Sequential(nn.Conv1d(1, 2, 4), nn.Flatten()), "the model has no nn.Linear to serve as head"),
        (Squeezed(), "head 'head' is not the last layer that its forward pass applies"),
        (Twice(), "applies its head 'head' 2 times in a pass"),
        (Named(), "head 'head' gets more than one tensor"),
        (MODELS["gru"]((5, 2), 3, hidden=4), "applies its head 'head' 3 times in a pass"),
    ],
    ids=["none", "not last", "twice", "by name", "gru"],
)
def test_a_module_without_a_last_head_is_told(net, why):
    model = Model(net)
    x = torch.randn(2, *{"gru": (5, 2)}.get("gru" if hasattr(net, "decoder") else "", (4,)))
    x = x.unsqueeze(1) if isinstance(net, nn.Sequential) else x
    with pytest.raises(UsageError, match=why):
        model.features(model.theta, x)
    if model.head_name is None:
        with pytest.raises(UsageError, match=why):
            model.head(model.theta, x)
    assert model.fed is None
    assert model(model.theta, x).shape[0] == 2


def test_test_examples_are_for_evaluation_alone():
    for split in ("test", "triggered", "nonsense"):
        for executor in ("loop", "vmap"):
            with pytest.raises(
                UsageError, match=r"a method can read train, validation; got '.*' Test examples are|got"
            ):
                uploads(lambda c, split=split: c.examples(split).y.sum(), executor)
    assert uploads(lambda c: c.examples("validation").y.sum())[0].shape == (len(SIZES),)


@dataclass(frozen=True)
class Curious(Local, Predicts):
    """Looks at test examples when it is scored."""

    where: str = "personalise"
    feedback: str = "none"

    def personalise(self, client, state, received):
        if self.where == "personalise":
            client.examples("test")
        return {"own": state}

    def predict(self, client, personal, x):
        if self.where == "predict":
            client.examples("test")
        return client.model(personal.theta, x)

    def export(self, model, personal):
        return model.export(personal.theta)

    def init_client(self, client):
        if self.where == "init_client":
            client.examples("test")
        return super().init_client(client)


@pytest.mark.parametrize("where", ["personalise", "predict", "init_client"])
def test_no_half_of_a_method_reads_test_examples(where):
    with pytest.raises(UsageError, match="Test examples are for evaluation only"):
        fit(Curious(where), federation(), module(), rounds=1, execution=Execution("loop"))
    found = fit(Curious("nowhere", feedback="test"), federation(), module(), rounds=1, execution=Execution("loop"))
    assert found.summary.selection.caution


class Scaled(nn.Module):
    def __init__(self, net, by):
        super().__init__()
        self.net = net
        self.register_buffer("by", by)

    def forward(self, x):
        return self.by * self.net(x)


@dataclass(frozen=True)
class Loud(Local, Extends, Predicts):
    """Predicts with the double of what its model gives, which has a layer more."""

    def extend(self, module, head):
        return nn.Sequential(module, nn.Linear(3, 3).double())

    def predict(self, client, personal, x):
        return 2 * client.model(personal.theta, x)

    def export(self, model, personal):
        return Scaled(model.export(personal.theta), torch.tensor(2.0)).eval()


def test_an_extended_module_is_saved_and_loaded_as_it_was_scored(tmp_path):
    net = module(True)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    found = fit(Loud(), federation(), net, rounds=2, training=TRAINING, seed=3, execution=Execution("loop"))
    again = fit(Loud(), federation(), net, rounds=2, training=TRAINING, seed=3, execution=Execution("vmap"))
    torch.testing.assert_close(found.history.models, again.history.models)  # the seed fixes the layer's first numbers
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert found.architecture.head_name == "0.4"
    save(found, tmp_path / "run")
    with pytest.raises(
        UsageError,
        match=r"only its method, Loud, knows how its models predict.*: Run.open\(folder, module, method\)",
    ):
        load_model(tmp_path / "run", module=net, position=0)
    scored = found.history.scores[-1]["own", "test", "loss"]
    last = found.history.select("own") == found.history.rounds[-1]
    for i, rows in enumerate(federation().rows["test"]):
        x, y = found.federation.x[rows], found.federation.y[rows]
        one, other = found.model(position=i), load_model(tmp_path / "run", module=net, method=Loud(), position=i)
        assert torch.equal(one(x), other(x))
        assert not last or torch.isclose(cross_entropy(one(x), y), scored[i])


def test_an_extension_that_is_no_module_is_told():
    class Nothing(Local, Extends):
        def extend(self, module, head):
            return None

    with pytest.raises(UsageError, match=r"Nothing.extend must return an nn.Module; got None"):
        model_for(Nothing(), module())
    with pytest.raises(UsageError, match="the model has no layer 'hed' to serve as head"):
        model_for(METHODS["local"](), module(), "hed")
    assert Extends().extend(net := module(), None) is net
