"""Courier: finds the clients among the nodes, brings them messages and comes back with answers."""

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .. import __version__
from ..errors import RunError
from . import messages
from .messages import Message, Words

LOOK = 2.0  # seconds between two looks at which nodes are online
AGAIN = 10.0  # seconds before a node that failed is asked again
TRIES = 3  # times that a client is asked the same


class Failure(NamedTuple):
    """Why there is no answer."""

    why: str
    gone: bool  # the node was not reached or broke down over it, so that asking again may help


class Carrier(Protocol):
    """What carries messages, see `kinfed.flower.grid.Post`."""

    def nodes(self) -> dict[int, str]: ...  # those online, with the time they last came online

    def push(self, node: int, kind: str, message: Message, seconds: float) -> str: ...  # its id, empty if it failed

    def pull(self, ids: Iterable[str]) -> dict[str, Message | Failure]: ...  # answers that have come, by those ids


class Flight(NamedTuple):
    """A message under way."""

    client: str  # empty for a greeting
    node: int
    stamp: str  # when the node had come online


Check = Callable[[str, Message], str]  # what is wrong with a client's answer, empty if nothing is


@dataclass
class Courier:
    """Knows clients by their own names, wherever their nodes are now; one message is under way to a node at a time."""

    carrier: Carrier
    deadline: float = 600.0  # seconds after which nobody is waited for who is not needed
    patience: float = 3600.0  # seconds after which those who are needed are given up
    log: Callable[[str], None] = print
    poll: float = 0.2  # seconds
    found: dict[str, Words] = field(default_factory=dict)  # every client that said hello, with what it said
    round: int = 0  # the one under way, from 1; 0 before the first
    travelled: dict[str, dict[int, list[int]]] = field(default_factory=dict)  # bytes down and up, by client and round
    _nodes: dict[str, int] = field(default_factory=dict)  # where each client was last
    _online: dict[int, str] = field(default_factory=dict)
    _greet: dict[int, float] = field(default_factory=dict)  # when a node may be greeted again
    _looked: float = -math.inf
    _flights: dict[str, Flight] = field(default_factory=dict)

    def is_online(self, client: str) -> bool:
        """Whether a client's node was online at the last look."""
        return self._nodes.get(client, -1) in self._online

    def discover(self, enough: Callable[[], bool], waiting_for: str) -> None:
        """Greet all nodes until enough clients are known and no node that is online is still to answer."""
        begin, said = time.monotonic(), 0.0
        while True:
            self._look()
            self._collect()
            waited = time.monotonic() - begin
            silent = self._online.keys() - set(self._nodes.values())
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
        or for anybody after the deadline, as long as `needed` of those `counted` (default: all) have answered. Raises
        RunError if they cannot be had.
        """
        counted = set(orders) if counted is None else set(counted)
        waiting, answers = dict(orders), dict[str, Message]()
        tries, pause = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0.0)
        begin, warned = time.monotonic(), self.deadline
        while waiting:
            self._look()
            now = time.monotonic()
            flying = {flight.client for flight in self._flights.values()}
            ready = [c for c in waiting if c not in flying and self.is_online(c) and tries[c] < TRIES]
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
                    self.log(f"left client {client} out: {why}")
                    del waiting[client]
            waited, missing = time.monotonic() - begin, needed - len(counted & answers.keys())
            if missing <= 0 and (not (ready or flying - {""}) or waited > self.deadline):
                break
            if missing > len(counted & waiting.keys()) or waited > self.patience:
                break
            if waited > warned:
                self.log(f"waiting for {missing} more of clients {_list(counted & waiting.keys())}")
                warned = waited + 60
            if waiting:
                time.sleep(self.poll)
        self._flights = {id: flight for id, flight in self._flights.items() if not flight.client}
        if len(counted & answers.keys()) < needed:
            raise RunError(
                f"only {len(counted & answers.keys())} of {len(counted)} clients gave an answer that can be used, and "
                f"{needed} must; look after {_list(counted - answers.keys())} and go on with --resume"
            )
        if waiting:
            self.log(f"went on without {_list(waiting)}: no answer")
        return answers

    def _push(self, client: str, node: int, kind: str, order: Message) -> None:
        id = self.carrier.push(node, kind, order, self.patience)
        if id:
            self._flights[id] = Flight(client, node, self._online[node])
        if client:
            self._count(client)[0] += messages.size(order)

    def _count(self, client: str) -> list[int]:
        return self.travelled.setdefault(client, {}).setdefault(self.round, [0, 0])

    def _look(self) -> None:
        """See which nodes are online; greet those whose client is not known, forget messages to those that went."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked, self._online = now, self.carrier.nodes()
        self._flights = {id: f for id, f in self._flights.items() if self._online.get(f.node) == f.stamp}
        for node in self._online.keys() - set(self._nodes.values()) - {f.node for f in self._flights.values()}:
            if now >= self._greet.get(node, 0.0):
                self._greet[node] = now + AGAIN
                self._push("", node, "hello", Message({}, {}))

    def _collect(self) -> list[tuple[str, Message | Failure]]:
        """Answers that have come, by client; those to greetings are dealt with here."""
        found = []
        for id, answer in self.carrier.pull(list(self._flights)).items():
            flight = self._flights.pop(id, None)
            if flight is None:
                continue
            if not flight.client:
                self._meet(flight.node, answer)
                continue
            if isinstance(answer, Message):
                self._count(flight.client)[1] += messages.size(answer)
            found.append((flight.client, answer))
        return found

    def _meet(self, node: int, answer: Message | Failure) -> None:
        """Learn which client a node is, unless it cannot be one of ours."""
        words: Words = {"refused": answer.why} if isinstance(answer, Failure) else answer.words
        client = words.get("client")
        why = str(words.get("refused", ""))
        if not why and (not isinstance(client, str) or not client):
            why = "it does not say which client it is"
        elif not why and words.get("kinfed") != __version__:
            why = f"it runs kinfed {words.get('kinfed')}, the server {__version__}"
        elif not why and self._nodes.get(str(client), node) != node and self.is_online(str(client)):
            why = f"client {client} is at another node already; give every site a name of its own"
        if why:
            self._greet[node] = time.monotonic() + 60
            self.log(f"cannot use node {node}: {why}")
        else:
            self._nodes[str(client)] = node
            self.found[str(client)] = words


def _judge(client: str, answer: Message | Failure, problem: Check) -> str:
    if isinstance(answer, Failure):
        return answer.why
    if answer.words.get("client") != client:
        return f"the answer is client {answer.words.get('client')!r:.40}'s"
    return str(answer.words["refused"]) if "refused" in answer.words else problem(client, answer)


def _list(clients: Iterable[str]) -> str:
    clients = sorted(clients)
    return ", ".join(clients[:5]) + (f" and {len(clients) - 5} more" if len(clients) > 5 else "")
