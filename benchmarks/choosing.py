"""Set what `auto` picks beside measurements of every executor: python benchmarks/choosing.py

What is timed is the training half of a round. Executors take turns, and of each the fastest turn counts, so that other
work on the machine decides little. The second table does so with products of matrices by either library, on one thread.
Writes docs/evidence/choosing.md. `--only MLP` prints the cases that begin so and writes nothing.
"""

import argparse
import math
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from engine import mlp, processor, wide_cnn
from torch import nn

from kinfed import SGD, Adam, Federation, Training, UsageError
from kinfed.core.model import Model
from kinfed.core.tasks import Classification, Regression
from kinfed.errors import several
from kinfed.methods import FedAvg
from kinfed.models import MODELS
from kinfed.ops.gemm import fast_gemm, objection, suits
from kinfed.simulation.auto import NAMES
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed_papers.result_pages import write_page

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "choosing.md"
SECONDS, LEAST = 4.0, 3  # for a case, and turns that it has in any case
TIE = 1.1  # times the fastest: within what least times vary by


@dataclass(frozen=True)
class Case:
    module: object  # from the shape of an example and the number of classes
    shape: tuple
    clients: int
    examples: int
    batch: int
    optimiser: object = SGD(0.01)
    precision: str = "float32"
    series: bool = False  # forecasts of 12 steps


def layers(*made):
    return lambda shape, classes: nn.Sequential(*made)


class Last(nn.Module):
    """An LSTM's last state, to classes."""

    def __init__(self, shape, classes):
        super().__init__()
        self.lstm = nn.LSTM(shape[1], 32, batch_first=True)
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


MOMENTUM = SGD(0.01, momentum=0.9)
SMALL = Case(mlp(64), (64,), 20, 54, 8)
DIGITS = Case(mlp(100), (784,), 30, 80, 16)
DEEP = Case(mlp(200, 200), (784,), 30, 80, 16)
WIDE = Case(mlp(1000, 1000), (784,), 10, 256, 64)
RNN = Case(MODELS["rnn"], (12, 2), 20, 320, 64, series=True)
GRU = Case(MODELS["gru"], (12, 2), 5, 320, 64, series=True)
LENET = Case(MODELS["cnn"], (3, 32, 32), 10, 128, 64)
CASES = {
    "linear 784-10, 200 clients": Case(MODELS["linear"], (784,), 200, 32, 16),
    "MLP 64-64-10": SMALL,
    "MLP 64-64-10, 2 clients": replace(SMALL, clients=2),
    "MLP 64-64-10, 1 client": replace(SMALL, clients=1),
    "MLP 784-100-10": DIGITS,
    "MLP 784-200-200-10": DEEP,
    "MLP 784-200-200-10, 2 clients": replace(DEEP, clients=2),
    "MLP 784-200-200-10, batch 64": replace(DEEP, clients=12, examples=256, batch=64),
    "MLP 784-1000-1000-10": WIDE,
    "RNN of width 64": RNN,
    "GRU of width 100, 5 clients": GRU,
    "GRU of width 100, 20 clients": replace(GRU, clients=20),
    "linear 784-10, 200 clients, Adam": Case(MODELS["linear"], (784,), 200, 32, 16, Adam()),
    "MLP 64-64-10, momentum": replace(SMALL, optimiser=MOMENTUM),
    "MLP 64-64-10, momentum, 4 clients": replace(SMALL, optimiser=MOMENTUM, clients=4),
    "MLP 64-64-10, momentum, 2 clients": replace(SMALL, optimiser=MOMENTUM, clients=2),
    "MLP 64-64-10, Adam": replace(SMALL, optimiser=Adam()),
    "MLP 64-64-10, bf16": replace(SMALL, precision="bf16"),
    "MLP 784-100-10, momentum": replace(DIGITS, optimiser=MOMENTUM),
    "MLP 784-100-10, momentum, 4 clients": replace(DIGITS, optimiser=MOMENTUM, clients=4),
    "MLP 784-100-10, batch 64, momentum": replace(DIGITS, optimiser=MOMENTUM, batch=64, examples=256),
    "MLP 784-100-10, bf16": replace(DIGITS, precision="bf16"),
    "MLP 784-200-200-10, momentum": replace(DEEP, optimiser=MOMENTUM),
    "MLP 784-200-200-10, bf16": replace(DEEP, precision="bf16"),
    "MLP 784-1000-1000-10, momentum": replace(WIDE, optimiser=MOMENTUM),
    "MLP with LayerNorm": Case(
        layers(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10)), (64,), 20, 54, 8
    ),
    "RNN of width 64, momentum": replace(RNN, optimiser=MOMENTUM),
    "GRU of width 100, momentum": replace(GRU, optimiser=MOMENTUM, clients=20),
    "LSTM of width 32": Case(Last, (12, 2), 20, 64, 16),
    "CNN of 8 channels 3x3": Case(
        layers(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)), (1, 8, 8), 50, 32, 8
    ),
    "LeNet-5": LENET,
    "LeNet-5, bf16": replace(LENET, precision="bf16"),
    "CNN 582k, batch 16": Case(wide_cnn, (1, 28, 28), 10, 32, 16),
    "CNN with BatchNorm": Case(MODELS["cnn-bn"], (3, 32, 32), 6, 64, 32),
}
PRODUCTS = [
    (m, k, n) for k, n in ((64, 64), (128, 128), (256, 256), (784, 200), (1600, 512)) for m in (8, 16, 32, 64, 256)
]


def federation(case):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(case.clients * (case.examples + 1), *case.shape, generator=draw)
    y = torch.randn(len(x), 12, generator=draw) if case.series else torch.arange(len(x)) % 10
    owned = torch.arange(len(x)).split(case.examples + 1)
    rows = {"train": [o[1:] for o in owned], "validation": [o[:0] for o in owned], "test": [o[:1] for o in owned]}
    return Federation(x, y, rows, Regression() if case.series else Classification(10))


def prepare_training(fleet):
    """The training half of a round, and what `auto` would say of it."""
    roster = fleet.roster()
    sent = fleet.method.send(roster, fleet.method.start(roster), roster.everyone)
    return lambda: fleet.train(0, roster.everyone, sent)


def measure(case):
    """The least seconds by executor, and the fleet that `auto` makes."""
    torch.manual_seed(0)
    data, module = federation(case), case.module(case.shape, 12 if case.series else 10)
    training = Training(epochs=1, batch=case.batch, optimiser=case.optimiser)

    def fleet(name):
        return Simulation(data, Model(module), FedAvg(), training, execution=Execution(name, precision=case.precision))

    runs = {}
    for name in NAMES:
        try:
            runs[name] = prepare_training(fleet(name))
        except UsageError:  # it cannot run this
            continue
    for run in runs.values():
        run()  # warms up
    return least(runs), fleet("auto")


def least(runs, seconds=SECONDS):
    """The least seconds of each, in turn."""
    fastest, begun, turns = dict.fromkeys(runs, float("inf")), time.perf_counter(), 0
    while turns < LEAST or time.perf_counter() - begun < seconds:
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            fastest[name] = min(fastest[name], time.perf_counter() - started)
        turns += 1
    return fastest


def measure_choices(only):
    """Rows of the first table, and how many times the fastest's time each pick takes."""
    lines, over = [], {}
    for name, case in CASES.items():
        if not name.startswith(only):
            continue
        seconds, auto = measure(case)
        best = min(seconds, key=seconds.get)
        over[name] = seconds[auto.executor] / seconds[best]
        cells = [f"{1000 * seconds[n]:.3g}" if n in seconds else "" for n in NAMES]
        verdict = "" if auto.executor == best else f"{over[name]:.2f} times {best}'s"
        work = auto.model.layout.size * min(case.batch, case.examples)
        if any(isinstance(m, nn.Conv2d) for m in auto.model.module.modules()):
            work *= math.prod(case.shape[1:])
        lines.append(f"| {name} | {case.clients} | {work:,} | {' | '.join(cells)} | {auto.executor} | {verdict} |")
        print(lines[-1], flush=True)
    return lines, over


def products():
    """Rows of the second table, and how many times the faster library's time each pick takes."""
    lines, over, before = [], {}, torch.get_num_threads()
    torch.set_num_threads(1)
    for m, k, n in PRODUCTS:
        a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)

        def run(mode, a=a, b=b, out=out):
            with fast_gemm(mode):
                for _ in range(100):
                    torch.mm(a, b, out=out)

        seconds = least({mode: lambda mode=mode: run(mode) for mode in ("off", "on")}, 0.5)
        pick = "on" if suits((m, k, n)) else "off"
        over[m, k, n] = seconds[pick] / min(seconds.values())
        times = [f"{1e4 * seconds[mode]:.3g}" for mode in ("off", "on")]
        verdict = "" if over[m, k, n] == 1 else f"{over[m, k, n]:.2f} times the other's"
        library = {"on": "oneDNN", "off": "MKL"}[pick]
        lines.append(f"| [{m}, {k}] @ [{k}, {n}] | {m * k * n:,} | {' | '.join(times)} | {library} | {verdict} |")
        print(lines[-1], flush=True)
    torch.set_num_threads(before)
    return lines, over


def summary(over):
    slow = {name: ratio for name, ratio in over.items() if ratio > TIE}
    sentence = f"In {len(over) - len(slow)} of {len(over)} cases the pick is the fastest or within {TIE - 1:.0%} of it"
    return f"{sentence}. At worst it takes {max(over.values()):.2f} times as long."


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    lines, over = measure_choices(only)
    print(summary(over))
    if only:
        return
    if objection():
        more = [f"No product goes to oneDNN on this processor: {objection()}."]
    else:
        rows, others = products()
        head = ["| product | multiplications | MKL, us | oneDNN, us | goes to | and takes |", f"|{' --- |' * 6}"]
        more = [summary(others), "", *head, *rows]
    write_page(
        PAGE,
        "\n".join(
            [
                "# What `auto` picks, and what would have been fastest",
                "",
                f"Written by `python benchmarks/choosing.py`. PyTorch {torch.__version__}, Python",
                f"{platform.python_version()}, {several(torch.get_num_threads(), 'thread')} of {processor()}.",
                "",
                "## Executors",
                "",
                "Milliseconds are of the training half of a round, the fastest of many turns. Unless a case names",
                "another, training is plain SGD in float32. *Work* is the model's parameters times the examples of",
                "a step. If these are convolved, it is also times the pixels of each. By work the rule tells a",
                "small step from a large one (`src/kinfed/simulation/auto.py`). An empty cell is an executor that",
                "cannot run the case.",
                "",
                summary(over),
                "",
                f"| case | clients | work | {' | '.join(NAMES)} | `auto` takes | and takes |",
                f"|{' --- |' * 8}",
                *lines,
                "",
                "## Products",
                "",
                "One product of float32 matrices by either library, on one thread (`src/kinfed/ops/gemm.py`).",
                "",
                *more,
                "",
            ]
        ),
    )


if __name__ == "__main__":
    main()
