"""Rounds with 1,000 to 100,000 clients: seconds and memory: python benchmarks/scale.py

A client has 16 examples, drawn from one small pool. Each case runs in a process of its own, so that its peak of
resident memory is its own, and its seconds are of CPU time. The part `rounds` has training rounds alone: an evaluation
of everybody has to look at everybody. The part `whole` has runs with `kinfed.fit` that end with an evaluation and are
saved. The part `lists` has twenty rounds with two evaluations, each method beside FedAvg in one process. The part
`everybody` has rounds of a cohort after one of everybody, and `processes` what each of several processes holds. States
and models in files take 1 GB of disk. Writes its parts of docs/evidence/scale.md; `--most 1000` stops at so many
clients and writes nothing.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from kinfed import SGD, Federation, Training, fit
from kinfed.core.engine import Rounds, sample
from kinfed.core.graph import Graph
from kinfed.core.mixins import reduce_uploads
from kinfed.core.model import Model
from kinfed.core.rows import Written
from kinfed.core.tasks import Classification
from kinfed.methods import METHODS
from kinfed.methods.sfl import Similarity
from kinfed.models import MODELS
from kinfed.relations import Nearest
from kinfed.runs import results
from kinfed.simulation import distributed
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed_papers.panacea.chunks import ChunkedHeads
from kinfed_papers.result_pages import put, version

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "scale.md"
TITLE = "Rounds with many clients"
ALL = 100_000  # clients of the largest cases
LIST = {"neighbours": 20}
SET: dict[str, dict] = {  # what is set for many clients
    "kin": LIST,
    "fedamp": LIST,
    "heurfedamp": LIST,
    "pfedgraph": LIST,
    "fedaghn": LIST,
    "mixture": {"among": Nearest(20)},
    "sfl": {"structure": Similarity(neighbours=20)},
    "pfedgat": {"sketch": 4096},
    "panacea": {"decoder": ChunkedHeads()},
}
FEW, SOME, MANY, WIDE = (1_000, 100), (10_000, 100), (100_000, 100), (10_000, 1_000)  # clients, and those of a round
CASES = {  # that memory and an afternoon have room for, with a model of 62,006 numbers each
    **dict.fromkeys(("fedavg", "fedrep", "local"), (FEW, MANY, WIDE)),
    **dict.fromkeys(("fedavg-ft", "fedcedar", "kin"), (FEW, MANY)),
    **dict.fromkeys(("fedamp", "pfedgraph", "fedaghn", "pfedgat"), (FEW, SOME)),
    **dict.fromkeys(("sfl", "panacea"), (FEW,)),
}
WHOLE = [("fedavg", 1_000), ("fedavg", 100_000), ("fedrep", 1_000)]
LISTED = [(name, 100_000) for name in ("kin", "fedamp", "heurfedamp", "pfedgraph", "fedaghn")] + [("sfl", 1_000)]
LARGE = [("kin", 10_000), ("kin", 100_000)]
AFTER = ("fedavg", "kin", "pfedgraph", "fedaghn", "mixture")  # methods that keep cells, beside FedAvg
TRAINING = Training(epochs=1, batch=16, optimiser=SGD(lr=0.01))
POOL, EACH, ROUNDS, TWENTY = 2_000, 16, 5, 20
SHARED, EXAMPLES = 20_000, "KINFED_SCALE_EXAMPLES"  # clients of several processes, and what names their file


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
    """MB of resident memory at its peak; that of getrusage a process has from the one that started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1e3


def of_size(numbers):
    """Shape of an input, and a model of so many numbers."""
    if numbers == 874:
        return (21,), MODELS["mlp"]((21,), 10, hidden=(27,))
    return (3, 32, 32), MODELS["cnn"]((3, 32, 32), 10)


def measure_rounds(name, clients, cohort):
    """CPU seconds of a round, and MB at the peak."""
    return {"round": statistics.median(train_rounds(name, clients, [cohort] * ROUNDS, 62_006)), "peak": memory()}


def measure_after(name, clients, cohort):
    """CPU seconds of a round after one of everybody, and MB at the peak."""
    _, *seconds = train_rounds(name, clients, [clients] + [cohort] * ROUNDS, 874)
    return {"round": statistics.median(seconds), "peak": memory()}


def train_rounds(name, clients, cohorts, numbers):
    """CPU seconds of each round of so many clients."""
    torch.manual_seed(0)
    shape, module = of_size(numbers)
    model, method = Model(module), METHODS[name](**SET.get(name, {}))
    fleet = Simulation(federation(clients, shape), model, method, TRAINING)
    method = fleet.method
    roster = fleet.roster(ring(clients) if name == "panacea" else None)
    server, seconds = method.start(roster), []
    for round, cohort in enumerate(cohorts):
        begun = time.process_time()
        roster = replace(roster, round=round)
        chosen = sample(roster, cohort / clients)
        _, uploads = fleet.train(round, chosen, method.send(roster, server, chosen))
        given = reduce_uploads(method, roster, chosen, uploads)
        with Written(tree_leaves(server), [roster.theta]).allow():
            server = method.aggregate(roster, server, chosen, given)
        seconds.append(time.process_time() - begun)
    return seconds


def measure_whole(name, clients):
    """CPU seconds of five rounds of 1,000 clients with an evaluation, and of all that a run leaves; MB at the peak."""
    torch.manual_seed(0)
    begun = time.process_time()
    how = {"rounds": Rounds(ROUNDS, evaluate_every=ROUNDS), "participation": 1_000 / clients}
    run = fit(METHODS[name](), federation(clients), MODELS["cnn"]((3, 32, 32), 10), training=TRAINING, **how)
    trained = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        results.save(run, folder)
        files = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
    return {"fit": trained - begun, "save": time.process_time() - trained, "files": files, "peak": memory()}


def compare_lists(name, clients, numbers):
    """CPU seconds of FedAvg's and of a method's rounds and evaluations, and MB at the peak of both."""
    data, seconds = federation(clients, of_size(numbers)[0]), {}
    for run, method in (
        ("fedavg", METHODS["fedavg"]()),
        (name, METHODS[name](**SET.get(name, {}))),
    ):
        torch.manual_seed(0)
        _, module = of_size(numbers)
        assert Model(module).layout.size == numbers
        marks = []
        how = Execution(progress=lambda *_, marks=marks: marks.append(time.process_time()), keep_state=False)
        rounds = Rounds(TWENTY, evaluate_every=TWENTY // 2)
        fit(method, data, module, rounds=rounds, training=TRAINING, participation=100 / clients, execution=how)
        took = [b - a for a, b in pairwise(marks)]  # of all rounds but the first
        scored = [TWENTY // 2 - 2, TWENTY - 2]
        plain = statistics.fmean(t for i, t in enumerate(took) if i not in scored)
        seconds[run] = plain, statistics.fmean(took[i] for i in scored) - plain
    (fedavg, looks), (plain, scores) = seconds["fedavg"], seconds[name]
    return {
        "round": plain,
        "times": plain / fedavg,
        "evaluation": scores,
        "looks": scores / looks,
        "peak": memory(),
    }


def run_alone(*arguments):
    """What a case finds in a process of its own."""
    command = [sys.executable, __file__, "--case", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure_processes(name, clients, count):
    """Of `count` processes, whose examples are a file: the MB that each has alone, and its part of what they share."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        draw = np.random.default_rng(0)
        np.save(path, np.tile(draw.standard_normal((clients, 784), np.float32), (EACH, 1)))
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", __file__]
        command = [*launch, "--case", f"process:{name}", str(clients)]
        about = {**os.environ, EXAMPLES: str(path)}
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=about).stdout
    figures = [json.loads(line) for line in printed.splitlines()]
    assert len(figures) == count
    held = {key: statistics.fmean(of_one[key] for of_one in figures) for key in figures[0]}
    return held | {"file": 4 * 784 * EACH * clients / 1e6}


def measure_process(name, clients):
    """MB that this process has alone, and its part of pages that several have, at most when a round is over."""
    shares = []

    def look(*_):
        fields = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
        kb = {name: int(size) for name, size, _ in fields}
        shares.append((kb["Anonymous:"] / 1e3, kb["Pss:"] / 1e3))

    def build():
        x = np.load(os.environ[EXAMPLES], mmap_mode="r" if name == "mapped" else None)
        return Federation.from_arrays(x, np.arange(len(x)) % 10, np.arange(len(x)) % clients)

    with distributed.group():
        torch.manual_seed(0)
        module = MODELS["mlp"]((784,), 10, hidden=(32,))
        how = {"execution": Execution(progress=look, keep_state=False), "participation": 100 / clients}
        data = distributed.build_once(build) if name == "shared" else build()
        fit(METHODS["fedavg"](), data, module, rounds=2, training=TRAINING, **how)
    return dict(zip(("alone", "part"), map(max, zip(*shares, strict=True)), strict=True))


PARTS = {
    "rounds": measure_rounds,
    "whole": measure_whole,
    "lists": compare_lists,
    "everybody": measure_after,
    "processes": measure_processes,
    "process": measure_process,
}


def write_rounds(machine, most):
    """The lines of the part on training rounds."""
    yield "## Training rounds"
    yield ""
    yield f"The median of {ROUNDS} rounds, of a model of 62,006 numbers. {machine}"
    yield ""
    yield "| method | settings | clients | cohort | CPU seconds a round | MB at the peak |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for name, cases in CASES.items():
        settings = ", ".join(f"`{key}={value}`" for key, value in SET.get(name, {}).items())
        for clients, cohort in cases:
            if clients <= most:
                figures = run_alone(f"rounds:{name}", clients, cohort)
                cells = f"{figures['round']:.2f} | {figures['peak']:.0f}"
                yield f"| `{name}` | {settings} | {clients:,} | {cohort:,} | {cells} |"


def write_whole(machine, most):
    """The lines of the part on whole runs."""
    yield "## Whole runs"
    yield ""
    yield f"{ROUNDS} rounds of 1,000 clients, an evaluation of everybody, and all that a run leaves. {machine}"
    yield ""
    yield "| method | clients | CPU seconds to fit | to save | MB of files | MB at the peak |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name, clients in WHOLE:
        if clients <= most:
            figures = run_alone(f"whole:{name}", clients)
            cells = " | ".join(f"{figures[key]:.0f}" for key in ("fit", "save", "files", "peak"))
            yield f"| `{name}` | {clients:,} | {cells} |"


def write_lists(machine, most):
    """The lines of the part on methods with lists, of models that are small."""
    yield "## Lists of neighbours"
    yield ""
    yield f"{TWENTY} rounds of 100 clients with `neighbours=20`, in `sfl` with links to 20, of which two are evaluated."
    yield "CPU seconds of a round are the mean of the others, and those of an evaluation what it takes beside a round."
    yield "FedAvg's are of the same process. For one row: `--case lists:METHOD CLIENTS NUMBERS`."
    yield from tabulate_lists(machine, most, LISTED, 874)


def write_large(machine, most):
    """The lines of the part on methods with lists, of models that are larger."""
    yield "## Lists of larger models"
    yield ""
    yield "The same with models of 62,006 numbers."
    yield from tabulate_lists(machine, most, LARGE, 62_006)


def tabulate_lists(machine, most, cases, numbers):
    """The lines of a table of methods with lists, each with so many clients."""
    yield machine
    yield ""
    yield "| method | clients | numbers | a round | times FedAvg's | an evaluation | times FedAvg's | MB at the peak |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, clients in cases:
        if clients <= most:
            figures = run_alone(f"lists:{name}", clients, numbers)
            ratios = f"{figures['times']:.1f} | {figures['evaluation']:.1f} | {figures['looks']:.1f}"
            cells = f"{figures['round']:.3f} | {ratios}"
            yield f"| `{name}` | {clients:,} | {numbers:,} | {cells} | {figures['peak']:.0f} |"


def write_everybody(machine, most):
    """The lines of the part on rounds once everybody has taken part."""
    yield "## Once everybody has taken part"
    yield ""
    yield f"The median of {ROUNDS} rounds of 100 clients after a round of all, of a model of 874 numbers."
    yield "For one row: `--case everybody:METHOD CLIENTS 100`."
    yield machine
    yield ""
    yield "| method | settings | clients | CPU seconds a round | MB at the peak |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for name in AFTER:
        settings = ", ".join(f"`{key}={value}`" for key, value in SET.get(name, {}).items())
        for clients in (1_000, 10_000, ALL):
            if clients <= most:
                figures = run_alone(f"everybody:{name}", clients, 100)
                yield f"| `{name}` | {settings} | {clients:,} | {figures['round']:.3f} | {figures['peak']:.0f} |"


def write_processes(machine, most):
    """The lines of the part on several processes."""
    yield "## Several processes"
    yield ""
    yield "Memory of each process of a machine, started by torchrun, when a round of FedAvg is over. The examples are a"
    yield "file of NumPy's. Each process loads it, or one does and all share what it made, as with `kinfed run`, or a"
    yield 'program maps it by `mmap_mode="r"`. Pages that several processes have in common count in parts. For one row:'
    yield "`--case processes:shared CLIENTS PROCESSES`."
    yield machine
    yield ""
    yield "| examples | clients | MB of the file | processes | MB that one has alone | with its part of common pages |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name in ("loaded", "shared", "mapped"):
        for count in (1, 2, 4):
            if most >= SHARED:
                figures = run_alone(f"processes:{name}", SHARED, count)
                cells = " | ".join(f"{figures[key]:.0f}" for key in ("alone", "part"))
                yield f"| {name} | {SHARED:,} | {figures['file']:.0f} | {count} | {cells} |"


WRITERS = {
    "rounds": write_rounds,
    "whole": write_whole,
    "lists": write_lists,
    "large": write_large,
    "everybody": write_everybody,
    "processes": write_processes,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", choices=[[], *WRITERS], metavar="PART", help="default: all")
    parser.add_argument("--case", nargs="+")
    parser.add_argument("--most", type=int, default=ALL)
    args = parser.parse_args()
    if args.case:
        name, *numbers = args.case
        part, name = name.split(":")
        print(json.dumps(PARTS[part](name, *map(int, numbers))))
        return
    threads = f"{torch.get_num_threads()} threads" if torch.get_num_threads() > 1 else "1 thread"
    machine = f"{version()}, PyTorch {torch.__version__}, Python {platform.python_version()}, {threads}."
    for part in args.parts or WRITERS:
        lines = []
        for line in WRITERS[part](machine, args.most):
            print(line, flush=True)
            lines.append(line)
        if args.most >= ALL:
            put(PAGE, part, "\n".join(lines), TITLE)


if __name__ == "__main__":
    main()
