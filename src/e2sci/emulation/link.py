"""A network link: its arithmetic, and a TCP proxy that imposes it in real time.

Each direction is a *pipe*. A chunk of n bytes handed in at t leaves once the chunks before it
have left, and arrives after the propagation delay; chunks never overtake each other:

    departure = max(t, previous departure) + n / bandwidth
    arrival   = max(departure + (RTT ± jitter) / 2, previous arrival)

An outage stops the link's own clock, its *up-time*: nothing leaves or arrives meanwhile, and
afterwards everything goes on as if the outage had taken no time, never faster than the bandwidth.
The formula above is computed in up-time; `Outages` translates. With outage mode "cut" connections
die instead of waiting, so there the pipes know no outages.

`Outages` and `Pipe` read no clock and never sleep; `Link` is the same on sockets. All connections
share the link's two pipes. Only payload bytes count; packet headers, loss and TCP's own opening
handshake are not emulated.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

Direction = Literal["up", "down"]
OutageMode = Literal["stall", "cut"]

READ = 1 << 13
"""Bytes read at once at most: a chunk arrives as a whole, so this is the grain of slow links."""

IN_FLIGHT = 256
"""Chunks (2 MiB at most) a connection may have in flight per direction; beyond, reading stops."""

MAX_CONNECTIONS = 512
CONNECT_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkProfile:
    """How a link behaves. Raises ValueError naming the field that is out of range.

    `rtt_ms` ≥ 0, split evenly over the directions; `jitter_ms` in 0 … rtt_ms: the round trip
    varies uniformly by ± this much; `up_mbps`, `down_mbps` > 0 in Mbit/s (10⁶ bits), None or inf
    for unlimited; `outages`: (start, duration) in seconds from the link's start; `outage_mode`:
    "stall" (bytes wait) or "cut" (connections are reset, new ones refused); `seed`: of the jitter.
    """

    rtt_ms: float
    jitter_ms: float = 0.0
    up_mbps: float | None = None
    down_mbps: float | None = None
    outages: Sequence[tuple[float, float]] = ()
    outage_mode: OutageMode = "stall"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rtt_ms < math.inf:
            raise ValueError(f"rtt_ms must be 0 or more, not {self.rtt_ms:g}")
        if not 0 <= self.jitter_ms <= self.rtt_ms:
            raise ValueError(
                f"jitter_ms must lie between 0 and rtt_ms ({self.rtt_ms:g}), not {self.jitter_ms:g}"
            )
        for name in ("up_mbps", "down_mbps"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} must be more than 0 (or unlimited), not {rate:g}")
            object.__setattr__(self, name, None if rate == math.inf else rate)
        object.__setattr__(self, "outages", tuple((s, d) for s, d in self.outages))
        for start, duration in self.outages:
            if not (0 <= start < math.inf and 0 < duration < math.inf):
                raise ValueError(
                    f"an outage lasts some time from 0 s on, not {start:g}:{duration:g}"
                )
        if self.outage_mode not in get_args(OutageMode):
            raise ValueError(f'outage_mode must be "stall" or "cut", not {self.outage_mode!r}')

    def seconds_per_byte(self, direction: Direction) -> float:
        """Serialisation time of one byte; 0 when unlimited."""
        rate = self.up_mbps if direction == "up" else self.down_mbps
        return 0.0 if rate is None else 8e-6 / rate


LINKS = {
    "paper": LinkProfile(40, up_mbps=10, down_mbps=50),
    "wan": LinkProfile(100, up_mbps=2, down_mbps=20),
    "slow-edge": LinkProfile(40, up_mbps=10, down_mbps=50),
    "fast-cloud": LinkProfile(40, up_mbps=10, down_mbps=50),
    "lan": LinkProfile(2, up_mbps=1000, down_mbps=1000),
    "mobile": LinkProfile(60, jitter_ms=20, up_mbps=1, down_mbps=10),
}
"""The links of the named device-and-link profiles."""


class Outages:
    """When a link is down, and its up-time: the clock that stands still meanwhile.

    Spans are (start, duration) in seconds and may overlap.
    """

    def __init__(self, spans: Sequence[tuple[float, float]] = ()) -> None:
        self.spans: list[tuple[float, float]] = []  # (start, end), ascending, disjoint
        for start, duration in spans:
            self.add(start, duration)

    def add(self, start: float, duration: float) -> None:
        """Take the link down for `duration` seconds from `start`."""
        end, apart = start + duration, []
        for span in self.spans:
            if span[1] < start or span[0] > end:
                apart.append(span)
            else:
                start, end = min(start, span[0]), max(end, span[1])
        self.spans = sorted([*apart, (start, end)])

    def down(self, now: float) -> bool:
        return any(start <= now < end for start, end in self.spans)

    def uptime(self, now: float) -> float:
        """Seconds the link has been up until `now`."""
        lost, least = 0.0, -math.inf
        for start, end in self.spans:
            if now < start:
                break
            least = start - lost
            if now < end:
                return least
            lost += end - start
        return max(now - lost, least)  # rounding must not take us back before the outage

    def when(self, uptime: float) -> float:
        """The time at which the up-time reaches `uptime`: never within an outage."""
        lost, least = 0.0, -math.inf
        for start, end in self.spans:
            if uptime < start - lost:
                break
            lost += end - start
            least = end
        return max(uptime + lost, least)


class Pipe:
    """One direction of a link: tells when chunks arrive. Times are seconds from the link's start.

    `outages` defaults to those the profile stalls for; give both directions the same object when
    outages are added later.
    """

    def __init__(
        self, profile: LinkProfile, direction: Direction, outages: Outages | None = None
    ) -> None:
        if outages is None:
            outages = Outages(profile.outages if profile.outage_mode == "stall" else ())
        self.outages = outages
        self._delay = profile.rtt_ms / 2e3
        self._jitter = profile.jitter_ms / 2e3
        self._per_byte = profile.seconds_per_byte(direction)
        self._random = random.Random(f"{profile.seed} {direction}")
        self._free = self._last = -math.inf  # up-time of the previous departure and arrival

    def send(self, size: int, now: float) -> float:
        """When a chunk of `size` bytes handed in at `now` arrives, by the outages known so far."""
        arrival = self.outages.when(self.carry(size, self.outages.uptime(now)))
        return max(arrival, now)  # rounding must not make it arrive before it is sent

    def carry(self, size: int, uptime: float) -> float:
        """`send` in up-time on both sides: stays right when outages are added later."""
        self._free = max(self._free, uptime) + size * self._per_byte
        delay = self._delay + self._random.uniform(-self._jitter, self._jitter)
        self._last = max(self._last, self._free + delay)
        return self._last

    def flush(self) -> None:
        """Forget what is queued and in flight: it was lost."""
        self._free = self._last = -math.inf


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
