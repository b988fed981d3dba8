"""A federation of five sites on one machine: each a process with a folder of its own, joined over TLS.

    python examples/flower/five_sites.py FOLDER

Each site holds a few handwritten digits, too few to learn much from alone. kin trains with four sites, one is
killed and brought back, and the fifth comes later; then hedge trains with all. At the end every site's own model is
set beside the one that it gets from its own examples alone. Everything is left in FOLDER.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from kinfed import SGD, Federation, Split, Training, fit
from kinfed.interrupts import catch_signals, defer_signals
from kinfed.methods import METHODS
from kinfed_flower import plan
from kinfed_flower.programs.subprocesses import end

KINFED = str(Path(sys.executable).with_name("kinfed"))
EXAMPLES = 90  # of a site
PLAN = """
rounds = {rounds}
seed = 0
method = {{ name = "{method}" }}
model = {{ name = "mlp", hidden = [32] }}
training = {{ epochs = 5, batch = 16, optimiser = {{ name = "sgd", lr = 0.3 }} }}
federation = {{ split = {{ test = 0.4, validation = 0.1 }} }}
flower = {{ clients = {clients}, classes = 10 }}
"""


def main():
    """Start it all, train twice, end it all, compare."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folder", type=Path)
    asked.add_argument("--sites", type=int, default=5)
    asked.add_argument("--rounds", type=int, default=12)
    asked = asked.parse_args()
    folder, names = asked.folder.resolve(), [f"site-{i}" for i in range(1, asked.sites + 1)]
    if folder.exists():
        sys.exit(f"{folder} is there already; name a folder that is not")
    folder.mkdir(parents=True)
    deal(folder, names)
    (folder / "any.toml").write_text('runs = "any"\n')  # all five are the same person's
    with Processes(folder) as federation:
        federation.kinfed("keys", "keys", *names[:-1])
        federation.kinfed("up", "--keys", "keys", "--port", federation.port)
        for name in names[:-1]:
            federation.start(name)
        adventures = {
            1: lambda: federation.kill(names[1]),
            4: lambda: federation.start(names[1]),
            3: lambda: federation.add(names[-1]),
        }
        federation.train("kin", asked.rounds, len(names) - 1, adventures)
        federation.train("hedge", asked.rounds, len(names), {})
    compare(folder, names, asked.rounds)


def deal(folder, names):
    """Write each site's examples into its own folder."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = np.random.default_rng(0).permutation(len(images))
    for i, name in enumerate(names):
        mine = order[i * EXAMPLES : (i + 1) * EXAMPLES]
        (folder / name).mkdir()
        np.savez(folder / name / "data.npz", x=images[mine], y=labels[mine])


class Processes:
    """The programs that are running, each started by the command line; as a context, they end with it.

    Each leads a session of its own, so that Ctrl-C reaches this program alone, which ends them.
    """

    def __init__(self, folder):
        self.folder, self.nodes, self.started = folder, {}, []
        self.environment = {**os.environ, "KINFED_FLOWER_HOME": str(folder / "server")}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with defer_signals():  # a signal would leave some of them
            for process in self.started:
                if process.poll() is None:
                    end(process.pid)
            self.kinfed("down", check=False)

    def kinfed(self, *arguments, check=True):
        """kinfed flower ... on the server."""
        print("$ kinfed flower", *arguments, flush=True)
        command = [KINFED, "flower", *map(str, arguments)]
        subprocess.run(command, cwd=self.folder, env=self.environment, check=check, start_new_session=True)

    def begin(self, command, **how):
        """Start a program that stays."""
        with defer_signals():
            self.started.append(subprocess.Popen(command, env=self.environment, start_new_session=True, **how))
        return self.started[-1]

    def start(self, name):
        """Start a site's node."""
        print(f"-- {name} starts", flush=True)
        command = [KINFED, "flower", "node", name, "--data", "data.npz", "--server", f"127.0.0.1:{self.port}"]
        command += ["--keys", str(self.folder / "keys" / "sites" / name), "--state", ".", "--policy", "../any.toml"]
        with (self.folder / name / "said.log").open("a") as log:
            self.nodes[name] = self.begin(command, cwd=self.folder / name, stderr=log)

    def kill(self, name):
        """End a node without warning."""
        print(f"-- {name} is killed", flush=True)
        node = self.nodes.pop(name)
        node.kill()
        node.wait()

    def add(self, name):
        """A new site: it gets a key, the server lets it in, it starts."""
        self.kinfed("keys", "keys", name)
        self.kinfed("up", "--keys", "keys", "--port", self.port)
        self.start(name)

    def train(self, method, rounds, clients, adventures):
        """Run a method; `adventures[n]` happens when round n is over."""
        path = self.folder / f"{method}.toml"
        path.write_text(PLAN.format(method=method, rounds=rounds, clients=clients))
        print(f"$ kinfed flower run {path.name} --out {method}", flush=True)
        command = [KINFED, "flower", "run", path.name, "--out", method]
        run = self.begin(command, cwd=self.folder, stderr=subprocess.PIPE, text=True)
        for line in run.stderr:
            print(line, end="", flush=True)
            if line.startswith("round ") and " of " in line:
                adventures.get(int(line.split()[1]), lambda: None)()
        if run.wait():
            sys.exit(run.returncode)


def compare(folder, names, rounds):
    """Test accuracy of every site's model, beside what it learns alone; the models are in the sites' folders."""
    parts = [np.load(folder / name / "data.npz") for name in names]
    owner = np.repeat(names, EXAMPLES)
    planned = plan.resolve(tomllib.loads(PLAN.format(method="local", rounds=rounds, clients=1)))
    alone = fit(
        METHODS["local"](),
        Federation.from_arrays(
            np.concatenate([p["x"] for p in parts]),
            np.concatenate([p["y"] for p in parts]),
            owner,
            split=Split(0.4, 0.1),
        ),
        planned.model((1, 8, 8), 10).original,
        rounds=rounds,
        training=Training(5, 16, SGD(0.3)),
    )
    table = {"local": alone.summary.clients.scores[alone.history.chosen]}
    for method in ("kin", "hedge"):
        summary = json.loads((folder / method / "summary.json").read_text())
        clients, chosen = summary["by_client"], summary["selection"]["chosen"]
        scores = dict(zip(clients["names"], clients["scores"][chosen], strict=True))
        table[method] = [scores.get(name, np.nan) for name in names]  # whoever came too late has none
        for name in names:
            model = folder / name / name / summary["sites"]["experiment"] / "model.safetensors"
            shutil.copy(model, folder / name / f"{method}.safetensors")
    print(f"\n{'test accuracy, %':18}" + "".join(f"{name:>9}" for name in (*names, "mean")))
    for method, scores in table.items():
        print(f"{method:18}" + "".join(f"{100 * score:9.1f}" for score in (*scores, np.mean(scores))))
    for method in ("kin", "hedge"):
        helped = sum(own > alone for own, alone in zip(table[method], table["local"], strict=True))
        print(f"{method} beats learning alone at {helped} of {len(names)} sites")
    if not all(np.mean(table[method]) > np.mean(table["local"]) for method in ("kin", "hedge")):
        sys.exit("the sites' models are no better than what they learn alone")
    print(f"\nevery site's models are in its own folder, such as {folder / names[0] / 'kin.safetensors'}")


if __name__ == "__main__":
    with catch_signals():
        main()
