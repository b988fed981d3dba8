"""Starting and ending Flower's programs: their environment, secret and ports."""

import ctypes
import ipaddress
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import RunError, UsageError
from ..files import replacing
from ..interrupts import Terminated
from . import gate
from .flower_logs import without_colours


def environment(home: Path, secret: str) -> dict[str, str]:
    """The environment of Flower's programs: files in `home`, no calls to the internet, quick polling."""
    local = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("FLWR_")},
        gate.SECRET: secret,
        "FLWR_HOME": str(home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        "NO_PROXY": local,
        "no_proxy": local,
        "PYTHONUNBUFFERED": "1",
    }


def secret(home: Path) -> str:
    """The secret that gives kinfed's own processes on this machine access to the SuperLink of a folder."""
    path = home / "secret"
    if not path.exists():
        with replacing(path) as part:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            part.write_text(secrets.token_hex(32))
    return path.read_text()


def flwr(home: Path, *arguments: str) -> dict[str, Any]:
    """Run one of Flower's commands and return its JSON; raises RunError with its error message."""
    done = subprocess.run(
        gate.command("flwr", *arguments),
        env=environment(home / "flwr", secret(home)),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        result: dict[str, Any] = json.loads(without_colours(done.stdout))  # Jupyter asks for colours
    except ValueError:
        text = without_colours(done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        raise RunError(f"flwr {arguments[0]}: {text[-1]}") from None
    if not result.get("success"):
        text = str(result.get("error-message", "no reason given")).strip().splitlines()
        raise RunError(f"flwr {arguments[0]}: {text[-1]}")
    return result


def end(pid: int) -> None:
    """End a process that leads its own session, and every process that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):
            return
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            try:
                os.killpg(pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.1)


def die_with_parent() -> None:
    """On Linux: have this process killed when its parent ends, so that no second node can serve the same client."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def interrupt(number: int, frame: object) -> None:
    """A signal handler that raises what the signal means."""
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def make_private(path: Path) -> None:
    """Take other users' rights away; earlier versions of kinfed left their files open."""
    path.chmod(path.stat().st_mode & 0o700)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens on a port; raises UsageError if this user may not."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            raise UsageError(f"port {port} needs special rights; choose a --port above 1023") from None
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
