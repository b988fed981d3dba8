"""Flower's programs, started with the interfaces closed that Flower leaves open.

`python gate.py PROGRAM ARGUMENT ...` is PROGRAM of Flower, and so is every program of Flower that it starts, but

- its web server answers only callers that know a secret, which kinfed's own processes on this machine pass on in
  their environment; others reach /health and, at the server, the calls that sites make, each with its own signature by
  a registered key, checked before any of the body is read;
- a site's node runs no program other than the one installed with kinfed;
- one address has a bounded number of connections, counted before TLS;
- only the owner can read the files that it creates;
- each line that it logs begins with the time.

This patches Flower's internals, so nothing starts with a version that kinfed's tests have not run with. The file is run
as a script, and imports nothing of kinfed, whose import would cost each of Flower's processes seconds and memory.
"""

import asyncio
import base64
import datetime
import hashlib
import hmac
import importlib.metadata
import io
import ipaddress
import os
import resource
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

TESTED = ("1.41.0",)  # versions of Flower; pyproject.toml says the same
SECRET = "KINFED_FLOWER_SECRET"  # the environment variable
HEADER = b"kinfed-secret"
LARGEST = 16 << 20  # bytes of a call; Flower cuts arrays into pieces of 5 MiB
GREETING = 4 << 10  # bytes with which a node may ask to be let in whose key is not known
PATIENCE = 30.0  # seconds that a connection may say nothing
CONNECTIONS = 256  # of one address at once, those that have not greeted by TLS yet included
FILES = 1 << 16  # that the SuperLink may have open, as each connection is one
VALID = datetime.timedelta(seconds=310)  # in which Flower may take a signature for fresh, and some
MOST = 100_000  # signatures of one key in that time
PROGRAMS = ("flower-superlink", "flower-supernode", "flower-superexec", "flwr-serverapp", "flwr-clientapp", "flwr")
ACTIVATE = b"/v1/fleet/activate-node"
SITES = {  # what a site's node calls
    ACTIVATE,
    b"/v1/fleet/deactivate-node",
    b"/v1/fleet/send-node-heartbeat",
    b"/v1/fleet/pull-messages",
    b"/v1/fleet/push-messages",
    b"/v1/fleet/get-run",
    b"/v1/fleet/get-fab",
    b"/v1/fleet/push-object",
    b"/v1/fleet/pull-object",
    b"/v1/fleet/confirm-message-received",
}
ANONYMOUS = {b"/v1/fleet/register-node", b"/v1/fleet/unregister-node"}  # and without keys

Headers = Iterable[tuple[bytes, bytes]]


def untested() -> str:
    """Why the installed version of Flower cannot be used; empty if it can."""
    installed = importlib.metadata.version("flwr")
    if installed in TESTED:
        return ""
    return (
        f"kinfed flower starts only with Flower {' or '.join(TESTED)}, whose open interfaces it is tested to close; "
        f"found {installed}: pip install 'flwr=={TESTED[-1]}'"
    )


def command(program: str, *arguments: str) -> list[str]:
    """How a program of Flower is started."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), program, *arguments]


class Verdict(NamedTuple):
    """What happens to a call: 0 if it passes, otherwise the HTTP status of its refusal, and why."""

    status: int
    why: str = ""


PASS = Verdict(0)


class Doorman:
    """Decides by a call's head alone whether it passes.

    `secret`: callers that know it may call anything. `known`: whether a public key is registered; None if no keys are
    required. `sites`: whether sites call here.
    """

    def __init__(
        self,
        secret: str,
        sites: bool,
        known: Callable[[bytes], bool] | None,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._secret, self._known, self._now = secret.encode(), known, now
        self._paths = (SITES if known else SITES | ANONYMOUS) if sites else set()
        self._seen: OrderedDict[tuple[bytes, str], datetime.datetime] = OrderedDict()
        self._count: Counter[bytes] = Counter()  # of those, by key

    def judge(self, method: str, path: bytes, headers: Headers) -> Verdict:
        """The verdict on a call with this path as it was sent, not decoded."""
        headers = list(headers)
        secret = _only(headers, HEADER)
        local = secret is not None and hmac.compare_digest(secret, self._secret)
        if not local and not ((path in self._paths and method == "POST") or (path == b"/health" and method == "GET")):
            return Verdict(404, "not for strangers")
        if any(name == b"transfer-encoding" for name, _ in headers):
            return Verdict(411, "the call needs a Content-Length")
        length = _length(headers)
        if length is None or length > (LARGEST if local or path != b"/health" else 0):
            return Verdict(413, "too long")
        return PASS if local or path == b"/health" else self._signed(path, headers, length)

    def _signed(self, path: bytes, headers: Headers, length: int) -> Verdict:
        key, stamp = _signer(headers, self._now())
        if not key:
            return Verdict(401, "not signed, or not lately")
        if self._known is None:
            return PASS
        if not self._known(key):  # Flower then tells the node why it is refused
            return PASS if path == ACTIVATE and length <= GREETING else Verdict(401, "an unknown key")
        now = self._now()
        while self._seen and now - next(iter(self._seen.values())) > VALID:
            (old, _), _ = self._seen.popitem(last=False)
            self._count[old] -= 1
        # A key has many valid signatures for one time, and anyone who has seen one can make another.
        if (key, stamp) in self._seen:
            return Verdict(409, "signed for a call that was made already")
        if self._count[key] >= MOST:
            return Verdict(429, "too many calls")
        self._seen[key, stamp] = now
        self._count[key] += 1
        return PASS


def _only(headers: Headers, name: bytes) -> bytes | None:
    """The header of a name; None also if there are several, as another reader might take another one."""
    values = [value for key, value in headers if key == name]
    return values[0] if len(values) == 1 else None


def _length(headers: Headers) -> int | None:
    values = {value for key, value in headers if key == b"content-length"}
    if not values:
        return 0
    (value,) = values if len(values) == 1 else (b"",)
    return int(value) if value.isdigit() and len(value) < 20 else None


def _signer(headers: Headers, now: datetime.datetime) -> tuple[bytes, str]:
    """Public key and time of a valid signature, as Flower's nodes make it; both are empty if there is none."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key, stamp, signature = (
            _only(headers, name) or b"" for name in (b"flwr-public-key", b"flwr-timestamp", b"flwr-signature")
        )
        key, signature = base64.b64decode(key, validate=True), base64.b64decode(signature, validate=True)
        if abs(now - datetime.datetime.fromisoformat(stamp.decode("ascii"))) > VALID:
            return b"", ""
        public = serialization.load_pem_public_key(key)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return b"", ""
        public.verify(signature, stamp, ec.ECDSA(hashes.SHA256()))
        return key, stamp.decode("ascii")
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return b"", ""


class Gate:
    """A web application in front of another, which has the doorman judge every call."""

    def __init__(self, app: Any, doorman: Doorman) -> None:
        self._app, self._doorman = app, doorman
        self._refused, self._logged_at = 0, -60.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)  # type: ignore[no-any-return]
        if scope["type"] != "http":
            return None
        path = scope["raw_path"]
        verdict = self._doorman.judge(scope["method"], path, scope["headers"])
        if not verdict.status:
            return await self._app(scope, _in_time(receive), send)  # type: ignore[no-any-return]
        self._log(scope, path, verdict.why)
        # Closing the connection leaves the body where it is.
        headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": verdict.status, "headers": headers})
        await send({"type": "http.response.body", "body": verdict.why.encode()})
        return None

    def _log(self, scope: Any, path: bytes, why: str) -> None:
        """Log what was refused, once a minute, so that strangers cannot fill the disk."""
        self._refused += 1
        if time.monotonic() - self._logged_at >= 60:
            sender, call = (scope["client"] or ("nobody",))[0], f"{scope['method']} {path!r:.80}"
            print(f"kinfed: refused calls: {self._refused}; the last was {call} from {sender}: {why}", flush=True)
            self._refused, self._logged_at = 0, time.monotonic()


class Listener(socket.socket):
    """A listening socket that hangs up at once on the connections of an address that has too many."""

    def __init__(self, bound: socket.socket) -> None:
        super().__init__(fileno=bound.detach())
        self.open: Counter[bytes] = Counter()  # connections, by address

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; raises ConnectionAbortedError for one too many."""
        accepted, where = super().accept()
        address = ipaddress.ip_address(where[0].partition("%")[0]).packed[:8]  # IPv6 is given out by half addresses
        if self.open[address] >= CONNECTIONS:
            accepted.close()
            raise ConnectionAbortedError
        return _Counted(accepted, self.open, address), where


class _Counted(socket.socket):
    """A connection that counts until it is closed."""

    def __init__(self, accepted: socket.socket, open: Counter[bytes], address: bytes) -> None:
        super().__init__(fileno=accepted.detach())
        self._open, self._address = open, address
        open[address] += 1

    def close(self) -> None:
        if self.fileno() >= 0:
            self._open[self._address] -= 1
            if not self._open[self._address]:
                del self._open[self._address]
        super().close()


def _in_time(receive: Any) -> Any:
    """A receiver that gives up if the next piece of a body does not come in time."""
    more = True

    async def piece() -> Any:
        nonlocal more
        if not more:  # from now on it reports whether the caller has gone
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), PATIENCE)
        except TimeoutError:
            return {"type": "http.disconnect"}
        more = message.get("more_body", False)
        return message

    return piece


def bundle(config: dict[str, str]) -> dict[str, Any]:
    """The pyproject.toml of kinfed's app for Flower, without code of its own: sites run the kinfed that they have."""
    components = {"serverapp": "kinfed.flower.app:app", "clientapp": "kinfed.flower.client:app"}
    app = {"publisher": "kinfed", "components": components, "config": config}
    project = {"name": "kinfed-federation", "version": "0.1.0", "license": "Apache-2.0", "dependencies": []}
    return {"project": project, "tool": {"flwr": {"app": app}}}


def foreign(run: Any, fab: Any) -> str:
    """Why a run of Flower's, with this bundle, is not one of kinfed's own program; empty if it is."""
    try:
        with zipfile.ZipFile(io.BytesIO(fab.content)) as file:
            names = sorted(file.namelist())
            if names != [".info/CONTENT", "pyproject.toml"]:
                return f"it brings {', '.join(names)!r:.200}"
            if sum(part.file_size for part in file.infolist()) > LARGEST:
                return "it is too large"
            table = tomllib.loads(file.read("pyproject.toml").decode())
        config = table["tool"]["flwr"]["app"]["config"]
        if table != bundle(config) or not all(isinstance(value, str) for value in config.values()):
            return "its pyproject.toml is another"
    except Exception as problem:  # whatever reading what somebody made up can end in
        return f"its bundle cannot be read ({problem!r:.80})"
    named = (run.fab_id, run.fab_version, run.fab_hash, run.primary_task_type or "flwr-serverapp")
    own = ("kinfed/kinfed-federation", "0.1.0", hashlib.sha256(fab.content).hexdigest(), "flwr-serverapp")
    if named != own or fab.hash_str != own[2] or not set(run.override_config) <= set(config):
        return f"it is named {' '.join(named)!r:.200}"
    return ""


class Stamped:
    """A stream, each of whose lines begins with the time in UTC, as Flower's logs have none."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._begins = stream, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write some text, which may be any part of a line or of several."""
        if not isinstance(text, str):  # by which libraries ask what kind of stream this is
            raise TypeError(f"text is written here, not {type(text).__name__}")
        now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ} "
        lines = text.splitlines(keepends=True)
        stamped = "".join(now + line if i or self._begins else line for i, line in enumerate(lines))
        self._begins = lines[-1].endswith("\n") if lines else self._begins
        self._stream.write(stamped)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write them, one after another."""
        self.write("".join(lines))


def main() -> None:
    """Be a program of Flower."""
    name, *arguments = sys.argv[1:]
    if problem := untested():
        sys.exit(problem)
    os.umask(0o077)
    if name != "flwr":  # whose output is read by programs
        sys.stdout, sys.stderr = Stamped(sys.stdout), Stamped(sys.stderr)
    secret = os.environ[SECRET]
    if name in ("flower-superlink", "flower-supernode"):
        _guard(secret, sites=name == "flower-superlink")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, FILES)), hard))
    if name == "flower-supernode":
        _run_own_program_alone()
    else:
        _tell(secret)
    _start_through_gate()
    (script,) = importlib.metadata.distribution("flwr").entry_points.select(group="console_scripts", name=name)
    sys.argv = [name, *arguments]
    sys.exit(script.load()())


def _guard(secret: str, sites: bool) -> None:
    """Put the gate in front of every web application that this process serves."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol  # the other one takes heads of any length

    class Hurried(H11Protocol):
        """Hangs up on clients that neither call nor wait for an answer."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look(None)

        def connection_lost(self, problem: Exception | None) -> None:
            self._next.cancel()  # it would keep what the connection has read
            super().connection_lost(problem)

        def _look(self, last: Any) -> None:
            self._next = self.loop.call_later(PATIENCE, self._hurry, last)

        def _hurry(self, last: Any) -> None:
            if self.cycle is last and (last is None or last.response_complete):
                self.transport.close()
            else:
                self._look(self.cycle)

    real = uvicorn.Config.__init__

    def start(self: Any, app: Any, **settings: Any) -> None:
        known = None
        if sites and app.state.enable_supernode_auth:
            state = app.state.linkstate_factory.state()
            known = lambda key: state.get_node_id_by_public_key(key) is not None  # noqa: E731
        doorman = Doorman(secret, sites, known)
        settings |= {"http": Hurried, "ws": "none", "access_log": False, "proxy_headers": False}
        settings |= {"loop": "asyncio"}  # another one would accept connections itself
        real(self, Gate(app, doorman), **settings)

    begin = uvicorn.Server.startup

    async def listen(self: Any, sockets: Any = None) -> None:
        await begin(self, sockets or [Listener(self.config.bind_socket())])

    uvicorn.Config.__init__ = start  # type: ignore[assignment, method-assign]
    uvicorn.Server.startup = listen  # type: ignore[method-assign]


def _tell(secret: str) -> None:
    """Send the secret with every call that this process makes, and follow no redirect with it."""
    from flwr.supercore.protobuf.client import ProtobufClient

    real = ProtobufClient.__init__

    def start(self: Any, *arguments: Any, **settings: Any) -> None:
        real(self, *arguments, **settings)
        self._client.headers[HEADER.decode()] = secret
        self._client.follow_redirects = False

    ProtobufClient.__init__ = start  # type: ignore[method-assign]


def _run_own_program_alone() -> None:
    """Have this node refuse programs other than kinfed's own, and report each refusal to the server."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode
    from flwr.supercore.protobuf.client import ProtobufClient
    from flwr.supernode import start_client_internal as node

    class Foreign(Exception):
        pass

    real, begin = node._pull_and_store_message, ProtobufClient.__init__

    def pull(*, state: Any, object_store: Any, receive: Any, get_run: Any, get_fab: Any, **others: Any) -> Any:
        received: dict[
            str, Any
        ] = {}  # Flower continues with what was checked: a second request might be answered otherwise

        def remember(name: str, ask: Any) -> Any:
            return lambda *arguments: received.setdefault(name, ask(*arguments))

        def check(*arguments: Any) -> Any:
            fab = get_fab(*arguments)
            if why := foreign(received["run"], fab):
                raise Foreign(f"refused a program that the server sent: {why}; this node runs kinfed's own alone")
            return fab

        wrapped = {"receive": remember("message", receive), "get_run": remember("run", get_run), "get_fab": check}
        try:
            return real(state=state, object_store=object_store, **wrapped, **others)
        except Foreign as problem:
            print(f"kinfed: {problem}", flush=True)
            message, _ = received["message"]
            answer = Message(Error(ErrorCode.INVALID_FAB, str(problem)), reply_to=message)
            node._insert_message(answer, state, object_store)
            return message.metadata.run_id

    def start(self: Any, *arguments: Any, **settings: Any) -> None:
        begin(self, *arguments, **settings)
        self._client.follow_redirects = False  # a server could have it call others in the site's network

    node._pull_and_store_message = pull  # type: ignore[assignment]
    ProtobufClient.__init__ = start  # type: ignore[method-assign]


def _start_through_gate() -> None:
    """Start the programs of Flower that this process starts through this file as well."""
    real = subprocess.Popen.__init__

    def start(self: Any, args: Any, *others: Any, **how: Any) -> None:
        real(
            self,
            command(*args) if isinstance(args, list) and args[:1] and args[0] in PROGRAMS else args,
            *others,
            **how,
        )

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
