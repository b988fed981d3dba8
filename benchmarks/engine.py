"""Time whole FedAvg rounds under every executor against a plain PyTorch loop: python benchmarks/engine.py

The loop is what one writes without a library: client by client, torch.optim.SGD, a running mean, each client's test
examples scored. Programs take turns, a round each. Before and after every round a fixed product is timed on all cores;
rounds beside which it took a fifth longer than at its best were disturbed by other work and are dropped. What has fewer
than three undisturbed rounds goes on; a machine that never gets quiet ends in an error. Writes docs/evidence/engine.md.

`--loaded` keeps disturbed rounds and writes nothing; `--only W1` runs the workloads that begin so and leaves the
others' sections as they are.
"""

import argparse
import copy
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from exact import error
from torch import nn

from kinfed import SGD, Federation, Training, UsageError
from kinfed.core import engine
from kinfed.core.history import History, Recorder
from kinfed.core.model import Model
from kinfed.core.tasks import Classification
from kinfed.methods import FedAvg
from kinfed.models import MODELS
from kinfed.ops.fused import Fused
from kinfed.ops.gemm import fast_gemm
from kinfed.simulation.auto import NAMES
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed_papers.result_pages import write_page

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "engine.md"
ROUNDS, MOST = 7, 25  # undisturbed rounds wanted of each program, and rounds tried at most
QUIET = 1.2  # times the best time of the fixed product


def wide_cnn(shape, classes):
    """Two 5x5 convolutions (32, 64) with pooling and a layer of 512: 878,538 parameters for 3x32x32."""
    side = ((shape[1] - 4) // 2 - 4) // 2
    layers = [nn.Conv2d(shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * side**2, 512), nn.ReLU(), nn.Linear(512, classes))


def mlp(*hidden):
    return lambda shape, classes: MODELS["mlp"](shape, classes, hidden=hidden)


@dataclass(frozen=True)
class Workload:
    module: object
    shape: tuple
    clients: int
    train: int  # examples of each client
    test: int
    batch: int
    epochs: int
    share: float = 1.0


WORKLOADS = {
    "W1: CNN": Workload(wide_cnn, (3, 32, 32), 20, 500, 100, 64, 5),
    "W2: CNN": Workload(wide_cnn, (1, 28, 28), 100, 16, 4, 16, 5, 0.3),
    "W2: MLP 784-100-10": Workload(mlp(100), (1, 28, 28), 100, 16, 4, 16, 5, 0.3),
    "W2: MLP 784-200-200-10": Workload(mlp(200, 200), (1, 28, 28), 100, 16, 4, 16, 5, 0.3),
    "MLP 64-64-10": Workload(mlp(64), (64,), 20, 54, 13, 8, 2),
    "LeNet-5": Workload(MODELS["cnn"], (3, 32, 32), 10, 320, 80, 64, 2),
    "CNN with BatchNorm": Workload(MODELS["cnn-bn"], (3, 32, 32), 6, 320, 80, 64, 1),
}


def federation(load):
    """Images that are noise around one prototype a class."""
    draw = torch.Generator().manual_seed(0)
    examples = load.train + load.test
    y = torch.randint(10, (load.clients * examples,), generator=draw)
    y[:10] = torch.arange(10)
    x = torch.randn(10, *load.shape, generator=draw)[y] + torch.randn(len(y), *load.shape, generator=draw)
    owned = torch.arange(len(y)).split(examples)
    rows = {"train": [o[load.test :] for o in owned], "validation": [o[:0] for o in owned]}
    return Federation(x, y, rows | {"test": [o[: load.test] for o in owned]}, Classification(10))


def plain(load, module, data):
    """A round as anyone would write it without a library."""
    server, local = copy.deepcopy(module), copy.deepcopy(module)
    cohort = max(1, round(load.share * load.clients))

    def run():
        total = {name: torch.zeros_like(t) for name, t in server.state_dict().items()}
        local.train()
        for i in torch.randperm(load.clients)[:cohort].tolist():
            local.load_state_dict(server.state_dict())
            optimiser = torch.optim.SGD(local.parameters(), lr=0.01)
            for _ in range(load.epochs):
                for rows in data.rows["train"][i][torch.randperm(load.train)].split(load.batch):
                    optimiser.zero_grad()
                    F.cross_entropy(local(data.x[rows]), data.y[rows]).backward()
                    optimiser.step()
            for name, t in local.state_dict().items():
                if t.is_floating_point():  # BatchNorm counts its batches
                    total[name] += t / cohort
        server.load_state_dict(total)
        server.eval()
        scores = []
        with torch.no_grad():
            for rows in data.rows["test"]:
                outputs, y = server(data.x[rows]), data.y[rows]
                scores.append((float((outputs.argmax(1) == y).float().mean()), float(F.cross_entropy(outputs, y))))
        return scores

    return run


def local(load):
    return Training(epochs=load.epochs, batch=load.batch, optimiser=SGD(lr=0.01))


def simulation(load, module, data, **how):
    return Simulation(
        data, Model(copy.deepcopy(module)), FedAvg(), local(load), share=load.share, execution=Execution(**how)
    )


def able(load, module, data, **how):
    """The executors that can run the model."""
    executors = []
    for name in NAMES:
        try:
            simulation(load, module, data, executor=name, **how)
        except UsageError:
            continue
        executors.append(name)
    return executors


def prepare_rounds(load, data, fleet):
    """A round through the engine, evaluation of all clients included."""
    roster = fleet.roster()
    history = History(tuple(data.names), data.task)
    done, server = 0, None

    def run():
        nonlocal done, server
        how = {"rounds": done + 1, "begin": done, "participation": load.share}
        server = engine.run(fleet.method, roster, fleet, Recorder(history), server=server, **how)
        done += 1

    return run


def bare(load, module, data):
    """Nothing but the cohort's training steps, on one thread."""
    model = Model(copy.deepcopy(module))
    cohort = max(1, round(load.share * load.clients))

    def run():
        for i in range(cohort):
            theta = model.theta.clone()
            tensors = {name: t.data.requires_grad_() for name, t in model.layout.tensors(theta).items()}
            leaves = [tensors[e.name] for e in model.layout.entries if e.trainable]
            values = [leaf.data for leaf in leaves]
            tensors |= {e.name: tensors[e.name].detach() for e in model.layout.entries if not e.trainable}
            rows = data.rows["train"][i]
            with model.bound(tensors, training=True):
                for _ in range(load.epochs):
                    for part in rows.split(load.batch):
                        loss = F.cross_entropy(model.module(data.x[part]), data.y[part])
                        torch._foreach_add_(values, torch.autograd.grad(loss, leaves), alpha=-0.01)

    return run


def prepare_training(load, fleet):
    """The training half of a round: what is sent, local steps, the mean."""
    roster = fleet.roster()
    server = fleet.method.start(roster)
    cohort = torch.arange(max(1, round(load.share * load.clients)))

    def run():
        _, uploads = fleet.train(0, cohort, fleet.method.send(roster, server, cohort))
        fleet.method.aggregate(roster, server, cohort, uploads)

    return run


def replay_steps(load, fleet):
    """The bare fused steps of a round: what the fused form is asked for in one, without all that is around it."""
    calls, descend = [], Fused.descend

    def note_call(*arguments):
        calls.append(arguments)
        return descend(*arguments)

    with mock.patch.object(Fused, "descend", note_call):
        prepare_training(load, fleet)()
    return lambda: [descend(*arguments) for arguments in calls]


def on_one_thread(run, onednn):
    """With the same library for products on both sides, so that what is left is the engine."""

    def run_on_one_thread():
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        with fast_gemm("on" if onednn else "off"):
            run()
        torch.set_num_threads(before)

    return run_on_one_thread


class Clock:
    """Times programs in turn, and beside each of them a fixed product that tells what else the machine does."""

    def __init__(self, programs, loaded):
        self.programs, self.loaded = programs, loaded
        self.matrix = torch.randn(1024, 1024)
        self.rounds = {name: [] for name in programs}  # (seconds, the slower of the products beside it)

    def product(self):
        seconds = []
        for _ in range(3):  # the threads of another program may spin for a moment after it has answered
            begun = time.perf_counter()
            self.matrix @ self.matrix
            seconds.append(time.perf_counter() - begun)
        return min(seconds)

    def quiet(self, name):
        """The undisturbed rounds' seconds, by turn."""
        times = sorted(beside for rounds in self.rounds.values() for _, beside in rounds)
        best = times[len(times) // 10]  # a processor that was cool for a moment is not what it is compared with
        return {t: s for t, (s, beside) in enumerate(self.rounds[name]) if self.loaded or beside <= QUIET * best}

    def run(self):
        for round in self.programs.values():
            round()  # warms up
        self.product()
        wanted = 2 if self.loaded else ROUNDS
        for _ in range(MOST):
            for name, round in self.programs.items():
                before = self.product()
                begun = time.perf_counter()
                round()
                seconds = time.perf_counter() - begun
                self.rounds[name].append((seconds, max(before, self.product())))
            if all(len(self.quiet(name)) >= wanted for name in self.programs):
                break
        few = [name for name in self.programs if len(self.quiet(name)) < (1 if self.loaded else 3)]
        if few:
            sys.exit(f"too much else is going on: hardly an undisturbed round of {', '.join(few)}; nothing is written")

    def seconds(self, name):
        return statistics.median(self.quiet(name).values())

    def ratio(self, name, base):
        """How many times as long `base` takes: the median over the turns in which neither was disturbed."""
        mine, theirs = self.quiet(name), self.quiet(base)
        pairs = [theirs[t] / mine[t] for t in mine.keys() & theirs.keys()]
        return statistics.median(pairs) if pairs else self.seconds(base) / self.seconds(name)


def measure(name, load, loaded):
    """The lines of one workload."""
    torch.manual_seed(0)
    module, data = load.module(load.shape, 10), federation(load)
    auto = simulation(load, module, data)
    hows = {n: {"executor": n} for n in able(load, module, data) if not (n == "vmap" and "W1" in name)}  # minutes
    hows |= {"loop, one worker": {"executor": "loop", "workers": 1}}
    hows |= {"loop, bf16": {"executor": "loop", "precision": "bf16"}}
    programs = {"plain": plain(load, module, data)}
    programs |= {n: prepare_rounds(load, data, simulation(load, module, data, **how)) for n, how in hows.items()}
    single = simulation(load, module, data, executor="loop", workers=1)
    halves = {"loop": (bare(load, module, data), prepare_training(load, single))}
    if "fused" in hows:
        fused = simulation(load, module, data, executor="fused", workers=1)
        halves["fused"] = replay_steps(load, fused), prepare_training(load, fused)
    for n, both in halves.items():
        both = [on_one_thread(run, single.how["onednn"]) for run in both]
        programs |= dict(zip((f"{n}: steps", f"{n}: training"), both, strict=True))
    clock = Clock(programs, loaded)
    clock.run()
    size = f"{single.model.layout.parameters:,} parameters, {load.clients} clients x {load.train}, batch {load.batch}"
    adds = [f"`{n}` adds {100 * (clock.ratio(f'{n}: steps', f'{n}: training') - 1):.1f} %" for n in halves]
    lines = [
        f"## {name}",
        "",
        f"{size}, {load.epochs} epochs, {load.share:.0%} of the clients a round. On one thread "
        f"{' and '.join(adds)} to the bare training steps. `auto` takes `{auto.executor}`: {auto.reason}.",
        "",
        "| round by | seconds | times as fast as plain | error of the update | undisturbed rounds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for n in ("plain", *hows):
        off = f"{error(module, data, local(load), load.share, **hows[n]):.1e}" if n in hows else ""
        count = f"{len(clock.quiet(n))} of {len(clock.rounds[n])}"
        lines.append(f"| {n} | {clock.seconds(n):.3g} | {clock.ratio(n, 'plain'):.2f} | {off} | {count} |")
    print("\n".join(lines), "\n", flush=True)
    return [*lines, ""]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--loaded", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    measured = {n: measure(n, load, args.loaded) for n, load in WORKLOADS.items() if n.startswith(args.only)}
    if args.loaded:
        return
    intro = f"""# What a round costs

Written by `python benchmarks/engine.py`. Whole FedAvg rounds, evaluation of all clients included, are compared with a
plain PyTorch loop that does the same. The loop goes client by client, with `torch.optim.SGD` and a running mean.
Programs take turns. Rounds during which something else ran on the machine are dropped, and medians taken. The error is
the distance of a client's update from that in float64, relative to its length. It is the median over the cohort. A jump
to 1e-3 means that one ReLU or one pooled maximum fell the other way. That happens in every executor, the plain loop
included.

PyTorch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} cores of {processor()}.
"""
    write_page(PAGE, "\n".join([intro, *sections(PAGE.read_text(), WORKLOADS, measured)]).rstrip() + "\n")


def sections(page, names, measured):
    """Lines of the workloads of these names: those that were measured, and what the page has of the others."""
    kept = {part.splitlines()[0]: [f"## {part.strip()}", ""] for part in page.split("\n## ")[1:]}
    return [line for name in names for line in measured.get(name) or kept.get(name, [])]


def processor():
    try:
        text = Path("/proc/cpuinfo").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return next(v.strip() for k, v in fields.items() if k.strip() == "model name")
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
