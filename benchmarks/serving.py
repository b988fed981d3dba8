"""What comes after training, measured: predictions, exports of every architecture, and the service under load.

    python benchmarks/serving.py predict|export|load|all [--rows 1000000] [--seconds 20] [--clients 16]

`predict` answers that many rows by kinfed predict; `export` converts each model of kinfed's registry, and compares
onnxruntime with PyTorch, by one thread each; `load` sends requests to a service on this machine from as many clients,
one after another each. Each writes its part of docs/evidence/serving.md.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import onnxruntime
import polars
import requests
import torch

from kinfed.models import MODELS
from kinfed.runs.predictor import Answers, Predictor
from kinfed.serving import onnx_file
from kinfed.serving.pipeline import Whole, example
from kinfed_papers.result_pages import put, version

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "serving.md"
IMAGE, WINDOW, ROW = (3, 32, 32), (12, 2), (5,)
SHAPES = {name: IMAGE for name in MODELS} | {"linear": ROW, "mlp": ROW, "rnn": WINDOW, "gru": WINDOW, "text": (80,)}
del SHAPES["embedded"], SHAPES["log-linear"]  # which need a table's columns
SHOPS = 20


def table(rows, seed=0):
    """Customers of shops: three numbers, text and a date."""
    draw = np.random.default_rng(seed)
    frame = polars.DataFrame(
        {
            "shop": [f"shop {i}" for i in draw.integers(0, SHOPS, rows)],
            "age": draw.normal(40, 10, rows).round(1),
            "income": draw.normal(1000, 300, rows).round(),
            "visits": draw.integers(0, 30, rows),
            "kind": draw.choice(["new", "old", "gold"], rows),
            "seen": (np.datetime64("2024-01-01") + draw.integers(0, 300, rows)).astype(str),
        }
    )
    yes = polars.col("age") + polars.col("visits") > 55
    return frame.with_columns(buys=polars.when(yes).then(polars.lit("yes")).otherwise(polars.lit("no")))


def train_run(folder):
    """The folder of a run on 4,000 rows."""
    table(4000).write_csv(folder / "train.csv")
    arguments = [str(folder / "train.csv"), "--client", "shop", "--target", "buys", "--method", "fedrep", "rounds=5"]
    time_command("run", *arguments, "--beside", "none", "--quiet", "--out", str(folder / "run"))
    return folder / "run"


def time_command(*arguments):
    """Seconds on the clock and of the processor that a command takes."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "kinfed", *arguments], check=True, stdout=subprocess.DEVNULL)
    clock, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write(part, title, intro, heading, lines):
    """One part of the page: what was measured on what, and a table."""
    cores, load = os.cpu_count(), os.getloadavg()[0]
    busy = ". It had other work too, so seconds of CPU say more than those on the clock" if load > cores else ""
    text = (
        f"## {title}\n\nWritten by `python benchmarks/serving.py {part}`, {version()}, PyTorch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}, {cores} cores, load {load:.1f}{busy}.\n\n"
        f"{intro}\n\n| {' | '.join(heading)} |\n| {' | '.join('---' for _ in heading)} |\n"
    )
    put(PAGE, part, text + "\n".join(lines), "After training: figures")


def row(*cells):
    """A line of a table, which is shown at once."""
    line = f"| {' | '.join(map(str, cells))} |"
    print(line, flush=True)
    return line


def predict(folder, run, rows):
    lines = []
    for count in (10, rows):
        path = folder / f"{count}.csv"
        table(count, 1).write_csv(path)
        times = [time_command("predict", str(run), str(path), "-o", str(folder / "out.csv")) for _ in range(2)]
        clock, processor = (min(times_of_kind) for times_of_kind in zip(*times, strict=True))
        lines.append(row(f"kinfed predict, {count:,} rows", f"{clock:.2f}", f"{processor:.2f}"))
    intro = (
        "`kinfed predict` goes from CSV to CSV, the start included, the better of two. The table has three numbers, "
        "text, a date and 20 clients, and the model is an MLP by FedRep. CPU seconds are those of all cores together."
    )
    write("predict", "Predictions", intro, ["command", "seconds on the clock", "CPU seconds"], lines)


def milliseconds(work, least=0.5):
    """The median of many times, of the processor, of which one core works."""
    work()
    times, end = [], time.perf_counter() + least
    while time.perf_counter() < end or len(times) < 5:
        begin = time.process_time()
        for _ in range(10):
            work()
        times.append(100 * (time.process_time() - begin))
    return float(np.median(times))


def export(folder):
    torch.set_num_threads(1)
    lines = []
    for name, shape in SHAPES.items():
        series = shape == WINDOW
        answers = Answers(("level",), (), (50.0,) * 12, (10.0,) * 12) if series else Answers((), tuple("0123456789"))
        readings = {"mean": 50.0, "deviation": 10.0} if series else None
        predictor = Predictor(["a"], "a", shape, answers, lambda _: None, lambda _: None, readings=readings)
        model = MODELS[name](shape, 12 if series else 10).eval()
        pipeline, begin = Whole(model, predictor, "a").eval(), time.process_time()
        proto = onnx_file.convert(pipeline, predictor)
        took, path = time.process_time() - begin, folder / f"{name}.onnx"
        path.write_bytes(onnx_file.fill_weights(proto, pipeline, {}).SerializeToString())
        gap = onnx_file.measure_gap(path, pipeline, predictor)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        x = example(predictor, 1)
        fed = {"x": x.numpy()}
        with torch.inference_mode():
            onnx = milliseconds(lambda s=session, f=fed: s.run(None, f))
            plain = milliseconds(lambda w=pipeline, x=x: w(x))
        count = sum(tensor.numel() for tensor in model.parameters())
        size = path.stat().st_size / 1e3
        cells = [name, " x ".join(map(str, shape)), f"{count:,}", f"{size:,.0f}", f"{took:.1f}"]
        lines.append(row(*cells, f"{onnx:.3f}", f"{plain:.3f}", f"{gap:.0e}"))
    intro = (
        "Milliseconds of CPU are for one row by one thread, with what is done before and after. Rows are images, "
        "windows of a series, texts of 80 characters or five numbers. *Apart* is the largest difference between "
        "onnxruntime's and PyTorch's answers to 32 random rows. It is relative to the largest answer if that is above "
        "1. The first conversion also imports the exporter."
    )
    heading = ["model", "input", "parameters", "ONNX, kB", "CPU seconds to convert", "ms a row", "by PyTorch", "apart"]
    write("export", "Exports of all architectures", intro, heading, lines)


def memory(process):
    """Resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_seconds(process):
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(run, clients, seconds):
    lines = []
    command = [sys.executable, "-m", "kinfed", "serve", str(run), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        try:
            address = json.loads(served.stdout.readline())["address"]
            for at_once, rows in ((1, 1), (clients, 1), (clients, 100), (clients, 1)):
                lines.append(row(*measure_load(address, at_once, rows, seconds, served)))
        finally:
            served.terminate()
    intro = f"Clients that send requests one after another, {seconds:g} seconds each, in the order of the rows."
    heading = ["clients at once", "rows a request", "requests", "errors", "a second", "median, ms", "99 %, ms"]
    write("load", "The service under load", intro, [*heading, "CPU ms a request", "MB"], lines)


def measure_load(address, clients, rows, seconds, served):
    """What came of such clients: the cells of a line."""
    frame = table(rows, 2).drop("buys", "shop").to_dicts()
    times, wrong, before, end = [], [], cpu_seconds(served), time.perf_counter() + seconds

    def client(number):
        with requests.Session() as session:
            while time.perf_counter() < end:
                begin = time.perf_counter()
                got = session.post(f"{address}/predict/shop {number % SHOPS}", json={"rows": frame}, timeout=60)
                times.append(1000 * (time.perf_counter() - begin))
                if got.status_code != 200 or len(got.json()["answers"]) != rows:
                    wrong.append(got.text)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    middle, late = np.percentile(times, [50, 99])
    per_request = 1000 * (cpu_seconds(served) - before) / len(times)
    rate = len(times) / seconds
    counts = [clients, rows, f"{len(times):,}", len(wrong), f"{rate:.0f}"]
    return [*counts, f"{middle:.1f}", f"{late:.1f}", f"{per_request:.1f}", f"{memory(served):.0f}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["predict", "export", "load", "all"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--clients", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        if args.what in ("predict", "load", "all"):
            run = train_run(place)
        if args.what in ("predict", "all"):
            predict(place, run, args.rows)
        if args.what in ("export", "all"):
            export(place)
        if args.what in ("load", "all"):
            load(run, args.clients, args.seconds)
