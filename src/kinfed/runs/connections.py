"""Connections to a server of HTTP: bounded for each address, and closed if they say nothing."""

import asyncio
import ipaddress
import socket
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import Any

PATIENCE = 30.0  # seconds that a connection may say nothing
CONNECTIONS = 256  # of one address at once, those that have not greeted by TLS yet included
STRANGERS = 256  # of all addresses at once, of those whose calls were not admitted yet


class Listener(socket.socket):
    """A listening socket that hangs up at once on the connections of an address that has too many.

    TLS takes 300 kB for each connection. So if too many of all addresses have not been admitted, the oldest of the
    address with the most of these is closed.
    """

    def __init__(self, bound: socket.socket) -> None:
        super().__init__(fileno=bound.detach())
        self.open: Counter[bytes] = Counter()  # connections, by address
        self._strangers: dict[bytes, OrderedDict[int, Connection]] = {}  # by address and port

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; raises ConnectionAbortedError for one too many."""
        accepted, where = super().accept()
        address = _network(where[0])
        if self.open[address] >= CONNECTIONS:
            accepted.close()
            raise ConnectionAbortedError
        connection = Connection(accepted, self, address, where[1])
        self._strangers.setdefault(address, OrderedDict())[where[1]] = connection
        if sum(map(len, self._strangers.values())) > STRANGERS:
            most = max(self._strangers.values(), key=len)
            with suppress(OSError):  # it is closed already
                most.popitem(last=False)[1].shutdown(socket.SHUT_RDWR)
        return connection, where

    def admit(self, where: Any) -> None:
        """Take note that a call from an address and port was admitted: its connection is no stranger's any more."""
        if where:
            self._forget(_network(where[0]), where[1])

    def close_one(self, address: bytes, port: int) -> None:
        """Take note that a connection is closed."""
        self._forget(address, port)
        self.open[address] -= 1
        if not self.open[address]:
            del self.open[address]

    def _forget(self, address: bytes, port: int) -> None:
        ports = self._strangers.get(address, OrderedDict())
        ports.pop(port, None)
        if not ports:
            self._strangers.pop(address, None)


class Connection(socket.socket):
    """A connection that counts until it is closed."""

    def __init__(self, accepted: socket.socket, listener: Listener, address: bytes, port: int) -> None:
        super().__init__(fileno=accepted.detach())
        self._listener, self._address, self._port = listener, address, port
        listener.open[address] += 1

    def close(self) -> None:
        if self.fileno() >= 0:
            self._listener.close_one(self._address, self._port)
        super().close()


def _network(address: str) -> bytes:
    """IPv6 is given out by half addresses."""
    return ipaddress.ip_address(address.partition("%")[0]).packed[:8]


def make_impatient_protocol() -> Any:
    """A protocol of uvicorn's that hangs up on clients that neither call nor wait for an answer for PATIENCE."""
    from uvicorn.protocols.http.h11_impl import H11Protocol  # the other one takes heads of any length

    class Hurried(H11Protocol):
        """Hangs up."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look(None)

        def connection_lost(self, problem: Exception | None) -> None:
            self._next.cancel()  # it would keep what the connection has read
            super().connection_lost(problem)

        def _look(self, last: Any) -> None:
            self._next: asyncio.TimerHandle = self.loop.call_later(PATIENCE, self._hurry, last)

        def _hurry(self, last: Any) -> None:
            if self.cycle is last and (last is None or last.response_complete):
                self.transport.close()
            else:
                self._look(self.cycle)

    return Hurried
