"""The cloud on a port: a WebSocket server around `runtime.cloud`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from websockets.asyncio.server import Server, ServerConnection, serve

from e2sci.runtime.cloud import Cloud
from e2sci.runtime.transport import OPEN_SECONDS, WebSocketChannel
from e2sci.session.messages import MAX_FRAME


@asynccontextmanager
async def listening(cloud: Cloud, host: str, port: int) -> AsyncIterator[int]:
    """Serve `cloud` (entered already) on host:port; yields the port. Raises OSError."""

    async def handle(socket: ServerConnection) -> None:
        await cloud.serve(WebSocketChannel(socket))

    server: Server = await serve(
        handle,
        host,
        port,
        compression=None,
        max_size=MAX_FRAME,
        open_timeout=OPEN_SECONDS,
        close_timeout=1,
        server_header=None,
    )
    async with server:
        yield server.sockets[0].getsockname()[1]


async def until_signalled() -> None:
    """Return on SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # not on Windows, where Ctrl-C still interrupts
            loop.add_signal_handler(number, stop.set)
    await stop.wait()
