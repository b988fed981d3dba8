"""Brings messages to clients, wherever their nodes are, and collects their replies."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kinfed.errors import RunError

from ..wire import messages
from ..wire.messages import Failure, Message
from .node_traffic import Traffic
from .nodes import Nodes

LOOK = 2.0  # seconds between two looks at which nodes are online
RETRY = 10.0  # seconds before a client whose node failed is tried again
REQUESTS = 2  # that may be under way to a client at once: the present one, and one that was given up
TRIES = 3  # times that a request is sent to a client

Check = Callable[[str, Message], str]  # what is wrong with a client's reply, empty if nothing is


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
    tries: Counter[str] = field(default_factory=Counter)
    pause: dict[str, float] = field(default_factory=dict)  # until when a client is not tried again
    warned: float = 0.0  # seconds after which a warning is due

    def __post_init__(self) -> None:
        self.waiting = dict(self.messages)
        self.since = dict.fromkeys(self.messages, self.begin)

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
    """Sends requests to clients by their names, and waits for the replies."""

    nodes: Nodes
    traffic: Traffic
    deadline: float = 600.0  # seconds after which only clients that are needed are waited for
    log: Callable[[str], None] = print
    poll: float = 0.2  # seconds
    looked: Callable[[], None] = lambda: None  # called after each look at which nodes are online
    waiting_for: str = ""  # before round 1
    problems: dict[str, str] = field(default_factory=dict)  # why a client was left out, until its next good reply
    _request: "_Request | None" = None  # the one under way
    _looked: float = -math.inf
    _number: int = 0  # of the present request
    _extended: set[str] = field(default_factory=set)  # clients that were given more time and have not replied since

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
            if waited > self.traffic.patience:
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
        begin = time.monotonic()
        busy = {flight.client for flight in self.traffic.flights.values()}
        decisive = set(messages) if counted is None else set(counted)
        request = _Request(
            messages,
            needed,
            counted=decisive,
            problem=problem,
            begin=begin,
            behind=messages.keys() & busy,
            warned=self.deadline,
        )
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
        flights = self.traffic.flights.values()
        sent = {flight.client for flight in flights if flight.request == self._number}
        earlier = Counter(flight.client for flight in flights if flight.request != self._number)
        request.since |= dict.fromkeys(request.behind - earlier.keys() - self._extended, now)
        request.behind &= earlier.keys()
        ready = [c for c in request.waiting if c not in sent and self.nodes.is_online(c) and request.tries[c] < TRIES]
        ready = [c for c in ready if earlier[c] < REQUESTS]
        due = [client for client in ready if now >= request.pause.get(client, now)]
        request.tries.update(due)
        self.traffic.send(kind, {client: request.waiting[client] for client in due}, self._number)
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
        if request.missing > len(request.pending) or waited > self.traffic.patience:
            return True
        if waited > request.warned:
            self.log(f"waiting for {request.missing} more of clients {_list(request.pending)}")
            request.warned = waited + 60
        return not waiting

    def _forget(self, request: _Request) -> None:
        """Forget the messages of a request that is over.

        Messages given up are remembered: they must not pile up. The one that this request waited for is lost.
        """
        flights = self.traffic.flights
        for client in request.messages:
            ids = [id for id, flight in flights.items() if flight.client == client]
            if client in request.waiting:
                ids = [] if any(flights[id].request == self._number for id in ids) else ids[:1]
            for id in ids:
                del flights[id]
        extended = {client for client in request.waiting if request.since[client] > request.begin}
        self._extended = self._extended - request.replies.keys() | extended

    def _look(self, again: bool = False) -> None:
        """See which nodes are online; greet those whose client is not known, forget messages to those that left.

        `again`: greet those too that went offline and came back.
        """
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        self.nodes.update_members(self.traffic.transport.nodes())
        self.traffic.forget_lost()
        busy = {flight.node for flight in self.traffic.flights.values()}
        for node, greeting in self.nodes.greetings(now, busy, again):
            self.traffic.push("hello", node, greeting, {"": ""}, self._number)
        self.looked()

    def _collect(self) -> list[tuple[str, Message | Failure]]:
        """Replies to the present request that have arrived, by client; those to greetings are dealt with here."""
        replies = []
        for flight, reply in self.traffic.collect():
            if flight.client and flight.request == self._number:
                replies.append((flight.client, reply))
            elif not flight.client:
                why = self.nodes.admit(flight.node, reply, time.monotonic())
                member = self.nodes.online.get(flight.node)
                if why and member and member.name:
                    self.problems[member.name] = why
        return replies


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
