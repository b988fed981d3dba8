"""The app that a site's SuperNode runs, once a message."""

import sys
from pathlib import Path

from flwr.app import Context
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp

from ..errors import RunError, UsageError
from . import grid
from .messages import Message, plain
from .site import Site
from .site_reading import Reading

app = ClientApp()


def reply(kind: str, envelope: Envelope, context: Context) -> Envelope:
    """The site's reply to a message; an error is reported to the server in one line, and here in full."""
    config = context.node_config
    name = str(config.get("client-id", ""))
    try:
        data, folder = (str(config.get(key, "")) for key in ("data", "state-dir"))
        if not (name and data and folder):
            raise UsageError("this node was not started by kinfed flower node: it has no client-id, data or state-dir")
        device, settings = str(config.get("device", "auto")), str(config.get("reading", ""))
        code = [Path(line) for line in str(config.get("code", "")).splitlines()]
        reading = Reading.read(Path(settings)) if settings else Reading()
        site = Site(name, Path(data), Path(folder), device, reading, code, _print)
        message = grid.unpack(envelope.content)
        if "refused" in message.words:
            _print(f"the server cannot use this node: {plain(message.words['refused'])}")
        answer = site.reply(kind, message)
    except (UsageError, RunError) as problem:
        answer = Message({"client": name, "refused": f"client {name}: {problem}"}, {})
        _print(answer.words["refused"])
    return Envelope(grid.pack(answer), reply_to=envelope)


def _print(text: str) -> None:
    print(f"kinfed: {plain(text)}", file=sys.stderr, flush=True)


@app.query("hello")
def hello(envelope: Envelope, context: Context) -> Envelope:
    """Say who this is and what its examples look like."""
    return reply("hello", envelope, context)


@app.query("describe")
def describe(envelope: Envelope, context: Context) -> Envelope:
    """Say what the training rows are like, all together."""
    return reply("describe", envelope, context)


@app.query("join")
def join(envelope: Envelope, context: Context) -> Envelope:
    """Join an experiment."""
    return reply("join", envelope, context)


@app.train("round")
def round(envelope: Envelope, context: Context) -> Envelope:
    """Evaluate the models of the previous round, and train for this one."""
    return reply("round", envelope, context)


@app.query("verdict")
def verdict(envelope: Envelope, context: Context) -> Envelope:
    """Say what learning from others was worth."""
    return reply("verdict", envelope, context)
