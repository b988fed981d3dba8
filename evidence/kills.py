"""Stop runs at random times and in the middle of saving, go on, and compare bytes: python evidence/kills.py

Of every kind of command (run, sweep, reproduce), executor and precision there is an unbroken run. A trial starts the
same command, stops it by SIGKILL, SIGTERM or SIGINT, goes on with it (`kinfed resume` without another word, or the same
command again), often stops it once more, and compares every file of numbers with the unbroken run's. Most programs
are forked from this one, which has imported all that they import, and draw no pictures, so that hundreds of trials take
minutes; every sixteenth is a program from the start, and of its sweeps and tables two runs go side by side. Where a
program is to be stopped in the middle of saving, its own process is made to wait there: the product knows nothing of
it. Writes docs/evidence/kills.md. `--stops N` and `--seed S` do others and write nothing.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from textwrap import fill

import torch

from kinfed_papers.result_pages import write_page

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "kills.md"
STOPS, MOST = 200, 5  # in all, and of one command
COMPARED = ("models.safetensors", "history.csv", "relations.npz", "diagnostics.csv")
SMALL = ["federation.clients=6", "federation.partition.groups=2", "rounds=12", "evaluate_every=2", "model=linear"]
KINDS = ("run", "sweep", "reproduce")
SETTINGS = [
    (e, p) for e in ("auto", "fused", "loop", "vmap") for p in ("float32", "bf16") if (e, p) != ("fused", "bf16")
]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
IMPORTED = ("sklearn.datasets", "torch._dynamo", "kinfed.cli.program", "kinfed.plots.charts", "kinfed.plots.heatmaps")
MOMENTS = ("first second", "any time", "half a file", "before a file's name")
MARK = "KINFED_KILLS"  # in the environment of all processes of a trial
PAPER = """source = "Made up"
seeds = 1
spread = "seeds"
[experiment]
rounds = 12
evaluate_every = 2
model = "linear"
training = { epochs = 1, batch = 16, optimiser = { name = "sgd", lr = 0.1 } }
federation = { dataset = "digits", clients = 6, partition = "iid" }
[rows]
fedaghn = { printed = "FedAGHN", score = "mixed" }
[rows.fedavg]
printed = "FedAvg"
"""
TABLE = """title = "Digits"
where = "Table 1"
printed = "1"
[columns."digits/iid"]
dataset = "Digits"
setting = "IID"
"""
NUMBERS = "table,dataset,setting,method,metric,mean,std,note\n1,Digits,IID,FedAGHN,accuracy_pct,1,,\n"
FROM_THE_START = """import os, sys
from pathlib import Path
from kinfed import cli
if __name__ == "__main__":
    if "reproduce" in sys.argv:
        from kinfed_papers import published_table
        published_table.PAPERS = Path(os.environ["KINFED_KILLS_PAPERS"])
    Path("on").touch()
    sys.exit(cli.main())
"""


class Program:
    """A command under way, with its standard error in a file."""

    def __init__(self, folder, arguments, environment, fresh, pause):
        self.folder, self.errors, self.mark = folder, folder / "errors.txt", environment[MARK]
        self.errors.write_text("")
        self.on, self.waits, self.go = (folder / name for name in ("on", "waits", "go"))
        for path in (self.on, self.waits, self.go):
            path.unlink(missing_ok=True)
        self._start(arguments, environment, fresh, pause)
        until = time.monotonic() + 120
        while not self.on.exists():  # before that it is Python that starts, and nothing of ours
            if time.monotonic() > until:
                sys.exit(f"{folder}: not begun within two minutes")
            time.sleep(0.002)
        self.begun = time.monotonic()

    def _start(self, arguments, environment, fresh, pause):
        folder = self.folder
        if fresh:
            script = folder / "program.py"
            script.write_text(FROM_THE_START)
            with self.errors.open("w") as errors:
                how = {"cwd": folder, "stderr": errors, "stdout": errors, "preexec_fn": hear, "env": environment}
                self.id = subprocess.Popen([sys.executable, str(script), *arguments], **how).pid
            return
        self.id = os.fork()
        if not self.id:
            self._become(arguments, environment, pause)

    def _become(self, arguments, environment, pause):
        """In the forked process: the command, and nothing after it."""
        from kinfed import cli
        from kinfed.plots import charts, heatmaps
        from kinfed_papers import published_table

        code = 1
        try:
            hear()
            os.chdir(self.folder)
            os.environ.update(environment)
            out = os.open(self.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            published_table.PAPERS = Path(environment["KINFED_KILLS_PAPERS"])
            for drawing in ("classes_by_client", "accuracy_by_round", "accuracy_by_client"):
                setattr(charts, drawing, lambda *_, **__: None)
            heatmaps.relation_heatmap = lambda *_, **__: None
            if pause:
                self._pause(*pause)
            sys.argv[1:] = arguments
            self.on.touch()
            code = cli.main()
        finally:
            os._exit(code)

    def _pause(self, where, number):
        """Wait in the `number`-th writing of a file until somebody says go."""
        from kinfed.core import checkpoint

        left = number
        rename, pieces = Path.replace, checkpoint._pieces

        def wait():
            nonlocal left
            left -= 1
            if not left:
                self.waits.touch()
                until = time.monotonic() + 30
                while not self.go.exists() and time.monotonic() < until:
                    time.sleep(0.005)

        def wait_and_rename(part, path):
            wait()
            return rename(part, path)

        def piece_by_piece(array):
            for piece in pieces(array):
                yield piece[: len(piece) // 2] if piece.ndim and len(piece) > 1 else piece
                wait()
                if piece.ndim and len(piece) > 1:
                    yield piece[len(piece) // 2 :]

        if where == "half a file":
            checkpoint._pieces = piece_by_piece
        else:
            Path.replace = wait_and_rename

    def poll(self):
        """The exit code, negative for a signal; None while it runs."""
        try:
            id, status = os.waitpid(self.id, os.WNOHANG)
        except ChildProcessError:
            return self._code
        if not id:
            return None
        self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, seconds, waits=False):
        """The exit code, or None if it still runs after so many seconds, or `waits` where it was told to."""
        until = self.begun + seconds
        while (code := self.poll()) is None and time.monotonic() < until and not (waits and self.waits.exists()):
            time.sleep(0.005)
        return code

    def stop(self, number):
        """Send a signal and return the exit code."""
        if self.poll() is None:
            os.kill(self.id, number)
            self.go.touch()
        until = time.monotonic() + 120
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                os.kill(self.id, signal.SIGKILL)
                sys.exit(f"{self.folder}: not ended two minutes after {number.name}")
            time.sleep(0.005)
        return code

    def orphans(self):
        """Processes of this trial that still run when ten seconds are over."""
        until = time.monotonic() + 10
        while (processes := find_marked(self.mark)) and time.monotonic() < until:
            time.sleep(0.05)
        return processes


def hear():
    """Whoever runs this in the background ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def find_marked(mark):
    """Ids of the processes that were started in a trial's environment."""
    ids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                ids.append(int(folder.name))
        except OSError:  # another's, or gone
            continue
    return [id for id in ids if "zombie" not in state(id)]


def state(id):
    try:
        return Path(f"/proc/{id}/status").read_text()
    except OSError:
        return "zombie"


def command(kind, executor, precision, jobs, often):
    """The arguments of a kind of command."""
    how = [
        f"how.executor={executor}",
        f"how.precision={precision}",
        "--quiet",
        *([] if often is None else [f"how.checkpoint_seconds={often}"]),
    ]
    beside = ["--jobs", str(jobs)]
    if kind == "run":
        return ["run", "fedaghn", *SMALL, "--out", "out", *how]
    if kind == "sweep":
        return ["sweep", "fedaghn", *SMALL, "training.optimiser.lr=0.1,0.2", "--out", "out", *beside, *how]
    return ["papers", "run", "made.table1", "--out", "out", *beside, *how]


def numbers(folder):
    """The bytes of every file of numbers below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.name in COMPARED}


class Trials:
    """All of it, in a folder of its own."""

    def __init__(self, folder, draw):
        self.folder, self.draw, self.unbroken = folder, draw, {}
        papers = folder / "papers" / "made"
        papers.mkdir(parents=True)
        for name, text in (("paper.toml", PAPER), ("table1.toml", TABLE), ("printed.csv", NUMBERS)):
            (papers / name).write_text(text)
        self.environment = {**os.environ, "KINFED_KILLS_PAPERS": str(papers.parent), "OMP_NUM_THREADS": "1"}

    def start(self, folder, arguments, fresh=False, pause=None):
        folder.mkdir(exist_ok=True)
        return Program(folder, arguments, {**self.environment, MARK: folder.name}, fresh, pause)

    def reference(self, kind, executor, precision):
        """Bytes of the unbroken run, and the seconds that it took."""
        if (kind, executor, precision) not in self.unbroken:
            folder = self.folder / f"{kind}-{executor}-{precision}"
            program = self.start(folder, command(kind, executor, precision, 1, None))
            if program.wait(300) != 0:
                sys.exit(f"the unbroken run failed: {program.errors.read_text()}")
            self.unbroken[kind, executor, precision] = numbers(folder / "out"), time.monotonic() - program.begun
            shutil.rmtree(folder)
        return self.unbroken[kind, executor, precision]

    def trial(self, index):
        """What was done in a trial, and what went wrong in it."""
        draw = self.draw
        kind = KINDS[index % 3]
        executor, precision = SETTINGS[index // 3 % len(SETTINGS)]
        fresh = index % 16 == 5
        jobs = 2 if fresh and kind != "run" else 1
        often = draw.choice([None, "0"])
        wanted, duration = self.reference(kind, executor, precision)
        folder, problems, stops = self.folder / f"trial-{index}", [], []
        arguments = first = command(kind, executor, precision, jobs, often)
        while True:
            again = bool(stops)
            if again and kind == "run" and (folder / "out" / "config.toml").exists():
                arguments = ["resume", "out", "--quiet", *([f"how.checkpoint_seconds={often}"] if often else [])]
            moment = draw.choice(MOMENTS[:2] if fresh else MOMENTS)
            pause = (moment, draw.randint(1, 25)) if moment in MOMENTS[2:] else None
            number = draw.choice(SIGNALS)
            program = self.start(folder, arguments if again else first, fresh, pause)
            if len(stops) == MOST or (stops and draw.random() < 0.35):  # now to the end
                if pause:
                    program.go.touch()
                code = program.wait(600)
                break
            seconds = 300 if pause else draw.uniform(0, 1 if moment == "first second" else duration + 3 * fresh)
            program.wait(seconds, waits=True)
            code = program.stop(number)
            errors = program.errors.read_text()
            if code == 0:
                if stops:
                    break
                moment = "too late"
            elif code != CODES[number]:
                problems.append(f"exit code {code} after {number.name}")
            if number != signal.SIGKILL and code and (errors.count("\n") != 1 or not errors.startswith("kinfed: ")):
                problems.append(f"said after {number.name}: {errors[-300:]!r}")
            if program.orphans():
                problems.append(f"still running after {number.name}: {program.orphans()}")
            stops.append((moment, number.name))
            if code == 0:
                break
        if code != 0:
            problems.append(f"went on to exit code {code}: {program.errors.read_text()[-300:]!r}")
        else:
            digests = numbers(folder / "out")
            if digests.keys() != wanted.keys():
                problems.append(f"files differ: {sorted(digests.keys() ^ wanted.keys())}")
            problems += [f"{name} differs" for name in digests.keys() & wanted.keys() if digests[name] != wanted[name]]
            left = [
                p
                for p in (folder / "out").rglob("*")
                if p.suffix == ".part" or p.name in ("how.json", "checkpoint.safetensors")
            ]
            problems += [f"left behind: {p.name}" for p in left]
        if not problems:
            shutil.rmtree(folder)
        return (kind, executor, precision, fresh), stops, problems


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stops", type=int, default=STOPS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for module in IMPORTED:
        import_module(module)
    folder = Path(tempfile.mkdtemp(prefix="kinfed-kills-"))
    trials, done, bad = Trials(folder, random.Random(args.seed)), [], []
    begun = time.monotonic()
    while (count := count_stops(done).total()) < args.stops:
        what, stops, problems = trials.trial(len(done))
        bad += [f"trial {len(done)}, {' '.join(map(str, what))}, {stops}: {problem}" for problem in problems]
        done.append((what, stops))
        spent = time.monotonic() - begun
        line = f"{count + len(stops)} of {args.stops}, {len(bad)} problems, {spent:.0f} s: {what} {stops}"
        print(line, *problems, sep="\n  ", flush=True)
    if not bad:
        shutil.rmtree(folder)
    if (args.stops, args.seed) == (STOPS, 0):
        write_page(PAGE, page(done, bad))
    sys.exit(bool(bad))


def count_stops(done):
    """How many stops of each kind there were, in time."""
    return Counter(stop for _, stops in done for stop in stops if stop[0] != "too late")


def page(done, bad):
    stops = count_stops(done)
    names = [number.name for number in SIGNALS]
    rows = [f"| {moment} | {' | '.join(str(stops[moment, name]) for name in names)} |" for moment in MOMENTS]
    kinds = Counter(
        (kind, f"{executor}, {precision}")
        for (kind, executor, precision, _), stops_of_trial in done
        for _ in stops_of_trial
    )
    hows = [f"{executor}, {precision}" for executor, precision in SETTINGS]
    table = [f"| {how} | {' | '.join(str(kinds[kind, how]) for kind in KINDS)} |" for how in hows]
    fresh = sum(what[3] for what, _ in done)
    result = "All ended with the same bytes." if not bad else f"{len(bad)} did not:"
    return "\n".join(
        [
            "# Runs that are stopped and resumed",
            "",
            fill(
                f"Written by `python evidence/kills.py`: {len(done)} commands, {sum(stops.values())} stops. "
                "A signal stops a command. It goes on by `kinfed resume FOLDER` (`run`) or the same command "
                "again (`sweep`, `reproduce`). It is perhaps stopped again, and ends. Then every "
                "`models.safetensors`, `history.csv`, `relations.npz` and `diagnostics.csv` is compared, byte by byte, "
                "with those of a run that nobody stopped. `kinfed resume` gets no options for executor and precision. "
                "Half of the commands write a checkpoint whenever they may. The others do so, as usual, only "
                "after ten seconds, when such runs are over. After SIGTERM and SIGINT the exit code must be "
                "143 or 130, and the message one line. No process may be left, and no half-written file. "
                f"{fresh} programs run from their start, imports and pictures included. The others are forked "
                "where imports are over, and draw none.",
                120,
            ),
            "",
            f"**{result}**",
            "",
            *(f"- {problem}" for problem in bad),
            *([""] if bad else []),
            f"| stopped | {' | '.join(names)} |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            f"| stops of | {' | '.join(KINDS)} |",
            "| --- | --- | --- | --- |",
            *table,
            "",
            f"PyTorch {torch.__version__}, one thread of {torch.backends.cpu.get_cpu_capability()}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
