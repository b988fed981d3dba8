"""How long it takes to read a table, and how much memory.

    python benchmarks/reading.py [--rows 200000] [--repeat 3]

Writes a CSV of six columns (a client, four inputs and a target, all numbers but the first) and prints the best of some
repeats, each in a process of its own that has imported what it needs: `read` makes arrays of the file
(`TableReader.read`), `federation` scales and splits them too (`kinfed.from_csv`). Memory is the peak of the process.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars

import kinfed
from kinfed.data.tables.table_reader import TableReader

WAYS = {
    "read": lambda path: TableReader(client="who", target="y").read(path),
    "federation": lambda path: kinfed.from_csv(path, client="who", target="y"),
}


def write(path, rows):
    draw = np.random.default_rng(0)
    inputs = {name: draw.normal(size=rows).round(4) for name in "abcd"}
    who = [f"c{i}" for i in draw.integers(0, 20, rows)]
    polars.DataFrame({"who": who, **inputs, "y": draw.normal(size=rows).round(3)}).write_csv(path)


def once(path, way):
    """Seconds on the clock, seconds of computing, and GiB at the peak."""
    kinfed.from_frame(polars.DataFrame({"who": [0, 1] * 9, "x": range(18), "y": [0.5 + i for i in range(18)]}), **HOW)
    began, worked = time.perf_counter(), time.process_time()
    WAYS[way](path)
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    return seconds, worked, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


HOW = {"client": "who", "target": "y"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--once", nargs=2, metavar=("FILE", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(once(*args.once)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        write(path, args.rows)
        print(f"{args.rows:,} rows, 6 columns, {path.stat().st_size / 1e6:.0f} MB; best of {args.repeat}")
        for way in WAYS:
            command = [sys.executable, __file__, "--once", str(path), way]
            runs = [json.loads(subprocess.check_output(command, env=os.environ)) for _ in range(args.repeat)]
            seconds, worked, memory = (min(values) for values in zip(*runs, strict=True))
            print(f"{way:<12} {seconds:.2f} s, {worked:.2f} s of computing, {memory:.2f} GiB")


if __name__ == "__main__":
    main()
