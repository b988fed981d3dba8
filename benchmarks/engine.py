"""Time a FedAvg round under each executor against a plain PyTorch loop: python benchmarks/engine.py

The loop is the floor: the same batches, a stock nn.Module, torch.optim.SGD, and nothing of a federation around it.
Ratios are medians over interleaved repetitions in one run. Writes docs/results/engine.md.
"""

import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from kinfed import SGD, Federation, Training
from kinfed.fleet import Simulation
from kinfed.methods import FedAvg
from kinfed.model import Model
from kinfed.models import MODELS
from kinfed.tasks import Classification

PAGE = Path(__file__).parents[1] / "docs" / "results" / "engine.md"
CASES = {  # name: model, example shape, clients, training examples each, batch, epochs, repetitions
    "MLP 64-64-10": ("mlp", (64,), 20, 54, 8, 2, 15),
    "MLP 784-200-200-10": ("mlp", (1, 28, 28), 20, 160, 16, 2, 7),
    "CNN, 62,006 parameters": ("cnn", (3, 32, 32), 10, 320, 64, 2, 5),
    "CNN with BatchNorm, 878,730 parameters": ("cnn-bn", (3, 32, 32), 6, 320, 64, 1, 5),
}


def federation(shape, clients, size):
    draw = torch.Generator().manual_seed(0)
    count = size + 1
    x = torch.randn(clients * count, *shape, generator=draw)
    y = torch.randint(10, (clients * count,), generator=draw)
    owned = torch.arange(clients * count).split(count)
    rows = {"train": [o[1:] for o in owned], "validation": [o[:0] for o in owned], "test": [o[:1] for o in owned]}
    return Federation(x, y, rows, Classification(10))


def plain(module, data, batch, epochs):
    """One round of local training, client by client, as anyone would write it without a library."""
    initial = {name: t.clone() for name, t in module.state_dict().items()}
    orders = [[rows[torch.randperm(len(rows))] for _ in range(epochs)] for rows in data.rows["train"]]

    def round():
        for mine in orders:
            module.load_state_dict(initial)
            module.train()
            optimiser = torch.optim.SGD(module.parameters(), lr=0.01)
            for order in mine:
                for rows in order.split(batch):
                    optimiser.zero_grad()
                    F.cross_entropy(module(data.x[rows]), data.y[rows]).backward()
                    optimiser.step()

    return round


def federated(module, data, batch, epochs, executor):
    """The same through the engine: send, local training, aggregation."""
    training = Training(epochs=epochs, batch=batch, optimiser=SGD(lr=0.01))
    method = FedAvg()
    fleet = Simulation(data, Model(module), method, training, executor=executor)
    roster = fleet.roster()
    server = method.start(roster)

    def round():
        cohort, uploads = fleet.train(0, roster.everyone, method.send(roster, server, roster.everyone))
        method.aggregate(roster, server, cohort, uploads)

    return round, fleet.executor


def main():
    lines = []
    for name, (model, shape, clients, size, batch, epochs, repetitions) in CASES.items():
        settings = {"hidden": (200, 200)} if "200" in name else {}
        module = MODELS[model](shape, 10, **settings)
        data = federation(shape, clients, size)
        rounds = {"plain": plain(module, data, batch, epochs)}
        rounds |= {executor: federated(module, data, batch, epochs, executor)[0] for executor in ("loop", "vmap")}
        chosen = federated(module, data, batch, epochs, "auto")[1]
        seconds = {executor: [] for executor in rounds}
        for repetition in range(repetitions + 1):
            for executor, round in rounds.items():
                begun = time.perf_counter()
                round()
                if repetition:  # the first warms up
                    seconds[executor].append(time.perf_counter() - begun)
        median = {executor: statistics.median(times) for executor, times in seconds.items()}
        ratio = {
            executor: statistics.median(t / f for t, f in zip(times, seconds["plain"], strict=True))
            for executor, times in seconds.items()
        }
        lines.append(
            f"| {name} | {clients} x {size}, batch {batch}, {epochs} epochs | {1000 * median['plain']:.0f} "
            f"| {ratio['loop']:.2f} | {ratio['vmap']:.2f} | {chosen} | {ratio[chosen]:.2f} |"
        )
        print(lines[-1], flush=True)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(
        "\n".join(
            [
                "# What the engine costs",
                "",
                "Written by `python benchmarks/engine.py`. A FedAvg round (send, local training of all clients,",
                "aggregation) against the floor: a plain PyTorch loop over batches of the same sizes with",
                "`torch.optim.SGD` and no federation around it. Ratios below 1 are faster than that loop; medians of",
                "interleaved repetitions in one run.",
                "",
                f"PyTorch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads, "
                f"{platform.processor() or platform.machine()}.",
                "",
                "| model | clients x examples | plain, ms | loop / plain | vmap / plain | auto picks | auto / plain |",
                "| --- | --- | --- | --- | --- | --- | --- |",
                *lines,
                "",
                "`auto` follows from it: on a CPU models with convolutions run client by client, dense models batched.",
                "",
            ]
        )
    )


if __name__ == "__main__":
    main()
