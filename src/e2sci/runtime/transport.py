"""Channels: how frames travel. A WebSocket for real, a pair of queues within one process.

A channel carries whole frames in order and counts the bytes it puts on the wire, WebSocket framing
included. Anything that ends it is a `ChannelClosed`. `Dial` opens a WebSocket to one cloud, with a
key and TLS where asked for.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as websocket_connect
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.uri import WebSocketURI, parse_uri

from e2sci.session.messages import MAX_FRAME, ProtocolError

OPEN_SECONDS = 10.0
HEARTBEAT_SECONDS = 5.0
"""Between an edge's pings. A pong that takes twice as long ends the connection."""
MAX_KEY = 512

# The library logs the headers of a handshake at level DEBUG, the key among them.
_library_log = logging.getLogger("e2sci.edge.websocket")
_library_log.setLevel(logging.INFO)


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


class _Connect(websocket_connect):
    """Opens a WebSocket where the URL says and nowhere else: a key is not for other places."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


@dataclass(frozen=True)
class Dial:
    """Opens channels to the cloud at `url`: a function without arguments.

    `key`: sent as a bearer token, over TLS and to this machine only unless `allow_insecure`; it is
    in no repr and no error. `tls`: for wss://, the system's authorities by default. `heartbeat_s`:
    seconds between pings; without a pong for twice as long the connection is lost. Raises
    ValueError on a URL or a key that can't be used.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    allow_insecure: bool = False
    heartbeat_s: float = HEARTBEAT_SECONDS

    def __post_init__(self) -> None:
        place = _parsed(self.url)
        if not self.heartbeat_s > 0:
            raise ValueError(f"heartbeat_s is {self.heartbeat_s}; expected more than 0 seconds")
        if self.key is None:
            return
        if not (0 < len(self.key) <= MAX_KEY and self.key.isascii() and self.key.isprintable()):
            raise ValueError(
                f"the API key must be 1 to {MAX_KEY} printable ASCII characters, on one line"
            )
        if not (place.secure or is_loopback(place.host) or self.allow_insecure):
            raise ValueError(
                f"{self.url} is not encrypted, so it does not get the API key; use wss://, or "
                "allow_insecure to send it all the same"
            )

    async def __call__(self) -> Channel:
        """Open a channel. Raises ChannelClosed when nobody answers, ProtocolError when trying again
        won't help."""
        secure: dict[str, Any] = {"ssl": self.tls} if self.tls and _parsed(self.url).secure else {}
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else None
        try:
            # Compression would cost time on frames of some 40 bytes that hardly shrink.
            socket = await _Connect(
                self.url,
                compression=None,
                additional_headers=headers,
                max_size=MAX_FRAME,
                open_timeout=OPEN_SECONDS,
                ping_interval=self.heartbeat_s,
                ping_timeout=2 * self.heartbeat_s,
                close_timeout=1,
                proxy=None,
                logger=_library_log,
                **secure,
            )
        except ssl.SSLCertVerificationError as error:
            raise ProtocolError(
                "certificate",
                f"the certificate of {self.url} is not trusted ({error.verify_message}); give its "
                "authority's certificate with --ca",
            ) from None
        except (InvalidURI, ValueError):  # ValueError: a host name that can't be
            raise _no_url(self.url) from None
        except InvalidStatus as error:
            raise self._turned_away(error.response.status_code) from None
        except (InvalidHandshake, EOFError) as error:
            raise ChannelClosed(f"{self.url} answers, but not as an e2sci cloud: {error}") from None
        except TimeoutError:
            raise ChannelClosed(f"no answer from {self.url} within {OPEN_SECONDS:.0f} s") from None
        except OSError as error:
            raise ChannelClosed(f"can't reach {self.url}: {_os_reason(error)}") from None
        return WebSocketChannel(socket)

    def _turned_away(self, status: int) -> Exception:
        """What an HTTP status in place of a WebSocket means."""
        if status in (401, 403):
            fault = "does not accept this API key" if self.key else "wants an API key"
            mend = "check it" if self.key else "set E2SCI_API_KEY, or give --key-file"
            return ProtocolError("unauthorized", f"{self.url} {fault} (HTTP {status}); {mend}")
        if status in (429, 502, 503, 504):
            return ChannelClosed(f"{self.url} is not ready (HTTP {status})")
        return ChannelClosed(f"{self.url} answers, but not as an e2sci cloud: HTTP {status}")


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine, by its name or address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _parsed(url: str) -> WebSocketURI:
    """Raises ValueError, and says nothing of a URL that may hold a password."""
    if "@" in url:
        raise ValueError("a cloud's URL holds no user name or password; set E2SCI_API_KEY instead")
    try:
        return parse_uri(url)
    except (InvalidURI, ValueError):  # ValueError: a port that can't be
        raise _no_url(url) from None


def _no_url(url: str) -> ValueError:
    return ValueError(f"'{url}' is no WebSocket URL; expected ws://host:port or wss://host")


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
        silent = error.sent is not None and "ping timeout" in error.sent.reason
        return "no sign of life for too long" if silent else "the connection broke off"
    return close.reason or f"closed by the other end (code {close.code})"


def _os_reason(error: OSError) -> str:
    """The plain words of a connection error; several addresses are tried, the last one counts."""
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return "nothing listens there"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or error})"
    return error.strerror or str(error) or "the connection broke off"
