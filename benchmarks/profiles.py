"""Where the time of local training goes, by kind of operation: python benchmarks/profiles.py

One worker trains the clients of one round of each workload of benchmarks/peers/workload.py under the executor that
`auto` would take. Times of operations are least values of several rounds; what is left of the whole round without a
profiler is Python and dispatch. Writes its part of docs/performance.md.
"""

import math
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kinfed import SGD, Federation, Training
from kinfed.core.model import Model
from kinfed.core.tasks import Classification, Regression
from kinfed.methods import FedAvg
from kinfed.models import MODELS
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed.simulation.workers import threads
from kinfed_papers.result_pages import put

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))
from networks import build  # noqa: E402
from workload import AHEAD, PARAMETERS, cohort, make, read  # noqa: E402

PAGE = HERE.parent / "docs" / "performance.md"
TIMES = 3
KINDS = {  # by how the operation's name begins
    "convolutions": ("convolution", "mkldnn_convolution"),
    "products": ("mm", "bmm", "addmm", "baddbmm", "mkldnn_linear"),
    "pooling": ("max_pool",),
    "moving numbers": ("index", "copy", "clone", "cat", "fill", "zero", "scatter", "gather", "_to_copy", "stack"),
}


class Seconds(TorchDispatchMode):
    """Sums the seconds of operations by their kind."""

    def __init__(self):
        super().__init__()
        self.spent = defaultdict(float)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        begun = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        took = time.perf_counter() - begun
        name = func.overloadpacket.__name__.strip("_")
        self.spent[next((k for k, names in KINDS.items() if name.startswith(names)), "elementwise")] += took
        return out


def prepare_workload(name):
    """The clients of one round of a workload, its model and how they train."""
    with tempfile.TemporaryDirectory() as folder:
        make(name, f"{folder}/workload.npz")
        arrays, w = read(f"{folder}/workload.npz")
    some, forecasts = cohort(w, 0), w["model"] == "gru"
    x, y = (torch.from_numpy(arrays[f"{part}_train"][some]).flatten(0, 1) for part in "xy")
    rows = torch.arange(len(y)).split(w["train"])
    data = Federation(x, y, _rows(rows), Regression() if forecasts else Classification(10))
    module = MODELS["gru"](tuple(w["shape"]), AHEAD) if forecasts else build(w["model"], w["shape"])
    return data, module, Training(w["epochs"], w["batch"], SGD(lr=w["lr"]))


def _rows(train):
    return {"train": list(train), "validation": [r[:0] for r in train], "test": [r[:1] for r in train]}


def profile(name, data, module, training, rate):
    """A table row: seconds of one worker, and shares of them."""
    executor = Simulation(data, Model(module), FedAvg(), training).executor
    fleet = Simulation(data, Model(module), FedAvg(), training, execution=Execution(executor, workers=1))
    roster = fleet.roster()
    sent = fleet.method.send(roster, fleet.method.start(roster), roster.everyone)
    total, spent = float("inf"), defaultdict(lambda: float("inf"))
    in_place = dict.fromkeys((torch.ops.aten.baddbmm_, torch.ops.aten.addmm_), operations)  # it does not know these
    with FlopCounterMode(display=False, custom_mapping=in_place) as counted:
        fleet.train(0, roster.everyone, sent)
    for _ in range(TIMES):
        begun = time.perf_counter()
        fleet.train(0, roster.everyone, sent)
        total = min(total, time.perf_counter() - begun)
        with Seconds() as seen:
            fleet.train(0, roster.everyone, sent)
        for kind, seconds in seen.spent.items():
            spent[kind] = min(spent[kind], seconds)
    spent["Python and dispatch"] = max(0.0, total - sum(spent.values()))
    shares = [f"{100 * spent[kind] / total:.0f} %" if kind in spent else "" for kind in COLUMNS]
    bound = 100 * counted.get_total_flops() / rate / total
    print(name, executor, f"{total:.3f} s", dict(spent), file=sys.stderr, flush=True)
    return f"| {name} | {executor} | {total:.3g} | {' | '.join(shares)} | {bound:.0f} % |"


def operations(into, a, b, *_, **__):
    """Of into += a @ b, from their shapes."""
    return 2 * math.prod(a) * b[-1]


COLUMNS = [*KINDS, "elementwise", "Python and dispatch"]


def main():
    torch.manual_seed(0)
    table = [
        f"| workload | executor | seconds of one worker | {' | '.join(COLUMNS)} | multiplications at full speed |",
        "| --- " * (len(COLUMNS) + 4) + "|",
    ]
    with threads(1):
        matrix, rate = torch.randn(2048, 2048), 0.0
        for _ in range(8):
            begun = time.perf_counter()
            matrix @ matrix
            rate = max(rate, 2 * 2048**3 / (time.perf_counter() - begun))
        for name in PARAMETERS:
            data, module, training = prepare_workload(name)
            table.append(profile(name, data, module, training, rate))
    print("\n".join(table))
    peak = f"On one thread, a large product runs at {rate / 1e9:.0f} GFLOP/s."
    about = f"Written by `python benchmarks/profiles.py`. {peak}"
    put(PAGE, "profiles", "\n".join([about, "", *table]), "Performance")


if __name__ == "__main__":
    main()
