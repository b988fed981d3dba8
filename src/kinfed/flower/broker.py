"""Courier: finds the clients among the nodes, brings them messages and comes back with answers."""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .. import __version__
from ..errors import RunError
from . import messages
from .messages import Message, Words

LOOK = 2.0  # seconds between two looks at which nodes are online
AGAIN = 10.0  # seconds before a node that failed is asked again
LATER = 60.0  # seconds before one that cannot take part is asked again what it has
ORDERS = 2  # that may be under way to a client at once: the present one, and one that was given up
TRIES = 3  # times that a client is asked the same
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of a client
LARGEST = 1 << 40  # number that an honest client tells of its examples


class Node(NamedTuple):
    """What is known of a node before it is asked."""

    stamp: str  # when it last came online
    name: str  # under which its key was registered; empty without keys
    key: bytes = b""  # its public key


class Failure(NamedTuple):
    """Why there is no answer."""

    why: str
    gone: bool  # the node was not reached or broke down over it, so that asking again may help


class Carrier(Protocol):
    """What carries messages, see `kinfed.flower.grid.Post`."""

    def nodes(self) -> dict[int, Node]: ...  # those online

    def push(self, node: int, kind: str, message: Message, seconds: float) -> str: ...  # its id, empty if it failed

    def pull(self, ids: Iterable[str]) -> dict[str, Message | Failure]: ...  # answers that have come, by those ids


class Flight(NamedTuple):
    """A message under way."""

    client: str  # empty for a greeting
    node: int
    stamp: str  # when the node had come online
    order: int  # which call of `ask` sent it


Check = Callable[[str, Message], str]  # what is wrong with a client's answer, empty if nothing is


@dataclass
class Courier:
    """Knows clients by their own names, wherever their nodes are now."""

    carrier: Carrier
    deadline: float = 600.0  # seconds after which nobody is waited for who is not needed
    patience: float = 3600.0  # seconds after which those who are needed are given up
    log: Callable[[str], None] = print
    poll: float = 0.2  # seconds
    members: Callable[[], Mapping[bytes, str]] | None = None  # public keys and their clients; None: whoever is online
    found: dict[str, Words] = field(default_factory=dict)  # every client that said hello, with what it said
    round: int = 0  # the one under way, from 1; 0 before the first
    travelled: dict[str, dict[int, list[int]]] = field(default_factory=dict)  # bytes down and up, by client and round
    _nodes: dict[str, int] = field(default_factory=dict)  # where each client was last
    _online: dict[int, Node] = field(default_factory=dict)
    _greeted: dict[int, str] = field(default_factory=dict)  # nodes that answered a greeting, with their stamp then
    _told: dict[str, str] = field(default_factory=dict)  # why a client was sent away
    _greet: dict[int, float] = field(default_factory=dict)  # when a node may be greeted again
    _refused: dict[int, tuple[str, str]] = field(default_factory=dict)  # nodes that cannot be used: stamp then, and why
    _untold: dict[int, str] = field(default_factory=dict)  # why, for the nodes that are still to be told
    _strangers: set[int] = field(default_factory=set)  # nodes whose keys are no member's
    _looked: float = -math.inf
    _flights: dict[str, Flight] = field(default_factory=dict)
    _order: int = 0  # calls of `ask`
    _spared: set[str] = field(default_factory=set)  # clients that were given more time and have not answered since

    def is_online(self, client: str) -> bool:
        """Whether a client's node was online at the last look."""
        return self._nodes.get(client, -1) in self._online

    def discover(self, enough: Callable[[], bool], waiting_for: str) -> None:
        """Greet all nodes until enough clients are known and no node that is online is still to answer."""
        begin, said = time.monotonic(), 0.0
        while True:
            self._look(anew=True)
            self._collect()
            waited = time.monotonic() - begin
            silent = self._online.keys() - self._greeted.keys()
            if enough() and (not silent or waited > 60):  # a node silent for so long may join later
                return
            there = (
                f"there are {', '.join(sorted(filter(self.is_online, self.found)))}" if self.found else "none is there"
            )
            if waited > self.patience:
                raise RunError(f"waited {waited:.0f} s for {waiting_for}; {there}")
            if waited >= said:
                self.log(f"waiting for {waiting_for}; {there}")
                said = waited + 30
            time.sleep(self.poll)

    def dismiss(self, client: str, why: str = "") -> None:
        """Forget a client that cannot take part; in a minute its node is asked again what it has."""
        if why and self._told.get(client) != why:
            self._told[client] = why
            self.log(f"left client {client} out: {messages.plain(why)}")
            self._untold[self._nodes[client]] = messages.plain(why)
        del self.found[client]
        self._greet[self._nodes.pop(client)] = time.monotonic() + LATER

    def wait(self, clients: Collection[str]) -> bool:
        """Whether one of the clients is online, or comes online before the deadline."""
        begin = time.monotonic()
        while True:
            self._look()
            self._collect()
            if any(map(self.is_online, clients)):
                return True
            if not clients or time.monotonic() - begin > self.deadline:
                return False
            time.sleep(self.poll)

    def ask(
        self,
        kind: str,
        orders: dict[str, Message],
        needed: int = 0,
        counted: Collection[str] | None = None,
        problem: Check = lambda client, answer: "",
    ) -> dict[str, Message]:
        """Bring each client its message and return the good answers; clients that give none are named and left out.

        A node that comes back is asked again: a site does no round twice. Nobody waits for clients that are offline,
        or for anybody after the deadline, as long as `needed` of those `counted` (default: all) have answered. For who
        is still at work on the order before, the deadline runs from when that is done, once: so being late costs one
        round and not the next ones too. If too many refuse, fewer answers than needed come back at once; raises
        RunError if too many are silent.
        """
        self._order += 1
        counted = set(orders) if counted is None else set(counted)
        waiting, answers, missing = dict(orders), dict[str, Message](), 0
        tries, pause = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0.0)
        begin, warned = time.monotonic(), self.deadline
        since = dict.fromkeys(orders, begin)
        behind = orders.keys() & {flight.client for flight in self._flights.values()}
        while waiting:
            self._look()
            now = time.monotonic()
            flying = {f.client for f in self._flights.values() if f.order == self._order}
            before = Counter(f.client for f in self._flights.values() if f.order != self._order)
            since |= dict.fromkeys(behind - before.keys() - self._spared, now)
            behind &= before.keys()
            ready = [c for c in waiting if c not in flying and self.is_online(c) and tries[c] < TRIES]
            ready = [c for c in ready if before[c] < ORDERS]
            for client in ready:
                if now >= pause[client]:
                    tries[client] += 1
                    self._push(client, self._nodes[client], kind, waiting[client])
            for client, answer in self._collect():
                why = _judge(client, answer, problem)
                if not why and isinstance(answer, Message):
                    answers[client] = answer
                    del waiting[client]
                    continue
                pause[client] = now + AGAIN
                if tries[client] >= TRIES or not (isinstance(answer, Failure) and answer.gone):
                    self.log(f"left client {client} out: {messages.plain(why)}")
                    del waiting[client]
            waited, missing = time.monotonic() - begin, needed - len(counted & answers.keys())
            late = time.monotonic() - max((since[client] for client in waiting), default=begin) > self.deadline
            if missing <= 0 and (not (ready or waiting.keys() & (flying | behind)) or late):
                break
            if missing > len(counted & waiting.keys()) or waited > self.patience:
                break
            if waited > warned:
                self.log(f"waiting for {missing} more of clients {_list(counted & waiting.keys())}")
                warned = waited + 60
            if waiting:
                time.sleep(self.poll)
        for client in orders:
            mine = [id for id, flight in self._flights.items() if flight.client == client]
            # Orders given up are remembered: they must not pile up. The one that the present order waited for is lost.
            sent = any(self._flights[id].order == self._order for id in mine)
            for id in mine if client not in waiting else mine[: not sent]:
                del self._flights[id]
        self._spared = self._spared - answers.keys() | {client for client in waiting if since[client] > begin}
        if 0 < missing <= len(counted & waiting.keys()):
            raise RunError(short(counted, answers, needed))
        if waiting:
            self.log(f"went on without {_list(waiting)}: no answer; a node that is started again is asked again")
        return answers

    def _push(self, client: str, node: int, kind: str, order: Message) -> None:
        id = self.carrier.push(node, kind, order, self.patience)
        if id:
            self._flights[id] = Flight(client, node, self._online[node].stamp, self._order)
        if client:
            self._count(client)[0] += messages.size(order)

    def _count(self, client: str) -> list[int]:
        return self.travelled.setdefault(client, {}).setdefault(self.round, [0, 0])

    def _look(self, anew: bool = False) -> None:
        """See which nodes are online; greet those whose client is not known, forget messages to those that went.

        `anew`: greet those too that went and came back, perhaps with other examples.
        """
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked, self._online = now, self._members_of(self.carrier.nodes())
        stamps = {node: known.stamp for node, known in self._online.items()}
        self._flights = {id: f for id, f in self._flights.items() if stamps.get(f.node) == f.stamp}
        met = {node for node in self._nodes.values() if not anew or self._greeted.get(node) == stamps.get(node)}
        for node in self._online.keys() - met - {f.node for f in self._flights.values()}:
            if now >= self._greet.get(node, 0.0):
                self._greet[node] = now + AGAIN
                why = self._untold.pop(node, "")  # or the site would never hear why it is left out
                self._push("", node, "hello", Message({"refused": why} if why else {}, {}))

    def _members_of(self, online: dict[int, Node]) -> dict[int, Node]:
        """The nodes with members' keys, under the members' names; a key that was taken away is a stranger's."""
        if self.members is None:
            return online
        names = self.members()
        strangers = {id for id, node in online.items() if node.key not in names}
        for id in sorted(strangers - self._strangers):
            who = messages.plain(online[id].name) or id
            self.log(f"the node {who} takes no part: its key is not in sites/ of the server's keys")
        self._strangers = strangers
        return {id: node._replace(name=names[node.key]) for id, node in online.items() if id not in strangers}

    def _collect(self) -> list[tuple[str, Message | Failure]]:
        """Answers to the present orders that have come, by client; those to greetings are dealt with here."""
        found = []
        for id, answer in self.carrier.pull(list(self._flights)).items():
            flight = self._flights.pop(id, None)
            if flight is None:
                continue
            # A node does one thing after another: if it has not answered those before, it never will.
            self._flights = {i: f for i, f in self._flights.items() if f.node != flight.node or f.order >= flight.order}
            if not flight.client:
                self._meet(flight.node, answer)
                continue
            if isinstance(answer, Message):
                self._count(flight.client)[1] += messages.size(answer)
            if flight.order == self._order:
                found.append((flight.client, answer))
        return found

    def _meet(self, node: int, answer: Message | Failure) -> None:
        """Learn which client a node is, unless it cannot be one of ours."""
        words: Words = {"refused": answer.why} if isinstance(answer, Failure) else answer.words
        client, known = words.get("client"), self._online.get(node, Node("", ""))
        self._greeted[node] = known.stamp
        why = messages.plain(words.get("refused", ""))
        if not why and (not isinstance(client, str) or not re.fullmatch(NAME, client)):
            why = "it does not say which client it is"
        elif not why and known.name and known.name != client:
            why = f"it says that it is client {client}, but its key is that of {known.name}"
        elif not why and words.get("kinfed") != __version__:
            why = f"it runs kinfed {words.get('kinfed')!s:.40}, the server {__version__}"
        elif not why and self._nodes.get(str(client), node) != node and self.is_online(str(client)):
            why = f"client {client} is at another node already; give every site a name of its own"
        why = why or _misfit(words)
        if why:
            why = messages.plain(why)
            if self._refused.get(node) == (known.stamp, why):
                self._greet[node] = time.monotonic() + LATER
                return
            self._refused[node] = known.stamp, why
            self._untold[node] = why
            self._greet[node] = time.monotonic() + AGAIN
            self.log(f"cannot use the node {f'of {known.name}' if known.name else node}: {why}")
        else:
            self._refused.pop(node, None)
            self._nodes[str(client)] = node
            self.found[str(client)] = words


def short(asked: Collection[str], answered: Collection[str], needed: int) -> str:
    """What to say if fewer than needed of those asked gave an answer that can be used."""
    good = set(asked) & set(answered)
    return (
        f"only {len(good)} of {len(asked)} clients gave an answer that can be used, and {needed} must; look after "
        f"{_list(set(asked) - good)} and go on with --resume"
    )


def _misfit(words: Words) -> str:
    """What is wrong with a greeting's answer, which anybody may have made up; empty if nothing is."""
    shape, outputs, task, columns = (words.get(key) for key in ("shape", "outputs", "task", "columns"))
    sizes = [*shape, outputs] if isinstance(shape, list) else [None]
    if not all(type(n) is int and 0 < n < LARGEST for n in sizes):
        return f"its examples have the shape {shape!r:.80} and {outputs!r:.20} outputs"
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        return f"its columns are {columns!r:.80}"
    if not isinstance(task, dict) or not isinstance(task.get("name"), str):
        return f"its task is {task!r:.80}"
    if task["name"] == "Classification" and not (type(task.get("classes")) is int and 0 < task["classes"] < LARGEST):
        return f"its labels show {task.get('classes')!r:.20} classes"
    return ""


def _judge(client: str, answer: Message | Failure, problem: Check) -> str:
    if isinstance(answer, Failure):
        return answer.why
    if answer.words.get("client") != client:
        return f"the answer is client {answer.words.get('client')!r:.40}'s"
    return str(answer.words["refused"]) if "refused" in answer.words else problem(client, answer)


def _list(clients: Iterable[str]) -> str:
    clients = sorted(clients)
    return ", ".join(clients[:5]) + (f" and {len(clients) - 5} more" if len(clients) > 5 else "")
