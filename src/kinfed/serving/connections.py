"""Connections: how many a service has open at a time; others wait in the listening socket's queue until one closes."""

import asyncio
import socket
from typing import Any

OPEN = 512  # at a time


def server(config: Any, patience: float) -> Any:
    """A server of uvicorn that takes no more connections than it can have open.

    uvicorn itself takes all, and then refuses all. Connections that begin no request are closed
    after `patience` to twice as many seconds.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup([])
            works = [_take(self, at) for at in sockets or ()]
            works.append(_close_idle(self.server_state.connections, patience))
            self.taking = [asyncio.create_task(work) for work in works]

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for one in self.taking:
                one.cancel()
            await asyncio.gather(*self.taking, return_exceptions=True)
            await super().shutdown(sockets)

    return Server(config)


async def _take(server: Any, at: socket.socket) -> None:
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
            await loop.connect_accepted_socket(protocol, taken)
        except OSError:  # it is gone again, or the process has no file left
            await asyncio.sleep(0.1)


async def _close_idle(connections: set[Any], patience: float) -> None:
    """Close connections that have begun no request since the last look, and have none in work."""
    before: dict[Any, Any] = {}
    while True:
        await asyncio.sleep(patience)
        idle = {one: one.cycle for one in connections if one.cycle is None or one.cycle.response_complete}
        for one in idle.keys() & before.keys():
            if idle[one] is before[one]:
                one.transport.close()
        before = idle
