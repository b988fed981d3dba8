"""kinfed serve."""

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import UsageError, several
from ..runs.config.experiment import override
from ..runs.config.parts import call
from .options import add_settings
from .predict import add_interval, add_unknown, open_predictor

TOKEN = "KINFED_TOKEN"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    serve = commands.add_parser(
        "serve",
        parents=[common],
        description="Serve predictions over HTTP, from the models of a finished run: POST /predict/CLIENT, as JSON or "
        "CSV. By default only this machine can reach the server. With another --host, requests must send the token in "
        f"${TOKEN}.",
        epilog="example: kinfed serve my-run --port 8080",
    )
    serve.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, a choice or a site")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument(
        "--port", type=int, default=8080, metavar="PORT", help="port to listen on (default: 8080); 0 takes a free one"
    )
    add_unknown(serve, "error")
    add_interval(serve)
    what = "megabytes=16 is the largest request, concurrency=64 the most connections, workers=2 the threads that answer"
    add_settings(serve, what, how=False)
    serve.set_defaults(command=_serve)


def _serve(args: argparse.Namespace, console: Console) -> None:
    if missing := [
        package for package in ("starlette", "uvicorn", "prometheus_client") if not importlib.util.find_spec(package)
    ]:
        raise UsageError(f"the service needs the package {missing[0]}: pip install 'kinfed[serve]'")
    from ..serving.service import Limits, Service, listen

    token = os.environ.get(TOKEN, "").strip()
    limits = call(Limits, override({}, args.overrides), "serve")[0]
    predictor, method = open_predictor(args.run, args.unknown, args.interval)
    service = Service(predictor, method, token, limits)
    with listen(args.host, args.port, token) as at:
        host, port = at.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if args.json:
            print(json.dumps({"address": address}), flush=True)
        else:
            console.print(f"{method}'s models of {several(len(predictor.names), 'client')} answer at {address}")
        try:
            service.run(at)
        except KeyboardInterrupt:  # which the server has heard: what it was answering is finished
            console.print("stopped")
