"""One request on the virtual clock: the runtime that serves users, on emulated devices and a link.

`write` builds an edge and a cloud around two engines, lets them write one answer, and returns what
came of it with what it cost. Nothing here decides anything: the method's options go to `Edge`, the
profile's times to the devices, and the rest is the product itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from e2sci.emulation.clock import run
from e2sci.emulation.device import Device, Metered
from e2sci.emulation.link import LinkProfile
from e2sci.emulation.profile import Profile
from e2sci.emulation.wire import LinkEnd, link_pair
from e2sci.engines.base import Engine
from e2sci.evaluation.methods import Method
from e2sci.runtime.admission import TIMELESS
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.edge import Edge
from e2sci.runtime.options import Result
from e2sci.runtime.transport import Channel


@dataclass(frozen=True)
class Outcome:
    """An answer and its cost: seconds each device computed, joules each drew."""

    result: Result
    edge_busy_s: float
    cloud_busy_s: float
    edge_joules: float
    cloud_joules: float


def write(
    method: Method, profile: Profile, draft: Engine, target: Engine, prompt: str, max_tokens: int
) -> Outcome:
    """Let `method` answer `prompt` on a virtual clock of its own. Raises EdgeError, ValueError."""
    return run(lambda: _write(method, profile, draft, target, prompt, max_tokens))


async def _write(
    method: Method, profile: Profile, draft: Engine, target: Engine, prompt: str, most: int
) -> Outcome:
    link = LinkProfile(0) if method.colocated else profile.link
    edge_engine, cloud_engine = Metered(draft), Metered(target)
    at_edge = Device(profile.colocated if method.colocated else profile.draft, edge_engine)
    at_cloud = Device(profile.target, cloud_engine)
    cloud = Cloud(
        cloud_engine,
        times=profile.pass_times,
        worker=at_cloud,
        session=method.session,
        limits=TIMELESS,
    )
    async with _served(cloud, link) as end, Edge(_always(end), edge_engine, worker=at_edge) as edge:
        if method.options.get("mode") != "draft":
            await edge.connect()
        result = await edge.generate(prompt, max_tokens=most, **method.options)
    busy = at_edge.busy_s, at_cloud.busy_s
    if method.colocated:
        return _colocated(result, profile, busy, opening=end.sent[1])
    seconds = result.stats.seconds
    return Outcome(
        result,
        *busy,
        edge_joules=_joules(at_edge, busy[0], seconds),
        cloud_joules=_joules(at_cloud, busy[1], seconds),
    )


def _colocated(
    result: Result, profile: Profile, busy: tuple[float, float], opening: int
) -> Outcome:
    """Both models ran in the cloud; the user is a round trip away and sends only the prompt."""
    stats, away = result.stats, profile.link.rtt_ms / 1000
    seconds = stats.seconds + away
    moved = replace(
        stats,
        seconds=seconds,
        ttft_s=None if stats.ttft_s is None else stats.ttft_s + away,
        tokens_per_s=len(result.token_ids) / seconds,
        uplink_bytes=opening,
    )
    both = profile.target.watts * busy[1] + profile.colocated.watts * busy[0]
    waiting = profile.draft.idle_watts * seconds
    return Outcome(replace(result, stats=moved), 0.0, sum(busy), waiting, both)


def _joules(device: Device, busy_s: float, seconds: float) -> float:
    watts, idle = device.profile.watts, device.profile.idle_watts
    return watts * busy_s + idle * max(0.0, seconds - busy_s)


@asynccontextmanager
async def _served(cloud: Cloud, link: LinkProfile) -> AsyncIterator[LinkEnd]:
    """The edge's end of a link to `cloud`."""
    edge_end, cloud_end = link_pair(link)
    async with cloud:
        serving = asyncio.create_task(cloud.serve(cloud_end))
        try:
            yield edge_end
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


def _always(end: LinkEnd) -> Callable[[], Awaitable[Channel]]:
    async def connect() -> Channel:
        return end

    return connect
