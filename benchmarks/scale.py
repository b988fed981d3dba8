"""Rounds with 1,000 to 100,000 clients: seconds and memory: python benchmarks/scale.py

A client has 16 examples, drawn from one small pool, and a model of 62,006 parameters. Each case runs in a process of
its own, so that its peak of resident memory is its own. Only training rounds: an evaluation of everybody has to look at
everybody. Private states in files take 25 GB of disk while it runs. Writes its parts of docs/results/scale.md, a method
each; `--most 1000` stops at so many clients and writes nothing.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from page import put

from kinfed import SGD, Federation, Training
from kinfed.engine import sample
from kinfed.federation import Graph
from kinfed.fleet import Simulation
from kinfed.methods import METHODS
from kinfed.model import Model
from kinfed.models import MODELS
from kinfed.tasks import Classification

PAGE = Path(__file__).parents[1] / "docs" / "results" / "scale.md"
CLIENTS = (1_000, 10_000, 100_000)
COHORTS = (100, 1_000)
TRIED = {  # with what is set for many clients, and the most clients that memory has room for
    "fedavg": ({}, 100_000),
    "fedavg-ft": ({}, 100_000),
    "fedrep": ({}, 100_000),  # this and the next have private states
    "local": ({}, 100_000),
    "sfl": ({"structure": "similarity", "neighbours": 20, "sketch": 512}, 10_000),
    "pfedgat": ({"features": "sketch", "neighbours": 20}, 10_000),
    "fedaghn": ({"neighbours": 20}, 10_000),
    "fedcedar": ({}, 10_000),
    "panacea": ({"heads": "chunked"}, 10_000),
}
POOL, EACH, ROUNDS = 2_000, 16, 5


def federation(clients):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(POOL, 3, 32, 32, generator=draw)
    y = torch.randint(10, (POOL,), generator=draw)
    y[:10] = torch.arange(10)
    owned = torch.randint(POOL, (clients, EACH + 1), generator=draw)
    owned[0, :10] = torch.arange(10)
    rows = {"train": list(owned[:, :EACH]), "validation": list(owned[:, :0]), "test": list(owned[:, :1])}
    return Federation(x, y, rows, Classification(10))


def ring(clients):
    return Graph(torch.eye(clients).roll(1, 0) + torch.eye(clients).roll(-1, 0), "given")


def memory():
    """MB of resident memory, now and at its peak; that of getrusage a process has from the one that started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(status[name].split()[0]) / 1e3 for name in ("VmRSS", "VmHWM"))


def case(name, clients, cohort):
    """Seconds of a round, and MB before the first round and at the peak of all."""
    torch.manual_seed(0)
    model, training = Model(MODELS["cnn"]((3, 32, 32), 10)), Training(epochs=1, batch=16, optimiser=SGD(lr=0.01))
    method = METHODS[name](**TRIED[name][0])
    fleet = Simulation(federation(clients), model, method, training)
    roster = fleet.roster(ring(clients) if name == "panacea" else None)
    server, _ = method.start(roster), fleet.states
    before, seconds = memory()[0], []
    for round in range(ROUNDS):
        begun = time.perf_counter()
        roster = replace(roster, round=round)
        chosen = sample(roster, cohort / clients)
        _, uploads = fleet.train(round, chosen, method.send(roster, server, chosen))
        server = method.aggregate(roster, server, chosen, uploads)
        seconds.append(time.perf_counter() - begun)
    return {"seconds": statistics.median(seconds), "before": before, "peak": memory()[1]}


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("methods", nargs="*", choices=[[], *TRIED], metavar="METHOD", help="default: all")
    asked.add_argument("--case", nargs=3)
    asked.add_argument("--most", type=int, default=CLIENTS[-1])
    asked = asked.parse_args()
    if asked.case:
        name, clients, cohort = asked.case
        print(json.dumps(case(name, int(clients), int(cohort))))
        return
    machine = f"PyTorch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads."
    for name in asked.methods or TRIED:
        settings, room = TRIED[name]
        told = ", ".join(f"`{key}={value}`" for key, value in settings.items())
        lines = [
            f"## {name}",
            "",
            f"With {told}. {machine}" if told else machine,
            "",
            "| cohort | clients | seconds a round | MB before | MB more in rounds |",
            "| --- | --- | --- | --- | --- |",
        ]
        for cohort in COHORTS:
            for clients in (n for n in CLIENTS if n <= min(asked.most, room)):
                command = [sys.executable, __file__, "--case", name, str(clients), str(cohort)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found = json.loads(done.stdout)
                lines.append(
                    f"| {cohort:,} | {clients:,} | {found['seconds']:.2f} "
                    f"| {found['before']:.0f} | {found['peak'] - found['before']:.0f} |"
                )
                print(name, lines[-1], flush=True)
        if asked.most >= CLIENTS[-1]:
            put(PAGE, name, "\n".join(lines), "Rounds with many clients")


if __name__ == "__main__":
    main()
