"""What a federation on Flower costs: bytes of every method, and seconds of a round beside those of an empty app.

    python evidence/flower.py bytes      every method at six sites in one process: what travels, by name
    python evidence/flower.py seconds    a server and its sites on this machine, over TLS
    python evidence/flower.py gateways   one site with 4, 20 and 50 clients
    python evidence/flower.py masks      20 sites in one process, with masks and without

Each writes its part of docs/evidence/flower.md.
"""

import argparse
import itertools
import json
import re
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from flower_federation import EXAMPLES, Federation, cpu_seconds, deal, environment, memory

from kinfed.core import trees
from kinfed.interrupts import catch_signals
from kinfed.methods import METHODS
from kinfed_flower import plan
from kinfed_flower.server import broker, server
from kinfed_flower.site.masked_rounds import MaskedRounds
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import Reading
from kinfed_flower.wire.messages import Node
from kinfed_papers.result_pages import put, version

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "flower.md"
ROUNDS = 6
SITES = 6
TURNS = 8  # of runs with masks and without


class InProcess:
    """A carrier whose sites answer at once, and which counts the arrays that travel by name."""

    def __init__(self, sites):
        self.sites, self.counted, self._answers, self._ids = sites, {}, {}, itertools.count()

    def nodes(self):
        return dict.fromkeys(range(len(self.sites)), Node("", ""))

    def push(self, node, kind, message, seconds):
        id = str(next(self._ids))
        self._answers[id] = answer = self.sites[node].reply(kind, message)
        assert "refused" not in answer.fields, answer.fields
        for way, message_sent in (("down", message), ("up", answer)):
            for name, array in message_sent.arrays.items():
                key = (way, f"{kind}/{name}" if kind != "round" else name)
                self.counted[key] = self.counted.get(key, 0) + trees.size(array)
        return id

    def pull(self, ids):
        return {id: self._answers.pop(id) for id in ids if id in self._answers}


def count_bytes():
    """A line a method: bytes of a client and round, beside one model down and one up."""
    broker.LOOK = 0.0
    lines = []
    for name in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            names = [f"site-{i}" for i in range(SITES)]
            deal(folder, names)
            few = Reading(few_rows=True)  # some methods take feedback of 7 rows here
            sites = [
                Site(n, folder / n / "data.npz", folder / "state", "cpu", few, policy=Policy(runs="any")) for n in names
            ]
            method = {"name": name, **({"clusters": 3} if name == "fedcedar" else {})}
            raw = {"rounds": ROUNDS, "method": method, "model": "mlp", "flower": {"clients": SITES, "classes": 10}}
            if name in ("panacea", "sfl"):
                np.savez(folder / "links.npz", adjacency=np.ones((SITES, SITES), np.float32))
                raw["flower"]["graph"] = str(folder / "links.npz")
            carrier = InProcess(sites)
            summary = server.serve(plan.resolve(raw), carrier, folder / "out", log=lambda text: None, poll=0)
        model, client_rounds = 4 * summary.cost.parameters, SITES * ROUNDS
        shares = {way: {} for way in ("down", "up")}
        for (way, key), count in carrier.counted.items():
            if not key.startswith("join/"):
                shares[way][key.partition("/")[2]] = shares[way].get(key.partition("/")[2], 0) + count
        joined = sum(count for (_, key), count in carrier.counted.items() if key.startswith("join/")) / SITES
        down, up = (sum(shares[way].values()) / client_rounds for way in ("down", "up"))
        listed = {
            w: ", ".join(f"{k} {c / client_rounds / model:.2f}" for k, c in shares[w].items() if c) for w in shares
        }
        lines.append(
            f"| {name} | {down:,.0f} | {up:,.0f} | {(down + up) / (2 * model):.2f} | "
            f"{listed['down'] or 'nothing'} | {listed['up'] or 'nothing'} | {joined / model:.2f} |"
        )
        print(lines[-1], flush=True)
    head = (
        f"Six sites, {ROUNDS} rounds, a perceptron of {summary.cost.parameters:,} parameters, and all take part. "
        "Bytes are counted over the whole run. They include the models sent to evaluate the last round, one "
        f"round's share more: {1 + 1 / ROUNDS:.2f} instead of 1. Models are given as "
        "multiples of one model, 4 bytes a parameter.\n\n"
        "| method | bytes down | bytes up | of 2 models | down, in models | up, in models | once, when joining |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    write("bytes", "Bytes per client and round", "evidence/flower.py bytes", head + "\n".join(lines))


def seconds_of(lines):
    """Seconds of each round but the first, which waits for sites to join."""
    return [float(line.split(", ")[1].split(" s")[0]) for line in lines if re.match(r"round \d+ of", line)][1:]


def measure_gateways(counts, rounds):
    """Seconds of a round, bytes and memory of one site that has so many clients, which train as one batch."""
    lines = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder, Federation(Path(folder), 1, clients=count) as federation:
            node = federation.nodes["site-1"].pid
            before = cpu_seconds(node)
            lines_of_run = federation.train("fedavg", rounds, flower={"clients": count, "classes": 0, "beside": []})
            computed = (cpu_seconds(node) - before) / rounds
            seconds = seconds_of(lines_of_run)
            summary = json.loads((federation.out / "summary.json").read_text())
            sent = summary["cost"]["bytes_per_client_and_round"]
            lines.append(
                f"| {count} | {statistics.median(seconds):.1f} | {min(seconds):.1f} to {max(seconds):.1f} | "
                f"{computed:.1f} | {memory(node)} | {sent['down']:,} | {sent['up']:,} |"
            )
            print(lines[-1], flush=True)
    head = (
        f"{environment()} One site, started with `--client`, has TLS with its key. It trains FedAvg with a "
        f"perceptron of {summary['cost']['parameters']:,} parameters, 36 rows a client, {rounds} rounds, without the "
        "first. CPU seconds and memory (PSS) are those of the site's one process. The seconds are those of the whole "
        "run, also before round 1, over the number of rounds.\n\n"
        "| clients | seconds a round, median | least to most | CPU seconds a round | MiB | bytes down, a client and "
        "round | up |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    write("gateways", "Many clients at one site", "evidence/flower.py gateways", head + "\n".join(lines))


def time_rounds(nodes, rounds):
    """Seconds of a round, of an app that does nothing and of FedAvg and FedAGHN."""
    with tempfile.TemporaryDirectory() as folder, Federation(Path(folder), nodes) as federation:
        empty = federation.time_empty(rounds)
        seconds_by_run = {"an empty app": empty}
        for name, hidden in (("fedavg", 64), ("fedaghn", 64), ("fedavg", 4096)):
            lines_of_run = federation.train(name, rounds, model={"name": "mlp", "hidden": [hidden]})
            size = 4 * json.loads((federation.out / "summary.json").read_text())["cost"]["parameters"]
            seconds_by_run[f"{name}, a model of {size / 1e6:.2g} MB"] = seconds_of(lines_of_run)
        memories = [memory(node.pid) for node in federation.nodes.values()]
    floor = statistics.median(seconds_by_run["an empty app"])
    lines = [
        f"| {name} | {statistics.median(s):.1f} | {min(s):.1f} to {max(s):.1f} | {statistics.median(s) / floor:.2f} |"
        for name, s in seconds_by_run.items()
    ]
    print("\n".join(lines))
    head = (
        f"{environment()} A server and {nodes} sites are on this one machine, over TLS with keys. Each run has "
        f"{rounds} rounds, without the first. An empty app's round is one message without content to every node and "
        "back, by Flower's own SuperLink and SuperNodes. These ask for messages every 3 seconds and start a Python "
        f"process for each. This is Flower's floor, measured just before. A site's process "
        f"took {min(memories)} to {max(memories)} MiB (PSS) "
        "after the last run.\n\n"
        "| | seconds, median | least to most | of the empty app's |\n| --- | --- | --- | --- |\n"
    )
    write("seconds", "Seconds per round", f"evidence/flower.py seconds --nodes {nodes}", head + "\n".join(lines))


def time_masks(rounds, count=20):
    """CPU seconds and bytes of a round of so many sites, with masks and without, in turns."""
    broker.LOOK = 0.0
    lines = []
    for hidden in ([64], [600, 200]):
        seconds, summaries = {"plain": [], "masked": []}, {}
        for _ in range(TURNS):
            for name, taken in seconds.items():
                times, summaries[name] = play_masks(name == "masked", hidden, rounds, count)
                taken += times
        plain, masked = (statistics.median(taken) for taken in seconds.values())
        up = {name: summary.cost.bytes_per_client_and_round["up"] for name, summary in summaries.items()}
        lines.append(
            f"| {summaries['plain'].cost.parameters:,} | {plain:.3f} | {masked:.3f} | {masked / plain:.2f} | "
            f"{min(seconds['masked']):.3f} to {max(seconds['masked']):.3f} | {up['plain']:,} | {up['masked']:,} |"
        )
        print(lines[-1], flush=True)
    head = (
        f"{environment()} In one process are {count} sites and the server, so messages cost nothing. They train "
        f"FedAvg on {EXAMPLES} digits a site, two epochs a round. There are {TURNS} runs of {rounds} rounds each way, "
        "in turns, without their first rounds. CPU seconds are those of all sites and the server together.\n\n"
        "| parameters | CPU seconds a round, plain, median | with masks | ratio | with masks, least to most | bytes "
        "up, a site and round, plain | with masks |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    write("masks", "Masked rounds", "evidence/flower.py masks", head + "\n".join(lines))


def play_masks(masked, hidden, rounds, count):
    """CPU seconds of each round but the first of a run in this process, and its summary."""
    with tempfile.TemporaryDirectory() as folder:
        folder, times = Path(folder), []
        names = [f"site-{i}" for i in range(count)]
        deal(folder, names)
        sites = [
            Site(
                n,
                folder / n / "data.npz",
                folder / "state",
                "cpu",
                policy=Policy(runs="any"),
                masks=MaskedRounds(n),
            )
            for n in names
        ]
        raw = {
            "rounds": rounds,
            "method": "fedavg",
            "model": {"name": "mlp", "hidden": hidden},
            "flower": {"clients": count, "classes": 10, "beside": []},
        }
        private = {"privacy": {"masked": True, "members": 11}} if masked else {}

        def note(line):
            if re.match(r"round \d+ of", line):
                times.append(time.process_time())

        summary = server.serve(plan.resolve(raw | private), InProcess(sites), folder / "out", log=note, poll=0)
    return [after - before for before, after in itertools.pairwise(times)], summary


def write(part, title, command, text):
    """One part of the page."""
    put(PAGE, part, f"## {title}\n\nWritten by `python {command}`, {version()}.\n\n{text}", "What a federation costs")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bytes", "seconds", "gateways", "masks"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    if args.what == "bytes":
        count_bytes()
    elif args.what == "seconds":
        time_rounds(args.nodes, args.rounds)
    elif args.what == "masks":
        time_masks(args.rounds)
    else:
        measure_gateways((4, 20, 50), args.rounds)


if __name__ == "__main__":
    with catch_signals():
        main()
