"""Messages carried by Flower's grid between the server's app and the sites' nodes."""

import io
import json
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message as Envelope, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from kinfed.errors import UsageError

from .messages import Failure, Message, Node
from .run_grid import RunGrid

# Names of Flower's message types.
KINDS = {
    "hello": "query.hello",
    "describe": "query.describe",
    "join": "query.join",
    "round": "train.round",
    "verdict": "query.verdict",
    "offer": "query.offer",
    "share": "query.share",
    "confirm": "query.confirm",
    "reveal": "query.reveal",
}
GONE = (3, 4, 5, 8)  # Flower's error codes for messages that were lost, whose node is offline, or whose app crashed


class GridTransport:
    """Pushes messages to nodes and pulls their replies."""

    def __init__(self, grid: "Grid | RunGrid") -> None:
        self._grid = grid

    def nodes(self) -> dict[int, Node]:
        """The nodes that are online."""
        return {
            node.node_id: Node(node.last_activated_at, node.name, node.public_key) for node in self._grid.get_nodes()
        }

    def push(self, node: int, kind: str, message: Message, seconds: float) -> str:
        """Send a message that expires after so many seconds; returns its id, empty if it could not be sent."""
        group = str(int(message.fields.get("round", -1)) + 1)  # what Flower's logs call the round
        envelope = Envelope(pack(message), node, KINDS[kind], ttl=seconds, group_id=group)
        try:
            return next(iter(self._grid.push_messages([envelope])), None) or ""
        except Exception as problem:
            if type(problem).__name__ != "ObjectPushError":  # the SuperLink was started anew in the midst of it
                raise
            return ""

    def pull(self, ids: Collection[str]) -> dict[str, Message | Failure]:
        """The replies that have arrived, or why there will be none, by the id of the message that they reply to."""
        if not ids:
            return {}
        replies: dict[str, Message | Failure] = {}
        # An error about a lost node carries the server's own node id, so only the message identifies who replied.
        for envelope in self._grid.pull_messages(ids):
            id = envelope.metadata.reply_to_message_id
            if envelope.has_error():
                error = envelope.error
                reason = (str(error.reason or "").strip() or "no reason given").splitlines()[0]
                replies[id] = Failure(reason, error.code in GONE)
                continue
            try:
                replies[id] = unpack(envelope.content)
            except UsageError as problem:
                replies[id] = Failure(str(problem), False)
        return replies


def pack(message: Message) -> RecordDict:
    """A message as Flower's records."""
    arrays = {name: Array(t.detach().cpu().contiguous().numpy()) for name, t in message.arrays.items()}
    return RecordDict(
        {"words": ConfigRecord({"json": json.dumps(message.fields)}), "arrays": ArrayRecord(array_dict=arrays)}
    )


def unpack(content: Any) -> Message:
    """The message that was packed; raises UsageError if there is none."""
    try:
        fields = json.loads(content["words"]["json"])
        if not isinstance(fields, dict):
            raise ValueError(f"its fields are {type(fields).__name__}, not a table")
        return Message(fields, {str(name): _read(array) for name, array in content["arrays"].items()})
    except Exception as problem:  # a hostile peer can cause any error here
        raise UsageError(f"the message cannot be read: {problem}") from None


def _read(array: Array) -> Tensor:
    """A tensor from the bytes of a .npy file, whose header is checked before anything is allocated."""
    stream = io.BytesIO(array.data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array is in an unknown version of NumPy's format")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.kind not in "fiub" or fortran:
        raise ValueError(f"an array is of type {dtype}, or not in C order")
    count, begin = int(np.prod(shape, dtype=object)), stream.tell()
    if count * dtype.itemsize != len(array.data) - begin:
        raise ValueError(f"an array of shape {list(shape)} comes with {len(array.data) - begin} bytes")
    values = np.frombuffer(array.data, dtype, count, begin).reshape(shape)
    return torch.from_numpy(values.copy())
