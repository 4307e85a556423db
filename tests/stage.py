"""An edge and a cloud on the virtual clock, whose link and devices change while they write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from e2sci.emulation.clock import run
from e2sci.emulation.device import Device, Metered
from e2sci.emulation.link import LinkProfile
from e2sci.emulation.profile import PROFILES, Profile, from_dict
from e2sci.emulation.wire import LinkEnd, link_pair
from e2sci.engines.synthetic import Synthetic, SyntheticConfig
from e2sci.runtime.admission import TIMELESS
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.edge import Edge
from e2sci.runtime.options import Result

PAPER, LAN, WAN = PROFILES["paper"], PROFILES["lan"], PROFILES["wan"]
FAR = replace(PAPER, name="far", link=LinkProfile(500, up_mbps=1, down_mbps=1))


def with_draft(ms: float) -> Profile:
    return from_dict({**PAPER.to_dict(), "name": f"draft-{ms}", "draft": {"ms": ms}})


def drifted(divergence: float) -> SyntheticConfig:
    return SyntheticConfig(divergence=divergence, eos_bias=-9)


GOOD, MIDDLING, BAD = drifted(0.3), drifted(1.0), drifted(4.0)
WRONG = SyntheticConfig(random=True, eos_bias=-9)
AGAIN = 64  # tokens of warm-up


@dataclass
class Story:
    """Requests one after the other on one edge; `times`: of each token, in seconds."""

    results: list[Result]
    times: list[list[float]]

    def rate(self, request: int = -1, since: int = 0, until: int | None = None) -> float:
        times = self.times[request][since:until]
        return (len(times) - 1) / (times[-1] - times[0])


@dataclass
class Stage:
    """What a scene may change: the link and the devices."""

    end: LinkEnd
    at_edge: Device
    at_cloud: Device

    def far(self, rtt_ms: float) -> None:
        self.end._out._delay = self.end._back._delay = rtt_ms / 2e3


def play(
    profile: Profile,
    draft: SyntheticConfig,
    requests: int = 1,
    most: int = 300,
    scene: Callable[[Stage, int], None] | None = None,
    told: Profile | None = None,
    **changes: Any,
) -> Story:
    """`scene(stage, n)` is called behind token n; `told`: what the cloud says of itself."""

    async def bounded() -> Story:
        async with asyncio.timeout(3600):  # else pings would keep a deadlock going
            return await story()

    async def story() -> Story:
        engines = [Metered(Synthetic(c, 1)) for c in (draft, SyntheticConfig(eos_bias=-9))]
        devices = [Device(profile.draft, engines[0]), Device(profile.target, engines[1])]
        end, cloud_end = link_pair(profile.link)
        times = (told or profile).pass_times
        cloud = Cloud(engines[1], times=times, worker=devices[1], limits=TIMELESS)

        async def connect() -> LinkEnd:
            return end

        stage, story = Stage(end, *devices), Story([], [])
        async with cloud:
            serving = asyncio.create_task(cloud.serve(cloud_end))
            async with Edge(connect, engines[0], worker=devices[0]) as edge:
                for number in range(requests):
                    moments: list[float] = []
                    prompt = f"the cat {number}"
                    async for piece in edge.stream(prompt, max_tokens=most, **changes):
                        for _ in piece.commits:
                            moments.append(asyncio.get_running_loop().time())
                            if scene:
                                scene(stage, len(moments))
                        if piece.result:
                            story.results.append(piece.result)
                    story.times.append(moments)
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
        return story

    return run(bounded)
