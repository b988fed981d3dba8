"""Seconds a round on a GPU, by model, executor and precision: python benchmarks/gpu_rounds.py [--minutes 8]

FedAvg on the workloads of docs/performance.md, and ResNet-9 on W1. What is measured is kept in --keep, so the same
command again measures what is left; then the table is written into docs/performance.md.
"""

import argparse
import csv
import itertools
import statistics
import sys
import time
from pathlib import Path

import torch

from kinfed_papers.result_pages import put

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from networks import build
from workload import AHEAD, WORKLOADS, images, series

from kinfed import SGD, Federation, RunError, Training, UsageError, fit
from kinfed.core.tasks import Classification, Regression
from kinfed.errors import explain
from kinfed.files import replacing
from kinfed.methods import METHODS
from kinfed.models import MODELS
from kinfed.simulation.execution import Execution

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
ROUNDS = 4  # the first is not counted: it loads kernels
FIELDS = ("workload", "model", "executor", "precision", "seconds", "memory", "problem")


def cases(device):
    """What is measured: workload, model, executor, precision."""
    for name, w in WORKLOADS.items():
        for model in (w["model"], "resnet9") if name == "W1" else (w["model"],):
            for executor in ("fused", "vmap", "loop") if model in ("mlp", "gru") else ("vmap", "loop"):
                for precision in ("float32", "tf32") if device != "cpu" else ("float32",):
                    yield name, model, executor, precision


def federation(w):
    arrays = {name: torch.from_numpy(a) for name, a in (series(w) if w["model"] == "gru" else images(w)).items()}
    n, m, count = w["train"], w["test"], w["clients"]
    x, y = (torch.cat([arrays[f"{a}_train"].flatten(0, 1), arrays[f"{a}_test"].flatten(0, 1)]) for a in "xy")
    rows = {
        "train": list(torch.arange(count * n).split(n)),
        "validation": [torch.zeros(0, dtype=torch.int64)] * count,
        "test": list((count * n + torch.arange(count * m)).split(m)),
    }
    return Federation(x, y, rows, Regression() if w["model"] == "gru" else Classification(10, by_class=True))


def measure(name, model, executor, precision, device):
    """Seconds of a round after the first, the median, and the GPU's memory at its highest, in MiB."""
    w, ended = WORKLOADS[name], []

    def tick(history, rounds):
        if device != "cpu":
            torch.cuda.synchronize()
        ended.append(time.perf_counter())

    torch.manual_seed(0)
    if model == "gru":
        module = MODELS["gru"](tuple(w["shape"]), AHEAD)
    else:
        module = MODELS[model](tuple(w["shape"]), 10) if model == "resnet9" else build(model, w["shape"])
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    fit(
        METHODS["fedavg"](),
        federation(w),
        module,
        rounds=ROUNDS,
        training=Training(epochs=w["epochs"], batch=w["batch"], optimiser=SGD(lr=w["lr"])),
        participation=w["join"],
        execution=Execution(executor=executor, precision=precision, device=device, progress=tick),
    )
    took = statistics.median(b - a for a, b in itertools.pairwise(ended))
    return took, torch.cuda.max_memory_allocated() / 2**20 if device != "cpu" else 0.0


def read(path):
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def write(rows, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def table(rows, device):
    named = torch.cuda.get_device_name() if device != "cpu" else "a CPU"
    lines = [f"Written by `python benchmarks/gpu_rounds.py`. {named}, PyTorch {torch.__version__}.", ""]
    lines += [
        "| workload | model | executor | precision | seconds a round | MiB of the GPU |",
        "| --- " * 4 + "| ---: " * 2 + "|",
    ]
    for row in rows:
        took = row["problem"] or f"{float(row['seconds']):.3g}"
        lines.append(f"| {' | '.join(row[key] for key in FIELDS[:4])} | {took} | {float(row['memory'] or 0):.0f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no measurement after this time")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "gpu" / "rounds.csv", metavar="FILE")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=[*WORKLOADS], help="workloads")
    args = parser.parse_args()
    rows, until = read(args.keep), time.monotonic() + 60 * args.minutes
    wanted = [case for case in cases(args.device) if case[0] in args.only]
    for case in wanted:
        if tuple(case) in {tuple(row[key] for key in FIELDS[:4]) for row in rows}:
            continue
        if time.monotonic() > until:
            sys.exit(3)  # something is left
        row = dict(zip(FIELDS, case, strict=False)) | {"seconds": "", "memory": "", "problem": ""}
        try:
            name, model, executor, precision = case
            took, memory = measure(name, model, executor, precision, args.device)
            row |= {"seconds": f"{took:.4g}", "memory": f"{memory:.0f}"}
        except (UsageError, RunError) as problem:
            row["problem"] = explain(problem)[1]
        print(*case, row["seconds"] or row["problem"], flush=True)
        rows.append(row)
        write(rows, args.keep)
    put(args.page, "gpu", table(rows, args.device), "Performance")


if __name__ == "__main__":
    main()
