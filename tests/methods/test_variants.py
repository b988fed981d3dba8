"""The contract's hardest questions for every setting of every method, on five small unequal clients.

A setting that no variant below changes, and a choice that none makes, fail a test: add a variant beside the setting.
"""

import inspect
import math
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from small import of_sizes
from torch import nn

from kinfed.core import checkpoint, rows as core_tables, trees
from kinfed.core.checkpoint import Progress
from kinfed.core.engine import Rounds, run, sample
from kinfed.core.history import History, Recorder
from kinfed.core.method import Method
from kinfed.core.mixins import model_for
from kinfed.core.optimiser import SGD, Adam
from kinfed.core.training import Training
from kinfed.methods import METHODS, SFL
from kinfed.methods.parts.graph_hypernetwork import GCN, MLP
from kinfed.methods.parts.heads import FullHeads
from kinfed.methods.sfl import QP, Similarity
from kinfed.ops import similarity, sketch
from kinfed.relations import Cosine, Distance, Kernel, Linked, Nearest, Simplex, Softmax
from kinfed.simulation import evaluation, state_store
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed_papers.panacea.chunks import ChunkedHeads
from kinfed_papers.sfl.released import Released

SIZES = (3, 7, 5, 9, 4)  # of training examples; batches of 4
LINKS = [[0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]  # the last is alone
ROUNDS, SHARE, SEED = 3, 0.4, 5  # two clients a round
BASE = {
    "cfl": {"begin": 1, "eps1": 10.0, "eps2": 0.0, "linkage": "complete", "min_size": 2},
    "ifca": {"clusters": 2},
    "private-clusters": {"clusters": 2, "length": 1},
    "fedsem": {"clusters": 2},
    "fedcedar": {"clusters": 2},
    "pfedgat": {"heads": 2, "width": 3, "lr": 1.0},
    "attention": {"heads": 2, "width": 3, "lr": 0.001, "steps": 2},
    "fedavg-ft": {"length": 1},
    "fedprox-ft": {"length": 1},
    "pfedhn": {"hidden": 5, "optimiser": SGD(0.01, momentum=0.9, weight_decay=0.001)},
    "panacea": {
        "embedding": 3,
        "encoder": GCN(hidden=5),
        "decoder": FullHeads(hidden=5),
        "steps": 2,
        "optimiser": SGD(0.5),
    },
    "per-fedavg": {"alpha": 0.05, "beta": 0.1},
    "fedaghn": {"sharpness": 3.0, "lr": 0.5, "feedback": "held-out"},
}
VARIANTS = {
    "kin": [
        {"tau": 0.2, "credit": 0.0},
        {"by_layer": False, "credit": 30.0, "clip": 0.5},
        {"neighbours": 2, "clip": math.inf},
        {"neighbours": 2, "by_layer": False},
    ],
    "hedge": [
        {"sharpness": 2.0, "feedback": "held-out"},
        {"lr": 0.5, "feedback": "train", "neighbours": 2},
        {"feedback": "test", "bn": "local", "tau": 0.3, "credit": 1.0},
        {"by_layer": False, "clip": 0.5},
    ],
    "mixture": [
        {"compare": Distance(), "weigh": Kernel(0.5, 2.0), "vectors": "models", "start_from": "own", "pull": 0.5},
        {"compare": Cosine(by_layer=True), "weigh": Softmax(0.5, self_weight=0.3), "vectors": "updates", "bn": "local"},
        {"weigh": Simplex(0.5), "among": Nearest(2)},
        {"among": Linked()},
    ],
    "attention": [
        {"heads": 2, "width": 3, "slope": 0.1, "sketch": 64},
        {"heads": 1, "width": 4, "lr": 0.01, "steps": 2, "feedback": "held-out"},
        {"heads": 2, "width": 3, "feedback": "validation", "bn": "local"},
    ],
    "local": [{}],
    "fedavg": [{"uniform": True, "noise": 0.1, "bn": "local"}],
    "fedavg-ft": [{"epochs": 1, "scope": "head"}, {"length": 2, "bn": "local"}],
    "fedprox": [{"mu": 0.5, "uniform": True, "noise": 0.1, "bn": "local"}],
    "fedprox-ft": [{"mu": 0.5, "epochs": 1, "scope": "head"}, {"length": 2, "bn": "local"}],
    "ditto": [{"pull": 0.5, "epochs": 2, "bn": "local"}],
    "pfedme": [{"pull": 0.5, "steps": 2, "share": 0.2, "beta": 1.5}, {"lr": 0.2, "pull": 0.1, "bn": "local"}],
    "apfl": [{"alpha": 0.25}, {"adaptive": True, "bn": "local"}],
    "pfedbayes": [{"zeta": 1.0, "steps": 1, "lr": 0.02, "sigma": 0.1}, {"jitter": 0.0, "beta": 0.5}],
    "scaffold": [{"server_lr": 0.5, "option": 1}],
    "fedper": [{"uniform": True, "noise": 0.1, "bn": "personal"}],
    "lg-fedavg": [{"uniform": False, "noise": 0.1, "bn": "local"}],
    "fedrep": [{"head_epochs": 1, "base_epochs": 2}],
    "fedrod": [{"bn": "local"}],
    "fedah": [{"rate": 0.3, "mix_epochs": 2, "bn": "local"}, {"head_epochs": 2, "base_epochs": 0}],
    "fedpac": [
        {"pull": 0.3, "head_epochs": 2, "base_epochs": 0, "head_lr": 0.05, "least": 0.2},
        {"head_epochs": 0, "bn": "local"},
    ],
    "fedcp": [{"pull": 0.5, "bn": "local"}],
    "fedala": [{"rate": 5.0, "share": 0.5, "mix_epochs": 2}, {"layers": ("*",), "bn": "local"}],
    "per-fedavg": [
        {"alpha": 0.1, "beta": 0.2, "delta": 0.01, "steps": 2},
        {"hessian_free": False, "batch": 2},
        {"adapt_steps": 2, "beta": None},
    ],
    "pfedhn": [
        {"embedding": 4, "hidden": 6, "layers": 1, "optimiser": SGD(0.1)},
        {"optimiser": Adam(0.01, beta1=0.5, beta2=0.9, eps=1e-4, weight_decay=0.1), "memory": 1.0, "clip": 0.01},
        {"optimiser": SGD(0.1, momentum=0.5, weight_decay=0.1), "client_clip": 0.1},
    ],
    "knn-per": [{"neighbours": 2}, {"neighbours": 3, "scale": 0.5, "weight": 0.7, "bn": "local"}],
    "pfedla": [
        {"embedding": 3, "hidden": 5, "layers": 1, "memory": 1.0, "optimiser": SGD(0.5, momentum=0.5)},
        {"embedding": 3, "hidden": 5, "optimiser": Adam(0.05), "bn": "local"},
    ],
    "panacea": [
        {"embedding": 4, "encoder": GCN(layers=1, hidden=6), "decoder": FullHeads(layers=2, hidden=6, memory=1.0)},
        {
            "encoder": MLP(layers=2, hidden=5),
            "reconstruction": 0.0,
            "optimiser": Adam(0.05, eps=1e-4, weight_decay=0.1),
        },
        {"residual": False, "steps": 3, "reconstruction": 0.5, "optimiser": SGD(0.05, 0.5, 0.1)},
        {"decoder": ChunkedHeads(layers=2, hidden=5, memory=0.1, chunk=9, code=3)},
    ],
    "cfl": [{"begin": 3, "min_size": 4}, {"eps1": 0.1, "eps2": 9.0}, {"linkage": "single", "gamma": 0.1}],
    "ifca": [{"clusters": 3, "bn": "local"}],
    "private-clusters": [{"clusters": 3, "length": 2, "bn": "local"}],
    "fedem": [{"components": 1}, {"components": 2}, {"components": 2, "bn": "local"}],
    "fedsem": [{"layers": ("head.*",), "bn": "local"}],
    "sfl": [
        {"steps": 2, "rho": 0.5, "pull": 0.7, "begin": "mixed"},
        {"pull": 0.0, "begin": "shared"},
        {"structure": Similarity(neighbours=3, beta=0.5), "begin": "own"},
        {"structure": QP(neighbours=3, beta=0.5, gamma=0.5)},
        {"structure": Released()},
    ],
    "fedu": [{"pull": 0.3, "bn": "local"}],
    "fedcedar": [{"clusters": 3}, {"steps": 0}],
    "fedamp": [
        {"alpha": 0.05, "sigma": 2.0, "pull": 0.1},
        {"alpha": 1.0, "sigma": 20.0, "pull": 0.2, "neighbours": 2},
    ],
    "fedatt": [{"step": 1.2, "norm": 1, "relative": False, "noise": 0.1}, {"step": 1.0, "relative": True}],
    "heurfedamp": [
        {"sharpness": 3.0, "home": 0.1, "pull": 0.2},
        {"sharpness": 10.0, "home": 0.7, "pull": 1.0, "neighbours": 2},
    ],
    "pfedgraph": [{"alpha": 0.3, "pull": 0.5}, {"alpha": 0.3, "pull": 0.0, "bn": "local"}, {"neighbours": 2}],
    "fedfomo": [{"models": 2, "explore": 0.6, "feedback": "validation"}, {"feedback": "train"}, {"feedback": "test"}],
    "dpfl": [
        {"models": 3, "budget": 2, "explore": 0.6, "feedback": "validation"},
        {"feedback": "train"},
        {"feedback": "test"},
    ],
    "fedaghn": [
        {"home": 0.5, "sharpness": -1.0, "lr": 0.1},
        {"feedback": "train"},
        {"feedback": "test", "neighbours": 2},
        {"feedback": "validation", "lr": 0.0},
    ],
    "pfedgat": [
        {"heads": 3, "width": 2, "slope": 0.1, "lr": 0.1, "feedback": "train"},
        {"feedback": "validation", "sketch": 5},
        {"feedback": "test"},
    ],
}
COMMON = {setting.name for setting in fields(Method)}  # tried with every method in test_sharing
CASES = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]


def told(case):
    return "-".join([case[0], *(f"{k}={short(v)}" for k, v in case[1].items())])


def short(value):
    """A setting in words, a part with what differs from its defaults alone."""
    if not is_dataclass(value):
        return str(value)
    changed = {f.name: getattr(value, f.name) for f in fields(value)}
    changed = {k: v for k, v in changed.items() if v != getattr(type(value), k, MISSING)}
    return f"{type(value).__name__}({', '.join(f'{k}={short(v)}' for k, v in changed.items())})"


each_case = pytest.mark.parametrize(("name", "variant"), [pytest.param(*case, id=told(case)) for case in CASES])


def federation():
    return of_sizes(SIZES, torch.tensor(LINKS, dtype=torch.float32))


def net(name):
    norm = nn.LayerNorm(4) if name == "pfedbayes" else nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 3)).double()


def start(name, variant, executor="loop"):
    method = METHODS[name](**{**BASE.get(name, {}), **variant})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = net(name)
    data, training = federation(), Training(epochs=1, batch=4, optimiser=SGD(lr=0.2))
    fleet = Simulation(
        data, model_for(method, module), method, training, seed=SEED, execution=Execution(executor, chunk=3)
    )
    return fleet.method, fleet, fleet.roster(data.graph), History(tuple(data.names), data.task)


def outcome(name, variant, executor="loop"):
    method, fleet, roster, history = start(name, variant, executor)
    server = run(method, roster, fleet, Recorder(history), rounds=Rounds(ROUNDS, 2), participation=SHARE)
    return server, fleet.states.take(torch.arange(len(fleet.clients))), history


def tables(server, state, history):
    """All that a run leaves, by name."""
    scores = {f"{t}/{'/'.join(k)}": v for t, at in enumerate(history.scores) for k, v in at.items()}
    notes = {f"{t}/{k}": v for t, at in enumerate(history.diagnostics) for k, v in at.items()}
    return {
        **trees.pack(server, "server."),
        **trees.pack(state, "state."),
        **history.models,
        **{f"relation.{t}": relation for t, relation in enumerate(history.relations)},
        **scores,
        **notes,
    }


def same(one, other, exact):
    assert one.keys() == other.keys()
    for key, value in one.items():
        within = 0 if exact else 1e-9 if value.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(
            value, other[key], rtol=within, atol=within, equal_nan=True, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.fixture
def large(monkeypatch):
    """Every model and every number of clients is dealt with as a large one, within."""

    @contextmanager
    def within():
        with monkeypatch.context() as patch:
            limits = [(core_tables, "WORTH"), (state_store, "LARGE"), (evaluation, "KEPT"), (evaluation, "BYTES")]
            for module, limit in limits:
                patch.setattr(module, limit, 0)
            for module in (similarity, sketch):
                patch.setattr(module, "BLOCK", 1)
            yield

    return within


@each_case
@pytest.mark.filterwarnings("ignore:fed")
def test_executors_and_sizes_agree_and_a_resumed_run_ends_with_the_same_bits(name, variant, tmp_path, large):
    whole = tables(*outcome(name, variant))
    with large():
        same(whole, tables(*outcome(name, variant, "vmap")), exact=False)
    method, fleet, roster, history = start(name, variant)
    fresh = trees.pack(fleet.state)
    server = run(method, roster, fleet, Recorder(history), rounds=Rounds(2, 2), participation=SHARE)
    checkpoint.save(tmp_path / "c", Progress(2, server, fleet.state, 1.5), history)
    method, fleet, roster, history = start(name, variant)
    at = checkpoint.load(tmp_path / "c", method.start(roster), fleet.state, history)
    fleet.state = at.state
    server = run(
        method,
        roster,
        fleet,
        Recorder(history),
        rounds=Rounds(ROUNDS, 2),
        participation=SHARE,
        server=at.server,
        begin=2,
    )
    same(whole, tables(server, fleet.state, history), exact=True)
    (never,) = left_out(roster)  # it has learned nothing, and yet it has a model that can be scored
    for key, table in trees.pack(fleet.state).items():
        assert torch.equal(table[never], fresh[key][never]), key
    losses = [values for at in history.scores for (_, _, metric), values in at.items() if metric == "loss"]
    assert losses
    assert all(torch.isfinite(values).all() for values in losses)


def left_out(roster):
    """Clients that were in no cohort."""
    cohorts = [sample(replace(roster, round=t), SHARE).tolist() for t in range(ROUNDS)]
    return set(range(len(SIZES))) - {i for cohort in cohorts for i in cohort}


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_and_every_choice_has_a_variant(name):
    tried = [METHODS[name](**{**BASE.get(name, {}), **variant}) for variant in VARIANTS[name]]
    assert_varied(METHODS[name], tried, name)


def assert_varied(kind, tried, where, own=False):
    """Some of the objects tried differ from the default in each setting; so do the parts of each kind within them.

    With `own` only in those settings that the kind does not inherit from another.
    """
    hints = get_type_hints(kind)
    for setting in fields(kind):
        if setting.name in COMMON or (own and setting.name not in vars(kind).get("__annotations__", {})):
            continue
        default = setting.default if setting.default is not MISSING else None
        values, hint = [getattr(one, setting.name) for one in tried], hints[setting.name]
        assert any(v != default for v in values), f"no variant of {where} changes {setting.name}"
        choices = getattr(inspect.getmodule(kind), "CHOICES", {}).get(setting.name, ())
        for choice in (*choices, *(get_args(hint) if get_origin(hint) is Literal else ())):
            assert choice in (default, *values), f"no variant of {where} has {setting.name}={choice}"
        for part in filter(is_dataclass, dict.fromkeys((hint, *get_args(hint), *map(type, values)))):
            alike = [v for v in values if isinstance(v, part)]
            assert part in map(type, alike), f"no variant of {where} has a {part.__name__} as {setting.name}"
            if part not in (SGD, Adam):  # whose settings test_optimiser tries
                assert_varied(part, alike, f"{where}.{setting.name}", own=True)


def test_a_part_without_a_variant_of_its_own_is_noticed():
    for tried, lacks in (
        ([SFL(structure=Similarity(3, 0.5))], "no variant of sfl has a QP as structure"),
        ([SFL(structure=Similarity(3, 0.5)), SFL(structure=QP())], "no variant of sfl.structure changes gamma"),
    ):
        settings = [replace(one, steps=2, rho=0.5, pull=0.0, begin="mixed") for one in tried]
        with pytest.raises(AssertionError, match=lacks):
            assert_varied(SFL, [*settings, SFL(begin="shared")], "sfl")
