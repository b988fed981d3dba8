"""Personal models of tables under an epsilon for clients: python evidence/private_tables.py [NAME ...] --keep DIR

Tables of numbers with sixty clients or more, of those of evidence/tables.py, split as there, and `private-pooling` with
one linear layer in eight rounds: without noise, and with epsilon 8, 4, 2 and 1 for each client with all of its rows.
Beside it a ridge for each client, which needs nobody else, one of all rows, and partial pooling. What is measured is
kept in --keep, and the same command goes on; --write only writes docs/evidence/private-tables.md.
"""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tables import CLIENT, EACH, halves, parse_arguments, read, read_kept, standard

import kinfed
from kinfed.methods.solved.partial_pooling import PartialPooling
from kinfed.methods.solved.private_pooling import PrivatePooling
from kinfed.models.linear import linear
from kinfed_papers.result_pages import keep, put

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "private-tables.md"
BUDGETS, ROUNDS, SEEDS = (8, 4, 2, 1), 8, 3
CLIENTS = 60  # a table has so many at least
HEADS = (EACH, CLIENT, "partial pooling", "without noise", *(f"epsilon {budget}" for budget in BUDGETS))


def measure(name, folder):
    """Root mean squared errors over the deviation of the test rows; None of labels, or of fewer clients."""
    frame, client, target = read(name, folder)
    if frame[target].dtype.kind not in "if" or frame[client].nunique() < CLIENTS:
        return None
    train, test = halves(frame, client, target)
    truth = test[target].to_numpy()

    def error(answers):
        return float(np.sqrt(np.mean((truth - np.asarray(answers, float)) ** 2)) / truth.std(ddof=1))

    data = kinfed.from_frame(train, client=client, target=target)
    parts = zip(*(data.rows[part] for part in ("train", "validation", "test")), strict=True)
    data = replace(data, rows={**data.rows, "train": [torch.cat(part) for part in parts]})

    def solve(method, seed=0, epsilon=None):
        privacy = None if epsilon is None else kinfed.Privacy(epsilon=epsilon, unit="client")
        rounds = 100 if isinstance(method, PartialPooling) else ROUNDS
        training = kinfed.Training(privacy=privacy)
        module = linear(tuple(data.x.shape[1:]), 1)
        run = kinfed.fit(method, data, module, rounds=rounds, training=training, seed=seed)
        return error(run.predict(None, test.drop(columns=[target]))[target])

    errors = {model: error(answers) for model, answers in standard(train.copy(), test.copy(), client, target).items()}
    errors["partial pooling"], errors["without noise"] = solve(PartialPooling()), solve(PrivatePooling())
    for budget in BUDGETS:
        errors[f"epsilon {budget}"] = float(np.mean([solve(PrivatePooling(), i, budget) for i in range(SEEDS)]))
    return {"clients": int(train[client].nunique()), "rows": len(train), "inputs": data.x.shape[1], "errors": errors}


def page(measured):
    """The table: errors, and what an epsilon of 2 costs over none."""
    heads = ["table", "clients x rows", "inputs", *HEADS, "2 over no noise", "2 over alone"]
    lines = [f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * (len(heads) - 2)}"]
    ratios = []
    for name, table in measured.items():
        errors = table["errors"]
        ratios.append([errors["epsilon 2"] / errors["without noise"], errors["epsilon 2"] / errors[EACH]])
        cells = [f"{errors[head]:.3f}" for head in HEADS] + [f"{ratio:.2f}" for ratio in ratios[-1]]
        size = f"{table['clients']} x {round(table['rows'] / table['clients'])}"
        lines.append(f"| {' | '.join([name, size, str(table['inputs']), *cells])} |")
    for what, summarise in (("mean", np.mean), ("worst", np.max)):
        cells = [f"{value:.2f}" for value in summarise(ratios, axis=0)]
        lines.append(f"| {what} |{' |' * (len(heads) - 3)} {' | '.join(cells)} |")
    return "\n".join(["`python evidence/private_tables.py --tables DIR --keep DIR`.", "", *lines])


def main():
    args = parse_arguments(__doc__)
    warnings.simplefilter("ignore")
    for name in () if args.write else args.names:
        path = args.keep / f"{name}.json"
        if not path.exists():
            keep(path, measure(name, args.tables))
        print(name, path.read_text(), flush=True)
    if measured := {name: table for name, table in read_kept(args.keep).items() if table}:
        put(PAGE, "private tables", page(measured), "Tables under an epsilon for clients")


if __name__ == "__main__":
    main()
