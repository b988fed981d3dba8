"""What needs no network, beside the published tables: KINFED_DATA=DIR python evidence/controls.py [TABLE ...]

Of series the last value, the mean by time of day, and for each sensor a ridge on its readings, and one that is also
given the sensor's mean by time of day at the hour that it forecasts; of labels the share of the commonest one, and of
points a logistic regression for each client, whose penalty validation chooses. All are
of each client's own training rows, also of one that joins after the last round, and are scored on the rows on which the
table's methods are. Into
docs/papers/tables/TABLE-controls/table.csv, and from there into a part of the table's page, between marks.
"""

import argparse
import csv
import os
import statistics
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from kinfed.core.engine import latecomers
from kinfed.core.seeding import tags
from kinfed.core.tasks import Forecasting
from kinfed.files import replacing
from kinfed.runs.config import experiment as config
from kinfed_papers import published_table
from kinfed_papers.coverage import COMMITTED
from kinfed_papers.reproduction import MEASURES
from kinfed_papers.result_pages import put

BINS = 288  # times of day that have a mean of their own
FEATURES = 100  # an example has at most so many for a logistic regression: points, not images
STRENGTHS = (1e-3, 1.0)  # of a logistic regression, scikit-learn's C
PENALTIES = (1e-3, 1.0, 1e3)  # of a ridge, in squared deviations; validation rows choose for each sensor
FIELDS = ("column", "dataset", "setting", "method", "printed", "metric", "measured", "flags", "by_seed")


class Asked(NamedTuple):
    """Which columns of a table have what is beside them, at the scale of its runs."""

    columns: str
    beside: str  # the folder in tables/ of the runs
    scale: float = 1.0
    seeds: tuple[int, ...] = (0,)  # series are split in time, the same for all seeds; which clients join last is not


TABLES = {
    "sfl.table1": Asked("metr_la_week metr_la_subset pems08_partial pems_bay_subset", "sfl.table1"),
    "sfl.table2": Asked("cifar10/shards2 cifar10/shards5", "sfl.table2", seeds=(0, 1, 2)),
    "panacea.table2-points": Asked("fl60 dg60 tpt48", "panacea.table2-points", seeds=(0, 1, 2)),
    "panacea.table2-traffic": Asked("metr_la_subset pems_bay_subset", "panacea.table2-traffic", 0.02),
    "panacea.table3-points": Asked("fl60 dg60 tpt48", "panacea.table3-points", seeds=(0, 1, 2, 3, 4)),
    "panacea.table3-traffic": Asked("metr_la_subset pems_bay_subset", "panacea.table3-traffic", 0.02),
    "panacea.table4-traffic": Asked("metr_la_subset pems_bay_subset", "panacea.table4-traffic", 0.02),
    "fedcedar.table1": Asked("mnist/iid mnist/shards cifar10/shards", "fedcedar.table1", 0.1, (0, 1, 2)),
    "fedcedar.table2-short": Asked("mnist/shards mnist/iid", "fedcedar.table2-short", 0.1, (0, 1, 2)),
    "fedaghn.table1": Asked("cifar10/pathological cifar10/dirichlet", "fedaghn.table1", 0.025, (0, 1, 2)),
    "pfedgat.table1-cifar10": Asked(
        "cifar10/iid cifar10/pathological cifar10/dirichlet cifar10/average", "pfedgat.table1-cifar10", 0.3, (0, 1, 2)
    ),
    "pfedgat.table1-fashion": Asked(
        "fashion_mnist/iid fashion_mnist/pathological fashion_mnist/dirichlet fashion_mnist/average",
        *("pfedgat.table1-fashion", 0.1, (0, 1, 2)),
    ),
    "pfedgat.table1-cifar100-all": Asked(
        "cifar100_subset/iid cifar100_subset/pathological cifar100_subset/dirichlet cifar100_subset/average",
        *("pfedgat.table1-cifar100-all", 1.0, (0, 1, 2)),
    ),
    "pfedgat.table2-all": Asked(
        "cifar100_subset/dirichlet-0.1 cifar100_subset/dirichlet-0.3 cifar100_subset/dirichlet-0.5 "
        "cifar100_subset/average",
        *("pfedgat.table2-all", 1.0, (0, 1, 2)),
    ),
    "pfedgat.table3": Asked("cifar10/10", "pfedgat.table3", 0.2, (0, 1, 2)),
    "pfedgat.table4-all": Asked(
        "cifar100_subset/iid cifar100_subset/pathological cifar100_subset/dirichlet-0.1 cifar100_subset/dirichlet-0.3 "
        "cifar100_subset/dirichlet-0.5",
        *("pfedgat.table4-all", 1.0, (0, 1, 2)),
    ),
}


def federation(table, column, scale, seed):
    """The data of a column, as its methods are given them, and which clients the table scores."""
    protocol = published_table.load(table)
    raw = protocol.raw(protocol.rows[table.partition(".")[0]], protocol.columns[column])
    experiment = config.resolve((published_table.scale_config(raw, scale) if scale < 1 else raw) | {"seed": seed})
    data = experiment.federation(Path(os.environ["KINFED_DATA"]), seed)
    if protocol.columns[column].novel:
        return data, latecomers(seed, tags(data.names), experiment.participation.late).tolist()
    return data, range(len(data.rows["test"]))


def forecasts(data, client):
    """By name, [n, H] forecasts of a client's test windows in the readings' unit, of its own training windows alone."""
    past, ahead = data.x.shape[1], data.y.shape[1]
    x, y = {}, {}
    for split in ("train", "validation", "test"):
        rows = data.rows[split][client]
        x[split], y[split] = data.x[rows].double().numpy(), data.y[rows].double().numpy()
    readings = {split: windows[..., 0] * data.task.deviation + data.task.mean for split, windows in x.items()}
    answers = {"last value": np.repeat(readings["test"][:, -1:], ahead, 1)}
    answers["ridge on its readings"] = ridge(readings, y)
    if data.x.shape[2] > 1:  # a time of day beside each reading
        by_time = {split: times(windows[..., 1], past, ahead) for split, windows in x.items()}
        daily = means_by_time(by_time["train"], y["train"])
        usual = {split: daily[places] for split, places in by_time.items()}  # [n, H]
        answers["mean by time of day"] = usual["test"]
        answers["ridge with that mean"] = ridge(readings, y, usual)
    return answers


def times(clock, past, ahead):
    """[n, H] which time of day a window's targets have, of clock: [n, past] in [0, 1)."""
    last = np.round(clock[:, -1] * BINS).astype(int)
    return (last[:, None] + 1 + np.arange(ahead)) % BINS


def means_by_time(at, y):
    """[BINS] the mean of training targets y: [n, H] by time of day, at: [n, H]; of a time without any, of all."""
    present = ~np.isnan(y)
    count = np.bincount(at[present], minlength=BINS)
    total = np.bincount(at[present], y[present], minlength=BINS)
    return np.where(count, total / np.maximum(count, 1), y[present].mean())


def ridge(readings, y, usual=None):
    """[n, H] a ridge for each step ahead: on past readings, and perhaps the usual ones [n, H] at each target's time."""
    answers = np.zeros_like(y["test"])
    for h in range(y["test"].shape[1]):
        x = {
            s: np.hstack([past_readings] + ([usual[s][:, h : h + 1]] if usual else []))
            for s, past_readings in readings.items()
        }
        present = {split: ~np.isnan(targets[:, h]) for split, targets in y.items()}
        seen, target = x["train"][present["train"]], y["train"][present["train"], h]
        centre, scale, middle = seen.mean(0), seen.std(0) + 1e-9, target.mean()
        seen = (seen - centre) / scale
        square, product = seen.T @ seen, seen.T @ (target - middle)
        tried = []
        for penalty in PENALTIES:
            weights = np.linalg.solve(square + penalty * np.eye(len(square)), product)
            of = {s: (x[s] - centre) / scale @ weights + middle for s in ("validation", "test")}
            valid = present["validation"]
            error = np.square(of["validation"] - y["validation"][:, h])[valid].mean() if valid.any() else 0.0
            tried.append((error, of["test"]))
        answers[:, h] = min(tried, key=lambda outcome: outcome[0])[1]
    return answers


def scores(data, clients):
    """By name and test score, the mean over some clients, as the table's methods have them."""
    values_by_score = {}
    for client in clients:
        rows = data.rows["test"][client]
        if isinstance(data.task, Forecasting):
            truth = data.y[rows].double()
            for name, values in forecasts(data, client).items():
                outputs = (torch.from_numpy(values) - data.task.mean) / data.task.deviation
                of = data.task.score(outputs, truth, torch.ones(len(rows), dtype=torch.float64))
                for score, value in of.items():
                    values_by_score.setdefault((name, score), []).append(float(value))
        elif data.y.dtype.is_floating_point:
            continue
        else:
            common = data.y[data.rows["train"][client]].mode().values
            right = (data.y[rows] == common).double().mean().item()
            values_by_score.setdefault(("commonest label", "accuracy"), []).append(right)
            if data.x[0].numel() <= FEATURES:
                values_by_score.setdefault(("logistic regression", "accuracy"), []).append(logistic(data, client))
    return {key: statistics.fmean(values) for key, values in values_by_score.items()}


def logistic(data, client):
    """The test accuracy of a client's own logistic regression; validation rows choose its penalty."""
    x, y = {}, {}
    for split in ("train", "validation", "test"):
        at = data.rows[split][client]
        x[split], y[split] = data.x[at].flatten(1).double().numpy(), data.y[at].numpy()
    if len(np.unique(y["train"])) < 2:
        return float((y["test"] == y["train"][0]).mean())
    tried = []
    for strength in STRENGTHS:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=100)).fit(
            x["train"], y["train"]
        )
        right = model.score(x["validation"], y["validation"]) if len(y["validation"]) else 0.0
        tried.append((right, model.score(x["test"], y["test"])))
    return max(tried, key=lambda pair: pair[0])[1]


def rows(table, args):
    """The lines of a table.csv."""
    protocol = published_table.load(table.partition("-")[0])
    by_column = {}  # by control and score, and by seed
    for name in args.columns.split():
        column, by_seed = protocol.columns[name], {}
        applies = {f"scaled {args.scale:g}": args.scale < 1, "subset": column.subset, "control": True}
        flags = [flag for flag, is_so in applies.items() if is_so]
        for seed in [] if column.mean_of else args.seeds:
            print(table, name, "seed", seed, flush=True)
            data, clients = federation(table.partition("-")[0], name, args.scale, seed)
            for key, value in scores(data, clients).items():
                by_seed.setdefault(key, {})[seed] = value
            if isinstance(data.task, Forecasting) and not column.novel:
                break  # split in time: the same for every seed
        for key in by_column[column.mean_of[0]] if column.mean_of else ():
            parts = [by_column[part][key] for part in column.mean_of]
            by_seed[key] = {seed: statistics.fmean(part[seed] for part in parts) for seed in parts[0]}
        by_column[name] = by_seed
        for metric in protocol.metrics(column):
            measure = MEASURES[metric]
            if measure.of != "mean":
                continue
            for (control, score), values in by_seed.items():
                if score == measure.score:
                    numbers = {seed: measure.times * value for seed, value in values.items()}
                    yield {
                        "column": name,
                        "dataset": column.dataset,
                        "setting": column.setting,
                        "method": control,
                        "printed": control,
                        "metric": metric,
                        "measured": f"{statistics.fmean(numbers.values()):.6g}",
                        "flags": "; ".join(flags),
                        "by_seed": " ".join(f"{seed}:{value:.6g}" for seed, value in numbers.items()),
                    }


def read(path):
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["measured"]]


def part(table, args):
    """A table's part of its page: what needs no network, and the table's methods beside it."""
    runs = read(folder(args.beside))
    methods = {(row["printed"], row["method"]) for row in runs}
    counts = Counter(printed for printed, _ in methods)
    twice = {name for name, count in counts.items() if count > 1}
    beside = {
        (r["column"], r["metric"], f"{r['printed']} ({r['method']})" if r["printed"] in twice else r["printed"]): r[
            "measured"
        ]
        for r in runs
    }
    controls = {(r["column"], r["metric"], r["printed"]): r["measured"] for r in read(folder(f"{table}-controls"))}
    lines = []
    for metric in dict.fromkeys(metric for _, metric, _ in controls):
        columns = list(dict.fromkeys(column for column, metric_of_row, _ in controls if metric_of_row == metric))
        label = MEASURES[metric].label
        lines += [f"**{table} beside what needs no network: {label}**", ""]
        lines += [f"| {label} | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
        for numbers in (controls, beside):
            for name in dict.fromkeys(
                name for column, metric_of_row, name in numbers if metric_of_row == metric and column in columns
            ):
                values = [numbers.get((column, metric, name)) for column in columns]
                cells = [f"{float(value):.{MEASURES[metric].digits}f}" if value else "" for value in values]
                lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    caption = f"`python evidence/controls.py {table}`, then the table's methods"
    caption += f" ([by seed](tables/{table}-controls/table.csv))."
    return "\n".join([*lines, caption])


def page(table):
    """The page of a table."""
    return COMMITTED.parent / f"{table.partition('.')[0]}-tables.md"


def write(table, args):
    """Write a table's part of its page."""
    put(page(table), part_name(table), part(table, args), "")


def part_name(table):
    return f"controls: {table}"


def folder(name):
    return COMMITTED / name / "table.csv"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="*", choices=[[], *TABLES], metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--write", action="store_true", help="compute nothing, write the pages from the files")
    args = parser.parse_args()
    for table in args.table or TABLES:
        path = folder(f"{table}-controls")
        if not args.write:
            made = list(rows(table, TABLES[table]))
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as part, part.open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(made)
        write(table, TABLES[table])


if __name__ == "__main__":
    main()
