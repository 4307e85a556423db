"""Many edges on one cloud: each gets what it would get alone, none waits for good, none pays for
another's mistakes."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from e2sci.engines.base import fingerprint
from e2sci.engines.synthetic import EOS, Synthetic, SyntheticConfig
from e2sci.runtime.admission import Client, Ledger, Limits
from e2sci.runtime.cloud import Cloud
from e2sci.runtime.connection import Refused
from e2sci.runtime.passes import PassTimes
from e2sci.runtime.text import template_print
from e2sci.runtime.transport import memory_pair
from e2sci.session.messages import (
    Error,
    Hello,
    ProtocolError,
    Window,
    decode_message,
    encode_message,
)
from live import TIMES, Edge, Watched, draft, idle, pair, target, until
from world import PROMPT, opening

ENDLESS = {"logit_bias": {EOS: -100.0}}
CROWDED = PassTimes(((1, 10.0), (16, 100.0), (64, 1000.0)))  # a pass has room for 16 tokens


@asynccontextmanager
async def crowd(n, far=None, *, near=draft, client=None, times=TIMES, patience=0.0, **options):
    """A cloud and `n` edges, each with an engine and a connection of its own."""
    async with AsyncExitStack() as stack:
        cloud = await stack.enter_async_context(Cloud(far or target(), times=times, **options))

        def dialer(i):
            async def dial():
                here, there = memory_pair()
                task = asyncio.create_task(cloud.serve(there, client and client(i)))
                stack.callback(task.cancel)
                return here

            return dial

        edges = [
            await stack.enter_async_context(Edge(dialer(i), near(), patience=patience))
            for i in range(n)
        ]
        yield cloud, edges
        await idle(cloud)


def request(i):
    """A mixed lot: lengths, greedy and sampled, modes, rules, windows."""
    sampled = {"temperature": 0.8, "seed": i} if i % 2 else {}
    modes = ({}, {"mode": "sync"}, {"mode": "cloud"}, {"fill": False})
    window = {} if i % 4 == 2 else {"window": 1 + i % 7}
    return f"number {i}" * (1 + i % 5), {
        "max_tokens": 10 + 7 * i % 90,
        **sampled,
        **modes[i % 4],
        **window,
    }


@pytest.fixture(scope="module")
def solo_texts():
    """Of all requests, each alone with the cloud."""

    async def write():
        async with pair() as edge:
            requests = map(request, range(64))
            return [(await edge.generate(p, **o)).token_ids for p, o in requests]

    return asyncio.run(write())


@pytest.mark.parametrize("slots", [64, 16, 3])
async def test_sixty_four_edges_get_what_they_would_get_alone(slots, solo_texts):
    """Also where most of them have to wait for a place."""
    far = Watched(slots=slots)
    async with crowd(64, far) as (_, edges):
        jobs = [
            edge.generate(p, **o)
            for edge, (p, o) in zip(edges, map(request, range(64)), strict=True)
        ]
        results = await asyncio.gather(*jobs)
    assert [r.token_ids for r in results] == solo_texts


async def test_in_any_stretch_all_progress_alike():
    """Passes have room for a quarter of the crowd; in every thirty of them everyone is served, and
    nobody three times as often as another."""
    far = Watched()
    async with crowd(64, far, times=CROWDED) as (cloud, edges):
        options = {"mode": "cloud", "max_tokens": 4000, **ENDLESS}
        tasks = [asyncio.create_task(e.generate("go", **options)) for e in edges]
        await until(lambda: cloud.scheduler.busy == 64 and len(far.passes) > 300, 60)
        stretches = [far.passes[at : at + 30] for at in range(120, 300, 30)]
        for stretch in stretches:
            served = [sum(s in p for p in stretch) for s in range(64)]
            assert min(served) >= 1
            assert max(served) <= 3 * min(served)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_with_many_requests_does_not_crowd_one_with_few_out():
    far = Watched()
    names = ["big"] * 40 + ["small"]
    async with crowd(41, far, times=CROWDED, client=lambda i: Client(names[i])) as (cloud, edges):
        options = {"mode": "cloud", "max_tokens": 4000, **ENDLESS}
        tasks = [asyncio.create_task(e.generate("go", **options)) for e in edges]
        await until(lambda: cloud.scheduler.busy == 41 and len(far.passes) > 200, 60)
        [small] = [s.sequence for s in cloud.scheduler._seats if s.owner == "small"]
        assert all(small in p for p in far.passes[150:200])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- places -----------------------------------------------------------------------------------


async def test_a_silent_client_gives_its_place_up_and_goes_on_later():
    """One place, two requests: while the first edge's draft hangs, the second is answered; then the
    first goes on with its text, which is fed anew."""
    hung = threading.Event()
    near = [Watched(draft().config, hook=lambda n: n == 9 and hung.wait(20)), draft()]
    far = Watched(slots=1)
    async with pair() as edge:
        alone = (await edge.generate("again", max_tokens=40, **ENDLESS)).token_ids
    make = iter(near).__next__
    async with crowd(2, far, near=make, limits=Limits(quiet_s=0.02)) as (cloud, [slow, quick]):
        task = asyncio.create_task(slow.generate("again", fill=False, max_tokens=40, **ENDLESS))
        await until(lambda: len(near[0].passes) == 9)
        assert (await quick.generate("other", max_tokens=20)).token_ids
        assert not task.done()
        hung.set()
        assert (await task).token_ids == alone
        assert cloud.metrics.evictions._value.get() == 1


async def test_who_is_at_work_keeps_its_place():
    """A third has to wait until one of the two is done, not quiet for the moment."""
    far = Watched(slots=2, seconds=0.002)
    async with crowd(3, far, limits=Limits(quiet_s=0.05)) as (cloud, edges):
        texts = [e.generate(f"n{i}", max_tokens=60, **ENDLESS) for i, e in enumerate(edges)]
        results = await asyncio.gather(*texts)
        assert all(len(r.token_ids) == 60 for r in results)
        assert cloud.metrics.evictions._value.get() == 0


@pytest.mark.parametrize(("waiting", "refused"), [(2, 1), (3, 0), (4, 0)])
async def test_the_line_has_an_end(waiting, refused):
    """One at work and three more."""
    far = Watched(slots=1, seconds=0.002)
    async with crowd(4, far, limits=Limits(waiting=waiting)) as (cloud, edges):
        options = {"mode": "cloud", "max_tokens": 60, **ENDLESS}
        first = asyncio.create_task(edges[0].generate("first", **options))
        await until(lambda: cloud.scheduler.busy)
        clients = [memory_pair() for _ in range(3)]
        serving = [asyncio.create_task(cloud.serve(there)) for _, there in clients]
        said = []
        for here, _ in clients:
            await here.send(encode_message(hello_of(cloud.engine)))
            await here.receive()
            await here.send(encode_message(opening(drafting=False, max_tokens=5)))
        for here, _ in clients:
            said.append(decode_message(await here.receive()))
        assert [m.code for m in said if isinstance(m, Error)] == ["busy"] * refused
        assert all(m.retry_after_s > 0 for m in said if isinstance(m, Error))
        for here, _ in clients:
            await here.close()
        await asyncio.gather(first, *serving)


# ---- limits of a client -----------------------------------------------------------------------


@pytest.mark.parametrize(("sessions", "refused"), [(1, 2), (2, 1), (3, 0), (4, 0)])
async def test_requests_of_a_key_at_once(sessions, refused):
    far = Watched(seconds=0.005)
    who = Client("acme", sessions=sessions)
    async with crowd(3, far, client=lambda _: who) as (_, edges):
        jobs = [e.generate("go", mode="cloud", max_tokens=20, **ENDLESS) for e in edges]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        errors = [r for r in results if isinstance(r, Refused)]
        assert [e.code for e in errors] == ["limited"] * refused
        await edges[0].generate("go", mode="cloud", max_tokens=3)  # and then there is room again


def test_tokens_of_a_key_a_minute():
    """What was used is paid behind: the request that overdraws is served, the next one waits."""
    clock = [0.0]
    ledger = Ledger(lambda: clock[0])
    who = Client("acme", tokens_per_minute=600)
    for used, fine in [(599, True), (1, True), (1, True)]:  # below, at, and above
        ledger.enter(who)
        ledger.leave(who)
        ledger.charge(who, used)
        assert fine
    with pytest.raises(ProtocolError, match="600 tokens a minute") as error:
        ledger.enter(who)
    assert error.value.retryable
    assert error.value.retry_after_s == pytest.approx(0.1)
    clock[0] = 0.11
    ledger.enter(who)
    ledger.enter(Client("other", tokens_per_minute=1))  # another's use is not its own


@pytest.mark.parametrize(("context", "fits"), [(20, False), (21, True), (22, True)])
async def test_the_context_of_a_key(context, fits):
    """A prompt of twenty tokens."""
    async with crowd(1, client=lambda _: Client("acme", context=context)) as (_, [edge]):
        going = edge.generate("x" * 20, raw=True, mode="cloud", max_tokens=50, **ENDLESS)
        if fits:
            assert len((await going).token_ids) == context - 20
        else:
            with pytest.raises(Refused, match="context holds 20"):
                await going


# ---- what a hostile edge costs ----------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"window": 8}, {"fill": False}, {"mode": "sync", "window": 16}], ids=str
)
async def test_drafts_that_are_always_wrong_cost_a_tenth_at_most(options):
    """Counted in tokens fed to the target, against the cloud alone; two requests."""

    async def fed(**options):
        far = Watched(seconds=0.001)
        async with crowd(1, far, near=lambda: Synthetic(SyntheticConfig(seed=11, random=True))) as (
            _,
            [edge],
        ):
            for i in range(2):
                await edge.generate(f"n{i}", max_tokens=250, **ENDLESS, **options)
            return sum(sum(p.values()) for p in far.passes)

    alone = await fed(mode="cloud")
    assert await fed(**options) <= 1.1 * alone


async def test_good_drafts_are_not_held_back():
    """The bound is for drafts in vain: with the target itself as draft nothing is."""
    far = Watched()
    async with crowd(1, far, near=target) as (_, [edge]):
        result = await edge.generate("hello", max_tokens=198, mode="sync", window=8, **ENDLESS)
        assert result.stats.corrections == 0
        assert result.stats.cloud_passes == 1 + 198 / 9  # the prompt, then 8 + 1 a pass


async def test_a_flood_of_windows_is_read_no_faster_than_allowed():
    """Two hundred of a dead branch, at forty a second: the flood waits, the neighbour doesn't."""
    limits = Limits(messages_per_s=40)
    async with crowd(1, limits=limits) as (cloud, [edge]):
        here, there = memory_pair()
        task = asyncio.create_task(cloud.serve(there))
        await here.send(encode_message(hello_of(cloud.engine)))
        await here.receive()
        await here.send(encode_message(opening(fill=False, max_tokens=50)))
        stale = Window(request=1, branch=0, start=len(PROMPT), ids=bytes([1, 2, 3]))
        for _ in range(2000):
            await here.send(encode_message(stale))
        assert len((await edge.generate("hi", max_tokens=20, **ENDLESS)).token_ids) == 20
        assert there._inbox.qsize() > 1000
        await here.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ---- the end ----------------------------------------------------------------------------------


async def test_draining_lets_requests_end_and_takes_no_more():
    far = Watched(seconds=0.002)
    async with crowd(2, far) as (cloud, [one, _]):
        task = asyncio.create_task(one.generate("go", max_tokens=40, **ENDLESS))
        await until(lambda: cloud.scheduler.busy)
        draining = asyncio.create_task(cloud.drain(20))
        await until(lambda: cloud.draining)
        here, there = memory_pair()
        serving = asyncio.create_task(cloud.serve(there))
        await here.send(encode_message(hello_of(cloud.engine)))
        await here.receive()
        await here.send(encode_message(opening()))
        error = decode_message(await here.receive())
        assert (error.code, error.retryable) == ("draining", True)
        await here.close()
        assert await draining
        assert len((await task).token_ids) == 40
        await serving


async def test_draining_ends_when_time_is_over():
    far = Watched(seconds=0.01)
    async with crowd(1, far) as (cloud, [edge]):
        task = asyncio.create_task(edge.generate("go", mode="cloud", max_tokens=4000, **ENDLESS))
        await until(lambda: cloud.scheduler.busy)
        assert not await cloud.drain(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_connection_without_requests_is_closed_after_a_while():
    async with crowd(1, limits=Limits(idle_s=0.05)) as (cloud, [edge]):
        here, there = memory_pair()
        task = asyncio.create_task(cloud.serve(there))
        await here.send(encode_message(hello_of(cloud.engine)))
        await here.receive()
        error = decode_message(await here.receive())
        assert (error.code, error.request) == ("idle", 0)
        await task
        far = cloud.engine
        far.seconds = 0.0
        result = await edge.generate("go", mode="cloud", max_tokens=100, **ENDLESS)
        assert len(result.token_ids) == 100  # longer than that, but not without a request


# ---- nothing adds up --------------------------------------------------------------------------


async def test_requests_leave_nothing_behind():
    """As many objects after six hundred as after a hundred; `benchmarks/load.py` has the long run,
    in bytes."""
    async with crowd(4) as (_, edges):

        async def some(n):
            for i in range(n // 4):
                options = {"temperature": 1.0, "seed": i % 8} if i % 2 else {}
                jobs = [e.generate("hi", raw=True, max_tokens=2, **options) for e in edges]
                await asyncio.gather(*jobs)
            gc.collect()
            return len(gc.get_objects())

        early = await some(100)
        late = await some(500)
        assert late <= 1.01 * early


def hello_of(engine):
    """The first frame of an edge with the same vocabulary."""
    n = engine.info.real_vocab
    return Hello(
        model="raw",
        real_vocab=n,
        fingerprint=fingerprint(engine).at(n),
        template=template_print(engine.info),
    )
