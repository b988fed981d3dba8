"""kinfed beside what one would pick instead: python benchmarks/peers.py [--quick]

FedAvg on the workloads of benchmarks/peers/workload.py, every program in a process of its own. They take turns,
a round each, so that a change of the machine meets all of them; before and after each turn a fixed matrix product is
timed, and a round beside which it took a fifth longer than usual in this run is dropped. Writes docs/performance.md;
--quick prints the ratios to a plain PyTorch loop alone, and says where one is well below the table's. A program that
does not run is reported with its last words.
"""

import argparse
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kinfed_papers.result_pages import put

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))
from workload import AHEAD, PARAMETERS, WORKLOADS, make, round_half  # noqa: E402

PAGE = HERE.parent / "docs" / "performance.md"
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
PROGRAMS = {"kinfed": "ours.py", "plain PyTorch loop": "plain.py"}
OTHERS = {"JAX": "with_jax.py", "FedJAX": "with_fedjax.py", "pfl": "with_pfl.py", "Flower simulation": "with_flower.py"}
ROUNDS = {"W1": 4, "W2 CNN": 7, "W2 MLP": 15, "W3": 7, "W3, 67": 4}
QUICK = ("W2 CNN", "W2 MLP", "W3")
BELOW = 0.8  # of the table's ratio: more than the machine's moods explain
SLOW = 60  # seconds
SETTLE = 5  # seconds for what programs that have just started do behind their backs
DISTURBED = 1.2


@dataclass
class Program:
    """A program under test: its process, and what its rounds took."""

    name: str
    process: subprocess.Popen
    log: Path
    turns: list[tuple[float, dict]] = field(default_factory=list)  # seconds of the product beside each round, the round
    error: float | None = None  # of a client's update, relative to its length, where the program says so
    failed: str = ""
    slow: bool = False

    def line(self, seconds=600):
        """Its next line that is ours; the others are its own talk. One that says nothing for so long is ended."""
        late = threading.Timer(seconds, self.process.kill)
        late.start()
        for line in iter(self.process.stdout.readline, ""):
            if line.startswith(("ready", '{"seconds"')):
                late.cancel()
                return line
        late.cancel()
        if self.process.wait() == -signal.SIGKILL:
            self.failed = f"no answer in {seconds} s"
        else:
            lines = [w for w in self.log.read_text(errors="replace").splitlines() if w.strip()]
            self.failed = lines[-1][:160] if lines else f"ended with code {self.process.wait()}"
        return None

    def turn(self):
        """One round, or None if it failed."""
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError:
            pass
        line = self.line()
        return json.loads(line) if line else None

    def rounds(self, usual):
        """The rounds that nothing disturbed; a slow program's only one in any case."""
        return [outcome for beside, outcome in self.turns if self.slow or beside <= DISTURBED * usual]

    def end(self):
        """No more turns."""
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start(name, script, python, path, folder):
    """The program, or its failure, once it is set up."""
    log = Path(folder) / f"{name}.log"
    command = [str(python), str(HERE / "peers" / script), path]
    with log.open("w") as err:
        if not Path(python).exists():  # reported as any other that does not run
            command = [sys.executable, "-c", f"import sys; sys.exit('{python} is not there: make bench installs it')"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True,
            env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
        )  # fmt: skip
    program = Program(name, process, log)
    line = program.line(180)
    if line and line.split()[1:]:
        program.error = float(line.split()[1])
    return program


def gauge(size=768, times=12):
    """Seconds of a fixed matrix product, the least of several: what the machine gives us at this moment."""
    a = torch.ones(size, size)
    times_taken = []
    for _ in range(times):
        begun = time.perf_counter()
        a @ a
        times_taken.append(time.perf_counter() - begun)
    return statistics.median(times_taken)


def peak():
    """GFLOP/s of a large float32 matrix product: the better of PyTorch's default and its oneDNN path."""
    a = torch.randn(3072, 3072)
    before = torch.get_float32_matmul_precision()
    best = 0.0
    for way in ("highest", "medium"):
        torch.set_float32_matmul_precision(way)
        for _ in range(4):
            begun = time.perf_counter()
            a @ a
            best = max(best, 2 * 3072**3 / (time.perf_counter() - begun) / 1e9)
    torch.set_float32_matmul_precision(before)
    return best


def flops(name):
    """Multiplications and additions of a round's training: forward, gradients of weights and of inputs."""
    w = WORKLOADS[name]
    if w["model"] == "gru":
        steps, features = w["shape"]
        layers = [(features, 300, steps), (features, 300, AHEAD), (100, 300, steps + AHEAD), (100, 1, AHEAD)]
    elif w["model"] == "mlp":
        layers = [(math.prod(w["shape"]), 200, 1), (200, 200, 1), (200, 10, 1)]
    else:
        channels, side, _ = w["shape"]
        first, second = side - 4, (side - 4) // 2 - 4
        flat = 64 * (second // 2) ** 2
        layers = [(25 * channels, 32, first**2), (25 * 32, 64, second**2), (flat, 512, 1), (512, 10, 1)]
    work = [2 * inputs * outputs * places for inputs, outputs, places in layers]
    examples = round_half(w["join"] * w["clients"]) * w["train"] * w["epochs"]
    return examples * (3 * sum(work) - work[0])


def measure(name, programs, wanted):
    """Let the programs take turns until each has `wanted` undisturbed rounds, after one to warm up.

    A program whose first round takes longer than SLOW gets no other: that round counts. Returns the usual time of the
    fixed product: the tenth part of all measured times is shorter.
    """
    time.sleep(SETTLE)
    for program in programs:
        outcome = None if program.failed else program.turn()
        if outcome and outcome["seconds"] > SLOW:
            program.turns, program.slow = [(0.0, outcome)], True
    times = [gauge()]
    for _ in range(2 * wanted):
        usual = sorted(times)[len(times) // 10]
        for program in programs:
            if program.failed or program.slow or len(program.rounds(usual)) >= wanted:
                continue
            before = gauge()
            outcome = program.turn()
            times.append(max(before, gauge()))
            if outcome is not None:
                program.turns.append((times[-1], outcome))
                print(f"{name}: {program.name} {outcome['seconds']:.3f} s", file=sys.stderr, flush=True)
    return sorted(times)[len(times) // 10]


def rows(name, programs, gflops, usual):
    """A table row a program."""
    kept = {p.name: p.rounds(usual) for p in programs}
    median = {n: statistics.median(r["seconds"] for r in rounds) for n, rounds in kept.items() if rounds}
    for p in programs:
        if p.name not in median:
            yield f"| {name} | {p.name} | did not run: {p.failed or 'every round was disturbed'} | | | | | | |"
            continue
        seconds = [r["seconds"] for r in kept[p.name]]
        ours, plain = (f"{median[p.name] / median[n]:.2f}" if n in median else "" for n in PROGRAMS)
        yield (
            f"| {name} | {p.name} | {median[p.name]:.3g} ({min(seconds):.3g} to {max(seconds):.3g}) | {ours} | {plain} "
            f"| {100 * flops(name) / median[p.name] / 1e9 / gflops:.0f} % "
            f"| {'' if p.error is None else f'{p.error:.1e}'} | {kept[p.name][-1]['peak']:.0f} "
            f"| {'the first alone' if p.slow else f'{len(seconds)} of {len(p.turns)}'} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ratios to the plain loop only, under 3 minutes")
    quick = parser.parse_args().quick
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as the programs, which are not told OMP_NUM_THREADS
    gflops = peak()
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for name in QUICK if quick else WORKLOADS:
            path = f"{folder}/{name}.npz"
            make(name, path)
            series = WORKLOADS[name]["model"] == "gru"
            scripts = PROGRAMS if quick else PROGRAMS | {n: s for n, s in OTHERS.items() if series or n != "JAX"}
            programs = [
                start(n, s, sys.executable if n in PROGRAMS else PEERS, path, folder) for n, s in scripts.items()
            ]
            usual = measure(name, programs, 5 if quick else ROUNDS[name])
            for program in programs:
                program.end()
            gflops = max(gflops, peak())  # what the machine reaches undisturbed is the same for all
            measured.append((name, programs, usual))
        table = [row for name, programs, usual in measured for row in rows(name, programs, gflops, usual)]
    head = "| workload | program | seconds a round (range) | over kinfed | over plain | of peak | error | MiB | turns |"
    lines = [head, "| --- " * 9 + "|", *table]
    if not quick:
        write(lines, gflops)
        return
    print("\n".join(lines))
    before = ratios(PAGE.read_text().splitlines())
    for name, ratio in ratios(table).items():
        if ratio < BELOW * before.get(name, 0.0):
            print(f"{name}: {ratio} times as fast as the plain loop, but {before[name]} in {PAGE.name}; slower now?")


def ratios(table):
    """By workload, how many times as long as kinfed the plain loop takes."""
    cells = [[cell.strip() for cell in line.split("|")] for line in table]
    return {c[1]: float(c[4]) for c in cells if len(c) > 4 and c[2] == "plain PyTorch loop" and c[4]}


def write(lines, gflops):
    """docs/performance.md between its markers, so that what is written around the table stays."""
    about = (
        "Written by `python benchmarks/peers.py`. "
        f"PyTorch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads, "
        f"{platform.processor() or platform.machine()}. Matrix products reach {gflops:.0f} GFLOP/s. Parameters: "
        + ", ".join(f"{name} {count:,}" for name, count in PARAMETERS.items())
        + "."
    )
    put(PAGE, "peers", "\n".join([about, "", *lines]), "Performance")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
