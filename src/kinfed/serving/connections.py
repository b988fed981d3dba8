"""Connections: how many a service has open at a time; others wait in the listening socket's queue until one closes."""

import asyncio
import socket
from typing import Any

OPEN = 512  # at a time


def server(config: Any, patience: float) -> Any:
    """A server of uvicorn that takes no more connections than it can have open.

    uvicorn itself takes all, and then refuses all. A connection that begins no request for `patience` seconds is
    closed.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup([])
            self.taking = [asyncio.create_task(_take(self, at, patience)) for at in sockets or ()]

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for one in self.taking:
                one.cancel()
            await asyncio.gather(*self.taking, return_exceptions=True)
            await super().shutdown(sockets)

    return Server(config)


async def _take(server: Any, at: socket.socket, patience: float) -> None:
    """Take connections from the queue as long as there is room."""
    loop, config, state = asyncio.get_running_loop(), server.config, server.server_state
    at.setblocking(False)

    def protocol() -> Any:
        return config.http_protocol_class(config=config, server_state=state, app_state=server.lifespan.state)

    while True:
        if len(state.connections) >= OPEN:
            await asyncio.sleep(0.01)
            continue
        try:
            taken, _ = await loop.sock_accept(at)
            transport, made = await loop.connect_accepted_socket(protocol, taken)
        except OSError:  # it is gone again, or the process has no file left
            await asyncio.sleep(0.1)
            continue
        loop.call_later(patience, _watch, transport, made, None, patience)


def _watch(transport: Any, protocol: Any, before: Any, patience: float) -> None:
    """Close a connection that has begun no request since the last look, and has none in work."""
    if transport.is_closing():
        return
    if protocol.cycle is before and (before is None or before.response_complete):
        transport.close()
    else:
        asyncio.get_running_loop().call_later(patience, _watch, transport, protocol, protocol.cycle, patience)
