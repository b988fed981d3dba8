"""kinfed serve."""

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import UsageError, several
from .predict import opened

TOKEN = "KINFED_TOKEN"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    serve = commands.add_parser(
        "serve",
        parents=[common],
        description="Serve predictions over HTTP, from the models of a finished run: POST /predict/CLIENT, as JSON or "
        "CSV. Only this machine can reach it, unless --host says otherwise, which needs a token.",
        epilog="example: kinfed serve my-run --port 8080",
    )
    serve.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, a choice or a site")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument(
        "--port", type=int, default=8080, metavar="PORT", help="port to listen on (default: 8080); 0 takes a free one"
    )
    serve.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"a file with the token that requests must send (default: ${TOKEN}, if it is set)",
    )
    serve.add_argument("--megabytes", type=float, default=16, metavar="MB", help="largest request, in MB (default: 16)")
    serve.add_argument(
        "--limit-concurrency",
        type=int,
        default=64,
        metavar="N",
        help="most connections at a time; further ones get 503 (default: 64)",
    )
    serve.add_argument(
        "--workers", type=int, default=2, metavar="N", help="threads that compute predictions (default: 2)"
    )
    serve.set_defaults(command=_serve)


def _serve(args: argparse.Namespace, console: Console) -> None:
    if missing := [one for one in ("starlette", "uvicorn", "prometheus_client") if not importlib.util.find_spec(one)]:
        raise UsageError(f"the service needs the package {missing[0]}: pip install 'kinfed[serve]'")
    from ..serving.service import Limits, Service, listen

    token, limits = _token(args.token_file), Limits(args.megabytes, args.limit_concurrency, args.workers)
    predictor, method = opened(args.run)
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


def _token(path: Path | None) -> str:
    """The token in a file, or else in the environment; empty if there is none."""
    if path is None:
        return os.environ.get(TOKEN, "").strip()
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"--token-file: {path} cannot be read ({problem})") from None
    if not token:
        raise UsageError(f"--token-file: {path} is empty; write a token into it")
    return token
