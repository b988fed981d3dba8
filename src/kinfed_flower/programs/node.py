"""Running a site's node: it takes the server's messages, has the site answer them, and ends with this program."""

import datetime
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kinfed.data.tables.frame import Frame
from kinfed.errors import RunError, UsageError
from kinfed.files import make_folder, read_json, write_json
from kinfed.interrupts import CODES, Terminated
from kinfed.runs.config import experiment, plugins

from .. import plan
from ..plan import Plan
from ..server.site_references import fedavg_of, list_baselines
from ..site import site_examples
from ..site.agreements import agree
from ..site.gateway import Gateway, names_in, split_by_client, table_of
from ..site.masked_rounds import MaskedRounds
from ..site.policy import Policy
from ..site.site import Site
from ..site.site_reading import Reading
from ..wire import audit_file, keys, messages, transport
from ..wire.audit import AuditLog
from ..wire.connection import Arrived, Connection
from ..wire.link import Link
from ..wire.messages import Message, plain
from .subprocesses import be_quiet, is_loopback, make_private

Report = Callable[[str], object]
OPTIONS = "options.json"  # in a node's folder


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
    these takes part, as SITE.CLIENT. `policy` is what the site takes part in; None: in plans that its operator has
    agreed to, or agrees to when they are asked for.
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
        folder, own_code = state.resolve(), [path.resolve() for path in code]
        data = site_examples.keep_examples(examples, home).resolve()
        keep_options(home, data, reading, own_code)
        site: Site | Gateway
        if reading.client:
            files = split_by_client(data, reading.client, client, home.resolve() / "clients")
            site = Gateway(client, files, folder, device, reading, own_code, tell, policy, key)
            sites = [*site.sites.values()]
        else:
            masks = MaskedRounds(client, key, policy.members if policy else "")
            site = Site(client, data, folder, device, reading, own_code, tell, policy, masks)
            sites = [site]
        sites[0].ask = Prompt(client, state, [each_site.folder for each_site in sites], tell)  # for all
        link.wait_for_server(tell)
        try:
            with _interruptible(), Connection(link, key, home, tell) as connection:
                log_of_messages = AuditLog(audit_file.of_site(state, client), with_fields=True)
                many = f" with {len(site.sites)} clients" if isinstance(site, Gateway) else ""
                tell(f"client {client} is connected{many} to {link.address}; its log is {home / 'node.log'}")
                while True:
                    arrived = connection.receive()
                    if arrived is not None:
                        connection.answer(
                            arrived, transport.pack(_answer_and_log(site, arrived, tell, log_of_messages, link))
                        )
        except RunError as problem:
            raise RunError(f"the node of {client} ended: {problem}") from None


class Prompt:
    """Asks the operator whether to agree to plans: at the terminal if there is one, and by the command otherwise."""

    def __init__(self, client: str, state: Path, folders: Sequence[Path], tell: Report) -> None:
        self._command = f"kinfed flower agree {client} --state {state}"
        self._folders, self._tell = folders, tell
        self._plans: Sequence[Plan] = ()
        self._listening = False

    def __call__(self, plans: Sequence[Plan]) -> None:
        """Ask, and go on; what is answered at the terminal is heard by a thread."""
        self._plans = plans
        if not _has_terminal():
            self._tell(f"see what would leave, and agree: {self._command}")
            return
        self._tell(f"agree to this run? Type yes and Enter here; or see what would leave first: {self._command}")
        if not self._listening:
            self._listening = True
            threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        while _has_terminal() and (line := sys.stdin.readline()):
            if not self._plans or not line.strip():
                continue
            if line.strip().lower() in ("yes", "y"):
                for folder in self._folders:
                    agree(self._plans, folder)
                self._tell("agreed, for one run; it begins within seconds")
                self._plans = ()
            else:
                self._tell("not agreed; type yes to agree")
        self._listening = False


def _has_terminal() -> bool:
    """Whether somebody sits at this program, which is not in the background."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


def names_of(client: str, examples: Path | Frame, reading: Reading) -> list[str]:
    """The clients at a site: its own name, or those that a column names."""
    return [*names_in(table_of(examples), reading.client, client)] if reading.client else [client]


def agree_beforehand(names: Sequence[str], state: Path, code: Sequence[Path], paths: Sequence[Path]) -> None:
    """Agree, for clients at a site, to one run of each plan in these files, unless that was agreed to before."""
    with plugins.local(code):
        for plans in map(plans_of, paths):
            for name in names:
                agree(plans, state / name, again=False)


def plans_of(path: Path) -> list[Plan]:
    """The plan in a file, and that of FedAvg beside it if it asks for one."""
    planned = plan.resolve(experiment.read(str(path), []))
    return [planned, *([fedavg_of(planned, 1)] if "fedavg" in list_baselines(planned) else [])]


def keep_options(home: Path, data: Path, reading: Reading, code: Sequence[Path]) -> None:
    """Remember where the examples are and how they are read, for `kinfed flower agree`."""
    read = {"columns": dict(reading.columns)} | {k: v for k, v in asdict(reading).items() if k != "columns"}
    write_json(home / OPTIONS, {"data": str(data), "reading": read, "code": [str(path) for path in code]})


def read_options(home: Path) -> tuple[Path, Reading, list[Path]]:
    """What `keep_options` remembers; raises UsageError if no node was started there."""
    options = read_json(home / OPTIONS)
    try:
        read: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in options["reading"].items()
        }
        return Path(options["data"]), Reading(**read), [Path(file) for file in options["code"]]
    except (LookupError, TypeError, AttributeError):
        raise UsageError(
            f"no node was started from {home.parent} yet, so give its examples (--data FILE), and say how they are read"
        ) from None


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


def _answer_and_log(site: Site | Gateway, arrived: Arrived, tell: Report, log: AuditLog, link: Link) -> Message:
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
    if "refused" in message.fields:
        tell(f"the server cannot use this node: {message.fields['refused']}")
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
