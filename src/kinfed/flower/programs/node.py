"""Running a site's node: it takes the server's messages, has the site answer them, and ends with this program."""

import datetime
import fcntl
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...data.tables.frame import Frame
from ...errors import RunError, UsageError
from ...files import make_folder
from ...interrupts import CODES, Terminated
from ...runs.config import plugins
from ..site import site_examples
from ..site.gateway import Gateway, parted
from ..site.policy import Policy
from ..site.site import Site
from ..site.site_reading import Reading
from ..wire import audit, messages, transport
from ..wire.audit import AuditLog
from ..wire.connection import Arrived, Connection
from ..wire.link import Link
from ..wire.messages import Message, plain
from . import keys
from .subprocesses import be_quiet, is_loopback, make_private

Report = Callable[[str], object]


def run(
    client: str,
    examples: Path | Frame,
    reading: Reading,
    state: Path,
    link: Link,
    key: Path | None,
    device: str,
    code: Sequence[Path],
    report: Report,
    policy: Policy | None = None,
) -> None:
    """Run a site's node until it is interrupted; raises RunError if it cannot take part.

    `examples` are a file, or what a database has answered. `reading` says how they are read. `code` are files of the
    site's own whose methods, models and other parts a run may name. If the reading names a column of clients, each of
    these takes part, as SITE.CLIENT. `policy` is what the site takes part in; None: in anything.
    """
    keys.check_name(client)
    if isinstance(examples, Path):
        site_examples.find(examples, client, reading)  # raises UsageError for a file of another kind
    with plugins.local(code):  # raises UsageError for a file that is not there
        pass
    if key is None and not is_loopback(link.address.rpartition(":")[0]):
        raise UsageError(f"--insecure works on this machine only, so --server must name it; got {link.address}")
    home = state / client / "node"
    make_folder(home)
    make_private(state / client)
    be_quiet(home)
    with only_one(home, client), (home / "node.log").open("a", encoding="utf-8") as log:

        def tell(text: str) -> None:
            """Tell the site's operator, and write it down."""
            log.write(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ} {plain(text)}\n")
            log.flush()
            report(plain(text))

        for line in keys.endings(Path(link.ca).parent) if link.ca else []:
            tell(line)
        own, own_code = state.resolve(), [path.resolve() for path in code]
        site: Site | Gateway
        if reading.client:
            files = parted(examples, reading.client, client, home.resolve() / "clients")
            site = Gateway(client, files, own, device, reading, own_code, tell, policy)
        else:
            site = Site(
                client, site_examples.kept(examples, home).resolve(), own, device, reading, own_code, tell, policy
            )
        link.wait_for_server(tell)
        try:
            with _interruptible(), Connection(link, key, home, tell) as connection:
                log_of_messages = AuditLog(audit.of_site(state, client))
                many = f" with {len(site.sites)} clients" if isinstance(site, Gateway) else ""
                tell(f"client {client} is connected{many} to {link.address}; its log is {home / 'node.log'}")
                while True:
                    arrived = connection.receive()
                    if arrived is not None:
                        connection.answer(arrived, transport.pack(_audited(site, arrived, tell, log_of_messages, link)))
        except RunError as problem:
            raise RunError(f"the node of {client} ended: {problem}") from None


@contextmanager
def _interruptible() -> Iterator[None]:
    """In this block a signal ends the node, also if a shell that started it in the background had SIGINT ignored."""

    def stop(number: int, frame: object) -> None:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in CODES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _audited(site: Site | Gateway, arrived: Arrived, tell: Report, log: AuditLog, link: Link) -> Message:
    """The site's reply to a message, once it is in the site's audit log; a refusal if that cannot be written."""
    reply = _answer(site, arrived, tell)
    try:
        log.note("sent", link.address, arrived.kind.partition(".")[2], reply)
    except RunError as problem:
        tell(str(problem))
        return messages.refusal(site.name, "its audit log cannot be written")
    return reply


def _answer(site: Site | Gateway, arrived: Arrived, tell: Report) -> Message:
    """The site's reply to a message."""
    kind = {name: kind for kind, name in transport.KINDS.items()}.get(arrived.kind)
    if kind is None or arrived.content is None:
        why = f"the message {arrived.kind!r:.40} cannot be read, or asks for what no site does"
        tell(f"client {site.name}: {why}")
        return messages.refusal(site.name, why)
    try:
        message = transport.unpack(arrived.content)
    except UsageError as problem:
        tell(str(problem))
        return messages.refusal(site.name, problem)
    if "refused" in message.words:
        tell(f"the server cannot use this node: {message.words['refused']}")
    parts = message.words.get("bundle")
    words = next(iter(parts.values()), {}) if isinstance(parts, dict) else message.words
    if kind == "round" and "train" in words:
        tell(f"round {int(words.get('round', -1)) + 1}")
    return site.reply(kind, message)


@contextmanager
def only_one(home: Path, client: str) -> Iterator[None]:
    """Raise UsageError if the client has a node already: two would overwrite each other's files."""
    with (home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"a node of client {client} is already running on {home.parent}") from None
        yield
