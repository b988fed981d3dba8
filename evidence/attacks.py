"""Panacea's Figure 4, on data that are at hand: python evidence/attacks.py [--data digits] [--seeds 0,1,2] [--write]

Test accuracy of the honest clients by the share of attackers, for three attacks, of Panacea, Panacea-MLP, baselines of
the paper and `kin`. The paper's images, CompCars, must be requested; here are rotated digits and the points of DG-60,
with the settings in EXPERIMENTS. On the digits Panacea is given the true groups, which no other method is.

An accuracy is the mean over the clients that attack in no column, so that all columns of a row have the same clients;
the file has that over all honest clients, too. Local, whom no attack reaches, is what it is without one.

Every finished run is a row in docs/papers/attacks.csv, for each of its models, so the same command again does what is
left; a method's rows are of the settings that METHODS has, and go when these change. --write only makes the page's part
and its picture from that file. Without an attacker there is one run for all attacks.
"""

import argparse
import csv
import itertools
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from kinfed import fit
from kinfed.files import replacing
from kinfed.runs.config import experiment as config
from kinfed.simulation.attacks.poison import Poison
from kinfed_papers.plots.scores import scores_by_share
from kinfed_papers.result_pages import put, version

PAPERS = Path(__file__).parents[1] / "docs" / "papers"
PAGE, KEPT = PAPERS / "panacea-tables.md", PAPERS / "attacks.csv"
FIELDS = ("data", "attack", "share", "method", "seed", "model", "accuracy", "honest", "success", "seconds", "settings")
SHARES, NOBODY = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5), "nobody"


class Setting(NamedTuple):
    """An experiment in which all methods are attacked."""

    source: str
    common: str  # overrides
    graph: str  # an override for Panacea, which needs a graph
    attacks: tuple[str, ...]


EXPERIMENTS = {
    "digits": Setting(
        str(Path(__file__).parent / "tuned" / "rotated-digits.toml"),
        "evaluate_every=5",
        "federation.graph=oracle",
        ("poison", "label_flip", "backdoor"),
    ),
    # A third of the clients in a round makes up for a tenth of the rounds; the rate is the best of the paper's grid.
    "dg60": Setting(
        "papers/panacea/table2/dg60",
        "rounds=80 evaluate_every=20 participation=0.3333 methods.panacea.optimiser.lr=0.1",
        "",
        ("poison", "label_flip"),
    ),
}
METHODS = {  # as the picture names them: overrides, and the models that the server sends and that clients train
    "Panacea": ("method=panacea", "generated", "own"),
    "Panacea-MLP": (
        "method=panacea methods.panacea.encoder=mlp methods.panacea.reconstruction=0.0",
        "generated",
        "own",
    ),
    "pFedHN": ("method=pfedhn", "generated", "own"),
    "Ditto": ("method=ditto", "", "own"),
    "SFL": ("method=sfl", "mixed", "own"),
    "FedAvg": ("method=fedavg", "shared", ""),
    "FedAvg-FT": ("method=fedavg-ft", "", "tuned"),
    "Local": ("method=local", "own", ""),
    "kin": ("method=kin", "mixed", "own"),
}


def cells(data, shares, seeds):
    """(attack, share, method, seed) of every run, the first seed and the methods of the paper before others."""
    attacks = EXPERIMENTS[data].attacks
    for seed, share in itertools.product(seeds, shares):
        for attack, method in itertools.product(attacks if share else (NOBODY,), METHODS):
            if not share or method != "Local":  # nobody's attack reaches who trains alone
                yield attack, share, method, seed


def overrides(data, method):
    setting = EXPERIMENTS[data]
    return [
        *setting.common.split(),
        *METHODS[method][0].split(),
        *(setting.graph.split() if method == "Panacea" else ()),
    ]


def measure(data, attack, share, method, seed):
    """A row for each model of one run: test accuracies in percent, and the rate of success of a backdoor."""
    more = [] if attack == NOBODY else [f"attack.name={attack}", f"attack.share={share}"]
    experiment = config.resolve(config.read(EXPERIMENTS[data].source, [*overrides(data, method), *more]))
    federation, begun = experiment.federation(data_dir(), seed), time.process_time()
    run = fit(
        experiment.method,
        federation,
        experiment.module(federation, seed),
        rounds=experiment.rounds,
        training=experiment.training,
        participation=experiment.participation,
        seed=seed,
        attack=experiment.attack,
    )
    seconds = time.process_time() - begun
    always = ~Poison(share=max(SHARES)).attackers(federation.names, seed)
    for model, score in (run.summary.attack["scores"] if experiment.attack else run.summary.scores).items():
        numbers = {
            "accuracy": 100 * float(run.history.test(model)[always].double().mean()),
            "honest": 100 * score["mean"],
            "success": 100 * score["success"] if "success" in score else None,
            "seconds": seconds,
        }
        yield {
            **dict(zip(FIELDS, (data, attack, str(share), method, str(seed), model), strict=False)),
            **{name: "" if value is None else f"{value:.3f}" for name, value in numbers.items()},
            "settings": repr(experiment.method),
        }


def data_dir():
    return Path(os.environ["KINFED_DATA"]) if "KINFED_DATA" in os.environ else None


def read():
    if not KEPT.exists():
        return []
    with KEPT.open(newline="") as file:
        return [*csv.DictReader(file)]


def keep(rows):
    with replacing(KEPT) as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def train(names, methods, shares, seeds):
    """Do what is left, and keep each run as it ends."""
    rows = read()
    for data in names:
        settings = {name: settings_of(data, name) for name in METHODS}
        rows = [row for row in rows if row["data"] != data or settings.get(row["method"]) == row["settings"]]
        done = {(row["attack"], row["share"], row["method"], row["seed"]) for row in rows if row["data"] == data}
        for attack, share, method, seed in cells(data, shares, seeds):
            if method in methods and (attack, str(share), method, str(seed)) not in done:
                print(data, attack, share, method, seed, file=sys.stderr, flush=True)
                rows += measure(data, attack, share, method, seed)
                keep(rows)


def settings_of(data, method):
    return repr(config.resolve(config.read(EXPERIMENTS[data].source, overrides(data, method))).method)


def curve(rows, data, attack, method, model, number="accuracy"):
    """[X] means over seeds by share, and [X] their standard deviations; NaN where nothing was run."""
    means, spread = [], []
    for share in SHARES:
        attacked = share and method != "Local"
        cell = data, attack if attacked else NOBODY, str(share if attacked else 0.0), method, model
        scores = [
            float(row[number])
            for row in rows
            if (row["data"], row["attack"], row["share"], row["method"], row["model"]) == cell and row[number]
        ]
        means.append(statistics.mean(scores) if scores else np.nan)
        spread.append(statistics.stdev(scores) if len(scores) > 1 else np.nan)
    return np.array(means), np.array(spread)


def tables(rows, data):
    """Lines: for each attack a table of the models that are sent, and one of those after local training."""
    setting = EXPERIMENTS[data]
    seeds = sorted({row["seed"] for row in rows if row["data"] == data}, key=int)
    source = setting.source.removeprefix(f"{Path(__file__).parents[1]}/")
    several = "± over seeds where a cell has several"
    yield f"**{data}**: `{source}` with `{setting.common}`, seeds {', '.join(seeds)}; {several}"
    for attack in setting.attacks:
        name = attack.replace("_", " ")
        yield from table(rows, data, attack, 1, f"{name}: models as they are sent")
        yield from table(rows, data, attack, 2, f"{name}: after local training")
        if attack == "backdoor":
            yield from table(rows, data, attack, 1, "its success, models as they are sent", "success")
            yield from table(rows, data, attack, 2, "its success, after local training", "success")


def table(rows, data, attack, kind, title, number="accuracy"):
    """Lines of one table: a row a method that has this kind of model, a column a share."""
    heads = " | ".join(f"{share:.0%}" for share in SHARES)
    yield from ("", f"| {title}, % | {heads} |", "| --- |" + " ---: |" * len(SHARES))
    for method, models in METHODS.items():
        means, spread = curve(rows, data, attack, method, models[kind], number)
        if models[kind] and not np.isnan(means).all():
            yield f"| {method} | {' | '.join(map(cell, means, spread))} |"


def cell(mean, spread):
    return "" if np.isnan(mean) else f"{mean:.1f}" + ("" if np.isnan(spread) else f" ± {spread:.1f}")


def write():
    """Write the part of the page, and the picture: a panel an attack and a data set, models as they are sent."""
    rows, panels, lines = read(), {}, []
    for data, setting in EXPERIMENTS.items():
        if not any(row["data"] == data for row in rows):
            continue
        lines += [*tables(rows, data), ""]
        for attack in setting.attacks:
            sent = {
                name: curve(rows, data, attack, name, models[1] or models[2])[0] for name, models in METHODS.items()
            }
            panels[f"{data}, {attack.replace('_', ' ')}"] = sent
    scores_by_share(SHARES, panels, "test accuracy, %", PAPERS / "attacks.png")
    made = f"`python evidence/attacks.py`, {version()}; by seed in [attacks.csv](attacks.csv)."
    picture = "![Accuracy of honest clients over the share of attackers, a panel an attack and a data set](attacks.png)"
    put(PAGE, "attacks", "\n".join([made, "", picture, "", *lines]), "Tables of the Panacea paper")


def main():
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=",".join(EXPERIMENTS))
    parser.add_argument("--methods", default=",".join(METHODS), help="which, separated by commas")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of the clients that attack")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--write", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.write:
        shares = [float(share) for share in args.shares.split(",")]
        seeds = [int(seed) for seed in args.seeds.split(",")]
        train(args.data.split(","), args.methods.split(","), shares, seeds)
    write()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on with what is left")
