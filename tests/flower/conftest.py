"""A federation in one process: a grid whose nodes run the client app's functions at once, with faults on demand."""

import http.server
import itertools
import json
import socket
import ssl
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from kinfed.core import trees
from kinfed.core.engine import Rounds, run
from kinfed.core.graph import Graph
from kinfed.core.history import History, Recorder
from kinfed.core.layout import Layout
from kinfed.core.tasks import Classification
from kinfed.data.federation import Federation
from kinfed.plots import charts, heatmaps
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed_flower import plan
from kinfed_flower.programs import site_app
from kinfed_flower.server.server import serve
from kinfed_flower.wire.transport import GridTransport, unpack

LINKS = ((0, 1), (1, 2), (2, 3), (0, 4), (1, 4))  # of clients; the last has none
SETTINGS = {
    "cfl": {"begin": 2, "eps1": 10.0, "eps2": 0.0, "min_size": 2},
    "fedcedar": {"clusters": 2},
    "fedamp": {"alpha": 0.1, "sigma": 1.0, "pull": 0.1},
    "pfedgat": {"heads": 2, "width": 3, "lr": 1.0},
    "attention": {"heads": 2, "width": 3, "lr": 0.001, "steps": 2},
    "pfedhn": {"hidden": 7},
    "panacea": {
        "embedding": 4,
        "encoder": {"hidden": 7},
        "decoder": {"hidden": 7},
        "steps": 3,
        "optimiser": {"lr": 0.5},
    },
    "per-fedavg": {"alpha": 0.05, "beta": 0.1},
    "fedaghn": {"sharpness": 3.0, "lr": 0.1},
}
SIZES = {"a": 3, "b": 9, "c": 8, "d": 17, "e": 4, "f": 12}


OWN_CODE = '''
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import kinfed
from kinfed.methods import Averaged


class Kept(NamedTuple):
    theta: Tensor


class Change(NamedTuple):
    theta: Averaged
    change: Averaged


@dataclass(frozen=True)
class Between(kinfed.methods.Averaging):
    """Each client trains from a point between its own model and the mean of all."""

    share: float = 0.5

    def init_client(self, client):
        return Kept(client.model.theta)

    def train(self, client, state, received):
        begin = torch.lerp(state.theta, received.theta, self.share)
        theta = client.descend(begin)
        return Kept(theta), Change(theta, theta - begin)

    def personalise(self, client, state, received):
        return {"own": kinfed.Params(state.theta), "shared": received}


def net(shape, outputs, *, width: int = 3):
    return nn.Sequential(nn.Linear(shape[0], width), nn.Tanh(), nn.Linear(width, outputs))
'''


class FakeGrid(Grid):
    """Nodes by id, each a site's config. `faults` maps (client, round from 1) to functions of the answer.

    A fault returns the answer that arrives instead, or None if none ever does.
    """

    def __init__(self, sites):
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # what a running app is told
        self.sites = dict(enumerate(sites, 101))
        self.faults, self.log, self._ids, self._answers = {}, [], itertools.count(1), {}
        self.stamps = dict.fromkeys(self.sites, "first")
        self.publics = {}  # the nodes' keys
        self.sent = []  # (client, what is asked, message)

    set_run = run = create_message = send_and_receive = None  # of Flower's interface, and never asked for

    def get_nodes(self):
        return [
            NodeInfo(node_id=node, last_activated_at=self.stamps[node], public_key=self.publics.get(node, b""))
            for node in self.sites
        ]

    def get_node_ids(self):
        return list(self.sites)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            id = f"message {next(self._ids)}"
            message.metadata.__dict__["_message_id"] = id
            ids.append(id)
            node = message.metadata.dst_node_id
            if node not in self.sites:
                self._answers[id] = Message(Error(5, "Node Unavailable"), reply_to=message)
                continue
            config = self.sites[node]
            name, kind = config["client-id"], message.metadata.message_type.partition(".")[2]
            context = Context(1, node, config, RecordDict(), {})
            self.log.append((name, kind, message.metadata.group_id))
            self.sent.append((name, kind, unpack(message.content)))
            answer = site_app.app(message, context)
            fault = self.faults.get((name, int(message.metadata.group_id)))
            if fault and kind == "round":
                answer = fault(answer)
            if answer is not None:
                self._answers[id] = answer
        return ids

    def pull_messages(self, message_ids):
        return [self._answers.pop(id) for id in list(message_ids) if id in self._answers]


def examples():
    """x and y of six unequal clients, by client and split; the batch of the tests is 8."""
    draw = torch.Generator().manual_seed(5)
    slope = torch.randn(6, 3, generator=draw)
    arrays = {}
    for name, size in SIZES.items():
        x = torch.randn(size + 4, 6, generator=draw)
        y = (x @ slope).argmax(1)
        parts = {"test": slice(0, 2), "validation": slice(2, 4), "train": slice(4, None)}
        arrays[name] = {f"{k}_{part}": t[at].numpy() for part, at in parts.items() for k, t in (("x", x), ("y", y))}
    return arrays


@pytest.fixture(scope="session", name="examples")
def _examples():
    return examples()


@pytest.fixture(scope="session")
def own_code():
    """The text of a file with a method and a model."""
    return OWN_CODE


@pytest.fixture
def sites(tmp_path, examples):
    """Configs of six nodes with their data files."""
    configs, policy = [], tmp_path / "any.toml"
    policy.write_text('runs = "any"')
    for name, arrays in examples.items():
        folder = tmp_path / "sites" / name
        folder.mkdir(parents=True)
        np.savez(folder / "data.npz", **arrays)
        config = {"client-id": name, "data": str(folder / "data.npz"), "state-dir": str(folder), "device": "cpu"}
        configs.append(config | {"reading": json.dumps({"few_rows": True}), "policy": str(policy)})
    return configs


@pytest.fixture
def grid(sites):
    return FakeGrid(sites)


class Outcome(NamedTuple):
    """How a simulation ended."""

    history: History
    states: dict  # [N, ...] private states, packed
    layout: Layout
    frozen: dict


class Trial:
    """One experiment, at six sites and in a simulation."""

    def __init__(self, grid, folder, examples, planned):
        self.grid, self.folder, self.examples, self.planned, self.lines = grid, folder, examples, planned, []

    def serve(self, members=None):
        """Run it at the sites; returns the summary."""
        out = self.folder / "out"
        return serve(self.planned, GridTransport(self.grid), out, log=self.lines.append, poll=0.001, members=members)

    def simulate(self, absent=(), names=None):
        """Run it on one machine; `absent` lists (client, round from 1) in which a client does not answer."""
        rows, pool, at = {"train": [], "validation": [], "test": []}, {"x": [], "y": []}, 0
        names = names or list(self.examples)
        for name in names:
            for split, parts in rows.items():
                count = len(self.examples[name][f"x_{split}"])
                parts.append(torch.arange(at, at + count))
                at += count
                for k, values in pool.items():
                    values.append(torch.from_numpy(self.examples[name][f"{k}_{split}"]))
        federation = Federation(torch.cat(pool["x"]), torch.cat(pool["y"]), rows, Classification(3), names)

        class Partial(Simulation):
            def train(self, round, cohort, sent):
                here = torch.tensor([(names[i], round + 1) not in absent for i in cohort.tolist()])
                return super().train(round, cohort[here], trees.pick(sent, here))

        learning, table = self.planned.learning, self.planned.table
        model = self.planned.model(tuple(federation.x.shape[1:]), 3)
        fleet = Partial(
            federation, model, learning.method, learning.training, seed=table["seed"], execution=Execution("loop")
        )
        history = History(tuple(names), federation.task)
        weights = torch.zeros(6, 6)
        for i, j in LINKS:
            weights[i, j] = weights[j, i] = 1
        at = torch.tensor(["abcdef".index(name) for name in names])
        roster = fleet.roster(Graph(weights[at][:, at], "given") if self.planned.deployment.graph else None)
        run(
            fleet.method,
            roster,
            fleet,
            Recorder(history),
            rounds=Rounds(table["rounds"], table["evaluate_every"]),
            participation=learning.participation,
        )
        return Outcome(history, trees.pack(fleet.state), fleet.model.layout, fleet.model.frozen)

    def state(self, name):
        """A site's private state, packed, and the rest of what it remembers."""
        (folder,) = (path for path in (self.folder / "sites" / name / name).iterdir() if path.is_dir())
        arrays = load_file(folder / "state.safetensors")
        return {k.removeprefix("state/"): t for k, t in arrays.items() if k.startswith("state/")}

    def compare(self, expected, names=None):
        """The sites' private states are those of the simulation."""
        for i, name in enumerate(names or self.examples):
            for key, value in self.state(name).items():
                torch.testing.assert_close(value, expected.states[key][i], rtol=1e-5, atol=1e-5)


@pytest.fixture
def trial(grid, tmp_path, examples, monkeypatch):
    """Makes a Trial of a method; pictures are left out."""
    for module, names in ((charts, ("accuracy_by_round", "accuracy_by_client")), (heatmaps, ("relation_heatmap",))):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr("kinfed_flower.server.broker.LOOK", 0.0)
    monkeypatch.setattr("kinfed_flower.server.broker.RETRY", 0.0)
    monkeypatch.setattr("kinfed_flower.server.nodes.RETRY", 0.0)
    monkeypatch.setattr("kinfed_flower.server.nodes.LATER", 0.0)

    def make(name, *, rounds=3, share=1.0, linked=True, method=None, model="mlp", cut=None, split=None, **flower):
        clients = "abcdef"[: flower.get("clients", 6)]
        links = [f"{clients[i]},{clients[j]}\n" for i, j in LINKS if max(i, j) < len(clients)]
        (tmp_path / "links.csv").write_text("from,to\n" + "".join(links))
        shape = {} if model in ("additive", "changes", "linear", "log-linear", "trees") else {"hidden": [5]}
        private = {"privacy": flower.pop("privacy")} if "privacy" in flower else {}
        if cut is not None and model == "mlp":
            shape["cut"] = cut
        if "monotone" in flower:
            shape["monotone"] = flower.pop("monotone")
        table = private | {
            "rounds": rounds,
            "seed": 11,
            "participation": share,
            "model": {"name": model, **shape},
            "training": {"epochs": 2, "batch": 8, "optimiser": {"name": "sgd", "lr": 0.2}},
            "federation": {"split": split or {}},
            "method": {"name": name, **SETTINGS.get(name, {}), **(method or {})},
            "flower": {
                "clients": 6,
                "classes": 3,
                "graph": str(tmp_path / "links.csv") if linked else "",
                "beside": [],  # which tests of it ask for
                **flower,
            },
        }
        return Trial(grid, tmp_path, examples, plan.resolve(json.loads(json.dumps(table))))

    return make


@pytest.fixture(scope="session")
def free_port():
    """Finds a port of this machine that nobody listens on."""

    def find():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find


@pytest.fixture
def server(tmp_path):
    """Starts a web server that answers anything, with TLS or without; returns its address."""
    started = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    def start(folder=None):
        made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        if folder:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server.crt", folder / "server.key")
            made.socket = context.wrap_socket(made.socket, server_side=True)
        made.handle_error = lambda *_: None
        threading.Thread(target=made.serve_forever, daemon=True).start()
        started.append(made)
        return f"127.0.0.1:{made.server_address[1]}"

    yield start
    for made in started:
        made.shutdown()
        made.server_close()
