"""Which clients there are, and at which node each is: learned by greeting every node that comes online."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from kinfed import __version__

from ..wire import messages
from ..wire.keys import NAME
from ..wire.messages import Failure, Fields, Message, Node
from . import validation

RETRY = 10.0  # seconds before a node is greeted again
LATER = 60.0  # seconds before a node that cannot take part is greeted again
LARGEST = 1 << 40  # number of examples that is believed


@dataclass
class Nodes:
    """Knows clients by their own names, wherever their nodes are now. Times are seconds of any one clock."""

    log: Callable[[str], None]
    members: Callable[[], Mapping[bytes, str]] | None  # public keys and their clients; None: anyone online is a member
    sites: Collection[str] = ()  # whose nodes alone are asked, by the names of their keys; none: all
    greeting: Fields = field(default_factory=dict)  # what every node is told: the run, and what it plans
    clients: dict[str, Fields] = field(default_factory=dict)  # that were met, with their replies to the greeting
    online: dict[int, Node] = field(default_factory=dict)
    at: dict[str, int] = field(default_factory=dict)  # the node where each client was last
    gateways: set[int] = field(default_factory=set)  # nodes of several clients
    _greeted: dict[int, str] = field(default_factory=dict)  # nodes that replied to a greeting, with their stamp then
    _next: dict[int, float] = field(default_factory=dict)  # when a node may be greeted again
    _dismissed: dict[str, str] = field(default_factory=dict)  # why a client was dismissed
    _refused: dict[int, tuple[str, str]] = field(default_factory=dict)  # unusable nodes: stamp then, and why
    _unaware: dict[int, str] = field(default_factory=dict)  # why, for the nodes that have not been told yet
    _strangers: set[int] = field(default_factory=set)  # nodes whose keys are not a member's

    def is_online(self, client: str) -> bool:
        """Whether a client's node was online at the last update."""
        return self.at.get(client, -1) in self.online

    def is_removed(self, client: str) -> bool:
        """Whether no member's key is that of a client, or of its gateway, any more."""
        if self.members is None:
            return False
        return not any(client == name or client.startswith(f"{name}.") for name in self.members().values())

    def silent(self) -> set[int]:
        """Nodes online that have not replied to a greeting."""
        return self.online.keys() - self._greeted.keys()

    def update_members(self, online: dict[int, Node]) -> None:
        """Take note of which nodes are online. Nodes with members' keys get the members' names; others are ignored."""
        if self.members is not None:
            names = self.members()
            strangers = {id for id, node in online.items() if node.key not in names}
            for id in sorted(strangers - self._strangers):
                name = messages.plain(online[id].name) or id
                self.log(f"ignoring the node {name}: its key is not in sites/ of the server's keys")
            self._strangers = strangers
            online = {id: node._replace(name=names[node.key]) for id, node in online.items() if id not in strangers}
            online = {id: node for id, node in online.items() if not self.sites or node.name in self.sites}
        self.online = online

    def greetings(self, now: float, busy: set[int], again: bool) -> list[tuple[int, Message]]:
        """Nodes to greet and the messages for them: idle nodes whose client is not known.

        `again`: those too that went offline and came back, perhaps with other examples.
        """
        stamps = {node: online.stamp for node, online in self.online.items()}
        met = {node for node in self.at.values() if not again or self._greeted.get(node) == stamps.get(node)}
        due = [
            node
            for node in (self.online.keys() - met | self._unaware.keys()) & self.online.keys() - busy
            if now >= self._next.get(node, 0.0) or self._greeted.get(node, stamps[node]) != stamps[node]
        ]
        greetings = []
        for node in due:
            self._next[node] = now + RETRY
            why = self._unaware.pop(node, "")  # or the site would never learn why it is left out
            greetings.append((node, Message({**self.greeting, "refused": why} if why else self.greeting, {})))
        return greetings

    def admit(self, node: int, reply: Message | Failure, now: float) -> str:
        """Learn from the reply to a greeting which client a node is; returns, and logs, why it cannot take part."""
        greeting: Fields = {"refused": reply.why} if isinstance(reply, Failure) else reply.fields
        member = self.online.get(node, Node("", ""))
        self._greeted[node] = member.stamp
        site = member.name or str(greeting.get("client"))
        waits = greeting.get("waits") is True  # for its operator to agree
        if self.sites and site not in self.sites:
            why = "the plan does not name it (flower.sites)"
        elif isinstance(greeting.get("clients"), dict):
            why = self._meet_gateway(node, member, greeting)
        else:
            why = self._meet_client(node, member, greeting)
        if not why:
            self._refused.pop(node, None)
        elif self._refused.get(node) == (member.stamp, why):
            self._next[node] = now + (RETRY if waits else LATER)
        else:
            self._refused[node] = member.stamp, why
            if not waits:  # else it knows why
                self._unaware[node] = why
            self._next[node] = now + RETRY
            claimed = f" ({messages.plain(greeting['client'])})" if greeting.get("client") else ""
            who = f"of {member.name}" if member.name else f"{node}{claimed}"
            self.log(f"{'waiting for' if waits else 'cannot use'} the node {who}: {why}")
        return why

    def _meet_client(self, node: int, member: Node, greeting: Fields) -> str:
        """Take note of a client at a node; returns why it cannot take part."""
        why = messages.plain(
            self._refusal(node, member, greeting) or _misfit(greeting) or validation.columns_misfit(greeting)
        )
        if not why:
            self.at[str(greeting["client"])] = node
            self.clients[str(greeting["client"])] = greeting
        return why

    def _meet_gateway(self, node: int, member: Node, greeting: Fields) -> str:
        """Take note of the clients of a gateway, whose names begin with its own; returns why not all can take part."""
        self.gateways.add(node)
        site, problems = member.name or str(greeting.get("client")), {}
        for client, claims in greeting["clients"].items():
            client_greeting = (
                {**claims, "client": client, "kinfed": greeting.get("kinfed")} if isinstance(claims, dict) else {}
            )
            # Its key is that of all names that begin so.
            name = client if client.startswith(f"{site}.") else site
            if why := self._meet_client(node, member._replace(name=name), client_greeting):
                problems[client] = why
        first = next(iter(problems), "")
        return f"{len(problems)} of its clients cannot take part; {first}: {problems[first]}" if problems else ""

    def dismiss(self, client: str, why: str, now: float) -> None:
        """Forget a client that cannot take part; its node is told why, and greeted again in a minute."""
        if why and self._dismissed.get(client) != why:
            self._dismissed[client] = why
            self.log(f"left client {client} out: {messages.plain(why)}")
            node = self.at[client]
            self._unaware[node] = messages.plain(f"client {client}: {why}" if node in self.gateways else why)
        del self.clients[client]
        node = self.at.pop(client)
        self._next[node] = now if node in self._unaware else now + LATER  # so that it is told at once

    def _refusal(self, node: int, member: Node, greeting: Fields) -> str:
        """Why a node cannot be the client that it claims to be; empty if it can."""
        client = greeting.get("client")
        if why := messages.plain(greeting.get("refused", "")):
            return why
        if not isinstance(client, str) or not re.fullmatch(NAME, client):
            return "it does not say which client it is"
        if member.name and member.name != client:
            return f"it claims to be client {client}, but its key is that of {member.name}"
        if greeting.get("kinfed") != __version__:
            return f"it runs kinfed {greeting.get('kinfed')!s:.40}, the server {__version__}"
        if self.at.get(client, node) != node and self.is_online(client):
            return f"client {client} is already at another node; give every site its own name"
        return ""


def _misfit(greeting: Fields) -> str:
    """What is wrong with the reply to a greeting, in which anything may be made up; empty if nothing is."""
    shape, outputs, task, columns = (greeting.get(key) for key in ("shape", "outputs", "task", "columns"))
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
