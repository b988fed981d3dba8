"""A setting out of its bounds is refused with its name, whatever the method or part."""

import math

import pytest

from kinfed.errors import UsageError
from kinfed.methods import (
    CFL,
    SFL,
    FedAGHN,
    FedAMP,
    FedAvg,
    FedAvgFT,
    FedCedar,
    FedProx,
    FedRep,
    Panacea,
    PerFedAvg,
    PFedGAT,
    PFedHN,
    Scaffold,
)
from kinfed.methods.parts.graph_hypernetwork import GCN, MLP
from kinfed.methods.parts.heads import FullHeads
from kinfed.methods.sfl import QP
from kinfed_papers.fedaghn.ablations import Printed
from kinfed_papers.panacea.chunks import ChunkedHeads
from kinfed_papers.pfedgat.channels import Delta, Sketch, Spsa

OUTSIDE = {
    CFL: {"begin": -1, "min_size": 0, "linkage": "average", "eps1": -1.0, "eps2": -1.0, "gamma": -1.0},
    FedAGHN: {"home": -1.0, "lr": -1.0, "neighbours": -1, "feedback": "none"},
    Printed: {"sign": "ascent", "without": "r"},
    FedAMP: {"sigma": 0.0, "alpha": -1.0, "pull": -1.0, "neighbours": -1},
    FedAvg: {"noise": -0.1, "bn": "mine"},
    FedAvgFT: {"scope": "body", "epochs": -1},
    FedCedar: {"clusters": 0, "steps": -1},
    FedProx: {"noise": -0.1, "mu": -0.1},
    FedRep: {"head_epochs": -1, "base_epochs": -1},
    Panacea: {"embedding": 0, "steps": 0, "reconstruction": math.inf},
    GCN: {"layers": 0, "hidden": 0},
    MLP: {"layers": 0, "hidden": 0},
    FullHeads: {"layers": 0, "hidden": 0},
    ChunkedHeads: {"chunk": 0, "code": 0, "memory": 0, "layers": 1},
    PerFedAvg: {"alpha": -1.0, "beta": 0.0, "delta": 0.0, "adapt_steps": -1, "steps": 0, "batch": 0},
    PFedGAT: {"heads": 0, "width": 0, "sketch": -1, "lr": 0.0, "feedback": "none"},
    Sketch: {"size": 0},
    Spsa: {"probes": 0, "radius": 0.0},
    Delta: {"feedback": "held-out"},
    PFedHN: {"hidden": 0, "layers": 0, "embedding": 0, "clip": 0.0, "client_clip": 0.0, "memory": 0.0},
    Scaffold: {"option": 3, "server_lr": 0.0},
    SFL: {"steps": -1, "rho": 1.5, "pull": math.nan, "begin": "other"},
    QP: {"neighbours": 0, "beta": -0.1, "gamma": 0.0},
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_setting_out_of_its_bounds_is_refused(kind):
    for setting, value in OUTSIDE[kind].items():
        with pytest.raises(UsageError, match=rf"^{kind.__name__}\.{setting} must be "):
            kind(**{setting: value})
