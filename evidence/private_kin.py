"""Hidden groups of clients under an epsilon for clients: python evidence/private_kin.py [--draws 6]

Clients of G groups have linear models of five columns, which differ by 0.1 within a group and by 1 between groups.
Targets have noise of 0.5, and are then divided by their deviation. `private-kin` has more centres than there are
groups, and eight rounds. The index is the adjusted Rand index of the centres to which clients belong, as these know at
home, and of their groups; errors are of 20 more rows of each client. Beside it are `private-pooling`, and a ridge of
each client's own. Rewrites the table of docs/private-kin.md, the means over draws of data, noise and centres.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import RidgeCV
from sklearn.metrics import adjusted_rand_score

import kinfed
from kinfed.methods.solved.mixed_model import Products
from kinfed.methods.solved.private_kin import PrivateKin
from kinfed.methods.solved.private_pooling import PrivatePooling, place_client
from kinfed.models.linear import linear
from kinfed_papers.result_pages import put

PAGE = Path(__file__).parents[1] / "docs" / "private-kin.md"
SETTINGS = [(60, 30, 3, 6), (120, 15, 3, 6), (120, 30, 5, 8), (300, 15, 5, 8), (300, 15, 1, 6)]  # N, rows, groups, K
BUDGETS, COLUMNS, TESTED, ROUNDS = (None, 8, 4, 2), 5, 20, 8


def draw(clients, rows, groups, seed):
    """x: [N, rows + TESTED, COLUMNS], y: [N, rows + TESTED] and each client's group: [N]."""
    source = np.random.default_rng(seed)
    group = np.arange(clients) % groups
    weights = source.normal(size=(groups, COLUMNS))[group] + 0.1 * source.normal(size=(clients, COLUMNS))
    x = source.normal(size=(clients, rows + TESTED, COLUMNS))
    y = np.einsum("nrf,nf->nr", x, weights) + 0.5 * source.normal(size=x.shape[:2])
    return x, y / y.std(), group


def measure(x, y, group, rows, method, epsilon, seed):
    """The adjusted Rand index, and the root mean squared error of the rows that are tested."""
    clients = len(x)
    names = np.repeat([f"client {i}" for i in range(clients)], rows)
    federation = kinfed.Federation.from_arrays(
        x[:, :rows].reshape(-1, COLUMNS), y[:, :rows].ravel(), names, split=kinfed.Split(validation=0)
    )
    federation.rows["train"] = [torch.arange(rows) + rows * i for i in range(clients)]
    privacy = None if epsilon is None else kinfed.Privacy(epsilon=epsilon, unit="client")
    how = {"rounds": ROUNDS, "seed": seed, "training": kinfed.Training(privacy=privacy)}
    run = kinfed.fit(method, federation, linear((COLUMNS,), 1).double(), **how)
    theta = torch.stack([run.theta(position=i) for i in range(clients)]).numpy()
    errors = np.einsum("nrf,nf->nr", x[:, rows:], theta[:, :-1]) + theta[:, -1:] - y[:, rows:]
    server, belongs = run.final.progress.server, []
    for i in range(clients):
        table = torch.from_numpy(np.column_stack([x[i, :rows], np.ones(rows), y[i, :rows]]))
        moments = Products(table.T @ table, torch.tensor(float(rows)).double())
        placed = place_client(moments, server.centres, server.spread, server.noise)
        belongs.append(int((server.shares.log() + placed.density).argmax()))
    return adjusted_rand_score(group, belongs), float(np.sqrt(np.square(errors).mean()))


def measure_alone(x, y, rows):
    """The error of a ridge of each client's own rows."""
    errors = []
    for mine, truth in zip(x, y, strict=True):
        ridge = RidgeCV(np.logspace(-3, 3, 13)).fit(mine[:rows], truth[:rows])
        errors.append(ridge.predict(mine[rows:]) - truth[rows:])
    return float(np.sqrt(np.square(errors).mean()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=6)
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    heads = ["clients x rows, groups, K", "epsilon", "index", "error", "`private-pooling`", "each alone"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for clients, rows, groups, centres in SETTINGS:
        federations = [draw(clients, rows, groups, seed) for seed in range(args.draws)]
        alone = np.mean([measure_alone(x, y, rows) for x, y, _ in federations])
        for epsilon in BUDGETS:
            kin, pooled = (
                np.mean(
                    [measure(*federation, rows, method, epsilon, seed) for seed, federation in enumerate(federations)],
                    axis=0,
                )
                for method in (PrivateKin(centres=centres), PrivatePooling())
            )
            index = f"{kin[0]:.2f}" if groups > 1 else ""
            cells = [f"{clients} x {rows}, {groups}, {centres}", f"{epsilon or 'none'}", index]
            cells += [f"{error:.3f}" for error in (kin[1], pooled[1], alone)]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    put(PAGE, "groups", "\n".join([f"`python evidence/private_kin.py --draws {args.draws}`.", "", *lines]), "")


if __name__ == "__main__":
    main()
