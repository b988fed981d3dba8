"""What lists of neighbours cost where all clients need one model, and where there are hidden groups.

    python evidence/lists.py

300 clients, with twelve examples each to train on, whose labels a linear map and noise decide: one map for all, or one
for each of five groups. Each method mixes everybody, and lists of 20. Scores are test accuracies after fifteen rounds,
means over three seeds.
"""

import argparse
import warnings

import torch
from torch import nn

import kinfed
from kinfed.methods import FedAGHN, FedAMP, FedAvg, HeurFedAMP, Kin, Local, Mixture, PFedGraph
from kinfed.relations import Nearest

CLIENTS, EXAMPLES, LISTED, ROUNDS, SEEDS = 300, 30, 20, 15, 3
GROUPS = {"one model": 1, "five groups": 5}
TRAINING = kinfed.Training(epochs=2, batch=8, optimiser=kinfed.SGD(lr=0.1))
SCALED = {"alpha": 0.1, "sigma": 30.0, "pull": 0.1}  # near the squared distances of these models
METHODS = {
    "fedavg": (FedAvg(),),
    "local": (Local(),),
    "kin": (Kin(), Kin(neighbours=LISTED)),
    "mixture": (Mixture(), Mixture(among=Nearest(LISTED))),
    "fedamp": (FedAMP(**SCALED), FedAMP(**SCALED, neighbours=LISTED)),
    "heurfedamp": (HeurFedAMP(), HeurFedAMP(neighbours=LISTED)),
    "pfedgraph": (PFedGraph(), PFedGraph(neighbours=LISTED)),
    "fedaghn": (FedAGHN(), FedAGHN(neighbours=LISTED)),
}


def make_federation(groups, seed):
    """Clients of so many groups: five classes by a linear map of twenty numbers."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(CLIENTS * EXAMPLES, 20, generator=draw)
    client = torch.arange(len(x)) % CLIENTS
    maps = torch.randn(groups, 20, 5, generator=draw)[client % groups]
    scores = torch.einsum("bf,bfk->bk", x, maps) + 0.5 * torch.randn(len(x), 5, generator=draw)
    return kinfed.Federation.from_arrays(x, scores.argmax(1), client, split=kinfed.Split(0.2, 0.4))


def score(method, groups, seed):
    """The test accuracy of a method's main model, in percent."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    run = kinfed.fit(method, make_federation(groups, seed), module, rounds=ROUNDS, training=TRAINING, seed=seed)
    return 100 * run.score()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    headings = ["method", *(f"{who}, {how}" for who in GROUPS for how in ("everybody", f"lists of {LISTED}"))]
    print(f"| {' | '.join(headings)} |\n| --- |{' ---: |' * (len(headings) - 1)}")
    for name in args.methods:
        cells = [name]
        for groups in GROUPS.values():
            scores = [[score(method, groups, seed) for seed in range(args.seeds)] for method in METHODS[name]]
            cells += [f"{sum(values) / len(values):.1f}" for values in scores] + [""] * (2 - len(scores))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
