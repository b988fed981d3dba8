"""Sixteen more federations of the kinds in federations.py, on which defaults are chosen.

python evidence/tune_federations.py

Prints what Local and FedAvg reach under several kinds of training, mean over federations of the test accuracy in
percent, and the mean of the better of the two, by which the library's default training was chosen. With `--methods` it
prints instead, for the library's default training, the methods' points over the better of Local and FedAvg.
"""

import argparse
import warnings

import numpy as np
from federations import X, Y, deal, join_clients, measure, planes
from sklearn.datasets import load_breast_cancer, load_wine

import kinfed
from kinfed import SGD, Adam, Training

TRAINING = [
    *(Training(2, 16, SGD(lr)) for lr in (0.01, 0.05, 0.1, 0.2)),
    Training(2, 16, SGD(0.05, momentum=0.9)),
    *(Training(2, 16, Adam(lr)) for lr in (0.001, 0.003, 0.01)),
    Training(2, 8, SGD(0.1)),
    Training(2, 32, SGD(0.1)),
    Training(5, 16, SGD(0.1)),
    Training(2, 32, Adam(0.003)),
]


def cases(seed):
    """(name, x: [n, F], y: [n], client: [n], classes) of each federation."""
    rng = np.random.default_rng(1000 + seed)
    cancer, wine = standardise(load_breast_cancer()), standardise(load_wine())
    w = rng.normal(size=(5, 10))
    yield "two groups of planes, 60 rows", *join_clients(planes(rng, 8, 60, list(w[:2]), 0.1)), 2
    yield "five groups of planes, 40 rows", *join_clients(planes(rng, 20, 40, list(w[:, :6]), 0.1)), 2
    yield "planes alike, 20 rows", *join_clients(planes(rng, 25, 20, [list(w[0, :6])], 0.2)), 2
    yield "planes all different, 50 rows", *join_clients(planes(rng, 20, 50, list(rng.normal(size=(20, 6))), 0.0)), 2
    yield "three groups of networks, 80 rows", *join_clients(networks(rng, 3, 18, 80)), 4
    yield "networks alike, 40 rows", *join_clients(networks(rng, 1, 20, 40)), 4
    order = rng.permutation(len(cancer[0]))[:480]
    yield "tumours, alike", *join_clients([rows(cancer, part) for part in np.array_split(order, 12)]), 2
    order = rng.permutation(len(cancer[0]))[:480]
    parts = [rows(cancer, part) for part in np.array_split(order, 12)]
    yield "tumours, a third flipped", *join_clients([(x, y if c % 3 else 1 - y) for c, (x, y) in enumerate(parts)]), 2
    order = rng.permutation(len(wine[0]))
    yield "wine, six clients", *join_clients([rows(wine, part) for part in np.array_split(order, 6)]), 3
    pixels = [rng.permutation(64) for _ in range(2)]
    yield "digits, two orders of pixels", *join_clients([(X[i][:, pixels[c % 2]], Y[i]) for c, i in few(rng, 16)]), 10
    yield "digits, Dirichlet 0.3", *join_clients([draw_skewed(rng, 70) for _ in range(20)]), 10
    noisy = [(X[i] + 0.05 * c * rng.normal(size=(len(i), 64)), Y[i]) for c, i in few(rng, 20)]
    yield "digits, more noise from client to client", *join_clients(noisy), 10
    angles = 2 * np.pi * np.arange(24) / 24
    ring = [[3 * np.cos(angle), 3 * np.sin(angle), 1.0] for angle in angles]
    yield "planes on a ring, 40 rows", *join_clients(planes(rng, 24, 40, ring, 0.0, 0.5)), 2
    slopes, parts = rng.normal(size=7), []
    for _ in range(100):
        x = rng.normal(size=(20, 7))
        parts.append((x, x @ slopes + 2 * rng.normal() + rng.normal(size=20) > 0))
    yield "100 persons with a level of their own", *join_clients(parts), 2
    two, parts = [w[0, :6], 0.5 * w[1, :6] - w[0, :6]], []
    for c, size in enumerate(np.geomspace(15, 220, 18).astype(int)):
        x = rng.normal(size=(size, 6))
        parts.append((x, x @ two[c % 2] + 0.3 * rng.normal(size=size) > 0))
    yield "two groups of planes, 15 to 220 rows", *join_clients(parts), 2
    names = [np.arange(10)] * 5 + [rng.permutation(10)] * 5 + [rng.permutation(10) for _ in range(5)]
    parts = [(X[i], names[c][Y[i]]) for c, i in enumerate(deal(rng, [90] * 15))]
    yield "digits, two groups of names and five alone", *join_clients(parts), 10


def standardise(table):
    """x: [n, F] of mean 0 and deviation 1, and y: [n]."""
    return (table.data - table.data.mean(0)) / table.data.std(0), table.target


def rows(table, at):
    """Some rows of (x, y)."""
    return table[0][at], table[1][at]


def few(rng, clients):
    """80 digits for each client."""
    return enumerate(deal(rng, [80] * clients))


def draw_skewed(rng, count):
    """Digits of one client whose labels are drawn from a Dirichlet distribution."""
    labels = rng.choice(10, count, p=rng.dirichlet([0.3] * 10))
    at = np.array([rng.choice(np.flatnonzero(label == Y)) for label in labels])
    return X[at], Y[at]


def networks(rng, groups, clients, count, inputs=8, classes=4, hidden=16):
    """Labels by a random network of each group of clients."""
    teachers = [(rng.normal(size=(inputs, hidden)), rng.normal(size=(hidden, classes))) for _ in range(groups)]
    parts = []
    for c in range(clients):
        first, second = teachers[c % groups]
        x = rng.normal(size=(count, inputs))
        parts.append((x, (np.tanh(x @ first) @ second + 0.3 * rng.normal(size=(count, classes))).argmax(1)))
    return parts


def means(name, training, seeds):
    """[cases] the mean over seeds of a method's accuracy; nan where a run ended without one."""
    runs = [[measure({"name": name}, case, training, seed, None) for case in cases(seed)] for seed in range(seeds)]
    return np.mean([[run.get("mean", np.nan) for run in of_seed] for of_seed in runs], 0)


def main():
    """Print what is asked for."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", default="", help="methods, separated by commas")
    args = parser.parse_args()
    if args.methods:
        best = np.fmax(*(means(name, kinfed.Training(), args.seeds) for name in ("local", "fedavg")))
        for name in args.methods.split(","):
            gains = means(name, kinfed.Training(), args.seeds) - best
            print(f"{name}: mean {gains.mean():+.1f}, worst {gains.min():+.1f}", flush=True)
        return
    for training in TRAINING:
        local, fedavg = (means(name, training, args.seeds) for name in ("local", "fedavg"))
        better = np.fmax(local, fedavg).mean()
        print(f"{training}: Local {local.mean():.1f}, FedAvg {fedavg.mean():.1f}, better {better:.1f}", flush=True)


if __name__ == "__main__":
    main()
