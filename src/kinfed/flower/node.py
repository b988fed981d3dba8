"""Running a site's SuperNode: started, watched by its log, and ended with this program."""

import fcntl
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..data.cells import Frame
from ..errors import RunError, UsageError
from ..experiments import own_parts
from ..files import make_folder
from ..interrupts import CODES
from . import gate, keys, site_data
from .flower_logs import NodeLog
from .link import Link
from .nodes import check_name
from .site_reading import Reading
from .subprocesses import die_with_parent, end, environment, free_port, interrupt, is_loopback, make_private

Report = Callable[[str], object]
FORGET = 80.0  # seconds after which a SuperLink has noticed that a node is gone: two heartbeats of 30, and some


def run(
    client: str,
    examples: Path | Frame,
    reading: Reading,
    state: Path,
    link: Link,
    key: Path | None,
    device: str,
    code: Sequence[Path],
    report: Report,
) -> None:
    """Run a site's node until it is interrupted; raises RunError if it cannot take part.

    `examples` are a file, or what a database has answered. `reading` says how they are read. `code` are files of the
    site's own whose methods, models and other parts a run may name.
    """
    check_name(client)
    if isinstance(examples, Path):
        site_data.find(examples, client, reading)  # raises UsageError for a file of another kind
    with own_parts.local(code):  # raises UsageError for a file that is not there
        pass
    if key is None and not is_loopback(link.address.rpartition(":")[0]):
        raise UsageError(f"--insecure works on this machine only, so --server must name it; got {link.address}")
    home = state / client / "node"
    make_folder(home)
    for line in keys.endings(Path(link.ca).parent) if link.ca else []:
        report(line)
    make_private(state / client)
    config = {
        "client-id": client,
        "reading": str((home / "reading.json").resolve()),
        "state-dir": str(state.resolve()),
        "device": device,
        "code": "\n".join(str(path.resolve()) for path in code),
    }
    with only_one(home, client):
        reading.write(home / "reading.json")
        config["data"] = str(site_data.kept(examples, home).resolve())
        link.wait_for_server(report)
        command = gate.command("flower-supernode", "--superlink", link.address)
        command += ["--host", "127.0.0.1", "--port", str(free_port())]
        command += ["--node-config", " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())]
        command += ["--insecure"] if key is None else ["--root-certificates", link.ca]
        command += [] if key is None else ["--auth-supernode-private-key", str(key)]
        begin, reported = time.monotonic(), False
        while True:
            _watch(command, home, client, link, report)
            if time.monotonic() - begin > FORGET:
                raise RunError(
                    f"the SuperLink at {link.address} does not know the key of {client}: put its key.pub into "
                    f"sites/{client} of the server's keys, and run kinfed flower up there again"
                )
            if not reported:
                report(f"not admitted yet: {link.address} may not have noticed that this site's previous node is gone")
                reported = True
            time.sleep(5)


@contextmanager
def only_one(home: Path, client: str) -> Iterator[None]:
    """Raise UsageError if the client has a node already: two would overwrite each other's files."""
    with (home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"a node of client {client} is already running on {home.parent}") from None
        yield


def _watch(command: list[str], home: Path, client: str, link: Link, report: Report) -> None:
    """Run a node; its log goes to a file, and what its operator should know to the screen.

    Returns if the SuperLink rejects it; raises RunError if it ends in another way.
    """
    path = home / "node.log"
    log = NodeLog(f"client {client} is connected to {link.address}; its log is {path}")
    # A shell that starts this in the background has SIGINT ignored.
    before = {number: signal.signal(number, interrupt) for number in CODES}
    with path.open("a") as written, path.open() as file:
        file.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command,
            env=environment(home, secrets.token_hex(32)),
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            while True:
                over = process.poll() is not None
                line = file.readline()
                if not line:
                    if over:
                        break
                    time.sleep(0.2)
                    continue
                while not line.endswith("\n") and process.poll() is None:  # it is still being written
                    time.sleep(0.05)
                    line += file.readline()
                if news := log.read(line):
                    report(news)
                if log.is_rejected:
                    return
        finally:
            end(process.pid)
            for number, handler in before.items():
                signal.signal(number, handler)
    raise RunError(f"the node of {client} ended: {log.error(process.returncode)}; see {path}")
