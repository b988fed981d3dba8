"""What a protocol is worth: the same runs of pFedGAT's Table 1 under four of them, into docs/papers/protocols.md

KINFED_DATA=DIR python evidence/protocols.py [--keep DIR] [--seeds 0 1 2] [--columns NAME ...] [--methods NAME ...]

Small runs of the table's own cells: 600 images of a client, 5 rounds, and the training of the code that the paper
cites. What is finished is kept, and the same command goes on; with --write nothing is run. Every score is read from the
runs' histories; by run they are in docs/papers/protocols.csv.
"""

import argparse
import csv
import os
import statistics
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from kinfed import Execution
from kinfed.files import replacing
from kinfed.runs.config import experiment as config
from kinfed.runs.launch import Job, run_job
from kinfed.runs.run_folder import RunFolder
from kinfed_papers import published_table
from kinfed_papers.result_pages import put
from kinfed_papers.scoring import Scoring

TABLE, EXAMPLES, ROUNDS = "pfedgat.table1", 600, 5
COLUMNS = (
    *("fashion_mnist/pathological", "cifar10/pathological", "cifar10/dirichlet"),
    *("fashion_mnist/dirichlet", "cifar10/iid", "fashion_mnist/iid"),
)
METHODS = (
    "local",
    "fedavg-ft",
    "pfedgat",
    "pfedgat-without",
    "pfedgat-dynamic",
    "sfl-star",
    "cfl",
    "fedamp",
    "pfedgraph",
)
KINDS = {  # what a client receives, and what it has after local training
    "local": (None, "own"),
    "fedavg-ft": ("shared", "tuned"),
    "cfl": ("cluster", "own"),
}
USUAL = ("mixed", "own")
PROTOCOLS = {
    "received, one round": (0, "mean"),
    "trained, one round": (1, "mean"),
    "received, own best": (0, "own"),
    "better of both, own best": (None, "own"),
}
PAGE = Path(__file__).parents[1] / "docs" / "papers" / "protocols.md"


def experiment(column, method, seed):
    """The table's cell at the scale of this page."""
    table = published_table.load(TABLE)
    row = table.rows.get(method) or table.extra(method)
    small = {"seed": seed, "rounds": ROUNDS, "federation": {"split": {"examples": EXAMPLES}}}
    return config.resolve(published_table.merge_tables(table.raw(row, table.columns[column]), small))


def train(args, folder, column, method, seed):
    """Run one cell, unless it is finished."""
    run = RunFolder(folder)
    if not run.is_finished:
        job = Job(f"{method} on {column}, seed {seed}", experiment(column, method, seed), folder)
        run_job(job, Execution(workers=1, keep_state=False), args.data_dir)
        run.models.unlink(missing_ok=True)
        print(job.name, flush=True)


def scores(run, method):
    """By protocol, a finished run's accuracy in per cent, as a mean over clients; only of the models that it has."""
    pair = KINDS.get(method, USUAL)
    values = {}
    for name, (place, at) in PROTOCOLS.items():
        models = [model for model in (pair if place is None else pair[place : place + 1]) if model]
        if models:
            values[name] = 100 * float(Scoring(tuple(models[::-1]), at).read(run, "accuracy").mean())
    return values


def read(path):
    """By column and method, by protocol and seed, the committed scores."""
    by_cell = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            at = by_cell.setdefault((line["column"], line["method"]), {}).setdefault(line["protocol"], {})
            at[int(line["seed"])] = float(line["accuracy"])
    return by_cell


def table(results, column):
    """The lines of a column's table."""
    printed = published_table.load(TABLE)
    mine = {method: results[at, method] for at, method in results if at == column}
    lines = [f"**{printed.columns[column].dataset}, {printed.columns[column].setting}**", ""]
    lines += [f"| | seeds | {' | '.join(PROTOCOLS)} |", f"| --- | ---: |{' ---: |' * len(PROTOCOLS)}"]
    for method in [name for name in METHODS if name in mine]:
        row = printed.rows.get(method) or printed.extra(method)
        cells = [cell(mine[method].get(name)) for name in PROTOCOLS]
        if method == "fedavg-ft":  # its received model is FedAvg's, which that protocol's code scores at its own best
            parts = [mine[method].get(name) for name in PROTOCOLS]
            lines.append(f"| FedAvg | {len(parts[0])} | {cell(parts[0])} | | {cell(parts[2])} | {cell(parts[2])} |")
        lines.append(f"| {row.printed} | {len(next(iter(mine[method].values())))} | {' | '.join(cells)} |")
    return [*lines, ""]


def cell(by_seed):
    if not by_seed:
        return ""
    values = list(by_seed.values())
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def write(results):
    """The page's part."""
    lines = []
    for column in COLUMNS:
        if any(at == column for at, _ in results):
            lines += table(results, column)
    about = "Test accuracy, %, mean over 10 clients and seeds, ± a deviation over seeds. Clients have "
    about += f"{EXAMPLES} images each, and {ROUNDS} rounds of 5 epochs. SGD has a rate of 0.01, momentum "
    about += "0.9, weight decay 1e-5. `python evidence/protocols.py` writes the tables. [protocols.csv]"
    about += "(protocols.csv) has scores by run."
    put(PAGE, "protocols", "\n".join([*lines, about]), PAGE.stem)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, default=Path("runs") / "protocols", metavar="DIR")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("KINFED_DATA"), metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--columns", nargs="+", default=COLUMNS, choices=COLUMNS, metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="NAME")
    parser.add_argument("--write", action="store_true", help="run nothing, write the page from the finished runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = PAGE.with_suffix(".csv")
    results = read(path) if path.exists() else {}
    for seed in args.seeds:
        for column in args.columns:
            for method in args.methods:
                folder = args.keep / column / method / f"seed-{seed}"
                if not args.write:
                    train(args, folder, column, method, seed)
                if RunFolder(folder).is_finished:
                    for name, value in scores(RunFolder(folder), method).items():
                        results.setdefault((column, method), {}).setdefault(name, {})[seed] = value
    with replacing(path) as part, part.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["column", "method", "protocol", "seed", "accuracy"])
        for (column, method), by_protocol in sorted(results.items()):
            for name, by_seed in by_protocol.items():
                writer.writerows([column, method, name, seed, f"{by_seed[seed]:.4g}"] for seed in sorted(by_seed))
    write(read(path))


if __name__ == "__main__":
    main()
