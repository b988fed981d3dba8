"""Who passes the gate in front of the SuperLink."""

import asyncio
import base64
import contextlib
import datetime
import http.server
import re
import select
import socket
import ssl
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

from kinfed.runs import connections
from kinfed_flower.programs import authentication, subprocesses
from kinfed_flower.wire import keys
from kinfed_flower.wire.link import Link

NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
SECRET = "a" * 64
PULL = b"/v1/fleet/pull-messages"
LENGTH = (b"content-length", b"10")


class Clock:
    def __init__(self):
        self.now = NOW

    def __call__(self):
        return self.now


def pem(key):
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def signed(key, stamp=NOW, public=None, signature=None):
    text = (stamp if isinstance(stamp, str) else stamp.isoformat()).encode()
    signature = signature or key.sign(text, ec.ECDSA(hashes.SHA256()))
    return [
        (b"flwr-public-key", base64.b64encode(public or pem(key))),
        (b"flwr-timestamp", text),
        (b"flwr-signature", base64.b64encode(signature)),
    ]


@pytest.fixture(scope="module")
def ann():
    return ec.generate_private_key(ec.SECP384R1())


@pytest.fixture(scope="module")
def mallory():
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def doorman(ann):
    return authentication.Doorman(SECRET, lambda: {pem(ann): "ann"}, Clock())


def status(doorman, path=PULL, headers=(), method="POST"):
    return doorman.judge(method, path, [*headers, LENGTH]).status


STRANGE = [
    *(b"/v1/control/" + call for call in (b"start-run", b"list-runs", b"stop-run", b"stream-logs", b"register-node")),
    *(b"/v1/runtime/" + call for call in (b"acquire-task", b"pull-task-input", b"responses")),
    b"/docs",
    b"/openapi.json",
    b"/",
    b"",
    b"/v1/fleet/register-node",
    b"/v1/fleet/unregister-node",
    b"/v1/fleet/",
    b"/v1/fleet/pull-messages/",
    b"/v1/fleet//pull-messages",
    b"//v1/control/list-runs",
    b"/v1/fleet/../control/list-runs",
    b"/v1/fleet/%2e%2e/control/list-runs",
    b"/v1/fleet%2f..%2fcontrol%2flist-runs",
    b"/v1/fleet/pull-messages/../../control/list-runs",
    b"/v1/fleet/pull-messages;/v1/control/list-runs",
    b"/v1/Fleet/pull-messages",
    b"/v1/fleet/pull%2dmessages",
    b"https://hub/v1/control/list-runs",
    b"/health/../v1/control/list-runs",
    b"/health/",
    b"\\v1\\control\\list-runs",
]


@pytest.mark.parametrize("path", STRANGE)
def test_strangers_and_sites_reach_no_path_but_those_of_sites(doorman, ann, path):
    assert status(doorman, path) == 404
    assert status(doorman, path, signed(ann)) == 404  # who has a site's key may do what sites do


def test_a_site_may_call_what_sites_call_and_nobody_else_may(doorman, ann, mallory):
    moments = (NOW + datetime.timedelta(microseconds=i) for i in range(100))
    for path in authentication.SITES:
        assert status(doorman, path, signed(ann, next(moments))) == 0
        assert status(doorman, path) == 401
        assert status(doorman, path, signed(ann, next(moments)), "GET") == 404
        assert status(doorman, path, signed(mallory)) == 401
    assert doorman.judge("POST", PULL, [*signed(mallory), LENGTH]).why == authentication.UNKNOWN


def test_a_key_that_is_taken_away_is_refused_within_a_second_and_may_come_back(ann):
    clock, members = Clock(), {pem(ann): "ann"}
    doorman = authentication.Doorman(SECRET, lambda: dict(members), clock)
    assert status(doorman, PULL, signed(ann, clock.now)) == 0
    known = members.pop(pem(ann))
    for wanted in (401, 0):
        clock.now += datetime.timedelta(seconds=authentication.LOOK)
        assert status(doorman, PULL, signed(ann, clock.now)) == wanted
        members[pem(ann)] = known


def test_it_is_known_when_a_member_last_called(doorman, ann, mallory):
    status(doorman, PULL, signed(mallory))
    assert not doorman.heard
    status(doorman, PULL, signed(ann))
    assert doorman.heard == {pem(ann): NOW.timestamp()}
    assert status(doorman, authentication.PRESENCE, signed(ann)) == 404
    assert status(doorman, authentication.PRESENCE, [(authentication.HEADER, SECRET.encode())], "GET") == 0


def test_the_secret_opens_everything_and_nothing_like_it_does(doorman):
    for path in (*STRANGE, PULL):
        assert status(doorman, path, [(authentication.HEADER, SECRET.encode())]) == 0
    for wrong in (b"", b"a", SECRET.encode() + b"a", SECRET.encode()[:-1], b"A" * 64, b"\xff"):
        assert status(doorman, b"/v1/control/list-runs", [(authentication.HEADER, wrong)]) == 404
    assert status(doorman, b"/v1/control/list-runs", [(authentication.HEADER, SECRET.encode())] * 2) == 404
    assert status(doorman, b"/v1/control/list-runs", [(b"authorization", SECRET.encode())]) == 404


def test_the_process_of_a_run_calls_from_this_machine_alone(doorman):
    for path in (b"/v1/runtime/acquire-task", b"/v1/runtime/push-messages"):
        assert doorman.judge("POST", path, [LENGTH], near=True).status == 0  # Flower asks for its token
        assert doorman.judge("POST", path, [LENGTH], near=False).status == 404
        assert doorman.judge("GET", path, [], near=True).status == 404
    for path in (b"/v1/control/start-run", b"/docs", b"/v1/runtime", authentication.PRESENCE, b"/v1//runtime/x"):
        assert doorman.judge("POST", path, [LENGTH], near=True).status == 404


def test_without_keys_nodes_may_register_themselves(mallory):
    open_ = authentication.Doorman(SECRET, None, Clock())
    assert status(open_, b"/v1/fleet/register-node", signed(mallory)) == 0
    assert status(open_, b"/v1/fleet/register-node") == 401
    assert status(open_, b"/v1/control/list-runs", signed(mallory)) == 404


@pytest.mark.parametrize(
    ("headers", "verdict"),
    [
        ([(b"content-length", b"%d" % authentication.LARGEST)], 0),
        ([(b"content-length", b"%d" % (authentication.LARGEST + 1))], 413),
        ([(b"content-length", b"9" * 5000)], 413),
        ([(b"content-length", b"-1")], 413),
        ([(b"content-length", b"1"), (b"content-length", b"2")], 413),
        ([(b"transfer-encoding", b"chunked")], 411),
        ([(b"transfer-encoding", b"identity"), LENGTH], 411),
        ([], 0),
    ],
)
@pytest.mark.parametrize("who", ["site", "near"])
def test_the_length_of_a_body_is_told_and_bounded(doorman, ann, headers, verdict, who):
    introduced = signed(ann) if who == "site" else [(authentication.HEADER, SECRET.encode())]
    assert doorman.judge("POST", PULL, [*introduced, *headers]).status == verdict


def test_health_is_for_everybody_but_takes_no_body(doorman):
    assert doorman.judge("GET", b"/health", []).status == 0
    assert doorman.judge("POST", b"/health", []).status == 404
    assert doorman.judge("GET", b"/health", [(b"content-length", b"1")]).status == 413
    assert doorman.judge("GET", b"/health", [(b"transfer-encoding", b"chunked")]).status == 411


def test_a_signature_must_be_of_now_and_of_the_key(doorman, ann, mallory):
    minutes = lambda n: NOW + datetime.timedelta(minutes=n)  # noqa: E731
    good = dict(signed(ann))
    wrong = [
        signed(ann, minutes(6)),
        signed(ann, minutes(-6)),
        signed(ann, "2030-01-01T00:00:00"),  # of no time zone
        signed(ann, "now"),
        signed(mallory, public=pem(ann)),
        signed(ann, public=b"no key"),
        signed(ann, signature=b"none"),
        [*good.items(), *signed(mallory)],
        *([(k, v) for k, v in good.items() if k != name] for name in good),
        *([(k, b"\xff" if k == name else v) for k, v in good.items()] for name in good),
        *([(k, b"" if k == name else v) for k, v in good.items()] for name in good),
    ]
    for headers in wrong:
        assert status(doorman, PULL, headers) == 401
    assert status(doorman, PULL, good.items()) == 0


def test_a_signature_is_good_for_one_call(ann):
    bob, clock = ec.generate_private_key(ec.SECP256R1()), Clock()
    doorman = authentication.Doorman(SECRET, lambda: {pem(ann): "ann", pem(bob): "bob"}, clock)
    first = signed(bob)
    assert status(doorman, PULL, first) == 0
    assert status(doorman, PULL, first) == 409
    assert status(doorman, b"/v1/fleet/push-messages", first) == 409
    # Whoever has seen (r, s) knows (r, order - s), which is as good.
    r, s = utils.decode_dss_signature(base64.b64decode(dict(first)[b"flwr-signature"]))
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    twin = utils.encode_dss_signature(r, order - s)
    bob.public_key().verify(twin, NOW.isoformat().encode(), ec.ECDSA(hashes.SHA256()))
    assert status(doorman, PULL, signed(bob, signature=twin)) == 409
    assert status(doorman, PULL, signed(ann)) == 0  # another's of the same moment
    clock.now += authentication.VALID + datetime.timedelta(seconds=1)
    assert status(doorman, PULL, first) == 401
    assert status(doorman, PULL, signed(bob, clock.now)) == 0
    assert len(doorman._seen) == 1  # what is out of date anyway is not remembered


def test_a_signature_covers_no_content_and_is_forgotten_by_a_restart(doorman, ann):
    """As docs/privacy.md says of whoever reads a site's calls: it can change one, and repeat it after a restart."""
    first = signed(ann)
    assert doorman.judge("POST", b"/v1/fleet/push-messages", [*first, (b"content-length", b"999")]).status == 0
    assert status(doorman, PULL, first) == 409
    again = authentication.Doorman(SECRET, lambda: {pem(ann): "ann"}, Clock())
    assert status(again, PULL, first) == 0
    assert status(again, PULL, first) == 409
    late = Clock()
    late.now += authentication.VALID + datetime.timedelta(seconds=1)
    assert status(authentication.Doorman(SECRET, lambda: {pem(ann): "ann"}, late), PULL, first) == 401


def test_what_is_remembered_is_bounded(ann, monkeypatch):
    monkeypatch.setattr(authentication, "MOST", 3)
    clock = Clock()
    doorman = authentication.Doorman(SECRET, lambda: {pem(ann): "ann"}, clock)
    moments = [NOW + datetime.timedelta(microseconds=i) for i in range(4)]
    assert [status(doorman, PULL, signed(ann, moment)) for moment in moments] == [0, 0, 0, 429]
    clock.now += authentication.VALID + datetime.timedelta(seconds=1)
    assert status(doorman, PULL, signed(ann, clock.now)) == 0


async def told(scope, receive, send):
    """A web application that tells how many bytes of body it was sent."""
    count, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        count, more = count + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%8d" % count})


@pytest.fixture
def served(monkeypatch):
    """The port of that application behind the gate, without keys."""
    monkeypatch.setattr(connections, "PATIENCE", 0.3)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port, listener = bound.getsockname()[1], connections.Listener(bound)
    server = authentication.make_server(told, authentication.Doorman(SECRET, None), admit=listener.admit)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield port
    server.should_exit = True
    thread.join(timeout=10)


def talk(port, *pieces, pause=0.0):
    """Send pieces with pauses in between, and return what comes until the other end hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        came = b""
        try:
            for piece in pieces:
                line.sendall(piece)
                time.sleep(pause)
            while part := line.recv(65536):
                came += part
        except ConnectionError:
            pass
        return came


def test_bodies_are_read_only_of_those_who_pass(served, capfd):
    near = b"kinfed-secret: " + SECRET.encode() + b"\r\n"
    close = b"host: x\r\nconnection: close\r\n"
    answer = talk(served, b"POST /any HTTP/1.1\r\n" + close + near + b"content-length: 3\r\n\r\nabc")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b" 3")
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\n"
    for length in (b"content-length: 1000000", b"content-length: 1000000000000", b"transfer-encoding: chunked"):
        begin = time.monotonic()
        answer = talk(served, head + length + b"\r\n\r\n1")  # the rest is never sent, and not waited for
        assert re.match(rb"HTTP/1.1 (401|411|413) ", answer)
        assert time.monotonic() - begin < 5
    websocket = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n"
    assert b" 404 " in talk(served, b"GET /v1/runtime/x HTTP/1.1\r\nhost: x\r\n" + websocket + b"\r\n")
    assert talk(served, b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n").startswith(b"HTTP/1.1 400")
    both = close + near + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    assert re.match(rb"HTTP/1.1 4", talk(served, b"POST /any HTTP/1.1\r\n" + both))
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("refused calls")]
    assert len(said) == 1  # in a minute
    assert "POST b'/v1/fleet/push-object' from 127.0.0.1" in said[0]


def test_who_stops_in_the_middle_is_hung_up_on(served):
    near = b"kinfed-secret: " + SECRET.encode() + b"\r\n"
    begin = time.monotonic()
    assert talk(served) == b""
    assert talk(served, b"POST /v1/fleet/push-object HTTP/1.1\r\nhost:") == b""
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    assert b"200 OK" in talk(served, health, b"GET /hea", pause=0.1)
    talk(served, b"POST /any HTTP/1.1\r\nhost: x\r\n" + near + b"content-length: 9\r\n\r\nabc")
    assert time.monotonic() - begin < 9  # each of them would have stayed
    slow = [
        b"POST /any HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + near + b"content-length: 6\r\n\r\n",
        *[b"ab"] * 3,
    ]
    assert talk(served, *slow, pause=0.1).endswith(b" 6")


def test_one_address_cannot_take_all_connections(served, monkeypatch):
    """Before TLS or any byte; others get in meanwhile, and the same address once it has hung up."""
    monkeypatch.setattr(connections, "CONNECTIONS", 3)
    monkeypatch.setattr(connections, "PATIENCE", 60.0)
    lines = [socket.create_connection(("127.0.0.1", served), timeout=5) for _ in range(8)]
    time.sleep(0.2)
    assert len(select.select(lines, [], [], 0)[0]) == 5  # hung up on
    health = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served), 5, source_address=("127.0.0.2", 0)) as other:
        other.sendall(health)
        assert b"200" in other.recv(100)
    for line in lines:
        line.close()
    time.sleep(0.2)
    assert b"200" in talk(served, health)


def test_strangers_of_many_addresses_take_a_bounded_number_of_connections(served, monkeypatch):
    """The oldest of the address with the most is closed; one that has called is no stranger's any more."""
    monkeypatch.setattr(connections, "STRANGERS", 6)
    monkeypatch.setattr(connections, "PATIENCE", 60.0)
    near = b"kinfed-secret: " + SECRET.encode() + b"\r\n"
    known = socket.create_connection(("127.0.0.1", served), 5)
    known.sendall(b"POST /any HTTP/1.1\r\nhost: x\r\n" + near + b"content-length: 3\r\n\r\nabc")
    assert known.recv(1000).startswith(b"HTTP/1.1 200")
    time.sleep(0.2)
    known.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        known.recv(1000)
    alone = socket.create_connection(("127.0.0.1", served), 5, source_address=("127.0.0.9", 0))
    lines = [
        socket.create_connection(("127.0.0.1", served), 5, source_address=(f"127.0.0.{2 + i % 4}", 0))
        for i in range(40)
    ]
    time.sleep(0.3)
    assert len(select.select(lines, [], [], 0)[0]) == 40 + 1 - 6  # hung up on
    assert select.select([known, alone], [], [], 0)[0] == []
    for line in (known, alone, *lines):
        line.close()


def test_a_signature_is_verified_only_of_a_members_key(monkeypatch):
    """It takes a thousand times as long as to look a key up."""
    verified = []
    monkeypatch.setattr(authentication, "_is_signed", lambda key, *rest: verified.append(key) or False)
    doorman = authentication.Doorman(SECRET, lambda: {b"ann's": "ann"})
    for key in (b"ann's", b"a stranger's"):
        parts = {"public-key": base64.b64encode(key), "timestamp": b"now", "signature": base64.b64encode(b"signed")}
        headers = [(f"flwr-{name}".encode(), value) for name, value in parts.items()]
        assert doorman.judge("POST", b"/v1/fleet/pull-messages", headers).status == 401
    assert verified == [b"ann's"]


def test_what_calls_from_elsewhere_is_not_this_machine(served):
    call = b"POST /v1/runtime/x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 3\r\n\r\nabc"
    assert b" 200 " in talk(served, call)
    with socket.create_connection(("127.0.0.1", served), 5, source_address=("127.0.0.2", 0)) as other:
        other.sendall(call)
        assert b" 404 " in other.recv(100)


def test_all_keys_together_have_a_bounded_number_of_bytes_under_way(served, ann, monkeypatch):
    monkeypatch.setattr(authentication, "ALL_AT_ONCE", 6)

    def head(key):
        lines = [name + b": " + value for name, value in signed(key, datetime.datetime.now(datetime.UTC))]
        lines += [b"host: x", b"connection: close", b"content-length: 4"]
        return b"\r\n".join([b"POST /v1/fleet/push-object HTTP/1.1", *lines, b"", b""])

    other = ec.generate_private_key(ec.SECP256R1())
    with socket.create_connection(("127.0.0.1", served), timeout=5) as first:
        first.sendall(head(ann))
        time.sleep(0.1)
        assert b" 503 " in talk(served, head(other) + b"abcd")
        first.sendall(b"abcd")
        assert first.recv(1000).startswith(b"HTTP/1.1 200")
    time.sleep(0.1)
    assert talk(served, head(other) + b"abcd").endswith(b" 4")


def test_one_key_cannot_have_many_bytes_under_way(served, ann, monkeypatch):
    monkeypatch.setattr(authentication, "AT_ONCE", 5)

    def head(key, length):
        lines = [name + b": " + value for name, value in signed(key, datetime.datetime.now(datetime.UTC))]
        lines += [b"host: x", b"connection: close", b"content-length: %d" % length]
        return b"\r\n".join([b"POST /v1/fleet/push-object HTTP/1.1", *lines, b"", b""])

    with socket.create_connection(("127.0.0.1", served), timeout=5) as first:
        first.sendall(head(ann, 4))
        time.sleep(0.1)
        assert b" 503 " in talk(served, head(ann, 4) + b"abcd")
        assert talk(served, head(ec.generate_private_key(ec.SECP256R1()), 4) + b"abcd").endswith(b" 4")
        first.sendall(b"abcd")
        assert first.recv(1000).startswith(b"HTTP/1.1 200")
    time.sleep(0.1)
    assert talk(served, head(ann, 4) + b"abcd").endswith(b" 4")


def test_only_who_knows_the_secret_learns_who_called(served):
    near = b"kinfed-secret: " + SECRET.encode() + b"\r\n"
    ask = b"GET /kinfed/presence HTTP/1.1\r\nhost: x\r\n"
    assert b"\r\n{}\r\n" in talk(served, ask + near + b"\r\n")
    assert b" 404 " in talk(served, ask + b"\r\n")


def test_what_flower_makes_is_its_owners_alone(tmp_path):
    (tmp_path / "old").mkdir(mode=0o755)
    subprocesses.make_private(tmp_path / "old")
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o700
    assert len(subprocesses.secret(tmp_path)) == 64
    assert subprocesses.secret(tmp_path) == subprocesses.secret(tmp_path)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_what_flower_may_be_told_by_the_environment_is_not_handed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")  # opens another port
    assert "FLWR_INTERNAL_GRPC_CONTROL_API" not in subprocesses.environment(tmp_path)


@pytest.mark.needs("nginx", "nginx-light")
def test_nginx_as_the_page_has_it_passes_what_sites_call_and_nothing_else(tmp_path, free_port):
    keys.make(tmp_path / "keys", [], [])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "keys" / "server.crt", tmp_path / "keys" / "server.key")

    class Answer(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            said = f"{self.path} {len(body)} {self.headers.get('kinfed-secret')}".encode()
            self.send_response(200)
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    behind = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    behind.block_on_close = False
    behind.socket = context.wrap_socket(behind.socket, server_side=True)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    (text,) = re.findall(r"```nginx\n(.*?)```", (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(), re.S)
    port, folders = free_port(), ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    own = (
        "".join(f"{name}_temp_path {tmp_path}/{name};" for name in folders)
        + f"access_log off; error_log {tmp_path}/log;"
    )
    changes = {"127.0.0.1:8001": f"127.0.0.1:{behind.server_port}", "/etc/kinfed": str(tmp_path)}
    changes |= {"listen 8000": f"listen 127.0.0.1:{port}", "http {": f"http {{ {own}"}
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "nginx.conf").write_text(text)
    settings = ["-e", f"{tmp_path}/log", "-g", f"daemon off; pid {tmp_path}/pid;"]
    trusted = ssl.create_default_context(cafile=str(tmp_path / "keys" / "ca.crt"))

    def call(path, *headers, method="POST", body=b""):
        length = [] if any(b"chunked" in header for header in headers) else [b"content-length: %d" % len(body)]
        head = [method.encode() + b" " + path + b" HTTP/1.1", b"host: localhost", *length, *headers]
        plain, came = socket.create_connection(("127.0.0.1", port), timeout=10), b""
        with trusted.wrap_socket(plain, server_hostname="localhost") as line:
            line.sendall(b"\r\n".join([*head, b"connection: close", b"", body]))
            while part := line.recv(65536):
                came += part
        return int(came.split()[1]), came.partition(b"\r\n\r\n")[2]

    with subprocess.Popen(["nginx", "-c", str(tmp_path / "nginx.conf"), *settings]) as nginx:
        try:
            deadline = time.monotonic() + 10
            while Link(f"127.0.0.1:{port}", str(tmp_path / "keys" / "ca.crt")).problem():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            for path in authentication.SITES:
                assert call(path, b"kinfed-secret: x", body=b"abc") == (200, path + b" 3 None")
            for path in STRANGE:
                if path.startswith((b"/", b"https:")):
                    code, said = call(path)
                    # nginx may resolve a path to that of a site, and passes on what it has resolved.
                    assert code in (400, 404) or (code == 200 and said.split()[0] in authentication.SITES)
                    assert b"control" not in said
            assert call(PULL, method="GET")[0] == 404
            assert call(PULL, b"transfer-encoding: chunked", body=b"3\r\nabc\r\n0\r\n\r\n")[1].split()[1] == b"3"
            assert call(PULL, b"transfer-encoding: chunked", body=b"1000001\r\nabc")[0] == 413
        finally:
            nginx.terminate()
            behind.shutdown()
            behind.server_close()
