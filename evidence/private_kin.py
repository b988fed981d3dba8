"""Hidden groups of clients under an epsilon for clients: python evidence/private_kin.py [--draws 6] [--only labels]

Clients of G groups have linear models of five columns, which differ by 0.1 within a group and by 1 between groups.
Targets have noise of 0.5, and are then divided by their deviation. `private-kin` has more centres than there are
groups, and eight rounds. The index is the adjusted Rand index of the centres to which clients belong, as these know at
home, and of their groups; errors are of 20 more rows of each client. Beside it are `private-pooling`, and a ridge of
each client's own. Labels of two classes follow: their log-odds are three times such a model, without noise of its own,
beside a logistic regression of each client's own, whose penalty is the best for the rows that are tested. Rewrites the
tables of docs/private-kin.md, the means over draws of data, noise and centres; of labels over three.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import adjusted_rand_score

import kinfed
from kinfed.methods.solved.laplace import Rows
from kinfed.methods.solved.mixed_model import Products
from kinfed.methods.solved.private_kin import PrivateKin
from kinfed.methods.solved.private_pooling import PrivatePooling, place_client
from kinfed.models.linear import linear
from kinfed_papers.result_pages import put

PAGE = Path(__file__).parents[1] / "docs" / "private-kin.md"
SETTINGS = [(60, 30, 3, 6), (120, 15, 3, 6), (120, 30, 5, 8), (300, 15, 5, 8), (300, 15, 1, 6)]  # N, rows, groups, K
LABELS = [(120, 30, 3, 6), (300, 30, 3, 6)]
BUDGETS, COLUMNS, TESTED, ROUNDS, DRAWS = (None, 8, 4, 2), 5, 20, 8, 3


def draw(clients, rows, groups, seed):
    """x: [N, rows + TESTED, COLUMNS], y: [N, rows + TESTED] and each client's group: [N]."""
    source = np.random.default_rng(seed)
    group = np.arange(clients) % groups
    weights = source.normal(size=(groups, COLUMNS))[group] + 0.1 * source.normal(size=(clients, COLUMNS))
    x = source.normal(size=(clients, rows + TESTED, COLUMNS))
    y = np.einsum("nrf,nf->nr", x, weights) + 0.5 * source.normal(size=x.shape[:2])
    return x, y / y.std(), group


def solve(x, y, rows, method, epsilon, seed, outputs):
    """A run of a method on the first rows of each client."""
    clients = len(x)
    names = np.repeat([f"client {i}" for i in range(clients)], rows)
    federation = kinfed.Federation.from_arrays(
        x[:, :rows].reshape(-1, COLUMNS), y[:, :rows].ravel(), names, split=kinfed.Split(validation=0)
    )
    federation.rows["train"] = [torch.arange(rows) + rows * i for i in range(clients)]
    privacy = None if epsilon is None else kinfed.Privacy(epsilon=epsilon, unit="client")
    how = {"rounds": ROUNDS, "seed": seed, "training": kinfed.Training(privacy=privacy)}
    return kinfed.fit(method, federation, linear((COLUMNS,), outputs).double(), **how)


def measure(x, y, group, rows, method, epsilon, seed):
    """The adjusted Rand index, and the root mean squared error of the rows that are tested."""
    clients = len(x)
    run = solve(x, y, rows, method, epsilon, seed, 1)
    theta = torch.stack([run.theta(position=i) for i in range(clients)]).numpy()
    errors = np.einsum("nrf,nf->nr", x[:, rows:], theta[:, :-1]) + theta[:, -1:] - y[:, rows:]
    server, belongs = run.final.progress.server, []
    for i in range(clients):
        table = torch.from_numpy(np.column_stack([x[i, :rows], np.ones(rows), y[i, :rows]]))
        moments = Products(table.T @ table, torch.tensor(float(rows)).double())
        placed = place_client(moments, server.centres, server.spread, server.noise)
        belongs.append(int((server.shares.log() + placed.density).argmax()))
    return adjusted_rand_score(group, belongs), float(np.sqrt(np.square(errors).mean()))


def draw_labels(clients, rows, groups, seed):
    """The same with labels 0 and 1 in y."""
    x, y, group = draw(clients, rows, groups, seed)
    source = np.random.default_rng(seed + 1000)
    weights = np.stack([np.linalg.lstsq(mine, truth, rcond=None)[0] for mine, truth in zip(x, y, strict=True)])
    chances = 1 / (1 + np.exp(-3 * np.einsum("nrf,nf->nr", x, weights)))
    return x, (source.random(chances.shape) < chances).astype(np.int64), group


def measure_labels(x, y, group, rows, method, epsilon, seed):
    """The adjusted Rand index, and the share of right answers in the rows that are tested."""
    clients = len(x)
    run = solve(x, y, rows, method, epsilon, seed, 2)
    theta = torch.stack([run.theta(position=i) for i in range(clients)])
    weight, bias = theta[:, :-2].view(clients, 2, COLUMNS).numpy(), theta[:, -2:].numpy()
    scores = np.einsum("nrf,ncf->nrc", x[:, rows:], weight) + bias[:, None]
    server, belongs = run.final.progress.server, []
    for i in range(clients):
        inputs = torch.from_numpy(np.column_stack([x[i, :rows], np.ones(rows)]))
        own_rows = Rows(inputs, torch.from_numpy(y[i, :rows]).double(), torch.ones(rows).double(), 0.0)
        placed = place_client(own_rows, server.centres, server.spread, server.noise)
        belongs.append(int((server.shares.log() + placed.density).argmax()))
    return adjusted_rand_score(group, belongs), float((scores.argmax(2) == y[:, rows:]).mean())


def measure_labels_alone(x, y, rows):
    """The share of right answers of a logistic regression of each client's own rows."""
    shares = []
    for strength in (0.1, 0.3, 1.0, 3.0, 10.0):
        right = []
        for mine, truth in zip(x, y, strict=True):
            if len(np.unique(truth[:rows])) == 1:
                right.append(truth[rows:] == truth[0])
                continue
            fitted = LogisticRegression(C=strength).fit(mine[:rows], truth[:rows])
            right.append(fitted.predict(mine[rows:]) == truth[rows:])
        shares.append(float(np.mean(right)))
    return max(shares)


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
    parser.add_argument("--only", choices=["groups", "labels"], help="write this table alone")
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    for part, settings, draws, drawn, judge, alone, what in (
        ("groups", SETTINGS, args.draws, draw, measure, measure_alone, "error"),
        ("labels", LABELS, DRAWS, draw_labels, measure_labels, measure_labels_alone, "accuracy"),
    ):
        if args.only in (None, part):
            lines = tabulate(settings, draws, drawn, judge, alone, what)
            put(PAGE, part, "\n".join([f"`python evidence/private_kin.py --draws {args.draws}`.", "", *lines]), "")


def tabulate(settings, draws, drawn, judge, measure_own, what):
    """The lines of a table."""
    heads = ["clients x rows, groups, K", "epsilon", "index", what, "`private-pooling`", "each alone"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for clients, rows, groups, centres in settings:
        federations = [drawn(clients, rows, groups, seed) for seed in range(draws)]
        alone = np.mean([measure_own(x, y, rows) for x, y, _ in federations])
        for epsilon in BUDGETS:
            kin, pooled = (
                np.mean(
                    [judge(*federation, rows, method, epsilon, seed) for seed, federation in enumerate(federations)],
                    axis=0,
                )
                for method in (PrivateKin(centres=centres), PrivatePooling())
            )
            index = f"{kin[0]:.2f}" if groups > 1 else ""
            cells = [f"{clients} x {rows}, {groups}, {centres}", f"{epsilon or 'none'}", index]
            cells += [f"{value:.3f}" for value in (kin[1], pooled[1], alone)]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    main()
