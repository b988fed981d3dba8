"""A federation in one process: a grid whose nodes run the client app's functions at once, with faults on demand."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from kinfed.flower import client

SIZES = {"a": 3, "b": 9, "c": 8, "d": 17, "e": 4, "f": 12}


class FakeGrid(Grid):
    """Nodes by id, each a site's config. `faults` maps (client, round from 1) to functions of the answer.

    A fault returns the answer that arrives instead, or None if none ever does.
    """

    def __init__(self, sites):
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # what a running app is told
        self.sites = dict(enumerate(sites, 101))
        self.faults, self.log, self._ids, self._answers = {}, [], itertools.count(1), {}
        self.stamps = dict.fromkeys(self.sites, "first")

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *_, **__):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_nodes(self):
        return [NodeInfo(node_id=node, last_activated_at=self.stamps[node]) for node in self.sites]

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
            answer = client.app(message, context)
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
    found = {}
    for name, size in SIZES.items():
        x = torch.randn(size + 4, 6, generator=draw)
        y = (x @ slope).argmax(1)
        parts = {"test": slice(0, 2), "validation": slice(2, 4), "train": slice(4, None)}
        found[name] = {f"{k}_{part}": t[at].numpy() for part, at in parts.items() for k, t in (("x", x), ("y", y))}
    return found


@pytest.fixture(scope="session", name="examples")
def _examples():
    return examples()


@pytest.fixture
def sites(tmp_path, examples):
    """Configs of six nodes with their data files."""
    configs = []
    for name, arrays in examples.items():
        folder = tmp_path / "sites" / name
        folder.mkdir(parents=True)
        np.savez(folder / "data.npz", **arrays)
        configs.append({"client-id": name, "data": str(folder / "data.npz"), "state-dir": str(folder), "device": "cpu"})
    return configs


@pytest.fixture
def grid(sites):
    return FakeGrid(sites)
