"""What breaks when something breaks: python evidence/flower_faults.py [--times 20] [--only CASE ...] [--jobs 2]

Federations of separate processes over TLS, FedAGHN on digits; a run has several faults of one kind. Counts the answers
that were left out, the rounds that were trained twice, the sites that ended without a model, and those that ended with
another private state than a simulation in which the clients that were left out did not take part in those rounds.
Finished runs are kept in --keep, and what is missing is run when asked again. Writes docs/evidence/flower-faults.md.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from flower_federation import EXAMPLES, Federation, environment
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from kinfed import Federation as Clients
from kinfed.core import trees
from kinfed.core.engine import run
from kinfed.core.history import History, Recorder
from kinfed.interrupts import catch_signals
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed_flower import plan
from kinfed_papers.result_pages import write_page

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "flower-faults.md"
SITES = 3
LIMIT = 1200  # seconds after which a run counts as failed
LATE = 60.0  # seconds, also the deadline where answers come late: more than a round takes on a busy machine
# Loaded by every Python program of a site. In its odd rounds, counted from 0, the site does what SPOIL says.
SPOILER = f"""
import os, sys
what = os.environ.get("SPOIL")
program = " ".join(sys.orig_argv)
if what and "flower node" in program:
    import time
    import torch
    from flwr.app import Array
    from kinfed.core import checkpoint
    from kinfed_flower.site import site
    from kinfed_flower.wire import connection, messages, transport
    from kinfed_flower.wire.messages import Message
    answer = connection.Connection.answer

    def again(self, arrived, content):
        answer(self, arrived, content)
        if what == "twice":
            answer(self, arrived, content)

    connection.Connection.answer = again
    real, save, pack, digest = site.Site.reply, checkpoint.write, transport.pack, messages.layout_digest
    spoiled = False

    def spoiling(self, kind, message):
        global spoiled
        spoiled = kind == "round" and message.fields.get("round", 0) % 2 == 1
        reply = real(self, kind, message)
        if not spoiled or "upload" not in reply.fields:
            return reply
        if what == "late":
            time.sleep({LATE})
        change = {{
            "nan": lambda t: t * torch.nan,
            "shape": lambda t: t[:-1],
            "norm": lambda t: t * 1e6,
        }}.get(what, lambda t: t)
        return Message(reply.fields, {{name: change(t) for name, t in reply.arrays.items()}})

    def full(arrays, path, metadata=None):
        if what == "disk" and spoiled:
            raise OSError(28, "No space left on device")
        save(arrays, path, metadata)

    def garbled(reply):
        content = pack(reply)
        if what == "garbage" and spoiled:
            for name in list(content["arrays"]):
                content["arrays"][name] = Array("float32", (99,), "numpy.ndarray", os.urandom(500))
        return content

    def other(layout):
        return "other" if what == "layout" and spoiled else digest(layout)

    site.Site.reply, checkpoint.write, transport.pack, messages.layout_digest = spoiling, full, garbled, other
"""


def node_killed(federation, name):
    """A site's node is killed and started again at once"""
    time.sleep(random.uniform(0, 2))
    federation.kill(name)
    federation.start(name)


def link_killed(federation, name):
    """The SuperLink is killed and started again 5 seconds later"""
    os.kill(superlink(federation), signal.SIGKILL)
    time.sleep(5)
    federation.up()


def app_killed(federation, name):
    """The process of the run is killed"""
    time.sleep(random.uniform(0, 4))
    for process in programs(b"kinfed_flower.programs.runner", f"KINFED_FLOWER_HOME={federation.folder}/server"):
        os.kill(process, signal.SIGKILL)


CASES = {  # what strikes, or what a site does by itself, and how that reads
    "node killed": (node_killed, "", node_killed.__doc__),
    "SuperLink killed": (link_killed, "", link_killed.__doc__),
    "server app killed": (app_killed, "", app_killed.__doc__),
    "late": (None, "late", f"A site replies {LATE:.0f} s late, after the deadline"),
    "twice": (None, "twice", "A site's node sends every reply a second time"),
    "NaN": (None, "nan", "A site's upload is NaN"),
    "wrong shape": (None, "shape", "One number of an upload is missing"),
    "huge norm": (None, "norm", "An upload is a million times too large"),
    "wrong layout": (None, "layout", "A site's model has other layers"),
    "garbage": (None, "garbage", "The bytes of an upload are random"),
    "disk full": (None, "disk", "A site cannot write what it has trained"),
}


def superlink(federation):
    """The number of its process."""
    return json.loads((federation.folder / "server" / "link.json").read_text())["pid"]


def programs(name, mark):
    """Numbers of the processes of a name that have such a line in their environment."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if name in (process / "cmdline").read_bytes() and mark.encode() in (process / "environ").read_bytes():
                pids.append(int(process.name))
        except (OSError, ProcessLookupError):
            continue
    return pids


def once(case, faults):
    """One run: its faults, answers left out, rounds trained twice, models lost, wrong states, seconds of each fault."""
    strike, spoil, _ = CASES[case]
    rounds = 2 * faults + 1 if spoil else 3 * faults + 2
    deadline = LATE if spoil == "late" else 300.0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "sitecustomize.py").write_text(SPOILER)
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        victim = {"SPOIL": spoil, "PYTHONPATH": path, "VICTIM": str(folder)}
        with Federation(folder, SITES, **{f"site-{SITES}": victim}) as federation:
            process = federation.launch("fedaghn", rounds, flower={"deadline": deadline})
            watchdog = threading.Timer(LIMIT, process.kill)
            watchdog.start()
            try:
                lines, seconds = follow(process, federation, strike, rounds, faults)
            finally:
                watchdog.cancel()
                process.kill()
            if process.wait():
                return {"failed": lines[-1] if lines else "no word"}
            return {"seconds": seconds, **judge(federation, lines, rounds)}


def follow(process, federation, strike, rounds, faults):
    """Read what a run says to its end, and strike when it is due; its lines, and the seconds that each fault took."""
    lines, struck, seconds = [], None, []
    for line in process.stderr:
        lines.append(line.rstrip())
        match = re.match(r"round (\d+) of \d+: (\d+) clients", line)
        if not match:
            continue
        now, done, is_complete = time.monotonic(), int(match[1]), int(match[2]) == SITES
        if struck is not None and is_complete and (strike or done % 2 == 1):
            seconds.append(now - struck)
            struck = None
        due = done <= rounds - 2 and len(seconds) < faults if strike else done % 2 == 1 and done < rounds
        if struck is None and due:
            struck = now
            if strike:
                strike(federation, federation.names[-1])
    process.wait()
    return lines, seconds


def judge(federation, lines, rounds):
    """Compare what sites ended with and a simulation without the answers that were left out."""
    absent, waiting, done = set(), set(), Counter()
    for line in lines:
        if match := re.match(r"left client (\S+) out", line):
            waiting.add(match[1])
        elif match := re.match(r"continuing without ([^:]+)", line):
            waiting |= set(match[1].split(", "))
        elif "another one continues after the last complete round" in line:
            waiting = set()  # that round begins anew
        elif match := re.match(r"round (\d+) of \d+: (\d+) clients", line):
            absent |= {(name, int(match[1])) for name in waiting}
            done[int(match[1])] += 1
            waiting = set()
    summary = json.loads((federation.out / "summary.json").read_text())
    states, lost = {}, 0
    for name in federation.names:
        site = federation.folder / name / name / summary["sites"]["experiment"]
        try:
            lost += not load_file(site / "model.safetensors")
            states[name] = theta_counted(site / "state.safetensors", {round for who, round in absent if who == name})
        except (SafetensorError, OSError):
            lost += 1
    expected = simulate(federation, absent, rounds)
    wrong = sum(
        name in states and not torch.allclose(states[name], theta, rtol=1e-4, atol=1e-5)
        for name, theta in expected.items()
    )
    twice = rounds - summary["rounds"] + sum(done.values()) - len(done)
    return {"answers": len(absent), "lost": lost, "wrong": wrong, "rounds": twice}


def theta_counted(path, absent):
    """[d] a site's private state; that of before, if the server never accepted the round that it trained last."""
    with safe_open(path, "pt") as file:
        trained = json.loads(file.metadata()["state"])["trained"] + 1
        return file.get_tensor("base/theta" if trained in absent else "state/theta")


def simulate(federation, absent, rounds):
    """[d] each client's private state after the same run on one machine."""
    planned = plan.resolve(tomllib.loads((federation.out / "config.toml").read_text()))
    parts = [np.load(federation.folder / name / "data.npz") for name in federation.names]
    x, y = (np.concatenate([part[key] for part in parts]) for key in "xy")
    owner = np.repeat(federation.names, EXAMPLES)
    clients = Clients.from_arrays(x, y, owner, split=planned.split)

    class Partial(Simulation):
        def train(self, round, cohort, sent):
            here = torch.tensor([(clients.names[i], round + 1) not in absent for i in cohort.tolist()])
            return super().train(
                round, cohort[here], trees.unpack({name: t[here] for name, t in trees.pack(sent).items()}, sent)
            )

    learning = planned.learning
    model = planned.model((1, 8, 8), 10)
    fleet = Partial(clients, model, learning.method, learning.training, execution=Execution("loop", onednn=False))
    history = History(tuple(clients.names), clients.task)
    run(learning.method, fleet.roster(), fleet, Recorder(history), rounds=rounds)
    return dict(zip(clients.names, fleet.state.theta, strict=True))


class Results:
    """Finished runs, one line of JSON each, and what is still to be run: of the rarest case first."""

    def __init__(self, path, cases, times, faults, jobs):
        self.path, self.cases, self.times, self.faults, self.jobs = path, cases, times, faults, jobs
        self._lock = threading.Lock()
        self.runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self._under_way, self.stopped = Counter(), False

    def count(self, case):
        """How many faults there were; a failed run counts as one."""
        return sum(len(run.get("seconds", [0])) for run in self.runs if run["case"] == case)

    def next(self):
        """The case to run now; None when all are done."""
        with self._lock:
            planned = {case: self.count(case) + self.faults * self._under_way[case] for case in self.cases}
            case = min(planned, key=planned.get)
            if self.stopped or planned[case] >= self.times:
                return None
            self._under_way[case] += 1
            return case

    def add(self, run):
        """Keep a run, and write the page."""
        with self._lock:
            self._under_way[run["case"]] -= 1
            self.runs.append(run)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(run) + "\n")
            print(json.dumps(run), flush=True)

    def write(self):
        """The page, of all runs that are kept."""
        rows = []
        for case, (_, _, label) in CASES.items():
            runs = [run for run in self.runs if run["case"] == case]
            if not runs:
                rows.append(f"| {label} | not run yet |{' |' * 8}")
                continue
            good = [run for run in runs if "failed" not in run]
            seconds = [s for run in good for s in run["seconds"]]
            total = [sum(run[key] for run in good) for key in ("rounds", "answers", "lost", "wrong")]
            spread = f"{statistics.median(seconds):.0f} | {max(seconds):.0f}" if seconds else "- | -"
            rows.append(
                f"| {label} | {len(seconds)} | {len(runs)} | {len(runs) - len(good)} | "
                f"{' | '.join(map(str, total))} | {spread} |"
            )
        write_page(
            PAGE,
            "# Faults of a federation\n\n"
            f"Written by `python evidence/flower_faults.py --times {self.times} --faults {self.faults} "
            f"--jobs {self.jobs}`.\n\n"
            f"{environment()} A server and {SITES} sites are on this one machine, over TLS. No more than {self.jobs} "
            f"such {'federations' if self.jobs > 1 else 'federation'} ran at a time. They train FedAGHN. Up to "
            f"{self.faults} faults of a kind come one after another, at one site. "
            "*Failed* are runs that did not finish. *Rounds lost* were complete and had to be trained again. *Replies "
            "left out* are uploads without which a round continued, over all runs. *Models lost* are sites that "
            "ended without one. For *wrong*, a simulation leaves out the same clients in the same rounds. A "
            "site is wrong if its final private state differs from the simulation's. *Seconds* begin at the "
            "end of the round before the fault. They end with the next round in which all sites take part. "
            "That is two rounds, if there is nothing to wait for.\n\n"
            "| fault | faults | runs | failed | rounds lost | replies left out | models lost | wrong | seconds, median "
            "| most |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows) + "\n",
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="faults of each kind")
    parser.add_argument("--faults", type=int, default=5, help="in a run, one after another")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--jobs", type=int, default=2, help="federations side by side")
    parser.add_argument("--once", choices=list(CASES), help="one run of a case, told as JSON")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "flower-faults.jsonl", metavar="FILE")
    args = parser.parse_args()
    if args.once:
        return print(json.dumps(once(args.once, args.faults)))
    results = Results(args.keep, args.only, args.times, args.faults, args.jobs)
    programs = {}

    def work(lane):
        while case := results.next():
            command = [sys.executable, __file__, "--once", case, "--faults", str(args.faults)]
            how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
            with subprocess.Popen(command, **how) as program:
                programs[lane] = program
                output, complaint = program.communicate()
            if results.stopped:
                return
            try:
                results.add({"case": case, **json.loads(output)})
            except ValueError:
                results.add({"case": case, "failed": (complaint.strip().splitlines() or ["no word"])[-1]})

    with ThreadPoolExecutor(args.jobs) as pool:
        lanes = [pool.submit(work, lane) for lane in range(args.jobs)]
        try:
            for lane in lanes:
                lane.result()
        except KeyboardInterrupt:
            results.stopped = True
            for program in programs.values():
                program.terminate()  # it ends its federation first
            raise
        finally:
            results.write()


if __name__ == "__main__":
    with catch_signals():
        main()
