"""A TCP proxy that imposes a link's arithmetic (`emulation.link`) on sockets, in real time.

    client ──► take_in ──► in flight, until its arrival ──► hand_out ──► target

and the same back. All connections share the link's two pipes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self, get_args

from e2sci.emulation.link import Direction, LinkProfile, Outages, Pipe

READ = 1 << 13
"""Bytes read at once at most: a chunk arrives as a whole, so this is the grain of slow links."""

IN_FLIGHT = 256
"""Chunks (2 MiB at most) a connection may have in flight per direction; beyond, reading stops."""

MAX_CONNECTIONS = 512
CONNECT_S = 10.0

log = logging.getLogger(__name__)


class Link:
    """A TCP proxy on (host, port) that reaches (target_host, target_port) over a `profile` link.

    "Up" is from the client to the target. Use it as an async context manager; entering raises
    OSError when the address can't be listened on, leaving resets what is still open. A connection
    is refused (accepted and reset at once) when the target doesn't answer, during a "cut" outage,
    and beyond MAX_CONNECTIONS. `delivered` counts payload bytes per direction, `connections` those
    that reached the target, `refused` the others.
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        profile: LinkProfile,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.profile = profile
        self.host = host
        self.port = port
        self.delivered: dict[Direction, int] = {"up": 0, "down": 0}
        self.connections = 0
        self.refused = 0
        self._target = target_host, target_port
        spans = Outages(profile.outages)
        self._cuts = spans if profile.outage_mode == "cut" else Outages()
        self._outages = spans if profile.outage_mode == "stall" else Outages()
        self._pipes = {way: Pipe(profile, way, self._outages) for way in get_args(Direction)}
        self._closing = False
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        # asyncio sets TCP_NODELAY on every TCP socket, ours to the target included.
        self._server = await asyncio.start_server(self._accept, self.host, self.port, limit=READ)
        self.port = self._server.sockets[0].getsockname()[1]
        self._cutter = self._loop.create_task(self._cut_on_schedule())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        self._cutter.cancel()
        self._server.close()
        self.cut()
        await asyncio.gather(self._cutter, *self._open, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def open(self) -> int:
        """Connections open now."""
        return len(self._open)

    def url(self, scheme: str = "ws") -> str:
        """The proxy's address as a URL without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"

    def now(self) -> float:
        """Seconds since the link's start."""
        return self._loop.time() - self._started

    def cut(self) -> None:
        """Reset all connections now; what is in flight is lost. New ones are welcome."""
        for task, client in self._open.items():
            task.cancel()  # which resets the target's end
            _reset(client)
        for pipe in self._pipes.values():
            pipe.flush()

    def stall(self, seconds: float) -> None:
        """Let nothing through for `seconds` from now; bytes wait, connections stay."""
        self._outages.add(self.now(), seconds)

    def hand_in(self, direction: Direction, size: int) -> float:
        """Put a chunk on the way now; its arrival in up-time."""
        return self._pipes[direction].carry(size, self._outages.uptime(self.now()))

    async def reach(self, uptime: float) -> None:
        """Sleep until the link's up-time is `uptime`."""
        while True:
            left = self._outages.when(uptime) - self.now()
            if left <= 0:
                return
            await asyncio.sleep(left)  # and look again: a stall may have come in between

    async def _cut_on_schedule(self) -> None:
        for start, _ in self._cuts.spans:
            await asyncio.sleep(start - self.now())
            self.cut()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        full = len(self._open) >= MAX_CONNECTIONS
        if full or self._closing or self._cuts.down(self.now()):
            self.refused += 1
            _reset(writer)
            return
        task = self._loop.create_task(self._serve(reader, writer))
        self._open[task] = writer
        task.add_done_callback(self._open.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until both directions have ended or either end is lost."""
        try:
            async with asyncio.timeout(CONNECT_S):
                far_reader, far_writer = await asyncio.open_connection(*self._target, limit=READ)
        except OSError as error:
            self.refused += 1
            log.warning("refused a connection: %s:%d: %s", *self._target, error or "no answer")
            _reset(writer)
            return
        self.connections += 1
        flows = _Flow(self, "up", reader, far_writer), _Flow(self, "down", far_reader, writer)
        try:
            async with asyncio.TaskGroup() as group:
                for flow in flows:
                    group.create_task(flow.take_in())
                    group.create_task(flow.hand_out())
            for end in (writer, far_writer):
                end.close()
                await end.wait_closed()
        except* OSError:
            pass  # either end was lost: so is the other
        finally:
            for end in (writer, far_writer):
                _reset(end)


@dataclass
class _Flow:
    """One direction of one connection: chunks come in, wait their time, and go out in order."""

    link: Link
    direction: Direction
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    in_flight: asyncio.Queue[tuple[float, bytes]] = field(
        default_factory=lambda: asyncio.Queue(IN_FLIGHT)
    )

    async def take_in(self) -> None:
        """Read until the sender's end of stream, which travels as an empty chunk."""
        data = b"-"
        while data:
            data = await self.reader.read(READ)
            await self.in_flight.put((self.link.hand_in(self.direction, len(data)), data))

    async def hand_out(self) -> None:
        """Write each chunk when it arrives."""
        while True:
            arrival, data = await self.in_flight.get()
            await self.link.reach(arrival)
            if not data:
                self.writer.write_eof()
                return
            self.writer.write(data)
            self.link.delivered[self.direction] += len(data)
            await self.writer.drain()


def _reset(end: asyncio.StreamWriter) -> None:
    """Drop a connection so that its peer sees a reset, not an orderly end; no-op once closed."""
    with suppress(OSError):
        linger = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
        sock = end.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    end.transport.abort()
