"""What breaks when something breaks: python benchmarks/flower_faults.py [--times 20] [--only CASE ...]

A federation of separate processes over TLS, FedAGHN on digits, and one fault a run. Counts the answers that were left
out, the sites that ended without a model, and the sites that ended with another private state than a simulation in
which the clients that were left out did not take part in those rounds. Writes docs/results/flower-faults.md.
"""

import argparse
import json
import os
import re
import signal
import statistics
import tempfile
import time
import tomllib
from pathlib import Path

import numpy as np
import torch
from flower_federation import EXAMPLES, Federation, environment
from safetensors import SafetensorError
from safetensors.torch import load_file

from kinfed import Federation as Clients
from kinfed import wire
from kinfed.engine import run
from kinfed.fleet import Simulation
from kinfed.flower import plan
from kinfed.record import History

PAGE = Path(__file__).parents[1] / "docs" / "results" / "flower-faults.md"
ROUNDS = 10
SPOILER = """
import os, sys
what = os.environ.get("SPOIL")
if what and any("flwr-clientapp" in word for word in sys.orig_argv):
    import torch
    from kinfed import checkpoint
    from kinfed.flower import site
    from kinfed.flower.messages import Message
    real, save = site.Site.answer, checkpoint.save_file

    def answer(self, kind, order):
        reply = real(self, kind, order)
        if kind != "round" or order.words.get("round") != 2 or "upload" not in reply.words:
            return reply
        if what == "silent":
            os.kill(os.getpid(), 9)
        change = {
            "nan": lambda t: t * torch.nan,
            "shape": lambda t: t[:-1],
            "norm": lambda t: t * 1e6,
            "type": lambda t: t.double(),
        }[what]
        return Message(reply.words, {name: change(t) for name, t in reply.arrays.items()})

    def full(arrays, path, metadata=None):
        if metadata and '"trained": 2,' in metadata.get("memory", ""):
            raise OSError(28, "No space left on device")
        save(arrays, path, metadata)

    if what == "disk":
        checkpoint.save_file = full
    else:
        site.Site.answer = answer
"""


def node_killed(federation, name):
    """A SuperNode is killed while it trains and started again 5 seconds later"""
    federation.kill(name)
    time.sleep(5)
    federation.start(name)


def link_killed(federation, name):
    """The SuperLink is killed and started again 5 seconds later"""
    os.kill(json.loads((federation.folder / "server" / "link.json").read_text())["pid"], signal.SIGKILL)
    time.sleep(5)
    federation.up()


def app_killed(federation, name):
    """The server's app is killed"""
    session = json.loads((federation.folder / "server" / "link.json").read_text())["pid"]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == session and b"flwr-serverapp" in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue


CASES = {
    "node killed": (node_killed, ""),
    "SuperLink killed": (link_killed, ""),
    "server app killed": (app_killed, ""),
    "disk full at a site": (None, "disk"),
    "NaN": (None, "nan"),
    "wrong shape": (None, "shape"),
    "wrong type": (None, "type"),
    "a million times too long": (None, "norm"),
    "client app dies over it": (None, "silent"),
}
SAID = {
    "disk full at a site": "A site cannot write what it has trained in round 3",
    "NaN": "A site's upload of round 3 is NaN",
    "wrong shape": "One number of it is missing",
    "wrong type": "It is in double precision",
    "a million times too long": "It is a million times as long",
    "client app dies over it": "The site's process is killed whenever it answers for round 3",
}


def once(case, sites):
    """One run with one fault: answers left out, models lost, wrong states, seconds until all is as before."""
    strike, spoil = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "sitecustomize.py").write_text(SPOILER)
        with Federation(folder, sites) as federation:
            victim = federation.names[-1]
            if spoil:
                federation.kill(victim)
                federation.start(victim, SPOIL=spoil, PYTHONPATH=str(folder))
            process = federation.launch("fedaghn", ROUNDS, flower={"deadline": 300.0})
            lines, struck, recovered = [], None, None
            for line in process.stderr:
                lines.append(line.rstrip())
                now = time.monotonic()
                if f"round 2 of {ROUNDS}" in line and struck is None:
                    struck = now
                    if strike:
                        strike(federation, victim)
                elif re.match(rf"round \d+ of {ROUNDS}: {sites} clients", line) and struck and not recovered:
                    recovered = now
            if process.wait():
                return {"failed": lines[-1]}
            out = judge(federation, lines)
        return out | {"seconds": recovered - struck if recovered else float("nan")}


def judge(federation, lines):
    """Compare what sites ended with and a simulation without the answers that were left out."""
    absent, waiting = set(), set()
    for line in lines:
        if found := re.match(r"left client (\S+) out", line):
            waiting.add(found[1])
        elif found := re.match(r"went on without ([^:]+)", line):
            waiting |= set(found[1].split(", "))
        elif found := re.match(r"round (\d+) of", line):
            absent |= {(name, int(found[1])) for name in waiting}
            waiting = set()
    summary = json.loads((federation.out / "summary.json").read_text())
    states, lost = {}, 0
    for name in federation.names:
        site = federation.folder / name / name / summary["experiment"]
        try:
            lost += not load_file(site / "model.safetensors")
            states[name] = load_file(site / "state.safetensors")["state/theta"]
        except (SafetensorError, OSError):
            lost += 1
    expected = simulate(federation, absent)
    wrong = sum(
        name in states and not torch.allclose(states[name], theta, rtol=1e-4, atol=1e-5)
        for name, theta in expected.items()
    )
    return {"answers": len(absent), "lost": lost, "wrong": wrong, "rounds": ROUNDS - summary["rounds"]}


def simulate(federation, absent):
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
                round, cohort[here], wire.unpack({name: t[here] for name, t in wire.pack(sent).items()}, sent)
            )

    learning = planned.learning
    model = planned.model((1, 8, 8), 10)
    fleet = Partial(clients, model, learning.method, learning.training, executor="loop", onednn=False)
    history = History(tuple(clients.names), clients.task)
    run(learning.method, fleet.roster(), fleet, history, rounds=ROUNDS)
    return dict(zip(clients.names, fleet.state.theta, strict=True))


def main():
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--times", type=int, default=20)
    asked.add_argument("--sites", type=int, default=3)
    asked.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    asked = asked.parse_args()
    rows = []
    for case in asked.only:
        found = [once(case, asked.sites) for _ in range(asked.times)]
        failed = [f["failed"] for f in found if "failed" in f]
        good = [f for f in found if "failed" not in f]
        said = (CASES[case][0].__doc__ if CASES[case][0] else SAID[case]).strip()
        total = {key: sum(f[key] for f in good) for key in ("rounds", "answers", "lost", "wrong")}
        seconds = [f["seconds"] for f in good]
        middle = f"{statistics.median(seconds):.0f}" if seconds else "-"
        rows.append(
            f"| {said} | {asked.times} | {len(failed)} | {total['rounds']} | {total['answers']} | {total['lost']} | "
            f"{total['wrong']} | {middle} |"
        )
        print(rows[-1], *failed, sep="\n", flush=True)
    only = "" if len(asked.only) == len(CASES) else " --only " + " ".join(f'"{case}"' for case in asked.only)
    PAGE.write_text(
        "# Faults of a federation\n\n"
        f"Written by `python benchmarks/flower_faults.py --times {asked.times} --sites {asked.sites}{only}`.\n\n"
        f"{environment()} SuperLink and {asked.sites} SuperNodes on this one machine, over TLS; FedAGHN, {ROUNDS} "
        "rounds, one fault a run, in round 3. *Answers left out* are uploads that a round went on without, all runs "
        "together. *Models lost* are sites that ended without one, *wrong* those whose private state at the end is not "
        "that of a simulation in which the clients that were left out did not take part in those rounds. *Seconds* run "
        "from the fault to the next round in which all sites take part (median).\n\n"
        "| fault | runs | failed | rounds lost | answers left out | models lost | wrong | seconds |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    main()
