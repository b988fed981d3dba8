"""Brings messages to clients, wherever their nodes are, and collects their replies."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kinfed.errors import RunError, UsageError

from ..wire import messages
from ..wire.messages import Failure, Fields, Message, Transport
from .nodes import Nodes

LOOK = 2.0  # seconds between two looks at which nodes are online
RETRY = 10.0  # seconds before a client whose node failed is tried again
REQUESTS = 2  # that may be under way to a client at once: the present one, and one that was given up
PART = "/"  # between the number of a message to a gateway and a client
TRIES = 3  # times that a request is sent to a client

Check = Callable[[str, Message], str]  # what is wrong with a client's reply, empty if nothing is


class Flight(NamedTuple):
    """A message under way."""

    client: str  # empty for a greeting
    node: int
    stamp: str  # when the node had come online
    request: int  # the number of the request that it belongs to


@dataclass
class _Request:
    """A request to several clients, and how far it has got."""

    messages: dict[str, Message]
    needed: int  # replies that must come, of those of the clients `counted`
    counted: set[str]
    problem: Check
    begin: float
    behind: set[str]  # clients that are still at work on a request before
    replies: dict[str, Message] = field(default_factory=dict)
    waiting: dict[str, Message] = field(init=False)  # what has been neither answered nor given up
    since: dict[str, float] = field(init=False)  # when each client's deadline began to run
    tries: dict[str, int] = field(init=False)
    pause: dict[str, float] = field(init=False)  # until when a client is not tried again
    warned: float = 0.0  # seconds after which a warning is due

    def __post_init__(self) -> None:
        self.waiting = dict(self.messages)
        self.since = dict.fromkeys(self.messages, self.begin)
        self.tries, self.pause = dict.fromkeys(self.messages, 0), dict.fromkeys(self.messages, 0.0)

    @property
    def missing(self) -> int:
        """Replies still needed."""
        return self.needed - len(self.counted & self.replies.keys())

    @property
    def pending(self) -> set[str]:
        """Clients whose replies count and may still come."""
        return self.counted & self.waiting.keys()

    def take(self, client: str, reply: Message | Failure, now: float) -> str:
        """Take a reply; returns why the client is given up, empty if it is not."""
        why = _problem(client, reply, self.problem)
        if not why and isinstance(reply, Message):
            self.replies[client] = reply
            del self.waiting[client]
            return ""
        self.pause[client] = now + RETRY
        if self.tries[client] < TRIES and isinstance(reply, Failure) and reply.gone:
            return ""
        del self.waiting[client]
        return why


@dataclass
class Broker:
    """Sends requests to clients by their names, and counts the bytes of what travels."""

    transport: Transport
    deadline: float = 600.0  # seconds after which only clients that are needed are waited for
    patience: float = 3600.0  # seconds after which those that are needed are given up
    log: Callable[[str], None] = print
    poll: float = 0.2  # seconds
    members: Callable[[], Mapping[bytes, str]] | None = None  # public keys and their clients; None: whoever is online
    sites: Collection[str] = ()  # that are asked; none: all
    greeting: Fields = field(default_factory=dict)  # what every node is told: the run, and what it plans
    round: int = 0  # the one in progress, from 1; 0 before the first
    traffic: dict[str, dict[int, list[int]]] = field(default_factory=dict)  # bytes down and up, by client and round
    looked: Callable[[], None] = lambda: None  # called after each look at which nodes are online
    nodes: Nodes = field(init=False)
    waiting_for: str = ""  # before round 1
    problems: dict[str, str] = field(default_factory=dict)  # why a client was left out, until its next good reply
    _request: "_Request | None" = None  # the one under way
    _looked: float = -math.inf
    _flights: dict[str, Flight] = field(default_factory=dict)
    _number: int = 0  # of the present request
    _extended: set[str] = field(default_factory=set)  # clients that were given more time and have not replied since

    def __post_init__(self) -> None:
        self.nodes = Nodes(self.log, self.members, self.sites, self.greeting)

    def discover(self, enough: Callable[[], bool], waiting_for: str) -> None:
        """Greet all nodes until enough clients are known and every node that is online has replied."""
        begin, logged, self.waiting_for = time.monotonic(), 0.0, waiting_for
        while True:
            self._look(again=True)
            self._collect()
            waited = time.monotonic() - begin
            if enough() and (not self.nodes.silent() or waited > 60):  # a node that is silent so long may join later
                self.waiting_for = ""
                return
            online = ", ".join(sorted(filter(self.nodes.is_online, self.nodes.clients))) or "none"
            if waited > self.patience:
                raise RunError(f"waited {waited:.0f} s for {waiting_for}; connected: {online}")
            if waited >= logged:
                self.log(f"waiting for {waiting_for}; connected: {online}")
                logged = waited + 30
            time.sleep(self.poll)

    def late(self, client: str) -> float:
        """The seconds for which a client has been waited for, while others of the same request have replied."""
        request = self._request
        if request is None or client not in request.waiting or not request.replies:
            return 0.0
        return round(time.monotonic() - request.since[client], 1)

    def dismiss(self, client: str, why: str = "") -> None:
        """Forget a client that cannot take part; in a minute its node is greeted again."""
        self.problems[client] = messages.plain(why)
        self.nodes.dismiss(client, why, time.monotonic())

    def wait(self, clients: Collection[str]) -> bool:
        """Whether one of the clients is online, or comes online before the deadline."""
        begin = time.monotonic()
        while True:
            self._look()
            self._collect()
            if any(map(self.nodes.is_online, clients)):
                return True
            if not clients or time.monotonic() - begin > self.deadline:
                return False
            time.sleep(self.poll)

    def request(
        self,
        kind: str,
        messages: dict[str, Message],
        needed: int = 0,
        counted: Collection[str] | None = None,
        problem: Check = lambda client, reply: "",
    ) -> dict[str, Message]:
        """Bring each client its message and return the good replies; clients that give none are logged and left out.

        A node that comes back is tried again: a site does no round twice. Nobody waits for clients that are offline, or
        for anybody after the deadline, once `needed` of those `counted` (default: all) have replied. For a client still
        at work on the previous request, the deadline starts once it is done with that, once: so being late costs one
        round and not the next ones too. If too many refuse, fewer replies than needed are returned at once; raises
        RunError if too many are silent.
        """
        self._number += 1
        begin, busy = time.monotonic(), {flight.client for flight in self._flights.values()}
        decisive = set(messages) if counted is None else set(counted)
        request = _Request(messages, needed, decisive, problem, begin, messages.keys() & busy, warned=self.deadline)
        self._request = request
        while request.waiting and not self._advance(kind, request):
            time.sleep(self.poll)
        self._request = None
        self._forget(request)
        if 0 < request.missing <= len(request.pending):
            raise RunError(too_few(messages, request.replies, needed, {}))
        if request.waiting and request.missing <= len(request.pending):  # or the request is over as others refused
            self._report_waiting(request.waiting)
        return request.replies

    def _report_waiting(self, waiting: Collection[str]) -> None:
        """Log, and note for each client, why a request goes on without it."""
        removed = {client for client in waiting if self.nodes.is_removed(client)}
        away = {client for client in {*waiting} - removed if not self.nodes.is_online(client)}
        for clients, problem, why in (
            (removed, "it was removed", "removed from sites/ of the server's keys"),
            (away, "it is not connected", "not connected; it is asked again once it is"),
            ({*waiting} - removed - away, "no reply", "no reply in time; it is asked again in the next round"),
        ):
            self.problems |= dict.fromkeys(clients, problem)
            if clients:
                self.log(f"continuing without {_list(clients)}: {why}")

    def _advance(self, kind: str, request: _Request) -> bool:
        """Send what can be sent and take what has arrived; returns whether the request is over."""
        self._look()
        now = time.monotonic()
        sent = {f.client for f in self._flights.values() if f.request == self._number}
        earlier = Counter(f.client for f in self._flights.values() if f.request != self._number)
        request.since |= dict.fromkeys(request.behind - earlier.keys() - self._extended, now)
        request.behind &= earlier.keys()
        ready = [c for c in request.waiting if c not in sent and self.nodes.is_online(c) and request.tries[c] < TRIES]
        ready = [c for c in ready if earlier[c] < REQUESTS]
        due = [client for client in ready if now >= request.pause[client]]
        for client in due:
            request.tries[client] += 1
        self._send(kind, {client: request.waiting[client] for client in due})
        for client, reply in self._collect():
            why = request.take(client, reply, now)
            self.problems[client] = messages.plain(why)
            if why:
                self.log(f"left client {client} out: {messages.plain(why)}")
        now = time.monotonic()
        waited, waiting = now - request.begin, request.waiting
        late = now - max((request.since[client] for client in waiting), default=request.begin) > self.deadline
        if request.missing <= 0 and (not (ready or waiting.keys() & (sent | request.behind)) or late):
            return True
        if request.missing > len(request.pending) or waited > self.patience:
            return True
        if waited > request.warned:
            self.log(f"waiting for {request.missing} more of clients {_list(request.pending)}")
            request.warned = waited + 60
        return not waiting

    def _forget(self, request: _Request) -> None:
        """Forget the messages of a request that is over.

        Messages given up are remembered: they must not pile up. The one that this request waited for is lost.
        """
        for client in request.messages:
            ids = [id for id, flight in self._flights.items() if flight.client == client]
            sent = any(self._flights[id].request == self._number for id in ids)
            for id in ids if client not in request.waiting else ids[: not sent]:
                del self._flights[id]
        extended = {client for client in request.waiting if request.since[client] > request.begin}
        self._extended = self._extended - request.replies.keys() | extended

    def _send(self, kind: str, parts: dict[str, Message]) -> None:
        """Send messages to clients; those at one gateway go together."""
        at: dict[int, dict[str, Message]] = {}
        for client, message in parts.items():
            node = self.nodes.at[client]
            if node in self.nodes.gateways:
                at.setdefault(node, {})[client] = message
            else:
                self._push(kind, node, message, {"": client})
            self._count(client)[0] += messages.size(message)
        for node, together in at.items():
            self._push(kind, node, messages.bundle(together), {f"{PART}{client}": client for client in together})

    def _push(self, kind: str, node: int, message: Message, clients: Mapping[str, str]) -> None:
        """Send a message for these clients, each by what comes after the message's number in that of its flight."""
        stamp = self.nodes.online[node].stamp
        if id := self.transport.push(node, kind, message, self.patience):
            flights = {f"{id}{end}": Flight(client, node, stamp, self._number) for end, client in clients.items()}
            self._flights |= flights

    def _count(self, client: str) -> list[int]:
        return self.traffic.setdefault(client, {}).setdefault(self.round, [0, 0])

    def _look(self, again: bool = False) -> None:
        """See which nodes are online; greet those whose client is not known, forget messages to those that left.

        `again`: greet those too that went offline and came back.
        """
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        self.nodes.update_members(self.transport.nodes())
        stamps = {node: online.stamp for node, online in self.nodes.online.items()}
        self._flights = {id: f for id, f in self._flights.items() if stamps.get(f.node) == f.stamp}
        for node, greeting in self.nodes.greetings(now, {f.node for f in self._flights.values()}, again):
            self._push("hello", node, greeting, {"": ""})
        self.looked()

    def _collect(self) -> list[tuple[str, Message | Failure]]:
        """Replies to the present request that have arrived, by client; those to greetings are dealt with here."""
        replies = []
        ids = {id.partition(PART)[0] for id in self._flights}
        arrived = self.transport.pull(list(ids))
        for id, reply in [part for joint_id, answer in arrived.items() for part in self._parts(joint_id, answer)]:
            flight = self._flights.pop(id, None)
            if flight is None:
                continue
            # A node does one thing after another: if it has not replied to earlier messages, it never will.
            self._flights = {
                i: f for i, f in self._flights.items() if f.node != flight.node or f.request >= flight.request
            }
            if not flight.client:
                why, member = self.nodes.admit(flight.node, reply, time.monotonic()), self.nodes.online.get(flight.node)
                if why and member and member.name:
                    self.problems[member.name] = why
                continue
            if isinstance(reply, Message):
                self._count(flight.client)[1] += messages.size(reply)
            if flight.request == self._number:
                replies.append((flight.client, reply))
        return replies

    def _parts(self, id: str, reply: Message | Failure) -> list[tuple[str, Message | Failure]]:
        """The replies of the clients of a gateway, by the numbers of their flights; that of another node as it is."""
        part_ids = [flight_id for flight_id in self._flights if flight_id.startswith(f"{id}{PART}")]
        if not part_ids or isinstance(reply, Failure):
            return [(flight_id, reply) for flight_id in part_ids or [id]]
        try:
            parts = messages.unbundle(reply)
        except UsageError as problem:
            return [(flight_id, Failure(str(problem), False)) for flight_id in part_ids]
        none = Failure("its gateway has no reply of it", False)
        return [(flight_id, parts.get(self._flights[flight_id].client, none)) for flight_id in part_ids]


def too_few(requested: Collection[str], replied: Collection[str], needed: int, problems: Mapping[str, str]) -> str:
    """What to say if fewer than needed of the clients gave a usable reply; it names those with problems, or all."""
    good = set(requested) & set(replied)
    others = set(requested) - good
    return (
        f"only {len(good)} of {len(requested)} clients gave a usable reply, but {needed} must; check "
        f"{_list({client for client in others if problems.get(client)} or others)}"
    )


def _problem(client: str, reply: Message | Failure, problem: Check) -> str:
    if isinstance(reply, Failure):
        return reply.why
    if reply.fields.get("client") != client:
        return f"the reply is from client {reply.fields.get('client')!r:.40}"
    return str(reply.fields["refused"]) if "refused" in reply.fields else problem(client, reply)


def _list(clients: Iterable[str]) -> str:
    clients = sorted(clients)
    return ", ".join(clients[:5]) + (f" and {len(clients) - 5} more" if len(clients) > 5 else "")
