"""The server's SuperLink: started, stopped, and told whose keys to admit."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kinfed.errors import RunError, UsageError, nearest
from kinfed.files import make_folder, read_json, write_json
from kinfed.interrupts import defer_signals

from ..wire import keys as certificates
from ..wire.link import SILENT, Link
from . import control, ending
from .subprocesses import end, is_alive, is_free, is_loopback, make_private, secret, start

Report = Callable[[str], object]
LINK, LAST = "link.json", "run.json"
PROGRAM = "hub"
_RESTART = "restart it: kinfed flower down, then up"


class Started(NamedTuple):
    """A SuperLink that was started from a folder."""

    address: str  # HOST:PORT
    ca: str  # the file of its certificate authority, empty without TLS
    pid: int

    @property
    def link(self) -> Link:
        return Link(self.address, self.ca)


def read_last(home: Path) -> Started | None:
    """The SuperLink that was started last from a folder, whether it still runs or not."""
    values = read_json(home / LINK)
    return Started(values["address"], values["ca"], values["pid"]) if values else None


def running(home: Path) -> Started | None:
    """The SuperLink of a folder that is running now."""
    last = read_last(home)
    return last if last and is_alive(last.pid, PROGRAM) else None


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
        admit(home, link, keys, report)
    return link


def down(home: Path, report: Report) -> None:
    """Stop the SuperLink, and with it the runs in progress."""
    now = running(home)
    if (out := last_run(home)) and (pid := ending.process(out)):
        end(pid)
    if now:
        end(now.pid)
    (home / LINK).unlink(missing_ok=True)
    if not now:
        raise UsageError(f"no SuperLink of {home} is running")
    report(f"stopped the SuperLink at {now.address}")


def last_run(home: Path) -> Path | None:
    """The folder of the run that was started last."""
    out = read_json(home / LAST).get("out")
    return Path(out) if out else None


def revoke(home: Path, site: str, keys: Path | None, report: Report) -> None:
    """Take a site's key out of `keys`, by default those of the running SuperLink, which then refuses its calls."""
    now = running(home)
    if now and not now.ca:
        raise UsageError(f"the SuperLink at {now.address} runs with --insecure, so there are no keys to revoke")
    if keys is None:
        if not now:
            raise UsageError(f"no SuperLink of {home} is running; say where its keys are: --keys DIR")
        keys = Path(now.ca).parent
    members = [path.parent.name for path in keys.glob("sites/*/key.pub")]
    if site not in members:
        raise UsageError(f"{keys}/sites has no key of '{site}'; {nearest(site, members)}")
    make_folder(keys / "revoked")
    moved = keys / "revoked" / site
    for n in itertools.count(2):
        if not moved.exists():
            break
        moved = moved.with_name(f"{site}-{n}")
    (keys / "sites" / site).rename(moved)
    report(f"{site} is no longer a member: its key is in {moved} now, and nothing is accepted from it any more")
    if not now:
        report("no SuperLink is running; the next kinfed flower up will reject its node")


def admit(home: Path, link: Link, keys: Path, report: Report) -> None:
    """Have the SuperLink know the sites whose keys are there; the gate lets no others in."""
    for site in control.register(home, link, certificates.members(keys, report)):
        report(f"admitted: {site}")


def _use(now: Started, keys: Path | None, report: Report) -> Link:
    """The link to a SuperLink that is running already, if it can be used with these keys."""
    link = now.link
    if link.ca != (str(keys / "ca.crt") if keys else ""):
        raise UsageError(f"a SuperLink with other keys is running at {link.address}; stop it: kinfed flower down")
    problem = link.problem()
    if problem == SILENT:  # it may have been started a moment ago
        problem = link.wait(lambda: is_alive(now.pid, PROGRAM)) and "it does not answer"
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
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    link = Link(f"{reachable}:{port}", str(keys / "ca.crt") if keys else "")
    if keys is None:
        report(f"INSECURE: anyone on this machine can take part at {link.address} under any name; for trials only")
    log = home / "superlink.log"
    secret(home)
    with defer_signals():  # so that `down` finds it whatever happens to this program
        with log.open("ab") as file:
            begin = file.tell()
            where = (host, str(port), str(keys or ""))
            process = start(PROGRAM, str(home.resolve()), *where, home=home / "flwr", log=file)
        write_json(home / LINK, {"address": link.address, "ca": link.ca, "pid": process.pid})
    problem = SILENT
    try:
        problem = link.wait(lambda: process.poll() is None)
    finally:  # also if it is interrupted
        if problem:
            end(process.pid)
            (home / LINK).unlink(missing_ok=True)
    if problem:
        lines = log.read_bytes()[begin:].decode(errors="replace").split("\n")
        why = next((line.strip() for line in reversed(lines) if line.strip()), problem)
        raise RunError(f"the SuperLink did not start: {why:.300}; see {log}")
    report(
        f"the SuperLink is running at {link.address}"
        + (f"; sites reach it at HOST:{port}" if reachable != host else "")
    )
    return link
