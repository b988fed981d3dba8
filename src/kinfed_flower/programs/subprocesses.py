"""Starting and ending kinfed's programs on the server: their environment, secret and ports."""

import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from kinfed.errors import UsageError
from kinfed.files import replacing


def quiet(home: Path) -> dict[str, str]:
    """What Flower's code finds in the environment: files in `home`, and no calls to the internet."""
    return {
        "FLWR_HOME": str(home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONUNBUFFERED": "1",
        "MALLOC_MMAP_THRESHOLD_": "1000000",  # or glibc keeps the memory of each long message
    }


def be_quiet(home: Path) -> None:
    """Have Flower's code in this process make no calls to the internet."""
    os.environ |= quiet(home)


def environment(home: Path) -> dict[str, str]:
    """The environment of a process in which Flower's code calls the SuperLink of this machine."""
    local = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
    environment_variables = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    return {**environment_variables, **quiet(home), "NO_PROXY": local, "no_proxy": local}


def start(module: str, *arguments: str, home: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a program of kinfed's that outlives this one, in a session of its own."""
    command = [sys.executable, "-P", "-m", f"{__package__}.{module}", *arguments]
    return subprocess.Popen(command, env=environment(home), stdout=log, stderr=log, start_new_session=True)


def is_alive(pid: int, module: str) -> bool:
    """Whether a process exists and is that program of kinfed's: its number may belong to another one by now."""
    with suppress(ChildProcessError, OverflowError):
        os.waitpid(pid, os.WNOHANG)  # or a child that has ended would still seem to be there
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError, OverflowError):
        return False
    try:
        for _ in range(100):
            if command := Path(f"/proc/{pid}/cmdline").read_bytes():
                return f"{__package__}.{module}".encode() in command
            time.sleep(0.001)  # for an instant after its start a program has no words
        return False
    except OSError:
        return not Path("/proc").exists()


def secret(home: Path) -> str:
    """The secret that gives kinfed's own processes on this machine access to the SuperLink of a folder."""
    path = home / "secret"
    if not path.exists():
        with replacing(path) as part:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            part.write_text(secrets.token_hex(32))
    return path.read_text()


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


def make_private(path: Path) -> None:
    """Take other users' rights away, which a copied file or a folder made by hand may give them."""
    path.chmod(path.stat().st_mode & 0o700)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A socket of an address, on which nobody listens yet; raises OSError if it cannot be had."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens on a port; raises UsageError if this user may not."""
    try:
        bind(host, port).close()
    except PermissionError:
        raise UsageError(f"port {port} needs special rights; choose a --port above 1023") from None
    except OSError:
        return False
    return True
