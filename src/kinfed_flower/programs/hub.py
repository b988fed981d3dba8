"""The server's process: Flower's SuperLink behind kinfed's gate.

    python -m kinfed_flower.programs.hub HOME HOST PORT KEYS

It executes no program: a run is a process of its own, see `runner`. KEYS is empty for a trial on one machine.
"""

import functools
import logging
import os
import resource
import sys
import time
from pathlib import Path

from kinfed.errors import UsageError

from ..wire import flower_names, keys
from . import authentication
from .subprocesses import bind, secret

DATABASE = "state.db"  # Flower's own
FILES = 1 << 16  # that may be open, as each connection is one


def main(home: Path, host: str, port: int, folder: Path | None) -> None:
    """Serve until a signal ends this process."""
    os.umask(0o077)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, FILES)), hard))
    flower = flower_names.load("server")
    _stamp_logs()
    listener = bind(host, port)
    sys.argv = ["flower-superlink", *_options(home, host, port, folder)]  # where Flower reads its settings
    app = flower.create_app(flower._parse_superlink_lifespan_config(), flower.SuperLinkLifespan)
    members = None if folder is None else functools.partial(keys.members, folder)
    doorman = authentication.Doorman(secret(home), members)
    tls = ("", "") if folder is None else (str(folder / "server.crt"), str(folder / "server.key"))
    authentication.serve(app, doorman, listener, *tls)


def _options(home: Path, host: str, port: int, folder: Path | None) -> list[str]:
    options = ["--host", host, "--port", str(port), "--database", str(home / DATABASE)]
    options += ["--isolation", "process", "--superexec-auth-secret-file", str(home / "secret")]
    if folder is None:
        return [*options, "--insecure"]
    options += ["--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt")]
    return [*options, "--ssl-keyfile", str(folder / "server.key"), "--enable-supernode-auth"]


def _stamp_logs() -> None:
    """Begin each line of the log with the time in UTC."""
    form = logging.Formatter("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    form.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(form)
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    flower = logging.getLogger("flwr")
    flower.setLevel(logging.INFO)  # a line for each part of a message would be tens of megabytes a day
    for console in [*flower.handlers]:
        flower.removeHandler(console)  # it would write each line again


if __name__ == "__main__":
    home, host, port, folder = sys.argv[1:]
    try:
        main(Path(home), host, int(port), Path(folder) if folder else None)
    except (UsageError, OSError) as problem:
        sys.exit(f"the SuperLink cannot start: {problem}")
