"""Whose training rows should scale a table's inputs: python evidence/scaling.py [--seeds 3] [--tables DIR]

Seven made federations in the manner of shops, sensors and patients, written as CSV files and read with each `scale`;
every method at its defaults, with the default training, 20 rounds. With --tables, instead, what guessing of units costs
on the tables of evidence/tables.py. Writes docs/evidence/scaling.md.
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import numpy as np
import tables
import torch

import kinfed
from kinfed.methods.solved.partial_pooling import PartialPooling
from kinfed.models.linear import linear
from kinfed.runs.standard_models import standard_models
from kinfed_papers import result_pages as page

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "scaling.md"
METHODS = ("local", "fedavg", "fedavg-ft", "kin", "fedaghn", "fedcedar")
SCALES = ("federation", "client", "auto")
ROUNDS = 20


def shops(draw, own_level):
    """15 shops of 80 rows in three groups of customers; what is dear is so by one price for all, or by each shop's."""
    customers = np.array([[1, -1, 1], [-1, 1, 1], [1, 1, -1]])
    for shop in range(15):
        level = draw.uniform(-2, 2, 3)
        x = level + draw.normal(size=(80, 3))
        score = (x - level * own_level) @ customers[shop % 3] + 0.3 * draw.normal(size=80)
        yield shop, x * [5, 200, 0.02] + [20, 5000, 0.1], np.where(score > 0, "yes", "no")


def sensors(draw, own_unit):
    """12 sensors of 100 rows, two kinds; each reads in one unit, or with a gain and an offset of its own."""
    for sensor in range(12):
        x = draw.normal(size=(100, 3)) + draw.normal(size=3)
        y = (1 if sensor % 2 else -1) * x[:, 0] + np.sin(2 * x[:, 1]) + 0.5 * x[:, 2] + 0.2 * draw.normal(size=100)
        gain, offset = (np.exp(draw.normal(size=3)), 3 * draw.normal(size=3)) if own_unit else (1, 0)
        yield sensor, (x * gain + offset) * [1, 30, 1000], y * 7 + 40


def patients(draw, own_unit):
    """30 hospitals of 10 to 40 patients, a fifth of whom are ill; a marker means the opposite in every other one.

    A laboratory value is in one unit, or in one of two.
    """
    for hospital in range(30):
        n = int(draw.integers(10, 40))
        x = draw.normal(size=(n, 4)) + 0.3 * draw.normal(size=4)
        risk = x[:, 0] - 0.5 * x[:, 1] + 0.5 * x[:, 2] + (1.5 if hospital % 2 else -1.5) * x[:, 3]
        ill = risk + 0.5 * draw.normal(size=n) > 1.6
        x = x * [15, 20, 2e5, 0.001] + [55, 120, 1e6, 0.004]
        if own_unit and hospital % 3 == 0:
            x[:, 2] *= 0.0113
        yield hospital, x, np.where(ill, "ill", "well")


def alike(draw):
    """20 clients of 30 rows that differ in nothing."""
    for client in range(20):
        x = draw.normal(size=(30, 4))
        yield client, x * [1, 10, 100, 1000], np.where(x @ [1, -1, 0.5, 0.5] + 0.5 * draw.normal(size=30) > 0, "a", "b")


CASES = {
    "shops, one price level": lambda draw: shops(draw, False),
    "shops, each with its own level": lambda draw: shops(draw, True),
    "sensors, one unit (MAE)": lambda draw: sensors(draw, False),
    "sensors, each with its own unit (MAE)": lambda draw: sensors(draw, True),
    "patients, few rows": lambda draw: patients(draw, False),
    "patients, few rows, two units of one column": lambda draw: patients(draw, True),
    "clients that differ in nothing": alike,
}


def write(path, parts):
    """The rows of all clients as a CSV file."""
    rows = [
        f"{client},{','.join(f'{v:.6g}' for v in x)},{y}"
        for client, xs, ys in parts
        for x, y in zip(xs, ys, strict=True)
    ]
    width = rows[0].count(",") - 1
    path.write_text("\n".join([f"who,{','.join(f'x{i}' for i in range(width))},y", *rows]))


def measure(path, scale, method, seed):
    """The mean test score over clients of the models that validation chose; NaN if training diverges."""
    federation = kinfed.from_csv(path, client="who", target="y", scale=scale, seed=seed)
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(federation.x.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, federation.outputs)
    )
    try:
        run = kinfed.fit(kinfed.methods.METHODS[method](), federation, net, rounds=ROUNDS, seed=seed)
    except kinfed.RunError:
        return np.nan
    return run.score() if run.summary.metric.name == "mae" else 100 * run.score()


def table(seeds):
    """Lines of the table."""
    yield f"| case | scale | {' | '.join(METHODS)} |"
    yield f"| --- | --- |{' ---: |' * len(METHODS)}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.csv"
        for case, parts in CASES.items():
            errors = {}
            for seed in range(seeds):
                write(path, parts(np.random.default_rng(seed)))
                for scale in SCALES:
                    for method in METHODS:
                        errors.setdefault((scale, method), []).append(measure(path, scale, method, seed))
            for scale in SCALES:
                means = [float(np.mean(errors[scale, method])) for method in METHODS]
                cells = ["diverges" if np.isnan(m) else f"{m:.{2 if 'MAE' in case else 1}f}" for m in means]
                line = f"| {case} | {scale} | {' | '.join(cells)} |"
                print(line, flush=True)
                yield line


POOLING = "partial pooling"
COMPARED = ("ridge of all rows", "boosting of all rows", "ridge for each client", POOLING)


def errors_of(federation):
    """By model the root mean squared error of test rows, in standard deviations of training rows."""
    task, rows = federation.task, torch.cat(list(federation.rows["test"]))
    truth = task.standardise(federation.y[rows].double())
    answers = {model.name.removeprefix("a "): model.answers["test"] for model in standard_models(federation)[0]}
    run = kinfed.fit(PartialPooling(), federation, linear((federation.x.shape[1],), 1), rounds=ROUNDS)
    parts = zip(federation.names, federation.rows["test"], strict=True)
    answers[POOLING] = torch.cat([run.model(name)(federation.x[at]).detach() for name, at in parts if len(at)])
    return {name: float((torch.as_tensor(answers[name]).double() - truth).square().mean().sqrt()) for name in COMPARED}


def compare_on_tables(folder):
    """Lines of errors with `auto` over those with `federation`, of tables with a column that `auto` takes."""
    yield f"| table | columns | {' | '.join(COMPARED)} |"
    yield f"| --- | ---: |{' ---: |' * len(COMPARED)}"
    ratios = []
    for name in tables.NAMES:
        frame, client, target = tables.read(name, folder)
        read = [kinfed.from_frame(frame, client=client, target=target, scale=scale) for scale in ("auto", "federation")]
        columns = next(iter(read[0].scale.get("clients", {}).values()), {})
        if not columns or not isinstance(read[0].task, kinfed.Regression):
            continue
        guessed, plain = map(errors_of, read)
        ratios.append([guessed[model] / plain[model] for model in COMPARED])
        line = f"| {name} | {len(columns)} | {' | '.join(f'{ratio:.2f}' for ratio in ratios[-1])} |"
        print(line, flush=True)
        yield line
    yield f"| geometric mean | | {' | '.join(f'{ratio:.2f}' for ratio in np.exp(np.log(ratios).mean(0)))} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--tables", type=Path, metavar="DIR")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.tables is not None:
        head = "`python evidence/scaling.py --tables DIR`: errors with `auto` over errors with `federation`."
        lines, block = compare_on_tables(args.tables), "tables"
    else:
        head = f"`python evidence/scaling.py --seeds {args.seeds}`: test accuracy in %, or MAE where the case says so."
        lines, block = table(args.seeds), "figures"
    page.put(PAGE, block, "\n".join([head, "", *lines]), "Whose rows scale a table's inputs")


if __name__ == "__main__":
    main()
