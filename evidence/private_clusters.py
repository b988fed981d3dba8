"""Hidden groups of networks under an epsilon for clients: python evidence/private_clusters.py [--seeds 3] [--only N]

Each group of clients has its own rule: random networks of eight inputs and four classes, digits or clothes turned by
quarters, or none. Networks of 32 hidden units train for 20 rounds of two epochs, 8 rows a step, SGD at rate 0.2, with
methods at their defaults, and at a clip of 1 under an epsilon. Scores are mean test accuracies after the last round, of
the model that a method names first. The index is the adjusted Rand index of clusters, as clients know at home, and of
groups. `--only` measures federations of so many clients. Adds to docs/evidence/private-clusters.json what it lacks, and
rewrites a table of docs/private-kin.md. Needs Fashion-MNIST in $KINFED_DATA.
"""

import argparse
import itertools
import json
import warnings
from pathlib import Path

import numpy as np
import torch
from federations import join_clients
from many_clients import clothes, digits
from sklearn.metrics import adjusted_rand_score
from tune_federations import networks

import kinfed
from kinfed.methods import METHODS
from kinfed_papers.result_pages import keep, put

PAGE = Path(__file__).parents[1] / "docs" / "private-kin.md"
KEPT = PAGE.parent / "evidence" / "private-clusters.json"
BUDGETS, ROUNDS = (None, 8, 4, 2), 20
UPLOADING = ("private-clusters", "ifca", "fedavg", "fedavg-ft", "fedrep")
PLAIN = ("kin", "local")  # the server of the one sees uploads, and the other uploads nothing


def turn_clothes(rng, clients, rows):
    """Clothes, turned by quarters from client to client."""
    images, labels = clothes()
    at = rng.permutation(len(images))[: clients * rows].reshape(clients, rows)
    return [
        (np.rot90(images[i].reshape(-1, 14, 14), c % 4, (1, 2)).reshape(-1, 196), labels[i]) for c, i in enumerate(at)
    ]


CASES = {  # by name: how many clients there are, groups and classes, and what makes their rows
    "digits, 4 rotations, 20 x 89": (20, 4, 10, lambda rng: digits(rng, [89] * 20, 4)),
    "digits, 4 rotations, 100 x 17": (100, 4, 10, lambda rng: digits(rng, [17] * 100, 4)),
    "networks, 3 groups, 100 x 30": (100, 3, 4, lambda rng: networks(rng, 3, 100, 30)),
    "networks, 3 groups, 300 x 30": (300, 3, 4, lambda rng: networks(rng, 3, 300, 30)),
    "networks, 1 group, 300 x 30": (300, 1, 4, lambda rng: networks(rng, 1, 300, 30)),
    "clothes, 4 rotations, 300 x 40": (300, 4, 10, lambda rng: turn_clothes(rng, 300, 40)),
    "networks, 3 groups, 1,000 x 30": (1000, 3, 4, lambda rng: networks(rng, 3, 1000, 30)),
}


def measure(case, name, epsilon, seed):
    """The mean test accuracy in percent of a method, and the index of its clusters if clients know theirs."""
    _, groups, classes, make = CASES[case]
    x, y, client = join_clients(make(np.random.default_rng(9100 + seed)))
    federation = kinfed.Federation.from_arrays(*map(torch.from_numpy, (x, y, client)))
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 32), torch.nn.ReLU(), torch.nn.Linear(32, classes))
    privacy = None if epsilon is None else kinfed.Privacy(epsilon=epsilon, unit="client")
    training = kinfed.Training(epochs=2, batch=8, optimiser=kinfed.SGD(0.2), privacy=privacy)
    rounds = kinfed.Rounds(ROUNDS, evaluate_every=ROUNDS)
    run = kinfed.fit(METHODS[name](), federation, net, rounds=rounds, training=training, seed=seed)
    score = 100 * float(run.history.scores[-1][run.history.headline, "test", "accuracy"].mean())
    share = getattr(run.final.progress.state[1], "share", None)
    index = None
    if share is not None and groups > 1:
        index = adjusted_rand_score([int(name) % groups for name in federation.names], share[:].argmax(1).tolist())
    return [round(score, 3), index]


def measure_all(seeds, clients):
    """Keep what is asked for and not yet kept."""
    for case, (count, *_) in CASES.items():
        for epsilon in BUDGETS if clients in (None, count) else ():
            for name in UPLOADING + (PLAIN if epsilon is None else ()):
                for seed in range(seeds):
                    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
                    place = f"{case}; {epsilon or 'none'}; {name}; {seed}"
                    if place not in kept:
                        result = measure(case, name, epsilon, seed)
                        kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}  # another program may have added
                        keep(KEPT, kept | {place: result})
                        print(place, result, flush=True)


def tabulate(seeds):
    """The lines of the table: of each federation and epsilon that is measured, the means over seeds."""
    kept = json.loads(KEPT.read_text())
    heads = ["federation", "epsilon", "index", *(f"`{name}`" for name in (*UPLOADING, *PLAIN))]
    lines = [f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * (len(heads) - 2)}"]
    for case, epsilon in itertools.product(CASES, BUDGETS):
        runs = {}
        for name in (*UPLOADING, *PLAIN):
            budget = "none" if name == "local" else epsilon or "none"
            places = [f"{case}; {budget}; {name}; {seed}" for seed in range(seeds)]
            runs[name] = [kept[place] for place in places if place in kept]
        if any(len(runs[name]) < seeds for name in UPLOADING):
            continue
        index = [value for _, value in runs[UPLOADING[0]] if value is not None]
        scores = [[score for score, _ in of] for of in runs.values()]
        cells = [f"{np.mean(of):.1f}" if of else "" for of in scores]
        shown = f"{np.mean(index):.2f}" if index else ""
        lines.append(f"| {' | '.join([case, str(epsilon or 'none'), shown, *cells])} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=int, help="how many clients the federations have that are measured")
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    measure_all(args.seeds, args.only)
    lines = [f"`python evidence/private_clusters.py --seeds {args.seeds}`.", "", *tabulate(args.seeds)]
    put(PAGE, "clusters", "\n".join(lines), "")


if __name__ == "__main__":
    main()
