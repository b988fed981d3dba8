"""Rounds with 1,000 to 100,000 clients: seconds and memory: python benchmarks/scale.py

A client has 16 examples, drawn from one small pool, and a model of 62,006 parameters. Each case runs in a process of
its own, so that its peak of resident memory is its own. A method's part has training rounds alone: an evaluation of
everybody has to look at everybody. The part `whole` has runs with `kinfed.fit` that end with an evaluation and are
saved. The part `lists` has twenty rounds with two evaluations of methods with `neighbours`, each beside FedAvg in one
process, in seconds of CPU time. Private states in files take 25 GB of disk. Writes its parts of docs/evidence/scale.md;
`--most 1000` stops at so many clients and writes nothing.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from kinfed import SGD, Federation, Training, fit
from kinfed.core.engine import Rounds, sample
from kinfed.core.graph import Graph
from kinfed.core.model import Model
from kinfed.core.tasks import Classification
from kinfed.methods import METHODS
from kinfed.methods.sfl import Similarity
from kinfed.models import MODELS
from kinfed.runs import results
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed_papers.panacea.chunks import ChunkedHeads
from kinfed_papers.result_pages import put, version

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "scale.md"
CLIENTS = (1_000, 10_000, 100_000)
COHORTS = (100, 1_000)
TRIED: dict[
    str, tuple[dict, int]
] = {  # with what is set for many clients, and the most clients that memory has room for
    "fedavg": ({}, 100_000),
    "fedavg-ft": ({}, 100_000),
    "fedrep": ({}, 100_000),  # this and the next have private states
    "local": ({}, 100_000),
    "sfl": ({"structure": Similarity(neighbours=20)}, 10_000),
    "pfedgat": ({"sketch": 4096}, 10_000),
    "fedaghn": ({"neighbours": 20}, 10_000),
    "fedcedar": ({}, 10_000),
    "panacea": ({"decoder": ChunkedHeads()}, 10_000),
}
WHOLE = [("fedavg", 1_000), ("fedavg", 10_000), ("fedavg", 100_000), ("fedrep", 1_000), ("fedrep", 10_000)]
LISTED = [  # with lists of 20 neighbours: clients, and numbers of a model
    ("kin", 100_000, 62_006),
    ("kin", 10_000, 62_006),
    *((name, 100_000, 874) for name in ("kin", "fedamp", "pfedgraph", "fedaghn", "heurfedamp")),
]
TRAINING = Training(epochs=1, batch=16, optimiser=SGD(lr=0.01))
POOL, EACH, ROUNDS, TWENTY = 2_000, 16, 5, 20


def federation(clients, shape=(3, 32, 32)):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(POOL, *shape, generator=draw)
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
    model, method = Model(MODELS["cnn"]((3, 32, 32), 10)), METHODS[name](**TRIED[name][0])
    fleet = Simulation(federation(clients), model, method, TRAINING)
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


def whole(name, clients):
    """Seconds, and MB at the peak, of five rounds of 1,000 clients, an evaluation of all, and all that a run leaves."""
    torch.manual_seed(0)
    begun = time.perf_counter()
    how = {"rounds": Rounds(ROUNDS, evaluate_every=ROUNDS), "participation": 1_000 / clients}
    run = fit(METHODS[name](), federation(clients), MODELS["cnn"]((3, 32, 32), 10), training=TRAINING, **how)
    trained = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results.save(run, folder)
        files = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
    return {"fit": trained - begun, "save": time.perf_counter() - trained, "files": files, "peak": memory()[1]}


def compare_lists(name, clients, numbers):
    """CPU seconds of FedAvg's and of a method's rounds and evaluations, and MB at the peak of both."""
    few = numbers == 874
    data = federation(clients, (21,) if few else (3, 32, 32))
    seconds = {}
    for run, method in (
        ("fedavg", METHODS["fedavg"]()),
        (name, METHODS[name](neighbours=20)),
    ):
        torch.manual_seed(0)
        module = MODELS["mlp"]((21,), 10, hidden=(27,)) if few else MODELS["cnn"]((3, 32, 32), 10)
        assert Model(module).layout.size == numbers
        marks = []
        how = Execution(progress=lambda *_, marks=marks: marks.append(time.process_time()), keep_state=False)
        rounds = Rounds(TWENTY, evaluate_every=TWENTY // 2)
        fit(method, data, module, rounds=rounds, training=TRAINING, participation=100 / clients, execution=how)
        took = [b - a for a, b in pairwise(marks)]  # of all rounds but the first
        scored = [TWENTY // 2 - 2, TWENTY - 2]
        plain = statistics.fmean(t for i, t in enumerate(took) if i not in scored)
        seconds[run] = plain, statistics.fmean(took[i] for i in scored) - plain
    (fedavg, _), (plain, scores) = seconds["fedavg"], seconds[name]
    return {"round": plain, "times": plain / fedavg, "evaluation": scores, "peak": memory()[1]}


def run_alone(*arguments):
    """What a case finds in a process of its own."""
    command = [sys.executable, __file__, "--case", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


PARTS = {"case": case, "whole": whole, "lists": compare_lists}


def write_lists(machine, most):
    """The part on methods with lists."""
    lines = [
        "## Lists of neighbours",
        "",
        f"{TWENTY} rounds of 100 clients with `neighbours=20`, two of them evaluated: CPU seconds of a round, as the",
        "mean of those that are not evaluated, how many times FedAvg's in the same process that is, what an evaluation",
        "takes beside a round, and memory at the peak. A row alone: `--case lists:METHOD CLIENTS NUMBERS`.",
        machine,
        "",
        "| method | clients | numbers | seconds a round | times FedAvg's | seconds an evaluation | MB at the peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, clients, numbers in LISTED:
        if clients <= most:
            figures = run_alone(f"lists:{name}", clients, numbers)
            cells = (
                f"{figures['round']:.2f} | {figures['times']:.1f} | {figures['evaluation']:.1f} | {figures['peak']:.0f}"
            )
            lines.append(f"| {name} | {clients:,} | {numbers:,} | {cells} |")
            print(lines[-1], flush=True)
    if most >= CLIENTS[-1]:
        put(PAGE, "lists", "\n".join(lines), "Rounds with many clients")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "methods", nargs="*", choices=[[], "whole", "lists", *TRIED], metavar="PART", help="default: all"
    )
    parser.add_argument("--case", nargs="+")
    parser.add_argument("--most", type=int, default=CLIENTS[-1])
    args = parser.parse_args()
    if args.case:
        name, *numbers = args.case
        part, name = name.split(":")
        print(json.dumps(PARTS[part](name, *map(int, numbers))))
        return
    threads = torch.get_num_threads()
    machine = f"{version()}, PyTorch {torch.__version__}, Python {platform.python_version()}, {threads} threads."
    parts = args.methods or ["whole", "lists", *TRIED]
    if "lists" in parts:
        write_lists(machine, args.most)
    if "whole" in parts:
        lines = [
            "## Whole runs",
            "",
            f"{ROUNDS} rounds of 1,000 clients, an evaluation of everybody, and all that a run leaves. {machine}",
            "",
            "| method | clients | seconds to fit | seconds to save | MB of files | MB at the peak |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, clients in WHOLE:
            figures = run_alone(f"whole:{name}", clients) if clients <= args.most else {}
            cells = (f"{figures[key]:.0f}" if figures else "" for key in ("fit", "save", "files", "peak"))
            lines.append(f"| {name} | {clients:,} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
        if args.most >= CLIENTS[-1]:
            put(PAGE, "whole", "\n".join(lines), "Rounds with many clients")
    for name in (part for part in parts if part not in ("whole", "lists")):
        settings, room = TRIED[name]
        changed = ", ".join(f"`{key}={value}`" for key, value in settings.items())
        lines = [
            f"## {name}",
            "",
            f"With {changed}. {machine}" if changed else machine,
            "",
            "| cohort | clients | seconds a round | MB before | MB more in rounds |",
            "| --- | --- | --- | --- | --- |",
        ]
        for cohort in COHORTS:
            for clients in (n for n in CLIENTS if n <= min(args.most, room)):
                figures = run_alone(f"case:{name}", clients, cohort)
                lines.append(
                    f"| {cohort:,} | {clients:,} | {figures['seconds']:.2f} "
                    f"| {figures['before']:.0f} | {figures['peak'] - figures['before']:.0f} |"
                )
                print(name, lines[-1], flush=True)
        if args.most >= CLIENTS[-1]:
            put(PAGE, name, "\n".join(lines), "Rounds with many clients")


if __name__ == "__main__":
    main()
