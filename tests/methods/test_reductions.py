"""Settings at which a method is another one: to the bit where the arithmetic is the same, otherwise to rounding.

What holds for every method, such as that an order of the clients or a longer padding changes nothing, is in
test_contract.py; fixed points and invariants are beside their methods.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from kinfed import UsageError
from kinfed.core.method import Method, Params
from kinfed.core.optimiser import SGD, Adam
from kinfed.core.tasks import Classification
from kinfed.core.training import Training
from kinfed.methods import (
    CFL,
    IFCA,
    Ditto,
    FedAH,
    FedALA,
    FedAMP,
    FedAtt,
    FedAvg,
    FedAvgFT,
    FedPAC,
    FedPer,
    FedProx,
    FedProxFT,
    FedRep,
    FedRoD,
    FedSem,
    Hedge,
    HeurFedAMP,
    Kin,
    KNNPer,
    LGFedAvg,
    Local,
    PerFedAvg,
    PFedBayes,
    PFedGraph,
    PFedLA,
    PFedMe,
    Scaffold,
)
from kinfed.methods.parts.mixed_weights import Mixing

float64 = torch.float64
BASE, HEAD = ("0.weight", "0.bias", "1.weight", "1.bias"), ("head.*",)
MINI = Training(2, 4, SGD(0.2, momentum=0.9))
WHOLE = Training(1, 20, SGD(0.2))  # one step a round, on all examples
PLAIN = Training(2, 4, SGD(0.2))
STILL = {"embedding": 2, "hidden": 3, "optimiser": SGD(1e-300)}  # hypernetworks that do not move


@dataclass(frozen=True)
class EachScored(FedAvg):
    """A model that all share, scored client by client: one pass over everybody's examples rounds in another way."""

    def personalise(self, client, state, received):
        return {"mixed": Params(received.theta)}


@dataclass(frozen=True)
class OwnHeads(FedPAC):
    """Combinations of heads in which everybody has but its own."""

    def combine(self, moment, variance):
        return torch.eye(len(variance), dtype=moment.dtype)


@dataclass(frozen=True)
class OwnLayers(PFedLA):
    """Networks by which every client scores itself highest."""

    def start(self, roster):
        server = super().start(roster)
        network = server.network
        return server._replace(network=network._replace(offset=network.offset + 1e4 * torch.eye(len(roster))))


class FirstModel(IFCA):
    """Clusters that all start from the initial model."""

    def start(self, roster):
        server = super().start(roster)
        return server._replace(theta=roster.theta.repeat(self.clusters, 1))


def own_models_only(trial):
    """Give FedALA weights of 0, as if all clients had trained before."""
    theta = trial.roster.theta.repeat(len(trial.roster), 1)
    trial.fleet.state = Mixing(theta, torch.zeros_like(theta), torch.ones(len(theta), dtype=torch.bool))


class Case(NamedTuple):
    """Two methods, each with the model that is compared."""

    ours: Method
    model: str
    other: Method
    same: str
    exact: tuple[str, ...] = ("loop", "vmap")  # executors by which scores are the same bits
    training: Training = MINI
    data: str = "different"  # clients: different, alike, or one alone
    share: float = 0.67  # of the clients in a round
    norm: bool = True  # also with a normalisation layer
    prepare: Any = None


SHARED, OWN = (FedAvg(), "shared"), (Local(), "own")
UNIFORM = (FedAvg(uniform=True), "shared")
ROUNDING: dict[str, Any] = {"exact": ()}
EVERYONE: dict[str, Any] = {"exact": (), "share": 1.0}
LOOP = ("loop",)  # vmap scores a model that all share in one pass, and others client by client
CASES = {
    "fedprox, mu 0": Case(FedProx(mu=0.0), "shared", *SHARED),
    "fedprox-ft, mu 0": Case(FedProxFT(mu=0.0, length=1), "tuned", FedAvgFT(length=1), "tuned"),
    "fedprox-ft's shared model": Case(FedProxFT(mu=0.5), "shared", FedProx(mu=0.5), "shared"),
    "fedavg-ft, no tuning": Case(FedAvgFT(epochs=0), "tuned", *SHARED),
    "fedavg of one client": Case(FedAvg(), "shared", *OWN, data="one", share=1.0, exact=LOOP),
    "scaffold of one client": Case(Scaffold(), "shared", *OWN, data="one", training=PLAIN, **EVERYONE),
    "fedatt of one client": Case(FedAtt(step=1.0), "shared", *OWN, data="one", **EVERYONE),
    "pfedgraph of one client": Case(PFedGraph(pull=0.0), "own", *OWN, data="one", **EVERYONE),
    "pfedla of one client": Case(PFedLA(**STILL), "own", *OWN, data="one", **EVERYONE),
    "ditto, no pull": Case(Ditto(pull=0.0), "own", *OWN),
    "ditto's shared model": Case(Ditto(pull=1.0), "shared", *SHARED),
    "pfedme, one step and all the way": Case(
        PFedMe(steps=1, share=1.0, pull=3.0, lr=0.2), "shared", *SHARED, training=PLAIN, norm=False, **ROUNDING
    ),
    "pfedbayes, alone and without samples": Case(
        PFedBayes(zeta=0.0, jitter=0.0, steps=1, lr=0.02), "own", *OWN, training=Training(2, 4, Adam(0.02)), norm=False
    ),
    "per-fedavg, alpha 0": Case(PerFedAvg(alpha=0.0, beta=0.2), "shared", *UNIFORM, training=WHOLE, **ROUNDING),
    "fedper, nothing personal": Case(FedPer(personal=()), "mixed", *SHARED),
    "lg-fedavg, nothing personal": Case(LGFedAvg(personal=()), "mixed", *UNIFORM),
    "lg-fedavg, the head personal": Case(LGFedAvg(personal=HEAD, uniform=False), "mixed", FedPer(), "mixed"),
    "fedrep, the head untrained": Case(
        FedRep(head_epochs=0, base_epochs=2), "mixed", FedAvg(frozen=HEAD), "shared", **ROUNDING
    ),
    "fedrod, classes alike": Case(FedRoD(), "generic", *SHARED, **ROUNDING),
    "fedah, W 1, only the base": Case(
        FedAH(rate=0.0, head_epochs=0), "mixed", FedAvg(frozen=HEAD), "shared", **ROUNDING
    ),
    "fedah, W 1, only the head": Case(
        FedAH(rate=0.0, head_epochs=2, base_epochs=0), "mixed", FedAvg(frozen=BASE), "shared", **ROUNDING
    ),
    "fedala, W 1": Case(FedALA(rate=0.0), "mixed", EachScored(), "mixed", exact=LOOP),
    "fedala, W 0": Case(FedALA(layers=("*",), rate=0.0), "own", *OWN, norm=False, prepare=own_models_only, **ROUNDING),
    "fedpac, own heads": Case(
        OwnHeads(pull=0.0, head_epochs=5, head_lr=None, base_epochs=1),
        "combined",
        FedRep(head_epochs=5),
        "mixed",
        **EVERYONE,
    ),
    "fedamp, no attention": Case(FedAMP(alpha=0.0), "own", *OWN),
    "fedamp, no pull": Case(FedAMP(pull=0.0), "own", *OWN),
    "heurfedamp, no pull": Case(HeurFedAMP(pull=0.0), "own", *OWN),
    "pfedgraph, large alpha": Case(PFedGraph(alpha=1e12, pull=0.0), "mixed", *SHARED, **EVERYONE),
    "pfedgraph, small alpha": Case(PFedGraph(alpha=1e-9, pull=0.0), "own", *OWN, **EVERYONE),
    "pfedgraph, clients alike": Case(PFedGraph(pull=0.0), "mixed", *SHARED, data="alike", training=WHOLE, **EVERYONE),
    "fedatt, clients alike": Case(
        FedAtt(step=1.0), "shared", *UNIFORM, data="alike", training=WHOLE, norm=False, **EVERYONE
    ),
    "cfl, before it begins": Case(CFL(begin=100), "cluster", *UNIFORM, **EVERYONE),
    "ifca, one cluster": Case(FirstModel(clusters=1), "cluster", *UNIFORM, **ROUNDING),
    "fedsem, one cluster": Case(FedSem(clusters=1), "cluster", *UNIFORM, **ROUNDING),
    "fedsem, a cluster for each": Case(FedSem(clusters=3), "cluster", *OWN, **EVERYONE),
    "pfedla, equal scores": Case(PFedLA(**STILL), "mixed", *UNIFORM, **EVERYONE),
    "pfedla, highest for oneself": Case(OwnLayers(**STILL), "own", *OWN, **EVERYONE),
    "kin, a temperature at which all are alike": Case(Kin(tau=1e12, clip=math.inf), "mixed", *SHARED, **EVERYONE),
    "kin, a temperature at which nobody is": Case(Kin(tau=1e-9, credit=0.0), "own", *OWN, **EVERYONE),
    "kin of one client": Case(Kin(), "own", *OWN, data="one", **EVERYONE),
    "hedge of one client": Case(Hedge(feedback="train"), "own", *OWN, data="one", **EVERYONE),
    "knn-per, weight 0": Case(KNNPer(neighbours=3, weight=0.0), "mixed", *SHARED, **ROUNDING),
}
SIZES = (6, 3, 9)


def clients(kind):
    """Lists of x: [n_i, 4] and y: [n_i]; classes count alike at every client."""
    draw = torch.Generator().manual_seed(4)
    x = [torch.randn(n, 4, generator=draw, dtype=float64) for n in SIZES]
    if kind == "alike":
        x = [x[1].repeat(n // 3, 1) for n in SIZES]
    count = 1 if kind == "one" else 3
    return x[:count], [torch.arange(n) % 3 for n in SIZES][:count]


def net(norm=False):
    """The first tensors' names are the same with a normalisation layer and without."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        middle = nn.BatchNorm1d(5) if norm else nn.Linear(5, 5)
        return nn.Sequential(nn.Linear(4, 5), middle, nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("id", CASES)
def test_it_is_the_other(id, examples, executor):
    """Under vmap with a normalisation layer, where both can have one."""
    case, scores = CASES[id], []
    x, y = clients(case.data)
    for method, model in ((case.ours, case.model), (case.other, case.same)):
        how = {"training": case.training, "executor": executor, "task": Classification(3)}
        trial = examples(net(case.norm and executor == "vmap"), x, y, method, **how)
        if case.prepare and method is case.ours:
            case.prepare(trial)
        trial.run(4, participation=case.share)
        scores.append(torch.stack([found[model, "test", "loss"] for found in trial.history.scores]))
    if executor in case.exact:
        assert torch.equal(*scores)
    else:
        torch.testing.assert_close(*scores, rtol=1e-11, atol=1e-12)
    assert (scores[0][0] != scores[0][-1]).any()  # there was something to see


TWINS = {
    FedAvg(): "shared",
    FedProx(mu=0.5): "shared",
    FedAvgFT(length=1): "tuned",
    FedProxFT(length=1, mu=0.5): "tuned",
    Ditto(pull=0.5): "own",
    PFedMe(): "own",
    PFedBayes(zeta=0.0, jitter=0.0): "shared",
    FedPer(): "mixed",
    FedRep(): "mixed",
    FedRoD(): "both",
    FedAH(rate=2.0): "mixed",
    FedALA(): "mixed",
    LGFedAvg(uniform=False): "mixed",
    KNNPer(neighbours=3, weight=0.5): "shared",
}


@pytest.mark.parametrize("method", TWINS, ids=lambda m: type(m).__name__)
def test_half_a_client_twice_is_the_client(method, examples):
    """Where clients weigh by their examples: once all of the first's twice, once two clients with each of them once."""
    (a, b, c), (u, v, w) = clients("different")
    kinds = ([a.repeat(2, 1), b, c], [u.repeat(2), v, w]), ([a, a, b, c], [u, u, v, w])
    scores = []
    for x, y in kinds:
        trial = examples(net(), x, y, method, training=replace(WHOLE, epochs=2), task=Classification(3))
        trial.run(3)
        scores.append(torch.stack([found[TWINS[method], "test", "loss"] for found in trial.history.scores]))
    torch.testing.assert_close(scores[0][:, [0, 0, 1, 2]], scores[1], rtol=1e-11, atol=1e-12)


def test_all_of_a_model_personal_is_local_and_said_so(examples):
    x, y = clients("different")
    with pytest.raises(UsageError, match=r"nothing is left to share: .* alone with method 'local'"):
        examples(net(), x, y, FedPer(personal=("*",)), training=MINI, task=Classification(3))
