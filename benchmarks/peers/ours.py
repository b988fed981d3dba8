"""FedAvg in kinfed, through kinfed.fit, as a user runs it."""

import sys
import time
import warnings

import torch
from networks import build
from workload import EPOCHS, read, ready, took, wait

import kinfed
from kinfed.federation import Federation
from kinfed.optimiser import SGD
from kinfed.tasks import Classification

warnings.simplefilter("ignore")
arrays, w = read(sys.argv[1])
n, m = w["train"], w["test"]
clients, shape = w["clients"], tuple(w["shape"])
x = torch.cat([torch.from_numpy(arrays[f"x_{s}"]).reshape(-1, *shape) for s in ("train", "test")])
y = torch.cat([torch.from_numpy(arrays[f"y_{s}"]).reshape(-1) for s in ("train", "test")])
rows = {
    "train": list(torch.arange(clients * n).split(n)),
    "validation": [torch.zeros(0, dtype=torch.int64)] * clients,
    "test": list((clients * n + torch.arange(clients * m)).split(m)),
}
federation = Federation(x, y, rows, Classification(10, auc=True))
torch.manual_seed(0)
begun = 0.0


def turn(history, rounds):
    """Between two rounds: report the one that ended, wait for the next turn."""
    global begun
    accuracy = history.curve(history.headline, "test", "accuracy")[-1].mean()
    took(time.perf_counter() - begun, accuracy)
    wait()
    begun = time.perf_counter()


ready()
wait()
begun = time.perf_counter()
kinfed.fit(
    kinfed.METHODS["fedavg"](),
    federation,
    build(w["model"], shape),
    rounds=1000,
    training=kinfed.Training(epochs=EPOCHS, batch=w["batch"], optimiser=SGD(lr=w["lr"])),
    participation=w["join"],
    progress=turn,
)
