"""Wrong graphs, too many clusters, networks too large and clients without feedback: one line, from both doors."""

import numpy as np
import pytest
import torch
from kinds import KINDS
from torch import nn

from kinfed import SGD, Adam, Federation, Graph, Training, UsageError, fit
from kinfed.cli import main
from kinfed.core.tasks import Classification
from kinfed.methods import DPFL, IFCA, METHODS, SFL, FedAGHN, FedCedar, FedFomo, Panacea, PFedGAT, PFedHN, fedfomo, ifca
from kinfed.methods.parts.heads import FullHeads
from kinfed.simulation.execution import Execution

PATH = [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
ALONE = [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
PARTS = ("fedper", "lg-fedavg", "fedrep", "fedrod", "fedah", "fedpac", "fedcp")
NEED_A_HEAD = (*PARTS, "knn-per")


def graph(*entries):
    """The path 0 - 1 - 2 with entries (row, column, value) changed."""
    weights = torch.tensor(PATH, dtype=torch.float32)
    for row, column, value in entries:
        weights[row, column] = value
    return weights


def federation(weights=None, train=9):
    """Three clients of so many training examples each, related by weights."""
    size = train + 4
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(3 * size, 2, generator=draw), torch.arange(3 * size) % 2
    owned = [torch.arange(i * size, (i + 1) * size) for i in range(3)]
    rows = {"train": [o[4:] for o in owned], "validation": [o[:2] for o in owned], "test": [o[2:4] for o in owned]}
    known = None if weights is None else Graph(torch.as_tensor(weights, dtype=torch.float32), "given")
    return Federation(x, y, rows, Classification(2), graph=known)


def run(method, weights=PATH, train=9, module=None, optimiser=None, **settings):
    data = federation(weights, train)
    training = Training(1, 4, optimiser or SGD(0.1))
    return fit(
        method, data, module or nn.Linear(2, 2), rounds=2, training=training, execution=Execution("loop"), **settings
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: federation(torch.ones(2, 2)), r"the graph must be \[3, 3\] for 3 clients; got \[2, 2\]"),
        (lambda: federation(torch.ones(4, 3, 3)), r"the graph must be \[3, 3\] for 3 clients; got \[4, 3, 3\]"),
        (lambda: federation(graph((1, 2, -0.5))), r"not negative; entry \[1, 2\] is -0.5"),
        (lambda: federation(graph((2, 0, float("nan")))), r"must be finite and not negative; entry \[2, 0\] is nan"),
        (lambda: federation(graph((0, 1, float("inf")))), r"entry \[0, 1\] is inf"),
        (
            lambda: run(PFedGAT(heads=500_000_000)),
            "pfedgat: a network of 500000000 heads .* more than 1; set method.sketch=4096",
        ),
        (lambda: run(Panacea(decoder=FullHeads(memory=1e-5))), "panacea: a network of .* more than memory=1e-05"),
        (lambda: run(PFedHN(memory=1e-5)), "pfedhn: a network of .* more than memory=1e-05"),
        (lambda: run(FedAGHN(feedback="held-out"), train=1), "FedAGHN sets a ninth .* client 0, 1, 2 has only one"),
        (lambda: run(PFedGAT(feedback="held-out"), train=1), "PFedGAT sets a ninth .* use feedback='train'"),
        (lambda: run(SFL(personal=["hed.*"])), r"no tensor of the model matches 'hed.\*'"),
    ],
)
def test_one_line_from_python(wrong, said):
    with pytest.raises(UsageError, match=said) as caught:
        wrong()
    assert "\n" not in str(caught.value)


def related(folder, weights):
    """A data directory whose dg15 has three domains with these links."""
    draw = np.random.default_rng(0)
    x, y, client = draw.normal(size=(60, 2)), np.arange(60) % 2, np.repeat([0, 1, 2], 20)
    np.savez(folder / "dg15.npz", x=x, y=y, client=client, adjacency=np.asarray(weights, dtype=np.float64))


DG15 = ["federation.dataset=dg15", "federation.partition=natural", "federation.clients=0", "model=linear", "rounds=1"]


@pytest.mark.parametrize(
    ("weights", "asked", "said"),
    [
        (np.ones((3, 4)), ["sfl"], "the graph must be [3, 3] for 3 clients; got [3, 4]"),
        (graph((1, 2, -0.5)), ["sfl"], "not negative; entry [1, 2] is -0.5"),
        (graph((1, 2, float("nan"))), ["panacea"], "entry [1, 2] is nan"),
        (PATH, ["pfedgat", "method.heads=500000000"], "GiB, more than 1; set method.sketch=4096, or fewer heads"),
        (PATH, ["panacea", "method.decoder.memory=1e-6"], "more than memory=1e-06"),
        (PATH, ["fedaghn", "method.feedback=held-out", "federation.split.examples=3"], "sets a ninth of each client's"),
        (PATH, ["fedcedar", "method.clusters=0"], "method.clusters must be"),
    ],
)
def test_one_line_from_the_command_line(weights, asked, said, tmp_path, capsys):
    related(tmp_path, weights)
    out = tmp_path / "run"
    arguments = ["run", *asked[:1], *DG15, *asked[1:], "--data-dir", str(tmp_path), "--out", str(out), "--quiet"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert not (out / "summary.json").exists()


@pytest.mark.parametrize("method", [SFL(), Panacea()], ids=["sfl", "panacea"])
def test_an_isolated_client_is_no_mistake(method):
    scores = run(method, ALONE).history.scores
    losses = [values for at in scores for (_, _, metric), values in at.items() if metric == "loss"]
    assert losses
    assert all(torch.isfinite(values).all() for values in losses)


def test_more_clusters_than_clients_in_a_round_are_warned_of_once():
    with pytest.warns(UserWarning, match="clusters=5 is more than the clients of a round, 2") as seen:
        run(FedCedar(clusters=5, steps=0), participation=0.67)
    assert sum("clusters=5 is more" in str(w.message) for w in seen) == 1


HEADLESS = nn.Sequential(nn.Flatten(), nn.PReLU(2))
TWO_LAYERS = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
WITH_STATISTICS = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("name", "module", "settings", "said"),
    [
        *((name, HEADLESS, {}, "kinfed.Model\\(module, head='NAME'\\)") for name in NEED_A_HEAD),
        *(
            (name, nn.Linear(2, 2), {}, "after other layers|nothing is left to share|nothing but its head")
            for name in PARTS
        ),
        ("fedprox-ft", HEADLESS, {"scope": "head"}, "trains a part of the model that has no tensors; .*head='NAME'"),
        ("fedavg-ft", TWO_LAYERS, {"scope": "head", "frozen": ("head.*",)}, "frozen as a whole: 2.bias, 2.weight;"),
        ("fedah", TWO_LAYERS, {"frozen": ("base",)}, "frozen as a whole: 0.bias, 0.weight; leave some of it out of"),
        ("fedah", TWO_LAYERS, {"frozen": ("head",)}, "frozen as a whole: 2.bias, 2.weight; leave some of it out of"),
        *(
            (name, nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), {}, f"{name}: the model needs a head after other lay")
            for name in ("fedrod", "fedah", "fedcp")
        ),
        ("fedpac", TWO_LAYERS, {"frozen": ("base",)}, "after other layers, neither of them personal or frozen"),
        ("fedper", TWO_LAYERS, {"frozen": ("head",)}, r"take it out of personal=\['head.\*'\] or of frozen"),
        (
            "fedrod",
            TWO_LAYERS,
            {"frozen": ("2.*",)},
            r"matches '2.personal_head.bias', which FedRoD adds and trains .* use frozen=\['2.generic.\*'\]",
        ),
        (
            "fedcp",
            TWO_LAYERS,
            {"frozen": ("head",)},
            r"which FedCP adds and trains .* use frozen=\['2.generic.\*', '2.policy.0.\*', '2.policy.1.\*'\]",
        ),
        ("fedrod", TWO_LAYERS, {"frozen": ("*.personal_head.*",)}, "adds and trains .*; name what your model has"),
        ("fedala", TWO_LAYERS, {"layers": ("hed.*",)}, r"no tensor of the model matches 'hed\.\*'"),
        ("fedsem", TWO_LAYERS, {"layers": ("hed.*",)}, r"no tensor of the model matches 'hed\.\*'"),
        ("fedfomo", TWO_LAYERS, {"train": 1}, "sets a ninth .* client 0, 1, 2 has only one"),
        ("scaffold", TWO_LAYERS, {"optimiser": Adam(0.01)}, "scaffold needs plain SGD"),
        ("apfl", TWO_LAYERS, {"optimiser": SGD(0.1, momentum=0.9)}, "apfl needs plain SGD"),
        ("fedu", TWO_LAYERS, {"optimiser": Adam(0.01)}, "fedu needs SGD"),
        ("fedprox", TWO_LAYERS, {"mu": 20.0}, r"fedprox: lr \* pull is 2, .* lower method.mu or the learning rate"),
        ("fedprox-ft", TWO_LAYERS, {"mu": 20.0}, r"fedprox-ft: lr \* pull is 2, .* lower method.mu"),
        ("ditto", TWO_LAYERS, {"pull": 20.0}, r"ditto: lr \* pull is 2"),
        ("pfedbayes", WITH_STATISTICS, {}, "pfedbayes: layer '1' .BatchNorm1d. has running statistics, which fit no"),
        ("pfedme", TWO_LAYERS, {"pull": 30.0}, r"pfedme: lr \* pull is 2\.7"),
    ],
)
def test_a_model_or_optimiser_that_a_method_cannot_use_is_refused_in_one_line(name, module, settings, said):
    how = {key: settings[key] for key in settings if key in ("train", "optimiser")}
    own = {key: settings[key] for key in settings if key not in how}
    with pytest.raises(UsageError, match=said) as caught:
        run(METHODS[name](**own), module=module, **how)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["fedrod", "fedcp"])
@pytest.mark.parametrize("frozen", ["base", "*.generic.*"])
def test_what_a_second_head_is_added_to_can_be_frozen(name, frozen):
    """As can a shared head: the personal one is trained all the same."""
    found = run(METHODS[name](frozen=(frozen,)), module=TWO_LAYERS)
    first, last = TWO_LAYERS.state_dict(), found.model(position=0).state_dict()
    head = next(n for n in last if n.endswith("personal_head.weight")), "2.weight"
    for name, tensor in last.items():
        plain = name.replace(".generic", "")
        if plain in first:
            assert torch.equal(tensor, first[plain]) == name.startswith("0." if frozen == "base" else "2."), name
    assert not torch.equal(last[head[0]], first[head[1]])


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("ifca", {"clusters": 4}, "clusters=4 is more than there are clients, 3"),
        ("fedsem", {"clusters": 4}, "clusters=4 is more than the clients of the first round, 3"),
        ("knn-per", {"neighbours": 50}, "3 of 3 clients have fewer training examples than neighbours=50"),
    ],
)
def test_more_clusters_or_neighbours_than_there_can_be_are_warned_of(name, settings, said):
    with pytest.warns(UserWarning, match=said) as seen:
        run(METHODS[name](**settings), module=TWO_LAYERS)
    assert all("\n" not in str(w.message) for w in seen)


@pytest.mark.parametrize("name", sorted({*KINDS} - {"scaffold", "pfedbayes"}))
def test_other_methods_take_a_model_with_statistics_and_adam(name):
    settings = {"neighbours": 3} if name == "knn-per" else {}
    found = run(METHODS[name](**settings), module=WITH_STATISTICS, optimiser=Adam(0.01)).summary
    assert 0 <= found.scores[found.selection.chosen]["mean"] <= 1


@pytest.mark.parametrize("name", ["fedfomo", "dpfl", "ifca"])
def test_a_model_whose_loss_is_no_number_is_never_preferred(name, examples, executor):
    """Two finite models are sent: the outputs of the first overflow, so that its loss is NaN; the second helps."""
    method = {
        "fedfomo": FedFomo(models=2, feedback="train"),
        "dpfl": DPFL(models=2, feedback="train"),
        "ifca": IFCA(clusters=2),
    }
    x, y = torch.full((4, 1), 10.0, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    module, training = nn.Linear(1, 2, bias=False).double(), Training(1, 4, SGD(0.1))
    trial = examples(module, [x], [y], method[name], training=training, executor=executor, task=Classification(2))
    models = torch.tensor([[1e308, 1e308], [1.0, 0.0]], dtype=torch.float64)
    if name == "ifca":
        _, upload = trial.fleet.train(0, torch.tensor([0]), ifca.Sent(models))
        assert upload.member.tolist() == [[0, 1]]
    else:
        own = torch.zeros(1, 2, dtype=torch.float64)
        trial.fleet.state = fedfomo.State(own, own)
        sent = fedfomo.Sent(models[None], torch.tensor([[True, True]]))
        _, upload = trial.fleet.train(0, torch.tensor([0]), sent)
        assert upload.weight[0, 0] <= 0
        assert upload.weight[0, 1] > 0.4
    assert all(torch.isfinite(t).all() for t in upload)
