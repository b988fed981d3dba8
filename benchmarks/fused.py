"""Time local training in fused form against a plain PyTorch loop and other executors: python benchmarks/fused.py

What is timed is the training half of a round, nothing else. Programs take turns, and those beside which something else
ran on the machine are dropped, see `Clock` in engine.py. Writes docs/evidence/fused.md.

`--loaded` keeps disturbed turns and writes nothing; `--only W2` runs the workloads that begin so and leaves the rest of
the page.
"""

import argparse
import copy
import platform
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from engine import Clock, local, mlp, on_one_thread, processor, sections
from exact import error
from torch.utils._python_dispatch import TorchDispatchMode

from kinfed import Federation
from kinfed.core.model import Model
from kinfed.core.tasks import Classification, Regression
from kinfed.errors import several
from kinfed.methods import FedAvg
from kinfed.models import MODELS
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed.simulation.workers import threads
from kinfed_papers.result_pages import write_page

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "fused.md"


@dataclass(frozen=True)
class Workload:
    module: object
    shape: tuple
    outputs: int
    clients: int
    examples: int
    batch: int
    epochs: int = 1
    series: bool = False
    vmap: bool = True


WORKLOADS = {
    "W2: MLP 784-200-200-10": Workload(mlp(200, 200), (1, 28, 28), 10, 30, 16, 16, 5),
    "MLP 784-200-200-10, more examples": Workload(mlp(200, 200), (1, 28, 28), 10, 20, 160, 16, 2),
    "MLP 784-200-200-10, batch 64": Workload(mlp(200, 200), (1, 28, 28), 10, 12, 512, 64),
    "MLP 64-64-10": Workload(mlp(64), (64,), 10, 20, 54, 8, 2),
    "RNN of width 64": Workload(MODELS["rnn"], (12, 2), 12, 20, 640, 64, series=True),
    "W3: GRU, 5 clients": Workload(MODELS["gru"], (12, 2), 12, 5, 3200, 64, series=True),
    "W3: GRU, 67 clients": Workload(MODELS["gru"], (12, 2), 12, 67, 640, 64, series=True, vmap=False),
}


def federation(load):
    draw = torch.Generator().manual_seed(0)
    n = load.clients * (load.examples + 1)
    x = torch.rand(n, *load.shape, generator=draw) if load.series else torch.randn(n, *load.shape, generator=draw)
    y = torch.randn(n, load.outputs, generator=draw) if load.series else torch.arange(n) % load.outputs
    owned = torch.arange(n).split(load.examples + 1)
    rows = {"train": [o[1:] for o in owned], "validation": [o[:0] for o in owned], "test": [o[:1] for o in owned]}
    return Federation(x, y, rows, Regression() if load.series else Classification(load.outputs))


def plain(load, module, data):
    """Client by client, as anyone would write it."""
    initial = copy.deepcopy(module.state_dict())
    loss = F.mse_loss if load.series else F.cross_entropy

    def run():
        for rows in data.rows["train"]:
            module.load_state_dict(initial)
            optimiser = torch.optim.SGD(module.parameters(), lr=0.01)
            for _ in range(load.epochs):
                for part in rows[torch.randperm(len(rows))].split(load.batch):
                    optimiser.zero_grad()
                    loss(module(data.x[part]), data.y[part]).backward()
                    optimiser.step()

    return run


def prepare_fleet(load, module, data, **how):
    """The same by a fleet."""
    fleet = Simulation(data, Model(copy.deepcopy(module)), FedAvg(), local(load), execution=Execution(**how))
    roster = fleet.roster()
    sent = fleet.method.send(roster, fleet.method.start(roster), roster.everyone)
    return lambda: fleet.train(0, roster.everyone, sent)[1].theta


class Shares(TorchDispatchMode):
    """Sums the seconds of operations by what they do: products, arithmetic, and moving numbers about."""

    PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
    MOVES = ("copy", "clone", "index", "cat", "fill", "zero", "scatter")

    def __init__(self):
        super().__init__()
        self.seconds, self.flops = defaultdict(float), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        begun = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        kind = "moves" if name.startswith(self.MOVES) else "arithmetic"
        kind = "products" if name in self.PRODUCTS else kind
        self.seconds[kind] += time.perf_counter() - begun
        if kind == "products":
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[-1]
        return out


def shares(run):
    """Where one worker's time goes, and what its products would take at the rate of a large one."""
    matrix, seconds, rate = torch.randn(1024, 1024), defaultdict(lambda: float("inf")), 0.0
    for _ in range(5):
        begun = time.perf_counter()
        run()
        seconds["all"] = min(seconds["all"], time.perf_counter() - begun)
        with Shares() as seen:
            run()
        for kind, s in seen.seconds.items():
            seconds[kind] = min(seconds[kind], s)
        begun = time.perf_counter()
        torch.mm(matrix, matrix)
        rate = max(rate, 2 * 1024**3 / (time.perf_counter() - begun))
    total = seconds.pop("all")
    seconds["between operations"] = max(0.0, total - sum(seconds.values()))
    listed = ", ".join(f"{100 * s / total:.0f} % {kind}" for kind, s in seconds.items())
    return (
        f"Of one worker's time: {listed}. A large product runs at {rate / 1e9:.0f} GFLOP/s on one thread. At that rate "
        f"the products alone would take {100 * seen.flops / rate / total:.0f} % of it."
    )


def measure(name, load, args):
    """The lines of one workload."""
    torch.manual_seed(0)
    module, data = load.module(load.shape, load.outputs), federation(load)
    hows = {"loop": {"executor": "loop"}, "fused, one worker": {"executor": "fused", "workers": 1}}
    hows |= {"fused": {"executor": "fused"}}
    if load.vmap:
        hows |= {"vmap": {"executor": "vmap"}}
    programs = {"plain": plain(load, copy.deepcopy(module), data)}
    programs |= {n: prepare_fleet(load, module, data, **how) for n, how in hows.items()}
    programs["plain, one thread"] = on_one_thread(programs["plain"], onednn=False)
    clock = Clock(programs, args.loaded)
    clock.run()
    base = min(("plain", "plain, one thread"), key=clock.seconds)
    steps = load.clients * load.epochs * -(-load.examples // load.batch)
    parameters = sum(p.numel() for p in module.parameters())
    lines = [
        f"### {name}",
        "",
        f"{parameters:,} parameters, {load.clients} clients x {load.examples}, batch {load.batch}, "
        f"{several(load.epochs, 'epoch')}: {steps} steps.",
        "",
        "Compared with the faster of the plain loops:",
        "",
        "| trained by | ms | steps a second | times as fast | error of the update | undisturbed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    few = federation(replace(load, clients=min(load.clients, 5), examples=min(load.examples, 320)))
    for n in ("plain", "plain, one thread", *hows):
        off = f"{error(module, few, local(load), **hows[n]):.1e}" if n in hows else ""
        count = f"{len(clock.quiet(n))} of {len(clock.rounds[n])}"
        seconds = clock.seconds(n)
        lines.append(
            f"| {n} | {1000 * seconds:.3g} | {steps / seconds:.3g} | {clock.ratio(n, base):.2f} | {off} | {count} |"
        )
    with threads(1):
        lines += ["", shares(programs["fused, one worker"])]
    print("\n".join(lines), "\n", flush=True)
    return [*lines, ""]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--loaded", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    measured = {n: measure(n, load, args) for n, load in WORKLOADS.items() if n.startswith(args.only)}
    if args.loaded:
        return
    before, _, measured_part = PAGE.read_text().partition(MARK)
    machine = (
        f"Written by `python benchmarks/fused.py`. PyTorch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} cores of {processor()}."
    )
    lines = sections(measured_part, WORKLOADS, measured)
    write_page(PAGE, before + "\n".join([MARK, "", machine, "", *lines]).rstrip() + "\n")


MARK = "## Measured"


if __name__ == "__main__":
    main()
