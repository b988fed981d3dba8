"""Two tables under an epsilon, split again and again: python evidence/private_splits.py --tables DIR --keep DIR

`crime`, a table of numbers, and `murders` as counts are the tables of evidence/private_tables.py in which
`private-pooling` is behind what each client learns alone. Here other quarters of their rows are held out, with a seed
of noise for each split. Of each client the losses of its held-out rows are added up, squared errors or half of
Poisson's deviance. What is measured is kept in --keep, and the same command goes on. Writes a part of
docs/evidence/private-tables.md.
"""

import json
import warnings

import numpy as np
import pandas as pd
from private_tables import PAGE, ROUNDS, choose_penalty, code_rows, lose, read_labels, regress_each, train_on_all
from tables import EACH, halves, parse_arguments, read, standard

import kinfed
from kinfed.methods.solved.private_pooling import PrivatePooling
from kinfed.models.linear import linear
from kinfed_papers.result_pages import keep, put

TABLES, BUDGETS = {"crime": False, "murders": True}, (8, 2)  # whether targets are counts
SPLITS = {"crime": 10, "murders": 4}
ALONE, FREE = "alone", "without noise"


def answer_alone(train, test, client, target, counts):
    """[n] what each client's own model says of the test rows, as in evidence/private_tables.py."""
    if not counts:
        return standard(train.copy(), test.copy(), client, target)[EACH]
    (train, test), columns, _ = code_rows(train, test, client, target, counts)

    def answer(train, test, penalty):
        return regress_each(train, test, client, columns, target, counts, penalty)

    return answer(train, test, choose_penalty(train, client, target, answer))


def measure(name, folder, seed):
    """By model, the loss that the test rows of each client add up to."""
    counts = TABLES[name]
    frame, client, target = read_labels(name, folder) if counts else read(name, folder)
    train, test = halves(frame, client, target, seed)
    truth = test[target].to_numpy()
    data = train_on_all(kinfed.from_frame(train, client=client, target=target, counts=counts))
    module = linear(tuple(data.x.shape[1:]), 1)

    def solve(epsilon):
        training = kinfed.Training(privacy=epsilon and kinfed.Privacy(epsilon=epsilon, unit="client"))
        run = kinfed.fit(PrivatePooling(), data, module, rounds=ROUNDS, training=training, seed=seed)
        return run.predict(None, test.drop(columns=[target]))[target]

    answers = {ALONE: answer_alone(train, test, client, target, counts), FREE: solve(None)}
    answers |= {f"epsilon {budget}": solve(budget) for budget in BUDGETS}
    losses = {}
    for model, answer in answers.items():
        answer = np.asarray(answer, float)
        by_row = lose(truth, answer) if counts else (truth - answer) ** 2
        losses[model] = pd.Series(by_row, test.index).groupby(test[client]).sum().to_dict()
    return losses


def compare(name, tables):
    """A line for each model: its loss over that of learning alone, over all splits, by split, and by client."""
    power, lines = 1.0 if TABLES[name] else 0.5, []  # squared errors become root mean squared ones
    splits = [pd.DataFrame(table) for table in tables]  # [N clients, models] each
    total = sum(splits)
    alone = total[ALONE].sum()
    for model in total.columns.drop(ALONE):
        by_split = [(split[model].sum() / split[ALONE].sum()) ** power for split in splits]
        rest = total.drop(index=(total[model] - total[ALONE]).abs().idxmax()).sum()
        largest = max((split[model] / split[model].sum()).max() for split in splits)
        best = sum(split[[model, ALONE]].min(axis=1).sum() for split in splits)
        ratios = [
            (total[model].sum() / alone) ** power,
            min(by_split),
            np.median(by_split),
            max(by_split),
            (rest[model] / rest[ALONE]) ** power,
        ]
        cells = [f"{ratio:.2f}" for ratio in ratios] + [f"{100 * largest:.0f}", f"{(best / alone) ** power:.2f}"]
        lines.append(f"| {name} | {len(splits)} | {model} | {' | '.join(cells)} |")
    return lines


def main():
    args = parse_arguments(__doc__)
    warnings.simplefilter("ignore")
    lines = [
        "`python evidence/private_splits.py --tables DIR --keep DIR`.",
        "",
        "| table | splits | private pooling | over alone, all splits | least | median | largest | without one client | "
        "of a split's loss at one client, at most, % | choice by test rows |",
        "| --- | ---: | --- |" + " ---: |" * 7,
    ]
    for name in TABLES:
        tables = []
        for seed in range(SPLITS[name]):
            path = args.keep / f"split-{name}-{seed}.json"
            if not path.exists() and not args.write:
                keep(path, measure(name, args.tables, seed))
                print(name, seed, flush=True)
            if path.exists():
                tables.append(json.loads(path.read_text()))
        lines += compare(name, tables) if tables else []
    put(PAGE, "private splits", "\n".join(lines), "Tables under an epsilon for clients")


if __name__ == "__main__":
    main()
