"""Whose keys a SuperLink admits, read from Flower's own database, where a key can also be forgotten.

Flower's commands do not list nodes by key, and they refuse a key for ever once it was unregistered: its row stays, and
keys are unique. Without that row, which only unregistered nodes have, the key is as if it had never been registered.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import RunError

OUT, ONLINE = "unregistered", "online"


class Entry(NamedTuple):
    """A node that Flower knows."""

    node: int
    name: str  # under which it was registered
    is_in: bool  # whether it is registered now


def entries(database: Path) -> dict[bytes, Entry]:
    """What Flower knows about each public key."""
    rows = _ask(database, "SELECT public_key, node_id, name, status FROM node")
    # SQLite's whole numbers have a sign, nodes' numbers have none.
    return {key: Entry(node % 2**64, name or "", status != OUT) for key, node, name, status in rows}


class Presence(NamedTuple):
    """When a registered node was there."""

    node: int
    name: str  # empty without keys
    is_online: bool  # for all that Flower has noticed
    seen: float  # when it last gave a sign of life, in seconds since 1970; 0 if never


def presence(database: Path) -> list[Presence]:
    """When each registered node was there: at a sign of life Flower notes how long two more may take."""
    question = "SELECT name, node_id, status, online_until, heartbeat_interval FROM node WHERE status != ?"
    return [
        Presence(node % 2**64, name or "", status == ONLINE, (until or 2 * pause) - 2 * pause)
        for name, node, status, until, pause in _ask(database, question, OUT)
    ]


def forget(database: Path, key: bytes) -> None:
    """Let an unregistered key be registered again."""
    _ask(database, "DELETE FROM node WHERE public_key = ? AND status = ?", key, OUT)


def _ask(database: Path, statement: str, *values: object) -> list[Any]:
    try:
        with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=rw", timeout=30, uri=True)) as found, found:
            return found.execute(statement, values).fetchall()
    except sqlite3.Error as problem:
        raise RunError(f"{database} cannot be read as the SuperLink's database: {problem}") from None
