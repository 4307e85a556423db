"""A gateway joined in memory to an edge, in front of stand-ins for vLLM."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from e2sci.emulation.link import LinkProfile
from e2sci.emulation.wire import link_pair
from e2sci.runtime.gateway import Gateway, reach
from e2sci.runtime.passes import PassTimes
from live import Edge, draft, pair, until
from remote_servers import DESCRIPTION

LONG = {"max_tokens": 60}
PROMPT = "hello"
DIRECT = LinkProfile(rtt_ms=0)
TIMES = PassTimes(((1, 1.0), (7, 1.0)))


def gateway(urls, addresses, *, times=TIMES, slots=8, about=DESCRIPTION, **options) -> Gateway:
    """A gateway in front of the servers at `urls`, whose proposers listen at `addresses`."""
    return Gateway(reach(urls, addresses, about), slots=slots, times=times, **options)


@asynccontextmanager
async def edge_at(*services, near=None, client=None, link=DIRECT, **options):
    """An edge joined to `services` by a `link`; at the end none may hold a request. `edge.links`:
    its ends of the channels opened so far."""
    tasks, links = set(), []

    def dial(service):
        async def connect():
            here, there = link_pair(link)
            links.append(here)
            tasks.add(asyncio.create_task(service.serve(there, client)))
            return here

        return connect

    async with Edge([dial(s) for s in services], near or draft(), **options) as edge:
        edge.links = links
        yield edge
    await asyncio.gather(*tasks)
    for service in services:
        await until(lambda service=service: service.desk.empty.is_set())


@asynccontextmanager
async def joined(*servers, near=None, client=None, patience=15.0, **options):
    """An edge at a gateway (`edge.cloud`) in front of stand-ins."""
    addresses = [server.address for server in servers if server.address]
    async with (
        gateway([server.url for server in servers], addresses, **options) as cloud,
        edge_at(cloud, near=near, client=client, patience=patience) as edge,
    ):
        edge.cloud = cloud
        yield edge


async def expected(prompt: str = PROMPT, **options) -> list[int]:
    """The text of a built-in cloud."""
    async with pair() as edge:
        return (await edge.generate(prompt, mode="cloud", **{**LONG, **options})).token_ids


async def drafted(edge, vllm, **options):
    """A result of which several tokens came in one step: a new socket takes a moment to join."""
    for _ in range(100):
        got = await edge.generate(PROMPT, **{**LONG, **options})
        if max(vllm.steps[-1]) > 1:
            return got
    raise AssertionError("no draft was ever accepted")
