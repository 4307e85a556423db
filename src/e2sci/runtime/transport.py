"""Channels: how frames travel. A WebSocket for real, a pair of queues within one process.

A channel carries whole frames in order and counts the bytes it puts on the wire, WebSocket framing
included. Anything that ends it is a `ChannelClosed`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as websocket_connect
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from e2sci.session.messages import MAX_FRAME

OPEN_SECONDS = 10.0
_PING_SECONDS = 20.0


class ChannelClosed(Exception):
    """The connection is gone, or never came about; the message says why."""


class Channel(Protocol):
    """A two-way channel of frames."""

    async def send(self, frame: bytes) -> int:
        """Send one frame; returns its bytes on the wire. Raises ChannelClosed."""
        ...

    async def receive(self) -> bytes | str:
        """The next frame (text frames as str, for the caller to refuse). Raises ChannelClosed."""
        ...

    async def ping(self) -> float:
        """Seconds of a round trip below the protocol. Raises ChannelClosed."""
        ...

    async def close(self) -> None: ...


def framed(payload: int, *, masked: bool) -> int:
    """Bytes of a WebSocket frame (RFC 6455 §5.2) around `payload` bytes; clients mask."""
    header = 2 if payload < 126 else 4 if payload < 65536 else 10
    return header + (4 if masked else 0) + payload


class WebSocketChannel:
    """A channel over an open WebSocket."""

    def __init__(self, socket: ClientConnection | ServerConnection) -> None:
        self._socket = socket
        self._masked = isinstance(socket, ClientConnection)

    async def send(self, frame: bytes) -> int:
        try:
            await self._socket.send(frame)
        except ConnectionClosed as error:
            raise ChannelClosed(_reason(error)) from None
        return framed(len(frame), masked=self._masked)

    async def receive(self) -> bytes | str:
        try:
            return await self._socket.recv()
        except ConnectionClosed as error:
            raise ChannelClosed(_reason(error)) from None

    async def ping(self) -> float:
        try:
            return await (await self._socket.ping())
        except ConnectionClosed as error:
            raise ChannelClosed(_reason(error)) from None

    async def close(self) -> None:
        await self._socket.close()


async def connect(url: str) -> WebSocketChannel:
    """Open a WebSocket. Raises ChannelClosed when nobody answers, ValueError on a bad URL."""
    try:
        # Compression would cost time on frames of some 40 bytes that hardly shrink.
        socket = await websocket_connect(
            url,
            compression=None,
            max_size=MAX_FRAME,
            open_timeout=OPEN_SECONDS,
            ping_interval=_PING_SECONDS,
            close_timeout=1,
            proxy=None,
        )
    except (InvalidURI, ValueError):  # ValueError: a port or a host name that can't be
        raise ValueError(f"'{url}' is no WebSocket URL; expected ws://host:port") from None
    except (InvalidHandshake, EOFError) as error:
        raise ChannelClosed(f"{url} answers, but not as an e2sci cloud: {error}") from None
    except TimeoutError:
        raise ChannelClosed(f"no answer from {url} within {OPEN_SECONDS:.0f} s") from None
    except OSError as error:
        raise ChannelClosed(f"can't reach {url}: {_os_reason(error)}") from None
    return WebSocketChannel(socket)


class MemoryChannel:
    """One end of an in-process channel. `masked`: whether its frames carry a client's mask."""

    def __init__(
        self,
        inbox: asyncio.Queue[bytes | None],
        outbox: asyncio.Queue[bytes | None],
        *,
        masked: bool = True,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._masked = masked
        self._closed = False

    async def send(self, frame: bytes) -> int:
        if self._closed:
            raise ChannelClosed("closed")
        size = framed(len(frame), masked=self._masked)
        self._deliver(frame, size)
        return size

    async def receive(self) -> bytes | str:
        frame = None if self._closed else await self._inbox.get()
        if frame is None:
            self._closed = True
            raise ChannelClosed("closed by the other end")
        return frame

    async def ping(self) -> float:
        await asyncio.sleep(0)
        return 0.0

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._deliver(None, framed(2, masked=self._masked))
            self._inbox.put_nowait(None)

    def _deliver(self, frame: bytes | None, size: int) -> None:
        """Hand a frame of `size` bytes on the wire to the other end; None: this end has closed."""
        self._outbox.put_nowait(frame)


def memory_pair() -> tuple[MemoryChannel, MemoryChannel]:
    """Two ends of one channel."""
    a: asyncio.Queue[bytes | None] = asyncio.Queue()
    b: asyncio.Queue[bytes | None] = asyncio.Queue()
    return MemoryChannel(a, b), MemoryChannel(b, a)


def _reason(error: ConnectionClosed) -> str:
    close = error.rcvd
    if close is None:
        return "the connection broke off"
    return close.reason or f"closed by the other end (code {close.code})"


def _os_reason(error: OSError) -> str:
    """The plain words of a connection error; several addresses are tried, the last one counts."""
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return "nothing listens there"
    return error.strerror or str(error)
