"""Limits: their ranges, rates on average, and what a client may hold."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2sci.decoding.distribution import pack_ids
from e2sci.runtime.admission import Bucket, Client, Ledger, Limits
from e2sci.runtime.service import _Connection
from e2sci.runtime.transport import memory_pair
from e2sci.session.messages import Opened, ProtocolError, Window
from live import Edge, LiveCloud, Watched, draft, pair, raw_client
from world import PROMPT, opening


@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        ("waiting", -1, False),
        ("waiting", 0, True),
        ("unread", 0, False),
        ("unread", 1, True),
        ("hello_s", 0.0, False),
        ("hello_s", 0.1, True),
        ("idle_s", -1.0, False),
        ("idle_s", None, True),
        ("messages_per_s", 0.0, False),
        ("quiet_s", float("nan"), False),
    ],
)
def test_ranges(name, value, fine):
    if fine:
        assert getattr(Limits(**{name: value}), name) == value
    else:
        with pytest.raises(ValueError, match=f"{name} is {value}; expected"):
            Limits(**{name: value})


@given(
    st.floats(0.1, 1000),
    st.floats(1, 1000),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 100)), max_size=40),
)
def test_a_bucket_keeps_the_rate_on_average(rate, size, steps):
    """Whoever takes only while something is left takes, in any time, at most what came in then,
    what the bucket holds, and once more than there was."""
    now, taken, most = 0.0, 0.0, max((amount for _, amount in steps), default=0.0)
    bucket = Bucket(rate, size, now)
    for pause, amount in steps:
        now += pause
        if bucket.left(now) > 0:
            bucket.take(amount, now)
            taken += amount
        assert taken <= size + rate * now + most + 1e-6


def test_a_bucket_below_at_and_above_what_it_holds():
    bucket = Bucket(rate=10, size=100, now=0.0)
    bucket.take(99, 0.0)
    assert bucket.wait(0.0) == 0
    bucket.take(1, 0.0)
    assert bucket.wait(0.0) == 0
    bucket.take(5, 0.0)
    assert bucket.wait(0.0) == pytest.approx(0.5)
    assert bucket.wait(0.5) == 0
    assert bucket.left(1000.0) == 100


def test_requests_are_counted_by_client():
    ledger = Ledger(lambda: 0.0)
    one, two = Client("one", sessions=1), Client("two", sessions=1)
    ledger.enter(one)
    ledger.enter(two)
    with pytest.raises(ProtocolError, match="one has 1 requests open"):
        ledger.enter(one)
    ledger.leave(one)
    ledger.enter(one)
    assert ledger.open(one) == ledger.open(two) == 1


async def test_ten_thousand_windows_that_nobody_reads_the_answers_to():
    """The flood is cut off or slowed down; a neighbour doesn't notice, and nothing stays."""
    async with pair() as edge:
        alone = (await edge.generate("hello", max_tokens=60)).token_ids
    with LiveCloud(Watched(slots=4)) as cloud:
        async with raw_client(cloud.url) as flood, Edge(cloud.url, draft()) as edge:
            for request in range(1, 200):
                await flood.send(msgspec.structs.replace(opening(max_tokens=4), request=request))
            task = asyncio.create_task(pour(flood, 10_000))
            assert (await edge.generate("hello", max_tokens=60)).token_ids == alone
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            flood.vanish()
        cloud.check()


async def pour(client, n):
    ids = pack_ids([100, 101, 102])
    for i in range(n):
        window = Window(request=1 + i % 199, branch=0, start=len(PROMPT), ids=ids)
        await client.send(window)


@pytest.mark.parametrize(("sent", "cut"), [(2, False), (3, False), (40, True)])
async def test_messages_left_unread(sent, cut):
    """Three may be on their way; beyond, and with the socket full, the connection ends."""
    far = Watched()
    async with pair(target_engine=far, limits=Limits(unread=3)) as edge:
        here, there = memory_pair()
        connection = _Connection(edge.cloud, there, Client())
        connection._post([Opened(request=i, limit=1) for i in range(sent)])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert here._inbox.empty() is not cut
        await here.close()
