"""What travels, what stays with a client, and what never moves: the same for every method."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from kinds import KINDS
from small import of_sizes
from torch import nn
from torch.utils._pytree import tree_leaves

from kinfed import load_model
from kinfed.cli import main
from kinfed.core import checkpoint, trees
from kinfed.core.checkpoint import Progress
from kinfed.core.client import towards
from kinfed.core.engine import Participation, run
from kinfed.core.history import History, Recorder
from kinfed.core.layout import Layout
from kinfed.core.method import AveragedParams, Params
from kinfed.core.mixins import Advises, Predicts, Solves, model_for
from kinfed.core.model import Model
from kinfed.core.optimiser import SGD
from kinfed.core.sharing import Divided, Sharing, State, divide
from kinfed.core.training import Training
from kinfed.core.trees import ModelOf, PerClient
from kinfed.data.federation import Federation
from kinfed.errors import UsageError
from kinfed.methods import METHODS, FedAvg, FedAvgFT, FedProx, FedRep, PFedBayes
from kinfed.methods.bases import Averaging
from kinfed.runs.fit import fit
from kinfed.runs.results import save
from kinfed.simulation.attacks.attacked_fleet import AttackedFleet
from kinfed.simulation.attacks.poison import Poison
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

SIZES = (5, 8, 12, 7)
ROUNDS = 3
TRAINING = Training(epochs=1, batch=8, optimiser=SGD(lr=0.1))
SETTINGS = {
    "personal": {"personal": ("head.*",)},
    "frozen": {"frozen": ("0.*",)},
    "norms": {"bn": "personal"},
    "all": {"personal": ("head",), "frozen": ("0.weight",), "bn": "local"},
}
PARTS = [(name, each) for name in ("fedavg", "fedpac", "sfl") for each in ("personal", "frozen")]  # alone
BESIDES = {
    "fedpac": 2 * 3 * 4 + 3 + 1,
    "fedfomo": 5,
    "dpfl": 10,
    "ifca": 4,
    "private-clusters": 4,
}  # further numbers of an upload
# Vectors as long as the shared part that a client uploads in a round; of the others one.
UPLOADS = {
    "local": 0,
    "scaffold": 2,
    "pfedgat": 2,
    "attention": 2,
    "hedge": 2,
    "fedem": 3,
    "ifca": 4,
    "private-clusters": 4,
}


def module(method=None):
    """A model of five layers, the last of which is the head: 3 x 4, norm, 4 x 4, and 4 x 3."""
    norm = nn.LayerNorm(4) if isinstance(method, PFedBayes) else nn.BatchNorm1d(4)  # without running statistics
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
        return nn.Sequential(*layers).double()


def dense():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def federation():
    return of_sizes(SIZES, torch.ones(4, 4) - torch.eye(4))


class Seen(Simulation):
    """A fleet that keeps all that was uploaded."""

    uploads: list


def start(method, executor="loop", model=None, training=TRAINING):
    data = federation()
    fleet = Seen(
        data,
        model_for(method, module(method) if model is None else model),
        method,
        training,
        seed=5,
        execution=Execution(executor),
    )
    fleet.uploads, train = [], fleet.train

    def seen(round, cohort, sent):
        replied, uploads = train(round, cohort, sent)
        fleet.uploads += tree_leaves(uploads)
        return replied, uploads

    fleet.train = seen
    return fleet, fleet.roster(data.graph), History(tuple(data.names), data.task)


def outcome(method, executor="loop", participation=1.0, **how):
    fleet, roster, history = start(method, executor, **how)
    server = run(fleet.method, roster, fleet, Recorder(history), rounds=ROUNDS, participation=participation)
    return server, fleet, history


def same(a, b, exact=True):
    a, b = trees.pack(a), trees.pack(b)
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0 if exact else 1e-9, atol=0 if exact else 1e-10, msg=key)


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, each) for name in METHODS for each in ("norms", "all")), *PARTS]
)
def test_every_method_shares_what_it_should_and_nothing_else(name, settings):
    """Counted in bytes, and looked for: no number of a personal or frozen tensor is in any upload."""
    method = METHODS[name](**SETTINGS[settings])
    if name == "fedpac" and "personal" in SETTINGS[settings]:
        with pytest.raises(UsageError, match="a linear head after other layers, neither of them personal or frozen"):
            outcome(method)
        return
    server, fleet, history = outcome(method)
    sharing = Sharing.from_method(method, fleet.model.layout)
    numbers = sharing.shared_layout.size
    assert numbers == sharing.count("shared")[1] < sharing.layout.whole.size
    assert history.cost.bytes_up == (UPLOADS.get(name, 1) * numbers + BESIDES.get(name, 0)) * 8 * len(SIZES) * ROUNDS
    theta, initial = history.models["theta"], fleet.model.theta  # [N, d] and [d]
    theta = theta.expand(len(SIZES), -1)
    uploaded = torch.cat([t.flatten() for t in fleet.uploads] or [torch.zeros(0)])
    begun = model_for(method, module(method))
    for name in sharing.frozen:  # in the model itself, for all
        assert torch.equal(fleet.model.frozen[name], begun.layout.tensors(begun.theta)[name]), name
        assert not torch.isin(fleet.model.frozen[name], uploaded).any(), f"{name} was uploaded"
    for entry in sharing.layout.entries:
        mine = theta[:, entry.at]
        # A bias before normalisation has no gradient, nor has a policy between heads that are still the same.
        if entry.name in sharing.personal and "policy" not in entry.name and entry.name != "0.bias":
            assert (mine != initial[entry.at]).any(1).all(), f"{entry.name} was not trained"
        if entry.name in sharing.personal:
            assert not torch.isin(mine, uploaded).any(), f"{entry.name} was uploaded"
    assert theta.shape[1] == len(initial) == sharing.layout.size
    # A private state keeps a personal part once, and of the model no more than is shared besides.
    assert fleet.state.personal.shape == (len(SIZES), sharing.count("personal")[1])
    assert all(t[0].numel() <= numbers for t in tree_leaves(fleet.state.inner))
    sizes = {sharing.layout.size, sharing.layout.whole.size} - {numbers}
    assert all(t.shape[-1] not in sizes for t in tree_leaves(server) if t.ndim)


@pytest.mark.parametrize("name", KINDS)
def test_executors_agree_and_a_resumed_run_with_late_clients_ends_with_the_same_bits(name, tmp_path):
    settings = SETTINGS["norms" if name == "fedpac" else "all"]
    method, late = METHODS[name](**settings), Participation(0.7, late=0.3, joins=1)
    server, fleet, history = outcome(method, participation=late)
    batched = outcome(method, "vmap", late)
    for one, other in ((server, batched[0]), (fleet.state, batched[1].state), (history.models, batched[2].models)):
        same(one, other, exact=False)
    again, roster, found = start(method)
    half = run(again.method, roster, again, Recorder(found), rounds=2, participation=late)
    checkpoint.save(tmp_path / "c", Progress(2, half, again.state, 1.0), found)
    again, roster, found = start(method)
    at = checkpoint.load(tmp_path / "c", again.method.start(roster), again.state, found)
    again.state = at.state
    end = run(
        again.method, roster, again, Recorder(found), rounds=ROUNDS, participation=late, server=at.server, begin=2
    )
    for one, other in ((server, end), (fleet.state, again.state), (history.models, found.models)):
        same(one, other)


def by_hand(model, stays, epochs=1):
    """[N, d] models that clients are scored with after FedAvg in which tensors of these names never leave a client.

    Nothing of kinfed: full batches, torch's own optimiser, a dictionary for each client.
    """
    data = federation()
    common = {name: t.clone() for name, t in model.state_dict().items() if "num_batches" not in name}
    own = [{name: t.clone() for name, t in common.items() if stays(name)} for _ in SIZES]
    for _ in range(ROUNDS):
        trained = []
        for i, rows in enumerate(data.rows["train"]):
            model.load_state_dict(common | own[i], strict=False)
            step = torch.optim.SGD(model.parameters(), lr=0.1)
            model.train()
            for _ in range(epochs):
                step.zero_grad()
                F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
                step.step()
            trained.append({name: t.clone() for name, t in model.state_dict().items() if name in common})
            own[i] = {name: t for name, t in trained[i].items() if stays(name)}
        total = sum(SIZES)
        common = {name: sum(n / total * one[name] for n, one in zip(SIZES, trained, strict=True)) for name in common}
    return [common | mine for mine in own]


@pytest.mark.parametrize(
    ("settings", "stays"),
    [
        ({"personal": ["head.*"]}, lambda name: name.startswith("5.")),  # FedPer
        ({"personal": ["0.*", "1.*"]}, lambda name: name[0] in "01"),  # LG-FedAvg
        ({"bn": "personal"}, lambda name: name.startswith("1.")),  # FedBN
        ({"bn": "local"}, lambda name: "running" in name),
    ],
    ids=["head", "base", "norms", "statistics"],
)
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_fedavg_with_a_personal_part_is_what_a_loop_over_dictionaries_gives(settings, stays, executor):
    training = Training(epochs=2, batch=100, optimiser=SGD(lr=0.1))
    server, fleet, _ = outcome(FedAvg(**settings), executor, training=training)
    roster = fleet.roster()
    sent = fleet.method.send(roster, server, roster.everyone)
    found = fleet.evaluate(ROUNDS, roster.everyone, sent).models["shared"].theta  # [N, d]
    layout = Layout.from_module(module())
    for theta, wanted in zip(found, by_hand(module(), stays, epochs=2), strict=True):
        for name, tensor in layout.tensors(theta).items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("method", [FedAvg(personal=("head",)), FedProx(mu=0.5, personal=("0.*",)), FedRep()])
def test_fused_training_agrees(method):
    loop, fused = (outcome(method, executor, model=dense()) for executor in ("loop", "fused"))
    same(loop[2].models, fused[2].models, exact=False)
    same(loop[1].state, fused[1].state, exact=False)


def first_round(method, **training):
    """A fleet and its uploads after a round of full batches with the dense model."""
    training = Training(**{"epochs": 1, "batch": 100, "optimiser": SGD(lr=0.1)} | training)
    fleet, roster, _ = start(method, model=dense(), training=training)
    sent = fleet.method.send(roster, fleet.method.start(roster), roster.everyone)
    return fleet, fleet.train(0, roster.everyone, sent)[1]


def test_a_proximal_term_pulls_what_is_shared_alone():
    """Two small steps of 0.9 / pull: of the second one, nine tenths undo the first where there is a pull."""
    both = []
    for method in (FedAvg(personal=("head",)), FedProx(900.0, personal=("head",))):
        fleet, uploads = first_round(method, epochs=2, optimiser=SGD(lr=1e-3))
        begun = fleet.method.sharing.cut(fleet.model.theta)
        both.append((uploads.theta - begun, fleet.state.personal))
    (free, head), (pulled, same_head) = both
    torch.testing.assert_close(pulled, 0.55 * free, rtol=0.01, atol=1e-7)
    torch.testing.assert_close(head, same_head, rtol=0, atol=1e-6)


class Own(NamedTuple):
    theta: ModelOf[PerClient]


@dataclass(frozen=True)
class Ditto(Averaging):
    """Two models are trained in one round: the shared one, and one of the client's own near it."""

    pull: float = 1.0

    def init_client(self, client):
        return Own(client.model.theta)

    def train(self, client, state, received):
        shared = client.descend(received.theta)
        own = client.descend(state.theta, penalty=towards(received.theta, self.pull))
        return Own(own), AveragedParams(shared)

    def personalise(self, client, state, received):
        return {"own": state, "shared": received}


def test_a_personal_part_is_trained_on_by_each_descend_in_turn():
    fleet, uploads = first_round(Ditto(personal=("head.*",)))
    data, model = federation(), dense()

    def step(numbers, rows):
        model.load_state_dict(numbers)
        model.zero_grad()
        F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
        return {name: (p - 0.1 * p.grad).detach().clone() for name, p in model.named_parameters()}

    def flat(numbers, *names):
        return torch.cat([numbers[name].flatten() for name in names])

    begin, base, head = dense().state_dict(), ("0.weight", "0.bias"), ("2.weight", "2.bias")
    for i, rows in enumerate(data.rows["train"]):
        first = step(begin, rows)
        second = step(begin | {name: first[name] for name in head}, rows)  # the pull begins at zero
        torch.testing.assert_close(uploads.theta[i], flat(first, *base), rtol=0, atol=1e-12)
        torch.testing.assert_close(fleet.state.inner.theta[i], flat(second, *base), rtol=0, atol=1e-12)
        torch.testing.assert_close(fleet.state.personal[i], flat(second, *head), rtol=0, atol=1e-12)


class Stepper(Averaging):
    """Takes steps of its own, on what it is given."""

    def train(self, client, state, received):
        theta = received.theta
        for batch in client.batches():
            theta = theta - 0.1 * client.gradient(theta, batch)
        return (), AveragedParams(theta)

    def personalise(self, client, state, received):
        return {"shared": received}


class Tuner(FedAvg):
    def personalise(self, client, state, received):
        return {"tuned": Params(client.descend(received.theta)), "shared": received}


def test_steps_of_ones_own_that_leave_the_personal_part_behind_are_refused():
    with pytest.raises(UsageError, match=r"Stepper takes its own local steps, .* client\.for_whole_model"):
        outcome(Stepper(personal=("head",)))
    outcome(Stepper(frozen=("head",)))
    with pytest.raises(UsageError, match=r"Tuner\.personalise trains, so it must say .* 'tuned': return client\.whole"):
        outcome(Tuner(personal=("head",)))


def test_tuning_tunes_the_personal_part_of_the_tuned_model_alone():
    """FedAvg-FT's shared model is FedAvg's with the same head; its tuned one is what another round would train."""
    server, fleet, history = outcome(FedAvgFT(length=1, personal=("head",)))
    _, plain, alone = outcome(FedAvg(personal=("head",)))
    same(fleet.state, plain.state)
    for key, values in alone.scores[-1].items():
        torch.testing.assert_close(history.scores[-1][key], values, rtol=0, atol=0, equal_nan=True)
    everyone, roster = torch.arange(len(SIZES)), replace(fleet.roster(), round=ROUNDS)
    sent = fleet.method.send(roster, server, everyone)
    tuned = fleet.evaluate(ROUNDS, everyone, sent).models["tuned"].theta
    _, uploads = plain.train(ROUNDS, everyone, sent)
    trained = plain.method.sharing.compose(uploads.theta, plain.state.personal)
    torch.testing.assert_close(tuned, trained, rtol=0, atol=0)


class Prototype(FedAvg, Predicts):
    """Looks at features in training, and predicts by a rule of its own, from a model that is declared as shared."""

    def train(self, client, state, received):
        z = client.model.features(received.theta, client.data.x)
        outputs = client.model(received.theta, client.data.x)
        torch.testing.assert_close(client.model.head(received.theta, z), outputs, rtol=0, atol=1e-14)
        torch.testing.assert_close(client.model.layer("5", received.theta, z), outputs, rtol=0, atol=1e-14)
        return super().train(client, state, received)

    def predict(self, client, personal, x):
        return client.model(personal.theta, x)

    def export(self, model, personal):
        return model.export(personal.theta)


def test_features_are_those_of_the_whole_model():
    outcome(Prototype(frozen=("0.*",)))
    with pytest.raises(UsageError, match=r"SharedParams\.theta is declared the same .*ModelOf\[PerClient\]"):
        outcome(Prototype(personal=("3.*",)))


def test_names_mean_what_they_say():
    layout = Layout.from_module(module())
    assert layout.match(["head"]) == layout.match(["head.*"]) == {"5.weight", "5.bias"}
    assert Layout.from_module(module(), head="3").match(["head.*"]) == {"3.weight", "3.bias"}
    assert layout.norms == {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
    sharing = Sharing.from_method(FedAvg(personal=("0.*",), bn="personal", frozen=("1.b*", "1.running_mean")), layout)
    assert sharing.personal == {"0.weight", "0.bias", "1.weight", "1.running_var"}  # a name goes before bn
    assert sharing.frozen == {"1.bias", "1.running_mean"}
    assert [sharing.count(part) for part in ("shared", "personal", "frozen")] == [(4, 35), (4, 24), (2, 8)]
    still = module()
    still[0].weight.requires_grad_(False)  # as good as named
    assert Sharing.from_method(FedAvg(), Layout.from_module(still)).frozen == {"0.weight"}


def test_what_sharing_does_not_change_is_asked_of_the_method_itself():
    class Stepping(FedAvg, Solves, Advises):
        solves, takes_gradients, remedy = True, False, "take smaller steps"

        def is_solved(self, server):
            return server == "solved"

    divided, _ = divide(Stepping(personal=("head.*",)), Model(module()))
    assert isinstance(divided, Divided)
    solver = Solves.from_method(divided)
    assert (solver.solves, solver.takes_gradients) == (True, False)
    assert [solver.is_solved(server) for server in ("solved", "begun")] == [True, False]
    assert Advises.from_method(divided).remedy == "take smaller steps"
    plain, _ = divide(FedAvg(personal=("head.*",)), Model(module()))
    assert not Solves.from_method(plain).solves


def test_parts_make_the_whole_and_have_a_layout_of_their_own():
    layout = Layout.from_module(module())
    sharing = Sharing.from_method(FedAvg(personal=("1.weight", "5.bias"), frozen=("3.weight",)), layout)
    theta = torch.arange(float(layout.size)).expand(2, -1)
    tensors = layout.tensors(theta[0])
    theta = sharing.layout.without_frozen(theta)
    assert theta.shape[1] == layout.size - 16
    assert torch.equal(sharing.layout.without_frozen(theta), theta)
    shared, personal = sharing.cut(theta), sharing.cut(theta, "personal")
    assert torch.equal(sharing.compose(shared, personal), theta)
    for name, tensor in sharing.shared_layout.tensors(shared[0]).items():
        assert torch.equal(tensor, tensors[name])
    assert torch.equal(personal[0], torch.cat([tensors["1.weight"], tensors["5.bias"]]))
    # 0 is whole; of 1 the bias (4) is left and its statistics (8), of 3 the bias (4), of 5 the weight (12).
    assert [(layer.name, layer.at, layer.trainable) for layer in sharing.shared_layout.layers] == [
        ("0", slice(0, 16), slice(0, 16)),
        ("1", slice(16, 28), slice(16, 20)),
        ("3", slice(28, 32), slice(28, 32)),
        ("5", slice(32, 44), slice(32, 44)),
    ]
    # Where no parameter is left of a layer, its statistics travel with the layer before it.
    part = layout.part(layout.names - {"1.weight", "1.bias"})
    assert [(layer.name, layer.at, layer.trainable) for layer in part.layers][:2] == [
        ("0", slice(0, 24), slice(0, 16)),
        ("3", slice(24, 44), slice(24, 44)),
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"personal": ("hed.*",)}, r"no tensor of the model matches 'hed\.\*'; did you mean 'head\.\*'\?"),
        ({"frozen": ("1.weigth",)}, r"no tensor of the model matches '1\.weigth'; .*1\.weight"),
        (
            {"personal": ("head",), "frozen": ("5.bias",)},
            r"'5\.bias' cannot be both personal.* and frozen.*; take it out",
        ),
        ({"personal": ("*",)}, "nothing is left to share"),
        ({"frozen": ("*weight",), "personal": ("*bias",)}, "nothing is left to share"),
    ],
)
def test_bad_names_are_one_line(settings, said):
    with pytest.raises(UsageError, match=said) as caught:
        fit(FedAvg(**settings), federation(), module(), rounds=1, execution=Execution("loop"))
    assert "\n" not in str(caught.value)


def test_without_anything_personal_there_is_no_wrapper():
    method, model = FedAvg(), Model(dense())
    assert divide(method, model) == (method, model)
    assert divide(FedAvg(bn="personal"), model)[0].bn == "personal"  # there is no norm
    assert not isinstance(divide(FedAvg(bn="personal"), model)[0], Divided)


def test_a_run_saves_whole_models_and_says_what_travelled(tmp_path):
    found = fit(
        FedAvg(personal=("head",), frozen=("0.weight",)), federation(), module(), rounds=2, execution=Execution("loop")
    )
    told = save(found, tmp_path / "run").sharing
    assert told["shared"] == {"tensors": 7, "numbers": 4 + 16 + 20}
    assert told["personal"] == {"tensors": 2, "numbers": 15}
    assert told["frozen"] == {"tensors": 1, "numbers": 12}
    assert told["bytes_up"] == told["bytes_down"] == 40 * 8 * 4
    data = federation()
    for i in range(4):
        loaded = load_model(tmp_path / "run", module=module(), position=i)
        assert torch.equal(loaded[0].weight, module()[0].weight)
        rows = data.rows["test"][i]
        torch.testing.assert_close(loaded(data.x[rows]), found.model(position=i)(data.x[rows]), rtol=0, atol=0)
    correct = [
        float(
            (load_model(tmp_path / "run", module=module(), position=i)(data.x[r]).argmax(1) == data.y[r])
            .double()
            .mean()
        )
        for i, r in enumerate(data.rows["test"])
    ]
    assert correct == found.history.test("shared").tolist()


def test_an_attacker_lies_about_what_is_shared_and_keeps_its_own_part():
    fleet, roster, _ = start(FedAvg(personal=("head",), bn="local"))
    method, cohort = fleet.method, roster.everyone
    attackers = torch.tensor([True, False, False, True])
    attacked = AttackedFleet(fleet, Poison(share=0.5, factor=1.0), attackers, method.sharing.shared_layout, 5)
    sent = method.send(roster, method.start(roster), cohort)
    begun = State((), fleet.state.personal.clone())
    _, honest = fleet.train(0, cohort, sent)
    kept = fleet.state.personal.clone()
    fleet.state = begun
    _, told = attacked.train(0, cohort, sent)
    assert told.theta.shape == (4, method.sharing.shared_layout.size)
    assert torch.equal(told.theta[1:3], honest.theta[1:3])
    torch.testing.assert_close(told.theta[attackers], (2 * sent.theta - honest.theta)[attackers], rtol=0, atol=1e-14)
    assert torch.equal(fleet.state.personal, kept)


def test_the_plan_names_what_travels_stays_and_never_moves_before_training(tmp_path, capsys):
    """`kinfed run` prints it first; by hand of a net whose first layer is frozen and whose head is personal."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    method = FedAvg(personal=("2.*",), frozen=("0.*",))
    plan = "shared 1.weight, 1.bias (20 numbers); personal 2.weight, 2.bias (10 numbers); "
    plan += "frozen 0.weight, 0.bias (16 numbers)"
    assert Sharing.from_method(method, Model(net).layout).plan == plan
    said = []
    x, client = torch.randn(24, 3), torch.arange(24) % 2
    federation = Federation.from_arrays(x, (x[:, 0] > 0).long(), client)
    fit(method, federation, net, rounds=1, execution=Execution(planned=lambda sharing: said.append(sharing.plan)))
    assert said == [plan]
    command = ["run", "fedrep", "rounds=1", "--beside", "none", "--out"]
    assert main([*command, str(tmp_path / "brief")]) == 0
    brief = capsys.readouterr().err
    assert main([*command, str(tmp_path / "long"), "--verbose"]) == 0
    long = capsys.readouterr().err
    assert long.startswith("tensors   shared fc1.weight, fc1.bias (4,160 numbers); personal head.")
    for word in ("tensors", "executor", " kB"):
        assert word in long
        assert word not in brief
