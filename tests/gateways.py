"""A gateway joined in memory to an edge, in front of stand-ins for vLLM."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from e2sci.engines.base import Fingerprint
from e2sci.engines.remote import Server, info_of
from e2sci.engines.vllm_stream import Streaming
from e2sci.runtime.edge import Edge
from e2sci.runtime.gateway import Gateway
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.transport import memory_pair
from e2sci.vllm_plugin.wire import Sender
from live import draft, until
from remote_servers import DESCRIPTION

TIMES = PassTimes(((1, 1.0), (7, 1.0)))


def gateway(urls, addresses, *, times=TIMES, slots=8, about=DESCRIPTION, **options) -> Gateway:
    """A gateway in front of the servers at `urls`, whose proposers listen at `addresses`."""
    first = Server(urls[0], None, 5)
    served = first.served(None)
    first.close()
    info = info_of(about, served, None)
    return Gateway(
        [Streaming(url, served.id) for url in urls],
        Sender(addresses),
        info,
        Fingerprint([about.tokenizer.name(i) for i in range(info.real_vocab)]),
        slots=slots,
        times=times,
        **options,
    )


@asynccontextmanager
async def edge_at(*services, near=None, client=None, **options):
    """An edge joined in memory to `services`; at the end none may hold a request."""
    tasks = set()

    def dial(service):
        async def connect():
            here, there = memory_pair()
            tasks.add(asyncio.create_task(service.serve(there, client)))
            return here

        return connect

    async with Edge([dial(s) for s in services], near or draft(), **options) as edge:
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
