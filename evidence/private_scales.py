"""Scales of columns under an epsilon for clients: python evidence/private_scales.py --tables DIR --keep DIR

`private-pooling` on three tables of numbers, split as in evidence/private_tables.py, whose columns become inputs by

- exact: means and deviations of all training rows, which an epsilon does not cover;
- ranges: the middle and a quarter of a public range, the least and the largest number rounded outwards;
- wide: the same of ranges ten times as wide;
- noised: two more rounds, in which each client votes for the octave of its deviation, and then for the place of its
  mean on a grid of two such deviations. All eight rounds that follow have the noise of ten.

What is measured is kept in --keep, and the same command goes on. Writes a part of docs/evidence/private-tables.md.
"""

import json
import warnings
from dataclasses import replace
from unittest import mock

import numpy as np
import pandas as pd
from private_tables import PAGE, ROUNDS, SEEDS, train_on_all
from tables import halves, parse_arguments, read

import kinfed
from kinfed.core.private import private_sums
from kinfed.core.private.privacy import noise_for
from kinfed.data.tables.columns import Number
from kinfed.methods.solved import private_pooling
from kinfed.models.linear import linear
from kinfed_papers.result_pages import keep, put

TABLES, BUDGETS = ("exam", "chem97", "empluk"), (8, 2)
KINDS = ("exact", "ranges", "wide", "noised")
OCTAVES, PLACES, VOTES = 31, 512, 2  # on each side of 1 and of 0; rounds of votes
HEAD = "Columns' means and deviations are exact, or public, or learned by noised votes (see the head of the program)."


def find_scales(kind, rows, groups, epsilon, seed):
    """Of each column of numbers its mean and deviation."""
    if kind == "exact":
        return {name: (rows[name].mean(), rows[name].std()) for name in rows}
    if kind == "noised":
        return vote(rows, groups, epsilon, seed)
    scales = {}
    for name in rows:
        least, largest = rows[name].min(), rows[name].max()
        unit = 10 ** np.floor(np.log10(largest - least))
        low, high = np.floor(least / unit) * unit, np.ceil(largest / unit) * unit
        scales[name] = ((low + high) / 2, (high - low) / 4 * (10 if kind == "wide" else 1))
    return scales


def vote(rows, groups, epsilon, seed):
    """Means and deviations by the most votes of clients, once noise is added to the votes."""
    by_client, draw = rows.groupby(groups), np.random.default_rng(seed)
    noise = noise_for(epsilon, 1e-5, 1.0, ROUNDS + VOTES) * np.sqrt(rows.shape[1])  # a client votes once a column

    def find_most(choices, most):
        counts = np.bincount(np.clip(choices, -most, most).astype(int) + most, minlength=2 * most + 1)
        return int((counts + noise * draw.normal(size=len(counts))).argmax()) - most

    scales = {}
    for name in rows:
        means, deviations = by_client[name].mean(), by_client[name].std().dropna()
        octaves = np.round(np.log2(deviations[deviations > 0]))  # a client whose rows are all alike has no vote
        deviation = 2.0 ** find_most(octaves, OCTAVES)
        scales[name] = (2 * deviation * find_most(np.round(means / (2 * deviation)), PLACES), deviation)
    return scales


def rescale(data, scales):
    """The federation with inputs and target by other means and deviations."""
    x, names, inputs = data.x.clone(), list(data.scale["inputs"]), []
    for column in data.columns.inputs:
        if isinstance(column, Number):
            mean, deviation = scales[column.name]
            at = names.index(column.name)
            x[:, at] = ((x[:, at].double() * column.deviation + column.mean - mean) / deviation).float()
            column = replace(column, mean=mean, deviation=deviation)
        inputs.append(column)
    (target,) = data.columns.targets
    mean, deviation = map(float, scales[target.name])
    columns = replace(data.columns, inputs=tuple(inputs), targets=(replace(target, mean=mean, deviation=deviation),))
    return replace(data, x=x, columns=columns, task=replace(data.task, mean=(mean,), deviation=(deviation,)))


def measure(name, folder):
    """By epsilon and kind, root mean squared errors over the deviation of the test rows: means of seeds."""
    frame, client, target = read(name, folder)
    train, test = halves(frame, client, target)
    truth, data = test[target].to_numpy(), train_on_all(kinfed.from_frame(train, client=client, target=target))
    rows = train[[name for name in train if name != client and pd.api.types.is_numeric_dtype(train[name])]]

    def solve(kind, epsilon, seed):
        scaled = rescale(data, find_scales(kind, rows, train[client], epsilon, seed))
        training = kinfed.Training(privacy=kinfed.Privacy(epsilon=epsilon, unit="client"))
        module, votes = linear(tuple(data.x.shape[1:]), 1), VOTES if kind == "noised" else 0

        def find_noise(privacy, rounds):
            return noise_for(privacy.limit, privacy.delta, 1.0, rounds + votes)

        in_sums = mock.patch.object(private_sums, "find_noise", find_noise)
        in_steps = mock.patch.object(private_pooling, "find_noise", find_noise)
        with in_sums, in_steps:
            method = private_pooling.PrivatePooling()
            run = kinfed.fit(method, scaled, module, rounds=ROUNDS, training=training, seed=seed)
        answers = np.asarray(run.predict(None, test.drop(columns=[target]))[target], float)
        return float(np.sqrt(np.mean((truth - answers) ** 2)) / truth.std(ddof=1))

    return {
        f"{epsilon} {kind}": float(np.mean([solve(kind, epsilon, seed) for seed in range(SEEDS)]))
        for epsilon in BUDGETS
        for kind in KINDS
    }


def page(measured):
    """The table of errors."""
    lines = [f"| table | epsilon | {' | '.join(KINDS)} |", f"| --- | ---: |{' ---: |' * len(KINDS)}"]
    for name, errors in measured.items():
        for epsilon in BUDGETS:
            cells = " | ".join(f"{errors[f'{epsilon} {kind}']:.3f}" for kind in KINDS)
            lines.append(f"| {name} | {epsilon} | {cells} |")
    return "\n".join(["`python evidence/private_scales.py --tables DIR --keep DIR`.", "", HEAD, "", *lines])


def main():
    args = parse_arguments(__doc__)
    warnings.simplefilter("ignore")
    paths = {name: args.keep / f"scales-{name}.json" for name in TABLES}
    for name, path in () if args.write else paths.items():
        if not path.exists():
            keep(path, measure(name, args.tables))
        print(name, path.read_text(), flush=True)
    measured = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    put(PAGE, "private scales", page(measured), "Tables under an epsilon for clients")


if __name__ == "__main__":
    main()
