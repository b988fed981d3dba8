"""Processes: the SuperLink, a SuperNode and a run, started, watched and ended by Flower's own programs."""

import ctypes
import fcntl
import ipaddress
import itertools
import json
import os
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import tomli_w

from ..core.summary import Summary
from ..errors import RunError, UsageError, nearest
from ..experiments.run_folder import RunFolder
from ..files import make_folder, replacing
from ..interrupts import Terminated, held
from . import gate, registry
from . import keys as certificates
from .broker import NAME

Say = Callable[[str], None]
LINK = "link.json"
DATABASE = "state.db"  # Flower's own
RUN = ".run"  # in a run's folder: the number that Flower gave it
GIVE_UP = 3  # times that a run ends without a word and without a round in between
START = 90.0  # seconds that a SuperLink may take until it answers
FORGET = 80.0  # seconds after which a SuperLink has noticed that a node is gone: two heartbeats of 30, and some


@dataclass(frozen=True)
class Link:
    """A SuperLink and how it is reached; `ca` is the file of its certificate authority, empty without TLS."""

    address: str  # HOST:PORT
    ca: str = ""

    @property
    def url(self) -> str:
        return f"http{'s' if self.ca else ''}://{self.address}"

    def problem(self) -> str:
        """Why the SuperLink cannot be reached, empty if it can, "nobody" if nobody listens there yet."""
        try:
            context = ssl.create_default_context(cafile=self.ca) if self.ca else None
        except (OSError, ssl.SSLError) as problem:
            return f"{self.ca} is not a certificate ({problem}); it is the ca.crt that kinfed flower keys made"
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            opener.open(f"{self.url}/health", timeout=10).close()
            return ""
        except urllib.error.HTTPError as problem:
            return f"{self.address} answers {problem.code}: it is not a SuperLink"
        except urllib.error.URLError as problem:
            reason = problem.reason
        except (OSError, ValueError) as problem:  # a TLS server hangs up on plain HTTP
            return f"{self.address} breaks off ({problem}){'' if self.ca else _SECURED}"
        if isinstance(reason, ssl.SSLCertVerificationError):
            fix = _EXPIRED if "expired" in reason.verify_message else _CERTIFICATE
            return f"the certificate of {self.address} is not to be trusted ({reason.verify_message}); {fix}"
        if isinstance(reason, ssl.SSLError):
            return f"{self.address} does not speak TLS ({reason.reason}); was its SuperLink started with --insecure?"
        if isinstance(reason, socket.gaierror):
            return f"there is no host {self.address.rpartition(':')[0]}"
        if isinstance(reason, ConnectionResetError) and not self.ca:
            return f"{self.address} breaks off{_SECURED}"
        return "nobody"


_SECURED = "; if its SuperLink uses TLS, give --keys, the folder with ca.crt and key"
_CERTIFICATE = "use the ca.crt of its keys, and name this host when making them: kinfed flower keys DIR --host NAME"
_EXPIRED = "its operator must renew it, see docs/deploy.md"
_TURNED_AWAY = "the server does not know its key any more; if that is a mistake: kinfed flower up there, and start anew"
_RESTART = "start it anew: kinfed flower down, and up"


def up(home: Path, host: str, port: int, keys: Path | None, say: Say) -> Link:
    """Start a SuperLink, or find the one that runs, and let every site of `keys` in; without keys it is insecure."""
    if keys is None and not _is_loopback(host):
        raise UsageError(f"--insecure is for this machine alone, so the host must be 127.0.0.1; got {host}")
    missing = [] if keys is None else [n for n in ("ca.crt", "server.crt", "server.key") if not (keys / n).exists()]
    if missing:
        raise UsageError(
            f"{keys} lacks {', '.join(missing)}; make them: kinfed flower keys {keys} SITE ... --host NAME"
        )
    running = _read(home)
    if running and _is_alive(running):
        link = Link(running["address"], running["ca"])
        if link.ca != (str(keys / "ca.crt") if keys else ""):
            raise UsageError(f"a SuperLink with other keys runs at {link.address}; end it: kinfed flower down")
        problem = link.problem()
        if problem == "nobody":  # it may have been started a moment ago
            problem = _await(link, lambda: _is_alive(running)) and "it does not answer"
        if problem:
            raise RunError(f"the SuperLink at {link.address} runs but cannot be used: {problem}; {_RESTART}")
        say(f"the SuperLink runs already, at {link.address}")
        if keys is not None and not certificates.is_shown(keys / "server.crt", link.address):
            say(f"it still shows the certificate that it was started with, not that in {keys}; {_RESTART}")
    else:
        link = _start(home, host, port, keys, say)
    if keys is not None:
        for line in certificates.endings(keys):
            say(line)
        _admit(home, keys, say)
    return link


def revoke(home: Path, site: str, keys: Path | None, say: Say) -> None:
    """Take a site's key out of `keys`, by default those of the SuperLink that runs, and have Flower turn it away."""
    running = _read(home)
    alive = running is not None and _is_alive(running)
    if running and alive and not running["ca"]:
        raise UsageError(f"the SuperLink at {running['address']} runs with --insecure, so there are no keys to revoke")
    if keys is None:
        if not running or not alive:
            raise UsageError(f"no SuperLink of {home} runs; say where its keys are: --keys DIR")
        keys = Path(running["ca"]).parent
    known = [path.parent.name for path in keys.glob("sites/*/key.pub")]
    if site not in known:
        raise UsageError(f"{keys}/sites has no key of '{site}'; {nearest(site, known)}")
    make_folder(keys / "revoked")
    away = next(
        path
        for path in (keys / "revoked" / f"{site}{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
        if not path.exists()
    )
    (keys / "sites" / site).rename(away)
    say(f"the key of {site} is no member's any more, and lies in {away}; runs under way take nothing of it")
    if alive:
        _admit(home, keys, say)
    else:
        say("no SuperLink runs; kinfed flower up turns it away")


def down(home: Path, say: Say) -> None:
    """End the SuperLink and the runs it has under way."""
    running = _read(home)
    if not running or not _is_alive(running):
        (home / LINK).unlink(missing_ok=True)
        raise UsageError(f"no SuperLink of {home} runs")
    _end(running["pid"])
    (home / LINK).unlink(missing_ok=True)
    say(f"ended the SuperLink at {running['address']}")


def node(
    client: str, data: Path, target: str, state: Path, link: Link, key: Path | None, device: str, say: Say
) -> None:
    """Run a site's node until it is interrupted; raises RunError if it cannot take part."""
    if not re.fullmatch(NAME, client):
        raise UsageError(f"a site is named by letters, digits, '.', '_' and '-'; got '{client}'")
    if not data.is_file():
        raise UsageError(f"there is no file {data}")
    if key is None and not _is_loopback(link.address.rpartition(":")[0]):
        raise UsageError(f"--insecure is for this machine alone; got {link.address}")
    home = state / client / "node"
    make_folder(home)
    for line in certificates.endings(Path(link.ca).parent) if link.ca else []:
        say(line)
    _close(state / client)
    with _only_one(home, client):
        _wait(link, say)
        settings = {
            "client-id": client,
            "data": str(data.resolve()),
            "target": target,
            "state-dir": str(state.resolve()),
            "device": device,
        }
        command = _program("flower-supernode", "--superlink", link.address)
        command += ["--host", "127.0.0.1", "--port", str(_free_port())]
        command += ["--node-config", " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())]
        command += ["--insecure"] if key is None else ["--root-certificates", link.ca]
        command += [] if key is None else ["--auth-supernode-private-key", str(key)]
        begin, told = time.monotonic(), False
        while True:
            _watch(command, home, client, link, say)
            if time.monotonic() - begin > FORGET:
                raise RunError(
                    f"the SuperLink at {link.address} does not know the key of {client}: put its key.pub into "
                    f"sites/{client} of the server's keys, and run kinfed flower up there again"
                )
            if not told:
                say(f"not let in yet: {link.address} may take this for a node that it has not noticed is gone")
                told = True
            time.sleep(5)


def require(home: Path) -> None:
    """Raise UsageError unless a SuperLink runs."""
    running = _read(home)
    if not running or not _is_alive(running):
        raise UsageError(f"no SuperLink of {home} runs; start it: kinfed flower up")


def run(home: Path, config: dict[str, Any], out: Path, say: Say) -> Summary:
    """Start a run, follow it to its end, and return its summary; raises RunError if it fails.

    A run that ends without a word, because its process was killed, is taken up again where it stopped.
    """
    app, ca = home / "app", (_read(home) or {}).get("ca", "")
    make_folder(app)
    _write_app(app, {"config": json.dumps(config), "out": str(out), "keys": str(Path(ca).parent) if ca else ""})
    for line in certificates.endings(Path(ca).parent) if ca else []:
        say(line)
    resume, left = f"go on with: kinfed flower run --resume {out}", GIVE_UP
    folder = RunFolder(out)
    finished = folder.is_finished
    signal.signal(signal.SIGHUP, _interrupt)  # a closed terminal stops the run as well
    while True:
        id = ""
        try:
            id = _under_way(home, out)
            if id:
                say("the run goes on; following it")
            else:
                with held():  # or a run that has started could not be stopped
                    id = str(_flwr(home, "run", str(app), "kinfed", "--format", "json")["run-id"])
                    with replacing(out / RUN) as part:
                        part.write_text(id)
            said = _follow(home, id, say)
            status = _status(home, id)
        except KeyboardInterrupt as stop:
            if id:
                _flwr(home, "stop", id, "kinfed", "--format", "json")
            raise type(stop)(f"stopped; {resume}") from None
        except RunError as problem:
            raise RunError(f"{problem}; {resume}") from None
        last = said[-1] if said else ""
        if last.startswith("done: ") and status["status"] == "finished:completed":
            return Summary.from_json(last.removeprefix("done: "), "the last word of the run")
        if last.startswith("failed: "):
            raise RunError(f"{last.removeprefix('failed: ')}; {resume}")
        if not finished and folder.is_finished:  # its process has gone after its last word
            return folder.read_summary()
        left = GIVE_UP if any(line.startswith("round ") for line in said) else left - 1
        why = f"{status['status']}, {status.get('status-details')}"
        if status["status"] == "finished:stopped" or not left:
            raise RunError(f"the run has ended ({why}); see {home / 'superlink.log'}; {resume}")
        say(f"the run's process has gone ({why}); going on after the last round that was complete")


def _start(home: Path, host: str, port: int, keys: Path | None, say: Say) -> Link:
    if not _is_free(host, port):
        raise UsageError(f"port {port} of {host} is taken; choose another --port, or end what listens there")
    make_folder(home / "flwr")
    for path in home.iterdir():
        if path.name.partition(".")[0] in ("state", "superlink", "link", "registered", "flwr", "app"):
            _close(path)
    own = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    link = Link(f"{own}:{port}", str(keys / "ca.crt") if keys else "")
    command = _program("flower-superlink", "--host", host, "--port", str(port), "--database", str(home / DATABASE))
    command += ["--disable-runtime-dependency-installation"]
    if keys is None:
        command += ["--insecure"]
        say(f"INSECURE: anybody on this machine can take part at {link.address} under any name; for trials only")
    else:
        command += ["--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.crt")]
        command += ["--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"]
    reach = (
        {"address": link.address, "insecure": True}
        if keys is None
        else {"address": link.address, "root-certificates": link.ca}
    )
    with replacing(home / "flwr" / "config.toml") as part:
        part.write_text(tomli_w.dumps({"superlink": {"default": "kinfed", "kinfed": reach}}))
    log = home / "superlink.log"
    with held():  # so that `down` finds it whatever becomes of this program
        with log.open("ab") as file:
            begin = file.tell()
            process = subprocess.Popen(
                command,
                env=_environment(home / "flwr", _secret(home)),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with replacing(home / LINK) as part:
            part.write_text(json.dumps({"address": link.address, "ca": link.ca, "pid": process.pid}))
    try:
        problem = _await(link, lambda: process.poll() is None)
    except KeyboardInterrupt:
        _end(process.pid)
        (home / LINK).unlink(missing_ok=True)
        raise
    if problem:
        _end(process.pid)
        (home / LINK).unlink(missing_ok=True)
        text = _plain(log.read_bytes()[begin:].decode(errors="replace"))
        lines = [line.strip() for line in text.splitlines()]
        errors = [line for line in lines if "ERROR" in line or "rror:" in line]
        ending = list(dropwhile(lambda line: "Exit Code:" not in line, lines))
        why = _explain(ending) or (errors[-1] if errors else problem)
        raise RunError(f"the SuperLink did not start: {why}; see {log}")
    say(f"the SuperLink is up at {link.address}" + (f"; sites reach it as HOST:{port}" if own != host else ""))
    return link


def _admit(home: Path, keys: Path, say: Say) -> None:
    """Have the SuperLink let in those whose keys are there, and nobody else, whatever was done by other hands."""
    database, wanted = home / DATABASE, certificates.members(keys, say)
    known = registry.entries(database)
    for key, entry in known.items():
        if entry.is_in and key not in wanted:
            _flwr(home, "supernode", "unregister", str(entry.node), "kinfed", "--format", "json")
            say(f"turned away, as its key is not in {keys}/sites: {entry.name or entry.node}")
    for key, site in wanted.items():
        if key in known and known[key].is_in:
            continue
        registry.forget(database, key)
        public = str(keys / "sites" / site / "key.pub")
        _flwr(home, "supernode", "register", public, "kinfed", "--name", site, "--format", "json")
        say(f"let in{' again' if key in known else ''}: {site}")


def _await(link: Link, is_alive: Callable[[], bool]) -> str:
    """Wait until a SuperLink answers; returns what is wrong if it does not."""
    deadline = time.monotonic() + START
    while (problem := link.problem()) and time.monotonic() < deadline and is_alive():
        time.sleep(0.3)
    return problem


def _wait(link: Link, say: Say) -> None:
    """Until the SuperLink can be reached; a site may be up before its server is."""
    told = False
    while problem := link.problem():
        if problem != "nobody":
            raise RunError(problem)
        if not told:
            say(f"waiting for a SuperLink at {link.address}")
            told = True
        time.sleep(2)


def _watch(command: list[str], home: Path, client: str, link: Link, say: Say) -> None:
    """Run a node; its log goes to a file, and what a person needs to know to the screen.

    Returns if the SuperLink does not let it in; raises RunError if it ends in another way.
    """
    log, failed, round = home / "node.log", "", ""
    ending: list[str] = []  # from an exit code on
    # A shell that starts this in the background has SIGINT ignored.
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    with log.open("a") as written, log.open() as file:
        file.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command,
            env=_environment(home, secrets.token_hex(32)),
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
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
                line = _plain(line).strip()
                if "[code: 2004]" in line:
                    return
                if ending or "Exit Code:" in line:
                    ending.append(line)
                    if line.startswith("For more information"):  # it may be of a program that the node has started
                        failed, ending = _explain(ending), []
                elif "SuperNode ID:" in line:
                    say(f"client {client} is connected to {link.address}; its log is {log}")
                elif line.startswith("kinfed: "):
                    say(line.removeprefix("kinfed: "))
                elif found := re.search(r"ROUND (\d+)\]", line):
                    round = found[1]
                elif "Receiving: train.round" in line and round != "0":
                    say(f"round {round}")
                elif "rror:" in line:
                    failed = failed or line
        finally:
            _end(process.pid)
            for number, handler in before.items():
                signal.signal(number, handler)
    failed = _explain(ending) or failed or (f"exit code {process.returncode}" if process.returncode else "")
    if (
        not failed or "401 Unauthorized" in failed
    ):  # its node interrupts itself when its calls are refused, or breaks down
        failed = _TURNED_AWAY
    raise RunError(f"the node of {client} ended: {failed}; see {log}")


def _explain(lines: list[str]) -> str:
    """What Flower says of an end, in one line; `lines` are those of a log from the exit code on."""
    said = takewhile(lambda line: not line.startswith("For more information"), lines[1:])
    text = " ".join(line for line in said if line)
    found = re.search(r"version (\S+) detected a runtime version mismatch.* received \S+ version (\S+?)\.?(\s|$)", text)
    if not found:
        return text
    return (
        f"the server runs Flower {found[1]} and this site {found[2]}; install the same here: "
        f"pip install 'flwr=={found[1]}'"
    )


def _die_with_parent() -> None:
    """On Linux: be killed when the program that started this one is, lest two nodes serve one client."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _interrupt(number: int, frame: object) -> None:
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _follow(home: Path, id: str, say: Say) -> list[str]:
    """Say what a run says, until it is over; returns its lines."""
    said: list[str] = []
    while True:
        stream = subprocess.Popen(
            _program("flwr", "log", id, "kinfed", "--stream"),
            env=_environment(home / "flwr", _secret(home)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert stream.stdout is not None
        seen = 0
        try:
            for line in stream.stdout:
                line = _plain(line).strip()
                if not line.startswith("kinfed: "):
                    continue
                line, seen = line.removeprefix("kinfed: "), seen + 1
                if seen > len(said):  # a new stream begins with what the last one has told
                    said.append(line)
                    if not line.startswith(("done: ", "failed: ")):
                        say(line)
        finally:
            stream.terminate()
            stream.wait()
        if _status(home, id)["status"].startswith("finished"):
            return said
        time.sleep(1)  # the SuperLink was away


def _under_way(home: Path, out: Path) -> str:
    """The number of a run that works in a folder although who watched it has gone; empty if there is none."""
    try:
        id = (out / RUN).read_text()
        (found,) = _flwr(home, "list", "kinfed", "--run-id", id, "--format", "json")["runs"]
    except (OSError, RunError, ValueError):
        return ""
    return "" if found["status"].startswith("finished") else id


def _status(home: Path, id: str) -> dict[str, Any]:
    for attempt in range(60):
        try:
            (found,) = _flwr(home, "list", "kinfed", "--run-id", id, "--format", "json")["runs"]
            return found  # type: ignore[no-any-return]
        except RunError:
            if attempt == 59:
                raise
            time.sleep(1)
    raise AssertionError


def _flwr(home: Path, *arguments: str) -> dict[str, Any]:
    """What one of Flower's commands answers; raises RunError with its message."""
    done = subprocess.run(
        _program("flwr", *arguments),
        env=_environment(home / "flwr", _secret(home)),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        text = _plain(done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        raise RunError(f"flwr {arguments[0]}: {text[-1]}") from None
    if not answer.get("success"):
        text = str(answer.get("error-message", "no reason given")).strip().splitlines()
        raise RunError(f"flwr {arguments[0]}: {text[-1]}")
    return answer


def _write_app(folder: Path, settings: dict[str, str]) -> None:
    with replacing(folder / "pyproject.toml") as part:
        part.write_text(tomli_w.dumps(gate.bundle(settings)))


def _environment(home: Path, secret: str) -> dict[str, str]:
    """For Flower's programs: files of their own, nothing asked of or told to the internet, quick polling."""
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


def _close(path: Path) -> None:
    """To other users of this machine: earlier versions of kinfed left what they made open."""
    path.chmod(path.stat().st_mode & 0o700)


def _secret(home: Path) -> str:
    """What opens the SuperLink of this folder to kinfed's processes on its machine."""
    path = home / "secret"
    if not path.exists():
        with replacing(path) as part:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            part.write_text(secrets.token_hex(32))
    return path.read_text()


def _program(name: str, *arguments: str) -> list[str]:
    return gate.command(name, *arguments)


def _end(pid: int) -> None:
    """End a process that was started as the head of its own session, and all that it started."""
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


def _is_alive(running: dict[str, Any]) -> bool:
    """Whether the process is there, and is a SuperLink: a number may have been given to another since."""
    try:
        os.kill(running["pid"], 0)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        return b"flower-superlink" in Path(f"/proc/{running['pid']}/cmdline").read_bytes()
    except OSError:
        return not Path("/proc").exists()


def _read(home: Path) -> dict[str, Any] | None:
    try:
        return json.loads((home / LINK).read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return None


@contextmanager
def _only_one(home: Path, client: str) -> Iterator[None]:
    """Two nodes of one client would overwrite each other's files."""
    with (home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"a node of client {client} runs already on {home.parent}") from None
        yield


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            raise UsageError(f"port {port} needs special rights; choose a --port above 1023") from None
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _plain(text: str) -> str:
    """Text without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
