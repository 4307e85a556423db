"""A channel within one process that behaves like a link: the transport of the virtual clock.

Frames travel through the same `Pipe` arithmetic as in the TCP proxy (emulation.link), but on the
event loop's own time, and nothing is copied into sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque

from e2sci.emulation.link import LinkProfile, Outages, Pipe
from e2sci.runtime.transport import ChannelClosed, framed

_PING = 10  # bytes of a ping frame


class LinkEnd:
    """One end. `masked`: whether its frames carry a client's mask; `sent`: their bytes so far."""

    def __init__(self, out: Pipe, *, masked: bool) -> None:
        self._out = out
        self._masked = masked
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._closed = False
        self.sent: list[int] = []
        self._flying: deque[bytes | None] = deque()
        self.other: LinkEnd

    async def send(self, frame: bytes) -> int:
        if self._closed:
            raise ChannelClosed("closed")
        size = framed(len(frame), masked=self._masked)
        self.sent.append(size)
        self._deliver(frame, size)
        return size

    async def receive(self) -> bytes | str:
        frame = None if self._closed else await self._inbox.get()
        if frame is None:
            self._closed = True
            raise ChannelClosed("closed by the other end")
        return frame

    async def ping(self) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        there = self._out.send(_PING, began)
        back = self.other._out.send(_PING, there)
        await asyncio.sleep(back - began)
        return loop.time() - began

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._inbox.put_nowait(None)
            self._deliver(None, framed(2, masked=self._masked))

    def _deliver(self, frame: bytes | None, size: int) -> None:
        # Frames may arrive at the same time, and an event loop keeps no order among equals.
        loop = asyncio.get_running_loop()
        self._flying.append(frame)
        loop.call_at(self._out.send(size, loop.time()), self._land)

    def _land(self) -> None:
        self.other._inbox.put_nowait(self._flying.popleft())


def link_pair(profile: LinkProfile) -> tuple[LinkEnd, LinkEnd]:
    """The edge's and the cloud's end of a link. Its clock starts with the event loop's.

    Raises ValueError for outage mode "cut", which needs connections that can be lost: the proxy's.
    """
    if profile.outages and profile.outage_mode == "cut":
        raise ValueError('outages of mode "cut" are emulated by `e2sci link`; use "stall" here')
    outages = Outages(profile.outages)
    edge = LinkEnd(Pipe(profile, "up", outages), masked=True)
    cloud = LinkEnd(Pipe(profile, "down", outages), masked=False)
    edge.other, cloud.other = cloud, edge
    return edge, cloud
