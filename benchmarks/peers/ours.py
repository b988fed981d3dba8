"""FedAvg in kinfed, through kinfed.fit, as a user runs it."""

import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from networks import build
from workload import AHEAD, FEW, read, ready, took, wait

import kinfed
from kinfed.core.optimiser import SGD
from kinfed.core.tasks import Classification, Regression
from kinfed.data.federation import Federation
from kinfed.models import MODELS
from kinfed.simulation.execution import Execution

sys.path.insert(0, str(Path(__file__).parents[1]))
from exact import error

warnings.simplefilter("ignore")
arrays, w = read(sys.argv[1])
n, m, shape, series = w["train"], w["test"], tuple(w["shape"]), w["model"] == "gru"
tensors = {name: torch.from_numpy(a).flatten(0, 1) for name, a in arrays.items()}


def federation(clients):
    """The first of the clients; tensors hold a client's examples one after another."""
    x, y = (torch.cat([tensors[f"{a}_train"][: clients * n], tensors[f"{a}_test"][: clients * m]]) for a in "xy")
    rows = {
        "train": list(torch.arange(clients * n).split(n)),
        "validation": [torch.zeros(0, dtype=torch.int64)] * clients,
        "test": list((clients * n + torch.arange(clients * m)).split(m)),
    }
    return Federation(x, y, rows, Regression() if series else Classification(10, by_class=True))


def turn(history, rounds):
    """Between two rounds: report the one that ended, wait for the next turn."""
    global begun
    score = history.curve(history.headline, "test", "mse" if series else "accuracy")[-1].mean()
    took(time.perf_counter() - begun, score)
    wait()
    begun = time.perf_counter()


torch.manual_seed(0)
module = MODELS["gru"](shape, AHEAD) if series else build(w["model"], shape)
training = kinfed.Training(epochs=w["epochs"], batch=w["batch"], optimiser=SGD(lr=w["lr"]))
data, few = federation(w["clients"]), federation(min(FEW, w["clients"]))
ready(error(module, few, replace(training, epochs=1)))
wait()
begun = time.perf_counter()
kinfed.fit(
    kinfed.methods.METHODS["fedavg"](),
    data,
    module,
    rounds=1000,
    training=training,
    participation=w["join"],
    execution=Execution(progress=turn),
)
