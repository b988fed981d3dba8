"""A federation of separate processes on this machine, for the benchmarks that need one."""

import functools
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import tomli_w
import torch
from sklearn.datasets import load_digits

from kinfed.errors import UsageError
from kinfed.interrupts import defer_signals
from kinfed_flower.programs import superlink
from kinfed_flower.programs.subprocesses import end, environment as flower_environment
from kinfed_flower.wire.link import Link

KINFED = str(Path(sys.executable).with_name("kinfed"))
EXAMPLES = 90  # of a site


def deal(folder, names):
    """Write each site's examples, handwritten digits, into a folder of its own."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = np.random.default_rng(0).permutation(len(images))
    for i, name in enumerate(names):
        mine = order[i * EXAMPLES : (i + 1) * EXAMPLES]
        (folder / name).mkdir(parents=True, exist_ok=True)
        np.savez(folder / name / "data.npz", x=images[mine], y=labels[mine])


def deal_table(folder, clients, rows=36):
    """Write a table of digits of so many clients, which its column `ward` names, for one site."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))[: clients * rows]
    lines = [",".join([*(f"p{i}" for i in range(64)), "digit", "ward"])]
    for place, i in enumerate(order):
        lines.append(",".join([*(f"{x:g}" for x in images[i]), f"d{labels[i]}", f"w{place % clients}"]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.csv").write_text("\n".join(lines) + "\n")


def memory(pid):
    """MiB that a process has for itself, with its share of what it shares (PSS)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1]) // 1024


def cpu_seconds(pid):
    """CPU seconds of a process so far, which depend far less on what else a machine does than those on the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def environment():
    """What measurements were made on."""
    cores, load = os.cpu_count(), os.getloadavg()[0]
    busy = ". It had other work too, so ratios say more than seconds" if load > cores else ""
    return (
        f"PyTorch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {cores} cores, "
        f"load {load:.1f} at the end{busy}."
    )


class Federation:
    """SuperLink and nodes; as a context, all that was started is ended with it, also if a signal ends it early.

    `more` is added to the environments of sites, by name. With `clients` each site is a gateway of so many.
    """

    def __init__(self, folder, count, clients=0, **more):
        self.clients = clients
        self.folder = folder
        self.names = [f"site-{i + 1}" for i in range(count)]
        self.nodes = {}
        self._more = more
        self.environment = {**os.environ, "KINFED_FLOWER_HOME": str(folder / "server")}
        self.runs, self.out, self.port = 0, None, free_port()
        self._started = []  # each process leads a session, so that Ctrl-C in a terminal leaves its end to this one

    def __enter__(self):
        deal(self.folder, self.names)
        (self.folder / "any.toml").write_text('runs = "any"\n')
        for name in self.names if self.clients else []:
            deal_table(self.folder / name, self.clients)
        try:
            self.run_kinfed("keys", "keys", *self.names)
            self.up()
            for name in self.names:
                self.start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with defer_signals():
            for process in self._started:
                if process.poll() is None:
                    end(process.pid)
            with suppress(UsageError):  # none is running
                superlink.down(self.folder / "server", lambda line: None)

    def run_kinfed(self, *arguments):
        """kinfed flower ... on the server."""
        command = [KINFED, "flower", *map(str, arguments)]
        subprocess.run(command, cwd=self.folder, env=self.environment, check=True, capture_output=True, text=True)

    def up(self):
        """Start the SuperLink."""
        self.run_kinfed("up", "--keys", "keys", "--port", self.port)

    def start(self, name):
        """Start a site's node."""
        examples = ["data.csv", "--client", "ward", "--target", "digit"] if self.clients else ["data.npz"]
        command = [KINFED, "flower", "node", name, "--data", *examples, "--server", f"127.0.0.1:{self.port}"]
        command += ["--keys", str(self.folder / "keys" / "sites" / name), "--state", ".", "--device", "cpu"]
        command += ["--policy", str(self.folder / "any.toml")]
        with (self.folder / name / "said.log").open("a") as log:
            self.nodes[name] = self._begin(
                command, cwd=self.folder / name, env=self.environment | self._more.get(name, {}), stderr=log
            )

    def kill(self, name):
        """End a node without warning."""
        node = self.nodes.pop(name)
        node.kill()
        node.wait()

    def launch(self, method, rounds, **table):
        """Start a run; returns its process, whose standard error tells what happens."""
        self.runs += 1
        self.out = self.folder / f"run-{self.runs}"
        training = {"epochs": 2, "batch": 16, "optimiser": {"name": "sgd", "lr": 0.1}}
        raw = {"rounds": rounds, "method": method, "model": "mlp", "training": training}
        raw |= table | {"flower": {"clients": len(self.names), "classes": 10, **table.get("flower", {})}}
        path = self.folder / f"run-{self.runs}.toml"
        path.write_text(tomli_w.dumps(raw))
        return self.follow("run", path, "--out", self.out)

    def follow(self, *arguments):
        """kinfed flower run, to be read line by line."""
        command = [KINFED, "flower", *map(str, arguments)]
        return self._begin(command, cwd=self.folder, env=self.environment, stderr=subprocess.PIPE, text=True)

    def _begin(self, command, **how):
        """Start a process that ends with this federation."""
        with defer_signals():
            self._started.append(subprocess.Popen(command, start_new_session=True, **how))
        return self._started[-1]

    def train(self, method, rounds, **table):
        """Run a method to its end; returns what it said."""
        run = self.launch(method, rounds, **table)
        lines = [line.rstrip() for line in run.stderr]
        assert run.wait() == 0, lines
        return lines

    def time_empty(self, rounds):
        """Seconds of each round of an app that sends nothing and answers nothing; the first is left out.

        On Flower's own programs, as its documentation starts them: its floor.
        """
        app, home, keys = self.folder / "empty", self.folder / "empty-home", self.folder / "keys"
        for folder in (app, home):
            folder.mkdir()
        components = {"serverapp": "empty:server", "clientapp": "empty:client"}
        settings = {"rounds": rounds + 1, "nodes": len(self.names)}
        table = {"publisher": "kinfed", "components": components, "config": settings}
        project = {"name": "empty", "version": "0.1.0", "license": "Apache-2.0", "dependencies": []}
        (app / "pyproject.toml").write_text(tomli_w.dumps({"project": project, "tool": {"flwr": {"app": table}}}))
        (app / "empty.py").write_text(EMPTY)
        ports = [free_port() for _ in (*self.names, "server")]
        address, ca = f"127.0.0.1:{ports[-1]}", str(keys / "ca.crt")
        reach = {"default": "empty", "empty": {"address": address, "root-certificates": ca}}
        (home / "config.toml").write_text(tomli_w.dumps({"superlink": reach}))
        programs = Path(sys.executable).parent
        environment = flower_environment(home)
        environment["PATH"] = f"{programs}{os.pathsep}{environment.get('PATH', '')}"
        link = ["flower-superlink", "--port", str(ports[-1]), "--database", str(home / "state.db")]
        link += ["--ssl-ca-certfile", ca, "--ssl-certfile", str(keys / "server.crt")]
        link += ["--ssl-keyfile", str(keys / "server.key")]
        node = ["flower-supernode", "--superlink", address, "--root-certificates", ca, "--port"]
        quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started = [self._begin([programs / link[0], *link[1:]], **quiet)]
        while Link(address, ca).problem():
            time.sleep(0.5)
        started += [self._begin([programs / node[0], *node[1:], str(port)], **quiet) for port in ports[:-1]]
        ask = functools.partial(subprocess.run, env=environment, capture_output=True, text=True, check=True)
        id = json.loads(ask([programs / "flwr", "run", app, "empty", "--format", "json"]).stdout)["run-id"]
        log = ask([programs / "flwr", "log", str(id), "empty", "--stream"]).stdout
        for process in reversed(started):
            end(process.pid)
        seconds = [float(s) for s in re.findall(r"empty round: ([\d.]+)", log)]
        assert len(seconds) == rounds + 1, log
        return seconds[1:]


def free_port():
    """A port of this machine that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


EMPTY = """
import time
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()

@client.query()
def answer(message, context):
    return Message(RecordDict(), reply_to=message)

@server.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < int(context.run_config["nodes"]):
        time.sleep(0.5)
    for round in range(int(context.run_config["rounds"])):
        begin = time.monotonic()
        waiting = set(grid.push_messages([Message(RecordDict(), n, "query", group_id=str(round)) for n in nodes]))
        while waiting:
            waiting -= {m.metadata.reply_to_message_id for m in grid.pull_messages(list(waiting))}
            time.sleep(0.1)
        print(f"empty round: {time.monotonic() - begin:.2f}", flush=True)
"""
