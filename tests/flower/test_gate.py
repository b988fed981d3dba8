"""Who passes the gate in front of Flower's programs, and which programs a site runs."""

import asyncio
import base64
import datetime
import hashlib
import http.server
import io
import re
import select
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

import uvicorn
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

from kinfed.flower import gate, keys, subprocesses
from kinfed.flower.link import Link

NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
SECRET = "a" * 64
PULL = b"/v1/fleet/pull-messages"
LENGTH = (b"content-length", b"10")
CONFIG = {"config": "{}", "out": "/run"}


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
    return gate.Doorman(SECRET, True, {pem(ann)}.__contains__, Clock())


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
    for path in gate.SITES:
        assert status(doorman, path, signed(ann, next(moments))) == 0
        assert status(doorman, path) == 401
        assert status(doorman, path, signed(ann, next(moments)), "GET") == 404
        assert status(doorman, path, signed(mallory)) == (0 if path == gate.ACTIVATE else 401)
    huge = (b"content-length", str(gate.GREETING + 1).encode())
    assert doorman.judge("POST", gate.ACTIVATE, [*signed(mallory), huge]).status == 401


def test_the_secret_opens_everything_and_nothing_like_it_does(doorman):
    for path in (*STRANGE, PULL):
        assert status(doorman, path, [(gate.HEADER, SECRET.encode())]) == 0
    for wrong in (b"", b"a", SECRET.encode() + b"a", SECRET.encode()[:-1], b"A" * 64, b"\xff"):
        assert status(doorman, b"/v1/control/list-runs", [(gate.HEADER, wrong)]) == 404
    assert status(doorman, b"/v1/control/list-runs", [(gate.HEADER, SECRET.encode())] * 2) == 404
    assert status(doorman, b"/v1/control/list-runs", [(b"authorization", SECRET.encode())]) == 404


def test_where_no_sites_call_only_the_secret_counts(ann):
    node = gate.Doorman(SECRET, False, None, Clock())
    assert status(node, b"/v1/runtime/acquire-task") == 404
    assert status(node, PULL, signed(ann)) == 404
    assert status(node, b"/v1/runtime/acquire-task", [(gate.HEADER, SECRET.encode())]) == 0


def test_without_keys_nodes_may_register_themselves(mallory):
    open_ = gate.Doorman(SECRET, True, None, Clock())
    assert status(open_, b"/v1/fleet/register-node", signed(mallory)) == 0
    assert status(open_, b"/v1/fleet/register-node") == 401
    assert status(open_, b"/v1/control/list-runs", signed(mallory)) == 404


@pytest.mark.parametrize(
    ("headers", "verdict"),
    [
        ([(b"content-length", b"%d" % gate.LARGEST)], 0),
        ([(b"content-length", b"%d" % (gate.LARGEST + 1))], 413),
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
    introduced = signed(ann) if who == "site" else [(gate.HEADER, SECRET.encode())]
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
    doorman = gate.Doorman(SECRET, True, {pem(ann), pem(bob)}.__contains__, clock)
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
    clock.now += gate.VALID + datetime.timedelta(seconds=1)
    assert status(doorman, PULL, first) == 401
    assert status(doorman, PULL, signed(bob, clock.now)) == 0
    assert len(doorman._seen) == 1  # what is out of date anyway is not remembered


def test_what_is_remembered_is_bounded(ann, monkeypatch):
    monkeypatch.setattr(gate, "MOST", 3)
    clock = Clock()
    doorman = gate.Doorman(SECRET, True, {pem(ann)}.__contains__, clock)
    moments = [NOW + datetime.timedelta(microseconds=i) for i in range(4)]
    assert [status(doorman, PULL, signed(ann, moment)) for moment in moments] == [0, 0, 0, 429]
    clock.now += gate.VALID + datetime.timedelta(seconds=1)
    assert status(doorman, PULL, signed(ann, clock.now)) == 0


@pytest.fixture
def served(monkeypatch):
    """The port of a web application behind the gate, which tells how many bytes of body it was sent."""
    monkeypatch.setattr(gate, "PATIENCE", 0.3)
    monkeypatch.setattr(uvicorn.Config, "__init__", uvicorn.Config.__init__)
    monkeypatch.setattr(uvicorn.Server, "startup", uvicorn.Server.startup)
    gate._guard(SECRET, sites=True)

    async def app(scope, receive, send):
        count, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            count, more = count + len(message.get("body", b"")), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
        await send({"type": "http.response.body", "body": b"%8d" % count})

    class App:
        state = SimpleNamespace(enable_supernode_auth=False)

        async def __call__(self, *arguments):
            await app(*arguments)

    server = uvicorn.Server(uvicorn.Config(App(), port=0, lifespan="off", log_level="critical"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
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
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("kinfed: refused")]
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
    monkeypatch.setattr(gate, "CONNECTIONS", 3)
    monkeypatch.setattr(gate, "PATIENCE", 60.0)
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


def pack(files):
    """A Flower app bundle as Flower packs it."""
    listing = "\n".join(f"{name},{hashlib.sha256(text).hexdigest()},{len(text) * 8}" for name, text in files)
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in (*files, (".info/CONTENT", listing.encode())):
            file.writestr(name, text)
    return held.getvalue()


def project(**changes):
    table = gate.bundle(CONFIG)
    for path, value in changes.items():
        part, *inner = path.split("__")
        place = table
        for name in inner:
            place, part = place[part], name
        place[part] = value
    return ("pyproject.toml", tomli_w.dumps(table).encode())


def brought(content, **changes):
    """A run and its bundle, as a node gets them from the server."""
    hash = hashlib.sha256(content).hexdigest()
    run = {"fab_id": "kinfed/kinfed-federation", "fab_version": "0.1.0", "fab_hash": hash, "override_config": {}}
    run |= {"primary_task_type": "flwr-serverapp", **changes}
    return SimpleNamespace(**run), SimpleNamespace(
        content=content, hash_str=run.pop("hash_str", hash), verifications={}
    )


def test_kinfeds_own_app_as_flower_builds_it_is_taken(tmp_path):
    from flwr.cli.build import build_fab_from_disk

    (tmp_path / "pyproject.toml").write_bytes(project()[1])
    content = build_fab_from_disk(tmp_path)
    content = content[0] if isinstance(content, tuple) else content
    assert gate.foreign(*brought(content)) == ""
    assert gate.foreign(*brought(content, override_config={"out": "/other"})) == ""


EVIL = ("evil.py", b"raise SystemExit")
CLIENT = "tool__flwr__app__components__clientapp"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([project(), EVIL], "evil.py"),
        ([project(), ("kinfed/flower/client.py", b"")], "kinfed/flower/client.py"),
        ([project(), ("kinfed/__init__.py", b"")], "kinfed/__init__.py"),
        ([project(), ("sitecustomize.py", b"")], "sitecustomize.py"),
        ([project(), (".info/evil.py", b"")], ".info/evil.py"),
        ([project(), ("../evil.py", b"")], "../evil.py"),
        ([project(), project(**{CLIENT: "evil:app"})], "pyproject.toml, pyproject.toml"),
        ([EVIL], "evil.py"),
        ([project(**{CLIENT: "evil:app"})], "another"),
        ([project(**{CLIENT: "os:system"})], "another"),
        ([project(tool__flwr__app__components__agentapp="evil:app")], "another"),
        ([project(project__dependencies=["evil"])], "another"),
        ([project(project__name="other")], "another"),
        ([project(**{"build-system": {"requires": ["evil"]}})], "another"),
        ([project(tool__flwr__app__config={**CONFIG, "more": {"a": 1}})], "another"),
        ([("pyproject.toml", b"#" * (gate.LARGEST + 1))], "too large"),
        ([("pyproject.toml", b"")], "cannot be read"),
        ([("pyproject.toml", b"\xff")], "cannot be read"),
        ([("pyproject.toml", b"tool = 3")], "cannot be read"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_every_other_bundle_is_foreign(files, why):
    assert why in gate.foreign(*brought(pack(files)))


def test_a_bundle_of_another_name_is_foreign():
    good = pack([project()])
    assert gate.foreign(*brought(good)) == ""
    changes = [
        {"fab_id": "kinfed/../../evil"},
        {"fab_version": "0.2.0"},
        {"fab_hash": "0" * 64},
        {"hash_str": "0" * 64},
        {"primary_task_type": "flwr-agentapp"},
        {"override_config": {"more": 1}},
    ]
    for change in changes:
        assert "it is named" in gate.foreign(*brought(good, **change))
    for broken in (b"", b"PK", good[:-30], good[:60] + b"\0" * 20 + good[80:]):
        assert "cannot be read" in gate.foreign(*brought(broken))


def test_a_node_tells_both_ends_which_program_it_refused(monkeypatch, capsys):
    from flwr.app import Message, RecordDict
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supercore.protobuf.client import ProtobufClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supernode import start_client_internal as node
    from flwr.supernode.nodestate import NodeStateFactory

    monkeypatch.setattr(node, "_pull_and_store_message", node._pull_and_store_message)
    monkeypatch.setattr(ProtobufClient, "__init__", ProtobufClient.__init__)
    gate._run_own_program_alone()
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    store = ObjectStoreFactory()
    state = NodeStateFactory(objectstore_factory=store).state()
    state.set_node_id(7)
    message = Message(RecordDict(), 7, "query.hello")
    message.metadata.__dict__["_message_id"] = "1"
    run, fab = brought(pack([project(), EVIL]))
    honest, _ = brought(pack([project()]))
    runs = iter([run, honest])  # asked again, the server would tell another story
    taken = node._pull_and_store_message(
        state=state,
        object_store=store.store(),
        node_config={},
        receive=lambda: (message, None),
        get_run=lambda id: next(runs),
        get_fab=lambda hash, id: fab,
        pull_object=None,
        confirm_message_received=None,
        trusted_entities=None,
    )
    assert taken == message.metadata.run_id
    assert (
        "kinfed: refused a program that the server sent: it brings '.info/CONTENT, evil.py" in capsys.readouterr().out
    )
    (answer,) = state.get_messages_legacy(is_reply=True)
    assert "refused a program" in answer.error.reason
    assert state.get_run(taken) is None
    with ProtobufClient.from_server_address("127.0.0.1:1", True, None, []) as client:
        assert not client._client.follow_redirects


def test_what_flower_starts_is_started_through_the_gate(monkeypatch):
    started = []
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda self, args, **how: started.append(args))
    monkeypatch.setattr(subprocess.Popen, "__del__", lambda self: None)
    gate._start_through_gate()
    for arguments in (["flwr-clientapp", "--token", "x"], ["uv", "sync"], []):
        subprocess.Popen(arguments)
    assert started == [gate.command("flwr-clientapp", "--token", "x"), ["uv", "sync"], []]


def test_the_secret_goes_along_with_every_call_and_no_redirect_is_followed(monkeypatch):
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.protobuf.client import ProtobufClient

    monkeypatch.setattr(ProtobufClient, "__init__", ProtobufClient.__init__)
    gate._tell(SECRET)
    with ControlHttpClient.from_server_address("127.0.0.1:1", True, None, []) as client:
        assert client._client.headers["kinfed-secret"] == SECRET
        assert not client._client.follow_redirects


@pytest.mark.parametrize("version", ["1.40.0", "1.41.1", "1.42.0", "2.0"])
def test_nothing_starts_with_a_flower_that_is_not_known(version, monkeypatch):
    monkeypatch.setattr(gate.importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(sys, "argv", ["gate.py", "flower-superlink", "--insecure"])
    with pytest.raises(SystemExit) as end:
        gate.main()
    assert f"found {version}: pip install 'flwr==1.41.0'" in str(end.value)


def test_what_flower_makes_is_its_owners_alone(tmp_path):
    (tmp_path / "old").mkdir(mode=0o755)
    subprocesses.make_private(tmp_path / "old")
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o700
    assert len(subprocesses.secret(tmp_path)) == 64
    assert subprocesses.secret(tmp_path) == subprocesses.secret(tmp_path)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_what_flower_may_be_told_by_the_environment_is_not_handed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")  # opens another port
    given = subprocesses.environment(tmp_path, SECRET)
    assert "FLWR_INTERNAL_GRPC_CONTROL_API" not in given
    assert given["KINFED_FLOWER_SECRET"] == SECRET


@pytest.mark.needs("nginx", "nginx-light")
def test_nginx_as_the_page_has_it_passes_what_sites_call_and_nothing_else(tmp_path):
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
    port, folders = subprocesses.free_port(), ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
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
            for path in gate.SITES:
                assert call(path, b"kinfed-secret: x", body=b"abc") == (200, path + b" 3 None")
            for path in STRANGE:
                if path.startswith((b"/", b"https:")):
                    code, said = call(path)
                    # nginx may resolve a path to that of a site, and passes on what it has resolved.
                    assert code in (400, 404) or (code == 200 and said.split()[0] in gate.SITES)
                    assert b"control" not in said
            assert call(PULL, method="GET")[0] == 404
            assert call(PULL, b"transfer-encoding: chunked", body=b"3\r\nabc\r\n0\r\n\r\n")[1].split()[1] == b"3"
            assert call(PULL, b"transfer-encoding: chunked", body=b"1000001\r\nabc")[0] == 413
        finally:
            nginx.terminate()
            behind.shutdown()
            behind.server_close()
