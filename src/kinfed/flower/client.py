"""The app that a site's SuperNode runs, once a message."""

import sys
import traceback
from pathlib import Path

from flwr.app import Context
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp

from ..errors import UsageError
from . import grid
from .messages import Message, plain
from .site import Site

app = ClientApp()


def answer(kind: str, envelope: Envelope, context: Context) -> Envelope:
    """The site's answer to a message; whatever goes wrong is told to the server in one line, and here in full."""
    config = context.node_config
    name = str(config.get("client-id", ""))
    try:
        data, folder = (str(config.get(key, "")) for key in ("data", "state-dir"))
        if not (name and data and folder):
            raise UsageError("this node was not started by kinfed flower node: it has no client-id, data or state-dir")
        site = Site(name, Path(data), Path(folder), str(config.get("device", "auto")), str(config.get("target", "y")))
        order = grid.unpack(envelope.content)
        if "refused" in order.words:
            print(
                f"kinfed: the server cannot use this node: {plain(order.words['refused'])}", file=sys.stderr, flush=True
            )
        reply = site.answer(kind, order)
    except Exception as problem:
        traceback.print_exc()
        reply = Message({"client": name, "refused": f"client {name}: {type(problem).__name__}: {problem}"}, {})
    if "refused" in reply.words:
        print(f"kinfed: {reply.words['refused']}", file=sys.stderr, flush=True)
    return Envelope(grid.pack(reply), reply_to=envelope)


@app.query("hello")
def hello(envelope: Envelope, context: Context) -> Envelope:
    """Who is there."""
    return answer("hello", envelope, context)


@app.query("join")
def join(envelope: Envelope, context: Context) -> Envelope:
    """Take part in an experiment."""
    return answer("join", envelope, context)


@app.train("round")
def round(envelope: Envelope, context: Context) -> Envelope:
    """Judge the last round's models, train for this round."""
    return answer("round", envelope, context)
