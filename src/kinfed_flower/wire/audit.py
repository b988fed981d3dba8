"""The audit log of a site, and of a run at the server: what was sent, to whom, and what came, one line each.

A line is JSON and holds the hash of the line before it and its own, so that a line that is changed, or taken out before
the last one, shows. Both sides note the same hash of a message, so that their logs can be compared. What cannot be
written down is not sent. A site's log has the fields of its replies, too: names of categories, statistics, scores.
"""

import datetime
import fcntl
import json
import os
from collections.abc import Collection
from pathlib import Path

from kinfed.errors import RunError
from kinfed.files import make_folder

from . import contents, messages
from .audit_file import FIRST, check_line, hash_of
from .messages import Failure, Message, Node, Transport


class AuditLog:
    """An audit log, to which lines are only ever added."""

    def __init__(self, path: Path, with_fields: bool = False) -> None:
        """Go on with the log at `path`, perhaps with messages' fields; raises RunError if its last line is damaged."""
        self._has_fields = with_fields
        make_folder(path.parent)
        self._path, self._last = path, FIRST
        if path.exists():
            content = path.read_bytes()
            lines = content.rpartition(b"\n")[0]
            if content[len(lines) + 1 :]:  # of a program that was killed as it wrote
                os.truncate(path, len(lines) + bool(lines))
            if lines:
                self._last = check_line(path, len(lines.splitlines()), lines.splitlines()[-1], None)["hash"]

    def note(self, way: str, peer: str, kind: str, message: Message) -> None:
        """Add a line for a message that is "sent" to, or has "come" from, a peer; raises RunError if that fails."""
        entry = {
            "at": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
            "way": way,
            "peer": peer,
            "kind": kind,
            "holds": _holds(message),
            **({"says": contents.keep_for_log(message.fields)} if self._has_fields else {}),
            "bytes": messages.size(message),
            "message": messages.digest(message),
            "before": self._last,
        }
        hash = hash_of(entry)
        line = json.dumps(entry | {"hash": hash}).encode() + b"\n"
        try:
            with self._path.open("ab", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                size = os.fstat(file.fileno()).st_size
                try:
                    if file.write(line) < len(line):
                        raise OSError("the disk is full")
                except OSError:
                    os.ftruncate(file.fileno(), size)
                    raise
        except OSError as problem:
            why = problem.strerror or problem
            raise RunError(f"the audit log {self._path} cannot be written ({why}), so nothing is sent") from None
        self._last = hash


class AuditedTransport:
    """A transport that notes in an audit log what it brings to nodes and what comes from them."""

    def __init__(self, transport: Transport, log: AuditLog) -> None:
        self._transport, self._log = transport, log
        self._names: dict[int, str] = {}
        self._sent: dict[str, tuple[str, str]] = {}  # kind of a message and name of its node, by the message's id

    def nodes(self) -> dict[int, Node]:
        """The nodes that are online."""
        nodes = self._transport.nodes()
        self._names |= {id: node.name or str(id) for id, node in nodes.items()}
        return nodes

    def push(self, node: int, kind: str, message: Message, seconds: float) -> str:
        """Send a message; returns its id, empty if it could not be sent."""
        name = self._names.get(node, str(node))
        self._log.note("sent", name, kind, message)
        id = self._transport.push(node, kind, message, seconds)
        self._sent[id] = kind, name
        return id

    def pull(self, ids: Collection[str]) -> dict[str, Message | Failure]:
        """The replies that have arrived, by the id of the message that they reply to."""
        replies = self._transport.pull(ids)
        for id, reply in replies.items():
            kind, name = self._sent.pop(id, ("", ""))
            if isinstance(reply, Message):
                self._log.note("come", name, kind, reply)
        return replies


def _holds(message: Message) -> list[str]:
    """The names of what a message holds; of several clients' those of all, each once."""
    parts = message.fields.get("bundle")
    arrays = [name for name, array in message.arrays.items() if array.numel()]
    if not isinstance(parts, dict):
        return sorted({*message.fields} - {"client"}) + sorted(arrays)
    names = {name for part in parts.values() if isinstance(part, dict) for name in part} - {"client"}
    return sorted(names) + sorted({name.partition("/")[2] for name in arrays})
