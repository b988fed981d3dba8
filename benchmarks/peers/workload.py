"""What every program under test trains on, and how it takes its turn; needs NumPy alone.

A workload is an .npz file: x_train: [N, n, ...], y_train: [N, n], or [N, n, H] for forecasts, x_test and y_test
likewise, and its settings. A program prints `ready` once it is set up, perhaps with how far its updates are from
float64's, and then, for each line it reads, runs one round and prints what it took.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

WORKLOADS = {  # clients, training and test examples of each, and how they train; join: the share of them in a round
    "W1": dict(clients=20, train=500, test=100, shape=(3, 32, 32), model="cnn", batch=64, epochs=5, join=1.0, lr=0.01),
    "W2 CNN": dict(
        clients=100, train=16, test=4, shape=(1, 28, 28), model="cnn", batch=16, epochs=5, join=0.3, lr=0.01
    ),
    "W2 MLP": dict(
        clients=100, train=16, test=4, shape=(1, 28, 28), model="mlp", batch=16, epochs=5, join=0.3, lr=0.05
    ),
    "W3": dict(clients=5, train=3200, test=320, shape=(12, 2), model="gru", batch=64, epochs=1, join=1.0, lr=0.01),
    "W3, 67": dict(clients=67, train=640, test=64, shape=(12, 2), model="gru", batch=64, epochs=1, join=1.0, lr=0.01),
}
CLASSES, AHEAD = 10, 12  # steps of a forecast
FEW = 7  # clients whose updates are compared with those in float64
PARAMETERS = {"W1": 878_538, "W2 CNN": 582_026, "W2 MLP": 199_210, "W3": 62_501}


def make(name, path):
    """Write a workload."""
    w = WORKLOADS[name]
    arrays = series(w) if w["model"] == "gru" else images(w)
    np.savez(path, **arrays, settings=json.dumps(w))


def images(w):
    """A picture a class and noise, each client holding more of some classes than of others."""
    draw = np.random.default_rng(0)
    prototypes = draw.normal(size=(CLASSES, *w["shape"])).astype(np.float32)
    share = draw.dirichlet(np.full(CLASSES, 0.5), size=w["clients"])
    arrays = {}
    for split in ("train", "test"):
        y = np.stack([draw.choice(CLASSES, size=w[split], p=p) for p in share]).astype(np.int64)
        noise = draw.normal(size=(*y.shape, *w["shape"])).astype(np.float32)
        arrays |= {f"x_{split}": prototypes[y] + 2 * noise, f"y_{split}": y}
    return arrays


def series(w):
    """Windows of a daily wave with noise, shifted from client to client, beside the time of day; 288 steps a day."""
    draw = np.random.default_rng(0)
    shift = draw.random((w["clients"], 1, 1))
    arrays, read = {}, w["shape"][0]
    for split in ("train", "test"):
        clock = (draw.integers(288, size=(w["clients"], w[split], 1)) + np.arange(read + AHEAD)) / 288
        value = np.sin(2 * np.pi * (clock + shift)) + 0.1 * draw.normal(size=clock.shape)
        x = np.stack([value[..., :read], clock[..., :read] % 1], -1)
        arrays |= {f"x_{split}": x.astype(np.float32), f"y_{split}": value[..., read:].astype(np.float32)}
    return arrays


def read(path):
    """The workload's arrays, and its settings as a dict."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads(str(arrays.pop("settings")))


def cohort(settings, round):
    """[K] clients of a round, the same in every program that lets itself be told."""
    count = round_half(settings["join"] * settings["clients"])
    return np.sort(np.random.default_rng(round).permutation(settings["clients"])[:count])


def round_half(value):
    return int(value + 0.5)


def wait():
    """Until the next turn; ends the program when no more come."""
    if not sys.stdin.readline():
        sys.stdout.flush()
        os._exit(0)


def took(seconds, score):
    """Report a round, and the accuracy, or mean squared error, after it."""
    # Not getrusage, whose peak a process has from the one that started it.
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))  # MiB
    print(json.dumps({"seconds": seconds, "score": float(score), "peak": peak}), flush=True)


def ready(error=None):
    print("ready" if error is None else f"ready {error}", flush=True)


def serve(round, error=None):
    """Run `round(i) -> score` once a turn."""
    ready(error)
    i = 0
    while True:
        wait()
        begun = time.perf_counter()
        score = round(i)
        took(time.perf_counter() - begun, score)
        i += 1
