"""Choose settings for rotated digits on validation data: python evidence/tune_hidden_groups.py [METHOD ...]

A method gets at most 18 settings, each on other seeds than the reported runs, 100 to 102. The score is the headline
model's mean validation accuracy at its best round; test accuracy is never looked at. The first listed setting within
one validation image of the best is chosen. Learning rate and batch, common to all methods, are those of Local: the
smallest rate (then the larger batch) whose accuracy is within one standard error of the best, 0.016 with 540 validation
images.
"""

import argparse
import itertools
import math
import warnings

import torch

from kinfed import RunError
from kinfed.runs.config import experiment as config
from kinfed.runs.fit import fit

SEEDS = (100, 101, 102)
TRAINING = {"training.optimiser.lr": [0.05, 0.1, 0.2, 0.4], "training.batch": [8, 16]}
GRID: dict[str, dict[str, list]] = {
    "local": {},
    "fedavg": {},
    "fedavg-ft": {"epochs": [1, 2, 5, 10], "scope": ["all", "head"]},
    "fedprox": {"mu": [0.001, 0.01, 0.1, 1.0]},
    "scaffold": {"server_lr": [0.5, 1.0], "option": [1, 2]},
    "fedrep": {"head_epochs": [1, 2, 5, 10], "base_epochs": [1, 2]},
    "per-fedavg": {"alpha": [0.03, 0.1, 0.3], "beta": [0.03, 0.1, 0.2], "adapt_steps": [1, 10]},
    "pfedhn": {
        "optimiser.lr": [0.003, 0.01, 0.03, 0.1, 0.3],
        "embedding": [6, 20],
        "optimiser.weight_decay": [0.0],
    },
    "panacea": {  # with the oracle graph, as the data has none
        "federation.graph": ["oracle"],
        "optimiser.name": ["adam"],
        "optimiser.lr": [0.001, 0.003, 0.01],
        "reconstruction": [0.0, 0.1, 1.0],
        "steps": [3, 10],
    },
    "cfl": {
        "eps1": [0.3, 0.5, 0.8, 1.2],
        "eps2": [0.5, 0.8, 1.2],
        "linkage": ["complete"],
        "begin": [1],
        "min_size": [2],
    },
    "sfl": {
        "structure.name": ["similarity"],
        "structure.neighbours": [3, 5, 10],
        "begin": ["own", "mixed"],
        "pull": [0.01, 0.03, 0.1],
    },
    "fedcedar": {
        "clusters": [3, 4, 5, 6, 7, 8],
        "steps": [1, 2, 3],
    },
    "fedamp": {
        "alpha": [0.5, 1.0],
        "sigma": [20.0, 40.0, 60.0],
        "pull": [0.03, 0.1, 0.3],
    },
    "fedaghn": {"sharpness": [5.0, 10.0, 20.0], "home": [0.03, 0.1, 0.3], "feedback": ["train", "held-out"]},
    "pfedgat": {"lr": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0], "feedback": ["train", "held-out"]},
}


def score(overrides):
    """Mean over the seeds of the best mean validation accuracy, the rounds that reached it, and validation images."""
    best_rounds, images = [], 0
    for seed in SEEDS:
        experiment = config.resolve(config.read(str(config.DEFAULT), overrides))
        federation = experiment.federation(None, seed)
        images += sum(map(len, federation.rows["validation"]))
        try:
            run = fit(
                experiment.method,
                federation,
                experiment.module(federation, seed),
                rounds=experiment.rounds,
                training=experiment.training,
                seed=seed,
            )
        except RunError:  # diverged
            return 0.0, [], images
        curve = run.history.curve(run.history.headline, "validation", "accuracy").mean(1)
        best_rounds.append((float(curve.max()), int(curve.argmax()) + 1))
    return sum(value for value, _ in best_rounds) / len(best_rounds), [round for _, round in best_rounds], images


def describe_tried():
    """In a sentence, how many settings each method was given: the budgets are not equal."""
    counts = {name: math.prod(map(len, values.values())) for name, values in GRID.items()}
    given = ", ".join(f"{name} {count}" for name, count in counts.items() if count > 1)
    return (
        f"**Not equally tuned.** Settings tried on validation data: {math.prod(map(len, TRAINING.values()))} of local "
        f"training with Local, which all others take over. Then {given}. The others have none."
    )


def main(names):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names or ["training", *GRID]:
        grid = (
            TRAINING
            if name == "training"
            else {k if k.startswith("federation.") else f"method.{k}": v for k, v in GRID[name].items()}
        )
        method = "local" if name == "training" else name
        results = []
        for values in itertools.product(*grid.values()):
            overrides = [f"{k}={v}" for k, v in zip(grid, values, strict=True)]
            value, rounds, images = score([f"method.name={method}", *overrides])
            results.append((value, overrides))
            print(f"{name:10s} {value:.4f} at rounds {rounds}", *overrides, flush=True)
        best = max(value for value, _ in results)
        print("BEST", name, *next(o for value, o in results if value > best - 1 / images), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", choices=[[], "training", *GRID], metavar="METHOD", help="default: all")
    main(parser.parse_args().methods)
