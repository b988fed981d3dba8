"""Many clients at one site: one key and one connection for the clients in a table, which train as one batch."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kinfed import __version__
from kinfed.data.tables.frame import Frame
from kinfed.data.tables.open_table import kind_of, open_table
from kinfed.errors import UsageError, several
from kinfed.files import make_folder, replacing

from ..wire import contents, messages
from ..wire.keys import NAME
from ..wire.messages import Message
from . import site_cohort
from .masked_rounds import MaskedRounds
from .policy import Policy
from .site import PLAN, SENT, Site, Work
from .site_reading import Reading

MOST = 2000  # clients of one gateway
SAME = "tensors: "  # begins what is told of all clients alike


def names_in(frame: Frame, column: str, site: str) -> dict[str, int]:
    """The clients that a column names, by their names in the federation, SITE.CLIENT, with their places in the column.

    Several columns, such as `ward,floor`, name SITE.WARD.FLOOR. Raises UsageError for a column that is not there, and
    for names that no site can have.
    """
    frame = frame.with_joined(column)
    frame.need([column])
    cells = frame[column].words()
    if (empty := np.flatnonzero(cells.empty)).size:
        raise UsageError(f"{frame.name}: {frame[column].place(int(empty[0]))} is empty, so its row is no client's")
    parts = [frame[name].words() for name in frame.sources_of(column)]
    codes, rows = np.unique(cells.codes, return_index=True)
    names, bad = dict[str, int](), list[str]()
    for code, row in zip(codes.tolist(), rows, strict=True):
        texts = [part.names[part.codes[row]] for part in parts]
        name = ".".join([site, *texts])
        names[name] = code
        if not re.fullmatch(NAME, name) or (len(texts) > 1 and any("." in text for text in texts)):
            bad.append(name)
    if bad or len(names) > MOST:
        problem = f"{bad[0]!r} cannot be a client's name" if bad else f"it names {len(names):,} clients, over {MOST:,}"
        marks = "'_' and '-'" if len(parts) > 1 else "'.', '_' and '-'"
        raise UsageError(f"{frame.name}: column '{column}': {problem}; letters, digits, {marks} may be used")
    return names


def table_of(examples: Path | Frame) -> Frame:
    """The table of a gateway; raises UsageError for a file that holds none."""
    if not isinstance(examples, Path):
        return examples
    if examples.suffix.lower() == ".npz" or not kind_of(examples):
        raise UsageError(f"--client names a column of a table, but {examples} is none: give a .csv or .parquet")
    return open_table(examples)


def split_by_client(examples: Path | Frame, column: str, site: str, folder: Path) -> dict[str, Path]:
    """A file of its own for each client that a column names, by the client's name; see `names_in` for errors."""
    frame = table_of(examples)
    joined = frame.with_joined(column)
    names, codes = names_in(joined, column, site), joined[column].words().codes
    make_folder(folder)
    files = {name: folder / f"{name}.parquet" for name in names}
    for name, code in names.items():
        with replacing(files[name]) as part:
            frame.keep(codes == code).write(part)
    return files


class Gateway:
    """Replies for several clients at once, in one message for all of them."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, Path],
        folder: Path,
        device: str,
        reading: Reading,
        code: Sequence[Path] = (),
        report: Callable[[str], object] = lambda text: None,
        policy: Policy | None = None,
        key: Path | None = None,
    ) -> None:
        """`files` are the clients' own, by their names; the columns that name the client in them are no inputs.

        `key` is the site's, by which all of them sign their keys of masked rounds.
        """
        table = open_table(next(iter(files.values()))).with_joined(reading.client)
        ignore = [*reading.ignore, *(reading.columns.get(name, name) for name in table.sources_of(reading.client))]
        client_reading = replace(reading, ignore=ignore, client="")
        self.name, self._report, self._device = name, report, device
        trusted = policy.members if policy else ""
        self.sites = {
            client: Site(
                name=client,
                data=path,
                folder=folder,
                device=device,
                reading=client_reading,
                code=code,
                report=self._teller(client),
                policy=policy,
                masks=MaskedRounds(client, key, trusted),
            )
            for client, path in files.items()
        }
        self._gone: set[str] = set()  # clients that are asked for and not here, of which the operator was told
        self._joined: tuple[Any, Any] = ((), None)  # the simulation of the last batch, and whose it was

    def reply(self, kind: str, message: Message) -> Message:
        """The reply to a message: who is here, or to a bundle of messages to clients a bundle of their replies."""
        if kind == "hello":
            greetings = {client: site.reply("hello", message).fields for client, site in self.sites.items()}
            if waiting := next((greeting for greeting in greetings.values() if greeting.get("waits")), None):
                return Message({**waiting, "client": self.name}, {})
            return Message({"client": self.name, "kinfed": __version__, "clients": greetings}, {})
        try:
            parts = messages.unbundle(message)
        except UsageError as problem:
            self._report(str(problem))
            return messages.refusal(self.name, problem)
        gone = parts.keys() - self.sites.keys()
        for client in gone - self._gone:
            self._report(f"client {client}: no row of this site's file names it, so the run goes on without it")
        self._gone |= gone
        strange = {client: messages.refusal(client, "no row of its site's file names it") for client in gone}
        present = {client: part for client, part in parts.items() if client in self.sites}
        if kind == "round":
            replies = self._round(present)
        else:
            replies = {client: self.sites[client].reply(kind, part) for client, part in present.items()}
        answered = {client: reply for client, reply in replies.items() if "refused" not in reply.fields}
        if lines := [
            line
            for reply in answered.values()
            if (line := contents.describe_reply(reply.fields, messages.numbers(reply)))
        ]:
            self._report(f"{SENT}replies of {several(len(lines), 'client')}, the first: {lines[0]}")
        return messages.bundle(strange | replies)

    def _teller(self, client: str) -> Callable[[str], None]:
        """What a client's site tells its operator, with the client's name; what is the same for all is told once."""

        def tell(text: str) -> None:
            if text.startswith(SENT):
                return  # told once for all
            if not text.startswith((SAME, PLAN)):
                self._report(text if text.startswith(f"client {client}: ") else f"client {client}: {text}")
            elif client == next(iter(self.sites)):
                self._report(text)

        return tell

    def _round(self, parts: Mapping[str, Message]) -> dict[str, Message]:
        """A round of several clients: those that do the same are computed as one batch."""
        replies: dict[str, Message] = {}
        batches: dict[Any, dict[str, Work]] = {}
        for client, message in parts.items():
            site = self.sites[client]
            begun = site.answering(lambda site=site, message=message: site.begin(message))  # type: ignore[misc]
            if isinstance(begun, Message):
                replies[client] = begun
            else:
                what = (begun.fields["experiment"], *(request and request[0] for request in begun.part[-2:]))
                batches.setdefault(what, {})[client] = begun
        for batch in batches.values():
            replies |= self._compute(batch)
        return replies

    def _compute(self, batch: Mapping[str, Work]) -> dict[str, Message]:
        """The replies of a batch; if it fails, that of each client by itself, so that one harms no other."""
        works = list(batch.values())
        try:
            key = [id(work.part.simulation) for work in works]
            if self._joined[0] != key:
                self._joined = key, site_cohort.join_simulations([work.part for work in works], self._device)
            outcomes = site_cohort.divide(
                site_cohort.compute([work.part for work in works], self._joined[1]), len(works)
            )
        except Exception as problem:
            self._report(f"the batch of {len(works)} clients fails ({problem}); each is tried by itself")
            outcomes = []
        replies = {}
        for i, (client, work) in enumerate(batch.items()):
            site = self.sites[client]

            def end(site: Site = site, work: Work = work, i: int = i) -> Message:
                return site.finish(work, outcomes[i] if outcomes else site_cohort.compute([work.part]))

            replies[client] = site.answering(end)
        return replies
