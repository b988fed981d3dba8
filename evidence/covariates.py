"""What a covariate that is known ahead is worth: python evidence/covariates.py [--seeds 3]

Sales of 12 shops on 300 days, made so that promotions, drawn at random, decide them: the past says nothing of the next
days' promotions. Forecast 3 days ahead from 7 days by three methods at their defaults, with promotion and price as
columns that are known until now, known ahead, or left out. Prints the mean absolute error of test days for each.
"""

import argparse
import warnings

import numpy as np
import polars
from torch import nn

import kinfed
from kinfed.methods.solved.partial_pooling import PartialPooling

SHOPS, DAYS, PAST, HORIZON = 12, 300, 7, 3
BESIDE = ["price", "promotion"]
KNOWN = {"left out": {"ignore": BESIDE}, "known until now": {}, "known ahead": {"future": BESIDE}}


def sales(seed):
    """A row of each shop and day: a promotion on every fifth day or so adds 10 to 25 to what is sold."""
    draw, rows = np.random.default_rng(seed), []
    for shop in range(SHOPS):
        level, gain = draw.uniform(20, 60), draw.uniform(10, 25)
        for day in range(DAYS):
            promoted, price = draw.random() < 0.2, 5 + draw.normal()
            sold = level + gain * promoted - 3 * (price - 5) + 5 * np.sin(2 * np.pi * day / 7) + 2 * draw.normal()
            rows.append(
                (f"shop {shop}", str(np.datetime64("2024-01-01") + day), price, "yes" if promoted else "no", sold)
            )
    return polars.DataFrame(rows, schema=["shop", "day", *BESIDE, "sold"], orient="row")


def errors(seed):
    """The mean absolute error by what is known, and by method."""
    frame, errors_found = sales(seed), {}
    for inputs, how in KNOWN.items():
        federation = kinfed.from_frame(
            frame, client="shop", target="sold", time="day", past=PAST, horizon=HORIZON, seed=seed, **how
        )
        line = nn.Sequential(nn.Flatten(), nn.Linear(federation.x[0].numel(), HORIZON))
        methods = {
            "Local": (kinfed.methods.Local(), None),
            "FedAvg": (kinfed.methods.FedAvg(), None),
            "partial pooling": (PartialPooling(), line),
        }
        for name, (method, module) in methods.items():
            errors_found[inputs, name] = kinfed.fit(method, federation, module, seed=seed).score()
    return errors_found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    by_seed = [errors(seed) for seed in range(args.seeds)]
    print("mae of test days, mean over seeds (each seed)")
    for inputs, name in by_seed[0]:
        values = [errors_of_seed[inputs, name] for errors_of_seed in by_seed]
        print(f"{name:16} {inputs:16} {np.mean(values):6.2f}  ({', '.join(f'{value:.2f}' for value in values)})")


if __name__ == "__main__":
    main()
