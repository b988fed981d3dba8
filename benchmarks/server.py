"""Time what a server does in a round, and the products it is made of: python benchmarks/server.py

Each is timed beside its floor: the tables it has to read and write at the speed at which this machine copies, or its
multiplications at the speed of a square product, whichever takes longer. Before and after every repetition a fixed
product is timed on all threads; repetitions beside which it took a fifth longer than at its best were disturbed by
other work and are dropped, and a machine that never gets quiet ends in an error. Writes docs/evidence/server.md.

`--loaded` keeps disturbed repetitions and writes nothing; `--only 20x62006` measures one size, `--kin` kin alone, and
`--parts` what two servers do.
"""

import argparse
import platform
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.func import vjp

from kinfed import Training
from kinfed.core.graph import Graph
from kinfed.core.method import AveragedParams, Params, Roster
from kinfed.core.mixins import reduce_uploads
from kinfed.core.model import Model
from kinfed.core.rows import blank, subtract, take
from kinfed.core.seeding import tags
from kinfed.methods import SFL, FedAGHN, FedAMP, FedAvg, FedCedar, Kin, PFedGAT, PFedGraph, fedaghn, pfedgat
from kinfed.models import MODELS
from kinfed.ops.clustering import distances, kmeans
from kinfed.ops.gemm import has_amx, objection
from kinfed.ops.mixing import mix, weighted_mean
from kinfed.ops.similarity import fast_product, gram, inner, inner_by_layer
from kinfed.relations import Cosine, Distance, Nearest, Simplex, Softmax, relate
from kinfed.relations.movements import lengths_of
from kinfed_papers.result_pages import version, write_page

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "server.md"
QUIET = 1.2  # times the best time of the fixed product
WANTED, SPENT, PATIENCE = 5, 2.0, 300.0  # undisturbed repetitions, seconds after which three are enough, or none come
MODULES = {
    62_006: lambda: MODELS["cnn"]((3, 32, 32), 10),
    593_210: lambda: MODELS["mlp"]((784,), 10, hidden=(600, 200)),
    878_922: lambda: MODELS["cnn-bn"]((3, 32, 32), 10),
    11_191_242: lambda: MODELS["resnet18"]((3, 32, 32), 10),
}
WORK, ROOM = 1.5e12, 2.5e9  # operations in one product of all pairs, and bytes in one table, at most
CASES = [(n, d) for n in (20, 100, 325, 1000) for d in MODULES if 2 * n * n * d < WORK and 4 * n * d < ROOM]


class Clock:
    """Times things beside a fixed product, and knows which times to believe."""

    def __init__(self, loaded):
        self.loaded = loaded
        self.square = torch.randn(512, 512, dtype=torch.float64)  # one library computes it
        self.beats = []
        for _ in range(30):
            self.beat()

    def beat(self):
        """Seconds of the fixed product, the least of three: the first finds nothing of it in the cache."""
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            torch.mm(self.square, self.square)
            seconds.append(time.perf_counter() - begun)
        self.beats.append(min(seconds))
        return self.beats[-1]

    @property
    def best(self):
        """Seconds of the fixed product when nothing disturbs it; a moment of a cool processor is not counted."""
        return sorted(self.beats)[len(self.beats) // 10]

    def time(self, run):
        """Median seconds of undisturbed repetitions, after one to warm up."""
        run()
        kept, begun, before = [], time.perf_counter(), self.beat()
        while time.perf_counter() - begun < PATIENCE:
            start = time.perf_counter()
            run()
            taken, after = time.perf_counter() - start, self.beat()
            if self.loaded or max(before, after) < QUIET * self.best:
                kept.append(taken)
            before = after
            if len(kept) >= WANTED or (len(kept) >= 3 and time.perf_counter() - begun > SPENT):
                return statistics.median(kept)
        sys.exit("other work disturbs the measurement; run it again on a quiet machine, or with --loaded for a look")


def rates(clock):
    """Operations a second in square products: float32, the faster of both libraries, and float64."""
    setting, flops = getattr(torch.backends.mkldnn, "matmul", None), {}
    for dtype in (torch.float32, torch.float64):
        a, out = torch.randn(1024, 1024, dtype=dtype), torch.empty(1024, 1024, dtype=dtype)
        times = [clock.time(lambda a=a, out=out: torch.mm(a, a, out=out))]
        if setting and dtype == torch.float32 and not has_amx():
            before, setting.fp32_precision = setting.fp32_precision, "bf16"
            times.append(clock.time(lambda a=a, out=out: torch.mm(a, a, out=out)))
            setting.fp32_precision = before
        flops[dtype] = 2 * 1024**3 / min(times)
    return flops


def fill_rows(count, d, seed):
    """[count, d] numbers that are cheap to make; no two rows are alike."""
    draw = torch.Generator().manual_seed(seed)
    few = torch.randn(count, 4096, generator=draw)
    return few.repeat(1, -(-d // 4096))[:, :d].contiguous()


def roster(count, module, graph=None):
    model = Model(module)
    sizes, names = torch.full((count,), 100), tags([str(i) for i in range(count)])
    return Roster(model.theta, model.layout, sizes, Training(), 0, names, graph)


def step(method, clients, upload):
    """A function that does one aggregation and the sending after it, of a round in which all took part before."""
    everyone = clients.everyone

    def aggregate(clients, server):
        return method.aggregate(clients, server, everyone, reduce_uploads(method, clients, everyone, upload))

    server = aggregate(clients, method.start(clients))
    clients = replace(clients, round=1)

    def run():
        clients.memo.clear()  # what a round computes is not there yet
        method.send(clients, aggregate(clients, server), everyone)

    return run


def products(clock, clients, theta, floor):
    """Name, seconds and floor of the products that server steps are made of."""
    count, layout = len(clients), clients.layout
    weights, cut = torch.rand(count, count), torch.rand(len(layout.layers), count, count)
    lots = torch.rand(1, 5, count, dtype=torch.float64).clamp(min=1e-9)
    learned = [layer.trainable for layer in layout.layers]
    yield "mean", clock.time(lambda: weighted_mean(theta, clients.sizes)), floor(1)
    yield "mixing", clock.time(lambda: mix(weights, theta, layout)), floor(2, 1)
    yield "mixing by layer", clock.time(lambda: mix(cut, theta, layout)), floor(2, 1)
    yield "inner products", clock.time(lambda: inner_by_layer(theta, theta, layout)), floor(1, 1)
    yield "distances", clock.time(lambda: gram(theta[:, at] for at in learned).distances), floor(1, 1)
    if count >= 100:
        square_distances = distances(gram(theta, torch.float64))
        yield "k-means", clock.time(lambda: kmeans(square_distances, 5, lots)), float("nan")


def steps(clock, clients, theta, floor):
    """Name, seconds and floor of whole server steps: aggregate, then send to everyone."""
    links = replace(clients, graph=Graph((torch.rand(len(clients), len(clients)) < 0.1).float(), "given"))
    slope = fill_rows(len(clients), theta.shape[1], 3)
    half = floor(1, 1)  # all inner products of two tables
    yield "fedavg", clock.time(step(FedAvg(), clients, AveragedParams(theta))), floor(1)
    yield "sfl", clock.time(step(SFL(), links, Params(theta))), floor(2, 1)
    yield "fedamp", clock.time(step(FedAMP(alpha=1.0, sigma=1e9), clients, Params(theta))), half + floor(2, 1)
    cedar = FedCedar()
    yield "fedcedar", clock.time(step(cedar, clients, Params(theta))), floor(1, 1, torch.float64) + floor(2)
    gat = PFedGAT(sketch=4096)
    yield "pfedgat", clock.time(step(gat, clients, pfedgat.Upload(theta, slope))), half + floor(2, 1)
    aghn = FedAGHN()
    yield "fedaghn", clock.time(step(aghn, clients, fedaghn.Upload(theta, slope))), 2 * half + floor(2, 1)


def of_kin(clock):
    """Lines about kin with 1,000 clients, as multiples of one product [N, N] x [N, d], where all take part.

    `aggregate` and the `send` after it; and with all that an evaluated round asks of the server before it goes on.
    """
    clients = roster(1000, nn.Sequential(nn.Linear(784, 125), nn.ReLU(), nn.Linear(125, 10)))
    everyone, theta = clients.everyone, fill_rows(1000, clients.layout.size, 0)
    weights, mixed, lines = torch.rand(1000, 1000), blank(1000, theta), []
    with fast_product(theta, 1000, 1000, clients.layout.size):
        product = clock.time(lambda: torch.mm(weights, theta, out=mixed))
    for neighbours in (0, 20):
        method, after = Kin(neighbours=neighbours), replace(clients, round=1)
        server = method.aggregate(clients, method.start(clients), everyone, Params(theta))

        def run(looks, method=method, server=server, after=after):
            after.memo.clear()
            now = method.aggregate(after, server, everyone, Params(theta))
            method.send(after, now, everyone)
            if looks:
                method.relation(after, now, everyone)
                method.send(after, now, everyone)

        plain, evaluated = (clock.time(lambda looks=looks, run=run: run(looks)) / product for looks in (False, True))
        lines.append(f"| {neighbours or 'all'} | {plain:.2f} | {evaluated:.2f} |")
    return lines


def cpu_seconds(run):
    """The median of seven repetitions after one to warm up, of one thread, so that other work hardly counts."""
    threads, seconds = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for _ in range(8):
        begun = time.process_time()
        run()
        seconds.append(time.process_time() - begun)
    torch.set_num_threads(threads)
    return statistics.median(seconds[1:])


def of_parts():
    """Lines about what two methods' rounds are made of, as multiples of one product [N, N] x [N, d]; see `of_kin`."""
    clients = roster(1000, nn.Sequential(nn.Linear(232, 100), nn.ReLU(), nn.Linear(100, 10)))
    everyone, d, layout = clients.everyone, clients.layout.size, clients.layout
    theta, slope, weights = fill_rows(1000, d, 0), fill_rows(1000, d, 3), torch.rand(1000, 1000)
    moved, mixed = subtract(theta, clients.theta), blank(1000, theta)
    gat, half = PFedGAT(sketch=4096), PFedGraph()
    server = gat.aggregate(clients, gat.start(clients), everyone, pfedgat.Upload(theta, slope))
    features, one_each = gat.features(clients, server, everyone), torch.ones(1000, 1000)
    similarity = Cosine().compare(moved, moved, None, layout)

    def attend(network):
        return gat.scores(network, features).softmax(-1).mean(0)

    def pass_network():
        attend(server.network)  # of this round's models
        vjp(attend, server.network)[1](weights)

    def measure_movements():
        subtract(theta, clients.theta)
        lengths_of(layout, theta, by_layer=False)

    parts = [
        ("`pfedgat`, all", step(gat, clients, pfedgat.Upload(theta, slope))),
        ("mixtures of models", lambda: mix(weights, theta, layout)),
        ("derivatives of losses by weights", lambda: inner(slope, theta)),
        (
            "sketches of models of this and the last round",
            lambda: [gat.features(clients, server, everyone) for _ in range(2)],
        ),
        ("attention of 8 heads, twice forward and once back", pass_network),
        ("`pfedgraph`, all", step(half, clients, Params(theta))),
        ("mixtures of models and of directions", lambda: [mix(weights, table, layout) for table in (theta, moved)]),
        ("cosines", lambda: Cosine().compare(moved, moved, None, layout)),
        ("movements, and lengths of models", measure_movements),
        ("weights", lambda: Simplex(half.alpha).weigh(similarity, 100 * one_each, one_each == 0, one_each)),
    ]
    with fast_product(theta, 1000, 1000, d):
        product = cpu_seconds(lambda: torch.mm(weights, theta, out=mixed))
    return [f"| {name} | {cpu_seconds(run) / product:.2f} |" for name, run in parts]


def copying(clock, theta):
    """Seconds to read one table and write another, which is gone again afterwards."""
    other = blank(len(theta), theta)
    return clock.time(lambda: other.copy_(theta))


def measure(clock, rate, count, d):
    """Rows of the two tables: what, milliseconds, times its floor."""
    clients, theta = roster(count, MODULES[d]()), fill_rows(count, d, 0)
    copy = copying(clock, theta)

    def floor(tables, pairs=0, dtype=torch.float32):
        """Seconds to read or write so many tables, or for so many products of all pairs of clients."""
        return max(tables * copy / 2, pairs * 2 * count**2 * d / rate[dtype])

    cells_of_parts = [{}, {}]
    for cells, part in zip(cells_of_parts, (products, steps), strict=True):
        for name, seconds, least in part(clock, clients, theta, floor):
            ratio = "" if least != least else f" ({seconds / least:.2f})"
            cells[name] = f"{write_time(seconds)}{ratio}"
    return *cells_of_parts, 8 * count * d / copy / 1e9


def many(clock):
    """Lines about rounds of many clients, cohort 100, in which everyone or a few are looked at."""
    lines, module = [], nn.Linear(784, 10)
    for count in (1000, 10_000):
        clients = roster(count, module)
        cohort = torch.arange(0, count, count // 100)
        row = []
        upload = fill_rows(100, clients.layout.size, 1)
        for neighbours in (0, 30):
            method = FedAGHN(neighbours=neighbours)
            everyone = fedaghn.Upload(
                fill_rows(count, clients.layout.size, 2), fill_rows(count, clients.layout.size, 3)
            )
            server = method.aggregate(clients, method.start(clients), clients.everyone, everyone)
            del everyone

            def run(method=method, clients=clients, server=server, cohort=cohort, upload=upload):
                method.send(clients, server, cohort)
                method.aggregate(clients, server, cohort, fedaghn.Upload(upload, upload))

            row.append(write_time(clock.time(run)))
        lines.append(f"| {count:,} | {clients.layout.size:,} | {row[0]} | {row[1]} |")
    return lines


def recall():
    """Share of the 30 nearest models that sketches lead to: 2,000 models in families of 40, noise between members."""
    lines, clients = [], roster(2000, nn.Linear(784, 10))
    d = clients.layout.size
    draw = torch.Generator().manual_seed(0)
    mass = clients.sizes.float()
    for noise in (0.5, 1.0, 2.0):
        theta = torch.randn(50, d, generator=draw).repeat(40, 1) + noise * torch.randn(2000, d, generator=draw)
        near = relate(
            Distance(), Softmax(), Nearest(30), clients, partial(take, theta), mass, clients.everyone
        ).weights.near
        true = gram(theta).distances.fill_diagonal_(torch.inf).topk(30, largest=False).indices
        family = (near[:, 1:] % 50 == (clients.everyone % 50)[:, None]).double().mean()
        kept = (near[:, 1:, None] == true[:, None]).any(2).double().mean()
        lines.append(f"| {noise:g} | {100 * kept:.0f} | {100 * family:.0f} |")
    return lines


def write_time(seconds):
    """Milliseconds with three digits."""
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def table(rows):
    names = list(dict.fromkeys(name for _, _, cells in rows for name in cells))
    head = ["N", "d", *names]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    lines += [f"| {n} | {d:,} | {' | '.join(cells.get(name, '') for name in names)} |" for n, d, cells in rows]
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loaded", action="store_true", help="keep disturbed repetitions, write nothing")
    parser.add_argument("--kin", action="store_true", help="measure kin alone, write nothing")
    parser.add_argument("--parts", action="store_true", help="measure what two servers do alone, write nothing")
    parser.add_argument("--only", metavar="NxD", help="one size, such as 20x62006; writes nothing")
    given = parser.parse_args()
    cases = [case for case in CASES if given.only in (None, "{}x{}".format(*case))]
    if not cases:
        sys.exit(f"--only {given.only}: the sizes are {', '.join('{}x{}'.format(*case) for case in CASES)}")
    if given.parts:
        print("| what | times |", *of_parts(), sep="\n")
        return
    clock = Clock(given.loaded)
    if given.kin:
        print("| neighbours | not evaluated | evaluated |", *of_kin(clock), sep="\n")
        return
    rate, both, speeds = rates(clock), ([], []), []
    for count, d in cases:
        *cells, speed = measure(clock, rate, count, d)
        speeds.append(speed)
        for rows, row in zip(both, cells, strict=True):
            rows.append((count, d, row))
            print(f"{count} x {d:,}:", ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if given.loaded or given.only:
        return
    threads = torch.get_num_threads()
    single, double = (rate[dtype] / 1e9 for dtype in (torch.float32, torch.float64))
    write_page(
        PAGE,
        "\n".join(
            [
                "# What the server costs",
                "",
                "Written by `python benchmarks/server.py`. Milliseconds are medians of undisturbed repetitions. In",
                "brackets is how many times the floor that is. The floor is the longer of two times. One moves the",
                "tables that must be read and written, as fast as a table of this size is copied. The other does",
                "the multiplications at the speed of a square product. Products of a table with itself do half the",
                "multiplications and may be below 1. New memory counts in the measurement and not in the floor.",
                "",
                f"{version()}, PyTorch {torch.__version__}, Python {platform.python_version()}, {threads} threads,",
                f"{platform.processor() or platform.machine()}. Square products: {single:.0f} Gflop/s in float32,",
                f"{double:.0f} in float64. Copies: {min(speeds):.0f} to {max(speeds):.0f} GB/s, read and written, the",
                "fastest of tables that stay in the cache. Large products in float32 go to",
                f"{'MKL: ' + objection() if objection() else 'oneDNN'} (docs/evidence/choosing.md).",
                "",
                "## Products",
                "",
                "N models have d numbers each. `distances` are what FedAMP and clustering look at. `k-means` is",
                "one run with 5 centres, from distances that are known.",
                "",
                *table(both[0]),
                "",
                "## Whole steps",
                "",
                "Times are of `aggregate` and the `send` after it, with every client in the cohort. The floor of a",
                "method counts each product that its equations need once. For SFL that is mixing. FedAMP also has",
                "the distances, and FedCedar has them in float64. The table of feedback counts for FedAGHN and for",
                "pFedGAT without attention. The cosines count for FedAGHN.",
                "",
                *table(both[1]),
                "",
                "## kin",
                "",
                "All of 1,000 clients with 99,385 numbers are in the round. `aggregate` and `send` are multiples",
                "of one product of [N, N] with [N, d].",
                "",
                "| neighbours | not evaluated | evaluated |",
                "| --- | ---: | ---: |",
                *of_kin(clock),
                "",
                "## What two servers do",
                "",
                "All of 1,000 clients with 24,310 numbers are in the round. Times are of the CPU on one thread, as",
                "multiples of one product of [N, N] with [N, d]. The equations of pFedGAT need two products, and",
                "those of pFedGraph two and a half. The rest is passes over the tables, and a network over all pairs.",
                f"For this table alone: `--parts`. {version()}.",
                "",
                "| what | times |",
                "| --- | ---: |",
                *of_parts(),
                "",
                "## Many clients",
                "",
                "Milliseconds are of `send` and `aggregate` of FedAGHN, with a cohort of 100 of N clients. Each",
                "client looks at everyone, or at `neighbours=30` others that sketches name.",
                "",
                "| N | d | everyone | 30 neighbours |",
                "| --- | --- | --- | --- |",
                *many(clock),
                "",
                "Here 2,000 models are in families of 40, whose members differ by the noise times what families",
                "do. In % are how many of the 30 nearest models the sketches lead to, and how many found are of",
                "the family:",
                "",
                "| noise | of the nearest | of the family |",
                "| --- | --- | --- |",
                *recall(),
                "",
            ]
        ),
    )


if __name__ == "__main__":
    main()
