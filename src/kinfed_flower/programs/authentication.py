"""The gate in front of the SuperLink, a web application around Flower's own.

Others reach /health alone, and the calls that sites make, each with its own signature by a member's key, checked before
any of the body is read. A run's process calls from this machine alone, where Flower asks for the run's own token.
Everything else needs a secret that kinfed's own programs on this machine know. One address has a bounded number of
connections, counted before TLS, and one key a bounded number of bytes under way.
"""

import asyncio
import base64
import datetime
import gc
import hmac
import json
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kinfed.runs import connections

from ..wire.keys import fingerprint
from ..wire.link import HEADER, PRESENCE, STALE, UNKNOWN

LARGEST = 8 << 20  # bytes of a call; Flower cuts arrays into pieces of 5 MiB
AT_ONCE = LARGEST + (1 << 16)  # bytes of one key that may be under way: a node makes one call after another
LONG = 1 << 20  # bytes of a body whose memory is given back at once
ALL_AT_ONCE = 8 * LARGEST  # of all keys
VALID = datetime.timedelta(seconds=310)  # in which Flower may take a signature for fresh, and some
MOST = 100_000  # signatures of one key in that time
HEARD = 10_000  # keys of which it is remembered when they last called
LOOK = 1.0  # seconds between two looks at who the members are
RUNTIME = b"/v1/runtime/"  # what the process of a run calls
SITES = {  # what a site's node calls
    b"/v1/fleet/activate-node",
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
Members = Callable[[], Mapping[bytes, str]]  # public keys, and the site of each


class Admission(NamedTuple):
    """What happens to a call: 0 if it passes, otherwise the HTTP status of its refusal, and why."""

    status: int
    why: str = ""
    key: bytes = b""  # whose the call is
    length: int = 0  # bytes of its body


PASS = Admission(0)


class Doorman:
    """Decides by a call's head alone whether it passes.

    `secret`: callers that know it may call anything. `members`: whose keys may call; None if no keys are required.
    """

    def __init__(
        self,
        secret: str,
        members: Members | None,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._secret, self._members, self._now = secret.encode(), members, now
        self._paths = SITES if members else SITES | ANONYMOUS
        self._known: Mapping[bytes, str] = {}
        self._looked: datetime.datetime | None = None
        self._seen: OrderedDict[tuple[bytes, str], datetime.datetime] = OrderedDict()
        self._count: Counter[bytes] = Counter()  # of those, by key
        self.heard: OrderedDict[bytes, float] = OrderedDict()  # when each key last called, in seconds since 1970

    def judge(self, method: str, path: bytes, headers: Headers, near: bool = False) -> Admission:
        """Whether to pass on a call with this path as it was sent, not decoded; `near`: it comes from this machine."""
        headers = list(headers)
        secret = _only(headers, HEADER)
        local = secret is not None and hmac.compare_digest(secret, self._secret)
        run = near and method == "POST" and path.startswith(RUNTIME)
        site = method == "POST" and path in self._paths
        if not (local or run or site or (path == b"/health" and method == "GET")):
            return Admission(404, "no such address")
        if any(name == b"transfer-encoding" for name, _ in headers):
            return Admission(411, "the call needs a Content-Length")
        length = _length(headers)
        if length is None or length > (LARGEST if local or run or site else 0):
            return Admission(413, "too long")
        return self._admit_site(headers, length) if site and not local else PASS

    def _admit_site(self, headers: Headers, length: int) -> Admission:
        claimed, now = _read_claim(headers), self._now()
        if claimed is None:
            return Admission(401, STALE)
        key, stamp, _ = claimed
        if not self._is_known_site(key):  # looked up first, as a signature takes a thousand times as long
            return Admission(401, UNKNOWN)
        if not _is_signed(*claimed, now):
            return Admission(401, STALE)
        while self._seen and now - next(iter(self._seen.values())) > VALID:
            (old, _), _ = self._seen.popitem(last=False)
            self._count[old] -= 1
        # A key has many valid signatures for one time, and anyone who has seen one can make another.
        if (key, stamp) in self._seen:
            return Admission(409, "signed for a call that was made already")
        if self._count[key] >= MOST:
            return Admission(429, "too many calls")
        self._seen[key, stamp] = now
        self._count[key] += 1
        self.heard[key] = now.timestamp()
        self.heard.move_to_end(key)
        if len(self.heard) > HEARD:
            self.heard.popitem(last=False)
        return Admission(0, "", key, length)

    def _is_known_site(self, key: bytes) -> bool:
        """Whether a key is a member's now: a site that is revoked is refused within a second."""
        if self._members is None:
            return True
        now = self._now()
        if self._looked is None or (now - self._looked).total_seconds() >= LOOK:
            self._known, self._looked = self._members(), now
        return key in self._known


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


def _read_claim(headers: Headers) -> tuple[bytes, str, bytes] | None:
    """Public key, time and signature that a call claims to have, as Flower's nodes send them; None without these."""
    try:
        key, stamp, signature = (
            _only(headers, name) or b"" for name in (b"flwr-public-key", b"flwr-timestamp", b"flwr-signature")
        )
        claim = base64.b64decode(key, validate=True), stamp.decode("ascii"), base64.b64decode(signature, validate=True)
    except ValueError:
        return None
    return claim if all(claim) else None


def _is_signed(key: bytes, stamp: str, signature: bytes, now: datetime.datetime) -> bool:
    """Whether a time is signed by a key, and lately."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        if abs(now - datetime.datetime.fromisoformat(stamp)) > VALID:
            return False
        public = serialization.load_pem_public_key(key)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(signature, stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        return True
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False


class Gate:
    """A web application in front of another, which has the doorman judge every call."""

    def __init__(self, app: Any, doorman: Doorman, admit: Callable[[Any], None]) -> None:
        self._app, self._doorman, self._admit = app, doorman, admit
        self._under_way: Counter[bytes] = Counter()  # bytes of bodies, by key
        self._refused, self._logged_at = 0, -60.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None
        path = scope["raw_path"]
        near = bool(scope["client"]) and scope["client"][0] == scope["server"][0]  # this machine, called by itself
        admission = self._doorman.judge(scope["method"], path, scope["headers"], near)
        if not admission.status and self._is_too_much(admission):
            admission = Admission(503, "too many bytes at once")
        if admission.status:
            self._log(scope, path, admission.why)
            return await _answer(send, admission.status, admission.why)
        if path != b"/health":
            self._admit(scope["client"])
        if path == PRESENCE:
            heard = {fingerprint(key): at for key, at in self._doorman.heard.items()}
            return await _answer(send, 200, json.dumps(heard))
        self._under_way[admission.key] += admission.length
        try:
            return await self._app(scope, _in_time(receive), send)
        finally:
            self._under_way[admission.key] -= admission.length
            if not self._under_way[admission.key]:
                del self._under_way[admission.key]
            if admission.length > LONG:  # what refuses it may keep it in a circle of references
                gc.collect()

    def _is_too_much(self, admission: Admission) -> bool:
        """Whether a call's body would be too many bytes under way of one key, or of all; nodes try again."""
        of_key, of_all = self._under_way[admission.key], self._under_way.total()
        return of_key + admission.length > AT_ONCE or (admission.length > 0 and of_all + admission.length > ALL_AT_ONCE)

    def _log(self, scope: Any, path: bytes, why: str) -> None:
        """Log what was refused, once a minute, so that strangers cannot fill the disk."""
        self._refused += 1
        if time.monotonic() - self._logged_at >= 60:
            sender = (scope["client"] or ("nobody",))[0]
            call = f"{scope['method']} {path!r:.80}"
            print(f"refused calls: {self._refused}; the last was {call} from {sender}: {why}", flush=True)
            self._refused, self._logged_at = 0, time.monotonic()


async def _answer(send: Any, status: int, text: str) -> None:
    """Answer at once; closing the connection leaves a body where it is."""
    headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def _in_time(receive: Any) -> Any:
    """A receiver that gives up if the next piece of a body does not come in time."""
    more = True

    async def piece() -> Any:
        nonlocal more
        if not more:  # from now on it reports whether the caller has gone
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), connections.PATIENCE)
        except TimeoutError:
            return {"type": "http.disconnect"}
        more = message.get("more_body", False)
        return message

    return piece


def serve(app: Any, doorman: Doorman, bound: socket.socket, certificate: str = "", key: str = "") -> None:
    """Serve an application behind the gate until a signal ends this process."""
    listener = connections.Listener(bound)
    server = make_server(app, doorman, certificate, key, listener.admit)
    gc.freeze()  # so that later collections are quick
    server.run(sockets=[listener])


def make_server(
    app: Any, doorman: Doorman, certificate: str = "", key: str = "", admit: Callable[[Any], None] = lambda where: None
) -> Any:
    """A server of uvicorn's with the gate in front of an application; it hangs up on whoever says nothing.

    `admit` is called with the address and port of each call that passes.
    """
    import uvicorn

    config = uvicorn.Config(
        Gate(app, doorman, admit),
        http=connections.make_impatient_protocol(),
        ws="none",
        loop="asyncio",  # another one would accept connections itself
        access_log=False,
        proxy_headers=False,
        log_config=None,
        ssl_certfile=certificate or None,
        ssl_keyfile=key or None,
    )
    return uvicorn.Server(config)
