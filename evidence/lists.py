"""What lists of neighbours cost where all clients need one model, and nobody is nearer than by noise.

    python evidence/lists.py

300 clients, with twelve examples each to train on, whose labels one linear map and noise decide. Each method mixes
everybody, and lists of 20. Scores are test accuracies after fifteen rounds, means over three seeds.
"""

import argparse
import warnings

import torch
from torch import nn

import kinfed
from kinfed.methods import FedAGHN, FedAMP, FedAvg, HeurFedAMP, Kin, Local, Mixture, PFedGraph
from kinfed.relations import Nearest

CLIENTS, EXAMPLES, LISTED, ROUNDS, SEEDS = 300, 30, 20, 15, 3
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


def make_federation(seed):
    """Clients of one kind: five classes by a linear map of twenty numbers."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(CLIENTS * EXAMPLES, 20, generator=draw)
    scores = x @ torch.randn(20, 5, generator=draw) + 0.5 * torch.randn(len(x), 5, generator=draw)
    return kinfed.Federation.from_arrays(
        x, scores.argmax(1), torch.arange(len(x)) % CLIENTS, split=kinfed.Split(0.2, 0.4)
    )


def score(method, seed):
    """The test accuracy of a method's main model, in percent."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    run = kinfed.fit(method, make_federation(seed), module, rounds=ROUNDS, training=TRAINING, seed=seed)
    return 100 * run.score()


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"| method | everybody | lists of {LISTED} |\n| --- | ---: | ---: |")
    for name, methods in METHODS.items():
        means = [sum(score(method, seed) for seed in range(SEEDS)) / SEEDS for method in methods]
        print(f"| `{name}` | {' | '.join(f'{mean:.1f}' for mean in means)} |{' |' * (2 - len(means))}", flush=True)


if __name__ == "__main__":
    main()
