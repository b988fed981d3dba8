"""Traffic: messages under way to the nodes, and the bytes of all that have travelled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kinfed.errors import UsageError

from ..wire import messages
from ..wire.messages import Failure, Message, Transport
from .nodes import Nodes

PART = "/"  # between the number of a message to a gateway and a client


class Flight(NamedTuple):
    """A message under way."""

    client: str  # empty for a greeting
    node: int
    stamp: str  # when the node had come online
    request: int  # the number of the request that it belongs to


@dataclass
class Traffic:
    """What travels between the server and the nodes. A message waits for its node for `patience` seconds."""

    transport: Transport
    nodes: Nodes
    patience: float = 3600.0
    round: int = 0  # the one in progress, from 1; 0 before the first
    bytes: dict[str, dict[int, list[int]]] = field(default_factory=dict)  # down and up, by client and round
    flights: dict[str, Flight] = field(default_factory=dict)  # by the number of the message

    def send(self, kind: str, parts: dict[str, Message], request: int) -> None:
        """Send messages to clients; those at one gateway go together."""
        at: dict[int, dict[str, Message]] = {}
        for client, message in parts.items():
            node = self.nodes.at[client]
            if node in self.nodes.gateways:
                at.setdefault(node, {})[client] = message
            else:
                self.push(kind, node, message, {"": client}, request)
            self._count(client)[0] += messages.size(message)
        for node, together in at.items():
            clients = {f"{PART}{client}": client for client in together}
            self.push(kind, node, messages.bundle(together), clients, request)

    def push(self, kind: str, node: int, message: Message, clients: Mapping[str, str], request: int) -> None:
        """Send a message for these clients, each by what comes after the message's number in that of its flight."""
        stamp = self.nodes.online[node].stamp
        if id := self.transport.push(node, kind, message, self.patience):
            self.flights |= {f"{id}{end}": Flight(client, node, stamp, request) for end, client in clients.items()}

    def collect(self) -> list[tuple[Flight, Message | Failure]]:
        """The replies that have arrived, each with the message that it answers."""
        replies = []
        arrived = self.transport.pull(list({id.partition(PART)[0] for id in self.flights}))
        for id, reply in [part for joint_id, answer in arrived.items() for part in self._split(joint_id, answer)]:
            flight = self.flights.pop(id, None)
            if flight is None:
                continue
            # A node does one thing after another: if it has not replied to earlier messages, it never will.
            self.flights = {
                i: f for i, f in self.flights.items() if f.node != flight.node or f.request >= flight.request
            }
            if flight.client and isinstance(reply, Message):
                self._count(flight.client)[1] += messages.size(reply)
            replies.append((flight, reply))
        return replies

    def forget_lost(self) -> None:
        """Forget messages to nodes that have gone offline since, even if they are back."""
        stamps = {node: online.stamp for node, online in self.nodes.online.items()}
        self.flights = {id: f for id, f in self.flights.items() if stamps.get(f.node) == f.stamp}

    def _count(self, client: str) -> list[int]:
        return self.bytes.setdefault(client, {}).setdefault(self.round, [0, 0])

    def _split(self, id: str, reply: Message | Failure) -> list[tuple[str, Message | Failure]]:
        """The replies of the clients of a gateway, by the numbers of their flights; that of another node as it is."""
        part_ids = [flight_id for flight_id in self.flights if flight_id.startswith(f"{id}{PART}")]
        if not part_ids or isinstance(reply, Failure):
            return [(flight_id, reply) for flight_id in part_ids or [id]]
        try:
            parts = messages.unbundle(reply)
        except UsageError as problem:
            return [(flight_id, Failure(str(problem), False)) for flight_id in part_ids]
        none = Failure("its gateway has no reply of it", False)
        return [(flight_id, parts.get(self.flights[flight_id].client, none)) for flight_id in part_ids]
