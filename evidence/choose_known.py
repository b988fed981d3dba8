"""Defaults and `kinfed choose` where settings were tuned, and on traffic: python evidence/choose_known.py

The three experiments with hidden groups (`evidence/tuned`): every graph method with the settings that were
tuned there, at its defaults, and the method that `choose` finds among defaults. Traffic: the subsets of METR-LA and
PEMS-BAY in SFL's table 1, with every `--stride`-th window; methods at their defaults, and `choose`. Writes its parts
of docs/evidence/federations.md. The data sets are in `--data-dir`, or $KINFED_DATA.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

import kinfed
from kinfed.runs.config import experiment as config
from kinfed.runs.launch import launch
from kinfed.runs.run_folder import RunFolder
from kinfed.search.choice_folder import Request, choose_in
from kinfed_papers import result_pages as page

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "federations.md"
EXPERIMENTS = Path(__file__).with_name("tuned")
GROUPS = ("rotated-digits", "rotated-mnist", "cifar10-groups")
TRAFFIC = ("papers/sfl/table1/metr_la_subset", "papers/sfl/table1/pems_bay_subset")
METHODS = ("sfl", "pfedgat", "fedaghn", "fedcedar", "cfl", "fedamp")
SIMPLE = ("local", "fedavg", "fedavg-ft")


def table_of(source, seed, overrides=()):
    """The raw config of an experiment, with this seed."""
    path = EXPERIMENTS / f"{source}.toml"
    return config.read(str(path) if path.exists() else source, [f"seed={seed}", *overrides])


def ran(table, method, data_dir):
    """The test score of a method's run: the mean over clients; and seconds."""
    experiment = config.resolve({**table, "method": method})
    with tempfile.TemporaryDirectory() as place:
        begun = time.perf_counter()
        summary = launch(experiment, Path(place) / "run", data_dir=data_dir)
        return summary.scores[summary.selection.chosen]["mean"], time.perf_counter() - begun


def chosen(table, data_dir):
    """The same of `choose`, each client with the model that it keeps; and what was chosen."""
    with tempfile.TemporaryDirectory() as place:
        begun, out = time.perf_counter(), Path(place) / "choice"
        choice, summary, _ = choose_in(Request(table, out, data_dir))
        seconds = time.perf_counter() - begun
        scores = dict(zip(summary.clients.names, summary.clients.scores[summary.selection.chosen], strict=True))
        for kind, key in (("local", "keep_own_model"), ("fedavg", "keep_fedavg_model")):
            other = RunFolder(out / "beside" / kind).read_summary()
            theirs = dict(zip(other.clients.names, other.clients.scores[other.selection.chosen], strict=True))
            scores |= {name: theirs[name] for name in choice[key]}
        return float(np.mean(list(scores.values()))), seconds, choice["candidate"]


def measure(source, seeds, data_dir, overrides=()):
    """{column: [score by seed]}, {column: seconds}, what was chosen by seed."""
    scores, seconds, picks = {}, {}, []
    for seed in range(seeds):
        table = table_of(source, seed, overrides)
        plain = {key: value for key, value in table.items() if key != "methods"}
        runs = [(name, plain, name) for name in (*SIMPLE, *METHODS)]
        if source in GROUPS:
            runs += [(f"{name}, tuned", table, name) for name in METHODS]
        for column, raw, method in runs:
            score, took = ran(raw, method, data_dir)
            scores.setdefault(column, []).append(score)
            seconds[column] = seconds.get(column, 0) + took
            print(source, seed, column, f"{score:.4g} {took:.1f} s", file=sys.stderr, flush=True)
        score, took, pick = chosen(plain, data_dir)
        scores.setdefault("choose", []).append(score)
        seconds["choose"] = seconds.get("choose", 0) + took
        picks.append(pick)
        print(source, seed, "choose", pick, f"{score:.4g} {took:.1f} s", file=sys.stderr, flush=True)
    return scores, seconds, picks


def cell(values, percent):
    """Mean and standard deviation over seeds."""
    values = np.array(values) * (100 if percent else 1)
    digits = 1 if percent else 3
    return f"{values.mean():.{digits}f}" + (f" ± {values.std(ddof=1):.{digits}f}" if len(values) > 1 else "")


def lines(name, scores, seconds, picks, percent):
    """Lines of an experiment's table: a row a method."""
    tuned = any(column.endswith(", tuned") for column in scores)
    yield f"| {name} | defaults |{' tuned |' * tuned}"
    yield f"| --- | ---: |{' ---: |' * tuned}"
    for column in scores:
        if not column.endswith(", tuned"):
            cells = [cell(scores[column], percent)]
            if tuned:
                cells.append(cell(scores[f"{column}, tuned"], percent) if f"{column}, tuned" in scores else "")
            yield f"| {'**choose**' if column == 'choose' else column} | {' | '.join(cells)} |"
    times = seconds["choose"] / seconds["fedavg"]
    yield ""
    yield f"`choose` found {', '.join(picks)}, in {times:.1f} times the time of FedAvg's runs."


def main():
    """Run what is asked for and write the page's parts."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("KINFED_DATA"), help="the data sets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--stride", type=int, default=12, help="every so manieth window of a series is an example")
    parser.add_argument("--only", default="groups,traffic", help="groups, traffic or both, or experiments by name")
    args = parser.parse_args()
    names = [one for key in args.only.split(",") for one in {"groups": GROUPS, "traffic": TRAFFIC}.get(key, (key,))]
    for name in names:
        overrides = [] if name in GROUPS else [f"federation.dataset.stride={args.stride}"]
        found = measure(name, args.seeds, args.data_dir, overrides)
        short = name.rpartition("/")[2]
        command = f"python evidence/choose_known.py --seeds {args.seeds} --only {name}"
        head = (
            f"`{command}{f' --stride {args.stride}' * (name in TRAFFIC)}`, kinfed {kinfed.__version__}, PyTorch "
            f"{torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads."
        )
        part = "\n".join([head, "", *lines(short, *found, name in GROUPS)])
        page.put(PAGE, short, part, "Nine federations")
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
