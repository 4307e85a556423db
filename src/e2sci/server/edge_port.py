"""An edge's application on a port: uvicorn, with bounds it does not have itself.

`listening` serves; `Port.drain` ends it kindly: requests under way go on for a while, and what is
left then is told that the server stops. Connections are bounded in number, and the head of each
request must come in time; the body's bounds are `edge_front`'s.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from e2sci.server.edge_front import HEAD_BYTES

CONNECTIONS = 256
"""TCP connections at once; the next one is dropped."""
HEAD_SECONDS = 10.0
"""How long a request's line and headers may take to come."""
IDLE_SECONDS = 30
"""How long a connection is kept for a next request."""
_LAST_SECONDS = 1.0  # for saying that the server stops


class Port(Server):
    """A running server; `up` is set once it listens."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them to the process."""
        yield

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self.server_state.tasks)

    async def drain(self, seconds: float, at_once: asyncio.Event) -> None:
        """Take no new request and let those under way end, for `seconds` or until `at_once`."""
        self.should_exit = True
        hurry = asyncio.create_task(at_once.wait())
        waits = {asyncio.create_task(self._emptied()), hurry}
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()

    async def close(self) -> None:
        """End what is left: requests are told, then connections are cut."""
        self.should_exit = True
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _emptied(self) -> None:
        while self.busy:
            await asyncio.wait(self.server_state.tasks)


@asynccontextmanager
async def listening(app: ASGIApp, bound: socket.socket) -> AsyncIterator[Port]:
    """Serve `app` on a socket that is bound already, and closed in the end."""
    config = Config(
        app,
        http=Socket,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=IDLE_SECONDS,
    )
    port = Port(config)
    running = asyncio.create_task(port.serve([bound]))
    try:
        await port.up.wait()
        yield port
    finally:
        await port.close()
        await running


class Socket(H11Protocol):
    """A TCP connection whose requests' heads are waited for HEAD_SECONDS."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._due is not None:
            self._due.cancel()

    def _watch(self) -> None:
        """Set the timer while a head is on its way."""
        if self._due is None and self._headless:
            self._due = self.loop.call_later(HEAD_SECONDS, self._time_is_up)
        elif self._due is not None and not self._headless:
            self._due.cancel()
            self._due = None

    @property
    def _headless(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _time_is_up(self) -> None:
        self._due = None
        if self._headless:
            self.transport.abort()
