"""The server's SuperLink: started, stopped, and told whose keys to admit."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from ..errors import RunError, UsageError, nearest
from ..files import make_folder, replacing
from ..interrupts import held
from . import gate, registry
from . import keys as certificates
from .flower_logs import startup_error
from .link import SILENT, Link
from .subprocesses import end, environment, flwr, is_free, is_loopback, make_private, secret

Report = Callable[[str], object]
LINK, METRICS = "link.json", "metrics.pid"
DATABASE = "state.db"  # Flower's own
_RESTART = "restart it: kinfed flower down, then up"


class Started(NamedTuple):
    """A SuperLink that was started from a folder."""

    address: str  # HOST:PORT
    ca: str  # the file of its certificate authority, empty without TLS
    pid: int

    @property
    def link(self) -> Link:
        return Link(self.address, self.ca)


def started(home: Path) -> Started | None:
    """The SuperLink that was started last from a folder, whether it still runs or not."""
    try:
        values = json.loads((home / LINK).read_text())
    except (OSError, ValueError):
        return None
    return Started(values["address"], values["ca"], values["pid"])


def running(home: Path) -> Started | None:
    """The SuperLink of a folder that is running now."""
    last = started(home)
    return last if last and is_alive(last) else None


def is_alive(superlink: Started) -> bool:
    """Whether the process exists and is a SuperLink: its number may belong to another program by now."""
    try:
        os.kill(superlink.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        return b"flower-superlink" in Path(f"/proc/{superlink.pid}/cmdline").read_bytes()
    except OSError:
        return not Path("/proc").exists()


def require(home: Path) -> None:
    """Raise UsageError unless a SuperLink is running."""
    if not running(home):
        raise UsageError(f"no SuperLink of {home} is running; start it: kinfed flower up")


def up(home: Path, host: str, port: int, keys: Path | None, report: Report) -> Link:
    """Start a SuperLink, or use the one that is running, and admit the sites of `keys`; without keys it is insecure."""
    if keys is None and not is_loopback(host):
        raise UsageError(f"--insecure works on this machine only, so --host must be 127.0.0.1; got {host}")
    missing = [] if keys is None else [n for n in ("ca.crt", "server.crt", "server.key") if not (keys / n).exists()]
    if missing:
        raise UsageError(
            f"{keys} lacks {', '.join(missing)}; make them: kinfed flower keys {keys} SITE ... --host NAME"
        )
    now = running(home)
    link = _use(now, keys, report) if now else _start(home, host, port, keys, report)
    if keys is not None:
        for line in certificates.endings(keys):
            report(line)
        admit(home, keys, report)
    return link


def measure(home: Path, port: int, report: Report) -> None:
    """Start what serves metrics for Prometheus on this machine, in place of one that was started before."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("--metrics needs prometheus-client, which is not installed: pip install 'kinfed[flower]'")
    if not 0 < port < 65536:
        raise UsageError(f"--metrics must be a port, 1 to 65535; got {port}")
    before, on = _measuring(home)
    if (not before or on != port) and not is_free("127.0.0.1", port):
        raise UsageError(f"port {port} of this machine is in use; choose another for --metrics")
    _end_metrics(home)
    command = [sys.executable, "-m", f"{__package__}.metrics", str(home.resolve()), str(port)]
    with held(), (home / "metrics.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        with replacing(home / METRICS) as part:
            part.write_text(f"{process.pid} {port}")
    report(f"metrics for Prometheus are at http://127.0.0.1:{port}/metrics, on this machine only")


def _measuring(home: Path) -> tuple[int, int]:
    """The process that serves metrics, and its port; 0 if there is none."""
    try:
        pid, port = map(int, (home / METRICS).read_text().split())
        # The number may be another program's by now.
        return (pid, port) if b"flower.metrics" in Path(f"/proc/{pid}/cmdline").read_bytes() else (0, 0)
    except (OSError, ValueError):
        return 0, 0


def _end_metrics(home: Path) -> None:
    if pid := _measuring(home)[0]:
        end(pid)
    (home / METRICS).unlink(missing_ok=True)


def down(home: Path, report: Report) -> None:
    """Stop the SuperLink, and with it the runs in progress."""
    _end_metrics(home)
    now = running(home)
    if now:
        end(now.pid)
    (home / LINK).unlink(missing_ok=True)
    if not now:
        raise UsageError(f"no SuperLink of {home} is running")
    report(f"stopped the SuperLink at {now.address}")


def revoke(home: Path, site: str, keys: Path | None, report: Report) -> None:
    """Take a site's key out of `keys`, by default those of the running SuperLink, and have Flower reject its node."""
    now = running(home)
    if now and not now.ca:
        raise UsageError(f"the SuperLink at {now.address} runs with --insecure, so there are no keys to revoke")
    if keys is None:
        if not now:
            raise UsageError(f"no SuperLink of {home} is running; say where its keys are: --keys DIR")
        keys = Path(now.ca).parent
    known = [path.parent.name for path in keys.glob("sites/*/key.pub")]
    if site not in known:
        raise UsageError(f"{keys}/sites has no key of '{site}'; {nearest(site, known)}")
    make_folder(keys / "revoked")
    moved = next(
        path
        for path in (keys / "revoked" / f"{site}{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
        if not path.exists()
    )
    (keys / "sites" / site).rename(moved)
    report(f"{site} is no longer a member: its key is in {moved} now, and runs in progress accept nothing from it")
    if now:
        admit(home, keys, report)
    else:
        report("no SuperLink is running; the next kinfed flower up will reject its node")


def admit(home: Path, keys: Path, report: Report) -> None:
    """Have the SuperLink admit exactly the sites whose keys are there, whatever was done to it by other means."""
    database, wanted = home / DATABASE, certificates.members(keys, report)
    known = registry.entries(database)
    for key, entry in known.items():
        if entry.is_in and key not in wanted:
            flwr(home, "supernode", "unregister", str(entry.node), "kinfed", "--format", "json")
            report(f"removed {entry.name or entry.node}: its key is not in {keys}/sites")
    for key, site in wanted.items():
        if key in known and known[key].is_in:
            continue
        registry.forget(database, key)
        public = str(keys / "sites" / site / "key.pub")
        flwr(home, "supernode", "register", public, "kinfed", "--name", site, "--format", "json")
        report(f"admitted{' again' if key in known else ''}: {site}")


def _use(now: Started, keys: Path | None, report: Report) -> Link:
    """The link to a SuperLink that is running already, if it can be used with these keys."""
    link = now.link
    if link.ca != (str(keys / "ca.crt") if keys else ""):
        raise UsageError(f"a SuperLink with other keys is running at {link.address}; stop it: kinfed flower down")
    problem = link.problem()
    if problem == SILENT:  # it may have been started a moment ago
        problem = link.wait(lambda: is_alive(now)) and "it does not answer"
    if problem:
        raise RunError(f"the SuperLink at {link.address} is running but cannot be used: {problem}; {_RESTART}")
    report(f"the SuperLink is already running at {link.address}")
    if keys is not None and not certificates.is_shown(keys / "server.crt", link.address):
        report(f"it still uses the certificate that it was started with, not the one in {keys}; {_RESTART}")
    return link


def _start(home: Path, host: str, port: int, keys: Path | None, report: Report) -> Link:
    if not is_free(host, port):
        raise UsageError(f"port {port} of {host} is in use; choose another --port, or stop what listens there")
    make_folder(home / "flwr")
    for path in home.iterdir():
        if path.name.partition(".")[0] in ("state", "superlink", "link", "registered", "flwr", "app"):
            make_private(path)
    own = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    link = Link(f"{own}:{port}", str(keys / "ca.crt") if keys else "")
    if keys is None:
        report(f"INSECURE: anyone on this machine can take part at {link.address} under any name; for trials only")
    reach = {"root-certificates": link.ca} if link.ca else {"insecure": True}
    profile: dict[str, Any] = {"default": "kinfed", "kinfed": {"address": link.address, **reach}}
    with replacing(home / "flwr" / "config.toml") as part:
        part.write_text(tomli_w.dumps({"superlink": profile}))
    log = home / "superlink.log"
    with held():  # so that `down` finds it whatever happens to this program
        with log.open("ab") as file:
            begin = file.tell()
            process = subprocess.Popen(
                _command(home, host, port, keys),
                env=environment(home / "flwr", secret(home)),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with replacing(home / LINK) as part:
            part.write_text(json.dumps({"address": link.address, "ca": link.ca, "pid": process.pid}))
    try:
        problem = link.wait(lambda: process.poll() is None)
    except KeyboardInterrupt:
        _abandon(home, process.pid)
        raise
    if problem:
        _abandon(home, process.pid)
        why = startup_error(log.read_bytes()[begin:].decode(errors="replace")) or problem
        raise RunError(f"the SuperLink did not start: {why}; see {log}")
    report(f"the SuperLink is running at {link.address}" + (f"; sites reach it at HOST:{port}" if own != host else ""))
    return link


def _abandon(home: Path, pid: int) -> None:
    end(pid)
    (home / LINK).unlink(missing_ok=True)


def _command(home: Path, host: str, port: int, keys: Path | None) -> list[str]:
    options = ["--host", host, "--port", str(port), "--database", str(home / DATABASE)]
    options += ["--disable-runtime-dependency-installation"]
    if keys is None:
        options += ["--insecure"]
    else:
        options += ["--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.crt")]
        options += ["--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"]
    return gate.command("flower-superlink", *options)
