"""Who gets in by which door: python evidence/flower_security.py

Strangers with the server's port and its public ca.crt in hand, somebody who has overheard a site, another user of the
same machines, and a server and a site that lie: played on one machine against a federation of separate processes over
TLS, mostly while that trains. 127.0.0.2 plays another host.
Writes docs/evidence/flower-security.md; the exit code is 1 if anything got through.
"""

import base64
import datetime
import functools
import http.client
import importlib.metadata
import json
import os
import re
import select
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import flower_liars
import tomli_w
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils
from flower_federation import Federation, environment
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node

from kinfed.interrupts import catch_signals
from kinfed.runs import connections
from kinfed_flower.programs import authentication
from kinfed_flower.programs.server_app import bundle
from kinfed_papers.result_pages import write_page

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "flower-security.md"
SITES, ROUNDS = 3, 8
HUGE = 200 << 20  # bytes
FLWR = str(Path(sys.executable).with_name("flwr"))
ACTIVATE = "/v1/fleet/activate-node"
PROTOBUF = {"content-type": "application/protobuf", "accept": "application/protobuf"}
EVIL = """
import os, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()
marks = Path("MARKS")

@client.query()
def answer(message, context):
    data = Path(str(context.node_config["data"])).read_bytes()[:16]
    (marks / f"site-{os.getpid()}").write_bytes(data)
    return Message(RecordDict({"data": ConfigRecord({"bytes": data})}), reply_to=message)

@server.main()
def main(grid, context):
    (marks / "server").touch()
    nodes = list(grid.get_node_ids())
    replies = grid.send_and_receive([Message(RecordDict(), node, "query") for node in nodes], timeout=60)
    (marks / "told").write_text("\\n".join(r.error.reason if r.has_error() else "data" for r in replies))
"""
TRICKS = [
    "//v1/control/list-runs",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet%2f..%2fcontrol%2flist-runs",
    "/v1/fleet/pull-messages/../../control/list-runs",
    "/v1/fleet/pull-messages;/../../control/list-runs",
    "/health/../v1/control/list-runs",
    "/v1/fleet/pull-messages%00/v1/control/list-runs",
    "https://localhost/v1/control/list-runs",
]


class Strangers:
    """What they have, and what they did."""

    def __init__(self, federation, folder):
        self.federation, self.folder, self.rows = federation, folder, []
        self.address = ("127.0.0.1", federation.port)
        self.ca = str(federation.folder / "keys" / "ca.crt")
        self.trusted = ssl.create_default_context(cafile=self.ca)
        self.own = ec.generate_private_key(ec.SECP384R1())

    def note(self, door, who, happened, shut):
        """Keep what happened at a door."""
        self.rows.append((door, who, happened, shut))
        print(f"{'shut' if shut else 'OPEN'}: {door} ({who}): {happened}", flush=True)

    def line(self, source="127.0.0.2", tls=True, address=None):
        """A connection from an address."""
        plain = socket.create_connection(address or self.address, timeout=20, source_address=(source, 0))
        return self.trusted.wrap_socket(plain, server_hostname="localhost") if tls else plain

    def call(self, method, path, body=b"", headers=None, source="127.0.0.2", tls=True, address=None):
        """The HTTP status of a call and what it answers; 0 if the other end hangs up."""
        connection = http.client.HTTPConnection("localhost")
        connection.sock = self.line(source, tls, address)
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in {**PROTOBUF, "content-length": str(len(body)), **(headers or {})}.items():
                connection.putheader(name, value)
            connection.endheaders()
            connection.send(body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def pour(self, path, headers, chunked):
        """Send a huge body, as far as it is taken; the HTTP status."""
        with self.line() as line:
            length = "transfer-encoding: chunked" if chunked else f"content-length: {HUGE}"
            head = [f"POST {path} HTTP/1.1", "host: localhost", length, *(f"{k}: {v}" for k, v in headers.items())]
            piece = b"x" * (1 << 20)
            piece = b"100000\r\n" + piece + b"\r\n" if chunked else piece
            try:
                line.sendall("\r\n".join([*head, "", ""]).encode())
                for _ in range(HUGE >> 20):
                    if select.select([line], [], [], 0)[0] or line.pending():
                        break
                    line.sendall(piece)
            except OSError:
                pass
            try:
                return int((line.recv(100).split() or [b"", b"0"])[1])
            except OSError:
                return 0

    def flwr(self, *arguments, program=(FLWR,), **more):
        """What one of Flower's own commands says, of a stranger's own making."""
        home = self.folder / "flwr"
        home.mkdir(exist_ok=True)
        reach = {"address": f"127.0.0.1:{self.federation.port}", "root-certificates": self.ca}
        (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "x", "x": reach}}))
        environment = {
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        done = subprocess.run(
            [*program, *arguments],
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        output = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr).split())
        match = re.search(r"error '(\d+ [^']*)'", output)
        return done.returncode, match[1] if match else output[-200:]

    def write_app(self, files=(), **components):
        """An app that runs code at the server and at every site; returns its folder and where it leaves marks."""
        marks = Path(tempfile.mkdtemp(dir=self.folder))
        app = marks / "app"
        for name, text in (("evil.py", EVIL.replace("MARKS", str(marks))), *files):
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            (app / name).write_text(text.replace("MARKS", str(marks)))
        table = bundle({"out": str(marks)})
        table["tool"]["flwr"]["app"]["components"] |= components
        (app / "pyproject.toml").write_text(tomli_w.dumps(table))
        return str(app), marks


def sign(key, stamp=None):
    """Headers as Flower's nodes make them."""
    stamp = stamp or datetime.datetime.now(datetime.UTC).isoformat()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    signature = key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))
    encoded = {"flwr-public-key": public, "flwr-signature": signature}
    return {"flwr-timestamp": stamp, **{name: base64.b64encode(value).decode() for name, value in encoded.items()}}


def tally(outcomes):
    """Outcomes with their counts, as a person writes them."""
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    return ", ".join(f"{outcome or 'hung up on'} ({count}x)" for outcome, count in counts.items())


def routes():
    """Every path that Flower serves at the SuperLink, as it says itself."""
    from fastapi.routing import iter_route_contexts
    from flwr.superlink.main import create_app

    return sorted({context.path for context in iter_route_contexts(create_app().routes)})


def app_of_a_stranger(them):
    app, marks = them.write_app(serverapp="evil:server", clientapp="evil:client")
    code, output = them.flwr("run", app, "x")
    time.sleep(20)
    ran = [path.name for path in marks.iterdir() if path.name != "app"]
    them.note(
        "The stranger's own Flower app, submitted by `flwr run`",
        "stranger with port and ca.crt",
        f"exit code {code}, “{output}”; it ran nowhere within 20 s"
        if not ran
        else f"exit code {code}; it ran in {len(ran)} places",
        not ran and code != 0 and output == "404 Not Found",
    )


def commands_of_a_stranger(them, run, node):
    public = them.folder / "mallory.pub"
    form = serialization.PublicFormat.OpenSSH
    public.write_bytes(them.own.public_key().public_bytes(serialization.Encoding.OpenSSH, form))
    for door, arguments in {
        "List runs": ("list", "x"),
        "Stop the run under way": ("stop", run, "x"),
        "Read the run's log": ("log", run, "x", "--show"),
        "List nodes": ("supernode", "list", "x"),
        "Register a new node": ("supernode", "register", str(public), "x", "--name", "mallory"),
        "Unregister a site's node": ("supernode", "unregister", node, "x"),
    }.items():
        code, output = them.flwr(*arguments)
        refused = code != 0 and output == "404 Not Found"
        them.note(
            f"{door} by `flwr {' '.join(arguments[: 2 if arguments[0] == 'supernode' else 1])}`",
            "stranger with port and ca.crt",
            f"exit code {code}, “{output}”",
            refused,
        )


def every_path(them, paths):
    for source, where in (("127.0.0.2", "another host"), ("127.0.0.1", "the server's machine, without the secret")):
        closed = [path for path in paths if path.encode() not in authentication.SITES and path != "/health"]
        if source == "127.0.0.1":  # a run's process calls these, with a token of Flower's
            closed = [path for path in closed if not path.startswith("/v1/runtime/")]
        outcomes = [them.call(method, path, source=source)[0] for path in closed for method in ("POST", "GET")]
        shut = set(outcomes) == {404}
        them.note(
            f"Each of the {len(closed)} paths that Flower serves other than the sites' calls, POST and GET",
            where,
            tally(outcomes),
            shut,
        )
    outcomes = [them.call("POST", path, source="127.0.0.1")[0] for path in paths if path.startswith("/v1/runtime/")]
    them.note(
        f"The {len(outcomes)} calls of a run's process, without its token",
        "another user of the server's machine",
        tally(outcomes),
        not {status for status in outcomes if status < 400},
    )
    outcomes = [them.call("POST", path)[0] for path in TRICKS]
    them.note(
        "Disguised paths (`//`, `..`, `%2f`, `;`, a whole URL)",
        "another host",
        tally(outcomes),
        set(outcomes) <= {400, 404},
    )
    guesses = ({"kinfed-secret": guess} for guess in ("", "0" * 64, "x" * 5000))
    near = [{"x-forwarded-for": "127.0.0.1"}, {"host": "127.0.0.1"}, *guesses]
    outcomes = [them.call("POST", "/v1/control/list-runs", headers=headers)[0] for headers in near]
    them.note(
        "Pretending to be on the server: X-Forwarded-For, Host, guessed secrets",
        "another host",
        tally(outcomes),
        set(outcomes) <= {400, 404},
    )


def calls_of_sites(them):
    paths = [path.decode() for path in sorted(authentication.SITES)]
    outcomes = [them.call("POST", path)[0] for path in paths]
    them.note("Each of the sites' calls, unsigned", "another host", tally(outcomes), set(outcomes) == {401})
    outcomes = [them.call("POST", path, headers=sign(them.own))[0] for path in paths]
    them.note(
        "Each of the sites' calls, signed by an unregistered key",
        "another host",
        tally(outcomes),
        set(outcomes) == {401},
    )
    public = base64.b64decode(sign(them.own)["flwr-public-key"])
    request = ActivateNodeRequest(public_key=public, heartbeat_interval=30).SerializeToString()
    status, answer = them.call("POST", ACTIVATE, request, sign(them.own))
    them.note(
        "Joining as a node with an unregistered key",
        "another host",
        f"{status}, “{answer.decode()[:90]}”",
        400 <= status < 500,
    )


def memory(pid, now=False):
    """MiB: the most that a process has used since it was last asked, or uses now."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)" if now else r"VmHWM:\s+(\d+)", text)[1]) // 1024


def huge_bodies(them, key, pid):
    for who, headers, path in (
        ("another host, unsigned", dict, "/v1/fleet/push-object"),
        ("another host, unsigned", dict, "/v1/control/start-run"),
        ("another host, signed by an unregistered key", functools.partial(sign, them.own), ACTIVATE),
        ("a site, signed by its own key", functools.partial(sign, key), "/v1/fleet/push-object"),
    ):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        before, begin = memory(pid, now=True), time.monotonic()
        outcomes = [them.pour(path, headers(), chunked) for chunked in (False, True) for _ in range(10)]
        seconds, most = (time.monotonic() - begin) / len(outcomes), memory(pid)
        them.note(
            f"Bodies of {HUGE >> 20} MiB to `{path}`, 10 with a Content-Length and 10 chunked",
            who,
            f"{tally(outcomes)}; {seconds:.2f} s each; SuperLink at {before} MiB before, {most} at most",
            not {200} & set(outcomes) and most - before < 50,
        )


def bodies_of_a_site(them, key, pid, node):
    """Whole bodies of the longest kind, many at once: what the SuperLink's memory grows by, and keeps."""
    piece = PushObjectRequest(
        node=Node(node_id=int(node)),
        run_id=1,
        object_id="0" * 64,
        object_content=b"x" * (authentication.LARGEST - 1000),
    ).SerializeToString()
    for path in ("/v1/fleet/push-object", "/v1/fleet/push-messages"):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        before, outcomes = memory(pid, now=True), []

        def push(path=path, outcomes=outcomes):
            outcomes.extend(them.call("POST", path, piece, sign(key))[0] for _ in range(5))

        threads = [threading.Thread(target=push) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        most = memory(pid)
        time.sleep(5)
        left = memory(pid, now=True)
        them.note(
            f"50 bodies of {authentication.LARGEST >> 20} MiB to `{path}`, 10 at once",
            "a site, signed by its own key",
            f"{tally(outcomes)}; SuperLink at {before} MiB before, {most} at most, {left} five seconds after",
            most - before < 250 and left - before < 150,
        )


def half_sent(them):
    heads = {
        "Idle connections": b"",
        "Half-sent headers": b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\nx-",
        "Half-sent headers after a valid call": b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea",
        "Half-sent bodies": b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\nabc",
    }
    for door, text in heads.items():
        lines = [them.line() for _ in range(100)]
        for line in lines:
            line.sendall(text)
        begin = time.monotonic()
        status, _ = them.call("GET", "/health", source="127.0.0.1")
        seconds, left = time.monotonic() - begin, set(lines)
        while left and time.monotonic() - begin < 75:
            for line in select.select(list(left), [], [], 1)[0]:
                try:
                    if not line.recv(65536):
                        left.discard(line)
                except OSError:
                    left.discard(line)
        over = time.monotonic() - begin
        for line in lines:
            line.close()
        them.note(
            f"{door}, 100 at a time",
            "another host",
            f"/health answered {status} in {seconds:.2f} s; {len(left)} still open after {over:.0f} s",
            status == 200 and not left,
        )


def flood(them):
    """Connections that never greet by TLS, more than a process may have files open by default."""
    lines = []
    for _ in range(1100):
        try:
            lines.append(socket.create_connection(them.address, timeout=5, source_address=("127.0.0.2", 0)))
        except OSError:
            break
    time.sleep(1)
    begin = time.monotonic()
    status, _ = them.call("GET", "/health", source="127.0.0.3")
    seconds, gone = time.monotonic() - begin, select.poll()
    for line in lines:
        gone.register(line, select.POLLIN | select.POLLHUP)
    left = len(lines) - len(gone.poll(0))
    for line in lines:
        line.close()
    them.note(
        f"{len(lines):,} connections that say nothing, not even by TLS",
        "another host",
        f"{left} left open; a third host's /health answered {status} in {seconds:.2f} s",
        status == 200 and left <= connections.CONNECTIONS,
    )


def replays(them, key, node):
    beat = SendNodeHeartbeatRequest(node=Node(node_id=int(node)), heartbeat_interval=30).SerializeToString()
    pull = PullMessagesRequest(node=Node(node_id=int(node))).SerializeToString()
    path, overheard = "/v1/fleet/send-node-heartbeat", sign(key)
    first = them.call("POST", path, beat, overheard)[0]
    r, s = utils.decode_dss_signature(base64.b64decode(overheard["flwr-signature"]))
    order = int("ffffffffffffffffffffffffffffffffffffffffffffffffc7634d81f4372ddf581a0db248b0a77aecec196accc52973", 16)
    twin = {**overheard, "flwr-signature": base64.b64encode(utils.encode_dss_signature(r, order - s)).decode()}
    again = [
        them.call("POST", path, beat, overheard)[0],
        them.call("POST", "/v1/fleet/pull-messages", pull, overheard)[0],
        them.call("POST", path, beat, twin)[0],
    ]
    them.note(
        "A site's signed headers, captured and sent again: the same call, another call, and with the equivalent "
        "signature (r, -s)",
        "a proxy that terminates TLS",
        f"the site's own call: {first}; then {tally(again)}",
        first == 200 and set(again) == {409},
    )


def programs(folder):
    """Process numbers and command lines of what was started for this federation."""
    commands = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{folder}/".encode() in (process / "environ").read_bytes():
                commands[int(process.name)] = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
    return commands


def near_a_site(them, folder):
    """What another user of the machines finds that listens or that names a token."""
    nodes = {pid: command for pid, command in programs(folder).items() if "node" in command}
    open_ = listening()
    ports = [path for pid in nodes for path in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(path) in open_]
    them.note(
        f"Ports on which {len(nodes)} sites' nodes listen",
        "another user of the site's machine",
        f"{len(ports)}",
        len(nodes) == SITES and not ports,
    )
    with_token = [command for command in programs(folder).values() if "token" in " ".join(command)]
    them.note("Tokens in the list of processes", "another user of these machines", f"{len(with_token)}", not with_token)


def listening():
    """Sockets that listen for connections, as the links in /proc name them."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}


def another_user(them, folder, secret):
    """Everything that kinfed made, opened as a user who owns none of it."""
    if os.getuid():
        return them.note(
            "Files of server and sites", "another user", "not tried: needs root, to be somebody else", True
        )
    look = f"""
import os
os.setgid(65534); os.setuid(65534)
read, seen = [], 0
for top in {[str(folder / name) for name in ("server", "keys", *them.federation.names)]!r}:
    for at, folders, files in os.walk(top):
        for name in files:
            path = os.path.join(at, name)
            if at == top and top.split('/')[-1].startswith("site-"):
                continue  # the site's own example file, and the log of this program
            seen += 1
            read += [path] * os.access(path, os.R_OK)
for pid in {list(programs(folder))!r}:
    try:
        read += [f"/proc/{{pid}}/environ"] * bool(open(f"/proc/{{pid}}/environ").read())
    except OSError:
        pass
print(len(read), *read[:3])
"""
    count, *which = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout.split()
    made = sum(
        len(files) for name in ("server", "keys", *them.federation.names) for *_, files in os.walk(folder / name)
    )
    with_secret = [command for command in programs(folder).values() if secret in " ".join(command)]
    them.note(
        f"The {made} files that kinfed created at server and sites, and the environments of its processes",
        "another user of these machines",
        " ".join([f"{count} could be read", *which]),
        count == "0",
    )
    them.note(
        "The server's secret in the list of processes",
        "another user of these machines",
        f"on {len(with_secret)} command lines",
        not with_secret,
    )
    return None


def main():
    paths = routes()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for part in ("federation", "strangers"):
            (folder / part).mkdir()
        folder.chmod(0o755)  # what protects files is what kinfed does about them
        with Federation(folder / "federation", SITES) as federation:
            (folder / "federation").chmod(0o755)
            them = Strangers(federation, folder / "strangers")
            running = json.loads((federation.folder / "server" / "link.json").read_text())
            secret = (federation.folder / "server" / "secret").read_text()
            key = serialization.load_ssh_private_key(
                (federation.folder / "keys" / "sites" / "site-1" / "key").read_bytes(), None
            )
            run = federation.launch("fedaghn", ROUNDS, flower={"clients": SITES})
            lines = []
            reader = threading.Thread(target=lambda: lines.extend(line.rstrip() for line in run.stderr))
            reader.start()
            log = federation.folder / "server" / "superlink.log"
            number = federation.folder / "site-1" / "site-1" / "node" / "node.id"
            while not number.exists():
                time.sleep(0.5)
            node = number.read_text()
            near_a_site(them, folder / "federation")
            app_of_a_stranger(them)
            commands_of_a_stranger(them, "1", node)
            every_path(them, paths)
            calls_of_sites(them)
            huge_bodies(them, key, running["pid"])
            bodies_of_a_site(them, key, running["pid"], node)
            half_sent(them)
            flood(them)
            replays(them, key, node)
            another_user(them, folder / "federation", secret)
            code = run.wait()
            reader.join()
            rounds = [line for line in lines if re.match(rf"round \d+ of {ROUNDS}: {SITES} clients", line)]
            them.note(
                "The run in progress throughout",
                "-",
                f"exit code {code}; {len(rounds)} of {ROUNDS} rounds with all {SITES} sites",
                not code and len(rounds) == ROUNDS,
            )
            refused = sum("refused calls" in line for line in log.read_text().splitlines())
            size = log.stat().st_size
    write(them.rows, refused, size)
    lies = flower_liars.main()
    sys.exit(lies or any(not shut for *_, shut in them.rows))


def write(rows, refused, size):
    """The page."""
    clean = [
        [str(cell).replace("|", "\\|").replace("__", r"\_\_").replace("\n", " ") for cell in row[:3]] for row in rows
    ]
    table = "\n".join(
        f"| {door} | {who} | {happened} | {'shut' if row[3] else '**OPEN**'} |"
        for (door, who, happened), row in zip(clean, rows, strict=True)
    )
    write_page(
        PAGE,
        "# Attacks on a federation's servers\n\n"
        "Written by `python evidence/flower_security.py`, run as root so that it can act as another user.\n\n"
        f"Flower {importlib.metadata.version('flwr')}, {environment()} SuperLink and {SITES} nodes are on one "
        "machine, over TLS, started by `kinfed flower` without nginx. *Another host* is 127.0.0.2. "
        "A run was in progress from the start. A call that is answered 404 got no further than kinfed's own check. "
        "*Shut* means that the attacker gained nothing and that nothing was damaged.\n\n"
        f"| attack | who, from where | what happened | |\n| --- | --- | --- | --- |\n{table}\n\n"
        f"All this put {refused} lines into the server's log, at most one a minute. It is "
        f"{size / 1000:.0f} kB long.\n\n"
        "Sites run no program that a server sends, as they never ask for one "
        "(`tests/flower/test_connection.py`). Tests cover revoked sites, and sites that claim too many classes "
        "or examples (`test_gate.py`, `test_broker.py` and `test_server.py` there).\n\n",
    )


if __name__ == "__main__":
    with catch_signals():
        main()
