"""Odd and broken input of every kind: python evidence/fuzz.py [--cases 5600] [--seed 0] [--only KIND ...] [--out DIR]

A case is a number of a kind of evidence/fuzz_cases.py; with the seed it fixes all that is drawn, and --case
KIND/NUMBER shows one again. Each runs in a folder of its own, in a process that is ended after LIMIT seconds and gets
no more than MEMORY bytes. Folders of cases that end badly stay in DIR/cases. The same command goes on after an
interruption, as long as the code is the same. docs/evidence/fuzz.md is written when all kinds
have run, its part on modules when these have.
"""

import argparse
import contextlib
import csv
import hashlib
import importlib.metadata
import io
import json
import math
import multiprocessing
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import fuzz_cases
import fuzz_modules
import numpy as np
import torch
from fuzz_cases import KINDS, MARK, PLANTED, Draw, Wrong, prepare
from safetensors import safe_open

from kinfed import RunError, UsageError, files
from kinfed.plots import charts, heatmaps
from kinfed_papers.result_pages import put

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "fuzz.md"
LIMIT = 60  # seconds of a processor's time, or ten times as many by the clock
PARTS = {  # of the page: their kinds, and the fewest cases
    "fuzz": ([kind for kind in KINDS if kind != "module"], 1000),
    "modules": (["module"], 300),
}
MEMORY = 12 << 30  # bytes of address space
GOOD = {
    "ok": "carried out: what it wrote can be read, and no model holds NaN or infinity",
    "refused": "refused in one line: `kinfed: ...` from a command, a UsageError or RunError from Python",
}
BAD = {
    "unexpected": "another exception, or 'unexpected ... please report it'",
    "lines": "refused in several lines, or in none",
    "time-out": f"not done after {LIMIT} seconds of a processor's time, or {10 * LIMIT} by the clock",
    "died": "the process ended",
    "left": "a temporary file, a file that cannot be read, or the folder of a run that was refused",
    "NaN": "a saved model with NaN or infinity",
    "executed": "code in a file was executed",
    "differs": "results differ between executors, from a plain PyTorch loop, or from the model that is kept",
}
ABOUT = {
    "fuzz": [
        "Two of five have something broken on purpose. The others are odd, such as one client, two rows or a learning",
        "rate of 1e30. Training must survive these or say that it diverged. `evidence/fuzz_cases.py` has all cases.",
    ],
    "modules": [
        "A module of each family (`evidence/fuzz_modules.py`) is trained in double precision. Executors are `loop`,",
        "with one worker and with two, `vmap`, `fused` and `auto`. A plain PyTorch loop trains on the same batches.",
        "All parameters and buffers are equal to 1e-7. So are the score and the answers, of the kept model and of the",
        "one loaded from its folder. `vmap` and `fused` may refuse a module. Some families must be refused by all.",
        "Either their predictions are no function of an example, or copies would train in another way than PyTorch.",
    ],
}
PICTURES = {charts: ("accuracy_by_round", "accuracy_by_client", "classes_by_client"), heatmaps: ("relation_heatmap",)}


def readable(path):
    """Raise unless a file that kinfed wrote is whole."""
    match path.suffix:
        case ".json":
            json.loads(path.read_text())
        case ".toml":
            tomllib.loads(path.read_text())
        case ".npz":
            with np.load(path) as held:
                list(held.values())
        case ".csv":
            with path.open(newline="") as file:
                assert len(set(map(len, csv.reader(file)))) == 1, "rows of unequal length, or none"
        case ".png":
            assert path.read_bytes().endswith(b"IEND\xaeB`\x82"), "a picture cut short"
        case ".safetensors":
            with safe_open(path, "pt") as file:
                values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if path.name.startswith("model") and not all(bool(t.isfinite().all()) for t in values.values()):
                raise Wrong("NaN", str(path))
    if path.name == "summary.json" and "by_client" in (summary := json.loads(path.read_text())):
        for needed in ("history.csv", *(["models.safetensors"] if summary["data"]["dataset"] != "sites" else [])):
            assert (path.parent / needed).exists(), f"there is no {needed}"


def examine(here):
    """Raise Wrong if something that the case wrote is temporary or cannot be read, or holds a model with NaN."""
    for path in sorted(here.rglob("*")):
        if path.name == MARK:
            raise Wrong("executed", str(path))
        if path.suffix in (".part", ".tmp"):
            raise Wrong("left", str(path))
        if path.parent != here and path.is_file() and PLANTED.get(path) != path.stat().st_mtime_ns:
            try:
                readable(path)
            except Wrong:
                raise
            except Exception as problem:
                raise Wrong("left", f"{path}: {problem!r}") from None


def judge(kind, number, seed, here):
    """Run a case in the folder `here`; its outcome and what was said."""
    draw = Draw(f"{seed} {kind} {number}")
    draw.broken, draw.number = draw.random() < 0.4, number
    torch.manual_seed(number)
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    os.chdir(here)
    PLANTED.clear()
    outcome, text = "ok", ""
    with contextlib.ExitStack() as stack:
        if draw.random() > 0.05:  # pictures take a second
            for module, names in PICTURES.items():
                stack.enter_context(mock.patch.multiple(module, **{name: lambda *_, **__: None for name in names}))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(mock.patch.object(files.os, "fsync"))
        try:
            KINDS[kind][0](draw)
            text = draw.answer
        except (UsageError, RunError) as problem:
            outcome = "lines" if "\n" in str(problem) or not str(problem) else "refused"
            text = str(problem)
        except Wrong as problem:
            outcome, text = problem.args
        except Exception:
            outcome, text = "unexpected", traceback.format_exc()
    try:
        examine(here)
    except Wrong as problem:
        if outcome in GOOD:
            outcome, text = problem.args
    return outcome, text


def work(pipe, other, seed, out, base):
    """A process that runs the cases it is told, and says how they ended, until nobody is there to tell."""
    other.close()
    fuzz_cases.BASE = base
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    if not base.exists():
        prepare(base)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            kind, number = pipe.recv()
            pipe.send(judge(kind, number, seed, out / "cases" / f"{kind}-{number}"))


class Worker:
    """A process for cases, started anew when one hangs or ends it, and after EACH cases."""

    EACH = 100

    def __init__(self, seed, out):
        self.about, self.process, self.left = (seed, out, out / f"base-{code()}"), None, 0

    def run(self, kind, number):
        """A case's outcome, what was said, and seconds."""
        if self.left == 0:
            self.stop()
            self.pipe, theirs = multiprocessing.Pipe()
            self.process = multiprocessing.get_context("fork").Process(
                target=work, args=(theirs, self.pipe, *self.about), daemon=True
            )
            self.process.start()
            theirs.close()
            self.left = self.EACH
        self.left -= 1
        begin, before = time.monotonic(), self.seconds()
        self.pipe.send((kind, number))
        try:
            while not self.pipe.poll(1) and max(self.seconds() - before, (time.monotonic() - begin) / 10) < LIMIT:
                pass
            result = self.pipe.recv() if self.pipe.poll() else ("time-out", "")
        except (EOFError, ConnectionError):
            self.process.join()
            result = "died", f"exit code {self.process.exitcode}"
        if result[0] in ("time-out", "died"):
            self.left = 0
        return *result, round(time.monotonic() - begin, 3)

    def seconds(self):
        """Seconds of a processor's time that the process has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=sum(count for _, count, _ in KINDS.values()))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--case", metavar="KIND/NUMBER", help="run one case here and show what it says")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "kinfed-fuzz")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    worker = Worker(args.seed, out)
    if args.case:
        kind, _, number = args.case.partition("/")
        print(*worker.run(kind, int(number)), f"in {out}/cases/{kind}-{number}", sep="\n")
        return worker.stop()
    share = args.cases / sum(count for _, count, _ in KINDS.values())
    log, at = out / f"log-{args.seed}.jsonl", code()
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    results = {(record["kind"], record["number"]): record for record in records if record["code"] == at}
    counts = {kind: math.ceil(KINDS[kind][1] * share) for kind in args.only}
    every = sorted((number / count, kind, number) for kind, count in counts.items() for number in range(count))
    left = [(kind, number) for _, kind, number in every if (kind, number) not in results]  # all kinds side by side
    with log.open("a") as file:
        for kind, number in left:
            outcome, text, seconds = worker.run(kind, number)
            record = {"kind": kind, "number": number, "outcome": outcome, "said": text[-3000:], "seconds": seconds}
            results[kind, number] = record | {"code": at}
            print(json.dumps(results[kind, number]), file=file, flush=True)
            if outcome in GOOD:
                shutil.rmtree(out / "cases" / f"{kind}-{number}", ignore_errors=True)
            else:
                print(f"{kind}/{number}: {outcome}: {(text.strip().splitlines() or [''])[-1][:300]}", flush=True)
    for kind in args.only:
        print(kind, dict(Counter(record["outcome"] for record in results.values() if record["kind"] == kind)))
    worker.stop()
    for part, (kinds, least) in PARTS.items():
        if set(kinds) <= set(args.only) and sum(counts[kind] for kind in kinds) >= least:
            page(part, [results[kind, number] for _, kind, number in every if kind in kinds], args)


def code():
    """What identifies the code that is run."""
    seen = hashlib.sha256()
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("fuzz_*.py")]):
        seen.update(path.read_bytes())
    return seen.hexdigest()[:12]


def page(part, records, args):
    """Write what was counted."""
    counted = {
        kind: Counter(record["outcome"] for record in records if record["kind"] == kind) for kind in PARTS[part][0]
    }
    totals = sum(counted.values(), Counter())
    shown = [*GOOD, *(outcome for outcome in BAD if totals[outcome])]
    lines = [f"| kind | what | cases | {' | '.join(shown)} |", "| --- | --- |" + " ---: |" * (len(shown) + 1)]
    for kind, counts in (counted | ({"all": totals} if len(counted) > 1 else {})).items():
        what = KINDS[kind][2] if kind in KINDS else ""
        numbers = [counts.total(), *(counts[outcome] for outcome in shown)]
        lines.append(f"| {kind} | {what} | {' | '.join(f'{number:,}' for number in numbers)} |")
    parts = ("torch", "numpy", "polars", "safetensors", "flwr")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in parts)
    seconds = [record["seconds"] for record in records]
    last = [record["said"].strip().rpartition("\n")[2][-200:] for record in records]
    bad = [
        f"- {record['kind']}/{record['number']}, {record['outcome']}: {text}"
        for record, text in zip(records, last, strict=True)
    ]
    only = "" if args.only == list(KINDS) else f" --only {' '.join(args.only)}"
    text = [
        f"Written by `python evidence/fuzz.py --cases {args.cases} --seed {args.seed}{only}`",
        f"on {platform.machine()}, Python {platform.python_version()}, {versions}.",
        f"There were {len(records):,} cases in {sum(seconds) / 60:.0f} minutes, the longest in {max(seconds):.0f} s.",
        *ABOUT[part],
        *("", *lines, ""),
        *(families(records) if part == "modules" else []),
        *(f"- {outcome}: {what}" for outcome, what in (GOOD | BAD).items() if part == "fuzz" or totals[outcome]),
        *("", "Outcomes without a column were never seen.", ""),
        *(line for line, record in zip(bad, records, strict=True) if record["outcome"] in BAD),
    ]
    put(PAGE, part, "\n".join(text), "Odd and broken input")


def families(records):
    """A table of the families of modules: how many were equal everywhere, under all executors but vmap, or refused."""
    lines = [
        "| family | cases | equal | equal, not by `vmap` | refused | wrong |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    names = list(fuzz_modules.FAMILIES)
    for i, name in enumerate(names):
        of_family = [record for record in records if record["number"] % len(names) == i]
        good = [record for record in of_family if record["outcome"] == "ok"]
        alone = [record for record in good if not record["said"].endswith(": ")]
        refused = [record for record in of_family if record["outcome"] == "refused"]
        counts = (
            len(of_family),
            len(good) - len(alone),
            len(alone),
            len(refused),
            len(of_family) - len(good) - len(refused),
        )
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(map(str, counts))} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
