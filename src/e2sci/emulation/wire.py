"""A channel within one process that behaves like a link: the transport of the virtual clock.

Frames travel through the same `Pipe` arithmetic as in the TCP proxy (emulation.proxy), but on the
event loop's own time, and nothing is copied into sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque

from e2sci.emulation.link import LinkProfile, Outages, Pipe
from e2sci.runtime.transport import MemoryChannel

_PING = 10  # bytes of a ping frame
_Queue = asyncio.Queue[bytes | None]


class LinkEnd(MemoryChannel):
    """One end. `out`, `back`: the pipes of its frames and of the other's; `sent`: bytes of each
    frame so far."""

    def __init__(self, inbox: _Queue, outbox: _Queue, out: Pipe, back: Pipe, *, masked: bool):
        super().__init__(inbox, outbox, masked=masked)
        self.sent: list[int] = []
        self._out, self._back = out, back
        self._flying: deque[bytes | None] = deque()

    async def ping(self) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        there = self._out.send(_PING, began)
        back = self._back.send(_PING, there)
        await asyncio.sleep(back - began)
        return loop.time() - began

    def _deliver(self, frame: bytes | None, size: int) -> None:
        # Frames may arrive at the same time, and an event loop keeps no order among equals.
        loop = asyncio.get_running_loop()
        if frame is not None:
            self.sent.append(size)
        self._flying.append(frame)
        loop.call_at(self._out.send(size, loop.time()), self._land)

    def _land(self) -> None:
        self._outbox.put_nowait(self._flying.popleft())


def link_pair(profile: LinkProfile) -> tuple[LinkEnd, LinkEnd]:
    """The edge's and the cloud's end of a link. Its clock starts with the event loop's.

    Raises ValueError for outage mode "cut", which needs connections that can be lost: the proxy's.
    """
    if profile.outages and profile.outage_mode == "cut":
        raise ValueError('outages of mode "cut" are emulated by `e2sci link`; use "stall" here')
    outages = Outages(profile.outages)
    up, down = Pipe(profile, "up", outages), Pipe(profile, "down", outages)
    edge: _Queue = asyncio.Queue()
    cloud: _Queue = asyncio.Queue()
    return (
        LinkEnd(edge, cloud, up, down, masked=True),
        LinkEnd(cloud, edge, down, up, masked=False),
    )
