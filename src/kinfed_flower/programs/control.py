"""What the server's user asks of the SuperLink: which nodes may connect."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from kinfed.errors import RunError

from ..wire import flower_names
from ..wire.calls import Wire, reason, url_of
from ..wire.link import HEADER, Link
from .subprocesses import secret


def client(home: Path, link: Link, flower: Any) -> Any:
    """Flower's client for the calls of the server's own user, which the gate admits by their secret."""
    wire = Wire(link.ca, {HEADER.decode(): secret(home)})
    return flower.ControlHttpClient(url_of(link.address, link.ca), interceptors=[wire])


def register(home: Path, link: Link, members: Mapping[bytes, str]) -> list[str]:
    """Have the SuperLink know the keys of members; returns the names of those that it did not know yet."""
    flower = flower_names.load("control")
    with client(home, link, flower) as control, explain_failures(link):
        nodes = control.ListNodes(flower.ListNodesRequest()).nodes_info
        registered = {node.public_key for node in nodes if node.status != "unregistered"}
        new = {key: site for key, site in members.items() if key not in registered}
        for key, site in new.items():
            control.RegisterNode(flower.RegisterNodeRequest(public_key=key, name=site))
    return list(new.values())


@contextmanager
def explain_failures(link: Link) -> Iterator[None]:
    """Turn what a call can end in into a RunError of one line."""
    try:
        yield
    except httpx.HTTPStatusError as problem:
        raise RunError(f"the SuperLink at {link.address} refuses: {reason(problem.response)}") from None
    except httpx.HTTPError as problem:
        raise RunError(f"the SuperLink at {link.address} does not answer: {problem}") from None
