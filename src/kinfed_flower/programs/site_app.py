"""The client's half of kinfed's app, which stock SuperNodes and Flower's simulation run, once a message."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Message as Envelope
from flwr.clientapp import ClientApp

from kinfed.errors import RunError, UsageError
from kinfed.files import make_folder

from ..site.policy import Policy
from ..site.site import Site
from ..site.site_reading import Reading
from ..wire import audit_file, transport
from ..wire.audit import AuditLog
from ..wire.keys import check_name
from ..wire.messages import plain, refusal
from .subprocesses import make_private

app = ClientApp()


def reply(kind: str, envelope: Envelope, context: Context) -> Envelope:
    """The site's reply to a message; an error is reported to the server in one line, and here in full."""
    name = str(context.node_config.get("client-id", ""))
    try:
        site = _site(context.node_config, context.run_config)
        name = site.name
        message = transport.unpack(envelope.content)
        if "refused" in message.fields:
            _print(f"the server cannot use this node: {plain(message.fields['refused'])}")
        answer = site.reply(kind, message)
        AuditLog(audit_file.of_site(site.folder.parent, name), with_fields=True).note(
            "sent", "the SuperLink", kind, answer
        )
    except (UsageError, RunError) as problem:
        answer = refusal(name, problem)
        _print(f"client {name}: {problem}" if name else str(problem))
    return Envelope(transport.pack(answer), reply_to=envelope)


def _site(node: Mapping[str, Any], run: Mapping[str, Any]) -> Site:
    """The site of a node, by its own settings; in a simulation, whose nodes have numbers, by those of the run.

    A node's: `data`, and perhaps `client-id` (the name of that file), `state-dir`, `device`, `code`, `policy`,
    `reading` as JSON, and of a table `target`, `time`, `group` or `ignore`. A run's: `data`, a folder of one file a
    client, and `reading`.
    """
    data = str(node.get("data", ""))
    is_simulated = not data  # so that nobody is there to agree
    if not data and run.get("data") and "partition-id" in node:
        files = sorted(file for file in Path(str(run["data"])).iterdir() if file.is_file())
        number = node["partition-id"]
        if not int(number) < len(files):
            raise UsageError(f"node {number} of the simulation has no file: {run['data']} holds {len(files)}")
        data = str(files[int(number)])
    if not data:
        raise UsageError(
            "this node does not say where its examples are; start it with --node-config 'data=\"FILE\"', or for a "
            "simulation set data, a folder of one file a client, in the run's config"
        )
    name = str(node.get("client-id", "") or Path(data).stem)
    check_name(name)
    reading = Reading(**json.loads(str(node.get("reading") or run.get("reading") or "{}")))
    settings: dict[str, Any] = {key: str(node[key]) for key in ("target", "time", "group") if key in node}
    settings |= {"ignore": str(node["ignore"]).split(",")} if "ignore" in node else {}
    code = [Path(line) for line in str(node.get("code", "")).splitlines()]
    folder = Path(str(node.get("state-dir", "") or Path.home() / ".kinfed" / "sites"))
    make_folder(folder / name)
    make_private(folder / name)  # Flower's programs may let other users read what they make
    device, rules = str(node.get("device", "auto")), str(node.get("policy", ""))
    policy = Policy(runs="any") if is_simulated else None
    if rules:
        policy = Policy.read(Path(rules))
    return Site(
        name,
        data=Path(data),
        folder=folder,
        device=device,
        reading=replace(reading, **settings),
        code=code,
        report=_print,
        policy=policy,
    )


def _print(text: str) -> None:
    print(f"kinfed: {plain(text)}", file=sys.stderr, flush=True)


for kind, type_of_message in transport.KINDS.items():
    category, _, action = type_of_message.partition(".")
    getattr(app, category)(action)(partial(reply, kind))
