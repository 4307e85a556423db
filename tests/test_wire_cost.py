"""What a draft token costs on the uplink, counted at a real socket.

Ids of the synthetic vocabulary are smaller than real ones; frames with real ids are measured in
test_messages.
"""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from e2sci.emulation.link import LinkProfile
from e2sci.emulation.proxy import Link
from e2sci.engines.synthetic import EOS
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.transport import framed
from e2sci.server.cloud_app import listening
from e2sci.session.messages import Open, Window, encode_message
from live import TIMES, Edge, draft, target, until

ENDLESS = {"logit_bias": {EOS: -100.0}, "max_tokens": 60}


@asynccontextmanager
async def counted():
    """An edge, the link it talks through, and the messages it says."""
    said = []
    async with Cloud(target(), times=TIMES) as cloud, listening(cloud, "127.0.0.1", 0) as port:
        link = Link("127.0.0.1", port, LinkProfile(1))
        async with link, Edge(link.url(), draft()) as edge:
            await edge.connect()
            send = edge._known.connections[0].send

            def listen(message):
                said.append(message)
                return send(message)

            edge._known.connections[0].send = listen
            yield edge, link, said


async def carried(link, at_least):
    """Bytes up, when those just sent have passed the link."""
    await until(lambda: link.delivered["up"] >= at_least)
    return link.delivered["up"]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"mode": "sync"}, 12),
        ({"accept": "strict"}, 12),
        ({"accept": "strict", "temperature": 1.0}, 12),
        ({"accept": "typical"}, 12),
        ({"accept": "elastic", "measure": "regret"}, 12),
        ({"accept": "elastic", "measure": "js"}, 64),
        ({"accept": "elastic", "measure": "js", "mode": "sync"}, 64),
        ({"accept": "fuzzy"}, 64),
        ({"accept": "rejection", "temperature": 1.0}, 64),
    ],
)
async def test_bytes_a_draft_token(options, most):
    async with counted() as (edge, link, said):
        before = link.delivered["up"]
        await edge.generate("hello", mode="cloud", **ENDLESS)
        opening = link.delivered["up"] - before
        assert [type(m) for m in said] == [Open]
        said.clear()
        before = link.delivered["up"]
        result = await edge.generate("hello", window=8, fill=False, **options, **ENDLESS)
        up = await carried(link, before + result.stats.uplink_bytes) - before
        windows = [m for m in said if isinstance(m, Window)]
        assert len(windows) == result.stats.windows
        sent = sum(_count(m.ids) for m in windows)
        assert 0 < sent <= result.stats.drafted
        assert (up - opening) / sent <= most


async def test_the_figures_are_what_was_on_the_wire():
    async with counted() as (edge, link, _):
        for options in ({"mode": "cloud"}, {"window": 3}, {"accept": "fuzzy", "trace": True}):
            up, down = link.delivered["up"], link.delivered["down"]
            stats = (await edge.generate("hello", **options, **ENDLESS)).stats
            assert await carried(link, up + stats.uplink_bytes) == up + stats.uplink_bytes
            # The closing Finished is no longer waited for when the last token says as much.
            assert 0 <= link.delivered["down"] - down - stats.downlink_bytes <= 12


async def test_more_in_a_window_costs_less_a_token():
    async with counted() as (edge, _, said):
        costs = []
        for window in (1, 4, 16):
            said.clear()
            await edge.generate("hello", mode="sync", window=window, fill=False, **ENDLESS)
            windows = [m for m in said if isinstance(m, Window)]
            size = sum(framed(len(encode_message(m)), masked=True) for m in windows)
            costs.append(size / sum(_count(m.ids) for m in windows))
        assert costs == sorted(costs, reverse=True)


def _count(ids: bytes) -> int:
    """Ids in a packed list: each ends with a byte below 128."""
    return sum(byte < 128 for byte in ids)
