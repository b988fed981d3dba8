"""Personal boosting on tables: python evidence/boosting.py [NAME ...] --tables DIR --keep DIR

The tables, and the quarter of each client's rows that is the test, are those of evidence/tables.py. Of the other rows a
fifth of each client's chooses: how many trees, lambda from a grid, a form of partial pooling, settings of LightGBM.
Nobody is trained again on these. All get the same inputs; LightGBM also has the client, as a category. What is measured
is kept in --keep, and the same command goes on. Needs pandas and lightgbm.
"""

import argparse
import json
import math
import time
import warnings
from pathlib import Path

import lightgbm
import numpy as np
import pandas as pd
import tables
import torch

from kinfed import Execution, Federation, UsageError, fit
from kinfed.core.engine import Rounds
from kinfed.data.dataset import rows_by_owner
from kinfed.data.tables.open_table import convert_pandas, frame_of
from kinfed.data.tables.table_reader import TableReader
from kinfed.methods.solved.partial_pooling import PartialPooling
from kinfed.methods.solved.personal_boosting import PersonalBoosting
from kinfed.models.trees import trees
from kinfed.runs.config.experiment import default_model
from kinfed_papers.result_pages import keep, put, version

PAGE = Path(__file__).parents[1] / "docs" / "boosting.md"
NAMES = ("empluk", "hedonic", "fatality", "crime", "exam", "males", "cigar", "schools", "wages", "production", "demand")
NAMES += ("kinds", "males-union", "clinics", "computers", "vietnam", "cars", "california", "benefits")
TREES, DEPTH, GRID = 120, 4, (1.0, 3.0, 10.0)
ESTIMATED, CHOSEN, POOLED = "lambda estimated", "lambda from a grid", "lambda infinite"
POOLING, LIGHT, LINE = "partial pooling", "LightGBM", "best one-liner"
COLUMNS = (ESTIMATED, CHOSEN, POOLED, POOLING, LIGHT, LINE)


def make_federation(name, folder):
    """A table's federation, with its test, and the frames of both halves."""
    frame, client, target = tables.read(name, folder)
    frame = frame.reset_index(drop=True)
    train, test = tables.halves(frame, client, target)
    labels = not pd.api.types.is_numeric_dtype(frame[target])
    reader = TableReader(client=client, target=target, labels=labels)
    dataset = reader.read_frame(frame_of(convert_pandas(frame), "X"))
    is_test = torch.zeros(len(frame), dtype=torch.bool)
    is_test[torch.from_numpy(test.index.to_numpy())] = True
    rows = {"train": [], "validation": [], "test": []}
    draw = torch.Generator().manual_seed(0)
    for mine in rows_by_owner(dataset):
        others = mine[~is_test[mine]]
        others = others[torch.randperm(len(others), generator=draw)]
        count = round(len(others) / 5)
        rows["validation"].append(others[:count])
        rows["train"].append(others[count:])
        rows["test"].append(mine[is_test[mine]])
    dataset = dataset.prepare(dataset, torch.cat(rows["train"]))
    data = Federation(
        dataset.x, dataset.y, rows, dataset.task, dataset.owners, scale=dataset.scale, columns=dataset.columns
    )
    return data, (train, test, client, target)


def sum_losses(data, scores, split):
    """The mean loss of all rows of a split: squared error in deviations, or log loss."""
    counts = torch.tensor([len(mine) for mine in data.rows[split]], dtype=torch.float64)
    losses = next(values for key, values in scores.items() if key[1:] == (split, "loss"))
    return float((losses.double() * counts).sum() / counts.sum())


def train(data, method, model, rounds, every):
    """The loss on validation rows and on the test's, at the round that the former choose, and processor seconds."""
    begin = time.process_time()
    rounds = Rounds(rounds, evaluate_every=every, select_by="loss")
    history = fit(method, data, model, rounds=rounds, execution=Execution(chunk=512)).history
    losses = [(sum_losses(data, scores, "validation"), sum_losses(data, scores, "test")) for scores in history.scores]
    return *min(losses), time.process_time() - begin


def train_boosting(data, penalty):
    """As `train`, of personal boosting."""
    model = trees(tuple(data.x.shape[1:]), data.outputs, columns=data.columns, trees=TREES, depth=DEPTH)
    return train(data, PersonalBoosting(penalty=penalty), model, TREES + DEPTH + 4, 8)


def train_pooling(data):
    """As `train`, of the best form of partial pooling."""
    results = []
    for name in ("linear", "additive", "log-linear"):
        for units in ("all", "client"):
            try:
                results.append(train(data, PartialPooling(units=units), default_model(data, name), 8, 1))
            except UsageError:  # log-linear is for numbers above zero
                continue
    return *min(results)[:2], sum(result[2] for result in results)


def train_light(data):
    """As `train`, of LightGBM on all rows, which know their client."""
    begin, labels = time.process_time(), hasattr(data.task, "classes")
    client = torch.zeros(len(data.x))
    for i in range(len(data)):
        for rows in data.rows.values():
            client[rows[i]] = i
    x = torch.cat([data.x, client[:, None]], 1).numpy()
    y = data.y.numpy() if labels else data.task.standardise(data.y.double()).flatten().numpy()
    parts = {split: torch.cat(list(rows)).numpy() for split, rows in data.rows.items()}
    results = []
    for leaves in (7, 31):
        for least in (5, 20):
            kind = lightgbm.LGBMClassifier if labels else lightgbm.LGBMRegressor
            model = kind(
                n_estimators=1000,
                learning_rate=0.05,
                num_leaves=leaves,
                min_child_samples=least,
                min_data_per_group=least,
                cat_smooth=least,
                n_jobs=1,
                verbose=-1,
                random_state=0,
            )
            model.fit(
                x[parts["train"]],
                y[parts["train"]],
                eval_set=[(x[parts["validation"]], y[parts["validation"]])],
                categorical_feature=[x.shape[1] - 1],
                callbacks=[lightgbm.early_stopping(50, verbose=False)],
            )
            results.append(
                tuple(score(model, x[parts[split]], y[parts[split]], labels) for split in ("validation", "test"))
            )
    return *min(results), time.process_time() - begin


def score(model, x, y, labels):
    """The mean squared error, or log loss."""
    if not labels:
        return float(np.mean((model.predict(x) - y) ** 2))
    shares = model.predict_proba(x)
    places = np.searchsorted(model.classes_, y).clip(max=shares.shape[1] - 1)
    return float(-np.log(shares[np.arange(len(y)), places].clip(1e-6)).mean())


def measure(name, folder):
    """Losses on the test and processor seconds, by column."""
    data, halves = make_federation(name, folder)
    labels = hasattr(data.task, "classes")
    results = {ESTIMATED: train_boosting(data, None), POOLED: train_boosting(data, math.inf)}
    grid = [train_boosting(data, penalty) for penalty in GRID]
    chosen = min([results[POOLED], *grid])
    results[CHOSEN] = *chosen[:2], results[POOLED][2] + sum(result[2] for result in grid)
    results |= {POOLING: train_pooling(data), LIGHT: train_light(data)}
    truth = data.y[torch.cat(list(data.rows["test"]))].double()
    unit = 1.0 if labels else float(truth.std()) / data.task.deviation[0]
    errors = {column: loss if labels else math.sqrt(loss) / unit for column, (_, loss, _) in results.items()}
    if not labels:
        frame, test, client, target = halves
        answers = tables.standard(frame, test.copy(), client, target).values()
        wrong = [np.sqrt(np.mean((test[target].to_numpy() - np.asarray(answer, float)) ** 2)) for answer in answers]
        errors[LINE] = float(min(wrong) / test[target].std())
    seconds = {column: result[2] for column, result in results.items()}
    size = f"{len(data)} x {round(sum(map(len, data.rows['train'])) / len(data))}"
    return {"size": size, "errors": errors, "seconds": seconds, "labels": labels, "version": version()}


def write_page(results):
    """Errors by table, and processor seconds."""
    lines = ["`python evidence/boosting.py --tables DIR --keep DIR`.", ""]
    lines += [f"| table | clients x rows | {' | '.join(COLUMNS)} |", f"| --- | --- |{' ---: |' * len(COLUMNS)}"]
    for name, result in results.items():
        errors = result["errors"]
        least = min(errors.values())
        shown = [f"{errors[column]:.3f}" if column in errors else "" for column in COLUMNS]
        shown = [f"**{text}**" if text == f"{least:.3f}" else text for text in shown]
        lines.append(f"| {name}{' (log loss)' if result['labels'] else ''} | {result['size']} | {' | '.join(shown)} |")
    means = []
    for column in COLUMNS:
        ratios = [
            result["errors"][column] / result["errors"][POOLED]
            for result in results.values()
            if column in result["errors"]
        ]
        means.append(f"{np.exp(np.mean(np.log(ratios))):.3f}")
    lines.append(f"| mean, over that of an infinite lambda | | {' | '.join(means)} |")
    seconds = [sum(result["seconds"].get(column, 0) for result in results.values()) for column in COLUMNS[:-1]]
    lines.append(f"| processor seconds, all tables | | {' | '.join(f'{total:.0f}' for total in seconds)} | |")
    lines += ["", f"Measured with {', '.join(sorted({result['version'] for result in results.values()}))}."]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--tables", type=Path, default=Path("."))
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in () if args.write else args.names:
        path = args.keep / f"{name}.json"
        if not path.exists():
            keep(path, measure(name, args.tables))
        print(name, json.loads(path.read_text()), flush=True)
    paths = {name: args.keep / f"{name}.json" for name in NAMES}
    results = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    put(PAGE, "boosting", write_page(results), "Personal boosting")


if __name__ == "__main__":
    main()
